"""Sweeps over families of models, of which `make test` runs one for each mechanism."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

MECHANISMS = {
    "dbrx": "a config inside the config; one layer for queries, keys and values",
    "falcon": "attention written into the layers, masks made without positions",
    "gemma2": "windows in every other layer, soft caps, a scale of its own",
    "gpt2": "a table of positions",
    "gpt_oss": "attention sinks, masks made without positions",
    "llama": "grouped queries and RoPE",
    "llama4_text": "chunks, layers without RoPE, experts",
    "qwen2_moe": "a window that only masks have",
    "stablelm": "layers that hand on no keyword arguments",
}
"""Of `hf_models.FAMILIES`, one for each thing that our code treats in its own way."""

HYBRID_MECHANISMS = {
    "mamba": "a state-space layer, and no attention",
    "lfm2": "a convolution beside attention",
    "qwen3_next": "linear attention beside attention and experts",
    "granitemoehybrid": "masks that the model does not make from positions",
    "rwkv": "a layer that returns a state beside its output",
    "xlstm": "a layer that computes whole chunks, and what is left over token by token",
    "zaya": "a layer of which several outputs have a value for each token",
}
"""Of `hybrid_models.HYBRIDS`, likewise."""

TORCHTUNE = {
    "gemma2": "windows in every other layer, soft caps",
    "llama3_2": "an output whose weights are the embedding's",
    "mistral": "attention as in most families",
    "qwen2": "biases in q, k and v",
}
"""Of `tiny_torchtune.FAMILIES`, likewise."""


def sweep(families: Iterable[str], quick: Iterable[str]) -> list[Any]:
    """Return families as parameters of a test, slow but for those in ``quick``.

    `make models` runs all of them, with the same limits, and fails where one is exceeded.
    """
    quick = set(quick)
    return [pytest.param(family, marks=() if family in quick else pytest.mark.slow) for family in families]
