"""Look-ups of each file of a corpus, when its source is made: of its beginning, or of the files that lie beside it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlunsplit

from streampack.fingerprint import digest
from streampack.storage.base import File, map_in_threads, split_url
from streampack.storage.listing import Corpus, once
from streampack.storage.remote import RemoteStorage

Found = TypeVar("Found")


def companion(corpus: Corpus, file: File, rename: Callable[[str], str]) -> File | None:
    """Return the file beside a file of the corpus whose name ``rename`` makes of that file's; None if there is none.

    Behind a URL this takes a request. The query of the URL is kept.

    >>> import tempfile
    >>> from streampack.storage.base import LocalStorage
    >>> path = Path(tempfile.mkdtemp(), "a.bin")
    >>> _ = path.with_suffix(".idx").write_bytes(bytes(9))
    >>> file = File(str(path), "a.bin", 0)
    >>> corpus = Corpus((file,), LocalStorage())
    >>> found = companion(corpus, file, lambda name: name.removesuffix(".bin") + ".idx")
    >>> found.name, found.size
    ('a.idx', 9)
    >>> companion(corpus, file, lambda name: name + ".loss")

    Raises:
        OSError: if a storage does not answer, or refuses to.
    """
    name = rename(file.name)
    try:
        if corpus.local:
            path = rename(file.path)
            return File(path, name, Path(path).stat().st_size)
        assert isinstance(corpus.storage, RemoteStorage)
        parts = split_url(file.path)
        path = urlunsplit(parts._replace(path=rename(parts.path)))
        found = corpus.storage.look(path)
    except FileNotFoundError:
        return None
    return File(path, name, found.size or 0, found.tag)


def look_at_each(corpus: Corpus, describe: Callable[[Corpus, File], Found]) -> list[Found | str]:
    """Return for each file of a corpus what ``describe`` returns, or why the file cannot be read.

    ``describe`` raises ValueError with that reason. Files behind URLs are looked at by one of the ranks, see `once`.

    Raises:
        OSError: if a storage does not answer, or refuses to.
    """

    def look(file: File) -> Found | str:
        if (problem := corpus.problems.get(file.path)) is not None:
            return problem
        try:
            return describe(corpus, file)
        except ValueError as error:
            return str(error)

    if corpus.local:
        return map_in_threads(look, corpus.files)
    names = digest([(file.name, file.size) for file in corpus.files])
    return once(partial(map_in_threads, look, corpus.files), of=f"{len(corpus.files)} file(s) ({names})")
