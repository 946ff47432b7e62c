"""How a recipe shows an error: one line for a mistake, a traceback for all others or with ``--traceback``."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import yaml
from omegaconf.errors import OmegaConfBaseException
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from streampack.training.checkpoint import CheckpointError
from streampack.training.run_folder import Interrupted
from streampack.validation import raised_here

TRACEBACK = "STREAMPACK_TRACEBACK"
"""Environment variable; any value but 0 has the effect of ``--traceback``."""
MISTAKES = (OmegaConfBaseException, yaml.YAMLError, CheckpointError)
"""Errors shown by their message only, as those are that `raised_here` finds."""


@contextmanager
def shown_errors(*, tracebacks: bool = False) -> Iterator[None]:
    """End the process on an error in the block: one line and exit status 1, or that of a signal, see `Interrupted`.

    An error that is no mistake of the user's keeps its traceback, which torchrun's report shows, too.

    Args:
        tracebacks: let all errors pass, so that Python shows where they were raised.
    """
    tracebacks = tracebacks or os.environ.get(TRACEBACK, "0") != "0"
    try:
        yield
    except KeyboardInterrupt as error:
        # Python would end with the status of a SIGINT, whatever the signal was.
        if tracebacks:
            traceback.print_exc()
        else:
            print(str(error) or "interrupted", file=sys.stderr, flush=True)  # noqa: T201
        sys.exit(error.status if isinstance(error, Interrupted) else 130)
    except Exception as error:
        if tracebacks or not (isinstance(error, MISTAKES) or raised_here(error)):
            get_error_handler().record_exception(error)
            raise
        rank = int(os.environ.get("RANK", 0))
        text = f"error{f' (rank {rank})' * (rank > 0)}: {message_of(error)} (--traceback shows where)"
        print(text, file=sys.stderr, flush=True)  # noqa: T201
        sys.exit(1)


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
