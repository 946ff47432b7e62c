"""Where bytes come from. Every read is one range of one file; nothing stays open, and nothing is shared by a fork."""

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
TOGETHER = 32  # requests at once, where nothing has to come before anything
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class File:
    """An entry of the manifest."""

    path: str = field(repr=False)  # or URL, with whatever secret its owner put into it
    name: str  # relative to the files' common folder, so that a corpus may move
    size: int  # bytes, as they lie in the storage
    tag: str | None = None  # what the storage calls this version of the content, an ETag

    @property
    def seekable(self) -> bool:
        """Whether reading can start anywhere."""
        return not urlsplit(self.path).path.endswith(COMPRESSED)

    @property
    def shown(self) -> str:
        """The path for people and logs."""
        return redact(self.path)


class Storage(Protocol):
    """What holds the files."""

    block: int  # bytes that one read should bring
    patience: float  # seconds that one read may take

    def fetch(self, file: File, start: int, stop: int) -> bytes:
        """Exactly the bytes ``[start, stop)``.

        Raises:
            OSError: for what may pass; one of `retry.PERMANENT` for what does not.
            ValueError: if the file is not the one of the manifest any more.
        """

    def tag(self, file: File) -> str:
        """What this version of the file's content goes by; the same again wherever it is stored."""


class LocalStorage:
    """Files of this machine, or of a file system that looks like it."""

    block = 1 << 18
    patience = 0.0

    def fetch(self, file: File, start: int, stop: int) -> bytes:
        """See `Storage.fetch`. Opening costs some 20 us a block of 256 KiB, whose JSON takes some ms to read."""
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
        """A digest of the first and last 64 KiB."""
        return ends(self, file)


def ends(storage: Storage, file: File) -> str:
    """A digest of the first and last 64 KiB."""
    head = storage.fetch(file, 0, min(HASHED_BYTES, file.size))
    return digest(head, storage.fetch(file, max(0, file.size - HASHED_BYTES), file.size))


def changed(file: File, what: str) -> ValueError:
    """Of a file that is not the one of the manifest any more."""
    return ValueError(
        f"{file.shown} {what} when the run began; a corpus must not change during a run: restore the file, or "
        "start anew"
    )


def redact(path: str) -> str:
    """A path or URL without user, password, query and fragment, where secrets stand.

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


class Together(Protocol):
    """How something is done to many items: by `together`, or by several processes, each doing some for all."""

    def __call__(self, call: Callable[[Item], Result], items: Sequence[Item], /) -> list[Result]:
        """The results, in the items' order."""


def together(call: Callable[[Item], Result], items: Sequence[Item] | Iterable[Item]) -> list[Result]:
    """``call`` of every item, several at once, in the items' order; the first error is raised."""
    with ThreadPoolExecutor(TOGETHER) as pool:
        return list(pool.map(call, items))
