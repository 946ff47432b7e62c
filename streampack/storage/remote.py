"""`RemoteStorage`: files behind URLs, read by the public calls of fsspec's file systems."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from streampack.storage.base import STORES, File, Listed, changed, ends, redact, resized
from streampack.storage.hub import http_options, pinned, web_address
from streampack.storage.retries import PERMANENT, Busy, Refused, Storage

log = logging.getLogger(__name__)
SCHEMES = ("http", "https", "s3", "hf", *STORES)
"""The schemes that are read, besides those that a user has registered with fsspec. fsspec knows others, but some of
them run programs, open archives or read files of this machine."""

TEMPORARY = (408, 425, 429)  # HTTP statuses after which a request is tried again, besides 5xx
SLOWEST = 1 << 20
"""Bytes per second: a file that is stored at a lower rate is given up, and tried again."""

_INHERITED: list[Any] = []
"""File systems that a fork copied from the parent process. They are kept, because freeing them would close connections
that the parent still uses."""

Result = TypeVar("Result")


class RemoteStorage:
    """The files of one scheme. Each process makes its own file systems when it first reads."""

    block = 1 << 21

    def __init__(self, scheme: str, storage: Storage) -> None:
        self.scheme = scheme
        self.storage = storage
        self._made: tuple[int, dict[str, Any]] = (0, {})  # process id, file systems by scheme
        # Process id, and paths of files that are as they were listed.
        self._checked: tuple[int, set[str]] = (0, set())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": (0, {}), "_checked": (0, set())}

    @property
    def patience(self) -> float:
        """See `FileStorage.patience`."""
        return 60 * self.storage.max_outage + self.storage.timeout

    def fetch(self, file: File, start: int, stop: int) -> bytes:
        """See `FileStorage.fetch`. After the first read of a file, a process looks whether it is the listed one."""
        if start == stop:
            return b""
        checked = self._checked_here()

        def read() -> bytes:
            data = self._read(file, start, stop)
            whole = len(data) == stop - start
            # Behind the bytes, or they might be of a later version. The commit of a file of the Hub does not change.
            if not whole or not (self.scheme == "hf" or file.path in checked):
                self._check(file)
            if not whole and len(data) == file.size:
                what = "the server sends whole files only; serve them with range requests"
                raise Refused(f"{file.shown}: {what}, or copy the file to this machine")
            if not whole:
                raise ConnectionError(
                    f"{file.shown}: {len(data)} bytes of {stop - start} at byte {start} came"
                )
            checked.add(file.path)
            return data

        return self.storage.retry(read, f"reading {file.shown}, bytes {start} to {stop}")

    def _checked_here(self) -> set[str]:
        if self._checked[0] != os.getpid():
            self._checked = (os.getpid(), set())
        return self._checked[1]

    def _read(self, file: File, start: int, stop: int) -> bytes:
        try:
            if self.scheme == "hf":  # its own file system looks files up, reads ahead, and retries
                data: bytes = self._call(file.path, "cat_file", start=start, end=stop, by="https")
            else:
                data = self._call(file.path, "cat_file", start=start, end=stop)
        except _BehindTheEnd:
            return b""
        return data

    def _check(self, file: File) -> None:
        found = self._look(file.path)
        if found.size != file.size:
            raise resized(file, found.size)
        if file.tag is not None and found.tag not in (file.tag, None):
            raise ValueError(changed(file, f"is version {found.tag} and was {file.tag}"))

    def tag(self, file: File) -> str:
        """Return the ETag of the listing or the server; without one, a digest of the first and last 64 KiB."""
        return file.tag or self.look(file.path).tag or ends(self.fetch, file)

    def look(self, path: str) -> Listed:
        """Return the size and tag of a file.

        Raises:
            Refused: if the server does not tell the size, by which a file that was cut off or has grown is noticed.
        """
        return self.storage.retry(lambda: self._look(path), f"looking at {redact(path)}")

    def _look(self, path: str) -> Listed:
        if self.scheme != "hf":
            self._filesystem(self.scheme).invalidate_cache()  # it would answer from an earlier listing
        found = listed(path, self._call(path, "info"))
        if found.size is None:
            raise Refused(
                f"{redact(path)}: the server does not tell the file's size; copy it to this machine"
            )
        return found

    def find(self, pattern: str) -> list[Listed]:
        """Return the files that a glob matches, by one listing.

        Raises:
            ValueError: for HTTP, which cannot list files.
        """
        if self.scheme in ("http", "https"):
            raise ValueError(
                f"{redact(pattern)!r} is a glob, and a web server does not list files; name each file, or a manifest"
            )
        found = self.storage.retry(
            lambda: self._call(pattern, "glob", detail=True), f"listing {redact(pattern)}"
        )
        return [
            listed(f"{self.scheme}://{path.lstrip('/')}", info)
            for path, info in found.items()
            if info["type"] == "file"
        ]

    def pinned(self, paths: Sequence[str]) -> list[str]:
        """Return paths of the Hub at their commits; other paths unchanged."""
        if self.scheme != "hf":
            return list(paths)
        fs, timeout = self._filesystem("hf"), self.storage.timeout
        safely = lambda path, call: self.storage.retry(  # noqa: E731 - typed where it is taken
            lambda: self._safely(path, call), f"looking at {redact(path)}"
        )
        return pinned(fs, paths, timeout=timeout, safely=safely)

    def whole(self, path: str) -> bytes:
        """Read all of a small file."""
        return self.head(path, None)[0]

    def head(self, path: str, count: int | None) -> tuple[bytes, int]:
        """Return the first bytes of a file, ``count`` unless it is shorter, and its size."""
        size = self.look(path).size or 0
        self._checked_here().add(path)
        return self.fetch(File(path, path, size), 0, size if count is None else min(count, size)), size

    def store(self, local: Path, path: str) -> None:
        """Store a file of this machine, whole or not at all; a file that is there is replaced.

        Raises:
            OSError: if that failed, or the stored file has another size.
        """
        size = local.stat().st_size

        def store() -> None:
            try:
                self._call(path, "put_file", local=str(local), timeout=self.storage.timeout + size / SLOWEST)
            except FileNotFoundError:
                raise FileNotFoundError(
                    f"{redact(path)}: there is no such bucket, or container; make it"
                ) from None
            if (there := self._look(path).size) != size:
                raise ConnectionError(f"{redact(path)}: {there} bytes are stored of {size}")

        self.storage.retry(store, f"storing {redact(path)}")

    def _call(
        self, path: str, name: str, *, by: str = "", timeout: float = 0, local: str = "", **settings: Any
    ) -> Any:
        """Call a method of the file system of a scheme with a path."""
        fs = self._filesystem(by or self.scheme)
        url = web_address(self._filesystem("hf"), path) if by else path
        paths = [local, url] if local else [url]
        if fs.async_impl:
            settings["timeout"] = timeout or self.storage.timeout
        return self._safely(path, lambda: getattr(fs, name)(*paths, **settings))

    def _safely(self, path: str, call: Callable[[], Result]) -> Result:
        """Call a library. Its errors hold URLs and headers, with secrets, so they are replaced by errors without."""
        try:
            return call()
        except ImportError:
            raise
        except Exception as error:
            ours = _replaced(error, redact(path), self.storage.timeout)
            # What is no error of the network is a mistake in a library or in its settings: where it was raised helps.
            raise ours.with_traceback(error.__traceback__ if isinstance(ours, Refused) else None) from None

    def _filesystem(self, scheme: str) -> Any:
        """Return a file system of this process. One that a fork copied cannot be used, as its threads are gone."""
        if self._made[0] != os.getpid():
            _INHERITED.append(self._made[1])
            self._made = (os.getpid(), {})
        if (found := self._made[1].get(scheme)) is None:
            options = self.storage.options
            if scheme != self.scheme:
                options = http_options(self._filesystem("hf"))
            found = self._made[1][scheme] = _make(scheme, options)
        return found


class _BehindTheEnd(OSError):
    """The error for a range that lies behind a file's end."""


