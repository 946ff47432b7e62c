"""`RemoteStorage`: files behind URLs, read with fsspec's file systems by the requests of `requests`."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from streampack.storage import hub
from streampack.storage.base import STORES, File, changed, ends, redact, resized
from streampack.storage.requests import Listed, listed, request_of, store
from streampack.storage.responses import Answer, Judged, refusal
from streampack.storage.retries import PERMANENT, Refused
from streampack.validation import require_duration

SERVED = ("http", "https", "s3", "hf")
"""Schemes whose answers say themselves which version they are of. Of the others, files are looked up again."""
SCHEMES = (*SERVED, *STORES)
"""The schemes that are read, besides those that a user has registered with fsspec. fsspec knows others, but some of
them run programs, open archives or read files of this machine."""

EXTRAS = {"s3": "s3", "hf": "hf", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az"}
"""The extra of this package that brings the file system of a scheme."""

SLOWEST = 1 << 20
"""Bytes per second: a file that is stored at a lower rate is given up, and tried again."""

_INHERITED: list[Any] = []
"""File systems that a fork copied from the parent process. They are kept, because freeing them would close connections
that the parent still uses."""

Result = TypeVar("Result")


class RemoteStorage:
    """The files of one scheme. Each process makes its own file system when it first reads.

    Args:
        scheme: one of `SCHEMES`, or one that was registered with fsspec.
        options: settings of fsspec's file system. They may hold secrets, so they are never shown.
        patience: the most seconds that one request may take.
    """

    block = 1 << 21

    def __init__(self, scheme: str, *, options: Mapping[str, Any], patience: float) -> None:
        self.scheme = scheme
        self.patience = require_duration(patience, "timeout", "seconds")
        self._options = dict(options)
        self._filesystem: tuple[int, Any] | None = None  # (process id, file system)
        # For files that were listed without an ETag: the one that came with their first answer, by path.
        self._seen: dict[str, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_filesystem": None}

    def filesystem(self) -> Any:
        """Return the file system of this process. One that a fork copied cannot be used, as its threads are gone."""
        if self._filesystem is None or self._filesystem[0] != os.getpid():
            if self._filesystem is not None:
                _INHERITED.append(self._filesystem[1])
            self._filesystem = (os.getpid(), _make(self.scheme, self._options))
        return self._filesystem[1]

    def fetch(self, file: File, start: int, stop: int) -> bytes:
        """See `FileStorage.fetch`. An answer with a part of the range, another range or another version is an error."""
        if start == stop:
            return b""  # no request can name such a range
        answer = self._ask(file.path, start, stop)
        if answer.size != file.size:
            raise resized(file, answer.size)
        if answer.tag is not None:
            tag = file.tag or self._seen.setdefault(file.path, answer.tag)
            if answer.tag != tag:
                raise ValueError(changed(file, f"is version {answer.tag} and was {tag}"))
        if answer.start != start or len(answer.data) != stop - start:
            raise ConnectionError(
                f"{file.shown}: {len(answer.data)} bytes of {stop - start} at byte {start} came"
            )
        return answer.data

    def tag(self, file: File) -> str:
        """Return the ETag of the listing or the server; without one, a digest of the first and last 64 KiB."""
        return file.tag or self._ask(file.path, 0, 1).tag or ends(self.fetch, file)

    def pinned(self, paths: Sequence[str]) -> list[str]:
        """Return paths of the Hub at their commits; other paths unchanged."""
        if self.scheme != "hf":
            return list(paths)
        return self._call(paths[0], lambda fs: hub.pinned(fs, paths, timeout=self.patience))

    def look(self, path: str) -> Listed:
        """Return the size and tag of a file, by a request for one byte.

        A HEAD request would not do: it is refused if a URL is signed for GET, and does not show whether the server
        serves ranges.
        """
        if self.scheme == "hf" or self.scheme not in SERVED:
            return self._call(path, lambda fs: listed(path, fs.info(path)))
        answer = self._ask(path, 0, 1)
        return Listed(path, answer.size, answer.tag)

    def find(self, pattern: str) -> list[Listed]:
        """Return the files that a glob matches, by one listing.

        Raises:
            ValueError: for HTTP, which cannot list files.
        """
        if self.scheme in ("http", "https"):
            raise ValueError(
                f"{redact(pattern)!r} is a glob, and a web server does not list files; name each file, or a manifest"
            )

        def find(fs: Any) -> list[Listed]:
            found = fs.glob(pattern, detail=True)
            return [
                listed(f"{self.scheme}://{path.lstrip('/')}", info)
                for path, info in found.items()
                if info["type"] == "file"
            ]

        return self._call(pattern, find)

    def whole(self, path: str) -> bytes:
        """Read all of a small file."""
        size = self.look(path).size or 0
        return self.fetch(File(path, path, size), 0, size)

    def head(self, path: str, count: int) -> tuple[bytes, int]:
        """Return the first bytes of a file, ``count`` unless it is shorter, and its size."""
        answer = self._ask(path, 0, count)
        if len(answer.data) != min(count, answer.size):
            raise ConnectionError(f"{redact(path)}: {len(answer.data)} bytes of {answer.size} came")
        return answer.data, answer.size

    def store(self, local: Path, path: str) -> None:
        """Store a file of this machine, whole or not at all; a file that is there is replaced.

        Raises:
            OSError: if that failed, or the stored file has another size.
        """
        size = local.stat().st_size
        patience = self.patience + size / SLOWEST
        self._call(path, lambda fs: store(fs, str(local), path, patience=patience), storing=True)
        if (found := self.look(path).size) != size:
            raise ConnectionError(f"{redact(path)}: {size} bytes were stored, and it has {found}")

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the paths and sizes of all files below a folder, as they are now."""

        def find(fs: Any) -> dict[str, int]:
            fs.invalidate_cache()  # it would answer from an earlier listing
            return {path: int(info["size"] or 0) for path, info in fs.find(folder, detail=True).items()}

        return self._call(folder, find)

    def _ask(self, path: str, start: int, stop: int) -> Answer:
        ask = request_of(self.scheme)
        return self._call(path, lambda fs: ask(fs, path, start, stop, self.patience))

    def _call(self, path: str, call: Callable[[Any], Result], *, storing: bool = False) -> Result:
        """Call a library. Its errors hold URLs and headers, with secrets, so they are replaced by errors without."""
        shown = redact(path)
        try:
            return call(self.filesystem())
        except (ImportError, Judged) as error:
            raise (error.error if isinstance(error, Judged) else error) from None
        except TimeoutError:
            raise TimeoutError(f"{shown}: no answer within {self.patience:g} s") from None
        except FileNotFoundError:
            what = "there is no such bucket, or container; make it" if storing else "there is no such file"
            raise FileNotFoundError(f"{shown}: {what}") from None
        except PERMANENT as error:
            what = "access is denied" if isinstance(error, PermissionError) else "refused"
            raise type(error)(f"{shown}: {what}") from None
        except Exception as error:
            response: Any = getattr(error, "response", None)
            if hasattr(response, "status_code"):  # an error of huggingface_hub, or of Azure
                raise refusal(shown, response.status_code, response.headers) from None
            name = type(error).__name__
            if name == "HttpError" and str(code := getattr(error, "code", "")).isdecimal():  # of gcsfs
                raise refusal(shown, int(code), {}) from None
            if type(error) is OSError and str(error).startswith("Forbidden"):  # of gcsfs, too
                raise PermissionError(f"{shown}: access is denied") from None
            if name in _SETTINGS:
                raise Refused(f"{shown}: {name}; {_SETTINGS[name]}") from None
            # A library raises errors of its own for lost connections, or these of Python.
            own = type(error).__module__ != "builtins"
            if own or isinstance(error, OSError | EOFError) or type(error) in (RuntimeError, Exception):
                raise ConnectionError(f"{shown}: {name}") from None
            # Such as an AttributeError: a mistake in a library or in its settings, and no connection that was lost.
            refused = Refused(f"{shown}: {name}; another try would not change it")
            frames = [
                f"{each.filename}:{each.lineno} in {each.name}"
                for each in traceback.extract_tb(error.__traceback__)
            ]
            refused.add_note(
                "\n".join([f"{name} was raised at (without its text, which may hold secrets):", *frames])
            )
            raise refused from None


_CREDENTIALS = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or for a public bucket storage_options={'anon': True}"
)
_OF_GOOGLE = "set GOOGLE_APPLICATION_CREDENTIALS, or for a public bucket storage_options={'token': 'anon'}"
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
        # Retries are made by `Retries`. With the five tries of s3fs and the five of botocore below each of them, the
        # time that a read may take would be many times the budget.
        config = {"retries": {"max_attempts": 0}, **options.get("config_kwargs", {})}
        options = {**options, "config_kwargs": config}
    try:
        # fsspec's cache of file systems would keep this one, and its secrets, after the source is gone.
        filesystem = fsspec.filesystem(scheme, **options, skip_instance_cache=True)
    except ImportError as error:
        # What fsspec says of other schemes names the package: "Install adlfs to access ...".
        extra = f"pip install 'streampack[{EXTRAS[scheme]}]'" if scheme in EXTRAS else str(error)
        raise ImportError(f"reading {scheme}:// needs more: {extra}") from error
    except (TypeError, ValueError) as error:
        what = f"storage_options do not fit {scheme}:// ({type(error).__name__}): it may lack the account"
        raise Judged(Refused(f"{what}; give them as fsspec's file system takes them")) from None
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
