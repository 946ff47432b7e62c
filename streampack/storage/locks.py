"""A lock on a folder: one process at a time may write there."""

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
"""Seconds to wait for a lock: the processes of a run that was killed need a moment to end."""
NOT_SUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextmanager
def lock_folder(folder: str | Path, *, way_out: str, patience: float = PATIENCE) -> Iterator[None]:
    """Lock a folder for this process while the block runs; creates the folder.

    The lock is a POSIX record lock on ``.lock``: it ends with the process, however that ends, and forked processes do
    not keep it. On a shared file system it holds between machines. Where locks are not supported, this warns.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with lock_folder(folder, way_out="choose another folder"):
    ...         print(json.loads(Path(folder, LOCK_FILE).read_text())["pid"] == os.getpid())
    True

    Args:
        folder: to lock.
        way_out: end of the error message: what to do besides waiting.
        patience: seconds to wait for another process to release the lock.

    Raises:
        ValueError: if another process holds the folder; names its host and process id.
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
                if error.errno in NOT_SUPPORTED:
                    warn_user(
                        f"{folder} cannot be locked ({error.strerror}): a second run that writes there would not be "
                        "noticed",
                    )
                    break
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise
            if time.monotonic() > deadline:
                raise ValueError(f"{folder} is in use by {_owner(descriptor)}; {way_out}")
            time.sleep(0.05)
        _sign(descriptor)
        yield
    finally:
        os.close(descriptor)  # and with it, the lock


def _sign(descriptor: int) -> None:
    owner = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(owner).encode(), 0)


def _owner(descriptor: int) -> str:
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {owner['pid']} on {owner['host']}, since {owner['since']}"
    except (ValueError, TypeError, KeyError):  # it is being written just now
        return "another process"
