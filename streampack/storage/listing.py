"""Listing of a corpus's files, which happens when its source is made: `find_files` and `Corpus`."""

from __future__ import annotations

import glob
import itertools
import json
import os
import posixpath
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from streampack.fingerprint import digest
from streampack.storage.base import (
    EMPTY,
    GONE,
    File,
    FileStorage,
    LocalStorage,
    gone,
    map_in_threads,
    redact,
    split_url,
    summarize,
)
from streampack.storage.manifest import named_in
from streampack.storage.remote import Listed, RemoteStorage, scheme_of
from streampack.storage.retries import Storage

Name = str | os.PathLike[str]
MAGIC = "*?["
ESCAPED = re.compile(r"\[([*?[])\]")  # a character that `glob.escape` has escaped
UNREADABLE = "unreadable"  # the tag of a file that is gone or cannot be read


Result = TypeVar("Result")


class Once(Protocol):
    """A function that does some work in one process and returns its result in all: a collective."""

    def __call__(self, work: Callable[[], Result], /, *, of: str) -> Result:
        """Return the result of ``work``; ``of`` describes it without secrets, and must be equal in all processes."""


_shared: ContextVar[Once | None] = ContextVar("_shared", default=None)


@contextmanager
def listed_by(share: Once) -> Iterator[None]:
    """Let all ranks make their sources in this ``with`` block, and one of them look at the files behind URLs.

    If each of a thousand ranks listed them, the storage would get a thousand requests for the same 100,000 names, and
    ranks would get different ones while files are added. Files on this machine are listed by each process, as machines
    may have different files.
    """
    before = _shared.set(share)
    try:
        yield
    finally:
        _shared.reset(before)


def once(work: Callable[[], Result], *, of: str) -> Result:
    """Return the result of ``work``, which one rank does for all within `listed_by`, and otherwise this process."""
    share = _shared.get()
    return work() if share is None else share(work, of=of)


@dataclass
class Corpus:
    """The files of a source, and the storage that holds them.

    ``problems`` says why files cannot be read, by path, as far as that is known from listing them. They stay in
    ``files``, so that the same names and sizes are always divided among the lanes in the same way. ``beside`` has the
    files that belong to a file, such as its index, by its path: they are part of its tag.
    """

    files: tuple[File, ...]
    storage: FileStorage
    problems: Mapping[str, str] = field(default_factory=dict)
    beside: Mapping[str, Sequence[File]] = field(default_factory=dict)
    # None until they are known, for which the files' ends may have to be read.
    _tags: Sequence[str] | None = field(default=None, init=False)

    @property
    def local(self) -> bool:
        """Whether the files are on this machine."""
        return isinstance(self.storage, LocalStorage)

    @cached_property
    def distinct_names(self) -> list[str]:
        """The files' names, each with its number among the files of this name if it is not the first."""
        seen: Counter[str] = Counter()
        found = []
        for file in self.files:
            seen[file.name] += 1
            found.append(file.name if seen[file.name] == 1 else f"{file.name} ({seen[file.name]})")
        return found

    def manifest(self) -> str:
        r"""Return the text of a manifest: a line for each file with its name, size and tag.

        >>> import tempfile
        >>> _ = (folder := Path(tempfile.mkdtemp())).joinpath("a.jsonl").write_bytes(b"{}\n")
        >>> corpus = find_files(folder, manifest=None, endings=[".jsonl"])
        >>> corpus.manifest()
        '{"name": "a.jsonl", "size": 3, "tag": "d7c11401a8c58112"}\n'
        """
        entries = (
            {"name": file.name, "size": file.size, "tag": None if file.path in self.problems else tag}
            for file, tag in zip(self.files, self.tags(), strict=True)
        )
        return "".join(f"{json.dumps(entry)}\n" for entry in entries)

    def digest(self) -> str:
        """Return a digest of names and sizes, and of each file's ETag or its first and last 64 KiB.

        Modification times are no part of it, so a corpus may be copied.
        """
        named = ((file.name, file.size, tag) for file, tag in zip(self.files, self.tags(), strict=True))
        return digest(*named)

    def described(self) -> str:
        """Return the number of files, their bytes, and the digest, as the identity of a run holds them."""
        size = sum(file.size for file in self.files)
        return f"{len(self.files):,} file(s) of {size:,} bytes, digest {self.digest()}"

    def tags(self) -> Sequence[str]:
        """Return the tags of the files, in their order. The first call may read the ends of all files."""
        if self._tags is None:
            self.identify(map_in_threads(self.tag, self.files))
        assert self._tags is not None
        return self._tags

    def identify(self, tags: Sequence[str]) -> None:
        """Set the tags of the files, in the files' order, which other ranks may have read."""
        self._tags = tags

    def tag(self, file: File) -> str:
        """Return a file's ETag, or a hash of its first and last 64 KiB; a fixed word if it is known to be unreadable.

        Of a file with others beside it, return a digest of all their tags.
        """
        if file.path in self.problems:
            return file.tag if file.tag and file.size else UNREADABLE
        try:
            own, *others = [self.storage.tag(each) for each in (file, *self.beside.get(file.path, ()))]
            return digest(own, *others) if others else own
        except FileNotFoundError:  # raised where its rows are read, unless they are left out
            return UNREADABLE


