"""Every family of transformers' models and every attention: packed equals alone, or a refusal with the reason.

Packs come from a stream and hold samples of one token, fragments and padding. The packed side is a prepared model; the
other side is an unprepared one, which gets one unpadded sequence at a time. `make test` runs one family for each
mechanism in fp32; `make test-slow` and `make models` run all, in fp64 too, and compare what they see with the tables of
docs/guides/models.md, or write these anew.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch

from streampack import find_leaks, prepare_model_for_packing
from streampack.attention import mixers
from streampack.attention.families import PROVEN
from streampack.attention.mixer_tables import ALIBI, BLOCKS, MIXERS, TAKES_BOUNDARIES, find_mixers
from streampack.attention.probe_pack import pack_of
from tests.harness.hf_models import (
    CHANGES,
    FAMILIES,
    MAX_SEQ_LEN,
    VOCAB,
    WITHOUT,
    build,
    fp64_throughout,
    run_alone,
    run_packed,
)
from tests.harness.hybrid_models import HYBRIDS, OTHERWISE
from tests.harness.isolation import differences, is_padding, stream_and_batch
from tests.harness.models_table import EVERY, LIMITS, PAGE, VARIABLE, figures, over_the_limit, read_page
from tests.harness.other_families import ISOLATED, REFUSED, UNTRIED, sizes_of
from tests.harness.quick import HYBRID_MECHANISMS, MECHANISMS
from tests.harness.vision_models import VISION_FAMILIES, build_vision

pytest.importorskip("transformers")

Record = Callable[[str, str, str, str], None]
QUICK = (*MECHANISMS, *HYBRID_MECHANISMS, "qwen2_5_vl", "qwen3_5")
# They compute a part in fp32 in any case.
NOT_IN_FP64 = {"xlstm", "inkling_text", "inkling2_text", "kimi_linear", "ernie4_5_vl_moe"}


def cases() -> list[Any]:
    """Families, attentions, and whether all figures of the page's table are computed and compared with it."""

    def attentions(family: str) -> tuple[str, ...]:
        return ("dense", "varlen", "flex") if family in FAMILIES else ("dense", "varlen")

    quick = [pytest.param(family, word, False) for family in QUICK for word in attentions(family)]
    return quick + [
        pytest.param(family, word, True, marks=pytest.mark.slow, id=f"{family}-{word}-all figures")
        for family in (*FAMILIES, *HYBRIDS, *VISION_FAMILIES)
        for word in attentions(family)
    ]


def made(family: str, attention: str, dtype: torch.dtype = torch.float32) -> Any:
    if family in VISION_FAMILIES:
        return build_vision(family, dtype)
    return build(family, dtype, **HYBRIDS.get(family, CHANGES.get((family, attention), {})))


# Uncompiled: compiling takes a minute a family.
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("family", "attention", "exact"), cases())
def test_packed_equals_alone_or_is_refused(
    family: str, attention: str, exact: bool, record_model: Record
) -> None:
    if why := (WITHOUT | OTHERWISE).get((family, attention)):
        model = made(family, attention)
        before = model.config._attn_implementation
        with pytest.raises(ValueError) as error:
            prepare_model_for_packing(model, attention=attention)
        assert str(error.value).startswith(f"attention='{attention}' will not do: {why}")
        assert model.config._attn_implementation == before
        if family in HYBRIDS:
            why = "it fails the probe, or has no such attention"
        outcome = f"refused: {why}"
    elif (family, attention) == ("gpt_oss", "flex"):
        model = made(family, attention)
        inputs = prepare_model_for_packing(model, attention=attention)
        _, batch = stream_and_batch("overlong")
        with (
            torch.compiler.set_stance("force_eager"),
            pytest.raises(ValueError, match="cannot be run on CPU"),
        ):
            model(**inputs(batch))
        outcome = "on CUDA only"
    else:
        seen = measured(family, attention, exact)
        assert all(value < LIMITS[name] for name, value in seen.items()), seen
        on_cpus = ", on a CPU; on CUDA use another" if (family, attention) == ("gemma2", "varlen") else ""
        outcome = figures(**seen) + on_cpus
    if exact:
        record_model("transformers", family, attention, outcome)


def measured(family: str, attention: str, exact: bool) -> dict[str, float]:
    """Return how far samples in packs are from samples alone; the probe finds no leak, either."""
    data, batch = stream_and_batch("overlong")
    model = made(family, attention)
    inputs = prepare_model_for_packing(model, attention=attention)
    assert inputs.attention == attention
    alone = run_alone(made(family, attention), data, batch)
    if attention == "flex":  # the forward pass, which is all that torch's flex attention has on a CPU
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            packed = model(**inputs(batch)).logits[~is_padding(batch)]
        return {"logits": float((packed - alone.logits).norm() / alone.logits.norm())}
    found = differences(run_packed(model, batch, inputs), alone)
    seen = {"logits": found["logits"], "gradients": found["gradient"]}
    if family in FAMILIES and (exact or attention == "varlen"):
        report = find_leaks(model, inputs=inputs, max_seq_len=MAX_SEQ_LEN)
        assert report.ok, report
        assert not report.blind
    if exact and family not in NOT_IN_FP64 and not (family in HYBRIDS and attention != "dense"):
        model = made(family, attention, torch.float64)
        inputs = prepare_model_for_packing(model, attention=attention)
        with fp64_throughout():
            alone = run_alone(made(family, attention, torch.float64), data, batch)
            seen["fp64"] = differences(run_packed(model, batch, inputs), alone)["gradient"]
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("family", [*ISOLATED, *REFUSED])
def test_other_families_are_isolated_or_refused(family: str, record_model: Record) -> None:
    """What our own code does is tested with fewer; here a new version of transformers shows what it changed."""
    data, batch = stream_and_batch("overlong")
    outcomes = {}
    for attention in ("dense", "varlen"):
        model = build(family, **sizes_of(family))
        try:
            inputs = prepare_model_for_packing(model, attention=attention)
        except ValueError as error:
            outcomes[attention] = f"refused: {reason(str(error), family)}"
            continue
        packed = run_packed(model, batch, inputs)
        found = differences(packed, run_alone(build(family, **sizes_of(family)), data, batch))
        seen = {"logits": found["logits"], "gradients": found["gradient"]}
        assert all(seen[name] < LIMITS[name] for name in seen), seen
        outcomes[attention] = figures(**seen)
    refused = [outcome for outcome in outcomes.values() if outcome.startswith("refused: ")]
    assert (len(refused) == len(outcomes)) == (family in REFUSED), outcomes
    if family in REFUSED:
        record_model("transformers", family, EVERY, outcomes["dense"])
    else:
        for attention, outcome in outcomes.items():
            record_model("transformers", family, attention, outcome)


