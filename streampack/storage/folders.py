"""Folders, here or at a URL, in which a file is complete or absent; a lock for those of runs."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

from typing_extensions import override

from streampack.fingerprint import digest
from streampack.storage.base import FileStorage, LocalStorage, redact, split_url
from streampack.storage.remote import RemoteStorage, scheme_of
from streampack.storage.retries import Storage
from streampack.validation import warn_user

LOCK_FILE = ".lock"
PATIENCE = 5.0
"""Seconds to wait for a lock, as the processes of a run that was killed need a moment to end."""
ABANDONED = 3600.0
"""Seconds without a write after which an incomplete file counts as one of a killed process."""
LOCKS_NOT_SUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

READ_ONLY = ("http", "https", "hf")
"""Schemes that are read, and not written to."""


class Folder:
    """A folder to which one or more processes write files. A name belongs to a file only when that is complete."""

    def __init__(self, place: str, storage: FileStorage | None = None) -> None:
        self.place = place
        self.shown = redact(place)
        """Its path or URL, without secrets."""
        self.storage = storage or LocalStorage()

    @property
    def path(self) -> Path:
        """Where files are made on this machine."""
        return Path(self.place)

    def begin(self, name: str) -> Path:
        """Return a new path on this machine, at which a file of this name is to be made."""
        self.path.mkdir(parents=True, exist_ok=True)
        # A name of its own, because a process that a killed run left behind may still write to its file.
        return self.path / f".{name}.{uuid4().hex}"

    def complete(self, file: BinaryIO, name: str) -> None:
        """Give a file that was written at a path of `begin` its name, when all of its bytes are stored; close it."""
        settle(file, Path(file.name), self.path / name)

    def head(self, name: str, count: int) -> tuple[bytes, int] | None:
        """Return the first ``count`` bytes of a file, and its size; None if there is no such file."""
        try:
            return self.storage.head(f"{self.place}/{name}", count)
        except FileNotFoundError:
            return None

    def clean(self, beginning: str, *, older: float = ABANDONED) -> None:
        """Remove what killed processes left of files whose names begin so."""
        for leftover in self.path.glob(f".{beginning}*"):
            with suppress(FileNotFoundError):  # it is complete now
                if time.time() - leftover.stat().st_mtime >= older:
                    leftover.unlink()


class RemoteFolder(Folder):
    """A folder at a URL. A file is made in a scratch folder of this machine, and then stored in one call.

    Object stores show an object when all of its bytes have arrived, so there is no moment at which a part of it could
    be read.
    """

    def __init__(self, url: str, storage: Storage) -> None:
        scheme = scheme_of(url)
        if scheme is None or scheme in READ_ONLY:
            raise ValueError(
                f"{redact(url)} cannot be written to; name a folder of this machine or of an object store (s3://, "
                "gs://, az://), and copy it from there"
            )
        parts = split_url(url)
        path = parts.path.partition("?")[0].rstrip("/")
        place = parts._replace(path=path, query="", fragment="").geturl()
        super().__init__(place, RemoteStorage(scheme, storage))

    @property
    @override
    def path(self) -> Path:
        """The folder for files that are not stored yet, below ``TMPDIR``: one for each user and URL."""
        path = Path(tempfile.gettempdir(), f"streampack-{os.getuid()}-{digest(self.place)[:16]}")
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.stat().st_uid != os.getuid():
            raise ValueError(f"{path} belongs to another user; set TMPDIR to a folder of your own")
        return path

    @override
    def complete(self, file: BinaryIO, name: str) -> None:
        file.close()
        assert isinstance(self.storage, RemoteStorage)
        self.storage.store(Path(file.name), f"{self.place}/{name}")
        Path(file.name).unlink(missing_ok=True)

    @override
    def clean(self, beginning: str, *, older: float = ABANDONED) -> None:
        super().clean(beginning, older=older)
        with suppress(OSError):  # another process is making a file there
            self.path.rmdir()


def folder_at(place: str | os.PathLike[str], *, storage: Storage | Mapping[str, Any] | None = None) -> Folder:
    """Return the folder at a path or URL.

    >>> folder_at("memory://bucket/tokens/").shown, folder_at("tokens/").shown
    ('memory://bucket/tokens', 'tokens')

    Raises:
        ValueError: for URLs that cannot be written to.
    """
    path = os.fspath(place)
    return Folder(str(Path(path))) if scheme_of(path) is None else RemoteFolder(path, Storage.of(storage))


def write_file(folder: Folder, name: str, content: bytes) -> None:
    """Write a small file to a folder, completely or not at all."""
    unfinished = folder.begin(name)
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            folder.complete(file, name)
    finally:
        unfinished.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that ``path`` never holds a part of ``content``, also if several processes do so at once."""
    write_file(Folder(str(path.parent)), path.name, content)


def write_text(path: Path, text: str) -> None:
    r"""Write a page or a report, see `write_whole`, in UTF-8; of a file's name that is not, each byte as ``\udcff``.

    Links, devices and pipes, such as ``/dev/stdout``, are written through: a rename would replace them.
    """
    content = text.encode("utf-8", "backslashreplace")
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_bytes(content)
    else:
        write_whole(path, content)


def settle(file: Any, unfinished: Path, path: Path) -> None:
    """Flush a written file to the disk, rename it to ``path``, and flush the folder."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
    unfinished.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def lock_folder(folder: str | Path, *, way_out: str, patience: float = PATIENCE) -> Iterator[None]:
    """Create a folder and lock it for this process while the ``with`` block runs.

    The lock is a POSIX record lock on the file ``.lock``, which ends with the process and is not inherited by forks. If
    the file system has no locks, the user is warned.

    Args:
        folder: the folder to lock.
        way_out: the end of the error message: what the user can do.
        patience: seconds to wait for another process to release the lock.

    Raises:
        ValueError: if another process holds the lock. The message names its host and process id.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno in LOCKS_NOT_SUPPORTED:
                    warn_user(
                        f"{folder} cannot be locked ({error.strerror}): a second run that writes there would not be "
                        "noticed",
                    )
                    break
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise
            if time.monotonic() > deadline:
                raise ValueError(f"{folder} is in use by {_read_owner(descriptor)}; {way_out}")
            time.sleep(0.05)
        owner = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(owner).encode(), 0)
        yield
    finally:
        os.close(descriptor)  # releases the lock


def _read_owner(descriptor: int) -> str:
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {owner['pid']} on {owner['host']}, since {owner['since']}"
    except (ValueError, TypeError, KeyError):  # the other process has not finished writing it
        return "another process"
