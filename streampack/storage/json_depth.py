"""A limit on the nesting of JSON.

Python's parser recurses, so how deep it can go depends on the stack of its caller. A fixed limit makes a row valid or
broken wherever it is read.
"""

from __future__ import annotations

import json
import re
from typing import Any

DEEPEST = 500  # objects and arrays inside one another; Python's recursion limit is 1,000, callers included

_STRINGS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_OTHERS = bytes(set(range(256)) - set(b"[]{}"))


def require_shallow(text: bytes) -> None:
    """Refuse JSON in which more than 500 objects and arrays lie inside one another.

    >>> require_shallow(b"[" * 501 + b"]" * 501)
    Traceback (most recent call last):
    ...
    ValueError: 501 objects and arrays lie inside one another, and 500 may

    Raises:
        ValueError: which names the depth.
    """
    # Most texts have few brackets. To count them takes a hundredth of the time of parsing.
    if len(text) <= DEEPEST or text.count(b"[") + text.count(b"{") <= DEEPEST:
        return
    depth = deepest = 0
    for bracket in _STRINGS.sub(b"", text).translate(None, _OTHERS):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    if deepest > DEEPEST:
        raise ValueError(f"{deepest} objects and arrays lie inside one another, and {DEEPEST} may")


def shallow_json(text: bytes) -> Any:
    """Parse JSON that is not nested too deep.

    Raises:
        ValueError: if it is nested too deep, or no JSON.
    """
    require_shallow(text)
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep to be parsed here") from None
