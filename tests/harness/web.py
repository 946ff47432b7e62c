"""A loopback web server with ranges, counters and faults; and the part of S3's API that reading needs."""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

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
            time.sleep(STALL)
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
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data) if promised is None else promised))
        self.end_headers()
        if self.command != "HEAD":
            with self.web.lock:  # before the client has the body
                self.web.bytes += len(data)
            self.wfile.write(data)
        self.wfile.flush()
