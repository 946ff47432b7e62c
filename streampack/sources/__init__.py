"""Where rows come from."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from streampack.sources.base import Source
from streampack.sources.holdout import Holdout
from streampack.sources.iterable import IterableSource
from streampack.sources.jsonl import JSONLSource
from streampack.sources.mapstyle import MapSource

__all__ = ["Holdout", "IterableSource", "JSONLSource", "MapSource", "Source", "as_source"]


def as_source(data: Any) -> Source:
    """A `Source` of whatever holds rows: a source, a path or glob, a map-style dataset, an iterable.

    >>> type(as_source([{"tokens": [1], "labels": [1]}])).__name__
    'MapSource'
    """
    if isinstance(data, Source):
        return data
    if isinstance(data, str | os.PathLike):
        return JSONLSource(data)
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
