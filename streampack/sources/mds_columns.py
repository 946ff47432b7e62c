"""The columns of an MDS sample.

A sample begins with the sizes, ``uint32``, of the columns that have no fixed size. Then come the bytes of all columns,
end to end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from streampack.storage.json_depth import shallow_json

ARRAYS = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32",
          64: "uint64", 65: "int64", 66: "float64"}  # fmt: skip
SCALARS = frozenset(ARRAYS.values())
SHAPES = ("uint8", "uint16", "uint32", "uint64")  # types of an array's dimensions, by their code

Decode = Callable[[bytes], Any]


class Column(NamedTuple):
    """A column: its name, its size in bytes (None if each sample has its own), and the function that decodes it."""

    name: str
    size: int | None
    decode: Decode


def row_of(columns: Sequence[Column], raw: bytes) -> dict[str, Any]:
    """Return the values of a sample's columns by name.

    Raises:
        ValueError: if the sample is damaged.
        LookupError: if a value is damaged.
    """
    variable = sum(column.size is None for column in columns)
    sizes = iter(np.frombuffer(raw, "<u4", variable).tolist())
    at, row = 4 * variable, {}
    for column in columns:
        size = next(sizes) if column.size is None else column.size
        data, at = raw[at : at + size], at + size
        if column.decode is not left_out:
            row[column.name] = column.decode(data)
    if at != len(raw):
        raise ValueError(f"the columns take {at} bytes and the sample has {len(raw)}")
    return row


def left_out(data: bytes) -> None:
    """Mark a column that is not kept, in place of its decoder. It is never called."""


def decoder(name: str, encoding: str) -> Decode:
    r"""Return the function that decodes the bytes of a column.

    >>> decoder("text", "str")(b"caf\xc3\xa9"), decoder("ids", "ndarray:uint16:2")(b"\x01\x00\x02\x00").tolist()
    ('café', [1, 2])

    Raises:
        ValueError: for an encoding that is not read.
    """
    kind, _, detail = encoding.partition(":")
    if kind in _PLAIN:
        return _PLAIN[kind]
    if kind in SCALARS:
        return partial(_scalar, kind)
    if kind == "ndarray":
        dtype, _, dims = detail.partition(":")
        if dtype and dtype not in SCALARS:
            raise ValueError(f"column {name!r} holds arrays of {dtype!r}, which no MDS shard does")
        shape = [int(dim) for dim in dims.split(",")] if dims else None
        return partial(_array, dtype, shape)
    if kind == "pkl":
        raise ValueError(
            f"column {name!r} is pickled, and reading it could run any code; write it as json, or leave it out: "
            "columns=[...]"
        )
    raise ValueError(
        f"column {name!r} is encoded as {encoding!r}, which is not read; leave it out: columns=[...]"
    )


def _scalar(dtype: str, data: bytes) -> Any:
    return np.frombuffer(data, dtype, 1)[0].item()


def _array(dtype: str, shape: list[int] | None, data: bytes) -> Any:
    """Decode an array. If the encoding does not name its type or its shape, they are stored before the values."""
    at = 0
    if not dtype:
        dtype, at = ARRAYS[data[0]], 1
    if shape is None:
        ndim, width = data[at] >> 2, SHAPES[data[at] % 4]
        shape = np.frombuffer(data, width, ndim, at + 1).tolist()
        at += 1 + ndim * np.dtype(width).itemsize
    return np.frombuffer(data, dtype, offset=at).reshape(shape)


_PLAIN: dict[str, Decode] = {  # functions that can be pickled, for spawned workers
    "bytes": bytes,
    "str": partial(str, encoding="utf-8"),
    "json": shallow_json,
    "int": partial(int.from_bytes, byteorder="little", signed=True),
    "str_int": int,
    "str_float": float,
}
