"""The leak probe finds leaks where one is planted and none elsewhere, and has no side effects."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounter

from streampack import Batch, find_leaks, prepare_model_for_packing
from streampack.attention import dense_mask, document_ids
from streampack.packing.batch import stack_paths
from tests.harness import hf_models, tiny_torchtune
from tests.harness.hf_models import Wrapper, prepared
from tests.harness.isolation import MAX_SEQ_LEN, VOCAB, differences, run_alone, run_packed, stream_and_batch
from tests.harness.vision_models import build_vision

# Parts of the likely causes that a report names.
CAUSES = {
    "backward": "a token sees what comes after it",
    "neighbour": "only neighbours see one another",
    "all": "attention runs over the ends of samples",
    "padding": "real tokens see the padding",
    "alone": "nothing leaks, but samples are not what they are by themselves",
}
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
    assert CAUSES[cause] in str(report.cause)
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


OTHER_LEAKS: dict[str, tuple[Callable[[], Any], set[str], str]] = {
    "padding": (lambda: OneLayer(padding_seen), {"padding", "alone"}, "padding"),
    "alone": (lambda: RunningOn(right), {"alone"}, "alone"),  # nothing leaks: only samples alone show it
    "training": (lambda: LeakyInTraining(right), {"sample"}, "all"),
}


@pytest.mark.parametrize("name", OTHER_LEAKS)
def test_other_leaks_are_found(name: str) -> None:
    make, kinds, cause = OTHER_LEAKS[name]
    report = find_leaks(make(), vocab_size=VOCAB)
    assert not report.ok
    assert {leak.kind for leak in report.leaks} == kinds
    assert CAUSES[cause] in str(report.cause)
    in_training = name == "training"
    assert all(leak.training == in_training for leak in report.leaks)
    assert ("in training mode, sample 3 has gradients" in str(report)) == in_training
    # The first sample of a pack begins at 0 in any case.
    assert name != "alone" or {leak.sample for leak in report.leaks} == {1, 2, 3}


def test_logits_that_are_no_numbers_are_no_pass() -> None:
    report = find_leaks(lambda batch: batch.tokens[..., None].double().log().log(), vocab_size=VOCAB)
    assert not report.ok
    assert report.worst == float("inf")


def test_a_report_names_samples_the_likely_cause_and_the_way_out() -> None:
    text = str(find_leaks(OneLayer(a_token_late)))
    assert "changing sample 0 moved sample 1 by " in text
    assert "sample 1 differs from itself alone by " in text
    assert f"likely cause: {CAUSES['neighbour']}" in text
    assert "way out: inputs = prepare_model_for_packing(model), then model(**inputs(batch)); " in text
    assert str(find_leaks(OneLayer(right))).startswith(
        "no leak in a pack of 4 samples (76, 1, 102, 51 tokens)"
    )


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


class Routed(OneLayer):
    """Rounding moves a token of each sample far, as another expert does; leaks move all of them."""

    def __init__(self, mask: Mask) -> None:
        super().__init__(mask)
        self.experts = nn.Identity()
        self.calls = 0

    def forward(self, batch: Batch) -> torch.Tensor:
        self.calls += 1
        return super().forward(batch) + (batch.input_pos == self.calls % 20 * 2)[..., None]


def test_models_with_experts_are_judged_by_how_many_tokens_move() -> None:
    model = Routed(right)
    assert find_leaks(model, limit=0.03).ok
    assert {leak.kind for leak in find_leaks(Routed(no_boundaries), limit=0.03).leaks} >= {"sample"}
    del model.experts
    assert not find_leaks(model, limit=0.03).ok


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


def identity(batch: Batch) -> torch.Tensor:
    return batch.tokens[..., None].double()


def fails(batch: Batch) -> torch.Tensor:
    raise RuntimeError("broken")


@pytest.mark.parametrize(
    ("call", "arguments", "message"),
    [
        (identity, {}, "vocab_size is 0; give the number of tokens that the model knows, at least 2"),
        (identity, {"vocab_size": 1}, "vocab_size is 1; give"),
        (identity, {"vocab_size": 9, "max_seq_len": 7}, "max_seq_len is 7; the probe's pack needs 8 tokens"),
        (
            lambda batch: torch.ones(1, 61),
            {"vocab_size": 61},
            r"the model gives \[1, 61\] for a pack of 256 tokens",
        ),
        (fails, {"vocab_size": 61}, "broken"),
    ],
    ids=range(5),
)
def test_refusals_and_errors_leave_nothing_behind(
    call: Callable[[Batch], torch.Tensor], arguments: dict[str, Any], message: str
) -> None:
    state = torch.get_rng_state()
    with pytest.raises((ValueError, RuntimeError), match=message):
        find_leaks(call, **arguments)
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)


class OwnKernel(OneLayer):
    """Calls a function that it compiles, as flex attention is."""

    def __init__(self) -> None:
        super().__init__(right)
        self.graphs = CompileCounter()
        self.kernel = torch.compile(torch.Tensor.clone, backend=self.graphs)

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.kernel(super().forward(batch))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("whole", [True, False])
def test_a_compiled_model_runs_uncompiled_with_its_compiled_kernels(whole: bool) -> None:
    """The model would be compiled again for the probe's length; uncompiled flex attention computes all scores."""
    torch._dynamo.reset()
    model, graphs = OwnKernel(), CompileCounter()
    given: Any = torch.compile(model, backend=graphs) if whole else model
    if not whole:
        model.compile(backend=graphs)
    assert find_leaks(given, vocab_size=VOCAB).ok
    assert (graphs.frame_count, model.graphs.frame_count > 0) == (0, True)
    given(stream_and_batch("overlong")[1])
    assert graphs.frame_count > 0, "it is compiled as before"


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