def listed(path: str, info: Mapping[str, Any]) -> Listed:
    """Return what a file system says of a file. Of several tags, a digest of the content is taken.

    >>> listed("gs://a/b", {"size": 3, "etag": "CKih16GjycICEAE=", "md5Hash": "kAFQmDzST7DWlj99KOF/cg=="}).tag
    'kAFQmDzST7DWlj99KOF/cg=='
    """
    digests = (
        (info.get("lfs") or {}).get("sha256"),
        info.get("blob_id"),
        info.get("md5Hash"),
        info.get("crc32c"),
    )
    md5 = (info.get("content_settings") or {}).get("content_md5")  # of Azure
    tags = (info.get("ETag"), *digests, bytes(md5).hex() if md5 else None, info.get("etag"))
    return Listed(path, info.get("size"), opaque(next((tag for tag in tags if tag), None)))


def opaque(tag: str | None) -> str | None:
    """Return an ETag without quotes and without ``W/``, the mark of a weak tag.

    A proxy that compresses files for other clients may mark tags as weak even if it passes a file on unchanged. So tags
    are compared as RFC 9110, 8.8.3.2 describes the weak comparison: ``W/"1"`` and ``"1"`` are the same.

    >>> opaque('W/"1"'), opaque('"1"')
    ('1', '1')
    """
    return tag.removeprefix("W/").strip('"') if tag else None


