"""Servers on loopback: nginx, whose log counts the bytes it sends; moto, an S3 server; and one that is slow."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from stress.job import NotRun
from tests.harness.processes import Ranks, free_port

CONFIG = """
daemon off;
{user}
worker_processes 1;
pid {folder}/pid;
error_log {folder}/error.log warn;
events {{ worker_connections 512; }}
http {{
    log_format sent '$status $body_bytes_sent "$http_range" $request_uri';
    access_log {folder}/access.log sent;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    client_max_body_size 0;
    server {{
        listen 127.0.0.1:{port};
        location / {{ {location} }}
    }}
}}
"""
START = 20.0  # seconds until a server must listen


class Response(NamedTuple):
    """One response, as a line of nginx's log has it."""

    status: int
    body: int  # bytes
    range: str  # the request's header; "-" without one
    uri: str


class Nginx:
    """nginx that serves a folder, or is a proxy for another server of this machine.

    Args:
        folder: holds its configuration and logs.
        root: folder to serve.
        proxied: port of the other server.

    Raises:
        NotRun: if there is no nginx on the PATH.
    """

    def __init__(self, folder: Path, *, root: Path | None = None, proxied: int | None = None) -> None:
        if (program := shutil.which("nginx")) is None:
            raise NotRun("nginx is not installed")
        folder.mkdir()
        self.log = folder / "access.log"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        location = (
            f"root {root};"
            if proxied is None
            # Unbuffered, so that it counts what the client read and not what the other server sent.
            else f"proxy_pass http://127.0.0.1:{proxied}; proxy_set_header Host $http_host; proxy_buffering off;"
        )
        # If root starts it, its workers run as nobody, who may not read temporary folders.
        user = f"user {getpass.getuser()};" if os.geteuid() == 0 else ""
        config = folder / "nginx.conf"
        config.write_text(CONFIG.format(user=user, folder=folder, port=self.port, location=location))
        self.process = subprocess.Popen(
            [program, "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(config)]
        )
        _wait_until_listening(self.port, self.process, "nginx")

    def __enter__(self) -> Nginx:
        return self

    def __exit__(self, *error: object) -> None:
        _terminate(self.process)

    def responses(self, *, since: int = 0) -> list[Response]:
        """Return the responses from line ``since`` of its log on."""
        found = []
        for text in self.log.read_text().splitlines()[since:]:
            head, requested, uri = text.split('"')
            status, body = head.split()
            found.append(Response(int(status), int(body), requested, uri.strip()))
        return found


class Moto:
    """moto, an S3 server: https://docs.getmoto.org.

    Raises:
        NotRun: if moto is not installed.
    """

    def __init__(self) -> None:
        if any(find_spec(module) is None for module in ("moto", "flask", "flask_cors")):
            raise NotRun("moto is not installed: pip install 'streampack[stress]'")
        self.port = free_port()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _wait_until_listening(self.port, self.process, "moto")

    def __enter__(self) -> Moto:
        return self

    def __exit__(self, *error: object) -> None:
        _terminate(self.process)


def _wait_until_listening(port: int, process: subprocess.Popen[bytes], name: str) -> None:
    deadline = time.monotonic() + START
    while time.monotonic() < deadline:
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert process.poll() is None, f"{name} ended with exit code {process.returncode}"
        time.sleep(0.05)
    _terminate(process)
    raise AssertionError(f"{name} does not listen after {START:g} s")


def _terminate(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(10)


class Asked(NamedTuple):
    """What a `SlowWeb` was asked for since `SlowWeb.begin`."""

    requests: int
    bytes: int
    rounds: int
    """The most requests of which each came only after the one before was answered: they cannot be faster together."""


class SlowWeb:
    """A web server of a folder, in a process of its own, which waits before each answer.

    Args:
        root: the folder. Files may come and go.
    """

    def __init__(self, root: Path) -> None:
        self.process = Ranks(1, join=False)
        [self.url] = self.process.run(_serve_folder, root)

    def __enter__(self) -> SlowWeb:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()

    def begin(self, delay: float) -> None:
        """Wait so many seconds before each answer from now on, and count anew."""
        self.process.run(_begin, delay)

    def asked(self) -> Asked:
        """Return the counts since `begin`."""
        [asked] = self.process.run(_count)
        found: Asked = asked
        return found


class _Folder(dict[str, bytes]):
    """The files of a folder by their path in a URL, read when they are asked for."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root

    def get(self, path: str, default: Any = None) -> Any:
        found = self.root / path.lstrip("/")
        return found.read_bytes() if found.is_file() else default


class _Pace:
    """Waits before each answer, and counts rounds of requests."""

    def __init__(self, delay: float) -> None:
        self.delay = delay
        self.answered = 0  # the latest round of which a request was answered
        self.lock = threading.Lock()

    def __call__(self, path: str) -> None:
        own = self.answered + 1
        time.sleep(self.delay)
        with self.lock:
            self.answered = max(self.answered, own)


_served: Any = None  # the `Web` of this process


def _serve_folder(root: Path) -> str:
    global _served
    from tests.harness.stores import Web

    _served = Web(_Folder(root), _Pace(0.0)).__enter__()
    url: str = _served.url
    return url


def _begin(delay: float) -> None:
    _served.requests.clear()
    _served.bytes, _served.fault = 0, _Pace(delay)


def _count() -> Asked:
    return Asked(len(_served.requests), _served.bytes, _served.fault.answered)
