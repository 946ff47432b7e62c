"""Storage that fails on purpose, on loopback or in memory: a web server, object stores, and the Hub's API."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from random import Random
from time import sleep  # not to be found by tests that let waits pass at once
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem


def short_waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let all waits of retries pass at once; return a list to which their lengths will be added."""
    waits: list[float] = []
    monkeypatch.setattr("streampack.storage.retries.sleep", waits.append)
    monkeypatch.setattr("streampack.storage.retries.monotonic", lambda: time.monotonic() + sum(waits))
    return waits


# A web server.

FAULTS = ("503", "429", "reset", "stall", "short", "truncated")
STALL = 1.5  # seconds; clients are made to give up before


@lru_cache(256)  # without it, hashing took longer than sending an answer of 2 MiB
def tag_of(content: bytes) -> str:
    """Return the ETag: the MD5 of the content, as of S3 files that were uploaded in one piece."""
    return hashlib.md5(content).hexdigest()


class Reply(NamedTuple):
    """An answer other than a file."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = {}  # noqa: RUF012 - never changed


Route = Callable[[str, dict[str, list[str]], dict[str, str]], Reply | str]
"""(path, query, headers) -> an answer, or the path of the file to send."""


class Web:
    """Serves files by path. ``fault(path)`` returns one of `FAULTS`, an HTTP status, or None for each answer.

    ``bytes`` counts the bytes of all bodies sent, faulty ones too.
    """

    def __init__(
        self, files: dict[str, bytes], fault: Callable[[str], str | None] = lambda path: None
    ) -> None:
        self.files = files
        self.fault = fault
        self.bytes = 0
        self.requests: list[tuple[str, str]] = []  # (path with query, Range)
        self.headers: list[dict[str, str]] = []
        self.faults: list[str] = []
        self.lock = threading.Lock()
        self.ranges = True  # whether ranges are served
        self.bend: dict[str, Callable[[str], str]] = {}  # changes of headers, by their names
        self.route: Route = lambda path, query, headers: path

    def __enter__(self) -> Web:
        handler = type("Handler", (_Handler,), {"web": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def random_faults(
    seed: int, share: float = 0.05, kinds: tuple[str, ...] = FAULTS
) -> Callable[[str], str | None]:
    """Return a ``fault`` function: each kind at random, with the same share of the answers."""
    rng, lock = Random(seed), threading.Lock()

    def fault(path: str) -> str | None:
        with lock:
            draw = rng.random()
        return kinds[int(draw / share)] if draw < share * len(kinds) else None

    return fault


class _Handler(BaseHTTPRequestHandler):
    web: Web
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one write for header and body: without it, loopback answers wait for delayed ACKs

    def log_message(self, *args: object) -> None:
        pass

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:
            self.close_connection = True

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        web, url = self.web, urlsplit(self.path)
        path = unquote(url.path)
        with web.lock:
            web.requests.append((self.path, self.headers.get("Range", "")))
            web.headers.append(dict(self.headers))
        if "list-type" in parse_qs(url.query):
            return self._list(path, parse_qs(url.query))
        fault = web.fault(path)
        if fault:
            with web.lock:
                web.faults.append(fault)
        if fault == "stall":
            sleep(STALL)
        if fault in ("stall", "reset"):
            self.close_connection = True
            self.connection.close()
            return None
        if fault is not None and fault.isdecimal():
            after = {"Retry-After": "0"} if fault == "429" else {}
            return self._send(int(fault), b"no", after)
        found = web.route(path, parse_qs(url.query), {k.lower(): v for k, v in self.headers.items()})
        if isinstance(found, Reply):
            return self._send(found.status, found.body, found.headers)
        content = web.files.get(found)
        if content is None:
            return self._send(404, b"no")
        tag = {"ETag": f'"{tag_of(content)}"', "Accept-Ranges": "bytes"}
        ranged = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if ranged is None or not web.ranges:
            return self._send(200, content, tag)
        start, stop = int(ranged[1]), min(int(ranged[2] or len(content)) + 1, len(content))
        if start >= len(content):
            return self._send(416, b"", {**tag, "Content-Range": f"bytes */{len(content)}"})
        data = content[start:stop]
        headers = {**tag, "Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}
        if fault == "short":  # complete by its headers, less than was asked for
            data = data[: len(data) // 2]
        promised = len(data)
        if fault == "truncated":  # less than by its headers
            data, self.close_connection = data[: len(data) // 2], True
        return self._send(206, data, headers, promised=promised)

    def _list(self, bucket: str, query: dict[str, list[str]]) -> None:
        bucket = bucket.strip("/")
        prefix = query.get("prefix", [""])[0]
        entries = "".join(
            f"<Contents><Key>{escape(path[len(bucket) + 2 :])}</Key><Size>{len(content)}</Size>"
            f'<ETag>"{tag_of(content)}"</ETag><StorageClass>STANDARD</StorageClass></Contents>'
            for path, content in sorted(self.web.files.items())
            if path.startswith(f"/{bucket}/{prefix}")
        )
        body = f"<ListBucketResult><Name>{bucket}</Name><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"
        self._send(200, f"<?xml version='1.0'?>{body}".encode(), {"Content-Type": "application/xml"})

    def _send(
        self, status: int, data: bytes, headers: dict[str, str] | None = None, promised: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, self.web.bend.get(name, str)(value))
        length = str(len(data) if promised is None else promised)
        self.send_header("Content-Length", self.web.bend.get("Content-Length", str)(length))
        self.end_headers()
        if self.command != "HEAD":
            with self.web.lock:  # before the client has the body
                self.web.bytes += len(data)
            self.wfile.write(data)
        self.wfile.flush()


# Object stores.

AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The key of Azurite's only account, which is published with it."""


