"""Checks of arguments; each error names the value, the limit and the way out."""

from __future__ import annotations

import difflib
import operator
import os
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import SupportsIndex

LONGEST = 10**9
"""The longest duration, in seconds or minutes: threads and ranks can wait for centuries at most."""
PACKAGE = str(Path(__file__).parent) + os.sep


def require(value: object, name: str, allowed: Iterable[str], *, hint: str = "") -> None:
    """Raise ValueError if ``value`` is not one of the ``allowed`` words; the message ends with ``hint``."""
    if value not in (words := list(allowed)):
        raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(map(repr, words))}{hint}")


def did_you_mean(value: object, known: Iterable[str]) -> str:
    """Return the end of an error message: the known word closest to ``value``; empty if none is close.

    >>> did_you_mean("shufle", ["shuffle", "seed"])
    "; did you mean 'shuffle'?"
    """
    close = difflib.get_close_matches(str(value), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def require_positive(value: object, name: str, *, least: int = 1) -> int:
    """Return ``value`` as an int; raise if it is not a whole number from ``least`` to 2^63 - 1."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise ValueError(f"{name}={value!r} is not a whole number; give one of at least {least}")
    number = operator.index(value)
    if number < least:
        raise ValueError(f"{name}={number} is below {least}; give at least {least}")
    if number >= 2**63:
        raise ValueError(f"{name}={number} is above 2^63 - 1; give a smaller one")
    return number


def require_duration(value: object, name: str, unit: str) -> float:
    """Return ``value`` as a float; raise if it is not a number from 0 to `LONGEST`.

    >>> require_duration(30, "max_outage", "minutes")
    30.0
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LONGEST:
        raise ValueError(f"{name}={value!r} is no number of {unit}; give one from 0 to {LONGEST:,}")
    return float(value)


def require_multiple(value: int, name: str, multiple: int, of: str) -> None:
    """Check that a setting is a multiple of another one, called ``of``.

    >>> require_multiple(100, "max_seq_len", 16, "pad_seqs_to")
    Traceback (most recent call last):
    ...
    ValueError: max_seq_len=100 is no multiple of pad_seqs_to=16; set max_seq_len to 112, or choose another pad_seqs_to

    Raises:
        ValueError: if it is not, with the next multiple.
    """
    if rest := value % multiple:
        raise ValueError(
            f"{name}={value} is no multiple of {of}={multiple}; set {name} to {value + multiple - rest}, or choose "
            f"another {of}"
        )


def require_token_id(value: object, name: str, *, vocab_size: int | None) -> int:
    """Return a setting as a token id; raise if it is not one, or outside the vocabulary.

    >>> require_token_id(5, "padding_idx", vocab_size=10)
    5
    """
    number = require_positive(value, name, least=0)
    if vocab_size is not None and number >= vocab_size:
        raise ValueError(
            f"{name}={number} is outside the vocabulary of {vocabulary_text(vocab_size)}; give a token of the model's"
        )
    return number


def vocabulary_text(vocab_size: int | None) -> str:
    """Return the ids of a vocabulary, for messages; without a ``vocab_size`` any id from 0 is allowed.

    >>> vocabulary_text(10)
    '10 ids (0 to 9)'
    """
    return "ids from 0" if vocab_size is None else f"{vocab_size} ids (0 to {vocab_size - 1})"


def warn_user(message: str) -> None:
    """Issue a warning that names the line outside of this package from which the call came."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
