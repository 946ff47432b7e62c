"""Rows with made-up images: every pixel says of which row, image and patch it is, so a wrong one is seen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from streampack import IGNORE_INDEX, MediaSample, Sample

IMAGE = 7
"""The token that stands for a feature of an image."""


def row(number: int, *, text: int, grids: list[tuple[int, int]]) -> dict[str, Any]:
    """Return a row with so many tokens of text behind its images of height x width patches."""
    return {"number": number, "text": text, "grids": grids}


def rows(count: int, *, seed: int = 0, most: int = 5) -> list[dict[str, Any]]:
    """Return rows without images and with up to three."""
    rng = np.random.default_rng(seed)
    return [
        row(
            number,
            text=int(rng.integers(2, 30)),
            grids=[
                (int(rng.integers(1, most)), int(rng.integers(1, most)))
                for _ in range(int(rng.choice([0, 0, 1, 2, 3])))
            ],
        )
        for number in range(count)
    ]


def pixels_of(given: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """Return the pixels of a row's images, [patches, 3] float32: number of the row, image, patch."""
    counts = [h * w for h, w in given["grids"]]
    return np.array(
        [[given["number"], i, patch] for i, count in enumerate(counts) for patch in range(count)], np.float32
    ).reshape(-1, 3)


def positions_of(given: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """Return positions of 3 axes by the rule of Qwen2-VL, written out for these rows."""
    columns: list[tuple[int, int, int]] = []
    at = 0
    for h, w in given["grids"]:
        columns += [(at, at + y, at + x) for y in range(h) for x in range(w)]
        at += max(h, w)
    columns += [(at + i,) * 3 for i in range(given["text"])]
    return np.array(columns).T


def encode(given: Mapping[str, Any]) -> Sample:
    """Make the sample of a row."""
    pixels = pixels_of(given)
    text = 10 + np.arange(given["text"]) % 40
    tokens = np.concatenate([np.full(len(pixels), IMAGE), text]).astype(np.int32)
    labels = np.where(tokens == IMAGE, IGNORE_INDEX, tokens)
    if not given["grids"]:
        return Sample(tokens, labels)
    media = {
        "pixel_values": pixels,
        "image_grid_thw": np.array([(1, *grid) for grid in given["grids"]]),
    }
    return MediaSample(tokens, labels, media=media, positions=positions_of(given))
