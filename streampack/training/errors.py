"""How a recipe shows an error: one line, from one rank; a traceback for unexpected errors or with ``--traceback``."""

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

from streampack.distributed.rank_sync import OtherRankFailed
from streampack.training.checkpoint_errors import CheckpointError
from streampack.training.run_folder import Interrupted
from streampack.validation import raised_here

TRACEBACK = "STREAMPACK_TRACEBACK"
"""Environment variable; any value but 0 has the effect of ``--traceback``."""
EXPECTED = (torch.OutOfMemoryError, OmegaConfBaseException, yaml.YAMLError, CheckpointError)
"""Errors shown by their message only, as those are that `raised_here` finds. Others are shown with a traceback: the
mistake may be in the code."""
FOLLOWING = re.compile(r"gloo|NCCL|[Cc]onnection (closed|reset)|recvValue|Broken pipe")
"""Pattern of RuntimeErrors that a rank gets because another one has failed or is gone."""
PATIENCE = 3.0
"""Seconds that a rank waits for another one to print the cause."""


@contextmanager
def shown_errors(*, tracebacks: bool = False) -> Iterator[None]:
    """End the process on an error in the block: one line and exit status 1, or that of a signal, see `Interrupted`.

    Ranks of a machine that fail alike print one line together; a rank that fails because another one did prints
    nothing if that one prints the cause. torchrun's own report ends with the line, too.

    Args:
        tracebacks: let errors pass on every rank, so that Python shows where they were raised.
    """
    if tracebacks or os.environ.get(TRACEBACK, "0") != "0":
        try:
            yield
        except Interrupted as error:  # Python would end with the status of a SIGINT, whatever the signal was
            traceback.print_exc()
            sys.exit(error.status)
        return
    try:
        yield
    except KeyboardInterrupt as error:
        _print_once(str(error) or "interrupted", topic="interrupt")
        sys.exit(error.status if isinstance(error, Interrupted) else 130)
    except Exception as error:
        if not isinstance(error, EXPECTED) and _follows(error):
            if not _another_printed():
                _print_once(f"{_prefix()}{message_of(error)} (--traceback shows where)", topic="following")
            sys.exit(1)
        if isinstance(error, EXPECTED) or raised_here(error):
            _print_once(f"{_prefix()}{message_of(error)} (--traceback shows where)", topic=message_of(error))
            sys.exit(1)
        if _shared_folder() is None:
            raise
        _print_once(f"{_prefix()}{traceback.format_exc()}", topic=f"{type(error).__name__}: {error}")
        sys.exit(1)


def _follows(error: Exception) -> bool:
    """Return whether a rank got an error because another one has failed."""
    if isinstance(error, OtherRankFailed | torch.distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and FOLLOWING.search(str(error)) is not None


def message_of(error: BaseException) -> str:
    """Return an error's message for users, with its one-line notes.

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


def _prefix() -> str:
    rank = int(os.environ.get("RANK", 0))
    return f"error (rank {rank}): " if rank else "error: "


def _print_once(text: str, *, topic: str) -> None:
    """Print a text, unless another rank of this machine has printed one on the same topic."""
    folder = _shared_folder()
    if folder is None:
        print(text, file=sys.stderr, flush=True)  # noqa: T201
        return
    note = folder / f"printed-{hashlib.sha256(topic.encode()).hexdigest()[:16]}"
    try:
        with note.open("x") as file:
            print(text, file=sys.stderr, flush=True)  # noqa: T201
            _write_cause(text)
            file.write("printed")
    except FileExistsError:
        # torchrun ends all ranks as soon as one has ended, so this one waits until the line is printed.
        _wait_for(lambda: note.stat().st_size > 0)


def _another_printed() -> bool:
    """Wait until another rank of this machine has printed the cause; return whether one did."""
    folder = _shared_folder()
    return folder is not None and _wait_for(
        lambda: any(note.stat().st_size for note in folder.glob("printed-*"))
    )


def _wait_for(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _shared_folder() -> Path | None:
    """Return torchrun's folder that the ranks of this machine share in this attempt; None without torchrun."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(error_file).parent.parent if error_file else None


def _write_cause(text: str) -> None:
    """Write the file that torchrun shows as the cause of a failure."""
    cause = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
    with suppress(OSError):
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({"message": cause}))
