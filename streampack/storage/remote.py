"""`RemoteStorage`: files behind URLs, read by the public calls of fsspec's file systems."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from typing_extensions import override

from streampack.storage.base import FOLDER, STORES, File, FileStorage, changed, redact, resized
from streampack.storage.error_texts import PastTheEnd, replaced
from streampack.storage.hub import http_options, pinned, web_address
from streampack.storage.redirects import Check, elsewhere, guarded
from streampack.storage.retries import Refused, Storage

SCHEMES = ("http", "https", "s3", "hf", *STORES)
"""Schemes that are read, besides those that a user has registered with fsspec. Some of fsspec's own run programs, open
archives or read files of this machine."""

SLOWEST = 1 << 20
"""Bytes per second: storing a file at a lower rate is ended, and tried again."""

Result = TypeVar("Result")


class RemoteStorage(FileStorage):
    """The files of one scheme. Each process makes its own file systems when it first reads.

    Args:
        scheme: of their URLs.
        storage: how they are read.
        redirect: raises `Refused` for a URL to which a web server may not redirect. By default it may to any, but
            another origin is told nothing of the storage's options that could be a secret.
    """

    block = 1 << 21

    def __init__(self, scheme: str, storage: Storage, redirect: Check | None = None) -> None:
        super().__init__(storage)
        self.scheme = scheme
        self.redirect = redirect

    @property
    @override
    def patience(self) -> float:
        return super().patience + self.storage.timeout

    @override
    def read(self, file: File, start: int, stop: int) -> bytes:
        try:
            data: bytes = self._call("cat_file", file.path, start=start, end=stop)
        except PastTheEnd:
            return b""
        if len(data) == file.size > stop - start:
            what = "the server sends whole files only; serve them with range requests"
            raise Refused(f"{file.shown}: {what}, or copy the file to this machine")
        return data

    @override
    def check(self, file: File) -> None:
        if self.scheme == "hf":  # a commit does not change
            return
        found = self._look(file.path)
        if found.size != file.size:
            raise resized(file, found.size)
        if file.tag is not None and found.tag not in (file.tag, None):
            raise ValueError(changed(file, f"is version {found.tag} and was {file.tag}"))

    @override
    def look(self, path: str) -> File:
        return self.storage.retry(lambda: self._look(path), f"looking at {redact(path)}")

    def _look(self, path: str) -> File:
        """Look once; raise `Refused` if the server does not tell the size, which shows changes of a file."""
        if self.scheme != "hf":
            self._filesystem(self.scheme).invalidate_cache()  # it would answer from an earlier listing
        return self._listed(path, self._call("info", path))

    def _listed(self, path: str, info: Mapping[str, Any]) -> File:
        if info.get("type") == "directory":
            raise FileNotFoundError(f"{redact(path)}: {FOLDER}")
        if info.get("size") is None:
            what = "the server does not tell the file's size; copy it to this machine"
            raise Refused(f"{redact(path)}: {what}")
        return File(path, size=info["size"], tag=tag_of(info))

    def find(self, pattern: str, *, folder: bool = False) -> list[File]:
        """Return the files that a glob matches, or all at any depth of a folder, by one listing. HTTP has none."""
        if self.scheme in ("http", "https"):
            raise ValueError(
                f"{redact(pattern)!r} is a glob, and a web server does not list files; name each file, or a manifest"
            )
        call = "find" if folder else "glob"
        found = self.storage.retry(
            lambda: self._call(call, pattern, detail=True), f"listing {redact(pattern)}"
        )
        return [
            self._listed(f"{self.scheme}://{path.lstrip('/')}", info)
            for path, info in found.items()
            if info["type"] == "file"
        ]

    @override
    def pinned(self, paths: Sequence[str]) -> list[str]:
        if self.scheme != "hf":
            return list(paths)
        safely = lambda path, call: self.storage.retry(  # noqa: E731 - typed where it is taken
            lambda: self._safely(path, call), f"looking at {redact(path)}"
        )
        return pinned(self._filesystem("hf"), paths, timeout=self.storage.timeout, safely=safely)

    def store(self, local: Path, path: str) -> None:
        """Store a file of this machine in place of what is there, completely or not at all."""
        size = local.stat().st_size

        def store() -> None:
            try:
                self._call("put_file", path, str(local), timeout=self.storage.timeout + size / SLOWEST)
            except FileNotFoundError:
                raise FileNotFoundError(
                    f"{redact(path)}: there is no such bucket, or container; make it"
                ) from None
            if (there := self._look(path).size) != size:
                raise ConnectionError(f"{redact(path)}: {there} bytes are stored of {size}")

        self.storage.retry(store, f"storing {redact(path)}")

    def _call(self, name: str, path: str, *before: str, timeout: float = 0, **settings: Any) -> Any:
        """Call a method of the file system with the arguments ``before`` and a path.

        Ranges of the Hub's files are read as those of a web server: its own file system looks files up, prefetches, and
        retries.
        """
        scheme, url = self.scheme, path
        if (scheme, name) == ("hf", "cat_file"):
            scheme, url = "https", web_address(self._filesystem("hf"), path)
        fs = self._filesystem(scheme)
        if fs.async_impl:
            settings["timeout"] = timeout or self.storage.timeout

        def call() -> Any:
            try:
                return getattr(fs, name)(*before, url, **settings)
            except Exception as error:
                if (found := elsewhere(error)) is None:
                    raise
            return getattr(self._filesystem(scheme, elsewhere=True), name)(*before, found.url, **settings)

        return self._safely(path, call)

    def _safely(self, path: str, call: Callable[[], Result]) -> Result:
        """Call a library. Its errors hold URLs and headers, with secrets, so they are replaced by errors without."""
        try:
            return call()
        except ImportError:
            raise
        except Exception as error:
            ours = replaced(error, redact(path), self.storage.timeout)
            # What is no error of the network is a mistake in a library or in its settings: where it was raised helps.
            raise ours.with_traceback(error.__traceback__ if isinstance(ours, Refused) else None) from None

    def _filesystem(self, scheme: str, *, elsewhere: bool = False) -> Any:
        """Return a file system of this process; ``elsewhere``, that of the origins to which servers redirect."""
        made, key = self.own()[2], f"{scheme} elsewhere" if elsewhere else scheme
        if key not in made:
            options = self.storage.options
            if scheme != self.scheme:
                options = http_options(self._filesystem("hf"))
            if scheme in ("http", "https"):
                options = guarded(options, self.redirect, elsewhere=elsewhere)
            made[key] = _make(scheme, options)
        return made[key]


def tag_of(info: Mapping[str, Any]) -> str | None:
    """Return the tag of what a file system says of a file. Of several, a digest of the content is taken.

    >>> tag_of({"size": 3, "etag": "CKih16GjycICEAE=", "md5Hash": "kAFQmDzST7DWlj99KOF/cg=="})
    'kAFQmDzST7DWlj99KOF/cg=='
    """
    md5 = (info.get("content_settings") or {}).get("content_md5")  # of Azure
    tags = (
        info.get("ETag"),
        (info.get("lfs") or {}).get("sha256"),
        *(info.get(name) for name in ("blob_id", "md5Hash", "crc32c")),
        bytes(md5).hex() if md5 else None,
        info.get("etag"),
    )
    return opaque(next((tag for tag in tags if tag), None))


def opaque(tag: str | None) -> str | None:
    """Return an ETag without quotes and without ``W/``, the mark of a weak tag.

    A proxy that compresses files for other clients may mark tags as weak even if it passes a file on unchanged. So tags
    are compared as RFC 9110, 8.8.3.2 describes the weak comparison: ``W/"1"`` and ``"1"`` are the same.

    >>> opaque('W/"1"'), opaque('"1"')
    ('1', '1')
    """
    return tag.removeprefix("W/").strip('"') if tag else None


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
