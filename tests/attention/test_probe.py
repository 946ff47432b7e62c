"""The leak probe finds leaks, accepts correct models, and has no side effects."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from streampack import Batch, IterablePackedDataset, collate_packed, find_leaks
from streampack.attention import document_ids
from streampack.attention.report import CAUSES, WAY_OUT
from streampack.packing.batch import null_pack, to_torchtune
from tests.harness.isolation import MAX_SEQ_LEN, VOCAB, stream_and_batch

Mask = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (places, document ids) -> [b, L, L] bool


class OneLayer(nn.Module):
    """Embedding, learned positions, dropout, and one attention under a given mask."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.tokens, self.positions = nn.Embedding(VOCAB, 16), nn.Embedding(256, 16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, VOCAB)
        self.dropout = nn.Dropout(0.5)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5, generator=generator)
        self.mask = mask

    def forward(self, batch: Batch) -> torch.Tensor:
        hidden = self.dropout(self.tokens(batch.tokens) + self.positions(batch.input_pos))
        q, k, v = self.qkv(hidden).chunk(3, -1)
        ids = document_ids(batch.seq_lens, max_seq_len=batch.tokens.shape[1])
        seen = self.mask(torch.arange(ids.shape[1]), ids)
        output: torch.Tensor = self.out(hidden + F.scaled_dot_product_attention(q, k, v, attn_mask=seen))
        return output


def same(ids: torch.Tensor) -> torch.Tensor:
    return ids[:, :, None] == ids[:, None, :]


def past(places: torch.Tensor) -> torch.Tensor:
    return places[:, None] >= places


