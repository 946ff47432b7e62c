"""Positions of several axes (mRoPE) by a vision-language model's own rule, for one sample."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from streampack.packing.pretrained import load_pretrained
from streampack.types import Array, IntArray

PositionRule = Callable[[IntArray, Mapping[str, Array]], IntArray]
"""Makes positions ``[axes, tokens]`` of a sample's ids and media."""


def position_rule(model: Any) -> PositionRule | None:
    """Return a model's own rule of positions with several axes, without its weights; None for a model without one.

    Args:
        model: a model, its config, or a folder or name on the Hub.
    """
    from transformers import AutoConfig, AutoModel

    config = getattr(model, "config", model)
    if isinstance(config, str | os.PathLike):
        config = load_pretrained(AutoConfig, config, what="model", file="config.json")
    with torch.device("meta"):
        bare = AutoModel.from_config(config)
    return partial(_positions, bare) if hasattr(bare, "get_rope_index") else None


def _positions(bare: Any, tokens: IntArray, media: Mapping[str, Array]) -> IntArray:
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    grids = {name: torch.from_numpy(values) for name, values in media.items() if name.endswith("grid_thw")}
    kinds = (ids == bare.config.image_token_id).int()
    try:
        positions, _ = bare.get_rope_index(ids, mm_token_type_ids=kinds, **grids)
    except (RuntimeError, StopIteration) as error:
        raise ValueError(
            "the model's own rule finds no positions for the sample; its template must set a token between two images, "
            f"and its processor be the model's: {error}"
        ) from None
    found: IntArray = positions[:, 0].numpy()
    return found
