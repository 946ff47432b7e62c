"""Listing of a corpus's files, which happens when its source is made: `find_files` and `Corpus`."""

from __future__ import annotations

import glob
import os
import posixpath
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from streampack.fingerprint import digest
from streampack.storage.base import File, LocalStorage, Storage, map_in_threads, redact
from streampack.storage.file_marks import FileMarks
from streampack.storage.formats import in_folder
from streampack.storage.manifest import named_in
from streampack.storage.remote import Listed, RemoteStorage, scheme_of
from streampack.storage.retries import Retries
from streampack.validation import require_positive

Name = str | os.PathLike[str]
MAGIC = "*?["
BLANK_BYTES = 4096  # A file up to this size is read, and counts as empty if it has blank lines only.


Result = TypeVar("Result")


class Once(Protocol):
    """A function that does some work in one process and returns its result in all: a collective.

    It is used to list files behind URLs. If each of a thousand ranks listed them, the storage would get a thousand
    requests for the same 100,000 names, and ranks would get different ones while files are added. Files on this machine
    are listed by each process, as machines may have different files.
    """

    def __call__(self, work: Callable[[], Result], /, *, of: str) -> Result:
        """Return the result of ``work``; ``of`` describes it without secrets, and must be equal in all processes."""


def alone(work: Callable[[], Result], /, *, of: str) -> Result:
    """Return the result of ``work``: the `Once` of a process that lists for itself."""
    return work()


@dataclass
class Corpus:
    """The files of a source, the storage that holds them, and how often a read is tried."""

    files: tuple[File, ...]
    storage: Storage
    retries: Retries
    # None until the files' tags are known, for which their ends may have to be read.
    _marks: FileMarks | None = field(default=None, init=False)

    @property
    def local(self) -> bool:
        """Whether the files are on this machine."""
        return isinstance(self.storage, LocalStorage)

    def fingerprint(self) -> str:
        """Return a digest of names and sizes, and of each file's ETag or its first and last 64 KiB.

        Modification times are no part of it, so a corpus may be copied.
        """
        return self.marks().content

    def marks(self) -> FileMarks:
        """Return the marks of the files. The first call may read the ends of all files."""
        return self._marks or self.identify(map_in_threads(self.tag, self.files))

    def identify(self, tags: Sequence[str]) -> FileMarks:
        """Set the tags of the files, in the files' order, which other ranks may have read, and return the marks."""
        self._marks = FileMarks(self.files, tags)
        return self._marks

    def state(self) -> dict[str, Any]:
        """See `Compared`."""
        return self.marks().state()

    def listed(self) -> str:
        """See `Compared`: before a run, files are compared by `require_same_run`."""
        return "listed"

    def difference(self, theirs: Any) -> str | None:
        """See `Compared`."""
        return self.marks().difference(theirs)

    def tag(self, file: File) -> str:
        """Return a file's ETag, or a hash of its first and last 64 KiB."""
        return self.retries.call(partial(self.storage.tag, file))

    @property
    def retry_budget(self) -> float:
        """The most seconds that one read may take: in waits, and in requests that are not answered."""
        return self.retries.budget + (self.retries.attempts + 1) * self.storage.patience


def find_files(
    paths: Name | Iterable[Name] | None,
    *,
    manifest: Name | None,
    endings: Sequence[str],
    storage_options: Mapping[str, Any] | None,
    retries: int,
    timeout: float,
    once: Once = alone,
) -> Corpus:
    """Return the files that paths, folders, globs or a manifest name, sorted; of a folder, those with ``endings``.

    Raises:
        ValueError: if nothing matches, a file is empty or named twice, or a manifest's name leads out of its folder.
    """
    tries = Retries(attempts=require_positive(retries, "retries", least=0))
    if (paths is None) == (manifest is None):
        raise ValueError("name the files, or a manifest of them: either paths or manifest")
    if paths is None or isinstance(paths, str | os.PathLike):
        paths = [paths or manifest or ""]
    patterns = [os.fspath(path) for path in paths]
    if not patterns:
        raise ValueError("no files given; name at least one")
    places = {(scheme_of(p) or "", urlsplit(p).netloc if scheme_of(p) else "") for p in patterns}
    if len(places) > 1:
        shown = sorted(redact(f"{scheme}://{host}") if scheme else "this machine" for scheme, host in places)
        raise ValueError(f"the files lie in several places ({', '.join(shown)}); make a source of each")
    [(scheme, _)] = places
    if not scheme:
        once(lambda: None, of="files of each machine")  # raises an error if another rank was given a URL
        patterns = [
            str(Path(pattern).expanduser()) if pattern[:1] == "~" else pattern for pattern in patterns
        ]
        found = _named(patterns[0]) if manifest else _local(patterns, endings)
        return Corpus(_sorted(found), LocalStorage(), tries)
    storage = RemoteStorage(scheme, options=storage_options or {}, patience=timeout)
    shown = [redact(pattern) for pattern in patterns]
    files = once(
        partial(_behind_urls, storage, patterns, tries, named=manifest is not None),
        of=f"{len(shown)} path(s) from {shown[0]} on ({digest(shown)})",
    )
    return Corpus(files, storage, tries)


