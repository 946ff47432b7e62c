"""`as_source`: make a `Source` of the data that a user passes."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from glob import glob
from typing import Any

import numpy as np

from streampack.sources.formats.arrow_files import ARROW, ArrowSource
from streampack.sources.formats.jsonl import JSON, JSON_LINES, JSONLSource
from streampack.sources.formats.mds import MDSSource
from streampack.sources.formats.parquet import PARQUET, ParquetSource
from streampack.sources.formats.text import TEXT, TextSource
from streampack.sources.formats.token_shards import FORMAT, TokenShardSource
from streampack.sources.formats.webdataset import TAR, WebDatasetSource
from streampack.sources.hugging_face import HFSource
from streampack.sources.mechanics.arrow_rows import clean_unknown
from streampack.sources.mechanics.indexed import INDEX, read_index
from streampack.sources.memory import Columns, IterableSource, MapSource
from streampack.sources.source import Source
from streampack.storage.base import path_in, redact
from streampack.storage.listing import names_in, storage_of
from streampack.storage.names import Place

log = logging.getLogger(__name__)

FilesOf = Callable[[Any], Source]
"""Makes a source of a path, a folder, a glob, or a list of paths."""

FORMATS: Sequence[tuple[FilesOf, tuple[str, ...], str]] = (
    (ParquetSource, PARQUET, "Parquet"),
    (JSONLSource, JSON_LINES, "JSON lines"),
    (ArrowSource, ARROW, "Arrow"),
    (WebDatasetSource, TAR, "tar files"),
)
"""(source, endings of its files' names, what they are)."""
OTHERWISE: Sequence[tuple[FilesOf, tuple[str, ...], str]] = (
    (JSONLSource, JSON, "JSON"),
    (TextSource, TEXT, "text"),
)
"""Formats of files that in a folder with others only describe those."""

BY_NUMBER = "give MapSource an object whose len() is the number of rows, and whose [n] reads one by"
SAVED, SPLITS = "state.json", "dataset_dict.json"
"""Files that `save_to_disk` of datasets writes beside a dataset, and beside several splits."""


def by_rows(data: Any) -> Any:
    """Turn a pandas frame or a dict of columns into `Columns`; return other data unchanged.

    Raises:
        ValueError: for a table of another library, and for a dict whose values are no columns.
    """
    library = type(data).__module__.partition(".")[0]
    if library == "pandas" and hasattr(data, "columns"):
        # A frame that was read from Parquet holds arrays of records, with Arrow's nulls; one that was made holds lists.
        clean = partial(clean_unknown, lists=np.ndarray)
        return Columns({str(name): data[name].array for name in data.columns}, clean=clean)
    if (library, hasattr(data, "columns")) in (("polars", True), ("pyarrow", True)):
        raise ValueError(
            f"a table of {library} has no rows by number; give datasets.Dataset(table), or of polars, "
            "datasets.Dataset.from_polars(frame)"
        )
    if isinstance(data, Mapping) and data and all(isinstance(name, str) for name in data):
        if all(
            hasattr(column, "__len__") and not isinstance(column, str | Mapping) for column in data.values()
        ):
            return Columns(data)
        raise ValueError(
            f"a dict of {', '.join(map(repr, data))} holds no columns of rows; give a list of rows, or of every column "
            "a list; of several datasets make a Mix, or choose one"
        )
    return data


def as_source(data: Any) -> Source:
    """Make a `Source` of a source, a path or glob, a map-style dataset, columns, or an iterable.

    A file is read by the ending of its name: ``.parquet``, ``.jsonl``, ``.json``, ``.arrow``, ``.feather``, ``.tar``,
    ``.txt``; others as JSON lines. A folder, here or behind a URL, that has an index holds token shards or MosaicML's;
    one that datasets saved is read as that says; of other folders, the files of one format are read, at any depth:
    ``.json`` and ``.txt`` only if there is nothing else.

    >>> type(as_source([{"tokens": [1], "labels": [1]}])).__name__
    'MapSource'
    """
    if isinstance(data, Source):
        return data
    if isinstance(data, type) and issubclass(data, Source):
        raise ValueError(f"the source is the class {data.__name__}; make one of it: {data.__name__}(path)")
    if any(base.__module__.startswith("streampack.") for base in type(data).__mro__):
        raise ValueError(
            f"{type(data).__name__} gives packs, not rows; give the dataset that was packed, or leave packing to one "
            "of the two"
        )
    if isinstance(data, str | os.PathLike):
        return _of_path(os.fspath(data))
    if _are_paths(data):
        files = [os.fspath(path) for path in data]
        kinds = {_kind_of(path) for path in files}
        return (kinds.pop() if len(kinds) == 1 else JSONLSource)(files)
    if type(data).__module__ == "datasets.dataset_dict":
        splits = ", ".join(map(repr, data))
        raise ValueError(
            f"a {type(data).__name__} has several splits: {splits}; give one, such as dataset['train']"
        )
    data = by_rows(data)
    if type(data).__module__ == "datasets.iterable_dataset":
        return HFSource(data)
    # torch's IterableDataset may have a length, and inherits a __getitem__ that only raises: it is not map-style.
    is_stream = any(base.__name__ == "IterableDataset" for base in type(data).__mro__)
    if hasattr(data, "__len__") and hasattr(data, "__getitem__") and not is_stream:
        return MapSource(data)
    if isinstance(data, Iterable) or callable(data):
        return IterableSource(data)
    raise ValueError(
        f"a {type(data).__name__} holds no rows; give a source, a path of JSONL files, a map-style dataset "
        "or an iterable"
    )


def _are_paths(data: Any) -> bool:
    """Return whether this is a list of paths, URLs or globs. A list of other texts is refused when it is read."""
    if not isinstance(data, list | tuple) or not all(isinstance(item, str | os.PathLike) for item in data):
        return False
    first = next(iter(data), "")
    return isinstance(first, os.PathLike) or "://" in first or bool(glob(first))


def _kind_of(path: str) -> FilesOf:
    """Return the source for a file or glob, by the ending of a name; another one is read as JSON lines, or refused."""
    names = [path_in(path), *([] if "://" in path else glob(path)[:1])]
    known = ((kind, endings) for kind, endings, _ in (*FORMATS, *OTHERWISE))
    return next(
        (kind for kind, endings in known if any(name.endswith(endings) for name in names)), JSONLSource
    )


def _of_path(path: str) -> Source:
    # A URL that names a file by its ending costs no request here.
    named = "://" in path and path_in(path).endswith((*PARQUET, *JSON_LINES, *JSON, *TEXT, *TAR, *ARROW))
    if named or (names := names_in(path)) is None:
        return _named(_kind_of(path)(path))
    shown = redact(path).rstrip("/")
    if INDEX in names:
        _, index = read_index(path, storage_of([path], None))
        if "chunks" in index:
            raise ValueError(f"{shown} is of litData; {BY_NUMBER} litdata.StreamingDataset(folder)")
        return TokenShardSource(path) if index.get("format") == FORMAT else MDSSource(path)
    if any(name.endswith(".lance") for name in names):
        raise ValueError(f"{shown} is of Lance; {BY_NUMBER} lance.dataset(folder).take")
    if SPLITS in names:
        splits = sorted({name.partition("/")[0] for name in names if "/" in name})
        raise ValueError(
            f"{shown} has several splits: {', '.join(splits)}; name one, such as {shown}/{splits[0]}"
        )
    if SAVED in names:
        return ArrowSource(_saved(path))
    kinds = [each for each in FORMATS if any(name.endswith(each[1]) for name in names)]
    if len(kinds) > 1:
        (_, (ending, *_), one), (_, _, other), *_ = kinds
        raise ValueError(f"{shown} holds {one} and {other}; name those to read, such as {shown}/*{ending}")
    kinds += [each for each in OTHERWISE if any(name.endswith(each[1]) for name in names)]
    return _named((kinds[0][0] if kinds else JSONLSource)(path))


def _named(source: Source) -> Source:
    """Log what a row is where that is not told by the file, and return the source."""
    if isinstance(source, TextSource):
        log.warning(
            "text files: each line is a row; TextSource(..., sample_by='document') makes each file one"
        )
    return source


def _saved(folder: str) -> list[str]:
    """Return the files of a folder that datasets saved: those of an earlier save may be there, too."""
    index = f"{folder.rstrip('/')}/{SAVED}"
    held = storage_of([folder], None)
    state = json.loads(held.head(held.pinned([index])[0])[0])
    return [Place(index).file(each["filename"]).path for each in state["_data_files"]]
