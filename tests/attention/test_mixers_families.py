"""Families whose layers run one sequence at a time: each sample has the logits and gradients that it has alone.

`make test` runs one family for each mechanism (`MECHANISMS`), `make test-slow` and `make models` run all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch

from streampack import Batch, prepare_model_for_packing
from streampack.attention import mixers
from streampack.attention.mixer_tables import ALIBI, BLOCKS, MIXERS, TAKES_BOUNDARIES, find_mixers
from streampack.attention.probe_pack import pack_of
from tests.support.hf_models import VOCAB, build, fp64_throughout, run_alone, run_packed
from tests.support.hybrid_models import HYBRIDS, OTHERWISE
from tests.support.isolation import differences, stream_and_batch
from tests.support.models_table import LIMITS, figures
from tests.support.quick import sweep

pytest.importorskip("transformers")

Record = Callable[[str, str, str, str], None]
# They compute a part in fp32 in any case.
NOT_IN_FP64 = {"xlstm", "inkling_text", "inkling2_text", "kimi_linear"}
MECHANISMS = {
    "mamba": "a state-space layer, and no attention",
    "lfm2": "a convolution beside attention",
    "qwen3_next": "linear attention beside attention and experts",
    "granitemoehybrid": "masks that the model does not make from positions",
    "rwkv": "a layer that returns a state beside its output",
    "xlstm": "a layer that computes whole chunks, and what is left over token by token",
    "bloom": "ALiBi as a bias for all packs",
    "falcon, alibi": "ALiBi in the mask",
    "mpt": "ALiBi as a bias for one pack",
    "zaya": "a layer of which several outputs have a value for each token",
    "deepseek_v4": "blocks of keys counted from the beginning of a row",
}


@pytest.mark.parametrize("attention", ["dense", "varlen"])
@pytest.mark.parametrize("family", sweep(HYBRIDS, MECHANISMS))
def test_packed_equals_alone(family: str, attention: str, record_model: Record) -> None:
    sizes = HYBRIDS[family]
    if why := OTHERWISE.get((family, attention)):
        with pytest.raises(ValueError) as error:
            prepare_model_for_packing(build(family, **sizes), attention=attention)
        assert str(error.value).startswith(f"attention='{attention}' will not do: {why}")
        record_model(
            "transformers", family, attention, "refused: it fails the probe, or has no such attention"
        )
        return
    data, batch = stream_and_batch("overlong")
    seen: dict[str, float] = {}
    for dtype in (torch.float32, torch.float64):
        if dtype == torch.float64 and (family in NOT_IN_FP64 or attention != "dense"):
            continue
        model, alone = build(family, dtype, **sizes), build(family, dtype, **sizes)
        inputs = prepare_model_for_packing(model, attention=attention)
        with fp64_throughout() if dtype == torch.float64 else nullcontext():
            found = differences(run_packed(model, batch, inputs), run_alone(alone, data, batch))
        if dtype == torch.float32:
            seen |= {"logits": found["logits"], "gradients": found["gradient"]}
        else:
            seen["fp64"] = found["gradient"]
    assert all(seen[name] < LIMITS[name] for name in seen), seen
    record_model("transformers", family, attention, figures(**seen))


def test_every_mixer_is_tried() -> None:
    found = {
        cls.__name__
        for family, sizes in HYBRIDS.items()
        for mixer in find_mixers(build(family, **sizes))
        for cls in type(mixer).__mro__
    }
    assert found >= MIXERS | ALIBI | BLOCKS
    assert TAKES_BOUNDARIES.keys() <= MIXERS


ALIBI_FAMILIES = ("bloom", "falcon, alibi", "mpt")


def deep_in_a_pack(family: str) -> float:
    """Return how far the logits of a sample behind 700 other tokens are from those that it has alone."""
    sizes = HYBRIDS[family] | ({"max_seq_len": 800} if family == "mpt" else {})
    tokens = torch.randint(3, VOCAB, (1, 800), generator=torch.Generator().manual_seed(5))
    batch: Batch = pack_of(tokens, [700, 90])
    model: Any = build(family, **sizes)
    with torch.no_grad():
        alone = model(input_ids=tokens[:, 700:790], use_cache=False).logits
        packed = model(**prepare_model_for_packing(model)(batch)).logits[:, 700:790]
    return float((packed - alone).norm() / alone.norm())


@pytest.mark.parametrize("family", ALIBI_FAMILIES)
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
