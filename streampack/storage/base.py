"""Files and storages. Each read is one range of one file. No file stays open, so forked processes share none."""

from __future__ import annotations

import glob
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit, urlunsplit

from typing_extensions import override

from streampack.fingerprint import digest
from streampack.storage.compression import PACKED
from streampack.storage.retries import Storage

STORES = ("gs", "gcs", "az", "abfs", "abfss", "oss", "oci", "memory")
"""Schemes of object stores whose answers name no version."""

HASHED_BYTES = 1 << 16  # at a file's beginning, and at its end
UNKNOWN_SIZE = -1
GONE = "there is no such file"
EMPTY = "it is empty"
FOLDER = "it is a folder"
MAX_NAMED = 10  # files that a summary of those that cannot be read names
Problem = tuple[str, str]
"""(a file's path without secrets, why the file cannot be read)."""

THREADS = 32  # the threads of `map_in_threads`
Item = TypeVar("Item")
Result = TypeVar("Result")

_INHERITED: list[Any] = []
"""File systems that a fork copied from its parent process, kept because freeing one would close connections that the
parent still uses."""


@dataclass(frozen=True, slots=True)
class File:
    """A file of a corpus, as it was when the corpus was listed.

    Attributes:
        path: its path or URL. A URL may hold secrets.
        name: its path relative to the folder that the user gave, or to the part of a glob before its first wildcard; of
            a file that is named itself, the part after the last slash. Files of several folders may share a name.
        size: its size in bytes, as it is stored (which may be compressed); `UNKNOWN_SIZE` until it is looked up.
        tag: the storage's name for this version of the content, such as an ETag; None if there is none.
        problem: why it cannot be read, as far as a listing tells. Its file stays in the corpus, so that lanes do.
        beside: the files that belong to it, such as its index: they are part of its digest.
        inode: (device, number) of a file on this machine, by which two names of one file are noticed.
    """

    path: str = field(repr=False)
    name: str = ""
    size: int = UNKNOWN_SIZE
    tag: str | None = None
    problem: str | None = None
    beside: tuple[File, ...] = ()
    inode: tuple[int, int] | None = field(default=None, compare=False, repr=False)

    @property
    def seekable(self) -> bool:
        """Whether reading can start in the middle."""
        return not path_in(self.path).endswith(PACKED)

    @property
    def shown(self) -> str:
        """The path without secrets, for messages and logs."""
        return redact(self.path)


class FileStorage(ABC):
    """Reads files of one place: of this machine, or of a service at URLs."""

    block = 1 << 18
    """A good number of bytes for one read."""

    def __init__(self, storage: Storage | None = None) -> None:
        self.storage = Storage.of(storage)
        # (process id, paths of files that are as they were listed, clients by name)
        self._own: tuple[int, set[str], dict[str, Any]] = (0, set(), {})

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_own": (0, set(), {})}

    def own(self) -> tuple[int, set[str], dict[str, Any]]:
        """Return the state of this process. A forked copy lacks the threads of the clients."""
        if self._own[0] != os.getpid():
            _INHERITED.append(self._own)
            self._own = (os.getpid(), set(), {})
        return self._own

    @property
    def patience(self) -> float:
        """The most seconds that one read may take in waits, and in a request that is not answered."""
        return 60 * self.storage.max_outage

    def fetch(self, file: File, start: int, stop: int) -> bytes:
        """Return exactly the bytes ``[start, stop)``.

        Raises:
            OSError: if reading failed, and failed again for the ``max_outage`` of its `Storage`.
            ValueError: if the file has changed since it was listed.
        """
        if start == stop:
            return b""
        known = self.own()[1]

        def read() -> bytes:
            data = self.read(file, start, stop)
            whole = len(data) == stop - start
            if not whole or file.path not in known:  # after the bytes, which else might be of a later version
                self.check(file)
            if not whole:
                raise ConnectionError(
                    f"{file.shown}: {len(data)} bytes of {stop - start} at byte {start} came"
                )
            known.add(file.path)
            return data

        return self.storage.retry(read, f"reading {file.shown}, bytes {start} to {stop}")

    @abstractmethod
    def read(self, file: File, start: int, stop: int) -> bytes:
        """Ask once for the bytes ``[start, stop)``; other ones may come."""

    @abstractmethod
    def check(self, file: File) -> None:
        """Raise ValueError if a file is not the listed one."""

    @abstractmethod
    def look(self, path: str) -> File:
        """Return a file with its size and tag, and without a name; raise FileNotFoundError if there is none."""

    @abstractmethod
    def pinned(self, paths: Sequence[str]) -> list[str]:
        """Return the paths at the versions that they have now, if the storage keeps any."""

    def head(self, path: str, count: int | None = None) -> tuple[bytes, int]:
        """Return the first ``count`` bytes of a file, fewer if it is shorter, None for all; and its size."""
        file = replace(self.look(path), path=path)  # which names another file without "link/.."
        self.own()[1].add(file.path)
        return self.fetch(file, 0, file.size if count is None else min(count, file.size)), file.size

    def tag(self, file: File) -> str:
        """Return the tag of the listing or the storage; without one, a digest of the first and last 64 KiB."""
        return file.tag or self.look(file.path).tag or ends(self.fetch, file)


