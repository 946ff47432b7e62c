"""The loss against torch's cross_entropy in fp32."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from streampack import Batch, IterablePackedDataset, PackedDataset, collate_packed, method_loader
from streampack.losses import (
    label_weights,
    loss_terms,
    summed_cross_entropy,
    token_losses,
)
from streampack.types import IGNORE_INDEX

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
# The order of summation differs; in bf16 both round the gradient once, from fp32.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 4e-3}


def naive_terms(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighed loss of each label and the squared normalizer of its logits, those of the token before it."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    losses = F.cross_entropy(
        logits[:, :-1].transpose(1, 2), labels[:, 1:], ignore_index=IGNORE_INDEX, reduction="none"
    )
    counted = torch.where(labels[:, 1:] == IGNORE_INDEX, 0, weights[:, 1:])
    squares = counted * logits[:, :-1].logsumexp(-1).square()
    return F.pad(losses * weights[:, 1:], (1, 0)), F.pad(squares, (1, 0))


def example(
    batch: int, seq: int, vocab: int, *, dtype: torch.dtype = torch.float32, ignored: float = 0.4
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(batch * 10_000 + seq * 100 + vocab)
    logits = (3 * torch.randn(batch, seq, vocab, generator=generator)).to(dtype).requires_grad_()
    labels = torch.randint(vocab, (batch, seq), generator=generator)
    labels[torch.rand(batch, seq, generator=generator) < ignored] = IGNORE_INDEX
    return logits, labels


def grad_of(loss: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    (grad,) = torch.autograd.grad(loss, logits, retain_graph=True)
    return grad


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk_size", [1, 7, 512])
@pytest.mark.parametrize("parts", [None, [16], [1, 9, 0, 6]], ids=["one tensor", "a part", "parts"])
@pytest.mark.parametrize("weighed", [False, True])
def test_losses_and_gradients_are_torchs_on_shifted_labels(
    dtype: torch.dtype, chunk_size: int, parts: list[int] | None, weighed: bool
) -> None:
    """Of logits as one tensor and in chunks; the weight of token i goes with label i, not with the logits at i."""
    logits, labels = example(2, 16, 130, dtype=dtype)
    weights = None
    ones = torch.ones(labels.shape, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    if weighed:
        weights = torch.rand(2, 16, generator=torch.Generator().manual_seed(1), dtype=ones.dtype)
        weights[0, 5:9] = 0
    given = logits if parts is None else logits.split(parts, 1)
    losses, squares = loss_terms(given, labels, weights=weights, chunk_size=chunk_size)
    naive = naive_terms(logits, labels, ones if weights is None else weights)
    limit = TOLERANCE[torch.float32 if dtype == torch.bfloat16 else dtype]
    for ours, theirs in zip((losses, squares), naive, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert difference(ours, theirs) < limit
    total = summed_cross_entropy(given, labels, weights=weights, chunk_size=chunk_size)
    for ours, theirs in (
        (total, naive[0].sum()),
        (0.5 * losses.sum() + 0.1 * squares.sum(), 0.5 * naive[0].sum() + 0.1 * naive[1].sum()),
    ):
        assert difference(grad_of(ours, logits), grad_of(theirs, logits)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("first", [IGNORE_INDEX, 3], ids=["no label", "the first label of a row"])
def test_a_batch_without_trained_tokens_is_exactly_zero(dtype: torch.dtype, first: int) -> None:
    """Nothing predicts the first label of a row."""
    logits, labels = example(2, 9, 11, dtype=dtype, ignored=1)
    labels[:, 0] = first
    loss = summed_cross_entropy(logits, labels)
    assert loss.item() == 0
    assert not grad_of(loss, logits).any()


def test_untrained_tokens_count_nothing_even_where_logits_are_not_finite() -> None:
    logits, labels = example(1, 6, 11, ignored=0)
    labels[0, 3:] = IGNORE_INDEX
    clean = summed_cross_entropy(logits, labels)
    broken = logits.detach().clone()
    broken[0, 2, 4], broken[0, 3], broken[0, 4, 1], broken[0, 5] = 50.0, torch.nan, torch.inf, -torch.inf
    loss = summed_cross_entropy(broken.requires_grad_(), labels)
    assert loss.item() == clean.item()
    assert torch.equal(grad_of(loss, broken), grad_of(clean, logits))


def test_logits_of_any_size_are_finite() -> None:
    logits = torch.tensor([[[1e4, -1e4, 0.0], [-torch.inf, 2.0, 2.0], [0.0, 0.0, 0.0]]], requires_grad=True)
    labels = torch.tensor([[-100, 1, 2]])
    loss = summed_cross_entropy(logits, labels)
    assert loss.item() == pytest.approx(2e4 + torch.log(torch.tensor(2.0)).item())
    assert grad_of(loss, logits)[0].tolist() == [[1, -1, 0], [0, 0.5, -0.5], [0, 0, 0]]


class Largest(TorchDispatchMode):
    """Notes the largest fp32 tensor that is made."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
            self.size = max(self.size, result.untyped_storage().nbytes() // 4)
        return result


def test_no_fp32_copy_of_all_logits_exists() -> None:
    logits, labels = example(2, 256, 64, dtype=torch.bfloat16)
    with Largest() as ours:
        summed_cross_entropy(logits, labels, chunk_size=32).backward()
    with Largest() as theirs:
        naive_terms(logits, labels, torch.ones(labels.shape))[0].sum().backward()
    assert ours.size <= logits.numel() / 16
    assert theirs.size >= logits.numel() * 255 / 256


# torch's tracer instantiates the Function, of which torch warns.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_the_loss_compiles_without_a_graph_break() -> None:
    logits, labels = example(2, 9, 11)
    compiled = torch.compile(summed_cross_entropy, fullgraph=True, backend="eager")
    ours, plain = compiled(logits, labels, chunk_size=5), summed_cross_entropy(logits, labels, chunk_size=5)
    assert difference(ours, plain) < 1e-6
    assert difference(grad_of(ours, logits), grad_of(plain, logits)) < 1e-6


def test_the_compiled_loss_is_the_same_and_compiles_once_for_all_lengths(monkeypatch: Any) -> None:
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "eager")
    torch.compiler.reset()
    graphs = []
    for length in (9, 12, 7, 20, 31, 24, 16, 5, 40):
        logits, labels = example(2, length, 11)
        both = [loss_terms(logits, labels, chunk_size=6, compiled=how)[0].sum() for how in (True, False)]
        assert difference(*both) < 1e-6
        assert difference(*(grad_of(loss, logits) for loss in both)) < 1e-6
        graphs.append(counters["stats"]["unique_graphs"])
    # Two functions: for the first length, then for all.
    assert 2 <= graphs[0] < graphs[2] == graphs[-1] <= graphs[0] + 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.zeros(2, 8).long()}, r"labels have shape \[2, 8\] .* \[2, 9\]; .* one per token"),
        ({"labels": torch.zeros(18).long()}, r"labels have shape \[18\] and the logits are for \[2, 9\]"),
        ({"weights": torch.ones(2, 8)}, r"weights have shape \[2, 8\] .* give one weight per label"),
        ({"chunk_size": 0}, "chunk_size=0 is below 1; give at least 1"),
    ],
)
def test_bad_arguments(change: dict[str, Any], message: str) -> None:
    logits, labels = example(2, 9, 11)
    with pytest.raises(ValueError, match=message):
        summed_cross_entropy(**{"logits": logits, "labels": labels, **change})


