"""`RemoteStorage`: files behind URLs, read with fsspec's file systems.

Over HTTP, S3 and from the Hub, files are read by range requests that are made here, so that the answers can be checked.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from streampack.storage import hub
from streampack.storage.base import File, changed, ends, redact, resized
from streampack.storage.details import Details
from streampack.storage.responses import Answer, Judged, head_of, opaque, refusal
from streampack.storage.retries import PERMANENT, Refused

SCHEMES = ("http", "https", "s3", "hf", "memory")

_INHERITED: list[Any] = []
"""File systems that a fork copied from the parent process. They are kept, because freeing them would close connections
that the parent still uses."""

Result = TypeVar("Result")
Ask = Callable[[Any, str, int, int, float], Answer]


class Listed(NamedTuple):
    """An entry of a listing. Values that are not known are None."""

    path: str  # or URL
    size: int | None = None  # bytes
    tag: str | None = None  # such as an ETag
    inode: tuple[int, int] | None = None  # (device, number) of a file on this machine
    problem: str | None = None  # why the file cannot be read
    details: Details | None = None  # what a scan found


class RemoteStorage:
    """The files of one scheme. Each process makes its own file system when it first reads.

    Args:
        scheme: one of `SCHEMES`.
        options: settings of fsspec's file system. They may hold secrets, so they are never shown.
        patience: the most seconds that one request may take.
    """

    block = 1 << 21

    def __init__(self, scheme: str, *, options: Mapping[str, Any], patience: float) -> None:
        self.scheme = scheme
        self.patience = patience
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
        """See `Storage.fetch`. An answer with a part of the range, another range or another version is an error."""
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
        if self.scheme in ("hf", "memory"):  # their ``info`` has the size and version of the content
            return self._call(path, lambda fs: _listed(path, fs.info(path)))
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
                _listed(f"{self.scheme}://{path.lstrip('/')}", info)
                for path, info in found.items()
                if info["type"] == "file"
            ]

        return self._call(pattern, find)

    def whole(self, path: str) -> bytes:
        """Read all of a small file."""
        size = self.look(path).size or 0
        return self.fetch(File(path, path, size), 0, size)

    def _ask(self, path: str, start: int, stop: int) -> Answer:
        ask = _ASK[self.scheme]
        return self._call(path, lambda fs: ask(fs, path, start, stop, self.patience))

    def _call(self, path: str, call: Callable[[Any], Result]) -> Result:
        """Call a library. Its errors hold URLs and headers, with secrets, so they are replaced by errors without."""
        shown = redact(path)
        try:
            return call(self.filesystem())
        except (ImportError, Judged) as error:
            raise (error.error if isinstance(error, Judged) else error) from None
        except TimeoutError:
            raise TimeoutError(f"{shown}: no answer within {self.patience:g} s") from None
        except PERMANENT as error:
            raise type(error)(f"{shown}: {_KIND.get(type(error), 'refused')}") from None
        except Exception as error:
            response: Any = getattr(error, "response", None)
            if hasattr(response, "status_code"):  # an error of huggingface_hub
                raise refusal(shown, response.status_code, response.headers) from None
            name = type(error).__name__
            if name in _SETTINGS:
                raise Refused(f"{shown}: {name}; {_SETTINGS[name]}") from None
            kind = Refused if isinstance(error, TypeError) else ConnectionError
            raise kind(f"{shown}: {name}") from None


_KIND = {FileNotFoundError: "there is no such file", PermissionError: "access is denied"}

_CREDENTIALS = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or for a public bucket storage_options={'anon': True}"
)
_SETTINGS = {
    "NoCredentialsError": _CREDENTIALS,
    "PartialCredentialsError": _CREDENTIALS,
    "ProfileNotFound": "correct AWS_PROFILE, or unset it",
    "ParamValidationError": "correct the name of the bucket or the key",
    "InvalidURL": "correct the URL",
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
        extra = {"s3": "s3", "hf": "hf"}.get(scheme, "remote")
        raise ImportError(f"reading {scheme}:// needs more: pip install 'streampack[{extra}]'") from error
    if scheme == "s3":
        filesystem.retries = 1
    return filesystem


async def _http(fs: Any, path: str, start: int, stop: int) -> Answer:
    """Fetch a range over HTTP.

    fsspec's own reader accepts answers with less than the range or the whole file, and reports any failure as a missing
    file.
    """
    session = await fs.set_session()
    options = {name: value for name, value in fs.kwargs.items() if name != "headers"}
    # "identity" keeps proxies from compressing the range, which would change its length.
    headers = {
        **fs.kwargs.get("headers", {}),
        "Range": f"bytes={start}-{stop - 1}",
        "Accept-Encoding": "identity",
    }
    async with session.get(fs.encode_url(path), headers=headers, **options) as response:
        head = head_of(path, response.status, response.headers)
        return head if head.start is None else head._replace(data=await response.read())


async def _s3(fs: Any, path: str, start: int, stop: int) -> Answer:
    """Fetch a range from S3. s3fs's own reader does not return the file's version with the bytes."""
    bucket, key, version = fs.split_path(path)
    extra = {"VersionId": version} if version else {}
    ranged = f"bytes={start}-{stop - 1}"
    response = await fs._call_s3("get_object", Bucket=bucket, Key=key, Range=ranged, **extra)
    headers = {"Content-Range": response.get("ContentRange", ""), "ETag": response.get("ETag", "")}
    async with response["Body"] as body:
        head = head_of(path, response["ResponseMetadata"]["HTTPStatusCode"], headers)
        return head._replace(data=await body.read())


def _read(fs: Any, path: str, start: int, stop: int, patience: float) -> Answer:
    """Read a range with fsspec's own file objects; ``cache_type`` keeps them from reading more."""
    listed = _listed(path, fs.info(path))
    with fs.open(path, "rb", cache_type="none") as stream:
        stream.seek(start)
        return Answer(stream.read(stop - start), start, listed.size or 0, listed.tag)


def _awaited(get: Callable[[Any, str, int, int], Awaitable[Answer]]) -> Ask:
    """Make a blocking function of an async one, for threads other than that of fsspec's event loop."""

    def ask(fs: Any, path: str, start: int, stop: int, patience: float) -> Answer:
        from fsspec.asyn import sync

        answer: Answer = sync(fs.loop, get, fs, path, start, stop, timeout=patience)
        return answer

    return ask


_ASK: dict[str, Ask] = {
    "http": _awaited(_http),
    "https": _awaited(_http),
    "s3": _awaited(_s3),
    "hf": hub.fetch,
    "memory": _read,
}


def _listed(path: str, info: Mapping[str, Any]) -> Listed:
    lfs = info.get("lfs") or {}
    tag = info.get("ETag") or lfs.get("sha256") or info.get("blob_id")
    return Listed(path, info.get("size"), opaque(tag))


def scheme_of(path: str) -> str | None:
    """Return the scheme of a URL; None for a local path.

    Raises:
        ValueError: for other schemes, and for fsspec's chains of URLs, which can run programs and open archives.
    """
    if "://" not in path:
        return None
    scheme = urlsplit(path).scheme
    if scheme not in SCHEMES or "::" in path:
        # The message has only the beginning: where a chain's secrets are cannot be told, so `redact` is of no use.
        raise ValueError(
            f"URLs that begin with {path.split('://')[0]!r} are refused: only plain ones of {', '.join(SCHEMES)} are "
            "read, and no chains (::)"
        )
    return scheme