class LocalStorage(FileStorage):
    """Files on this machine, including mounted file systems."""

    @override
    def read(self, file: File, start: int, stop: int) -> bytes:
        # Opening a file takes 20 us, and parsing a block of 256 KiB of JSON milliseconds.
        with Path(file.path).open("rb", buffering=0) as raw:
            if (size := os.fstat(raw.fileno()).st_size) != file.size:
                raise resized(file, size)
            raw.seek(start)
            data = raw.read(stop - start)
            while len(data) < stop - start and (more := raw.read(stop - start - len(data))):
                data += more
        return data

    @override
    def check(self, file: File) -> None:
        # Only a manifest has tags, and nothing has looked at its files since.
        if file.tag is not None and ends(self.read, file) != file.tag:
            raise ValueError(changed(file, "does not have the content that it had"))

    @override
    def look(self, path: str) -> File:
        # A file costs a single `stat`: 100,000 shards on 1,024 ranks are 102 million calls as it is.
        try:
            found = Path(path).stat()
        except (NotADirectoryError, ValueError):
            raise FileNotFoundError(path) from None
        if not stat.S_ISREG(found.st_mode):
            raise FileNotFoundError(f"{path}: {FOLDER}" if stat.S_ISDIR(found.st_mode) else path)
        # Some file systems do not number files.
        inode = (found.st_dev, found.st_ino) if found.st_ino else None
        return File(os.path.normpath(Path(path).absolute()), size=found.st_size, inode=inode)

    def find(self, pattern: str, *, folder: bool = False) -> list[File]:
        """Return the files that a glob matches, or all at any depth of a folder but hidden ones."""
        found = []
        for path in glob.glob(f"{glob.escape(pattern)}/**/*" if folder else pattern, recursive=True):
            with suppress(FileNotFoundError):
                found.append(self.look(path))
        return found

    @override
    def pinned(self, paths: Sequence[str]) -> list[str]:
        return [str(Path(path).expanduser()) if path[:1] == "~" else path for path in paths]


def ends(fetch: Callable[[File, int, int], bytes], file: File) -> str:
    """Return a digest of a file's first and last 64 KiB."""
    head = fetch(file, 0, min(HASHED_BYTES, file.size))
    return digest(head, fetch(file, max(0, file.size - HASHED_BYTES), file.size))


def changed(file: File, what: str) -> str:
    """Describe a file that has changed since it was listed. ``what`` says how: "has 3 bytes and had 4"."""
    return (
        f"{file.shown} {what} when it was listed; a corpus must not change during a run: restore the file, or start "
        "again (with a new manifest, if one lists the file), from a checkpoint too if the run has corpus_lists"
    )


