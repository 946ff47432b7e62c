"""Files and storages. Each read is one range of one file. No file stays open, so forked processes share none."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar
from urllib.parse import SplitResult, urlsplit, urlunsplit

from streampack.fingerprint import digest
from streampack.storage.compression import COMPRESSED
from streampack.storage.retries import Storage

STORES = ("gs", "gcs", "az", "abfs", "abfss", "oss", "oci", "memory")
"""Schemes of object stores of whose answers nothing tells which version they are of."""

HASHED_BYTES = 1 << 16  # A digest is made of as many bytes at a file's beginning, and at its end.
GONE = "there is no such file"
EMPTY = "it is empty"
MAX_NAMED = 10  # files that a summary of those that cannot be read names
Problem = tuple[str, str]
"""(a file's path without secrets, why the file cannot be read)."""

THREADS = 32  # the threads of `map_in_threads`
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class File:
    """A file of a corpus, as it was when the corpus was listed.

    Attributes:
        path: its path or URL. A URL may hold secrets.
        name: its path relative to the folder that the user gave, or to the part of a glob before its first wildcard; of
            a file that is named itself, what stands behind the last slash. So it depends neither on the place of the
            corpus nor on its other files. Files of several folders may have the same name.
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
        return not path_in(self.path).endswith(COMPRESSED)

    @property
    def shown(self) -> str:
        """The path without secrets, for messages and logs."""
        return redact(self.path)


class Listed(NamedTuple):
    """An entry of a listing. Values that are not known are None."""

    path: str  # or URL
    size: int | None = None  # bytes
    tag: str | None = None  # such as an ETag
    inode: tuple[int, int] | None = None  # (device, number) of a file on this machine
    problem: str | None = None  # why the file cannot be read
    name: str = ""  # see `File`


class FileStorage(Protocol):
    """Something that holds files: this machine, or a service behind URLs."""

    block: int
    """A good number of bytes for one read."""

    @property
    def patience(self) -> float:
        """The most seconds that one read may take: in waits, and in requests that are not answered."""

    def fetch(self, file: File, start: int, stop: int) -> bytes:
        """Return exactly the bytes ``[start, stop)``.

        Raises:
            OSError: if reading failed, and failed again for the ``max_outage`` of its `Storage`.
            ValueError: if the file has changed since it was listed.
        """

    def tag(self, file: File) -> str:
        """Return a digest or tag of the file's content, the same wherever the file is stored."""

    def look(self, path: str) -> Listed:
        """Return the size and tag of a file.

        Raises:
            FileNotFoundError: if there is none.
        """

    def whole(self, path: str) -> bytes:
        """Read all of a small file."""

    def pinned(self, paths: Sequence[str]) -> list[str]:
        """Return the paths at the versions that they have now, if the storage keeps any."""


class LocalStorage:
    """Files on this machine, including mounted file systems."""

    block = 1 << 18

    def __init__(self, storage: Storage | None = None) -> None:
        self.storage = Storage.of(storage)
        self._met: set[str] = set()  # the paths of the files that this process has read from

    @property
    def patience(self) -> float:
        """See `FileStorage.patience`."""
        return 60 * self.storage.max_outage

    def fetch(self, file: File, start: int, stop: int) -> bytes:
        """See `FileStorage.fetch`. Opening a file takes 20 us, and parsing a block of 256 KiB of JSON milliseconds."""
        # A manifest's tag, and nothing looked at the file since.
        if file.tag is not None and file.path not in self._met:
            if ends(self._read, file) != file.tag:
                raise ValueError(changed(file, "does not have the content that it had"))
            self._met.add(file.path)
        return self.storage.retry(
            lambda: self._read(file, start, stop), f"reading {file.path} at byte {start}"
        )

    def _read(self, file: File, start: int, stop: int) -> bytes:
        with Path(file.path).open("rb", buffering=0) as raw:
            if (size := os.fstat(raw.fileno()).st_size) != file.size:
                raise resized(file, size)
            raw.seek(start)
            data = raw.read(stop - start)
            while len(data) < stop - start and (more := raw.read(stop - start - len(data))):
                data += more
        if len(data) < stop - start:
            raise OSError(f"{file.path}: read {len(data)} bytes of {stop - start} at byte {start}")
        return data

    def tag(self, file: File) -> str:
        """See `FileStorage.tag`: that of the manifest, or a digest of the first and last 64 KiB."""
        return file.tag or ends(self.fetch, file)

    def look(self, path: str) -> Listed:
        """See `FileStorage.look`.

        A file costs a single `stat`: 100,000 shards on 1,024 ranks are 102 million calls as it is.
        """
        try:
            found = Path(path).stat()
        except (NotADirectoryError, ValueError):
            found = None
        if found is None or not stat.S_ISREG(found.st_mode):
            raise FileNotFoundError(path)
        # Some file systems do not number files.
        inode = (found.st_dev, found.st_ino) if found.st_ino else None
        return Listed(os.path.normpath(Path(path).absolute()), found.st_size, inode=inode)

    def whole(self, path: str) -> bytes:
        """See `FileStorage.whole`."""
        return Path(path).read_bytes()

    def pinned(self, paths: Sequence[str]) -> list[str]:
        """See `FileStorage.pinned`."""
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
    """Split a URL. Only a web address has a fragment: in an object store's keys may be ``#``, and ``?``.

    What a query means to a file system that a user has registered is not known, so it is kept apart.

    >>> split_url("https://host/a#1").path, split_url("s3://bucket/a#1?b?versionId=2")[2:4]
    ('/a', ('/a#1?b', 'versionId=2'))
    """
    if url.partition(":")[0] not in ("s3", "hf", *STORES):
        return urlsplit(url, allow_fragments=url.startswith(("http:", "https:")))
    key, _, version = url.partition("?versionId=")
    parts = urlsplit(key, allow_fragments=False)
    rest = key[key.index("?") :] if "?" in key else ""
    return parts._replace(path=parts.path + rest, query=version and f"versionId={version}")


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
    if parts.scheme == "hf" and ":" not in user:  # in hf://gpt2@main, what stands before the @ is no user
        host = parts.netloc
    # A signature that was written to a key by mistake is a secret, too.
    return f"{parts.scheme}://{host}{parts.path if '=' not in parts.path else parts.path.partition('?')[0]}"


class ParallelMap(Protocol):
    """A parallel map. `map_in_threads` uses threads; another one divides the items among the ranks."""

    def __call__(self, call: Callable[[Item], Result], items: Sequence[Item], /) -> list[Result]:
        """Return the results, in the items' order."""


def map_in_threads(call: Callable[[Item], Result], items: Sequence[Item] | Iterable[Item]) -> list[Result]:
    """Call a function with each item, in threads. Return the results in the items' order, or raise the first error."""
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(call, items))


def gone(error: FileNotFoundError, shown: str) -> str:
    """Return why a file cannot be read for which a storage raised this error: what a server answered, if one did.

    >>> gone(FileNotFoundError("https://host/a: HTTP 410, there is no such file"), "https://host/a")
    'HTTP 410, there is no such file'
    """
    answer = str(error).partition(f"{shown}: ")
    return answer[2] if not answer[0] and answer[2] else GONE


def summarize(problems: Sequence[Problem], *, files: int) -> str:
    """Name the files of a corpus that cannot be read, up to ten of them, each with the reason.

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
