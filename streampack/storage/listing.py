"""Lists the files of a corpus when its source is made, from paths, folders, globs or a manifest.

Each line of a manifest is a name, or a JSON object with ``name``, ``size`` (stored bytes) and ``tag`` (the ETag, or for
a local file a digest of its first and last 64 KiB). A file with a size is not looked up. A manifest may come from the
network, so it is not trusted: names outside its folder are refused.
"""

from __future__ import annotations

import itertools
import json
import os
import posixpath
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np

from streampack.fingerprint import digest
from streampack.storage.base import (
    EMPTY,
    FOLDER,
    GONE,
    UNKNOWN_SIZE,
    File,
    FileStorage,
    LocalStorage,
    gone,
    map_in_threads,
    path_in,
    redact,
    split_url,
    with_path,
)
from streampack.storage.compression import PACKED
from streampack.storage.corpus import Corpus, once
from streampack.storage.names import LARGEST, Files, Place, Texts
from streampack.storage.redirects import Check
from streampack.storage.remote import RemoteStorage, opaque, scheme_of
from streampack.storage.retries import Storage

Name = str | os.PathLike[str]
MAGIC = "*?["
HIDDEN = re.compile(r"(^|/)\.")
MOST_BYTES = 1 << 48
"""Limit on the size of a file. Object stores allow at most 190 TiB, and sums of such sizes fit into 64 bits."""
ESCAPED = re.compile(r"\[([*?[])\]")  # a character that `glob.escape` has escaped


def find_files(
    paths: Name | Iterable[Name] | None,
    *,
    manifest: Name | None = None,
    endings: Sequence[str],
    otherwise: Sequence[str] = (),
    storage: Storage | Mapping[str, Any] | None = None,
) -> Corpus:
    """Return the files named by paths, folders, globs or a manifest, sorted. Empty and missing files have a problem.

    A folder names its files with ``endings``, or those with endings in ``otherwise`` if there are none. With a
    manifest, ``paths`` may be the folder that its names are relative to.

    Raises:
        ValueError: if nothing matches, no file can be read, a file is named twice, or a name in a manifest leads out of
            its folder.
    """
    if paths is None and manifest is None:
        raise ValueError("name the files, or a manifest of them: paths or manifest")
    if paths is None or isinstance(paths, str | os.PathLike):
        paths = [paths or manifest or ""]
    patterns = [os.fspath(path) for path in paths]
    if not patterns:
        raise ValueError("no files given; name at least one")
    if manifest is not None and len(patterns) > 1:
        raise ValueError(
            f"{len(patterns)} paths and a manifest; with a manifest, give the one folder that its names are relative to"
        )
    named = None if manifest is None else os.fspath(manifest)
    held = storage_of([*patterns, *([named] if named and scheme_of(named) else [])], storage)
    shown = [redact(pattern) for pattern in patterns]
    found = once(
        partial(_listed, held, patterns, (endings, otherwise))
        if named is None
        else partial(_by_manifest, held, patterns[0], named),
        of=f"{len(shown)} path(s) from {shown[0]} on ({digest(shown)})",
        local=isinstance(held, LocalStorage),
    )
    return corpus_of(found.in_order(), held)


def storage_of(
    paths: Sequence[str], storage: Storage | Mapping[str, Any] | None, redirect: Check | None = None
) -> LocalStorage | RemoteStorage:
    """Return the storage that holds all of the paths or URLs. For ``redirect``, see `RemoteStorage`."""
    schemes = [scheme_of(path) or "" for path in paths]
    # Options for one web server, such as a token, must not be sent to another.
    hosts = [
        urlsplit(path).netloc if scheme[:4] == "http" else ""
        for scheme, path in zip(schemes, paths, strict=True)
    ]
    places = set(zip(schemes, hosts, strict=True))
    if len(places) > 1:
        shown = sorted(redact(f"{scheme}://{host}") if scheme else "this machine" for scheme, host in places)
        raise ValueError(
            f"the files are in several places ({', '.join(shown)}); make a source of each (a mixture joins them)"
        )
    [(scheme, _)], settings = places, Storage.of(storage)
    return RemoteStorage(scheme, settings, redirect) if scheme else LocalStorage(settings)


