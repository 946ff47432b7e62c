"""Errors of the libraries that read URLs, replaced by ours: they hold URLs and headers, with secrets."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from typing import Any

from streampack.storage.retries import PERMANENT, Busy, Refused

TEMPORARY = (408, 425, 429)  # HTTP statuses after which a request is tried again, besides 5xx


class PastTheEnd(OSError):
    """The error for a range after a file's end."""


def replaced(error: BaseException, shown: str, timeout: float) -> Exception:
    """Return an error without secrets in place of a library's. Its class decides whether the request is tried again."""
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and (isinstance(cause, OSError) or _of_aiohttp(cause)):
        assert cause is not None
        error = cause  # fsspec's HTTP says of any failure of a look-up that the file is not there
    if isinstance(error, Refused):  # of a redirect
        return Refused(f"{shown}: {error}")
    status, headers = _answer(error)
    name = type(error).__name__
    said = f"{shown}: HTTP {status}, " if status else f"{shown}: "
    if status in TEMPORARY or status >= 500:
        busy = Busy(f"{said}try later")
        after = next((value for name, value in headers.items() if name.lower() == "retry-after"), "")
        busy.retry_after = float(after) if after.isdecimal() else 0.0
        return busy
    if status == 416 or (not status and isinstance(error, OSError) and error.errno == errno.EINVAL):
        return PastTheEnd(shown)
    if status in (404, 410) or (not status and isinstance(error, FileNotFoundError)):
        return FileNotFoundError(f"{said}there is no such file")
    # gcsfs says so by a word.
    forbidden = isinstance(error, PermissionError) or str(error).startswith("Forbidden")
    if status in (401, 403, 407) or (not status and forbidden):
        return PermissionError(f"{said}access is denied")
    if status:
        return Refused(f"{said}refused")
    if isinstance(error, TimeoutError):
        return TimeoutError(f"{said}no answer within {timeout:g} s")
    if name in _SETTINGS:
        return Refused(f"{said}{name}; {_SETTINGS[name]}")
    # A library raises errors of its own for lost connections, or these of Python. A wrong value, such as a certificate
    # that is none of the host's (also an OSError), stays wrong.
    own = type(error).__module__ != "builtins" or type(error) in (RuntimeError, Exception)
    wrong = isinstance(error, ValueError) and not isinstance(error, json.JSONDecodeError)
    if (own or isinstance(error, OSError | EOFError)) and not wrong and not isinstance(error, PERMANENT):
        return ConnectionError(f"{said}{name}")
    return Refused(f"{said}{name} (its text, which may hold secrets, is not shown)")


def _of_aiohttp(error: BaseException | None) -> bool:
    return type(error).__module__.startswith("aiohttp")


def _answer(error: BaseException) -> tuple[int, Mapping[str, str]]:
    """Return the HTTP status of a library's error, 0 if it has none, and the answer's headers."""
    for each in (error, error.__cause__):
        found: Any = getattr(each, "response", None)  # of huggingface_hub, Azure and botocore
        if found is None and each is error and not _of_aiohttp(error.__cause__):
            found = error  # of gcsfs, and of aiohttp where it is no answer that could not be understood
        if isinstance(found, Mapping):  # of botocore
            about = found.get("ResponseMetadata", {})
            values, headers = iter([about.get("HTTPStatusCode")]), about.get("HTTPHeaders")
        else:
            values = (getattr(found, name, None) for name in ("status_code", "status", "code"))
            headers = getattr(found, "headers", None)
        if status := next((int(value) for value in values if str(value).isdecimal()), 0):
            return status, headers or {}
    return 0, {}


_OF_AMAZON = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or for a public bucket options={'anon': True}"
_OF_GOOGLE = "set GOOGLE_APPLICATION_CREDENTIALS, or for a public bucket options={'token': 'anon'}"
_SETTINGS = {
    **dict.fromkeys(("NoCredentialsError", "PartialCredentialsError"), _OF_AMAZON),
    **dict.fromkeys(("DefaultCredentialsError", "RefreshError"), _OF_GOOGLE),
    "ProfileNotFound": "correct AWS_PROFILE, or unset it",
    "ParamValidationError": "correct the name of the bucket or the key",
    "InvalidURL": "correct the URL",
    "TooManyRedirects": "the server redirects in a circle; correct the URL",
}
"""Errors of libraries, by name, that another try would not change, each with the way out."""
