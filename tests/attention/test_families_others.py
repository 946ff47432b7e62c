"""All other causal language models of transformers: each is isolated, or refused with the reason.

Slow, and run by `make models`, which writes what it sees. What our own code does is tested with fewer families in
test_families.py; here a new version of transformers shows what it changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from streampack import prepare_model_for_packing
from tests.support.hf_models import FAMILIES, build, run_alone, run_packed
from tests.support.hybrid_models import HYBRIDS
from tests.support.isolation import differences, stream_and_batch
from tests.support.models_table import EVERY, LIMITS, figures
from tests.support.other_families import ISOLATED, REFUSED, UNTRIED, sizes_of
from tests.support.vision_models import VISION_FAMILIES

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

Record = Callable[[str, str, str, str], None]


@pytest.mark.parametrize("family", [*ISOLATED, *REFUSED])
def test_packed_equals_alone_or_is_refused(family: str, record_model: Record) -> None:
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


def test_every_family_of_transformers_is_named() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    tested = {*FAMILIES, *HYBRIDS, *VISION_FAMILIES, *ISOLATED, *REFUSED}
    assert set(NAMES) - tested == set(UNTRIED)
