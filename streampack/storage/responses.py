"""Servers' answers to range requests: checks of their headers, and errors for their statuses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from streampack.storage.base import redact
from streampack.storage.retries import Busy, Refused

TEMPORARY = (408, 425, 429)  # HTTP statuses after which the request is tried again, besides 5xx


class Answer(NamedTuple):
    """A server's answer to a range request, as its headers describe it."""

    data: bytes
    start: int | None  # the first byte of the range; None if the range is behind the file's end
    size: int  # bytes of the whole file
    tag: str | None  # the ETag, if the server sends one


class Judged(Exception):
    """Wraps an error whose message is known to hold no secrets, so that it need not be replaced.

    Errors that come out of a library's code are replaced by ones without URLs and headers. An error that is made here,
    but passes through such code, is raised in this wrapper.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error


def head_of(path: str, status: int, headers: Mapping[str, str]) -> Answer:
    """Check the headers of an HTTP answer, and return it without data.

    This comes before the body is read, because a server without range requests sends the whole file.

    Raises:
        Judged: holds the error, if the status is neither 206 nor the 416 of a range behind the file's end. Some servers
            answer 200 instead if the file is empty.
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
    if status == 200 and headers.get("Content-Length") == "0":
        return Answer(b"", None, 0, tag)
    if status == 206 and start and size:
        return Answer(b"", int(start), int(size), tag)
    raise Judged(refusal(redact(path), status, headers))


def refusal(shown: str, status: int, headers: Mapping[str, str]) -> OSError:
    """Make the error for an HTTP status other than 206. Its class decides whether the request is tried again."""
    what = f"{shown}: HTTP {status}"
    if status in TEMPORARY or status >= 500:
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
    """Return an ETag without quotes and without ``W/``, the mark of a weak tag.

    A proxy that compresses files for other clients may mark tags as weak even if it passes a file on unchanged. So tags
    are compared as RFC 9110, 8.8.3.2 describes the weak comparison: ``W/"1"`` and ``"1"`` are the same.

    >>> opaque('W/"1"'), opaque('"1"')
    ('1', '1')
    """
    return tag.removeprefix("W/").strip('"') if tag else None