def corpus_of(found: Files, storage: FileStorage) -> Corpus:
    """Return the corpus of the listed files, in their order.

    Raises:
        ValueError: if no file can be read, one is too large, or one is listed twice, by its name or by a link.
    """
    sizes = np.frombuffer(found.sizes, np.int64)
    for number in np.flatnonzero(sizes > MOST_BYTES)[:1].tolist():
        file = found[number]
        raise ValueError(
            f"{file.shown} is said to have {file.size:,} bytes, and a file has {MOST_BYTES:,} at most; correct the "
            "server, index or manifest that says so"
        )

    def key(number: int) -> Any:
        file = found.special.get(number)
        if file is None or (file.inode is None and found.place is not None):
            return found.names[number]
        parts = split_url(file.path)
        return file.inode or (parts.scheme, posixpath.normpath("/".join(_parts_of(file.path))), parts.query)

    hashes = np.fromiter((hash(key(number)) for number in range(len(found))), np.int64, len(found))
    order = np.argsort(hashes, kind="stable")
    alike = np.flatnonzero(hashes[order[1:]] == hashes[order[:-1]])
    for number, other in sorted(zip(order[alike + 1].tolist(), order[alike].tolist(), strict=True)):
        if key(number) == key(other):
            file, first = found[number], found[other]
            twice = "is named twice" if first.path == file.path else f"and {file.shown} are one file"
            raise ValueError(f"{first.shown} {twice}; name every file once (a mixture can weight it)")
    empty = {number: found[number] for number in np.flatnonzero(sizes < 1).tolist()}
    problems = {n: replace(file, size=0, problem=file.problem or EMPTY) for n, file in empty.items()}
    return Corpus(found.replaced(problems), storage)


def _listed(
    storage: LocalStorage | RemoteStorage, patterns: list[str], endings: Sequence[Sequence[str]]
) -> Files:
    patterns = [_absolute(pattern) for pattern in storage.pinned(patterns)]
    found = _looked_up(
        Files.of(each for pattern in patterns for each in _matching(storage, pattern)), storage
    )
    if isinstance(storage, LocalStorage) and [*found.problems.values()] == [GONE] and len(found) == 1:
        raise _no_match(patterns[0])
    return Files.of(
        each
        for file in found
        for each in (_in_folder(storage, file.path, endings) if file.problem == FOLDER else [file])
    )


def _absolute(path: str) -> str:
    return path if "://" in path or not path else os.path.normpath(Path(path).absolute())


def _by_manifest(storage: LocalStorage | RemoteStorage, folder: str, manifest: str) -> Files:
    holds = storage if scheme_of(manifest) else LocalStorage()
    beside = folder == manifest
    [folder] = storage.pinned([folder])
    [manifest] = [folder] if beside else holds.pinned([manifest])
    place = Place(manifest if beside else with_path(folder, lambda path: f"{path.rstrip('/')}/manifest"))
    names, sizes, tags, special = Texts(), array("q"), Texts(), dict[int, File]()
    for number, line in enumerate(BytesIO(holds.head(manifest)[0]), 1):
        try:
            if not (text := line.decode().strip()):
                continue
            given, size, tag = _entry(text)
            name = place.require_below(given)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{redact(manifest)}:{number}: {error}") from None
        if (name != given and place.url) or size > LARGEST:
            special[len(names)] = File(place(given), name, size, tag)
        names.append(name)
        sizes.append(min(size, LARGEST))
        tags.append(tag or "")
    if not names:
        raise ValueError(f"{redact(manifest)} names no file")
    return _looked_up(Files(names, sizes, tags, special=special, place=place), storage)


def _entry(line: str) -> tuple[str, int, str | None]:
    """Return the name, the size and the tag in a line of a manifest."""
    entry: dict[str, Any] = _scan(line) if line.startswith("{") else {"name": line}
    name, size, tag = entry.get("name"), entry.get("size"), entry.get("tag")
    sound = size is None or (type(size) is int and size >= 0)
    if not isinstance(name, str) or not sound or not isinstance(tag, str | None):
        raise ValueError("an entry has a name (text), and may have a size (bytes) and a tag (text)")
    return name, UNKNOWN_SIZE if size is None else size, opaque(tag)


_scan = json.JSONDecoder().decode


def _looked_up(found: Files, storage: FileStorage) -> Files:
    """Look up the files whose sizes are unknown."""

    def look(number: int) -> File:
        file = found[number]
        try:
            return replace(storage.look(file.path), name=file.name)
        except FileNotFoundError as error:
            return replace(file, problem=gone(error, file.shown))

    lacking = [number for number, size in enumerate(found.sizes) if size == UNKNOWN_SIZE]
    # The first file is looked up alone: on the Hub, that lists the folder, and the others are found in the listing.
    looks = [*map(look, lacking[:1]), *map_in_threads(look, lacking[1:])] if lacking else []
    return found.replaced(dict(zip(lacking, looks, strict=True)))


