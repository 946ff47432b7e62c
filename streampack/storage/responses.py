"""What a server said when it was asked for a range, whatever asked: the bytes, or one of our own errors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from streampack.storage.base import redact
from streampack.storage.retries import Busy, Refused

PASSING = (408, 425, 429)  # and 5xx: an HTTP status that may be another one soon
LONGEST_NAMED_WAIT = 3600.0  # seconds; a server that names more is as good as gone


class Answer(NamedTuple):
    """What a server gave for a range."""

    data: bytes
    start: int  # of the range that it says it gave
    size: int  # of the whole file, as it says
    tag: str | None


class Said(Exception):
    """An error that is ours already, and may leave as it is."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class Head(NamedTuple):
    """What status and headers say of the body that comes with them."""

    start: int
    size: int
    tag: str | None
    empty: bool  # the range begins behind the file's end


def head_of(path: str, status: int, headers: Mapping[str, str]) -> Head:
    """Judge an HTTP answer before its body is read: a server without ranges would send the whole file.

    Raises:
        Said: holding what it amounts to.
    """
    said = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)", headers.get("Content-Range", ""))
    start, size = said.groups() if said else (None, None)
    tag = opaque(headers.get("ETag"))
    if status == 206 and start and size == "*":
        raise Said(
            Refused(
                f"{redact(path)}: the server does not tell the file's size, by which a file that was cut off or has "
                "grown is noticed; serve the file with its size in Content-Range, or copy it to this machine"
            )
        )
    if status == 416 and size and size != "*":
        return Head(0, int(size), tag, empty=True)
    if status == 206 and start and size:
        return Head(int(start), int(size), tag, empty=False)
    raise Said(refusal(redact(path), status, headers))


def refusal(shown: str, status: int, headers: Mapping[str, str]) -> OSError:
    """What an HTTP status other than 206 amounts to: something that may pass, or not."""
    what = f"{shown}: HTTP {status}"
    if status in PASSING or status >= 500:
        busy = Busy(what)
        after = headers.get("Retry-After", "")
        busy.retry_after = min(float(after), LONGEST_NAMED_WAIT) if after.isdecimal() else 0.0
        return busy
    if status in (404, 410):
        return FileNotFoundError(f"{what}, there is no such file")
    if status in (401, 403, 407):
        return PermissionError(f"{what}, access is denied")
    if status == 200:
        return Refused(f"{what}: the server sends whole files only; serve them with range requests")
    return Refused(what)


def opaque(tag: str | None) -> str | None:
    """What an ETag calls a version: without its quotes, and without the mark of a weak one.

    A proxy that compresses for others may mark the tag of what it sends us as it is. RFC 9110, 8.8.3.2: for such a
    comparison, ``W/"1"`` and ``"1"`` are the same.

    >>> opaque('W/"1"'), opaque('"1"')
    ('1', '1')
    """
    return tag.removeprefix("W/").strip('"') if tag else None
