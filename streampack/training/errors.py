"""What a recipe shows of an error: one line for a user's mistake, from one rank, and a traceback if it is asked for."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import yaml
from omegaconf.errors import OmegaConfBaseException

from streampack.distributed.world import OtherRankFailed
from streampack.training.checkpoint import CheckpointError

TRACEBACK = "STREAMPACK_TRACEBACK"
"""An environment variable; set to anything but 0, it does what ``--traceback`` does."""
EXPECTED = (
    *(ValueError, ImportError, OSError, torch.OutOfMemoryError),
    *(OmegaConfBaseException, yaml.YAMLError, CheckpointError),
)
"""Errors whose message is enough. Others come with their traceback: the mistake may be in the code."""
FOLLOWING = re.compile(r"^rank \d+ failed|gloo|NCCL|[Cc]onnection (closed|reset)|recvValue|Broken pipe")
"""In messages of RuntimeErrors that a rank gets because another one has failed or is gone."""
PATIENCE = 3.0
"""Seconds that a rank waits for another one to say what went wrong."""


@contextmanager
def shown_errors(*, tracebacks: bool = False) -> Iterator[None]:
    """End the process on an error in the block: one line and exit status 1, or 130 for Ctrl-C.

    Of several ranks on a machine, one speaks for those that fail alike, and a rank that fails because another one did
    is silent if that one speaks. torchrun is told, too: its own report ends with the line.

    Args:
        tracebacks: let errors pass, on every rank, so that Python shows where they were raised.
    """
    if tracebacks or os.environ.get(TRACEBACK, "0") != "0":
        yield
        return
    try:
        yield
    except KeyboardInterrupt as error:
        _say(str(error) or "interrupted", topic="interrupt")
        sys.exit(130)
    except EXPECTED as error:
        _say(f"{_speaker()}{message_of(error)} (--traceback shows where)", topic=message_of(error))
        sys.exit(1)
    except Exception as error:
        if _follows(error):
            if not _another_said():
                _say(f"{_speaker()}{message_of(error)} (--traceback shows where)", topic="following")
            sys.exit(1)
        if _board() is None:
            raise
        _say(f"{_speaker()}{traceback.format_exc()}", topic=f"{type(error).__name__}: {error}")
        sys.exit(1)


def _follows(error: Exception) -> bool:
    """Whether a rank got an error because another one has failed."""
    if isinstance(error, OtherRankFailed | torch.distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and FOLLOWING.search(str(error)) is not None


def message_of(error: BaseException) -> str:
    """An error's message without what only a programmer reads.

    >>> message_of(FileNotFoundError(2, "No such file or directory", "my.yaml"))
    'No such file or directory: my.yaml'
    """
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.strerror}: {error.filename}"
    elif isinstance(error, OmegaConfBaseException):
        text = str(error).partition("\n")[0]
    elif isinstance(error, yaml.YAMLError):
        text = " ".join(str(error).split())
    else:
        text = str(error) or type(error).__name__
    notes = [note for note in getattr(error, "__notes__", ()) if "\n" not in note]
    return " ".join([text, *notes])


def _speaker() -> str:
    rank = int(os.environ.get("RANK", 0))
    return f"error (rank {rank}): " if rank else "error: "


def _say(text: str, *, topic: str) -> None:
    """Print a text, unless another rank of this machine has said what it has to say on this topic."""
    board = _board()
    if board is None:
        print(text, file=sys.stderr, flush=True)  # noqa: T201
        return
    note = board / f"said-{hashlib.sha256(topic.encode()).hexdigest()[:16]}"
    try:
        with note.open("x") as file:
            print(text, file=sys.stderr, flush=True)  # noqa: T201
            _tell_torchrun(text)
            file.write("said")
    except FileExistsError:
        # torchrun ends all ranks as soon as one has ended: not before the line is there.
        _wait_for(lambda: note.stat().st_size > 0)


def _another_said() -> bool:
    """Whether another rank of this machine says what went wrong, now or soon."""
    board = _board()
    return board is not None and _wait_for(lambda: any(note.stat().st_size for note in board.glob("said-*")))


def _wait_for(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _board() -> Path | None:
    """A folder of this attempt of torchrun's that the ranks of this machine share; None without torchrun."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(error_file).parent.parent if error_file else None


def _tell_torchrun(text: str) -> None:
    """Write what torchrun shows as the cause when a rank has failed."""
    cause = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
    with suppress(OSError):
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({"message": cause}))
