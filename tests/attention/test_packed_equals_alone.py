"""Packed equals alone: every family of models, with every attention, on packs of a stream and on groups.

One side is a prepared model and a batch of the real stream, with samples of one token, fragments and padding. The other
is an unprepared one, which gets one unpadded sequence at a time, behind its own copy of the prompt if it has one.
`make test` runs one family for each mechanism in fp32; `make slow` and `make models` run all, in fp64 too, and
compare what they see with the tables of docs/guides/models.md, or write these anew.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch

from streampack import Batch, prepare_model_for_packing

# private: which families and layers the package knows by name is what this table of tests is held against
from streampack.attention.families import KNOWN
from streampack.attention.mixers import MIXERS, find_mixers
from tests.harness import hf_models, tiny_torchtune
from tests.harness.groups import batch_of, segments, trees
from tests.harness.hf_models import FAMILIES, WITHOUT, fp64_throughout
from tests.harness.hybrid_models import FROM_THE_ROW, HYBRIDS, OTHERWISE
from tests.harness.isolation import (
    MAX_SEQ_LEN,
    STREAMS,
    Run,
    differences,
    masked,
    placed,
    run_alone,
    run_packed,
    stream_and_batch,
    whole,
    worst,
)
from tests.harness.models_table import EVERY, LIMITS, PAGE, VARIABLE, figures, over_the_limit, read_page
from tests.harness.other_families import ISOLATED, REFUSED, UNTRIED
from tests.harness.quick import HYBRID_MECHANISMS, MECHANISMS, TORCHTUNE, sweep
from tests.harness.vision_models import VISION_FAMILIES, build_vision

pytest.importorskip("transformers")
pytest.importorskip("torchtune")

Record = Callable[[str, str, str, str], None]

TABLES = {"torchtune": [*tiny_torchtune.FAMILIES], "transformers": [*FAMILIES, *HYBRIDS, *VISION_FAMILIES]}
QUICK = {
    "torchtune": {*TORCHTUNE},
    "transformers": {*MECHANISMS, *HYBRID_MECHANISMS, "qwen2_5_vl", "qwen3_5"},
}
# Layers that get their boundaries in one way, whatever the attention; lfm2 and granitemoehybrid run both.
ONE_IS_ENOUGH = {"mamba", "qwen3_next", "qwen3_5", "xlstm", "zaya"}
# They compute a part in fp32 in any case.
NOT_IN_FP64 = {"xlstm", "olmo_hybrid", "inkling_text", "inkling2_text", "kimi_linear", "ernie4_5_vl_moe"}
# Families of which transformers computes all layers in fp64; of others, it computes norms or RoPE in fp32.
GROUPS_IN_FP64 = ("gpt2", "gpt_neox", "phi", "stablelm", "starcoder2")
ON_A_CPU = {("gemma2", "varlen"): ", on a CPU; on CUDA use another"}
NEVER = WITHOUT | OTHERWISE
ON_CUDA_ONLY = ("gpt_oss", "flex")

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def attentions(library: str, family: str) -> tuple[str, ...]:
    with_flex = library == "torchtune" or family in FAMILIES
    words = ("dense", "varlen", "flex") if with_flex else ("dense", "varlen")
    if library == "torchtune":
        return ("dense",) if family == "gemma2" else words  # it computes its scores itself
    return tuple(word for word in words if (family, word) not in {*NEVER, ON_CUDA_ONLY})


def cases() -> list[Any]:
    """Libraries, families, attentions, and whether all figures of the page's table are computed."""
    every = [
        (library, family, word)
        for library, families in TABLES.items()
        for family in families
        for word in attentions(library, family)
    ]
    quick = [
        pytest.param(*case, False, id="-".join(case))
        for case in every
        if case[1] in QUICK[case[0]] and not (case[1] in ONE_IS_ENOUGH and case[2] == "dense")
    ]
    slow = {"marks": pytest.mark.slow}
    return quick + [pytest.param(*case, True, id="-".join((*case, "all figures")), **slow) for case in every]


def made(library: str, family: str, attention: str, dtype: torch.dtype, *, lora: bool = False) -> Any:
    if library == "torchtune":
        return tiny_torchtune.build(family, lora=lora, dtype=dtype)
    if family in VISION_FAMILIES:
        return build_vision(family, dtype)
    return hf_models.build(family, dtype, **hf_models.CHANGES.get((family, attention), {}))


