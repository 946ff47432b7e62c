"""Families of Hugging Face models: those that are refused, those that are tried, and limits on the length of packs."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch

from streampack import (
    Batch,
    Group,
    IterablePackedDataset,
    collate_packed,
    find_leaks,
    prepare_model_for_packing,
)
from streampack.attention.families import PROVEN
from tests.support.groups import batch_of
from tests.support.hf_models import (
    EXPERTS,
    FAMILIES,
    MAX_SEQ_LEN,
    WINDOW,
    Wrapper,
    build,
    prepared,
    run_alone,
    run_packed,
)
from tests.support.hybrid_models import HYBRIDS
from tests.support.isolation import differences, stream_and_batch
from tests.support.models_table import EVERY
from tests.support.other_families import sizes_of

pytest.importorskip("transformers")

Record = Callable[[str, str, str, str], None]


def test_every_proven_family_has_a_test() -> None:
    assert set(FAMILIES) == PROVEN


STATE = "carries a state from token to token, over the ends of samples, and attention masks do not reach it"
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("is an encoder-decoder model", {"d_model": 64, "num_layers": 2, "num_heads": 4, "d_ff": 48}),
    "gemma3_text": ("sees tokens to the right", {"use_bidirectional_attention": True}),
}


@pytest.mark.parametrize("attention", ["auto", "dense"])
@pytest.mark.parametrize("family", REFUSED)
def test_families_that_cannot_be_packed_are_refused(
    family: str, attention: str, record_model: Record
) -> None:
    why, changes = REFUSED[family]
    model = build(family, **changes)
    with pytest.raises(ValueError) as error:
        prepare_model_for_packing(model, attention=attention)
    assert str(error.value).startswith(f"this model cannot be packed: {family} {why}")
    assert str(error.value).endswith("; train it on padded batches, one sample a row")
    name = f"{family}, {next(iter(changes))}" if family in FAMILIES else family
    record_model("transformers", name, EVERY, "refused: " + str(error.value).split(f"{family} ", 1)[1])


UNKNOWN_BUT_FIT: dict[str, dict[str, Any]] = {
    "cohere2": WINDOW | {"layer_norm_eps": 1e-5},
    "olmoe": EXPERTS,
}


@pytest.mark.parametrize("attention", ["dense", "varlen"])
@pytest.mark.parametrize("family", UNKNOWN_BUT_FIT)
def test_an_unknown_family_is_tried(family: str, attention: str) -> None:
    """A family that passes the probe also gives the logits and gradients of each sample alone."""
    assert family not in PROVEN
    data, batch = stream_and_batch("overlong")
    model, inputs, alone = prepared(family, attention, **UNKNOWN_BUT_FIT[family])
    found = differences(run_packed(model, batch, inputs), run_alone(alone, data, batch))
    assert max(found.values()) < 1e-5


def test_a_family_that_selects_keys_is_given_masks() -> None:
    """Without them it would attend to all keys, which only packs longer than ``index_topk`` show."""
    sizes = sizes_of("deepseek_v32") | {"index_topk": 1024}
    with pytest.raises(
        ValueError, match="deepseek_v32 selects keys under a mask, which varlen does not read"
    ):
        prepare_model_for_packing(build("deepseek_v32", **sizes), attention="varlen")
    assert prepare_model_for_packing(build("deepseek_v32", **sizes)).attention == "dense"


OPT = {"ffn_dim": 48, "word_embed_proj_dim": 64}


def test_an_unknown_family_that_makes_masks_without_positions_is_given_masks() -> None:
    """It leaks when it is tried with positions only, and passes with masks."""
    data, batch = stream_and_batch("overlong")
    model, inputs, alone = prepared("opt", "dense", **OPT)
    assert inputs.masks
    assert max(differences(run_packed(model, batch, inputs), run_alone(alone, data, batch)).values()) < 1e-5
    assert find_leaks(model).ok, "the inputs are made again in the same way"
    assert not prepare_model_for_packing(model, attention="varlen").masks


BERT = {"is_decoder": False}


@pytest.mark.parametrize("attention", ["dense", "auto"])
def test_an_unknown_family_that_leaks_is_refused(attention: str) -> None:
    model = build("bert", **BERT)
    before = model.config._attn_implementation
    with pytest.raises(ValueError) as error:
        prepare_model_for_packing(model, attention=attention)
    message = str(error.value)
    assert message.startswith(
        "bert attends to tokens ahead (is_causal=False), and a pack's masks hide them; "
    )
    assert "attention='dense' will not do: nothing is known of bert, and it failed a try: " in message
    assert "changing sample 1 moved sample 0 by" in message
    assert "a token sees what comes after it" in message
    assert message.endswith("; use padded batches, one sample a row")
    assert model.config._attn_implementation == before, "left as it was found"


def test_an_unknown_family_that_fails_is_refused() -> None:
    model = build("opt", **OPT)
    with (
        patch.object(type(model), "forward", lambda self, input_ids: input_ids),
        pytest.raises(ValueError, match="it failed a try: TypeError: .*unexpected keyword argument"),
    ):
        prepare_model_for_packing(model, attention="varlen")
    assert model.config._attn_implementation == "sdpa", "left as it was found"


@pytest.mark.parametrize(("family", "attention"), [("falcon", "dense"), ("llama", "varlen")])
def test_the_probe_calls_models_as_they_were_prepared(family: str, attention: str) -> None:
    model = build(family)
    report = find_leaks(model)
    assert "sample" in {leak.kind for leak in report.leaks}, (
        "a falcon needs more than positions, a llama no cache"
    )
    prepare_model_for_packing(model, attention=attention)
    assert find_leaks(model).ok
    for wrapped in (Wrapper(model), torch.compile(model, backend="eager")):
        assert find_leaks(wrapped).ok  # type: ignore[arg-type]
    report = find_leaks(model, inputs=lambda batch: {"input_ids": batch.tokens})
    assert not report.ok, "inputs that are given hold"


def test_the_probe_calls_a_model_without_positions() -> None:
    report = find_leaks(build("bloom", **HYBRIDS["bloom"]))
    assert "sample" in {leak.kind for leak in report.leaks}


def test_an_unknown_family_without_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="it has no weights yet; prepare it when they are loaded"):
        prepare_model_for_packing(build("opt", **OPT).to("meta"))


def long_batch(length: int) -> Batch:
    rows = [{"tokens": [7] * (length - 2), "labels": [7] * (length - 2)}]
    return collate_packed(list(IterablePackedDataset(rows, max_seq_len=length)))


LONGROPE = {
    "original_max_position_embeddings": 16,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 2.0,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
    },
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


def test_packs_too_long_for_the_model_are_refused() -> None:
    inputs = prepare_model_for_packing(build("llama4_text", floor_scale=8), attention="dense")
    inputs(long_batch(7))
    message = (
        "max_seq_len is 8, but a packed llama4_text model with this config keeps samples apart up to 7: layers without "
        "RoPE scale queries by their place in the pack (attn_temperature_tuning); set max_seq_len=7 or less"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        inputs(long_batch(8))


@pytest.mark.parametrize(
    ("family", "attention", "changes", "longest", "why"),
    [
        ("phi3", "dense", LONGROPE, 16, "longrope RoPE turns all samples"),
        ("llama", "varlen", {"rope_parameters": DYNAMIC}, MAX_SEQ_LEN, "dynamic RoPE turns all samples"),
        ("llama4_text", "varlen", {}, MAX_SEQ_LEN, "varlen does not cut samples into chunks"),
    ],
)
def test_samples_may_be_shorter_than_their_packs(
    family: str, attention: str, changes: dict[str, Any], longest: int, why: str
) -> None:
    """What depends on the longest sample limits samples, not packs, whose padding may be longer, too."""
    model, inputs, alone = prepared(family, attention, **changes)
    rows = [{"tokens": [*range(5, 5 + n)], "labels": [*range(5, 5 + n)]} for n in (longest, 5, longest, 3)]
    data = IterablePackedDataset(rows, max_seq_len=4 * longest, num_lanes=1, shuffle=False)
    batch = collate_packed(list(data))
    flat = {"input_ids": batch.tokens[:, : 2 * longest + 8], "seq_lens": batch.seq_lens[:, :4]}
    with torch.no_grad():
        for logits in (model(**inputs(batch)).logits[0], model(**inputs(flat)).logits[0]):
            start = 0
            for length in batch.seq_lens[0, :4].tolist():
                wanted = alone(batch.tokens[:, start : start + length], use_cache=False).logits[0]
                torch.testing.assert_close(logits[start : start + length], wanted, rtol=1e-4, atol=1e-5)
                start += length
    with pytest.raises(
        ValueError, match=f"of up to {longest}: {why}.*; leave longer ones out, or set max_seq_len="
    ):
        inputs(long_batch(longest + 3))


def test_a_shared_prompt_counts_for_each_answer() -> None:
    inputs = prepare_model_for_packing(build("phi3", **LONGROPE), attention="dense")
    for answer, refused in ((6, False), (7, True)):
        group = Group([5] * (13 + answer), [5] * (13 + answer), lengths=[10, 3, answer], parents=[-1, 0, 0])
        with pytest.raises(ValueError, match="a sample has 17 tokens") if refused else nullcontext():
            inputs(batch_of([group], max_seq_len=48))


def test_longer_packs_would_be_wrong() -> None:
    """Nothing leaks, but RoPE, or the place in the pack, makes samples differ from themselves alone."""
    for family, changes in (("phi3", LONGROPE), ("llama4_text", {"floor_scale": 8})):
        with (
            patch("streampack.attention.transformers.longest_pack", lambda *_: None),
            patch("streampack.attention.transformers.longest_sample", lambda *_: None),
        ):
            model, inputs, _ = prepared(family, "dense", **changes)
            report = find_leaks(model, inputs=inputs, max_seq_len=64)
        assert {leak.kind for leak in report.leaks} == {"alone"}