class Versioned(MemoryFileSystem):
    """fsspec's memory file system with ETags, and with faults: ``fault(path)`` may raise, or return another range."""

    protocol = "versioned"
    store: dict[str, Any] = {}  # noqa: RUF012 - fsspec's memory file system keeps its files in the class
    pseudo_dirs = [""]  # noqa: RUF012
    fault: Callable[[str, int, int], bytes | None] = staticmethod(lambda path, start, stop: None)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        found: str = super()._strip_protocol(path.removeprefix("versioned://"))
        return found

    def info(self, path: str, **settings: Any) -> dict[str, Any]:
        return self._tagged(super().info(path, **settings))

    def find(self, path: str, *args: Any, detail: bool = False, **settings: Any) -> Any:
        found = super().find(path, *args, detail=True, **settings)
        return {name: self._tagged(entry) for name, entry in found.items()} if detail else list(found)

    def _tagged(self, entry: dict[str, Any]) -> dict[str, Any]:
        if entry["type"] == "file":
            content = self.store[entry["name"]].getvalue()
            entry["etag"] = f'"{hashlib.md5(content).hexdigest()}"'
        return entry

    def cat_file(self, path: str, start: Any = None, end: Any = None, **settings: Any) -> Any:
        other = type(self).fault(path, start, end)
        return super().cat_file(path, start, end, **settings) if other is None else other


class Store(NamedTuple):
    """A bucket of a running store, to which files can be written."""

    url: str
    options: dict[str, Any]
    put: Callable[[str, bytes], None]
    remove: Callable[[str], None]


@contextmanager
def running(kind: str, folder: Path) -> Iterator[Store]:
    """Run a store; "versioned" is one in memory, "s3" is moto, "gs" is fake-gcs-server, "az" Azurite."""
    if kind == "versioned":
        fsspec.register_implementation("versioned", Versioned, clobber=True)
        Versioned.store.clear()
        files = Versioned(skip_instance_cache=True)
        try:
            yield _store("versioned", {}, files)
        finally:
            Versioned.fault = staticmethod(lambda path, start, stop: None)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    if kind == "s3":
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        options: dict[str, Any] = {"key": "k", "secret": "s", "endpoint_url": address}
    elif kind == "gs":
        command = ["fake-gcs-server", "-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory",
                   "-public-host", f"127.0.0.1:{port}"]  # fmt: skip
        options = {"token": "anon", "endpoint_url": address}
    else:
        command = [
            "azurite-blob",
            "--silent",
            "--skipApiVersionCheck",
            "--blobPort",
            str(port),
            "-l",
            str(folder),
        ]
        account = (
            f"AccountName=devstoreaccount1;AccountKey={AZURITE_KEY};BlobEndpoint={address}/devstoreaccount1;"
        )
        options = {"connection_string": f"DefaultEndpointsProtocol=http;{account}"}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            _wait_for(port)
            files = fsspec.filesystem(kind, **options, skip_instance_cache=True)
            files.mkdir("bucket")
            yield _store(kind, options, files)
        finally:
            server.kill()


def lacking(kind: str) -> str | None:
    """Return what must be installed to run a store; None if nothing is missing."""
    if kind == "s3" and any(find_spec(name) is None for name in ("s3fs", "moto", "flask", "flask_cors")):
        return "needs moto: pip install --group stress"
    if kind == "gs" and (find_spec("gcsfs") is None or shutil.which("fake-gcs-server") is None):
        return "needs the package gcsfs and the program fake-gcs-server"
    if kind == "az" and (find_spec("adlfs") is None or shutil.which("azurite-blob") is None):
        return "needs the package adlfs and the program azurite-blob"
    return None


