"""Servers on loopback: nginx, whose log counts the bytes it sends, and moto, an S3 server."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from stress.job import NotRun
from stress.ranks import free_port

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