def measured(
    library: str,
    family: str,
    attention: str,
    batch: Batch,
    *,
    dtype: torch.dtype = torch.float32,
    lora: bool = False,
) -> dict[str, float]:
    """Return how far samples in packs are from samples alone."""
    model = made(library, family, attention, dtype, lora=lora)
    inputs = prepare_model_for_packing(model, attention=attention)
    assert inputs.attention == attention
    unprepared = attention if (family, attention) in hf_models.CHANGES else "any"
    right = alone(library, family, unprepared, dtype, lora, batch.groups is not None)
    if attention != "flex":
        with fp64_throughout() if dtype == torch.float64 else nullcontext():
            return differences(run_packed(model, batch, inputs), right)
    # The forward pass is all that torch's flex attention has on a CPU; compiling it takes a minute a family.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        logits = whole(model(**inputs(batch)))
    packed = torch.cat([logits[pack, slice(*path[-1])] for pack, _, path in segments(batch)])
    return {"logits": float((packed - right.logits).norm() / right.logits.norm())}


@cache
def alone(library: str, family: str, attention: str, dtype: torch.dtype, lora: bool, groups: bool) -> Run:
    """Run the unprepared model, once for all the attentions that a prepared one may have."""
    data, batch = (None, batch_of(trees())) if groups else stream_and_batch("overlong")
    with fp64_throughout() if dtype == torch.float64 else nullcontext():
        return run_alone(made(library, family, attention, dtype, lora=lora), batch, data)


@pytest.mark.parametrize(("library", "family", "attention", "exact"), cases())
def test_packed_equals_alone(
    library: str, family: str, attention: str, exact: bool, record_model: Record
) -> None:
    """torchtune's also with LoRA; the worse of the two goes into the table."""
    _, batch = stream_and_batch("overlong")
    seen: dict[str, float] = {}
    variants = [False] if library == "transformers" else [False, True] if exact else [attention == "varlen"]
    in_fp64 = family not in NOT_IN_FP64 and not (family in HYBRIDS and attention != "dense")
    for lora in variants:
        found = measured(library, family, attention, batch, lora=lora)
        figure = {"logits": found["logits"]}
        if attention != "flex":
            figure["gradients"] = found["gradient"]
        if exact and in_fp64 and attention != "flex":
            found = measured(library, family, attention, batch, lora=lora, dtype=torch.float64)
            figure["fp64"] = max(found.values()) if library == "torchtune" else found["gradient"]
        seen = {name: max(value, seen.get(name, 0.0)) for name, value in figure.items()}
    assert all(value < LIMITS[name] for name, value in seen.items()), seen
    if exact:
        record_model(library, family, attention, figures(**seen) + ON_A_CPU.get((family, attention), ""))


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        pytest.param(*pair, marks=() if pair[0] in QUICK["transformers"] else pytest.mark.slow)
        for pair in NEVER
    ],
)
def test_an_attention_that_will_not_do_is_refused(family: str, attention: str, record_model: Record) -> None:
    model, why = made("transformers", family, attention, torch.float32), NEVER[family, attention]
    before = model.config._attn_implementation
    with pytest.raises(ValueError) as error:
        prepare_model_for_packing(model, attention=attention)
    assert str(error.value).startswith(f"attention='{attention}' will not do: {why}")
    assert model.config._attn_implementation == before
    record_model("transformers", family, attention, f"refused: {why}")


@pytest.mark.parametrize("attention", ["flex", "varlen"])
def test_torchtunes_gemma2_has_dense_masks_only(attention: str, record_model: Record) -> None:
    why = "torchtune's Gemma2Attention computes the scores of all pairs of tokens itself, under a dense mask"
    with pytest.raises(ValueError, match=f"attention='{attention}' will not do: {why}; use 'dense'$"):
        prepare_model_for_packing(tiny_torchtune.build("gemma2"), attention=attention)
    record_model("torchtune", "gemma2", attention, f"refused: {why}")


def test_attention_sinks_with_flex_need_cuda(record_model: Record) -> None:
    family, attention = ON_CUDA_ONLY
    model = hf_models.build(family)
    inputs = prepare_model_for_packing(model, attention=attention)
    _, batch = stream_and_batch("overlong")
    with torch.compiler.set_stance("force_eager"), pytest.raises(ValueError, match="cannot be run on CPU"):
        model(**inputs(batch))
    record_model("transformers", family, attention, "on CUDA only")


# Groups, whose segments share the tokens of a prompt.