def names_in(folder: str) -> list[str] | None:
    """Return the names of the files in a folder, relative to the folder; None if it is not a folder.

    The folder is local or at a URL. Hidden files are skipped. A web server does not list files, so its URLs are not
    folders.
    """
    held = storage_of([folder], None)
    local = isinstance(held, LocalStorage)
    if not folder or (
        isinstance(held, RemoteStorage) and (held.scheme in ("http", "https") or _is_glob(folder))
    ):
        return None

    def names() -> list[str] | None:
        pinned = _absolute(held.pinned([folder])[0])
        [file] = _looked_up(Files.of([File(pinned)]), held)
        return sorted(each.name for each in _below(held, pinned)) if file.problem == FOLDER else None

    return names() if local else once(names, of=f"the folder {redact(folder)}", local=False)


def _is_glob(pattern: str) -> bool:
    return any(character in path_in(pattern) for character in MAGIC)


def _matching(storage: LocalStorage | RemoteStorage, pattern: str) -> list[File]:
    """Return the files that match a glob. For a plain name, return its file or folder without looking it up."""
    parts = _parts_of(pattern)
    if not pattern:  # it would be taken for the current folder
        raise _no_match(pattern)
    if not _is_glob(pattern) or (isinstance(storage, LocalStorage) and Path(pattern).exists()):
        return [File(pattern, "/".join(parts[-1:]))]
    folder = _plain_parts(parts)
    found = _named(storage.find(pattern), folder)
    # A wildcard does not match hidden files, as in local globs.
    if not HIDDEN.search("/".join(parts[len(folder) :])):
        found = [file for file in found if not HIDDEN.search(file.name)]
    if found:
        return found
    raise _no_match(pattern)


def _no_match(pattern: str) -> ValueError:
    return ValueError(f"no file matches {redact(pattern)!r}; check the path or the glob")


def _in_folder(
    storage: LocalStorage | RemoteStorage, folder: str, endings: Sequence[Sequence[str]]
) -> list[File]:
    """Return the files in a folder, at any depth, that have the first set of endings with a match; none are hidden."""
    everything = _below(storage, folder)
    for each in endings:
        if found := [file for file in everything if file.name.endswith(tuple(each))]:
            return found
    known = itertools.chain.from_iterable(endings)
    shown = " or ".join(ending for ending in known if not ending.endswith(PACKED))
    raise ValueError(f"the folder {redact(folder)} holds no {shown} file; name the files, or a glob of them")


def _below(storage: LocalStorage | RemoteStorage, folder: str) -> list[File]:
    found = _named(storage.find(folder, folder=True), _parts_of(folder))
    return [file for file in found if not HIDDEN.search(file.name)]


def _named(found: Sequence[File], folder: Sequence[str]) -> list[File]:
    """Name files by their paths below ``folder``. Only its depth is used: a file system may spell paths differently."""
    parts = [_parts_of(file.path) for file in found]
    return [
        replace(file, name="/".join(of_file[len(folder) :] or of_file[-1:]))
        for file, of_file in zip(found, parts, strict=True)
    ]


def _plain_parts(parts: Sequence[str]) -> list[str]:
    """Return the parts of a glob before the first one with a wildcard. New files do not change this folder.

    >>> _plain_parts(["data", "[[]1]", "en-*", "0.jsonl"])
    ['data', '[1]']
    """
    plain = itertools.takewhile(lambda part: not any(c in ESCAPED.sub("", part) for c in MAGIC), parts[:-1])
    return [ESCAPED.sub(r"\1", part) for part in plain]


def _parts_of(url: str) -> list[str]:
    """Return the host or bucket of a URL and the parts of its path, unquoted if the URL is of a web server.

    >>> _parts_of("https://host/a%20b/0.jsonl?token=secret"), _parts_of("s3://bucket/a%20b#1.jsonl")
    (['host', 'a b', '0.jsonl'], ['bucket', 'a%20b#1.jsonl'])
    """
    if "://" not in url:
        return [part for part in url.split("/") if part]
    parts = split_url(url)
    path = unquote(parts.path) if parts.scheme in ("http", "https") else parts.path
    return [part for part in [parts.netloc, *path.split("/")] if part]
