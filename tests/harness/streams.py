"""Small streams of packs for tests."""

from __future__ import annotations

from typing import Any

from streampack import IterablePackedDataset
from tests.harness.corpus import Numbers


def make(source: Any, **settings: Any) -> IterablePackedDataset:
    """A stream of `Numbers`, with packs of 24 tokens and buffers of 8 samples."""
    return IterablePackedDataset(
        source, **{"max_seq_len": 24, "buffer_size": 8, "encoder": Numbers(), **settings}
    )
