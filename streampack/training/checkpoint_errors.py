"""Errors of reading and writing checkpoints, as one sentence with a way out."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException

WAYS_OUT = {
    errno.ENOSPC: "free some space there, or keep fewer checkpoints",
    errno.EDQUOT: "free some space there, ask for more, or keep fewer checkpoints",
    errno.EACCES: "make the folder writable for this user",
    errno.EPERM: "make the folder writable for this user",
    errno.EROFS: "mount the file system for writing",
}


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says which and why."""


@contextmanager
def plain_errors(what: str) -> Iterator[None]:
    """Turn errors into `CheckpointError`. DCP's `CheckpointException` is a BaseException."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{what}: {_reason(error)}") from error
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise CheckpointError(f"{what}: rank {rank}: {_reason(cause)}") from error


def _reason(error: BaseException) -> str:
    """Return an error's message, and the way out of it.

    >>> _reason(OSError(errno.ENOSPC, "No space left on device", "a/b"))
    'No space left on device: a/b; free some space there, or keep fewer checkpoints'
    """
    if not isinstance(error, OSError) or error.errno is None:
        return str(error)
    place = "" if error.filename is None else f": {error.filename}"
    way_out = WAYS_OUT.get(error.errno)
    return f"{error.strerror}{place}{'' if way_out is None else f'; {way_out}'}"