def group_cases() -> list[Any]:
    """Libraries, families, attentions and types; torchtune refuses groups with one of them by name."""
    found: list[Any] = []
    families = {"torchtune": TABLES["torchtune"], "transformers": [*FAMILIES, "qwen2_5_vl"]}
    for library, names in families.items():
        for family in names:
            if (library, family) == ("torchtune", "gemma2"):
                continue
            pairs = [word for word in attentions(library, family) if word != "flex"]
            pairs += ["flex"] * (library == "transformers" and family in ("mistral", "gemma2"))
            for word in pairs:
                case = (library, family, word)
                marks = () if family in QUICK[library] or word == "flex" else pytest.mark.slow
                found.append(pytest.param(*case, torch.float32, marks=marks, id="-".join(case)))
                if word != "flex" and (library == "torchtune" or family in GROUPS_IN_FP64):
                    name = "-".join((*case, "fp64"))
                    found.append(pytest.param(*case, torch.float64, marks=pytest.mark.slow, id=name))
    return found


@pytest.fixture(scope="module")
def grouped() -> Batch:
    """A batch with a tree of depth 3, with other answers between an answer and its prompt, and with a plain sample."""
    batch = batch_of(trees())
    paths = [path for _, _, path in segments(batch)]
    assert len(batch.tokens) > 2
    assert max(map(len, paths)) == 3
    assert any(path[-1][0] > path[-2][1] for path in paths if len(path) > 1)
    assert batch.num_tokens == sum(group.tokens.size for group in trees()) + 3, "each token is there once"
    return batch


@pytest.mark.parametrize(("library", "family", "attention", "dtype"), group_cases())
def test_shared_prompts_equal_own_copies(
    library: str, family: str, attention: str, dtype: torch.dtype, grouped: Batch
) -> None:
    found = measured(library, family, attention, grouped, dtype=dtype)
    assert max(found.values()) < (1e-9 if dtype == torch.float64 else 1e-5), found


# Ways of packing.


@pytest.mark.parametrize("model", ["torchtune llama3", "llama", "gpt2"])
@pytest.mark.parametrize(
    "stream",
    [
        pytest.param(name, marks=() if name in ("exact_fit", "padded wrap") else pytest.mark.slow)
        for name in STREAMS
    ],
)
def test_all_ways_of_packing_equal_alone(stream: str, model: str) -> None:
    """Several sequences in a pack, padding, one that fills a pack, one of a single token, fragments."""
    _, batch = stream_and_batch(stream)
    found = [fragment for _, _, fragment in placed(batch)]
    assert max(map(len, batch.fragments)) > 2
    assert batch.num_tokens < batch.tokens.numel()
    assert {1, MAX_SEQ_LEN} <= {fragment.stop - fragment.start for fragment in found}
    assert any(fragment.start for fragment in found) == ("split" in str(STREAMS[stream]))
    if model == "torchtune llama3":
        decoder = tiny_torchtune.build("llama3")
        assert worst(decoder, masked, decoder, stream) < 1e-5
    for attention in ("dense", "varlen") if model in FAMILIES else ():
        assert worst(*hf_models.prepared(model, attention), stream) < 1e-5


# Other families of transformers, and models that no attention keeps apart.


@pytest.mark.parametrize("family", sweep([*ISOLATED, *REFUSED], ["xlm"]))
def test_other_families_are_isolated_or_refused(family: str, record_model: Record) -> None:
    """Each family of transformers, because a new version may change any; our own code needs fewer."""
    outcomes = {}
    data, batch = stream_and_batch("overlong")
    for attention in ("dense", "varlen"):
        model, alone = (hf_models.build(family) for _ in range(2))
        try:
            inputs = prepare_model_for_packing(model, attention=attention)
            inputs(batch)
        except ValueError as error:
            outcomes[attention] = f"refused: {reason(str(error), family)}"
            continue
        found = differences(run_packed(model, batch, inputs), run_alone(alone, batch, data))
        seen = {"logits": found["logits"], "gradients": found["gradient"]}
        assert all(seen[name] < LIMITS[name] for name in seen), seen
        outcomes[attention] = figures(**seen)
    refused = all(outcome.startswith("refused: ") for outcome in outcomes.values())
    assert refused == (family in REFUSED), outcomes
    for attention, outcome in {EVERY: outcomes["dense"]}.items() if refused else outcomes.items():
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
        return f"it fails a try: {tried[1]}".rstrip()
    if unpackable := re.fullmatch(rf"this model cannot be packed: {family} (.*)", message):
        return unpackable[1]
    why = message.partition(" will not do: ")[2].rpartition("; use ")[0]
    return why.replace(family, "it", 1)