# With loss_norm "sample", every sample weighs 1 with every way of making packs.


def samples_of(count: int) -> list[dict[str, list[int]]]:
    """Make samples of 1 to 40 tokens; a third trains its first label, and a few train none."""
    rows = []
    for i in range(count):
        tokens = [1 + i % 90] * (1 + i * 17 % 40)
        labels = [token if (i + place) % 3 else IGNORE_INDEX for place, token in enumerate(tokens)]
        rows.append({"tokens": tokens, "labels": labels if i % 11 else [IGNORE_INDEX] * len(tokens)})
    return rows


STREAMED: dict[str, dict[str, Any]] = {
    "split": {"overlong": "split"},
    "split, 3 lanes": {"overlong": "split", "strategy": "next_fit", "num_lanes": 3},
    "split, padded": {"overlong": "split", "pad_seqs_to": 4},
    "across, padded": {"split_across_pack": True, "pad_seqs_to": 4},
    "truncate": {"overlong": "truncate"},
    "drop": {"overlong": "drop"},
}
METHODS = (
    *("random_padding", "group_by_length_padding", "minibatch_packing", "fixed_length", "fixed_length_posid"),
    *("multipack", "sorted_packing", "random_packing", "exact_fit"),
)
WAYS = ["parity", "parity, split", "wrapped", *STREAMED, *METHODS]


def batches_made_by(way: str, rows: list[Any]) -> list[Batch]:
    if way in STREAMED:
        packs = IterablePackedDataset(rows, max_seq_len=16, **STREAMED[way])
        return list(DataLoader(packs, batch_size=2, collate_fn=collate_packed))
    if way.startswith("parity"):
        limit, split = (16, True) if way == "parity, split" else (40, False)
        packs = PackedDataset(rows, max_seq_len=limit, split_across_pack=split, parity="torchtune")
        return [collate_packed([packs[i]]) for i in range(len(packs))]
    if way == "wrapped":
        return [collate_packed([p]) for p in PackedDataset(rows, max_seq_len=16, split_across_pack=True)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # `fixed_length` says that it leaks
        overlong = None if way.startswith("fixed_length") else "split"
        return list(method_loader(rows, method=way, max_seq_len=16, batch_size=2, overlong=overlong))


@pytest.mark.parametrize("way", WAYS)
def test_a_sample_weighs_one_however_it_is_cut(way: str) -> None:
    by_sample: dict[int, list[float]] = defaultdict(list)
    counted = expected = 0
    for batch in batches_made_by(way, samples_of(60)):
        weights, ones = (label_weights(batch, loss_norm=norm) for norm in ("sample", "token"))
        assert torch.equal(weights > 0, ones > 0)
        assert set(ones.unique().tolist()) <= {0, 1}
        assert ones.sum() == batch.num_trained
        losses = token_losses(torch.zeros(1).expand(*batch.labels.shape, 100), batch.labels, weights=ones)
        counted += round(float(losses.sum()) / math.log(100))
        expected += int(ones.sum())
        for row, fragments in zip(weights, batch.fragments, strict=True):
            start = 0
            for fragment in fragments:
                stop = start + fragment.stop - fragment.start
                by_sample[fragment.row_id[0]] += row[start:stop].tolist()
                assert not row[stop : stop + fragment.padding].any()
                start = stop + fragment.padding
            assert not row[start:].any()
    assert counted == expected, "the loss has no logits for a row's first label"
    trained = {number: values for number, values in by_sample.items() if any(values)}
    assert len(trained) > (10 if way == "drop" else 40)
    assert {number: round(sum(values), 6) for number, values in trained.items()} == dict.fromkeys(trained, 1)
    assert all(len(set(values) - {0}) == 1 for values in trained.values()), "its tokens weigh the same"