def _replaced(error: Exception, shown: str, timeout: float) -> Exception:
    """Return an error without secrets in place of a library's. Its class decides whether the request is tried again."""
    cause = error.__cause__ if isinstance(error, FileNotFoundError) else None
    if isinstance(cause, OSError) or type(cause).__module__.startswith("aiohttp"):
        assert isinstance(cause, Exception)
        error = cause  # fsspec's HTTP says of any failure of a look-up that the file is not there
    if (status := _status(error)) is not None:
        return _refusal(shown, *status)
    if isinstance(error, TimeoutError):
        return TimeoutError(f"{shown}: no answer within {timeout:g} s")
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(f"{shown}: there is no such file")
    if isinstance(error, PermissionError) or (type(error) is OSError and str(error).startswith("Forbidden")):
        return PermissionError(f"{shown}: access is denied")  # gcsfs says so by a word
    if isinstance(error, PERMANENT):
        return type(error)(f"{shown}: refused")
    name = type(error).__name__
    if name in _SETTINGS:
        return Refused(f"{shown}: {name}; {_SETTINGS[name]}")
    if isinstance(error, OSError) and error.errno == errno.EINVAL:
        return _BehindTheEnd(shown)
    # A library raises errors of its own for lost connections, or these of Python.
    own = type(error).__module__ != "builtins"
    if own and isinstance(error, ValueError) and not isinstance(error, json.JSONDecodeError):
        return Refused(f"{shown}: {name} (its text, which may hold secrets, is left out)")
    if own or isinstance(error, OSError | EOFError) or type(error) in (RuntimeError, Exception):
        return ConnectionError(f"{shown}: {name}")
    return Refused(f"{shown}: {name} (its text, which may hold secrets, is left out)")


def _status(error: BaseException) -> tuple[int, Mapping[str, str]] | None:
    """Return the HTTP status of a library's error, and the answer's headers; None if it has none."""
    for each in (error, error.__cause__):
        response: Any = getattr(each, "response", None)
        if isinstance(response, Mapping):  # of botocore
            said = response.get("ResponseMetadata", {})
            status, headers = said.get("HTTPStatusCode"), said.get("HTTPHeaders")
        elif response is not None:  # of huggingface_hub and Azure
            status, headers = getattr(response, "status_code", None), getattr(response, "headers", None)
        elif each is error and not type(error.__cause__).__module__.startswith("aiohttp"):
            # Of aiohttp, where it is no answer that could not be understood, and of gcsfs.
            status = getattr(each, "status", None) or getattr(each, "code", None)
            headers = getattr(each, "headers", None)
        else:
            continue
        if str(status).isdecimal():
            return int(str(status)), headers or {}
    return None