def _store(scheme: str, options: dict[str, Any], files: Any) -> Store:
    def remove(name: str) -> None:
        files.rm_file(f"bucket/{name}" if scheme != "versioned" else f"/bucket/{name}")

    return Store(
        f"{scheme}://bucket", options, lambda name, data: files.pipe_file(f"bucket/{name}", data), remove
    )


def _wait_for(port: int) -> None:
    for _ in range(300):
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        sleep(0.05)
    raise TimeoutError(f"nothing listens on port {port}")


# gcsfs asks, by another protocol than that of the loopback server, which kind of bucket this is.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")


# The Hub.

LARGE = ".parquet"  # stored by LFS: redirected to another host, by a signed URL


class Hub:
    """Commits and branches. ``web`` serves the Hub's API, ``store`` large files.

    https://huggingface.co/docs/hub/api
    """

    def __init__(self, repo: str = "org/name", *, token: str | None = None) -> None:
        self.repo = repo
        self.token = token  # without it, there is no such repository
        self.commits: dict[str, dict[str, bytes]] = {}
        self.branches: dict[str, str] = {}
        self.web, self.store = Web({}), Web({})
        self.web.route = self._route
        self.stack = ExitStack()

    def __enter__(self) -> Hub:
        self.stack.enter_context(self.web)
        self.stack.enter_context(self.store)
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    @property
    def options(self) -> dict[str, str | None]:
        """Options for `HfFileSystem`."""
        return {"endpoint": self.web.url, "token": self.token}

    @property
    def bytes(self) -> int:
        """Bytes of bodies that both hosts sent."""
        return self.web.bytes + self.store.bytes

    def commit(self, files: dict[str, bytes], *, branch: str = "main") -> str:
        """Commit files by path to a branch. Returns the commit."""
        commit = hashlib.sha1(f"{len(self.commits)} {sorted(files)}".encode()).hexdigest()
        self.commits[commit] = dict(files)
        self.branches[branch] = commit
        for content in files.values():
            self.web.files[f"/{oid(content)}"] = self.store.files[f"/{oid(content)}"] = content
        return commit

    def _route(self, path: str, query: dict[str, list[str]], headers: dict[str, str]) -> Reply | str:
        found = re.fullmatch(r"(/api)?/datasets/([^/]+/[^/]+)(?:/(revision|tree|resolve)/(.+))?", path)
        if self.token and headers.get("authorization") != f"Bearer {self.token}":
            return Reply(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        if found is None or found[2] != self.repo:
            return Reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        rest = found[4] or "main"
        known = sorted({*self.branches, *self.commits}, key=len, reverse=True)
        revision = next((name for name in known if rest == name or rest.startswith(f"{name}/")), None)
        if revision is None:
            return Reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        commit = self.branches.get(revision, revision)
        files, name = self.commits[commit], rest[len(revision) + 1 :]
        if found[3] == "resolve":
            return self._resolve(commit, name, files.get(name))
        if found[3] == "tree":
            recursive = query.get("recursive", ["false"])[0].lower() == "true"
            return Reply(200, json.dumps(tree(files, name, recursive=recursive)).encode())
        return Reply(200, json.dumps({"id": self.repo, "sha": commit}).encode())

    def _resolve(self, commit: str, name: str, content: bytes | None) -> Reply | str:
        if content is None:
            return Reply(404, b"", {"X-Error-Code": "EntryNotFound"})
        if not name.endswith(LARGE):
            return f"/{oid(content)}"
        place = f"{self.store.url}/{oid(content)}?Signature=canary-signature"
        return Reply(302, b"", {"Location": place, "X-Repo-Commit": commit, "X-Linked-ETag": oid(content)})


def oid(content: bytes) -> str:
    """Return the id of a content."""
    return hashlib.sha256(content).hexdigest()


def tree(files: dict[str, bytes], folder: str, *, recursive: bool) -> list[dict[str, object]]:
    """Return the entries below a folder."""
    prefix = f"{folder}/" if folder else ""
    found: dict[str, dict[str, object]] = {}
    for path, content in sorted(files.items()):
        if not path.startswith(prefix):
            continue
        steps = path[len(prefix) :].split("/")
        for depth in range(1, len(steps)):
            if recursive or depth == 1:
                name = prefix + "/".join(steps[:depth])
                found[name] = {"type": "directory", "oid": "0" * 40, "size": 0, "path": name}
        if recursive or len(steps) == 1:
            entry: dict[str, object] = {"type": "file", "oid": oid(content)[:40], "path": path}
            if path.endswith(LARGE):
                entry["lfs"] = {"oid": oid(content), "size": len(content), "pointerSize": 130}
            found[path] = {**entry, "size": len(content)}
    return list(found.values())