def right(places: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return same(ids) & past(places)


def no_boundaries(places: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return past(places).expand(len(ids), -1, -1)


def a_token_late(places: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return right(places, F.pad(ids, (1, 0))[:, :-1])


def a_token_early(places: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return right(places, torch.cat([ids[:, 1:], ids[:, -1:]], 1))


def both_ways(places: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(same(ids))


def padding_seen(places: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return right(places, ids) | (ids == ids.max())[:, None, :]


# Sample 1 has one token, so a shift by one moves it as a whole.
LEAKS = [
    (no_boundaries, "all", {(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)}),
    (a_token_late, "neighbour", {(0, 1), (2, 3)}),
    (a_token_early, "neighbour", {(1, 2), (2, 3)}),
    (both_ways, "backward", {(a, b) for a in range(4) for b in range(4) if a != b}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("mask", "cause", "pairs"), LEAKS)
def test_leaks_are_found(mask: Mask, cause: str, pairs: set[tuple[int, int]], dtype: torch.dtype) -> None:
    report = find_leaks(OneLayer(mask).to(dtype))
    found = {(leak.source, leak.sample) for leak in report.leaks if leak.kind == "sample"}
    # In bf16, one token among a hundred is below rounding; the other pairs suffice.
    assert found == pairs if dtype != torch.bfloat16 else found & pairs
    assert report.cause == CAUSES[cause]
    assert not report.ok


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("max_seq_len", [8, 50, 256])
def test_a_correct_model_passes(dtype: torch.dtype, max_seq_len: int) -> None:
    report = find_leaks(OneLayer(right).to(dtype), max_seq_len=max_seq_len)
    assert report.ok, report
    assert report.worst < report.limit / 2
    assert not report.blind or max_seq_len == 8
    assert sum(report.lengths) < max_seq_len or max_seq_len == 8
    assert 1 in report.lengths


class RunningOn(OneLayer):
    def forward(self, batch: Batch) -> torch.Tensor:
        positions = torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens)
        return super().forward(Batch(batch.tokens, batch.labels, positions, batch.seq_lens, batch.fragments))


class LeakyInTraining(OneLayer):
    """Leaks in training mode only, as fused kernels may."""

    def forward(self, batch: Batch) -> torch.Tensor:
        self.mask = no_boundaries if self.training else right
        return super().forward(batch)


def noisy() -> Callable[[Batch], torch.Tensor]:
    calls = iter(range(100))
    return lambda batch: F.one_hot(batch.tokens + next(calls), 200).double()


OTHER_LEAKS: list[tuple[Callable[[], Any], set[str], str | None]] = [
    (lambda: OneLayer(padding_seen), {"padding", "alone"}, "padding"),
    (lambda: RunningOn(right), {"alone"}, "alone"),  # nothing leaks: only samples alone show it
    (lambda: LeakyInTraining(right), {"sample"}, "all"),
    (noisy, {"noise"}, "noise"),
    (lambda: lambda batch: batch.tokens[..., None].double().log().log(), {"sample"}, None),  # NaN
]


@pytest.mark.parametrize(
    ("make", "kinds", "cause"), OTHER_LEAKS, ids=["padding", "alone", "training", "noise", "nan"]
)
def test_other_leaks_are_found(make: Callable[[], Any], kinds: set[str], cause: str | None) -> None:
    report = find_leaks(make(), vocab_size=VOCAB)
    assert not report.ok
    if cause is None:
        assert report.worst == float("inf")
        return
    assert {leak.kind for leak in report.leaks} == kinds
    assert report.cause == CAUSES[cause]
    if cause == "all":
        assert all(leak.training for leak in report.leaks)
        assert " in training mode\n" in str(report)
    if cause == "alone":
        assert {leak.sample for leak in report.leaks} == {1, 2, 3}, "the first sample begins at 0"


def test_the_text_of_a_report() -> None:
    lines = str(find_leaks(OneLayer(a_token_late))).splitlines()
    assert lines[0].endswith("a pack of 4 samples (76, 1, 102, 51 tokens), where logits may move by 0.0001:")
    assert any(line.startswith("  changing sample 0 moved sample 1 by ") for line in lines)
    assert any(line.startswith("  sample 1 differs from itself alone by ") for line in lines)
    assert lines[-2:] == [f"likely cause: {CAUSES['neighbour']}", WAY_OUT]
    text = str(find_leaks(OneLayer(right)))
    assert text.startswith("no leak in a pack of 4 samples (76, 1, 102, 51 tokens); logits moved by ")


def test_a_model_in_which_leaks_cannot_show_is_reported_as_blind() -> None:
    """A model with attention weights of zero passes every comparison, and the report says so."""
    model = OneLayer(no_boundaries)
    assert not find_leaks(model).blind
    nn.init.zeros_(model.qkv.weight.data[32:])
    nn.init.zeros_(model.qkv.bias.data[32:])
    report = find_leaks(model)
    assert report.ok
    assert report.blind
    assert "but tokens do not see those of their own sample either" in str(report)
    nn.init.zeros_(model.out.weight)
    nn.init.zeros_(model.out.bias)
    with pytest.raises(ValueError, match="all logits of the model are 0, so nothing shows"):
        find_leaks(model)


def test_the_first_pack_of_a_given_batch_is_probed() -> None:
    _, batch = stream_and_batch("overlong")
    assert find_leaks(OneLayer(right), batch).ok
    report = find_leaks(OneLayer(no_boundaries), batch)
    assert not report.ok
    assert report.lengths == tuple(f.stop - f.start for f in batch.fragments[0])
    with pytest.raises(ValueError, match="the first pack of the batch holds no sample"):
        find_leaks(OneLayer(right), collate_packed([to_torchtune(null_pack(MAX_SEQ_LEN))]))


def test_every_pack_takes_the_same_number_of_passes() -> None:
    """Passes of a sharded model are collectives, so ranks with other packs would deadlock."""
    counts = []
    for lengths in ((30,), (10, 12), (3, 4, 5, 6, 7)):
        rows = [{"tokens": list(range(1, n + 1)), "labels": list(range(1, n + 1))} for n in lengths]
        batch = collate_packed(list(IterablePackedDataset(rows, max_seq_len=MAX_SEQ_LEN)))
        calls: list[Batch] = []
        model = OneLayer(right).eval()
        assert find_leaks(lambda b, calls=calls, model=model: calls.append(b) or model(b), batch).ok
        counts.append(len(calls))
    assert counts == [12, 12, 12]
    modes: list[bool] = []
    module = OneLayer(right)
    module.register_forward_hook(lambda *_: modes.append(module.training))
    find_leaks(module)
    assert modes == [False] * 12 + [True] * 7


class Drawing(OneLayer):
    """Draws from every generator in training mode, and replaces a buffer."""

    def __init__(self) -> None:
        super().__init__(right)
        self.register_buffer("drawn", torch.zeros(()))

    def forward(self, batch: Batch) -> torch.Tensor:
        logits = super().forward(batch)
        if self.training:
            noise = random.random() + np.random.random() + float(torch.rand(()))  # noqa: NPY002
            self.drawn = self.drawn + noise
            logits = F.dropout(logits * (1 + noise), 0.5)
        return logits


def test_random_numbers_in_training_mode_repeat() -> None:
    """A randomly dropped layer would otherwise look like a leak."""
    model = Drawing().train()
    model.dropout.eval()
    modes, buffer = [part.training for part in model.modules()], model.drawn
    kept = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002
    assert find_leaks(model).ok
    assert random.getstate() == kept[0]
    assert np.random.get_state()[1].tolist() == kept[1]  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), kept[2])
    assert [part.training for part in model.modules()] == modes
    assert model.drawn is buffer
    assert float(buffer) == 0.0
    assert all(parameter.grad is None for parameter in model.parameters())


class Config:
    """A model's config."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class LosesItsWindow(OneLayer):
    """Applies its window of 300 tokens to a sample alone, but not in a pack."""

    def __init__(self) -> None:
        super().__init__(self.reach)
        self.positions = nn.Embedding(1000, 16)
        nn.init.normal_(self.positions.weight, std=0.5, generator=torch.Generator().manual_seed(2))
        self.config = Config(sliding_window=300)

    def reach(self, places: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        lost = ids.max() > 1  # more than a sample and padding
        return right(places, ids) & (lost | (places[:, None] - places < 300))


def test_a_lost_window_of_more_than_256_tokens_is_found() -> None:
    model = LosesItsWindow()
    assert find_leaks(model, max_seq_len=256).ok, "no sample of this pack is longer than the window"
    report = find_leaks(model)
    assert max(report.lengths) > 300
    assert {leak.kind for leak in report.leaks} == {"alone"}


def fails(batch: Batch) -> torch.Tensor:
    raise RuntimeError("broken")


@pytest.mark.parametrize(
    ("call", "arguments", "message"),
    [
        (None, {}, "vocab_size is 0; give the number of tokens that the model knows, at least 2"),
        (None, {"vocab_size": 1}, "vocab_size is 1; give"),
        (
            None,
            {"vocab_size": 9, "max_seq_len": 7},
            "max_seq_len is 7; the probe's pack needs 8 tokens or more",
        ),
        (
            lambda batch: torch.ones(1, 61),
            {"vocab_size": VOCAB},
            "the model gives [1, 61] for a pack of 256 tokens; the probe needs logits of every token",
        ),
        (fails, {"vocab_size": VOCAB}, "broken"),
    ],
    ids=range(5),
)
def test_refusals_and_errors_leave_nothing_behind(
    call: Callable[[Batch], torch.Tensor] | None, arguments: dict[str, Any], message: str
) -> None:
    state = torch.get_rng_state()
    with pytest.raises((ValueError, RuntimeError)) as error:
        find_leaks(call or (lambda batch: batch.tokens[..., None].double()), **arguments)
    assert message in str(error.value)
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)


def test_the_limit_depends_on_the_type() -> None:
    model = OneLayer(right)
    assert find_leaks(model).limit == 1e-4
    assert find_leaks(model.to(torch.bfloat16)).limit == 0.1
    assert find_leaks(model.to(torch.float16)).limit == 0.02
    with torch.autocast("cpu", torch.bfloat16):
        assert find_leaks(model.float()).limit == 0.1
    torch.set_float32_matmul_precision("high")
    try:
        assert find_leaks(model).limit == 0.01
    finally:
        torch.set_float32_matmul_precision("highest")
    assert not find_leaks(model, limit=-1.0).ok


def test_a_compiled_model_is_not_compiled_for_the_probe() -> None:
    """The probe's pack has another length, for which torch.compile would compile again with dynamic lengths."""
    graphs = []

    def count(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    model = torch.compile(OneLayer(right), backend=count)
    assert find_leaks(model).ok
    assert graphs == []
    _, batch = stream_and_batch("exact_fit")
    find_leaks(model, batch)
    assert graphs


def test_the_leaking_module_of_a_compiled_model_is_found() -> None:
    """A graph ignores hooks that came after it."""

    class Mean(nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden + hidden.mean(1, keepdim=True)

    layers = nn.Sequential(nn.Embedding(VOCAB, 16), Mean(), nn.Linear(16, VOCAB))
    _, batch = stream_and_batch("exact_fit")
    report = find_leaks(
        torch.compile(layers, backend="eager"), batch, inputs=lambda single: {"input": single.tokens}
    )
    assert report.module == "_orig_mod.1 (Mean)"