def _refusal(shown: str, status: int, headers: Mapping[str, str]) -> OSError:
    what = f"{shown}: HTTP {status}"
    if status == 416:
        return _BehindTheEnd(what)
    if status in TEMPORARY or status >= 500:
        busy = Busy(what)
        after = next((value for name, value in headers.items() if name.lower() == "retry-after"), "")
        busy.retry_after = float(after) if after.isdecimal() else 0.0
        return busy
    if status in (404, 410):
        return FileNotFoundError(f"{what}, there is no such file")
    if status in (401, 403, 407):
        return PermissionError(f"{what}, access is denied")
    return Refused(what)


_CREDENTIALS = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or for a public bucket options={'anon': True}"
)
_OF_GOOGLE = "set GOOGLE_APPLICATION_CREDENTIALS, or for a public bucket options={'token': 'anon'}"
_SETTINGS = {
    "NoCredentialsError": _CREDENTIALS,
    "PartialCredentialsError": _CREDENTIALS,
    "ProfileNotFound": "correct AWS_PROFILE, or unset it",
    "ParamValidationError": "correct the name of the bucket or the key",
    "InvalidURL": "correct the URL",
    "DefaultCredentialsError": _OF_GOOGLE,
    "RefreshError": _OF_GOOGLE,
}
"""Errors of libraries, by name, that another try would not change, each with the way out."""


def _make(scheme: str, options: Mapping[str, Any]) -> Any:
    try:
        import fsspec
    except ImportError as error:
        raise ImportError("reading URLs needs fsspec: pip install 'streampack[remote]'") from error
    if scheme == "s3":
        # Retries are made by `Storage`. With the five tries of s3fs and the five of botocore below each of them, the
        # time that a read may take would be many times as long.
        config = {"retries": {"max_attempts": 0}, **options.get("config_kwargs", {})}
        options = {**options, "config_kwargs": config}
    if scheme in ("http", "https"):
        # "identity" keeps proxies from compressing a range, which would change its length.
        options = {**options, "headers": {"Accept-Encoding": "identity", **options.get("headers", {})}}
    try:
        # fsspec's cache of file systems would keep this one, and its secrets, after the source is gone.
        filesystem = fsspec.filesystem(scheme, **options, skip_instance_cache=True)
    except ImportError as error:
        extra = "hf" if scheme == "hf" else "remote"
        raise ImportError(f"reading {scheme}:// needs more: pip install 'streampack[{extra}]'") from error
    except (TypeError, ValueError) as error:
        what = (
            f"the storage's options do not fit {scheme}:// ({type(error).__name__}): it may lack the account"
        )
        raise Refused(f"{what}; give them as fsspec's file system takes them") from None
    if scheme == "s3":
        filesystem.retries = 1
    return filesystem


def scheme_of(path: str) -> str | None:
    """Return the scheme of a URL; None for a local path.

    Raises:
        ValueError: for other schemes, and for fsspec's chains of URLs, which can run programs and open archives.
    """
    if "://" not in path:
        return None
    scheme = urlsplit(path).scheme
    if (scheme not in SCHEMES and not _registered(scheme)) or "::" in path:
        # The message has only the beginning: where a chain's secrets are cannot be told, so `redact` is of no use.
        raise ValueError(
            f"URLs that begin with {path.split('://')[0]!r} are refused: only plain ones of {', '.join(SCHEMES)}, and "
            "of file systems that you register by fsspec.register_implementation, are read, and no chains (::)"
        )
    return scheme


def _registered(scheme: str) -> bool:
    """Return whether a user has registered a file system of this scheme; those that fsspec knows do not count."""
    try:
        from fsspec.registry import known_implementations, registry
    except ImportError:
        return False
    return scheme in registry and scheme not in known_implementations
