"""Files that belong to a corpus's files and lie beside them, such as indexes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from streampack.storage.base import File
from streampack.storage.listing import Corpus
from streampack.storage.remote import RemoteStorage


def companion(corpus: Corpus, file: File, rename: Callable[[str], str]) -> File | None:
    """Return the file beside a file of the corpus whose name ``rename`` makes of that file's; None if there is none.

    Behind a URL this takes a request. The query of the URL is kept.

    >>> import tempfile
    >>> from streampack.storage.base import LocalStorage
    >>> from streampack.storage.retries import Retries
    >>> path = Path(tempfile.mkdtemp(), "a.bin")
    >>> _ = path.with_suffix(".idx").write_bytes(bytes(9))
    >>> file = File(str(path), "a.bin", 0)
    >>> corpus = Corpus((file,), LocalStorage(), Retries(attempts=0))
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
        parts = urlsplit(file.path)
        path = urlunsplit(parts._replace(path=rename(parts.path)))
        found = corpus.retries.call(partial(corpus.storage.look, path))
    except FileNotFoundError:
        return None
    return File(path, name, found.size or 0, found.tag)
