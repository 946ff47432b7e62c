"""Folders whose ``index.json`` lists shards: token shards and MDS.

The index is not trusted: it may come from the network, so its names and numbers are checked.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from streampack.storage.base import GONE, File, FileStorage, LocalStorage, redact, with_path
from streampack.storage.corpus import Corpus, once
from streampack.storage.listing import Name, corpus_of, storage_of
from streampack.storage.names import Files, Place
from streampack.storage.remote import RemoteStorage
from streampack.storage.retries import Storage

INDEX = "index.json"
Shard = TypeVar("Shard")

Described = tuple[str, int, Shard, str | None]
"""An index's entry of a shard: (name, size in bytes, what the format needs to read it, why it cannot be read)."""


def read_indexes(
    folders: Sequence[Name],
    describe: Callable[[Mapping[str, Any], Mapping[str, Any]], Described[Shard]],
    *,
    storage: Storage | Mapping[str, Any] | None,
) -> tuple[Corpus, list[Shard]]:
    """Return the shards that the indexes of folders name, in their order, and what the indexes say of them.

    Files on this machine that are gone or have another size have a `File.problem`. Those at a URL are checked when they
    are read. ``describe`` checks an index and its entry of a shard, and returns what that says.
    """
    if not folders:
        raise ValueError("no folders given; name at least one")
    given = [os.fspath(folder) for folder in folders]
    held = storage_of(given, storage)
    found: list[File] = []
    shards: list[Shard] = []
    for folder in given:
        path, content = read_index(folder, held)
        entries = content.get("shards")
        if not isinstance(entries, list) or not entries:
            raise ValueError(f"{redact(path)} names no shards: it is no index of such")
        place = Place(path)
        for number, entry in enumerate(entries):
            try:
                if not isinstance(entry, dict):
                    raise ValueError("it is not described")
                name, size, shard, problem = describe(content, entry)
                if not isinstance(name, str) or type(size) is not int or size <= 0:
                    raise ValueError(
                        f"{name!r} of {size!r} bytes is no shard; an entry has a name and a size above 0"
                    )
                file = place.file(name, size)
            except ValueError as error:
                raise ValueError(f"{redact(path)}, shard {number}: {error}") from None
            if isinstance(held, LocalStorage):
                file = _looked_at(file, held)
            found.append(replace(file, problem=file.problem or problem))
            shards.append(shard)
    return corpus_of(Files.of(found), held), shards


def read_index(folder: str, storage: LocalStorage | RemoteStorage) -> tuple[str, dict[str, Any]]:
    """Return the path of a folder's index, at a version if the storage has any, and its content; empty for a list."""
    url = with_path(folder, lambda path: f"{path.rstrip('/')}/{INDEX}")
    path, text = once(partial(_read, url, storage), of=redact(url), local=isinstance(storage, LocalStorage))
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{redact(path)} is no JSON ({error})") from None
    return path, content if isinstance(content, dict) else {}


def _read(path: str, storage: FileStorage) -> tuple[str, bytes]:
    """Return the path of a folder's index, pinned to a version if the storage has any, and its content."""
    [path] = storage.pinned([path])
    try:
        return path, storage.head(path)[0]
    except FileNotFoundError as error:
        if isinstance(storage, LocalStorage):
            what = f"there is no {path}; name the folder that holds {INDEX} and its shards"
            raise ValueError(what) from None
        raise error


def _looked_at(file: File, storage: LocalStorage) -> File:
    try:
        there = storage.look(file.path)
    except FileNotFoundError:
        return replace(file, problem=GONE)
    problem = cut_off(there.size, file.size) if there.size != file.size else None
    return replace(file, inode=there.inode, problem=problem)


def cut_off(size: int | None, described: int) -> str:
    """Describe a file that has another size than its index says."""
    return f"it has {size} bytes and its index says {described}; it was cut off or replaced: copy it again"
