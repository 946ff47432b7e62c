"""Object stores for tests: one in memory that has ETags; S3, GCS and Azure as loopback servers, if installed."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

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
        yield _store("versioned", {}, files)
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
        return "needs moto: pip install 'streampack[stress]'"
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
        time.sleep(0.05)
    raise TimeoutError(f"nothing listens on port {port}")


# gcsfs asks, by another protocol than that of the loopback server, which kind of bucket this is.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
