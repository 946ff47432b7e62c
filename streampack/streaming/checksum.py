"""Checksums of states, by which one that is damaged or was edited is refused."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any


def sealed(values: Mapping[str, Any], *, of: str) -> dict[str, Any]:
    """Return plain values with their checksum.

    The order of names and the kind of a sequence do not count, which a checkpoint format may change.

    >>> state = sealed({"packs": 3, "cursor": [0, 7]}, of="lane 2")
    >>> unsealed({**state, "cursor": (0, 7)}, of="lane 2")
    {'packs': 3, 'cursor': (0, 7)}

    Args:
        values: text, numbers, booleans, None, and lists and mappings of them.
        of: what they describe. The checksum is another one for something else.
    """
    return {**values, "checksum": _checksum(values, of)}


def unsealed(found: Any, *, of: str) -> dict[str, Any]:
    """Return the values without their checksum.

    Raises:
        ValueError: if it is not that of these values.
    """
    try:
        values = dict(found)
        checksum = values.pop("checksum")
        if type(checksum) is int and checksum == _checksum(values, of):
            return values
    except (TypeError, KeyError, ValueError, RecursionError):  # it is no mapping, or not of plain values
        pass
    raise ValueError(
        f"the state is damaged or was edited: the checksum of {of} is wrong; resume from another checkpoint"
    )


def _checksum(values: Mapping[str, Any], of: str) -> int:
    return zlib.crc32(json.dumps([of, values], sort_keys=True).encode())