# Models of torchtune and transformers: right, and with mistakes of users.


@pytest.mark.parametrize(
    ("make", "attention"),
    [
        (lambda: hf_models.build("falcon"), "dense"),  # needs more than positions
        (lambda: hf_models.build("llama"), "varlen"),  # needs to have its cache off
        (lambda: hf_models.build("mamba"), "dense"),  # takes no positions
        (lambda: build_vision("qwen2_5_vl"), "dense"),  # takes no tokens of images, which must not be drawn
        (lambda: tiny_torchtune.build("llama3"), "varlen"),  # needs a mask
    ],
    ids=["falcon", "llama", "mamba", "qwen2_5_vl", "llama3"],
)
def test_models_are_called_as_they_were_prepared(make: Any, attention: str) -> None:
    model = make()
    assert "sample" in {leak.kind for leak in find_leaks(model).leaks}
    prepare_model_for_packing(model, attention=attention)
    compiled: Any = torch.compile(model, backend="eager")
    assert find_leaks(model).ok
    assert find_leaks(compiled).ok
    if hasattr(model, "config"):
        assert find_leaks(Wrapper(model)).ok
        report = find_leaks(model, inputs=lambda batch: {"input_ids": batch.tokens})
        assert not report.ok, "inputs that are given hold"


def running_on(batch: Batch) -> torch.Tensor:
    return torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens)


def begun_at_1(batch: Batch) -> torch.Tensor:
    """A sample of one token, then one whose positions go on from 1: transformers sees one sequence."""
    first = batch.input_pos == 0
    starts = torch.arange(batch.tokens.shape[1]) - batch.input_pos
    return batch.input_pos + (first & first.roll(1, 1)).gather(1, starts)


def without_window(batch: Batch) -> torch.Tensor:
    """It has no window."""
    return dense_mask(batch.seq_lens, max_seq_len=batch.tokens.shape[1])[:, None]


# Without masks of ours, transformers makes its own where positions restart, and not with a cache.
MASKS_OF_POSITIONS: dict[str, Any] = {"attention_mask": None}