def reason(message: str, family: str) -> str:
    """Shorten a refusal to the likely cause, or to the error of a model that was tried.

    >>> reason("attention='dense' will not do: a failed a try: 9 leaks:\\nlikely cause: it mixes\\nway out", "a")
    'it fails the probe: it mixes'
    >>> reason("attention='varlen' will not do: a has its attention written into its layers; use 'dense'", "a")
    'it has its attention written into its layers'
    >>> reason("this model cannot be packed: a is an encoder-decoder model; no", "a")
    'is an encoder-decoder model; no'
    """
    if cause := re.search(r"^likely cause: (.*?)[;?]?$", message, re.MULTILINE):
        return f"it fails the probe: {cause[1]}"
    if tried := re.search(r"failed a try: (\w+: .*?);", message):
        return f"it fails a try: {tried[1]}"
    if whole := re.fullmatch(rf"this model cannot be packed: {family} (.*)", message):
        return whole[1]
    why = message.partition(" will not do: ")[2].rpartition("; use ")[0]
    return why.replace(family, "it", 1)


@pytest.mark.parametrize("attention", ["auto", "dense"])
@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        ("t5", {"d_model": 64, "num_layers": 2, "num_heads": 4, "d_ff": 48}, "is an encoder-decoder model"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "sees tokens to the right"),
    ],
    ids=["t5", "gemma3_text"],
)
def test_families_that_cannot_be_packed_are_refused(
    family: str, changes: dict[str, Any], why: str, attention: str, record_model: Record
) -> None:
    with pytest.raises(ValueError) as error:
        prepare_model_for_packing(build(family, **changes), attention=attention)
    assert str(error.value).startswith(f"this model cannot be packed: {family} {why}")
    assert str(error.value).endswith("; train it on padded batches, one sample a row")
    name = f"{family}, {next(iter(changes))}" if family in FAMILIES else family
    record_model("transformers", name, EVERY, "refused: " + str(error.value).split(f"{family} ", 1)[1])


def test_every_family_and_every_layer_with_a_state_is_tried() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    assert set(FAMILIES) == PROVEN
    tested = {*FAMILIES, *HYBRIDS, *VISION_FAMILIES, *ISOLATED, *REFUSED}
    assert set(NAMES) - tested == set(UNTRIED)
    found = {
        cls.__name__
        for family, sizes in HYBRIDS.items()
        for mixer in find_mixers(build(family, **sizes))
        for cls in type(mixer).__mro__
    }
    assert found >= MIXERS | ALIBI | BLOCKS
    assert TAKES_BOUNDARIES.keys() <= MIXERS


def test_the_figures_of_the_page_are_within_the_limits() -> None:
    if VARIABLE in os.environ:
        pytest.skip("the page is being written")
    written = {
        key: value
        for key, value in read_page(PAGE.read_text(encoding="utf-8")).items()
        if key[0] == "transformers"
    }
    assert {key: over for key, outcome in written.items() if (over := over_the_limit(outcome))} == {}
    assert {family for _, family, backend in written if backend != EVERY} == {
        *FAMILIES,
        *HYBRIDS,
        *VISION_FAMILIES,
        *ISOLATED,
    }


def deep_in_a_pack(family: str) -> float:
    """Return how far the logits of a sample behind 700 other tokens are from those that it has alone."""
    sizes = HYBRIDS[family] | ({"max_seq_len": 800} if family == "mpt" else {})
    tokens = torch.randint(3, VOCAB, (1, 800), generator=torch.Generator().manual_seed(5))
    batch = pack_of(tokens, [700, 90])
    model: Any = build(family, **sizes)
    with torch.no_grad():
        alone = model(input_ids=tokens[:, 700:790], use_cache=False).logits
        packed = model(**prepare_model_for_packing(model)(batch)).logits[:, 700:790]
    return float((packed - alone).norm() / alone.norm())


@pytest.mark.parametrize("family", ["bloom", "falcon, alibi", "mpt"])
def test_a_bias_is_as_exact_deep_in_a_pack_as_alone(family: str) -> None:
    assert deep_in_a_pack(family) < 1e-6


def test_a_bias_that_counts_from_the_beginning_of_a_pack_is_less_exact() -> None:
    """Softmax ignores a constant in theory, but falcon's bias has 8 bits."""

    def counted_from_the_pack(name: str, value: Any, index: torch.Tensor, shape: torch.Size) -> Any:
        own = index[0] % shape[1]
        if name == "attention_mask":
            return value[:1, :, own][..., own]
        if name == "alibi":
            return value[..., own].repeat(len(index), 1, 1, 1)
        return mixers._select(name, value, index, shape)

    with patch.object(mixers, "_select_with_bias", counted_from_the_pack):
        assert deep_in_a_pack("falcon, alibi") > 1e-3