class Resized(ValueError):
    """The error for a file that has another size than was listed."""

    size: int | None = None
    """Its size now."""


def resized(file: File, size: int | None) -> Resized:
    """Make the error for a file that has ``size`` bytes and had others when it was listed."""
    error = Resized(changed(file, f"has {size} bytes and had {file.size}"))
    error.size = size
    return error


def split_url(url: str) -> SplitResult:
    """Split a URL. In an object store's keys may be ``#`` and ``?``; only a web address has a fragment.

    What a query means to a file system that a user has registered is not known, so it is kept apart.

    >>> split_url("https://host/a#1").path, split_url("s3://bucket/a#1?b").path
    ('/a', '/a#1?b')
    """
    scheme, _, rest = url.partition("://")
    if scheme not in ("s3", "hf", *STORES):
        return urlsplit(url, allow_fragments=scheme in ("http", "https"))
    bucket, slash, key = rest.partition("/")
    return SplitResult(scheme, bucket, slash + key, "", "")


def path_in(path: str) -> str:
    """Return the path in a URL; all of a path of this machine, where ``?`` and ``#`` are characters of names.

    >>> path_in("https://host/a.gz?token=secret"), path_in("part#1?.gz")
    ('/a.gz', 'part#1?.gz')
    """
    return split_url(path).path if "://" in path else path


def with_path(path: str, change: Callable[[str], str]) -> str:
    """Return a path or URL with another path; the query of a URL, which may be a signature, is kept.

    >>> with_path("https://host/a.bin?key=1", lambda path: path + ".idx")
    'https://host/a.bin.idx?key=1'
    """
    if "://" not in path:
        return change(path)
    parts = split_url(path)
    return urlunsplit(parts._replace(path=change(parts.path)))


def redact(path: str) -> str:
    """Return a path or URL without user, password, query and fragment, which may hold secrets.

    >>> redact("https://me:secret@host:8000/a.jsonl?token=secret")
    'https://host:8000/a.jsonl'
    """
    if "://" not in path:
        return path
    parts = split_url(path)
    user, _, host = parts.netloc.rpartition("@")
    if parts.scheme == "hf" and ":" not in user:  # in hf://gpt2@main, gpt2 is no user
        host = parts.netloc
    # A signature that was written to a key by mistake is a secret, too.
    return f"{parts.scheme}://{host}{parts.path if '=' not in parts.path else parts.path.partition('?')[0]}"


ParallelMap = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]
"""A parallel map: `map_in_threads`, or one that divides the items among the ranks."""


def map_in_threads(call: Callable[[Item], Result], items: Sequence[Item] | Iterable[Item]) -> list[Result]:
    """Call a function with each item, in threads. Return the results in the items' order, or raise the first error."""
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(call, items))


def gone(error: FileNotFoundError, shown: str) -> str:
    """Return why a storage raised this error: what a server answered, if one did.

    >>> gone(FileNotFoundError("https://host/a: HTTP 410, there is no such file"), "https://host/a")
    'HTTP 410, there is no such file'
    """
    return str(error).partition(f"{shown}: ")[2] or GONE


def summarize(problems: Sequence[Problem], *, files: int) -> str:
    """Name up to ten files that cannot be read, each with the reason.

    >>> summarize([("a.jsonl", EMPTY), ("b.jsonl", GONE)], files=40)
    '2 of 40 files cannot be read: a.jsonl: it is empty; b.jsonl: there is no such file'
    >>> summarize([("a.jsonl", EMPTY)], files=1)
    'a.jsonl: it is empty'
    """
    named = "; ".join(f"{shown}: {reason}" for shown, reason in problems[:MAX_NAMED])
    more = f"; and {len(problems) - MAX_NAMED:,} more" if len(problems) > MAX_NAMED else ""
    if files == 1:
        return named
    return f"{len(problems):,} of {files:,} files cannot be read: {named}{more}"
