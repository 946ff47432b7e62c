"""`IndexedSource`, for folders whose ``index.json`` lists shards and their numbers of records.

The index is not trusted: it may come from the network, so its names and numbers are checked.
"""

from __future__ import annotations

import json
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from streampack.sources.examples import EXAMPLES, Example, example
from streampack.sources.files import FileSource, places
from streampack.sources.parts import Damage, Part, Record
from streampack.storage.base import (
    GONE,
    File,
    FileStorage,
    Listed,
    LocalStorage,
    Resized,
    map_in_threads,
    redact,
    with_path,
)
from streampack.storage.corpus import Corpus, once
from streampack.storage.listing import Name, corpus_of, placed, resolved, storage_of
from streampack.storage.ranges import Fetcher
from streampack.storage.retries import Storage

INDEX = "index.json"
Shard = TypeVar("Shard")
Offsets = npt.NDArray[np.int64]


class IndexedSource(FileSource):
    """Numbered records in shards: token shards and MDS. The index says how many records each shard has."""

    sizes_of_index = False
    """Whether an index says how large files are, so that one of another size is damaged; else it has changed."""

    def __init__(self, corpus: Corpus, counts: Sequence[int]) -> None:
        super().__init__(corpus)
        self.counts = list(counts)
        """The number of records in each shard."""

    @abstractmethod
    def slice(self, part: Part, fetcher: Fetcher) -> Iterator[Record]:
        """Return the records of a part whose ``stop`` is a number; see `FileSource.records`."""

    def records(self, part: Part, offset: int, fetcher: Fetcher) -> Iterator[Record]:
        """See `FileSource.records`."""
        if not 0 <= offset <= self.counts[part.file]:
            file = self.files[part.file]
            raise ValueError(f"{file.shown} has no {self.unit} {offset}; the state or the file is damaged")
        return self.slice(self._bounded(part)._replace(start=offset), fetcher)

    def place(self, part: Part, offset: int) -> str:
        """See `FileSource.place`."""
        return self.locate((part.file, offset))

    @property
    def size(self) -> int | None:
        """See `Source.size`."""
        return sum(self.counts)

    def examples(self, count: int = EXAMPLES) -> list[Example]:
        """See `Source.examples`: records from all over the shards."""
        return map_in_threads(
            lambda row_id: example(row_id, lambda: self.fetch_many([row_id])[0]), places(self.counts, count)
        )

    @override
    def damage(self, error: Exception, part: Part, offset: int) -> Damage | None:
        if self.sizes_of_index and isinstance(error, Resized):
            return Damage(_resized(error.size, self.files[part.file].size), offset=offset)
        return super().damage(error, part, offset)

    def _bounded(self, part: Part) -> Part:
        return part if part.stop is not None else part._replace(stop=self.counts[part.file])


Described = tuple[str, int, Shard, str | None]
"""An index's entry of a shard: (name, size in bytes, what the format needs to read it, why it cannot be read)."""


def read_indexes(
    folders: Sequence[Name],
    describe: Callable[[Mapping[str, Any], Mapping[str, Any]], Described[Shard]],
    *,
    storage: Storage | Mapping[str, Any] | None,
) -> tuple[Corpus, list[Shard]]:
    """Return the shards that the indexes of folders name, in their order, and what the indexes say of them.

    Files on this machine that are gone or have another size are among `Corpus.problems`. Those behind a URL are checked
    when they are read.

    Args:
        folders: in one place: on this machine, or behind URLs.
        describe: checks an index and its entry of a shard, and returns what that says. It raises ValueError.
        storage: how files behind URLs are read.

    Raises:
        ValueError: if there is no index or it is none of such shards, a name leads out of its folder, a shard is named
            twice, or none can be read.
    """
    if not folders:
        raise ValueError("no folders given; name at least one")
    given = [os.fspath(folder) for folder in folders]
    held = storage_of(given, storage)
    found: list[Listed] = []
    shards: list[Shard] = []
    for folder in given:
        url = with_path(folder, lambda path: f"{path.rstrip('/')}/{INDEX}")
        path, text = once(partial(_read, url, held), of=redact(url), local=isinstance(held, LocalStorage))
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{redact(path)} is no JSON ({error})") from None
        entries = content.get("shards") if isinstance(content, dict) else None
        if not isinstance(entries, list) or not entries:
            raise ValueError(f"{redact(path)} names no shards: it is no index of such")
        index = resolved(path)
        for number, entry in enumerate(entries):
            try:
                if not isinstance(entry, dict):
                    raise ValueError("it is not described")
                name, size, shard, problem = describe(content, entry)
                if not isinstance(name, str) or type(size) is not int or size <= 0:
                    raise ValueError(
                        f"{name!r} of {size!r} bytes is no shard; an entry has a name and a size above 0"
                    )
                listed = placed(index, name, size)
            except ValueError as error:
                raise ValueError(f"{redact(path)}, shard {number}: {error}") from None
            if isinstance(held, LocalStorage):
                listed = _looked_at(listed, held)
            found.append(listed._replace(problem=listed.problem or problem))
            shards.append(shard)
    return corpus_of(found, held), shards


def _read(path: str, storage: FileStorage) -> tuple[str, bytes]:
    """Return the path of a folder's index, pinned to a version if the storage has any, and its content."""
    [path] = storage.pinned([path])
    try:
        return path, storage.whole(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        if isinstance(storage, LocalStorage):
            what = f"there is no {path}; name the folder that holds {INDEX} and its shards"
            raise ValueError(what) from None
        raise error


def _looked_at(listed: Listed, storage: LocalStorage) -> Listed:
    try:
        there = storage.look(listed.path)
    except FileNotFoundError:
        return listed._replace(problem=GONE)
    assert listed.size is not None
    problem = _resized(there.size, listed.size) if there.size != listed.size else None
    return listed._replace(inode=there.inode, problem=problem)


def _resized(size: int | None, described: int) -> str:
    return f"it has {size} bytes and its index says {described}; it was cut off or replaced: copy it anew"


def require_sound(offsets: Offsets, *, file: File, first: int, limits: tuple[int, int]) -> Offsets:
    """Check where the records of a file begin, and where the last one ends, ``[records + 1]``.

    Args:
        offsets: bytes or tokens.
        file: the file, for the message.
        first: the number of the first record.
        limits: the offsets between which all records must lie.

    Raises:
        Damage: if a record ends before it begins, or lies outside of ``limits``.
    """
    if (offsets[:-1] <= offsets[1:]).all() and limits[0] <= offsets[0] and offsets[-1] <= limits[1]:
        return offsets
    what = f"the offsets of its records lead out of {file.name}, or backwards: it is damaged"
    raise Damage(what, offset=first)