def find_files(
    paths: Name | Iterable[Name] | None,
    *,
    manifest: Name | None = None,
    endings: Sequence[str],
    storage: Storage | Mapping[str, Any] | None = None,
) -> Corpus:
    """Return the files that paths, folders, globs or a manifest name, sorted; of a folder, those with ``endings``.

    With a manifest, ``paths`` may be the folder that its names are relative to.

    Files that are empty or gone are among them, and in `Corpus.problems`.

    Raises:
        ValueError: if nothing matches, no file can be read, a file is named twice, or a manifest's name leads out of
            its folder.
    """
    reading = Storage.of(storage)
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
    places = {(scheme_of(p) or "", urlsplit(p).netloc if scheme_of(p) else "") for p in patterns}
    if named is not None and scheme_of(named):
        places.add((scheme_of(named) or "", urlsplit(named).netloc))
    if len(places) > 1:
        shown = sorted(redact(f"{scheme}://{host}") if scheme else "this machine" for scheme, host in places)
        raise ValueError(f"the files lie in several places ({', '.join(shown)}); make a source of each")
    [(scheme, _)] = places
    if not scheme:
        once(lambda: None, of="files of each machine")  # raises an error if another rank was given a URL
        patterns = list(map(_expanded, patterns))
        if named is None:
            return _corpus(_local(patterns, endings), LocalStorage(reading))
        named = _expanded(named)
        folder = None if patterns == [named] else patterns[0]
        within = str(Path(named).parent) if folder is None else folder
        return _corpus(_named(named, folder), LocalStorage(reading, within=within))
    remote = RemoteStorage(scheme, reading)
    shown = [redact(pattern) for pattern in patterns]
    found = once(
        partial(_behind_urls, remote, patterns, manifest=named),
        of=f"{len(shown)} path(s) from {shown[0]} on ({digest(shown)})",
    )
    return _corpus(found, remote)


def _expanded(path: str) -> str:
    return str(Path(path).expanduser()) if path[:1] == "~" else path


def _behind_urls(storage: RemoteStorage, patterns: list[str], *, manifest: str | None) -> list[Listed]:
    beside = patterns == [manifest]  # the files lie beside the manifest
    patterns = storage.pinned(patterns)
    if manifest is not None:
        if scheme_of(manifest) is None:
            text = Path(_expanded(manifest)).read_text(encoding="utf-8")
        else:
            [manifest] = storage.pinned([manifest])
            text = storage.whole(manifest).decode()
        found = named_in(manifest, text, folder=None if beside else patterns[0])
    else:
        found = []
        for pattern in patterns:
            found += _remote(storage, pattern)
    lacking = [listed.path for listed in found if listed.size is None]
    # The first file is looked up alone: on the Hub, that lists the folder, and the others are found in the listing.
    look = partial(_look_behind_url, storage)
    looks = [look(path) for path in lacking[:1]]
    looks += map_in_threads(look, lacking[1:])
    looked = {listed.path: listed for listed in looks}
    return [looked.get(listed.path, listed)._replace(name=listed.name) for listed in found]


def _look_behind_url(storage: RemoteStorage, path: str) -> Listed:
    try:
        return storage.look(path)
    except FileNotFoundError as error:
        return Listed(path, problem=gone(error, redact(path)))


def _named(manifest: str, folder: str | None) -> list[Listed]:
    found = named_in(manifest, Path(manifest).read_text(encoding="utf-8"), folder=folder)
    return [
        listed
        if listed.size is not None
        else _look(listed.path, listed.name) or listed._replace(problem=GONE)
        for listed in found
    ]


def _local(patterns: list[str], endings: Sequence[str]) -> list[Listed]:
    found: list[Listed] = []
    for pattern in patterns:
        if (listed := _look(pattern, Path(pattern).name)) is not None:
            found.append(listed)
            continue
        folder = pattern != "" and Path(pattern).is_dir()
        matches = in_folder(pattern, endings) if folder else sorted(glob.glob(pattern, recursive=True))
        root = pattern if folder else Path(*plain_parts(Path(pattern).parts))
        named = [(path, os.path.relpath(path, root)) for path in matches]
        files = [listed for listed in itertools.starmap(_look, named) if listed is not None]
        if not files and folder:
            raise ValueError(
                f"the folder {pattern} holds no {' or '.join(endings)} file; name the files, or a glob of them"
            )
        if not files and len(patterns) > 1 and not any(character in pattern for character in MAGIC):
            gone_file = Path(os.path.normpath(Path(pattern).absolute()))
            files = [Listed(str(gone_file), problem=GONE, name=gone_file.name)]
        if not files:
            raise ValueError(
                f"no file matches {pattern!r} (looked in {Path.cwd()}); check the path or the glob"
            )
        found += files
    return found


