"""The files of a corpus: which they are, fixed when the source is made."""

from __future__ import annotations

import glob
import os
import posixpath
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from streampack.fingerprint import digest
from streampack.storage.base import File, LocalStorage, Storage, redact, together
from streampack.storage.file_marks import FileMarks
from streampack.storage.formats import in_folder
from streampack.storage.manifest import named_in
from streampack.storage.remote import Listed, RemoteStorage, scheme_of
from streampack.storage.retries import Retries
from streampack.validation import require_positive

Name = str | os.PathLike[str]
MAGIC = "*?["
BLANK_BYTES = 4096  # a file up to this size is looked at: blank lines alone are no rows


Result = TypeVar("Result")


class Once(Protocol):
    """How one of several processes does something for all of them, after all have said what they want done."""

    def __call__(self, work: Callable[[], Result], /, *, of: str) -> Result:
        """What ``work`` gives; ``of``, which may be shown, must be the same in all."""


def _alone(work: Callable[[], Result], /, *, of: str) -> Result:
    return work()


_once: ContextVar[Once] = ContextVar("_once", default=_alone)


@dataclass
class Corpus:
    """Files, and how to get at their bytes."""

    files: tuple[File, ...]
    storage: Storage
    retries: Retries
    _marks: FileMarks | None = field(default=None, init=False)

    def fingerprint(self) -> str:
        """Names, sizes, and each file's ETag or a hash of its first and last 64 KiB; never a modification time."""
        return self.marks().content

    def marks(self) -> FileMarks:
        """What a state remembers of the files; reads their ends, once."""
        return self._marks or self.identify(together(self.tag, self.files))

    def identify(self, tags: Sequence[str]) -> FileMarks:
        """Keep the tags of all files, in the files' order, whoever has read them."""
        self._marks = FileMarks(self.files, tags)
        return self._marks

    def state(self) -> dict[str, Any]:
        """See `Compared`."""
        return self.marks().state()

    def listed(self) -> str:
        """See `Compared`: the files are compared by themselves, for they are many."""
        return "listed"

    def difference(self, theirs: Any) -> str | None:
        """See `Compared`."""
        return self.marks().difference(theirs)

    def tag(self, file: File) -> str:
        """Its ETag, or a hash of its first and last 64 KiB."""
        return self.retries.call(partial(self.storage.tag, file))

    def read_ahead(self, most: int) -> int:
        """Bytes to fetch ahead, at most: none on this machine, whose own cache reads ahead by itself."""
        local = isinstance(self.storage, LocalStorage)
        return 0 if local else require_positive(most, "read_ahead", least=0)

    @property
    def retry_budget(self) -> float:
        """Seconds that one read may take, in waits and in requests that bring no answer."""
        return self.retries.budget + (self.retries.attempts + 1) * self.storage.patience


def find_files(
    paths: Name | Iterable[Name] | None,
    *,
    manifest: Name | None,
    endings: Sequence[str],
    storage_options: Mapping[str, Any] | None,
    retries: int,
    timeout: float,
) -> Corpus:
    """The files that paths, folders and globs, or a manifest, name, sorted; of a folder, those with these ``endings``.

    Raises:
        ValueError: if nothing matches, a file is empty, one is named twice, or a name leads elsewhere.
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
        once(lambda: None, of="files of each machine")  # to say so where another rank has a URL
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


def once(work: Callable[[], Result], *, of: str) -> Result:
    """What ``work`` reads behind a URL to make a source; within `listed_once`, one process does it for all."""
    return _once.get()(work, of=of)


@contextmanager
def listed_once(how: Once) -> Iterator[None]:
    """Within the block, what is behind URLs is listed by one for all who come here: every rank, in the same order.

    A thousand ranks would ask a bucket or the Hub for the same 100,000 names, and hear different things while it is
    written to. Files of this machine are listed by each process: they may not be there.
    """
    token = _once.set(how)
    try:
        yield
    finally:
        _once.reset(token)


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
    # The first one alone: of the Hub, it lists the folder, and answers for the others in it.
    looks = [tries.call(partial(storage.look, path)) for path in lacking[:1]]
    looks += together(lambda path: tries.call(partial(storage.look, path)), lacking[1:])
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
    """A file of this machine, by one `stat`: 100,000 shards on 1,024 ranks are asked for 102 million times."""
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
    """Refuse a file that comes twice, be it by other names: over a link, or as ``./a`` beside ``a``.

    Raises:
        ValueError: naming both.
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
    """What tells a file from every other of this machine, whatever it is called; None where nothing does."""
    return (found.st_dev, found.st_ino) if found.st_ino else None


def _sorted(found: list[Listed]) -> tuple[File, ...]:
    """The manifest, in the order of the paths; names are relative to the common folder."""
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
