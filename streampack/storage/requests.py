"""Requests for a range of a file behind a URL, by the URL's scheme. Each answer says which version it is of."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from streampack.storage import hub
from streampack.storage.responses import Answer, head_of, opaque

Ask = Callable[[Any, str, int, int, float], Answer]
"""``(file system, path, start, stop, patience)`` returns the answer for the bytes ``[start, stop)``."""


class Listed(NamedTuple):
    """An entry of a listing. Values that are not known are None."""

    path: str  # or URL
    size: int | None = None  # bytes
    tag: str | None = None  # such as an ETag
    inode: tuple[int, int] | None = None  # (device, number) of a file on this machine
    problem: str | None = None  # why the file cannot be read
    name: str = ""  # see `File`


def request_of(scheme: str) -> Ask:
    """Return the function that asks for a range of a file with this scheme."""
    return _ASK.get(scheme, _any)


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
    try:
        response = await fs._call_s3("get_object", Bucket=bucket, Key=key, Range=ranged, **extra)
    except OSError as error:
        answer = getattr(error.__cause__, "response", {}).get("ResponseMetadata", {})
        if answer.get("HTTPStatusCode") != 416:
            raise
        info = listed(path, await fs._info(path, refresh=True))  # the range lies behind the object's end
        return Answer(b"", None, info.size or 0, info.tag)
    headers = {"Content-Range": response.get("ContentRange", ""), "ETag": response.get("ETag", "")}
    async with response["Body"] as body:
        head = head_of(path, response["ResponseMetadata"]["HTTPStatusCode"], headers)
        return head._replace(data=await body.read())


def _any(fs: Any, path: str, start: int, stop: int, patience: float) -> Answer:
    """Fetch a range with a file system of fsspec, and look the file up behind it.

    These file systems do not return a file's version with its bytes. If it is the listed version after the bytes have
    come, they are of that version, too, as none comes back that was replaced.
    """

    def look() -> Listed:
        fs.invalidate_cache()  # it would answer from an earlier listing
        return listed(
            path, _waited(fs._info, path, fs=fs, patience=patience) if fs.async_impl else fs.info(path)
        )

    try:
        data: bytes = (
            _waited(fs._cat_file, path, start, stop, fs=fs, patience=patience)
            if fs.async_impl
            else fs.cat_file(path, start, stop)
        )
    except (FileNotFoundError, TimeoutError):
        raise
    except Exception:
        found = look()
        if (found.size or 0) >= stop:
            raise
        data = b""  # the range lies behind the end of a file that was longer when it was listed
    else:
        found = look()
    return Answer(data, start, found.size or 0, found.tag)


def store(fs: Any, local: str, path: str, *, patience: float) -> None:
    """Store a file of this machine with a file system of fsspec, at most ``patience`` seconds long."""
    if fs.async_impl:
        _waited(fs._put_file, local, path, fs=fs, patience=patience)
    else:
        fs.put_file(local, path)


def _waited(call: Callable[..., Awaitable[Any]], *args: Any, fs: Any, patience: float) -> Any:
    """Run an async method of a file system on its event loop, and wait for the result."""
    from fsspec.asyn import sync

    return sync(fs.loop, call, *args, timeout=patience)


def _awaited(get: Callable[[Any, str, int, int], Awaitable[Answer]]) -> Ask:
    """Make a blocking function of an async one, for threads other than that of fsspec's event loop."""

    def ask(fs: Any, path: str, start: int, stop: int, patience: float) -> Answer:
        answer: Answer = _waited(get, fs, path, start, stop, fs=fs, patience=patience)
        return answer

    return ask


_ASK: dict[str, Ask] = {
    "http": _awaited(_http),
    "https": _awaited(_http),
    "s3": _awaited(_s3),
    "hf": hub.fetch,
}
