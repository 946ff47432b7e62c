"""The loss against torch's cross_entropy in fp32."""

from __future__ import annotations

import math
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from streampack import IterablePackedDataset, PackedDataset, collate_packed, method_loader
from streampack.losses import (
    label_weights,
    loss_terms,
    summed_cross_entropy,
    token_losses,
)
from streampack.map_style.methods import METHODS
from streampack.packing.batch import Batch
from streampack.types import IGNORE_INDEX

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
# The order of summation differs; in bf16 both round the gradient once, from fp32.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 4e-3}


def naive_loss(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    logits = logits if logits.dtype == torch.float64 else logits.float()
    losses = F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE_INDEX, reduction="none"
    )
    return (losses if weights is None else losses * weights[:, 1:].flatten()).sum()


def example(
    batch: int, seq: int, vocab: int, *, dtype: torch.dtype = torch.float32, ignored: float = 0.4
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(batch * 10_000 + seq * 100 + vocab)
    logits = (3 * torch.randn(batch, seq, vocab, generator=generator)).to(dtype).requires_grad_()
    labels = torch.randint(vocab, (batch, seq), generator=generator)
    labels[torch.rand(batch, seq, generator=generator) < ignored] = IGNORE_INDEX
    return logits, labels


def grad_of(loss: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    (grad,) = torch.autograd.grad(loss, logits)
    return grad


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("chunk_size", [1, 7, 512])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5, 2), (2, 16, 130)], ids=str)
def test_the_loss_matches_torchs_on_shifted_labels(
    shape: tuple[int, int, int], dtype: torch.dtype, chunk_size: int
) -> None:
    logits, labels = example(*shape, dtype=dtype)
    ours, theirs = summed_cross_entropy(logits, labels, chunk_size=chunk_size), naive_loss(logits, labels)
    assert ours.shape == ()
    assert ours.dtype == theirs.dtype
    assert difference(ours, theirs) < TOLERANCE[torch.float32 if dtype == torch.bfloat16 else dtype]
    assert difference(grad_of(ours, logits), grad_of(theirs, logits)) < TOLERANCE[dtype]


def test_chunks_of_unequal_length_find_their_labels() -> None:
    logits, labels = example(2, 10, 17, ignored=0)
    whole, parts = naive_loss(logits, labels), summed_cross_entropy(logits.split([1, 6, 0, 3], 1), labels)
    assert difference(grad_of(parts, logits), grad_of(whole, logits)) < 1e-6


@pytest.mark.parametrize("chunk_size", [4, 512])
def test_weights_multiply_each_tokens_loss(chunk_size: int) -> None:
    logits, labels = example(2, 13, 19)
    weights = torch.rand(2, 13, generator=torch.Generator().manual_seed(1))
    weights[0, 5:9] = 0
    ours = summed_cross_entropy(logits, labels, weights=weights, chunk_size=chunk_size)
    theirs = naive_loss(logits, labels, weights)
    assert difference(ours, theirs) < 1e-6
    expected = grad_of(theirs, logits)
    assert difference(grad_of(ours, logits), expected) < 1e-6
    # The weight of token i goes with label i, not with the logits at i.
    shifted_once_more = naive_loss(logits, labels, weights.roll(1, 1))
    assert difference(grad_of(shifted_once_more, logits), expected) > 0.1


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.float64, 1e-13)])
def test_squares_of_the_normalizer_and_their_gradient(dtype: torch.dtype, limit: float, parts: int) -> None:
    logits, labels = example(2, 13, 19, dtype=dtype)
    weights = torch.rand(2, 13, generator=torch.Generator().manual_seed(1), dtype=dtype)
    weights[0, 5:9] = 0
    losses, squares = loss_terms(logits.chunk(parts, 1), labels, weights=weights, chunk_size=5)
    counted = torch.where(labels[:, 1:] == IGNORE_INDEX, 0, weights[:, 1:])
    naive = F.pad(counted * logits[:, :-1].logsumexp(-1).square(), (1, 0))
    assert difference(squares, naive) < limit
    ours = grad_of(0.5 * losses.sum() + 0.1 * squares.sum(), logits)
    theirs = grad_of(0.5 * naive_loss(logits, labels, weights) + 0.1 * naive.sum(), logits)
    assert difference(ours, theirs) < limit
    assert difference(ours, grad_of(naive_loss(logits, labels, weights), logits)) > 0.01


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_batch_without_trained_tokens_is_exactly_zero(dtype: torch.dtype) -> None:
    logits, labels = example(2, 9, 11, dtype=dtype, ignored=1)
    loss = summed_cross_entropy(logits, labels)
    assert loss.item() == 0
    assert not grad_of(loss, logits).any()
    # The first label of a row counts nothing either: nothing predicts it.
    labels[:, 0] = 3
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


class LiveBytes(TorchDispatchMode):
    """Records the peak bytes of new fp32 tensors of more than ``over`` elements."""

    def __init__(self, *, over: int) -> None:
        super().__init__()
        self.over, self.live, self.peak = over, 0, 0
        self.known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
            storage = result.untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
            if size > 4 * self.over and address not in self.known:
                self.known.add(address)
                self.live += size
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self.free, address, size)
        return result

    def free(self, address: int, size: int) -> None:
        self.known.discard(address)
        self.live -= size


def fp32_peak(loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> float:
    """Measure the peak memory in fp32 copies of the logits."""
    logits, labels = example(2, 256, 64, dtype=torch.bfloat16)
    with LiveBytes(over=512) as mode:  # one or two numbers per token do not count
        loss(logits, labels).backward()
    return mode.peak / (4 * logits.numel())


def test_no_fp32_copy_of_all_logits_exists() -> None:
    assert fp32_peak(lambda x, y: summed_cross_entropy(x, y, chunk_size=32)) <= 3 * 32 / 512
    assert fp32_peak(naive_loss) >= 2  # the copy and its log-softmax


# torch's tracer instantiates the Function, of which torch warns.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_the_loss_compiles_without_a_graph_break() -> None:
    logits, labels = example(2, 9, 11)
    compiled = torch.compile(summed_cross_entropy, fullgraph=True, backend="eager")
    ours, plain = compiled(logits, labels, chunk_size=5), summed_cross_entropy(logits, labels, chunk_size=5)
    assert difference(ours, plain) < 1e-6
    assert difference(grad_of(ours, logits), grad_of(plain, logits)) < 1e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.zeros(2, 8).long()}, r"labels have shape \[2, 8\] .* \[2, 9\]; .* one per token"),
        ({"labels": torch.zeros(18).long()}, r"labels have shape \[18\] and the logits are for \[2, 9\]"),
        (
            {"weights": torch.ones(2, 8)},
            r"weights have shape \[2, 8\] .* \[2, 9\]; give one weight per label",
        ),
        ({"chunk_size": 0}, "chunk_size=0 is below 1; give at least 1"),
    ],
)
def test_bad_arguments(change: dict[str, Any], message: str) -> None:
    logits, labels = example(2, 9, 11)
    with pytest.raises(ValueError, match=message):
        summed_cross_entropy(**{"logits": logits, "labels": labels, **change})


def test_an_unknown_norm_is_refused() -> None:
    batch = collate_packed(list(IterablePackedDataset([{"input_ids": [1, 2]}], max_seq_len=4)))
    with pytest.raises(ValueError, match="loss_norm='pack' is unknown; choose one of 'token', 'sample'"):
        label_weights(batch, loss_norm="pack")


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
