"""Digests of plain values, to compare corpora, encoders and states between processes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

SCALARS = frozenset({str, int, float, bool, bytes, type(None)})


def digest(*parts: object) -> str:
    """Return a short stable digest of plain values; 16 hex digits."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def digest_of(parts: Iterable[object]) -> str:
    """Return what `digest` returns of all these parts, which may be too many to hold.

    >>> digest_of(iter("abc")) == digest(*"abc")
    True
    """
    left, count, found = iter(parts), 0, hashlib.sha256(b"(")
    while some := tuple(islice(left, 1024)):
        shown = repr(some)[1:-1].removesuffix(",")  # one alone has a comma
        found.update(f"{', ' if count else ''}{shown}".encode())
        count += len(some)
    found.update(b",)" if count == 1 else b")")
    return found.hexdigest()[:16]


def plain(value: Any) -> Any:
    """Convert a row's content to plain values, so that equal lists, arrays and tensors give equal results.

    The ``repr`` of the result is the same in every process: it holds no memory address, and sets are sorted. An object
    is represented by its class and by what `pickle` would store, a function by its name.

    Raises:
        Exception: for what cannot be pickled, such as an open file, and for what contains itself.
    """
    kind = type(value)
    if kind in SCALARS:
        return value
    if kind is dict or isinstance(value, Mapping):
        return sorted((str(key), plain(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        # Lists of numbers may be long, so they are copied without a call for each.
        return list(value) if SCALARS.issuperset(map(type, value)) else [plain(item) for item in value]
    if hasattr(value, "tolist"):
        items = value.tolist()
        return plain(items) if getattr(getattr(value, "dtype", None), "hasobject", False) else items
    if isinstance(value, set | frozenset):
        return sorted(repr(plain(item)) for item in value)
    if isinstance(value, type | FunctionType | BuiltinFunctionType | MethodType):
        return qualified_name(value)
    if " at 0x" not in repr(value):  # the default repr of an object holds its address
        return value
    reduced = value.__reduce_ex__(2)
    if isinstance(reduced, str):
        return reduced
    return [plain(type(value)), plain(reduced[1:3]), *(plain(list(items)) for items in reduced[3:5] if items)]


def qualified_name(thing: Any) -> str:
    """Return the dotted name of a function or class, or of an object's class."""
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{named.__module__}.{named.__qualname__}"
