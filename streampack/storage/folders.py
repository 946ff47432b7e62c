"""Folders that files are written to, each whole or not at all: on this machine, or behind a URL."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar
from uuid import uuid4

from streampack.fingerprint import digest
from streampack.storage.base import redact, split_url
from streampack.storage.locks import LOCK_FILE, PATIENCE, lock_folder
from streampack.storage.remote import RemoteStorage, scheme_of
from streampack.storage.retries import Storage
from streampack.storage.whole_files import settle

Result = TypeVar("Result")
LOCKS = ".lanes"
READ_ONLY = ("http", "https", "hf")
"""Schemes that are read, and not written to."""


class Folder(Protocol):
    """A folder to which one or more processes write files. A name belongs to a file only when that is complete."""

    shown: str
    """Its path or URL, without secrets."""

    def begin(self, name: str) -> Path:
        """Return a new path on this machine, at which a file of this name is to be made."""

    def complete(self, file: BinaryIO, name: str) -> None:
        """Give a file that was written at a path of `begin` its name, when all of its bytes are stored; close it."""

    def head(self, name: str, count: int) -> tuple[bytes, int] | None:
        """Return the first ``count`` bytes of a file, and its size; None if there is no such file."""

    def whole(self, name: str) -> bytes | None:
        """Return a file's content; None if there is no such file."""

    def clean(self, beginning: str) -> None:
        """Remove what killed processes left of files whose names begin so; no other process may be writing them."""

    def lock(self, name: str, *, way_out: str, patience: float = PATIENCE) -> AbstractContextManager[None]:
        """Keep other processes from what ``name`` stands for while the ``with`` block runs; see `lock_folder`."""

    def remove_locks(self) -> None:
        """Remove the files of locks that no process holds any more."""


class LocalFolder:
    """A folder on this machine, or on a file system that is mounted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shown = str(path)

    def begin(self, name: str) -> Path:
        """See `Folder.begin`."""
        self.path.mkdir(parents=True, exist_ok=True)
        # A name of its own, because a process that a killed run left behind may still write to its file.
        return self.path / f".{name}.{uuid4().hex}"

    def complete(self, file: BinaryIO, name: str) -> None:
        """See `Folder.complete`."""
        settle(file, Path(file.name), self.path / name)

    def head(self, name: str, count: int) -> tuple[bytes, int] | None:
        """See `Folder.head`."""
        try:
            with (self.path / name).open("rb") as file:
                return file.read(count), os.fstat(file.fileno()).st_size
        except FileNotFoundError:
            return None

    def whole(self, name: str) -> bytes | None:
        """See `Folder.whole`."""
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None

    def clean(self, beginning: str) -> None:
        """See `Folder.clean`."""
        for leftover in self.path.glob(f".{beginning}*"):
            leftover.unlink(missing_ok=True)

    @contextmanager
    def lock(self, name: str, *, way_out: str, patience: float = PATIENCE) -> Iterator[None]:
        """See `Folder.lock`. An empty name stands for all of the folder."""
        place = self.path / LOCKS / name if name else self.path
        with lock_folder(place, way_out=way_out, patience=patience):
            yield

    def remove_locks(self) -> None:
        """See `Folder.remove_locks`."""
        shutil.rmtree(self.path / LOCKS, ignore_errors=True)


class RemoteFolder:
    """A folder behind a URL. A file is made on this machine, in a scratch folder, and then stored as a whole.

    Object stores show an object when all of its bytes have arrived, so there is no moment at which a part of it could
    be read. Locks hold among the processes of this machine only: what is written must not depend on who writes it.

    Args:
        url: its URL.
        storage: how it is read and written.
    """

    def __init__(self, url: str, storage: Storage) -> None:
        scheme = scheme_of(url)
        if scheme is None or scheme in READ_ONLY:
            raise ValueError(
                f"{redact(url)} cannot be written to; name a folder of this machine or of an object store (s3://, "
                "gs://, az://), and copy it from there"
            )
        parts = split_url(url)
        self._url = parts._replace(
            path=parts.path.partition("?")[0].rstrip("/"), query="", fragment=""
        ).geturl()
        self.shown = redact(self._url)
        self.storage = RemoteStorage(scheme, storage)

    @property
    def scratch(self) -> LocalFolder:
        """The folder for files that are not stored yet, below ``TMPDIR``: one for each user and URL."""
        path = Path(tempfile.gettempdir(), f"streampack-{os.getuid()}-{digest(self._url)[:16]}")
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.stat().st_uid != os.getuid():
            raise ValueError(f"{path} belongs to another user; set TMPDIR to a folder of your own")
        return LocalFolder(path)

    def begin(self, name: str) -> Path:
        """See `Folder.begin`."""
        return self.scratch.begin(name)

    def complete(self, file: BinaryIO, name: str) -> None:
        """See `Folder.complete`. A file with this name is replaced."""
        file.close()
        path = Path(file.name)
        self.storage.store(path, self._path(name))
        path.unlink()

    def head(self, name: str, count: int) -> tuple[bytes, int] | None:
        """See `Folder.head`."""
        return self._found(partial(self.storage.head, self._path(name), count))

    def whole(self, name: str) -> bytes | None:
        """See `Folder.whole`."""
        return self._found(partial(self.storage.whole, self._path(name)))

    def clean(self, beginning: str) -> None:
        """See `Folder.clean`."""
        self.scratch.clean(beginning)

    def lock(self, name: str, *, way_out: str, patience: float = PATIENCE) -> AbstractContextManager[None]:
        """See `Folder.lock`."""
        return self.scratch.lock(name, way_out=way_out, patience=patience)

    def remove_locks(self) -> None:
        """See `Folder.remove_locks`."""
        scratch = self.scratch
        scratch.remove_locks()
        (scratch.path / LOCK_FILE).unlink(missing_ok=True)
        with suppress(OSError):  # another process is making a file there
            scratch.path.rmdir()

    def _path(self, name: str) -> str:
        return f"{self._url}/{name}"

    def _found(self, read: Callable[[], Result]) -> Result | None:
        try:
            return read()
        except FileNotFoundError:
            return None


def folder_at(place: str | os.PathLike[str], *, storage: Storage | Mapping[str, Any] | None = None) -> Folder:
    """Return the folder at a path or URL.

    >>> folder_at("memory://bucket/tokens/").shown
    'memory://bucket/tokens'

    Raises:
        ValueError: for URLs that cannot be written to.
    """
    path = os.fspath(place)
    return LocalFolder(Path(path)) if scheme_of(path) is None else RemoteFolder(path, Storage.of(storage))


def write_file(folder: Folder, name: str, content: bytes) -> None:
    """Write a small file to a folder."""
    unfinished = folder.begin(name)
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            folder.complete(file, name)
    finally:
        unfinished.unlink(missing_ok=True)