def _behind_urls(
    storage: RemoteStorage, patterns: list[str], tries: Retries, *, named: bool
) -> tuple[File, ...]:
    patterns = tries.call(partial(storage.pinned, patterns))
    if named:
        found = named_in(patterns[0], tries.call(partial(storage.whole, patterns[0])).decode())
    else:
        found = []
        for pattern in patterns:
            found += _remote(storage, pattern, tries)
    lacking = [listed.path for listed in found if listed.size is None]
    # The first file is looked up alone: on the Hub, that lists the folder, and the others are found in the listing.
    looks = [tries.call(partial(storage.look, path)) for path in lacking[:1]]
    looks += map_in_threads(lambda path: tries.call(partial(storage.look, path)), lacking[1:])
    sizes = {listed.path: listed for listed in [*found, *looks]}
    return _sorted([sizes[listed.path] for listed in found])


def _named(manifest: str) -> list[Listed]:
    found = named_in(manifest, Path(manifest).read_text())
    return [_look(listed.path) or listed for listed in found]


def _local(patterns: list[str], endings: Sequence[str]) -> list[Listed]:
    found: list[Listed] = []
    for pattern in patterns:
        if (listed := _look(pattern)) is not None:
            found.append(listed)
            continue
        folder = pattern != "" and Path(pattern).is_dir()
        matches = in_folder(pattern, endings) if folder else sorted(glob.glob(pattern, recursive=True))
        files = [listed for listed in map(_look, matches) if listed is not None]
        if not files and folder:
            raise ValueError(
                f"the folder {pattern} holds no {' or '.join(endings)} file; name the files, or a glob of them"
            )
        if not files:
            raise ValueError(
                f"no file matches {pattern!r} (looked in {Path.cwd()}); check the path or the glob"
            )
        found += files
    return found


def _look(path: str) -> Listed | None:
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
    blank = found.st_size <= BLANK_BYTES and Path(place).read_bytes().isspace()
    return Listed(place, 0 if blank else found.st_size, inode=inode_of(found))


def _remote(storage: RemoteStorage, pattern: str, tries: Retries) -> list[Listed]:
    if not any(character in urlsplit(pattern).path for character in MAGIC):
        return [Listed(pattern)]
    if found := tries.call(partial(storage.find, pattern)):
        return found
    raise ValueError(f"no file matches {redact(pattern)!r}; check the path or the glob")


def require_distinct(found: Iterable[Listed]) -> None:
    """Refuse a file that is listed twice, also if it has two names: a link, or ``./a`` beside ``a``.

    Raises:
        ValueError: which has both names.
    """
    known: dict[Any, Listed] = {}
    for listed in found:
        key: Any = listed.inode
        if key is None:
            parts = urlsplit(listed.path)
            key = (parts.scheme, parts.netloc, posixpath.normpath(unquote(parts.path)), parts.query)
        first = known.setdefault(key, listed)
        if first is not listed:
            twice = (
                "is named twice" if first.path == listed.path else f"and {redact(listed.path)} are one file"
            )
            raise ValueError(f"{redact(first.path)} {twice}; name every file once (a mixture can weight it)")


def inode_of(found: os.stat_result) -> tuple[int, int] | None:
    """Return the device and number of a file on this machine; None if the file system does not number its files."""
    return (found.st_dev, found.st_ino) if found.st_ino else None


def _sorted(found: list[Listed]) -> tuple[File, ...]:
    """Return the files in the order of their paths, with names relative to their common folder.

    Raises:
        ValueError: for a file that is empty or listed twice.
    """
    found = sorted(found)
    require_distinct(found)
    paths = [unquote(urlsplit(f.path).path) if "://" in f.path else f.path for f in found]
    folder = os.path.commonpath([Path(path).parent for path in paths])
    for listed in found:
        if not listed.size:
            raise ValueError(f"{redact(listed.path)} is empty; remove it from the corpus")
    return tuple(
        File(listed.path, os.path.relpath(path, folder), listed.size or 0, listed.tag)
        for listed, path in zip(found, paths, strict=True)
    )
