"""Files and storages. Each read is one range of one file. No file stays open, so forked processes share none."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar
from urllib.parse import urlsplit

from streampack.fingerprint import digest
from streampack.storage.compression import COMPRESSED

HASHED_BYTES = 1 << 16  # A digest is made of as many bytes at a file's beginning, and at its end.
THREADS = 32  # the threads of `map_in_threads`
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class File:
    """A file of a corpus, as it was when the corpus was listed.

    Attributes:
        path: its path or URL. A URL may hold secrets.
        name: its path relative to the files' common folder, so that a corpus can be moved.
        size: its size in bytes, as it is stored (which may be compressed).
        tag: the storage's name for this version of the content, such as an ETag; None if there is none.
    """

    path: str = field(repr=False)
    name: str
    size: int
    tag: str | None = None

    @property
    def seekable(self) -> bool:
        """Whether reading can start in the middle."""
        return not urlsplit(self.path).path.endswith(COMPRESSED)

    @property
    def shown(self) -> str:
        """The path without secrets, for messages and logs."""
        return redact(self.path)


class Storage(Protocol):
    """Something that holds files: this machine, or a service behind URLs."""

    block: int
    """A good number of bytes for one read."""

    patience: float
    """The most seconds that one read may take."""

    def fetch(self, file: File, start: int, stop: int) -> bytes:
        """Return exactly the bytes ``[start, stop)``.

        Raises:
            OSError: if reading failed. The class is one of `retries.PERMANENT` if another try would fail, too.
            ValueError: if the file has changed since it was listed.
        """

    def tag(self, file: File) -> str:
        """Return a digest or tag of the file's content, the same wherever the file is stored."""


class LocalStorage:
    """Files on this machine, including mounted file systems."""

    block = 1 << 18
    patience = 0.0

    def fetch(self, file: File, start: int, stop: int) -> bytes:
        """See `Storage.fetch`. Opening the file takes 20 us, and parsing a block of 256 KiB of JSON milliseconds."""
        with Path(file.path).open("rb", buffering=0) as raw:
            if (size := os.fstat(raw.fileno()).st_size) != file.size:
                raise changed(file, f"has {size} bytes and had {file.size}")
            raw.seek(start)
            data = raw.read(stop - start)
            while len(data) < stop - start and (more := raw.read(stop - start - len(data))):
                data += more
        if len(data) < stop - start:
            raise OSError(f"{file.path}: read {len(data)} bytes of {stop - start} at byte {start}")
        return data

    def tag(self, file: File) -> str:
        """See `Storage.tag`."""
        return ends(self, file)


def ends(storage: Storage, file: File) -> str:
    """Return a digest of a file's first and last 64 KiB."""
    head = storage.fetch(file, 0, min(HASHED_BYTES, file.size))
    return digest(head, storage.fetch(file, max(0, file.size - HASHED_BYTES), file.size))


def changed(file: File, what: str) -> ValueError:
    """Make the error for a file that has changed since it was listed. ``what`` says how: "has 3 bytes and had 4"."""
    return ValueError(
        f"{file.shown} {what} when the run began; a corpus must not change during a run: restore the file, or "
        "start anew"
    )


def redact(path: str) -> str:
    """Return a path or URL without user, password, query and fragment, which may hold secrets.

    >>> redact("https://me:secret@host:8000/a.jsonl?token=secret")
    'https://host:8000/a.jsonl'
    """
    if "://" not in path:
        return path
    parts = urlsplit(path)
    user, _, host = parts.netloc.rpartition("@")
    if parts.scheme == "hf" and ":" not in user:  # in hf://gpt2@main, what stands before the @ is no user
        host = parts.netloc
    return f"{parts.scheme}://{host}{parts.path}"


class ParallelMap(Protocol):
    """A parallel map. `map_in_threads` uses threads; another one divides the items among the ranks."""

    def __call__(self, call: Callable[[Item], Result], items: Sequence[Item], /) -> list[Result]:
        """Return the results, in the items' order."""


def map_in_threads(call: Callable[[Item], Result], items: Sequence[Item] | Iterable[Item]) -> list[Result]:
    """Call a function with each item, in threads. Return the results in the items' order, or raise the first error."""
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(call, items))
