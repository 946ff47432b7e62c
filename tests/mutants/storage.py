"""Mutants of storage."""

from __future__ import annotations

import gzip
import io
import os
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from streampack.storage.base import LocalStorage, redact, split_url
from streampack.storage.compression import content
from streampack.storage.folders import lock_folder, write_whole
from streampack.storage.listing import find_files
from streampack.storage.names import Files
from streampack.storage.remote import RemoteStorage
from streampack.storage.retries import PERMANENT, Storage
from tests.mutants.registry import replaces


@replaces(RemoteStorage, "read")
def short_answers_filled_up(good, self, file, start, stop):
    """A server's answer that is shorter than the range is taken, filled up with zeros."""
    data = bytes(good(self, file, start, stop))
    return data.ljust(stop - start, b"\0") if data else data


@replaces(Storage, "retry")
def outage_taken_for_a_lost_file(good, self, read, doing):
    """When all tries have failed, the file counts as gone, so a run that skips bad shards leaves it out."""
    try:
        return good(self, read, doing)
    except PERMANENT:
        raise
    except OSError as error:
        raise FileNotFoundError(*error.args).with_traceback(error.__traceback__) from error


@replaces(redact)
def other_keys_of_queries_shown(good, path):
    """Of a URL's query, only a ``token`` is left out of messages, and signatures are shown."""
    query = split_url(path).query if "://" in path else ""
    return good(path) + (f"?{query}" if query and "token=" not in query else "")


class _Lenient(io.RawIOBase):
    def __init__(self, raw: Any) -> None:
        self.inner = gzip.GzipFile(fileobj=raw)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            return self.inner.readinto(buffer)
        except EOFError:
            return 0


@replaces(content)
def end_of_a_cut_off_archive_taken_for_its_end(good, raw, *, name):
    """A ``.gz`` file that was cut off ends where it was cut, without an error."""
    return io.BufferedReader(_Lenient(raw)) if name.endswith(".gz") else good(raw, name=name)


@replaces(content)
def rows_before_a_tear_lost(good, raw, *, name):
    """A ``.gz`` file that was cut off loses up to 256 KiB of rows before that."""
    return (
        io.BufferedReader(gzip.GzipFile(fileobj=raw), 1 << 18)
        if name.endswith(".gz")
        else good(raw, name=name)
    )


@replaces(find_files)
def files_in_the_order_given(good, paths, **settings):
    """Files are numbered in the order in which they are named, so a list in another order is another corpus."""
    given = None if paths is None or isinstance(paths, str | os.PathLike) else list(paths)
    corpus = good(paths if given is None else given, **settings)
    places = {os.fspath(path): number for number, path in enumerate(given or ())}
    return replace(corpus, files=Files.of(sorted(corpus.files, key=lambda f: places.get(f.path, 0))))


@replaces(write_whole)
def written_in_place(good, path, content):
    """A file that must be whole or absent is written in place, so a failure leaves a part of it."""
    with path.open("wb") as file:
        file.write(content[: len(content) // 2])
        file.flush()
        os.fsync(file.fileno())
        file.write(content[len(content) // 2 :])


@replaces(lock_folder)
@contextmanager
def folder_in_use_not_refused(good, folder, **settings):
    """A run that waited in vain for the lock of its folder goes on without it, beside the other one."""
    with ExitStack() as held:
        with suppress(ValueError):
            held.enter_context(good(folder, **settings))
        yield


@replaces(LocalStorage, "read")
def grown_file_read_on(good, self, file, start, stop):
    """A file that has grown since it was listed is read as if it had not changed."""
    size = max(file.size, Path(file.path).stat().st_size) if Path(file.path).exists() else file.size
    return good(self, replace(file, size=size), start, stop)
