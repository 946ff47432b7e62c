"""`lock_folder`: a lock with which only one process at a time writes to a folder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from streampack.validation import warn_user

LOCK_FILE = ".lock"
PATIENCE = 5.0
"""Seconds to wait for a lock, as the processes of a run that was killed need a moment to end."""
LOCKS_NOT_SUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextmanager
def lock_folder(folder: str | Path, *, way_out: str, patience: float = PATIENCE) -> Iterator[None]:
    """Create a folder and lock it for this process while the ``with`` block runs.

    The lock is a POSIX record lock on the file ``.lock``. It ends with the process, however that ends, and forked
    processes do not inherit it. On a shared file system it holds between machines. If the file system has no locks,
    nothing is locked, and the user is warned.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with lock_folder(folder, way_out="choose another folder"):
    ...         print(json.loads(Path(folder, LOCK_FILE).read_text())["pid"] == os.getpid())
    True

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
        _write_owner(descriptor)
        yield
    finally:
        os.close(descriptor)  # releases the lock


def _write_owner(descriptor: int) -> None:
    owner = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(owner).encode(), 0)


def _read_owner(descriptor: int) -> str:
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {owner['pid']} on {owner['host']}, since {owner['since']}"
    except (ValueError, TypeError, KeyError):  # the other process has not finished writing it
        return "another process"
