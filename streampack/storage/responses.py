"""Answers of servers to range requests: the bytes, or an error."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from streampack.storage.base import redact
from streampack.storage.retries import Busy, Refused

PASSING = (408, 425, 429)  # HTTP statuses that may pass, besides 5xx


class Answer(NamedTuple):
    """A server's answer to a range request."""

    data: bytes
    start: int | None  # of the range, by its headers; None if that begins behind the file's end
    size: int  # of the whole file, by its headers
    tag: str | None


class Judged(Exception):
    """Carries an error that is made here, with a message that holds no secrets, through a library's code."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def head_of(path: str, status: int, headers: Mapping[str, str]) -> Answer:
    """Check an HTTP answer before its body is read: a server without ranges would send the whole file.

    The answer that is returned has no data yet.

    Raises:
        Judged: with the error of a status other than 206.
    """
    ranged = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)", headers.get("Content-Range", ""))
    start, size = ranged.groups() if ranged else (None, None)
    tag = opaque(headers.get("ETag"))
    if status == 206 and start and size == "*":
        raise Judged(
            Refused(
                f"{redact(path)}: the server does not tell the file's size, by which a file that was cut off or has "
                "grown is noticed; serve the file with its size in Content-Range, or copy it to this machine"
            )
        )
    if status == 416 and size and size != "*":
        return Answer(b"", None, int(size), tag)
    if status == 206 and start and size:
        return Answer(b"", int(start), int(size), tag)
    raise Judged(refusal(redact(path), status, headers))


def refusal(shown: str, status: int, headers: Mapping[str, str]) -> OSError:
    """Make the error for an HTTP status other than 206; `PERMANENT` ones are not retried."""
    what = f"{shown}: HTTP {status}"
    if status in PASSING or status >= 500:
        busy = Busy(what)
        after = headers.get("Retry-After", "")
        busy.retry_after = float(after) if after.isdecimal() else 0.0
        return busy
    if status in (404, 410):
        return FileNotFoundError(f"{what}, there is no such file")
    if status in (401, 403, 407):
        return PermissionError(f"{what}, access is denied")
    if status == 200:
        return Refused(f"{what}: the server sends whole files only; serve them with range requests")
    return Refused(what)


def opaque(tag: str | None) -> str | None:
    """Return an ETag without its quotes, and without the mark of a weak one.

    A proxy that compresses for other clients may mark the tags of what it passes on unchanged. RFC 9110, 8.8.3.2: in a
    weak comparison, ``W/"1"`` and ``"1"`` are the same.

    >>> opaque('W/"1"'), opaque('"1"')
    ('1', '1')
    """
    return tag.removeprefix("W/").strip('"') if tag else None
