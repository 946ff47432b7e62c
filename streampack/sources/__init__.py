"""Where rows come from."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from streampack.sources.base import Reading, Source
from streampack.sources.hf import HFSource
from streampack.sources.holdout import Holdout
from streampack.sources.iterable import IterableSource
from streampack.sources.jsonl import JSONLSource
from streampack.sources.mapstyle import MapSource
from streampack.sources.mds import MDSSource
from streampack.sources.parquet import ParquetSource
from streampack.sources.tokens import TokenShardSource

__all__ = [
    "HFSource",
    "Holdout",
    "IterableSource",
    "JSONLSource",
    "MDSSource",
    "MapSource",
    "ParquetSource",
    "Reading",
    "Source",
    "TokenShardSource",
    "as_source",
]


def as_source(data: Any) -> Source:
    """A `Source` of whatever holds rows: a source, a path or glob, a map-style dataset, an iterable.

    Files whose names end in ``.parquet`` are read as Parquet, others as JSON lines.

    >>> type(as_source([{"tokens": [1], "labels": [1]}])).__name__
    'MapSource'
    """
    if isinstance(data, Source):
        return data
    if isinstance(data, str | os.PathLike):
        return ParquetSource(data) if os.fspath(data).endswith(".parquet") else JSONLSource(data)
    if type(data).__module__ == "datasets.iterable_dataset":
        return HFSource(data)
    # torch's IterableDataset inherits a __getitem__ that only raises, and may have a length.
    streams = any(base.__name__ == "IterableDataset" for base in type(data).__mro__)
    if hasattr(data, "__len__") and hasattr(data, "__getitem__") and not streams:
        return MapSource(data)
    if isinstance(data, Iterable) or callable(data):
        return IterableSource(data)
    raise ValueError(
        f"a {type(data).__name__} holds no rows; give a source, a path of JSONL files, a map-style dataset "
        "or an iterable"
    )
