"""Models that read images beside text: packs of text have the logits of the samples alone, and images are refused.

`make test` runs one family whose positions have several axes, and one that has layers with a state besides; `make
test-slow` and `make models` run all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from streampack import find_leaks, prepare_model_for_packing
from streampack.attention.media import media_tokens, position_axes
from tests.support import groups
from tests.support.hf_models import MAX_SEQ_LEN, build, fp64_throughout, run_alone, run_packed
from tests.support.isolation import differences, stream_and_batch
from tests.support.models_table import LIMITS, figures
from tests.support.quick import sweep
from tests.support.vision_models import IMAGE, VIDEO, VISION_FAMILIES, build_vision

pytest.importorskip("transformers")

Record = Callable[[str, str, str, str], None]
QUICK = {"qwen2_5_vl", "qwen3_5"}
NOT_IN_FP64 = {"ernie4_5_vl_moe"}  # it computes a part in fp32 in any case


@pytest.mark.parametrize("attention", ["dense", "varlen"])
@pytest.mark.parametrize("family", sweep(VISION_FAMILIES, QUICK))
def test_packed_equals_alone(family: str, attention: str, record_model: Record) -> None:
    data, batch = stream_and_batch("overlong")
    seen: dict[str, float] = {}
    for dtype in (torch.float32, torch.float64):
        if dtype == torch.float64 and family in NOT_IN_FP64:
            continue
        model, alone = build_vision(family, dtype), build_vision(family, dtype)
        inputs = prepare_model_for_packing(model, attention=attention)
        with fp64_throughout() if dtype == torch.float64 else nullcontext():
            found = differences(run_packed(model, batch, inputs), run_alone(alone, data, batch))
        if dtype == torch.float32:
            seen |= {"logits": found["logits"], "gradients": found["gradient"]}
        else:
            seen["fp64"] = found["gradient"]
    assert all(seen[name] < LIMITS[name] for name in seen), seen
    record_model("transformers", family, attention, figures(**seen))


@pytest.fixture
def model() -> Any:
    return build_vision("qwen2_5_vl")


def test_all_rows_of_positions_are_equal(model: Any) -> None:
    _, batch = stream_and_batch("overlong")
    positions = prepare_model_for_packing(model, attention="dense")(batch)["position_ids"]
    assert positions.shape == (4, *batch.tokens.shape), "for masks, and for time, height and width"
    assert torch.equal(positions, batch.input_pos.expand_as(positions))
    assert prepare_model_for_packing(model, attention="varlen")(batch)["position_ids"].ndim == 2


def test_positions_with_axes_and_no_row_for_masks_leak(model: Any) -> None:
    inputs = prepare_model_for_packing(model, attention="dense")

    def without_row(batch: Any) -> dict[str, Any]:
        made = inputs(batch)
        return made | {"position_ids": made["position_ids"][1:]}

    report = find_leaks(model, inputs=without_row, max_seq_len=MAX_SEQ_LEN)
    assert {leak.kind for leak in report.leaks} >= {"sample"}


@pytest.mark.parametrize("attention", ["dense", "varlen"])
def test_prefixes_are_shared(model: Any, attention: str) -> None:
    batch = groups.batch_of(groups.trees())
    inputs = prepare_model_for_packing(model, attention=attention)
    found = differences(
        groups.run_packed(model, batch, inputs), groups.run_alone(build_vision("qwen2_5_vl"), batch)
    )
    assert max(found.values()) < 1e-6, found


def test_a_model_of_text_has_no_axes_and_no_images() -> None:
    assert position_axes(build("llama")) is None
    assert media_tokens(build("llama")) == ()
    assert media_tokens(build_vision("qwen2_5_vl")) == (IMAGE, VIDEO)


@pytest.mark.parametrize("token", [IMAGE, VIDEO])
def test_a_token_of_an_image_is_refused(model: Any, token: int) -> None:
    _, batch = stream_and_batch("overlong")
    tokens = batch.tokens.clone()
    tokens[1, 3] = token
    inputs = prepare_model_for_packing(model)
    with pytest.raises(ValueError, match=f"the token {token}, which stands for an image, video or sound"):
        inputs(replace(batch, tokens=tokens))


@pytest.mark.parametrize("column", ["pixel_values", "image_grid_thw", "input_features"])
def test_a_column_of_images_is_refused(model: Any, column: str) -> None:
    flat = {"input_ids": torch.tensor([[7, 8, 9, 4]]), "position_ids": torch.tensor([[0, 1, 2, 0]])}
    inputs = prepare_model_for_packing(model)
    inputs(flat)
    with pytest.raises(ValueError, match=f"the batch has {column!r}, and packs hold text only; leave such"):
        inputs(flat | {column: torch.zeros(2, 4)})


def test_the_probe_draws_no_token_of_an_image(model: Any) -> None:
    inputs, largest = prepare_model_for_packing(model), []

    def recorded(batch: Any) -> dict[str, Any]:
        largest.append(int(batch.tokens.max()))
        return inputs(batch)

    for seed in range(3):
        assert find_leaks(model, inputs=recorded, seed=seed, max_seq_len=MAX_SEQ_LEN).ok
    assert max(largest) == IMAGE - 1
