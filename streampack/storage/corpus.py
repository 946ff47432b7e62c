"""`Corpus`: the files of a source, with look-ups of each and of the files beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from streampack.fingerprint import digest, digest_of
from streampack.storage.base import (
    File,
    FileStorage,
    LocalStorage,
    ParallelMap,
    map_in_threads,
    summarize,
    with_path,
)
from streampack.storage.hub import commit_of
from streampack.storage.names import Files, Texts

UNREADABLE = "unreadable"  # the tag of a file that is gone or cannot be read
Result = TypeVar("Result")


Once = Callable[..., Any]
"""``(work, of=text)`` calls ``work`` in one process and returns its result in all. The text, without secrets, must be
equal in all processes."""

_collective: ContextVar[Once | None] = ContextVar("_collective", default=None)


@contextmanager
def listed_by(collective: Once) -> Iterator[None]:
    """Let one rank list the files at URLs for all ranks that make their sources in this ``with`` block.

    Otherwise a thousand ranks would list the same names, and find different ones while files are added. Each process
    lists files on its own machine, as machines may have different files.
    """
    before = _collective.set(collective)
    try:
        yield
    finally:
        _collective.reset(before)


def once(work: Callable[[], Result], *, of: str, local: bool) -> Result:
    """Return the result of ``work``, which one rank does for all within `listed_by`, unless it is about local files."""
    collective = _collective.get()
    if collective is None:
        return work()
    if local:
        collective(
            lambda: None, of="files of each machine"
        )  # raises an error if another rank was given a URL
        return work()
    found: Result = collective(work, of=of)
    return found


@dataclass
class Corpus:
    """The files of a source, and the storage that holds them.

    Raises:
        ValueError: if none of the files can be read, with the reasons.
    """

    files: Files
    storage: FileStorage
    # None until they are known, for which the files' ends may have to be read.
    _tags: Texts | list[str] | None = field(default=None, init=False)
    _digest: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if len(self.files.problems) == len(self.files):
            problems = [(self.files[number].shown, why) for number, why in self.files.problems.items()]
            raise ValueError(summarize(problems, files=len(self.files)))

    @property
    def local(self) -> bool:
        """Whether the files are on this machine."""
        return isinstance(self.storage, LocalStorage)

    def manifest(self) -> str:
        r"""Return the text of a manifest: a line for each file with its name, size and tag.

        >>> import tempfile
        >>> from pathlib import Path
        >>> from streampack.storage import find_files
        >>> _ = (folder := Path(tempfile.mkdtemp())).joinpath("a.jsonl").write_bytes(b"{}\n")
        >>> find_files(folder, endings=[".jsonl"]).manifest()
        '{"name": "a.jsonl", "size": 3, "tag": "d7c11401a8c58112"}\n'
        """
        entries = (
            {"name": file.name, "size": file.size, "tag": None if file.problem else tag}
            for file, tag in zip(self.files, self.tags(), strict=True)
        )
        return "".join(f"{json.dumps(entry)}\n" for entry in entries)

    def digest(self) -> str:
        """Return a digest of names and sizes, and of each file's ETag or its first and last 64 KiB.

        Modification times are no part of it, so a corpus may be copied.
        """
        if self._digest is None:
            self._digest = digest_of(zip(self.files.names, self.files.sizes, self.tags(), strict=True))
        return self._digest

    def listed(self, *, read: bool) -> str:
        """Return a digest of names, sizes and tags; without ``read``, of the tags that no file must be read for."""
        files, tags = self.files, self.tags() if read else self.files.tags
        commits = map(commit_of, map(files.path, range(len(files))))
        return digest_of(zip(files.names, files.sizes, tags, commits, strict=True))

    def described(self) -> str:
        """Return the number of files, their bytes, and the digest, as the identity of a run holds them."""
        return f"{len(self.files):,} file(s) of {sum(self.files.sizes):,} bytes, digest {self.digest()}"

    def tags(self) -> Texts | list[str]:
        """Return the tags of the files, in their order. The first call may read the ends of files without one."""
        if self._tags is None:
            self._tags = self.find_tags(map_in_threads)
        return self._tags

    def find_tags(self, parallel_map: ParallelMap) -> Texts | list[str]:
        """Return the tags; ``parallel_map`` reads the files whose tags are not known."""
        known, special = self.files.tags, self.files.special
        lacking = [
            number
            for number, tag in enumerate(known)
            if not tag or ((file := special.get(number)) is not None and (file.problem or file.beside))
        ]
        if not lacking:
            return known
        found = parallel_map(lambda number: self.tag(self.files[number]), lacking)
        others = dict(zip(lacking, found, strict=True))
        return [others.get(number, tag) for number, tag in enumerate(known)]

    def identify(self, tags: Texts | list[str]) -> None:
        """Set the tags of the files, in the files' order, which other ranks may have read."""
        self._tags, self._digest = tags, None

    def tag(self, file: File) -> str:
        """Return a file's ETag, or a hash of its first and last 64 KiB; a fixed word if it is known to be unreadable.

        Of a file with others beside it, return a digest of all their tags.
        """
        if file.problem is not None:
            return file.tag if file.tag and file.size else UNREADABLE
        try:
            own, *others = [self.storage.tag(each) for each in (file, *file.beside)]
            return digest(own, *others) if others else own
        except FileNotFoundError:  # raised where its rows are read, unless they are skipped
            return UNREADABLE


def look_at_each(corpus: Corpus, describe: Callable[[Corpus, File], Result]) -> list[Result | str]:
    """Return for each file of a corpus what ``describe`` returns, or why it raised ValueError.

    One of the ranks looks at files at URLs, see `once`.
    """

    def look(file: File) -> Result | str:
        if file.problem is not None:
            return file.problem
        try:
            return describe(corpus, file)
        except ValueError as error:
            return str(error)

    names = digest_of(zip(corpus.files.names, corpus.files.sizes, strict=True))
    each = f"{len(corpus.files)} file(s) ({names})"
    return once(partial(map_in_threads, look, corpus.files), of=each, local=corpus.local)


def companion(corpus: Corpus, file: File, rename: Callable[[str], str]) -> File | None:
    """Return the file beside a file, with the name that ``rename`` makes of its own; None if there is none."""
    path = with_path(file.path, rename)
    try:
        return replace(corpus.storage.look(path), path=path, name=rename(file.name))
    except FileNotFoundError:
        return None
