"""Tiny Hugging Face models that read images beside text; only what reads text is trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.harness.hf_models import common_sizes, randomized
from tests.harness.hybrid_models import LINEAR_FIRST

IMAGE, VIDEO = 61, 62
"""Token ids that stand for an image and a video, behind those of the samples."""
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
QUARTER = ROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
TEXT = {"rope_parameters": ROPE, "vocab_size": VIDEO + 1}
QWEN3_5 = LINEAR_FIRST | {"rope_parameters": QUARTER}
# Those of these that a family's vision config has; all families' vision models have names of their own for them.
VISION = {
    "depth": 1,
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "embed_dim": 32,
    "num_heads": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "out_hidden_size": 64,
    "patch_size": 4,
    "image_size": 16,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
}

VISION_FAMILIES: dict[str, dict[str, Any]] = {
    "ernie4_5_vl_moe": {
        "rope_parameters": ROPE | {"mrope_section": [3, 3, 2]},
        "moe_intermediate_size": [32, 32],
    },
    "glm46v": {},
    "glm4v": {},
    "glm4v_moe": {"rope_parameters": QUARTER},
    "glm_ocr": {},
    "hunyuan_vl": {},
    "paddleocr_vl": {},
    "qwen2_5_vl": {},
    "qwen2_vl": {},
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": QWEN3_5,
    "qwen3_vl": {},
    "qwen3_vl_moe": {"sliding_window": None},  # which its masks do not read
}
"""What the text side of each family has beside the common sizes."""


def build_vision(family: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Make a model in eval mode, the same at every call."""
    transformers = pytest.importorskip("transformers")
    default = transformers.AutoConfig.for_model(family)
    vision = {name: value for name, value in VISION.items() if hasattr(default.vision_config, name)}
    text = common_sizes(default.text_config.to_dict()) | TEXT | VISION_FAMILIES[family]
    config = type(default)(
        text_config=text | {"model_type": default.text_config.model_type},
        vision_config=vision | {"model_type": default.vision_config.model_type},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=dtype)
    model = randomized(model, dtype)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for part in (model.get_decoder(), model.get_output_embeddings()):
        # Not experts of images, and not what is only added before a choice.
        for name, parameter in part.named_parameters():
            parameter.requires_grad_("vision_moe" not in name and "correction_bias" not in name)
    return model