# A model, an attention, what is given in place of the inputs' own, and the kind of leak that the probe finds.
MISTAKES: dict[str, tuple[str, str, Callable[[Batch], dict[str, Any]], str]] = {
    "a cache": ("mistral", "dense", lambda _: MASKS_OF_POSITIONS | {"use_cache": True}, "sample"),
    "a mask": ("mistral", "dense", lambda batch: {"attention_mask": torch.ones_like(batch.tokens)}, "sample"),
    "positions": (
        "mistral",
        "dense",
        lambda batch: MASKS_OF_POSITIONS | {"position_ids": running_on(batch)},
        "sample",
    ),
    "a table's positions": ("gpt2", "varlen", lambda batch: {"position_ids": running_on(batch)}, "alone"),
    "a fragment": (
        "mistral",
        "dense",
        lambda batch: MASKS_OF_POSITIONS | {"position_ids": begun_at_1(batch)},
        "sample",
    ),
    "no window": ("mistral", "dense", lambda batch: {"attention_mask": without_window(batch)}, "alone"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_changes_logits_and_gradients_and_is_found(mistake: str) -> None:
    """By orders of magnitude above the limit of what is right."""
    family, attention, change, kind = MISTAKES[mistake]
    data, batch = stream_and_batch("overlong")
    model, inputs, unprepared = prepared(family, attention)
    alone = run_alone(unprepared, batch, data)
    assert max(differences(run_packed(model, batch, inputs), alone).values()) < 1e-5
    found = differences(run_packed(model, batch, lambda batch: inputs(batch) | change(batch)), alone)
    assert min(found["logits"], found["gradient"]) > 1e-2, found
    report = find_leaks(model, inputs=lambda batch: inputs(batch) | change(batch), max_seq_len=MAX_SEQ_LEN)
    assert kind in {leak.kind for leak in report.leaks}, report
    assert report.worst > 100 * report.limit


def test_a_lost_window_of_more_than_256_tokens_is_found() -> None:
    """The probe's pack is as long as it takes to see the window."""
    model = hf_models.build("mistral", sliding_window=300, max_position_embeddings=1024)
    inputs = prepare_model_for_packing(model, attention="dense")
    report = find_leaks(model, inputs=lambda batch: inputs(batch) | {"attention_mask": without_window(batch)})
    assert max(report.lengths) > 300
    assert {leak.kind for leak in report.leaks} == {"alone"}
    assert find_leaks(model).ok


# Groups.


def sibling_seen(batch: Batch) -> Batch:
    """The second answer is taken for a continuation of the first."""
    assert batch.groups is not None
    assert batch.groups.parents[0] == (-1, 0, 0, 2, -1)
    parents = ((-1, 0, 1, 2, -1),)
    paths = stack_paths(parents, batch.seq_lens.shape[1])
    return replace(batch, groups=replace(batch.groups, parents=parents, paths=paths))


def restarted(batch: Batch) -> Batch:
    """Positions begin at 0 in every segment."""
    positions = batch.input_pos.clone()
    start = 0
    for length in batch.seq_lens[0].tolist():
        positions[0, start : start + length] = torch.arange(length)
        start += length
    return replace(batch, input_pos=positions)


@pytest.mark.parametrize("attention", ["dense", "varlen"])
def test_mistakes_with_groups_are_found(attention: str) -> None:
    model, inputs, _ = prepared("llama", attention)
    report = find_leaks(model, inputs=inputs, groups=True)
    assert report.ok
    assert len(report.lengths) == 5
    for mutation, kind in ((sibling_seen, "sample"), (restarted, "alone")):

        def mistaken(batch: Batch, mutation: Any = mutation) -> Any:
            return inputs(batch if batch.groups is None else mutation(batch))

        report = find_leaks(model, inputs=mistaken, groups=True)
        assert kind in {leak.kind for leak in report.leaks}


# Rounding and kernels on CUDA.


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["dense", "varlen"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_rounding_of_experts_in_16_bits_is_no_leak(family: str, attention: str) -> None:
    """Other tokens change how many an expert computes at once, and so a token's rounding, even its expert."""
    model: Any = hf_models.build(family, torch.bfloat16, num_hidden_layers=4).cuda()
    inputs = prepare_model_for_packing(model, attention=attention)
    for seed in range(3):  # the weights decide which tokens are near to two experts
        generator = torch.Generator("cuda").manual_seed(seed)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(std=0.1, generator=generator)
        assert find_leaks(model, inputs=inputs).ok
    assert not find_leaks(model, inputs=lambda batch: {"input_ids": batch.tokens, "use_cache": False}).ok


@pytest.mark.gpu
def test_the_probe_of_a_compiled_model_computes_no_scores_of_all_pairs() -> None:
    """In eager mode, flex attention computes them in fp32: 2 GiB for 8 heads."""
    model = tiny_torchtune.build("llama3", dtype=torch.bfloat16, max_seq_len=8192).cuda()
    inputs = prepare_model_for_packing(model, attention="flex")
    for layer in model.layers:  # type: ignore[union-attr]
        layer.compile()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert find_leaks(model, inputs=inputs, max_seq_len=8192).ok
    assert torch.cuda.max_memory_allocated() - before < 512 << 20
