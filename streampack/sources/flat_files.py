"""Where the ids lie in a flat file of tokens: raw, behind numpy's header, or behind that of llm.c."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from streampack.storage.base import File
from streampack.storage.listing import Corpus
from streampack.storage.ranges import Fetcher

HEAD_BYTES = 1024  # that are read of a file when it is looked at; the header of llm.c
NUMPY = b"\x93NUMPY"
LLM_C = {20240520: "uint16", 20240801: "uint32"}
"""Types by the first number of llm.c's header: 256 ``int32``, of which the third is the number of tokens.
https://github.com/karpathy/llm.c/blob/master/dev/data/data_common.py"""
DTYPES = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
ANEW = "it was cut off or replaced: copy it anew"


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the ids of a file lie.

    Attributes:
        dtype: their type, such as ``<u2``.
        first: the byte of the first id.
        tokens: how many there are.
    """

    dtype: str
    first: int
    tokens: int


def layout_of(corpus: Corpus, file: File, *, dtype: str | None) -> Layout:
    """Read the beginning of a file, and return where its ids lie. Without a header, they are of type ``dtype``.

    The name does not decide: the ``.npy`` files of OLMo are raw, and those of ``numpy.save`` have a header.

    Raises:
        ValueError: if the header is none of ids, or does not describe a file of this size; without a header, if the
            size is no multiple of an id's, or no type is given.
    """
    head = Fetcher(corpus.storage, corpus.retries).take((file, 0, min(file.size, HEAD_BYTES)))
    header = _of_numpy(head) if head.startswith(NUMPY) else _of_llm_c(head)
    if header is not None:
        found, first, tokens = header
        if dtype is not None and np.dtype(dtype) != found:
            raise ValueError(f"its header says {found.name}, and dtype is {dtype!r}; leave dtype out")
        if (size := first + tokens * found.itemsize) != file.size:
            raise ValueError(
                f"it has {file.size:,} bytes, and its header describes {size:,} ({tokens:,} of {found.name}); {ANEW}"
            )
        return Layout(found.str.replace("|", "<"), first, tokens)
    if dtype is None:
        raise ValueError(
            "it has no header that says how ids are stored; give dtype, such as 'uint16' or 'uint32', as it was written"
        )
    raw = np.dtype(dtype).newbyteorder("<")
    if file.size % raw.itemsize:
        raise ValueError(
            f"it has {file.size:,} bytes, no multiple of the {raw.itemsize} of {dtype}; it was cut off, or is of "
            "another dtype"
        )
    return Layout(raw.str.replace("|", "<"), 0, file.size // raw.itemsize)


def require_id(token: int | None, name: str, dtypes: Iterable[np.dtype[Any]]) -> None:
    """Check that ids of all types can be a token.

    Raises:
        ValueError: with the type that cannot.
    """
    for dtype in dtypes if token is not None else ():
        limits = np.iinfo(dtype)
        if type(token) is not int or not limits.min <= token <= limits.max:
            raise ValueError(
                f"{name}={token!r} is none of {dtype.name} ({limits.min} to {limits.max}), the type of the files' ids; "
                "correct one of them"
            )


Header = tuple[np.dtype[np.generic], int, int]
"""(type of the ids, byte of the first, number of them)."""


def _of_numpy(head: bytes) -> Header:
    stream = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(stream)
        read = (
            np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        )
        shape, _, dtype = read(stream)
    except ValueError as error:
        raise ValueError(f"its numpy header cannot be read ({error}); write it anew by numpy.save") from None
    if len(shape) != 1 or dtype.name not in DTYPES or dtype.newbyteorder("<") != dtype:
        raise ValueError(
            f"it holds an array of {dtype} of shape {shape}; save one flat, little-endian array of ids of one of "
            f"{', '.join(DTYPES)}"
        )
    return dtype, stream.tell(), shape[0]


def _of_llm_c(head: bytes) -> Header | None:
    if len(head) < HEAD_BYTES:
        return None
    magic, _, tokens = np.frombuffer(head, "<i4", 3).tolist()
    return (np.dtype(LLM_C[magic]), HEAD_BYTES, tokens) if magic in LLM_C else None
