"""Samples made of lists."""

from __future__ import annotations

import numpy as np

from streampack import Sample


def make_sample(tokens: list[int], labels: list[int] | None = None) -> Sample:
    """Make an int64 sample. Without ``labels``, its labels are its tokens: the same array."""
    tokens_array = np.array(tokens, np.int64)
    return Sample(tokens_array, tokens_array if labels is None else np.array(labels, np.int64))
