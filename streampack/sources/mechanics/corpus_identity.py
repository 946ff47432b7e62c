"""Identities of corpora and runs: what distinguishes them, and the first difference between two."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from streampack.fingerprint import digest
from streampack.sources.examples import UNKNOWN
from streampack.sources.source import Source

OF_ROWS = ("content", "hashed", "samples")
"""Entries that hold marks of a few rows. A mark that is unknown, or that only one of two identities has, is equal to
any other, so that a run can continue after a row, or a bug in the encoder, was mended."""


def fingerprint_of(source: Source) -> str:
    """Return a digest of a source's identity."""
    return digest(plain_identity(source.identity()))


def plain_identity(value: Any, *, listed: bool = False) -> Any:
    """Return an identity as plain values; with ``listed``, without those that must be read from files.

    >>> plain_identity({"rows": 3, "of": {"files": lambda: "1 file(s)"}}, listed=True)
    {'rows': 3, 'of': {'files': None}}
    """
    if isinstance(value, Mapping):
        return {name: plain_identity(item, listed=listed) for name, item in value.items()}
    if callable(value):
        return None if listed else value()
    return value


def difference(theirs: Any, ours: Any, *, skip: Callable[[str], bool] = lambda _: False) -> str | None:
    """Describe the first difference of ``ours`` from another identity, which a state holds; None if there is none.

    >>> difference({"seed": 0}, {"seed": 1})
    'with seed=0 and this dataset has seed=1'
    """
    if (found := first_difference(theirs, ours, skip=skip)) is None:
        return None
    name, before, now = found
    words = f"with {name}={before!r} and this dataset has {name}={now!r}"
    if name.endswith(".files"):
        words += (
            " (the digest is of names, sizes and contents; a name is relative to the given folder, or to the "
            "part of a pattern before its first wildcard)"
        )
    if name.endswith((".files", ".names")):
        words += (
            "; a run continues with others only with corpus_lists, a folder where it has kept the lists of its files "
            "(recipes: data.corpus_lists=OUTPUT_DIR/corpus_lists)"
        )
    return words


def first_difference(
    theirs: Any, ours: Any, name: str = "", *, skip: Callable[[str], bool] = lambda _: False
) -> tuple[str, Any, Any] | None:
    """Return the dotted name of the first value that differs between two plain identities, and both values.

    >>> first_difference({"corpus": {"rows": 3}}, {"corpus": {"rows": 4}})
    ('corpus.rows', 3, 4)

    Args:
        theirs: may be anything, as it comes from a state.
        ours: decides which names are compared.
        name: of both.
        skip: whether not to compare what has this name.
    """
    if skip(name):
        return None
    if not isinstance(ours, Mapping):
        return None if type(theirs) is type(ours) and theirs == ours else (name, theirs, ours)
    known = theirs if isinstance(theirs, Mapping) else {}
    of_rows = name.rpartition(".")[2] in OF_ROWS
    for key, value in ours.items():
        before = known.get(key, UNKNOWN if of_rows else None)
        if of_rows and UNKNOWN in (before, value):
            continue
        found = first_difference(before, value, f"{name}.{key}" if name else str(key), skip=skip)
        if found is not None:
            return found
    return None
