"""The files of a corpus: which they are, fixed when the source is made."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from streampack.plan import require_positive
from streampack.sources.base import digest
from streampack.sources.manifest import named_in
from streampack.sources.remote import Listed, RemoteStorage, scheme_of
from streampack.sources.retry import Retries
from streampack.sources.storage import File, LocalStorage, Storage, redact, together

Name = str | os.PathLike[str]
MAGIC = "*?["


class Corpus(NamedTuple):
    """Files, and how to get at their bytes."""

    files: tuple[File, ...]
    storage: Storage
    retries: Retries

    def fingerprint(self) -> str:
        """Names, sizes, and each file's ETag or a hash of its first and last 64 KiB; never a modification time."""
        tags = together(lambda file: self.retries.call(partial(self.storage.tag, file)), self.files)
        return digest(*((file.name, file.size, tag) for file, tag in zip(self.files, tags, strict=True)))

    @property
    def retry_budget(self) -> float:
        """Seconds that one read may take, in waits and in requests that bring no answer."""
        return self.retries.budget + (self.retries.attempts + 1) * self.storage.patience


def find_files(
    paths: Name | Iterable[Name] | None,
    *,
    manifest: Name | None,
    storage_options: Mapping[str, Any] | None,
    retries: int,
    timeout: float,
) -> Corpus:
    """The files that paths and globs, or a manifest, name, sorted.

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
        found = named_in(patterns[0], Path(patterns[0]).read_text()) if manifest else _local(patterns)
        return Corpus(_sorted([_sized(listed) for listed in found]), LocalStorage(), tries)
    storage = RemoteStorage(scheme, options=storage_options or {}, patience=timeout)
    if manifest:
        found = named_in(patterns[0], tries.call(partial(storage.whole, patterns[0])).decode())
    else:
        found = []
        for pattern in patterns:
            found += _remote(storage, pattern, tries)
    lacking = [listed for listed in found if listed.size is None]
    looks = together(lambda listed: tries.call(partial(storage.look, listed.path)), lacking)
    sizes = {listed.path: listed for listed in [*found, *looks]}
    return Corpus(_sorted([sizes[listed.path] for listed in found]), storage, tries)


def _local(patterns: list[str]) -> list[Listed]:
    found: list[str] = []
    for pattern in patterns:
        matches = [pattern] if Path(pattern).is_file() else glob.glob(pattern, recursive=True)
        matches = sorted(match for match in matches if Path(match).is_file())
        if not matches:
            raise ValueError(
                f"no file matches {pattern!r} (looked in {Path.cwd()}); check the path or the glob"
            )
        found += matches
    return [Listed(os.path.normpath(Path(path).absolute())) for path in found]


def _sized(listed: Listed) -> Listed:
    path = Path(listed.path)
    size = path.stat().st_size
    if size <= 4096 and path.read_bytes().isspace():
        size = 0
    return Listed(listed.path, size)


def _remote(storage: RemoteStorage, pattern: str, tries: Retries) -> list[Listed]:
    if not any(character in urlsplit(pattern).path for character in MAGIC):
        return [Listed(pattern)]
    if found := tries.call(partial(storage.find, pattern)):
        return found
    raise ValueError(f"no file matches {redact(pattern)!r}; check the path or the glob")


def _sorted(found: list[Listed]) -> tuple[File, ...]:
    """The manifest, in the order of the paths; names are relative to the common folder."""
    found = sorted(found)
    for listed, following in pairwise(found):
        if listed.path == following.path:
            raise ValueError(
                f"{redact(listed.path)} is named twice; name every file once (a mixture can weight it)"
            )
    paths = [unquote(urlsplit(f.path).path) if "://" in f.path else f.path for f in found]
    folder = os.path.commonpath([Path(path).parent for path in paths])
    for listed in found:
        if not listed.size:
            raise ValueError(f"{redact(listed.path)} is empty; remove it from the corpus")
    return tuple(
        File(listed.path, os.path.relpath(path, folder), listed.size or 0, listed.tag)
        for listed, path in zip(found, paths, strict=True)
    )
