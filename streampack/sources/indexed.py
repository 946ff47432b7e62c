"""A folder whose `index.json` names its shards and their records. Whoever wrote it may be someone else."""

from __future__ import annotations

import heapq
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit, urlunsplit

import numpy as np
import numpy.typing as npt

from streampack.sources.base import spread
from streampack.sources.shuffling import Damage, Part
from streampack.storage.base import File, LocalStorage, Storage, redact
from streampack.storage.compression import BUFFER_BYTES
from streampack.storage.json_depth import shallow_json
from streampack.storage.listing import Corpus, Name, inode_of, once, require_distinct
from streampack.storage.manifest import named_in
from streampack.storage.ranges import Block, Fetcher, Stretch
from streampack.storage.remote import RemoteStorage, scheme_of
from streampack.storage.retries import Retries
from streampack.validation import require_positive

INDEX = "index.json"
PARTS_PER_LANE = 16  # enough for shuffling parts to mix a sorted corpus, few enough to keep reads long

Offsets = npt.NDArray[np.int64]


class Index(NamedTuple):
    """The content of an index, and where the shards that it names lie."""

    path: str
    content: Mapping[str, Any]
    storage: Storage
    retries: Retries

    def corpus(self, shards: Sequence[tuple[str, int]]) -> Corpus:
        """The shards, each by name and size in bytes, in the index's order.

        Raises:
            ValueError: for a name that leads out of the folder, a file that is not there, or has another size. A
                file behind a URL is looked at when it is read.
        """
        if not shards:
            raise ValueError(f"{redact(self.path)} names no shard")
        for number, (name, size) in enumerate(shards):
            if not isinstance(name, str) or type(size) is not int or size <= 0:
                raise ValueError(
                    f"{redact(self.path)}, shard {number}: {name!r} of {size!r} bytes is no shard; an entry has a name "
                    "and a size above 0"
                )
        # A manifest of as many lines: which names are refused is said in one place.
        lines = "\n".join(json.dumps({"name": name, "size": size}) for name, size in shards)
        found = named_in(self.path, lines)
        if isinstance(self.storage, LocalStorage):
            for number, (listed, (_, size)) in enumerate(zip(found, shards, strict=True)):
                there = Path(listed.path).stat()
                if there.st_size != size:
                    raise ValueError(
                        f"{listed.path} has {there.st_size} bytes and {self.path} says {size}; it was cut off or "
                        "replaced: copy it anew"
                    )
                found[number] = listed._replace(inode=inode_of(there))
        require_distinct(found)
        files = tuple(
            File(listed.path, name, size) for listed, (name, size) in zip(found, shards, strict=True)
        )
        return Corpus(files, self.storage, self.retries)


def read_index(
    folder: Name, *, storage_options: Mapping[str, Any] | None, retries: int, timeout: float
) -> Index:
    """The index of a folder of this machine, or behind a URL.

    Raises:
        ValueError: if there is none, or it is no JSON object.
    """
    tries = Retries(attempts=require_positive(retries, "retries", least=0))
    path = os.fspath(folder)
    scheme = scheme_of(path)
    storage: Storage
    if scheme is None:
        once(lambda: None, of="a folder of each machine")  # to say so where another rank has a URL
        path = os.path.normpath(Path(path).expanduser().absolute() / INDEX)
        storage = LocalStorage()
        if not Path(path).is_file():
            raise ValueError(f"there is no {path}; name the folder that holds {INDEX} and its shards")
        text = Path(path).read_bytes()
    else:
        parts = urlsplit(path)
        path = urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{INDEX}"))
        storage = remote = RemoteStorage(scheme, options=storage_options or {}, patience=timeout)
        path, text = once(partial(_whole, remote, path, tries), of=redact(path))
    try:
        content = shallow_json(text)
    except ValueError as error:
        raise ValueError(f"{redact(path)} is no JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{redact(path)} holds a {type(content).__name__}; an index is an object")
    return Index(path, content, storage, tries)


def _whole(remote: RemoteStorage, path: str, tries: Retries) -> tuple[str, bytes]:
    [path] = tries.call(partial(remote.pinned, [path]))
    return path, tries.call(partial(remote.whole, path))


def places(counts: Sequence[int], wanted: int) -> list[tuple[int, int]]:
    """About ``wanted`` records from all over the shards: the number of the shard, and that of the record in it.

    >>> places([3, 0, 1], 9)
    [(0, 0), (0, 1), (0, 2), (2, 0)]
    """
    ends = np.cumsum(counts)
    numbers = np.asarray(spread(int(ends[-1]), wanted), np.int64)
    shards = np.searchsorted(ends, numbers, side="right")
    starts = ends - np.asarray(counts)
    return list(zip(shards.tolist(), (numbers - starts[shards]).tolist(), strict=True))


def divide(counts: Sequence[int], sizes: Sequence[int], num_lanes: int) -> list[list[Part]]:
    """The parts of every lane, in corpus order: slices of the shards' records, each to the lane with the fewest bytes.

    >>> divide([4, 2], [400, 200], 2)[0][:3]
    [Part(file=0, start=0, stop=1), Part(file=0, start=2, stop=3), Part(file=1, start=0, stop=1)]

    Args:
        counts: records of each shard.
        sizes: bytes, or any other measure, of each shard.
        num_lanes: how many lanes.
    """
    step = max(1, -(-sum(counts) // (num_lanes * PARTS_PER_LANE)))
    lanes: list[list[Part]] = [[] for _ in range(num_lanes)]
    load = [(0.0, lane) for lane in range(num_lanes)]  # a heap: bytes so far, lane
    for number, (count, size) in enumerate(zip(counts, sizes, strict=True)):
        for start in range(0, count, step):
            stop = min(start + step, count)
            least, lane = load[0]
            lanes[lane].append(Part(number, start, stop))
            heapq.heapreplace(load, (least + size * (stop - start) / count, lane))
    return lanes


def offsets_of(
    raw: bytes, dtype: str, *, file: File, first: int, limits: tuple[int, int], unit: int = 1, base: int = 0
) -> Offsets:
    """Where records begin and end in their file, ``[records + 1]``, from a table of little-endian numbers.

    Args:
        raw: the table, from record ``first`` on.
        dtype: of its entries.
        file: the shard.
        first: the number of its first record.
        limits: the bytes between which all records must lie.
        unit: bytes that an entry counts.
        base: the byte that entries count from.

    Raises:
        Damage: if a record ends before it begins, or lies outside.
    """
    table = np.frombuffer(raw, dtype)
    offsets = table.astype(np.int64) * unit + base
    # As they are stored: 2**62 tokens of 4 bytes are no bytes at all in 64 bits.
    sound = (table[:-1] <= table[1:]).all() and int(table[0]) >= 0 and int(table[-1]) <= limits[1]
    if not (sound and limits[0] <= offsets[0] and offsets[-1] <= limits[1]):
        what = f"the offsets of its records lead out of {file.name}, or backwards: it is damaged"
        raise Damage(what, offset=first, resume=None)
    return offsets


def records(
    fetcher: Fetcher, file: File, offsets: Offsets, following: Iterable[Block] = ()
) -> Iterator[bytes]:
    """The bytes of one record after the other, read ahead as the fetcher allows, up to the ``following`` part's."""
    stretch = Stretch(fetcher, file, int(offsets[0]), int(offsets[-1]), following)
    stream = io.BufferedReader(stretch, BUFFER_BYTES)
    return (stream.read(size) for size in np.diff(offsets).tolist())