@pytest.mark.parametrize("attention", ["auto", "dense"])
@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        ("t5", {"d_model": 64, "num_layers": 2, "num_heads": 4, "d_ff": 48}, "is an encoder-decoder model"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "sees tokens to the right"),
        *((family, {}, "counts its bias (ALiBi) from") for family in ("bloom", "falcon, alibi", "mpt")),
        *((family, {}, "puts keys into blocks from") for family in ("deepseek_v4", "minimax_m3_vl_text")),
    ],
)
def test_families_that_cannot_be_packed_are_refused(
    family: str, changes: dict[str, Any], why: str, attention: str, record_model: Record
) -> None:
    with pytest.raises(ValueError) as error:
        prepare_model_for_packing(hf_models.build(family, **changes), attention=attention)
    kind = family.partition(",")[0]
    assert str(error.value).startswith(f"this model cannot be packed: {kind} {why}")
    assert str(error.value).endswith("; train it on padded batches, one sample a row")
    name = f"{family}, {next(iter(changes))}" if family in FAMILIES else family
    record_model("transformers", name, EVERY, "refused: " + str(error.value).split(f"{kind} ", 1)[1])


# The table of families.


@pytest.mark.slow  # it changes with a release of transformers, or with a line of `KNOWN`
def test_every_family_and_every_layer_with_a_state_is_tried() -> None:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    texts = [
        AutoConfig.for_model(family, **hf_models.sizes_of(family))
        for family in (*FAMILIES, *HYBRIDS, *ISOLATED)
    ]
    configs = [*texts, *(build_vision(family).config for family in VISION_FAMILIES)]
    assert {config.get_text_config().model_type for config in configs} == KNOWN
    assert set(NAMES) - {*TABLES["transformers"], *ISOLATED, *REFUSED, *FROM_THE_ROW} == set(UNTRIED)
    found = {
        cls.__name__
        for family in HYBRIDS
        for mixer in find_mixers(hf_models.build(family))
        for cls in type(mixer).__mro__
    }
    assert found >= MIXERS


@pytest.mark.skipif(VARIABLE in os.environ, reason="the page is being written")
def test_the_figures_of_the_page_are_within_the_limits() -> None:
    written = read_page(PAGE.read_text(encoding="utf-8"))
    assert {key: over for key, outcome in written.items() if (over := over_the_limit(outcome))} == {}
    families = {family for library, family, used in written if library == "transformers" and used != EVERY}
    assert families == {*TABLES["transformers"], *ISOLATED}


# On CUDA.


WORDS = ("dense", "flex", "varlen", "flash")
# Libraries, families, attentions, whether in groups, and types; varlen and flash have 16 bits only.
ON_CUDA = [
    *(("torchtune", family, word, grouped, torch.bfloat16)
      for family in TABLES["torchtune"] for word in WORDS for grouped in (False, True)
      if family != "gemma2"),
    *(("torchtune", family, word, False, torch.float32)
      for family in TABLES["torchtune"] for word in ("dense", "flex") if (family, word) != ("gemma2", "flex")),
    *(("transformers", family, word, True, torch.bfloat16)
      for family in ("llama", "mistral", "gemma3_text", "deepseek_v3") for word in WORDS),
    *(("transformers", family, word, False, torch.bfloat16 if word == "varlen" else torch.float32)
      for family in ("llama", "mistral", "qwen3", "gemma2", "gpt_oss", "deepseek_v3")
      for word in ("dense", "flex", "varlen")
      if (family, word) not in {*WITHOUT, *ON_A_CPU}),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("library", "family", "attention", "in_groups", "dtype"), ON_CUDA)
def test_packed_equals_alone_on_cuda(
    library: str, family: str, attention: str, in_groups: bool, dtype: torch.dtype, grouped: Batch
) -> None:
    """On CUDA, packs equal samples alone: in fp32 as on a CPU, in bf16 within twice its own rounding error."""
    data, batch = (None, grouped) if in_groups else stream_and_batch("overlong")
    batch = batch.to("cuda")
    exact = run_alone(made(library, family, attention, torch.float32).cuda(), batch, data)
    alone = run_alone(made(library, family, attention, dtype).cuda(), batch, data)
    model = made(library, family, attention, dtype).cuda()
    try:
        inputs = prepare_model_for_packing(model, attention=attention)
        found = differences(run_packed(model, batch, inputs), alone)
    except ImportError as error:
        pytest.skip(str(error))
    rounding = differences(alone, exact)
    # Without groups, transformers' models are compared by their logits alone.
    names = ("logits", "gradient") if library == "torchtune" or in_groups else ("logits",)
    for name in names:
        assert found[name] < (1e-5 if dtype == torch.float32 else 2 * rounding[name]), found
