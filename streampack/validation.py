"""Checks of arguments; each error names the value, the limit and the way out."""

from __future__ import annotations

import difflib
import dis
import inspect
import operator
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

if TYPE_CHECKING:
    import torch

LONGEST = 10**9
"""The longest duration, in seconds or minutes: no thread can wait for more than centuries."""
PACKAGE = str(Path(__file__).parent) + os.sep
NO_TEXT = {"bool", "int", "float", "None", "NoneType", "Optional", "Union", "typing", "torch", "Tensor"}
"""Words in annotations of arguments that cannot be text."""
OURS = ("streampack", "streampack_recipes", "__main__")
"""Packages whose errors speak to users; a recipe is run as ``__main__``."""


def require(value: object, name: str, allowed: Iterable[str], *, hint: str = "") -> None:
    """Raise ValueError if ``value`` is not one of the ``allowed`` words; the message ends with ``hint``."""
    if value not in (words := list(allowed)):
        choices = f"{', '.join(map(repr, words))}{hint}{did_you_mean(value, words)}"
        raise ValueError(f"{name}={value!r} is unknown; choose one of {choices}")


def did_you_mean(value: object, known: Iterable[str]) -> str:
    """Return the end of an error message: the known word closest to ``value``; empty if none is close.

    >>> did_you_mean("shufle", ["shuffle", "seed"])
    "; did you mean 'shuffle'?"
    """
    words = list(known)
    close = difflib.get_close_matches(str(value), words, n=1)
    close += [word for word in words if str(value).startswith(f"{word}_")]
    return f"; did you mean {close[0]!r}?" if close else ""


def wrong_arguments(component: Any, arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message for each argument that a class or function does not take, or takes as no text.

    >>> list(wrong_arguments(sorted, {"key": None, "revers": True}))
    ["got an unexpected keyword argument 'revers'; did you mean 'reverse'?"]
    >>> list(wrong_arguments(sorted, {"reverse": "yes"}))
    ["reverse='yes' is text; give true or false"]
    """
    parameters = inspect.signature(component).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    given = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = [name for name, each in parameters.items() if each.kind in given]
    for name, value in arguments.items():
        if name not in known and not takes_any:
            hint = did_you_mean(name, known) or f"; it takes {', '.join(known) or 'none'}"
            yield f"got an unexpected keyword argument {name!r}{hint}"
        elif name in known and isinstance(value, str) and (wanted := _instead_of_text(parameters[name])):
            yield f"{name}={value!r} is text; give {wanted}"


def _instead_of_text(parameter: inspect.Parameter) -> str:
    """Return what a parameter takes by its annotation, or else its default, if that is no text; otherwise nothing."""
    words = {type(parameter.default).__name__}
    if parameter.annotation is not parameter.empty:
        words = set(re.findall(r"\w+", inspect.formatannotation(parameter.annotation)))
    if not words <= NO_TEXT:
        return ""
    flag, number = "bool" in words, bool({"int", "float"} & words)
    return "true, false or a number" if flag and number else "true or false" * flag + "a number" * number


def refuse_text(value: object, name: str, wanted: str) -> None:
    """Raise ValueError for text where a flag or a number is wanted: any text, ``"no"`` too, counts as True."""
    if isinstance(value, str):
        raise ValueError(f"{name}={value!r} is text; give {wanted}")


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
    """Return ``value`` as a float; raise if it is not a number from 0 to `LONGEST`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LONGEST:
        raise ValueError(f"{name}={value!r} is no number of {unit}; give one from 0 to {LONGEST:,}")
    return float(value)


def require_multiple(value: int, name: str, multiple: int, of: str) -> None:
    """Raise ValueError if a setting is no multiple of another one, called ``of``."""
    if rest := value % multiple:
        raise ValueError(
            f"{name}={value} is no multiple of {of}={multiple}; set {name} to {value + multiple - rest}, or choose "
            f"another {of}"
        )


def require_token_id(value: object, name: str, *, vocab_size: int | None) -> int:
    """Return a setting as a token id; raise if it is not one, or outside the vocabulary."""
    number = require_positive(value, name, least=0)
    if vocab_size is not None and number >= vocab_size:
        raise ValueError(
            f"{name}={number} is outside the vocabulary of {vocabulary_text(vocab_size)}; give a token of the model's"
        )
    return number


def vocabulary_text(vocab_size: int | None) -> str:
    """Return the ids of a vocabulary, for messages; without a ``vocab_size`` any id from 0 is allowed."""
    return "ids from 0" if vocab_size is None else f"{vocab_size} ids (0 to {vocab_size - 1})"


def require_token_ids(tokens: torch.Tensor, vocab_size: int) -> None:
    """Raise ValueError if a model has no embedding for a token, for which a GPU only reports a failed assertion.

    Tokens that are on a device already are not looked at, because copying a number back would hold up the host.
    """
    if tokens.device.type == "cpu" and (highest := int(tokens.max())) >= vocab_size:
        raise ValueError(
            f"token id {highest} is outside the model's vocabulary of {vocabulary_text(vocab_size)}; use the model's "
            "own tokenizer, or give the model more embeddings (model.resize_token_embeddings(len(tokenizer)))"
        )


def warn_user(message: str) -> None:
    """Issue a warning that names the line outside of this package from which the call came."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def raised_here(error: BaseException) -> bool:
    """Return whether this package raised an error, which then says to users what is wrong, or could not open a file.

    An error of a library, of an encoder, or of Python itself (``int("x")``) needs its traceback.
    """
    if not isinstance(error, ValueError | RuntimeError | OSError | ImportError):
        return False
    if (known := getattr(error, "raised_here", None)) is not None:  # in a worker process
        return bool(known)
    entries = []
    entry = error.__traceback__
    while entry is not None:
        entries.append((entry.tb_frame.f_globals.get("__name__", "").partition(".")[0], entry))
        entry = entry.tb_next
    of_system = isinstance(error, OSError | ImportError)
    while of_system and entries and entries[-1][0] in sys.stdlib_module_names:  # pathlib, say
        entries.pop()
    if not entries or entries[-1][0] not in OURS:
        return False
    last = entries[-1][1]
    return of_system or last.tb_frame.f_code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End the process on an error that `raised_here` finds: one line, exit status 1. Others keep their traceback."""
    try:
        yield
    except Exception as error:
        if not raised_here(error):
            raise
        sys.exit(" ".join([f"error: {error}", *getattr(error, "__notes__", ())]))
