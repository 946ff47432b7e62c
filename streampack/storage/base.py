"""Files and storages. Each read is one range of one file; no file stays open, and a fork shares nothing."""

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

HASHED_BYTES = 1 << 16  # of a file's head and of its tail
THREADS = 32  # requests at once, where their order does not matter
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class File:
    """A file of a corpus, as it was when the corpus was listed."""

    path: str = field(repr=False)  # or URL, which may hold secrets
    name: str  # relative to the files' common folder, so that a corpus may move
    size: int  # bytes in the storage, compressed where it is
    tag: str | None = None  # the storage's name for this version of the content, such as an ETag

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

    block: int  # bytes that one read should bring
    patience: float  # seconds that one read may take

    def fetch(self, file: File, start: int, stop: int) -> bytes:
        """Return exactly the bytes ``[start, stop)``.

        Raises:
            OSError: for errors that may pass; one of `retries.PERMANENT` for others.
            ValueError: if the file has changed since it was listed.
        """

    def tag(self, file: File) -> str:
        """Return a digest or tag of the file's content, the same wherever the file is stored."""


class LocalStorage:
    """Files of this machine, or of a file system that looks like it."""

    block = 1 << 18
    patience = 0.0

    def fetch(self, file: File, start: int, stop: int) -> bytes:
        """See `Storage.fetch`. Opens the file: 20 us, where parsing a block of 256 KiB of JSON takes milliseconds."""
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
    """Return a digest of the first and last 64 KiB."""
    head = storage.fetch(file, 0, min(HASHED_BYTES, file.size))
    return digest(head, storage.fetch(file, max(0, file.size - HASHED_BYTES), file.size))


def changed(file: File, what: str) -> ValueError:
    """Make the error for a file that has changed since it was listed."""
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
    if parts.scheme == "hf" and ":" not in user:  # a repository, hf://gpt2@main
        host = parts.netloc
    return f"{parts.scheme}://{host}{parts.path}"


class ParallelMap(Protocol):
    """A parallel map: in threads (`map_in_threads`), or split over the ranks."""

    def __call__(self, call: Callable[[Item], Result], items: Sequence[Item], /) -> list[Result]:
        """Return the results, in the items' order."""


def map_in_threads(call: Callable[[Item], Result], items: Sequence[Item] | Iterable[Item]) -> list[Result]:
    """Call a function with each item, in threads. Returns the results in the items' order; raises the first error."""
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(call, items))
