"""`IndexedSource`, for folders whose ``index.json`` lists shards and their numbers of records.

The index is not trusted: it may come from the network, so its names and numbers are checked.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlunsplit

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from streampack.sources.examples import EXAMPLES, Example, example
from streampack.sources.files import FileSource, places
from streampack.sources.parts import Damage, Part, Record
from streampack.storage.base import (
    File,
    FileStorage,
    LocalStorage,
    Resized,
    map_in_threads,
    redact,
    split_url,
)
from streampack.storage.json_depth import shallow_json
from streampack.storage.listing import Corpus, Name, Once, alone, inode_of, require_distinct, require_some
from streampack.storage.manifest import placed
from streampack.storage.ranges import Fetcher
from streampack.storage.remote import RemoteStorage, scheme_of
from streampack.storage.retries import Storage

INDEX = "index.json"
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


class Index(NamedTuple):
    """The content of an index, and the storage of the shards that it names."""

    path: str
    content: Mapping[str, Any]
    storage: FileStorage

    def corpus(self, shards: Sequence[tuple[str, int]]) -> Corpus:
        """Return the shards, given as (name, size in bytes), in the index's order.

        Files on this machine that are gone or have another size are among `Corpus.problems`. Those behind a URL are
        checked when they are read.

        Raises:
            ValueError: for a name that leads out of the folder, and if no shard can be read.
        """
        if not shards:
            raise ValueError(f"{redact(self.path)} names no shard")
        found = []
        for number, (name, size) in enumerate(shards):
            try:
                if not isinstance(name, str) or type(size) is not int or size <= 0:
                    raise ValueError(
                        f"{name!r} of {size!r} bytes is no shard; an entry has a name and a size above 0"
                    )
                found.append(placed(self.path, name))
            except ValueError as error:
                raise ValueError(f"{redact(self.path)}, shard {number}: {error}") from None
        if isinstance(self.storage, LocalStorage):
            for number, (listed, (_, size)) in enumerate(zip(found, shards, strict=True)):
                if listed.problem is None:
                    there = Path(listed.path).stat()
                    problem = _resized(there.st_size, size) if there.st_size != size else None
                    found[number] = listed._replace(inode=inode_of(there), problem=problem)
        require_distinct(found)
        files = (File(listed.path, name, size) for listed, (name, size) in zip(found, shards, strict=True))
        problems = {listed.path: listed.problem for listed in found if listed.problem is not None}
        return require_some(Corpus(tuple(files), self.storage, problems))


def joined(corpora: Sequence[Corpus], checksums: Sequence[int]) -> Corpus:
    """Return the files of several folders, whose checksums are given, as one corpus.

    Raises:
        ValueError: if there is no folder, if two hold the same shards, or if they lie on several storages.
    """
    if not corpora:
        raise ValueError("no folders given; name at least one")
    first = corpora[0]
    for corpus in corpora:
        one, other = corpus.files[0], first.files[0]
        if scheme_of(one.path) != scheme_of(other.path):
            raise ValueError(
                f"{one.shown} and {other.shown} lie in several places; make a source of each (a mixture joins them)"
            )
    problems = {path: problem for corpus in corpora for path, problem in corpus.problems.items()}
    files = tuple(file for corpus in corpora for file in corpus.files)
    known: dict[tuple[str, int, int], File] = {}
    for file, checksum in zip(files, checksums, strict=True):
        if (twin := known.setdefault((file.name, file.size, checksum), file)) is not file:
            raise ValueError(f"{twin.shown} and {file.shown} are the same shard; name each folder once")
    return replace(first, files=files, problems=problems)


def _resized(size: int | None, described: int) -> str:
    return f"it has {size} bytes and its index says {described}; it was cut off or replaced: copy it anew"


def read_index(
    folder: Name,
    *,
    storage: Storage | Mapping[str, Any] | None,
    once: Once = alone,
) -> Index:
    """Read the index of a folder on this machine or behind a URL.

    Raises:
        ValueError: if there is none, or it is no JSON object.
    """
    reading = Storage.of(storage)
    path = os.fspath(folder)
    scheme = scheme_of(path)
    held: FileStorage
    if scheme is None:
        once(lambda: None, of="a folder of each machine")  # raises an error if another rank was given a URL
        path = os.path.normpath(Path(path).expanduser().absolute() / INDEX)
        held = LocalStorage(reading)
        if not Path(path).is_file():
            raise ValueError(f"there is no {path}; name the folder that holds {INDEX} and its shards")
        text = Path(path).read_bytes()
    else:
        parts = split_url(path)
        path = urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{INDEX}"))
        held = remote = RemoteStorage(scheme, reading)
        path, text = once(partial(_whole, remote, path), of=redact(path))
    try:
        content = shallow_json(text)
    except ValueError as error:
        raise ValueError(f"{redact(path)} is no JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{redact(path)} holds a {type(content).__name__}; an index is an object")
    return Index(path, content, held)


def _whole(remote: RemoteStorage, path: str) -> tuple[str, bytes]:
    [path] = remote.pinned([path])
    return path, remote.whole(path)


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
