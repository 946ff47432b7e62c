"""Servers on loopback: nginx, whose log counts the bytes it sends; moto, an S3 server; and how to make one slow."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from stress.job import NotRun
from tests.harness.processes import free_port

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


@contextmanager
def listening(command: list[str], port: int) -> Iterator[None]:
    """Run a server, from when it listens on the port."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START
        while True:
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, f"{command} ended with exit code {process.returncode}"
            assert time.monotonic() < deadline, f"{command} does not listen after {START:g} s"
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait(10)


class Traffic(NamedTuple):
    """Requests and bytes of a run."""

    requests: int
    bytes: int


class Nginx(NamedTuple):
    """A running nginx."""

    url: str
    log: Path

    def lines(self) -> list[str]:
        """Return a line for each response."""
        time.sleep(0.2)  # it writes its log after the client has the answer
        return self.log.read_text().splitlines()

    def traffic(self, since: int) -> Traffic:
        """Count what was sent from line ``since`` of the log on, and check that all else were look-ups (HEAD)."""
        sent = [line for line in self.lines()[since:] if not line.startswith("200 0 ")]
        whole = [line for line in sent if not line.startswith("206 ") or '"bytes=' not in line]
        assert not whole, f"not a range: {whole[0]}"
        return Traffic(len(sent), sum(int(line.split()[1]) for line in sent))


@contextmanager
def nginx_server(folder: Path, *, root: Path | None = None, proxied: int | None = None) -> Iterator[Nginx]:
    """Run nginx, which serves a folder, or is a proxy for the server on another port of this machine.

    Its configuration and logs are in ``folder``.

    Raises:
        NotRun: if there is no nginx on the PATH.
    """
    if (program := shutil.which("nginx")) is None:
        raise NotRun("nginx is not installed")
    folder.mkdir()
    port = free_port()
    location = (
        f"root {root};"
        if proxied is None
        # Unbuffered, so that it counts what the client read and not what the other server sent.
        else f"proxy_pass http://127.0.0.1:{proxied}; proxy_set_header Host $http_host; proxy_buffering off;"
    )
    # If root starts it, its workers run as nobody, who may not read temporary folders.
    user = f"user {getpass.getuser()};" if os.geteuid() == 0 else ""
    config = folder / "nginx.conf"
    config.write_text(CONFIG.format(user=user, folder=folder, port=port, location=location))
    command = [program, "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(config)]
    with listening(command, port):
        yield Nginx(f"http://127.0.0.1:{port}", folder / "access.log")


@contextmanager
def moto_server() -> Iterator[int]:
    """Run moto, an S3 server (https://docs.getmoto.org), and give its port.

    Raises:
        NotRun: if moto is not installed.
    """
    if any(find_spec(module) is None for module in ("moto", "flask", "flask_cors")):
        raise NotRun("moto is not installed: pip install --group stress")
    port = free_port()
    with listening([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port):
        yield port


class Pace:
    """A ``fault`` of `Web` that waits before each answer, and counts rounds of requests."""

    def __init__(self, delay: float) -> None:
        self.delay = delay
        self.answered = 0  # the latest round with an answered request
        self.lock = threading.Lock()

    def __call__(self, path: str) -> None:  # noqa: D102 - the class says it
        own = self.answered + 1
        time.sleep(self.delay)
        with self.lock:
            self.answered = max(self.answered, own)
