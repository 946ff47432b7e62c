"""`TokenShardSource`: reads token shards, whose format is described in `token_files`.

Shards on this machine are mapped into memory. Behind a URL, they are read by ranges.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from typing_extensions import override

from streampack.sources.documents import DocumentSource, Layout, Mask
from streampack.sources.indexed import Offsets, read_indexes
from streampack.sources.parts import Damage, Part
from streampack.sources.token_files import HEADER_BYTES, Shard, misdescribed, shard_of
from streampack.storage.base import File
from streampack.storage.listing import Name
from streampack.storage.ranges import Block
from streampack.storage.read_ahead import Shared
from streampack.storage.retries import Storage


class TokenShardSource(DocumentSource):
    """The documents of folders that `streampack tokenize` made: rows of ``tokens`` and ``labels``, ``[length]``.

    >>> import tempfile
    >>> from streampack.sources import MapSource, Reading
    >>> from streampack.tokenize.tokenize import tokenize
    >>> rows = [{"tokens": [5, 6, 7], "labels": [-100, 6, 7]}, {"tokens": [8, 9], "labels": [8, 9]}]
    >>> folder = tokenize(MapSource(rows), out=tempfile.mkdtemp(), progress=False)
    >>> for row in TokenShardSource(folder).read(Reading()):
    ...     print(row.data["tokens"], row.data["labels"])
    [5 6 7] [-100    6    7]
    [8 9] [8 9]

    The documents of each shard are cut into slices, which are divided among the lanes. Ids of 2 bytes are copied once,
    to int32; those of 4 bytes are not, unless one needs int64. The arrays are read-only. If all tokens of a document
    are trained, ``tokens`` and ``labels`` are the same array.

    Args:
        folder: the folder that holds ``index.json``, on this machine or behind a URL; or several folders in one place,
            which are one corpus. Folders that were added are an addition to the corpus:
            with ``corpus_lists``, a run goes on with them in its next epoch.
        storage: see `JSONLSource`.

    Raises:
        ValueError: for an index that is missing, has another format, or names files outside of the folder; for folders
            with the same shards, or on several storages; for a shard when it is read, if it is missing or its size or
            header is not what the index says.
    """

    unit = "document"
    reads_tags = False
    sizes_of_index = True

    def __init__(
        self,
        folder: Name | Iterable[Name],
        *,
        storage: Storage | Mapping[str, Any] | None = None,
    ) -> None:
        folders = [folder] if isinstance(folder, str | os.PathLike) else list(folder)
        corpus, self.shards = read_indexes(folders, _described, storage=storage)
        known: dict[Shard, File] = {}
        for file, shard in zip(corpus.files, self.shards, strict=True):
            if (twin := known.setdefault(shard, file)) is not file:
                raise ValueError(f"{twin.shown} and {file.shown} are the same shard; name each folder once")
        super().__init__(corpus, list(map(_layout, corpus.files, self.shards)))
        self.corpus.identify([f"crc32 {shard.crc32}" for shard in self.shards])
        self._sound: set[int] = set()  # the numbers of shards whose header was compared with the index
        self._shared = Shared()

    def listing(self) -> list[File]:
        """Return the shards, each with the index's checksum as its tag."""
        return [replace(file, tag=tag) for file, tag in zip(self.files, self.corpus.tags(), strict=True)]

    @override
    def offsets(self, part: Part, read: Callable[[Block], bytes]) -> Offsets:
        shard, file = self.shards[part.file], self.files[part.file]
        if (problem := self._shared(part.file, lambda: self._problem(part.file, read))) is not None:
            raise Damage(problem, offset=part.start)
        assert part.stop is not None
        at = shard.offsets_at
        return np.frombuffer(read((file, at + 8 * part.start, at + 8 * (part.stop + 1))), "<i8")

    def _problem(self, number: int, read: Callable[[Block], bytes]) -> str | None:
        """Return how a shard's header differs from the index, by which alone a state knows the shard."""
        if number in self._sound:
            return None
        problem = misdescribed(read((self.files[number], 0, HEADER_BYTES)), self.shards[number])
        if problem is None:
            self._sound.add(number)
        return problem


def _described(content: Mapping[str, Any], entry: Mapping[str, Any]) -> tuple[str, int, Shard, None]:
    common = {key: content.get(key) for key in ("format", "version", "dtype")}
    shard = shard_of(str(entry.get("name")), {**common, **entry})
    return shard.name, shard.size, shard, None


def _layout(file: File, shard: Shard) -> Layout:
    mask = Mask(file, shard.mask_at, bits=True) if shard.masked else None
    dtype = np.dtype(shard.dtype).newbyteorder("<").str
    return Layout(dtype, shard.tokens, shard.documents, HEADER_BYTES, mask=mask)