def in_folder(folder: str, endings: Iterable[str]) -> list[str]:
    """Return the files in a folder, at any depth, whose names have one of these endings; no hidden files.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> (folder / "en").mkdir()
    >>> [(folder / name).touch() for name in ("en/a.jsonl", ".b.jsonl", "c.md")]
    [None, None, None]
    >>> [Path(path).name for path in in_folder(str(folder), [".jsonl"])]
    ['a.jsonl']
    """
    everything = glob.glob(f"{glob.escape(str(Path(folder)))}/**/*", recursive=True)
    return sorted(path for path in everything if path.endswith(tuple(endings)) and Path(path).is_file())


def plain_parts(parts: Sequence[str]) -> list[str]:
    """Return the parts of a glob before the first one with a wildcard: the folder that no file can move.

    >>> plain_parts(["data", "[[]1]", "en-*", "0.jsonl"])
    ['data', '[1]']
    """
    plain = itertools.takewhile(lambda part: not any(c in ESCAPED.sub("", part) for c in MAGIC), parts[:-1])
    return [ESCAPED.sub(r"\1", part) for part in plain]


def _look(path: str, name: str) -> Listed | None:
    """Return a file of this machine; None if the path is not a file.

    A file costs a single `stat`: 100,000 shards on 1,024 ranks are 102 million calls as it is.
    """
    try:
        found = Path(path).stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    place = os.path.normpath(Path(path).absolute())
    return Listed(place, found.st_size, inode=inode_of(found), name=name)


def _remote(storage: RemoteStorage, pattern: str) -> list[Listed]:
    if not any(character in split_url(pattern).path for character in MAGIC):
        return [Listed(pattern, name=parts_of_url(pattern)[-1])]
    if found := storage.find(pattern):
        # How deep the folder lies is told by the pattern: a file system may write its own paths in another way.
        depth = len(plain_parts(parts_of_url(pattern)))
        parts = [parts_of_url(listed.path) for listed in found]
        return [
            listed._replace(name="/".join(of_file[depth:] or of_file[-1:]))
            for listed, of_file in zip(found, parts, strict=True)
        ]
    raise ValueError(f"no file matches {redact(pattern)!r}; check the path or the glob")


def parts_of_url(url: str) -> list[str]:
    """Return the host or bucket of a URL and the parts of its path, of a web server without quotes.

    >>> parts_of_url("https://host/a%20b/0.jsonl?token=secret"), parts_of_url("s3://bucket/a%20b#1.jsonl")
    (['host', 'a b', '0.jsonl'], ['bucket', 'a%20b#1.jsonl'])
    """
    parts = split_url(url)
    path = unquote(parts.path) if parts.scheme in ("http", "https") else parts.path
    return [part for part in [parts.netloc, *path.split("/")] if part]


def require_distinct(found: Iterable[Listed]) -> None:
    """Refuse a file that is listed twice, also if it has two names: a link, or ``./a`` beside ``a``.

    Raises:
        ValueError: which has both names.
    """
    known: dict[Any, Listed] = {}
    for listed in found:
        key: Any = listed.inode
        if key is None:
            parts = split_url(listed.path)
            key = (parts.scheme, posixpath.normpath("/".join(parts_of_url(listed.path))), parts.query)
        first = known.setdefault(key, listed)
        if first is not listed:
            twice = (
                "is named twice" if first.path == listed.path else f"and {redact(listed.path)} are one file"
            )
            raise ValueError(f"{redact(first.path)} {twice}; name every file once (a mixture can weight it)")


def inode_of(found: os.stat_result) -> tuple[int, int] | None:
    """Return the device and number of a file on this machine; None if the file system does not number its files."""
    return (found.st_dev, found.st_ino) if found.st_ino else None


def _corpus(found: list[Listed], storage: FileStorage) -> Corpus:
    """Return the files in the order of their paths.

    Raises:
        ValueError: if no file can be read, or one is listed twice.
    """
    found = sorted(found, key=lambda listed: listed.path)
    require_distinct(found)
    files = tuple(File(listed.path, listed.name, listed.size or 0, listed.tag) for listed in found)
    problems = {listed.path: listed.problem or EMPTY for listed in found if listed.problem or not listed.size}
    return require_some(Corpus(files, storage, problems))


def require_some(corpus: Corpus) -> Corpus:
    """Return the corpus.

    Raises:
        ValueError: if none of its files can be read, with the reasons.
    """
    if len(corpus.problems) == len(corpus.files):
        problems = [(redact(path), reason) for path, reason in corpus.problems.items()]
        raise ValueError(summarize(problems, files=len(corpus.files)))
    return corpus
