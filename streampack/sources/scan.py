"""`scan`: look at all files of a corpus once, and write a manifest by which later runs start without looking again."""

from __future__ import annotations

import json
import os
import posixpath
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from streampack.sources.lines import HEAD_BYTES
from streampack.sources.parts import BadShard, Damage
from streampack.sources.row_groups import Footers, row_groups
from streampack.sources.schemas import differing, schema_of
from streampack.storage.base import HASHED_BYTES, THREADS, File, path_in
from streampack.storage.compression import DAMAGED, content, kind_of, not_text
from streampack.storage.details import LONGEST_PROBLEM, Schema
from streampack.storage.formats import JSON_LINES, PARQUET, not_json_lines
from streampack.storage.listing import UNREADABLE, Corpus, Name, find_files
from streampack.storage.manifest import FORMAT, VERSION
from streampack.storage.problems import MAX_NAMED, Problem, gone
from streampack.storage.ranges import Fetcher, RangeStream
from streampack.storage.whole_files import write_whole


@dataclass(frozen=True)
class Scan:
    """The result of `scan`: counts, and the problems of each file.

    Attributes:
        manifest: the file that was written.
        folder: the folder or URL that the manifest's names are relative to.
        files: how many files there are.
        bytes: their size together.
        rows: how many rows they have; None if that is unknown, as of JSON lines.
        problems: the files that cannot be read, or whose columns are not those of the others, each with the reason.
    """

    manifest: Path
    folder: str
    files: int
    bytes: int
    rows: int | None
    problems: list[Problem]

    def __str__(self) -> str:
        rows = "" if self.rows is None else f" and {self.rows:,} rows"
        lines = [f"{self.files:,} files of {self.bytes:,} bytes{rows}, {len(self.problems):,} with problems"]
        lines += [f"  {shown}: {reason}" for shown, reason in self.problems[:MAX_NAMED]]
        if len(self.problems) > MAX_NAMED:
            lines.append(f"  and {len(self.problems) - MAX_NAMED:,} more")
        inside = os.path.normpath(self.folder) == str(self.manifest.parent.absolute())
        paths = "" if inside else f"paths={self.folder!r}, "
        return "\n".join([*lines, f"read it with {paths}manifest={os.fspath(self.manifest)!r}"])


def scan(
    paths: Name | Iterable[Name] | None = None,
    *,
    out: Name,
    manifest: Name | None = None,
    columns: Sequence[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    retries: int = 5,
    timeout: float = 30.0,
    progress: bool = True,
) -> Scan:
    r"""Look at all files of a corpus of Parquet files or JSON lines, and write a manifest of them.

    >>> import tempfile
    >>> from streampack import JSONLSource
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "a.jsonl").write_text('{"text": "a"}\n')
    >>> _ = (folder / "b.jsonl").write_text("")
    >>> found = scan(folder, out=folder / "corpus.manifest", progress=False)
    >>> found.files, found.bytes, [reason for _, reason in found.problems]
    (2, 14, ['it is empty'])
    >>> [file.name for file in JSONLSource(manifest=folder / "corpus.manifest").files]
    ['a.jsonl', 'b.jsonl']

    Of each file, the manifest has name, size, ETag (or a hash of the file's ends) and why it cannot be read, if so; of
    Parquet files also the rows and bytes of each row group, and the schema. A source that is given it lists nothing and
    reads no footer before its first row. Names are relative to the folder that is given, to the part of a glob before
    its first wildcard, or of several of these to the folder that they have in common: give that as ``paths`` beside
    ``manifest``, unless the manifest lies in it.

    Args:
        paths: files, folders or globs of this machine, or URLs.
        out: the manifest to write, in a folder of this machine; one that is there is replaced.
        manifest: instead of ``paths``, a list of the files' names, as `JSONLSource` takes it; with ``paths``, their
            folder.
        columns: the columns of Parquet files that will be read, which alone must be the same in all; None for all.
        storage_options: see `JSONLSource`, as for the two arguments below.
        retries: how often a failed read is tried again.
        timeout: seconds that one request may take.
        progress: show a bar, if tqdm is installed.

    Raises:
        ValueError: if nothing matches, no file can be read, one is named twice, or there are files of both kinds; if
            ``out`` cannot be a manifest.
        OSError: if a file cannot be read for a reason that may pass. Nothing is written.
    """
    _require_place(Path(out))
    corpus = find_files(
        paths, manifest=manifest, endings=(*PARQUET, *JSON_LINES), storage_options=storage_options, retries=retries,
        timeout=timeout,
    )  # fmt: skip
    kinds = {file.name.lower().endswith(PARQUET) for file in corpus.files}
    if len(kinds) > 1:
        raise ValueError(
            "there are Parquet files and others; scan them one after the other, as a source reads one kind"
        )
    look = _look_at_parquet if kinds == {True} else _look_at_lines
    with _bar(len(corpus.files), shown=progress) as advance:
        looks = _map(partial(_look, corpus, look), corpus.files, advance)
    schemas = [found.schema for found in looks]
    problems = differing(schemas, columns)
    named = [
        (file.shown, reason)
        for number, (file, found) in enumerate(zip(corpus.files, looks, strict=True))
        if (reason := found.problem or problems.get(number)) is not None
    ]
    folder, names = _in_one_folder(corpus.files)
    _write(Path(out), corpus.files, names, looks)
    known = [found.rows for found in looks if found.problem is None]
    return Scan(
        manifest=Path(out),
        folder=folder,
        files=len(corpus.files),
        bytes=sum(file.size for file in corpus.files),
        rows=None if None in known else sum(rows or 0 for rows in known),
        problems=named,
    )


def _require_place(out: Path) -> None:
    """Refuse a place for a manifest before the files are looked at, which may take hours.

    Raises:
        ValueError: if there is no folder for it, it is a folder, or its name is that of a file of rows.
    """
    if not out.parent.is_dir():
        raise ValueError(f"out={os.fspath(out)!r}: there is no folder {out.parent} on this machine; make it")
    if out.is_dir():
        raise ValueError(f"out={os.fspath(out)!r} is a folder; name the manifest in it")
    if out.name.lower().endswith((*PARQUET, *JSON_LINES)):
        raise ValueError(
            f"out={os.fspath(out)!r}: who reads that folder would read the manifest's lines as rows; give it another "
            "ending, such as .manifest"
        )


@dataclass(frozen=True)
class _Look:
    """The tag, the contents and the problem of one file, as far as they could be found."""

    tag: str | None = None
    rows: int | None = None
    groups: list[int] | None = None
    schema: Schema | None = None
    problem: str | None = None


def _look(corpus: Corpus, look: Any, file: File) -> _Look:
    """Read of a file what its manifest entry needs."""
    if (problem := corpus.problems.get(file.path)) is not None and not file.size:
        return _Look(problem=problem)
    if (tag := corpus.tag(file)) == UNREADABLE:
        return _Look(problem=problem or gone(FileNotFoundError(), file.shown))
    if problem is not None:
        return _Look(tag, problem=problem)
    try:
        found: _Look = look(corpus, file, tag)
    except FileNotFoundError as error:
        return _Look(problem=gone(error, file.shown))
    except Damage as error:
        return _Look(tag, problem=str(error))
    return found


def _look_at_parquet(corpus: Corpus, file: File, tag: str) -> _Look:
    footer = Footers([file], None).get(0, Fetcher(corpus.storage, corpus.retries).take)
    flat = [number for group in row_groups(footer) for number in group]
    return _Look(tag, sum(flat[::2]), flat, schema_of(footer))


def _look_at_lines(corpus: Corpus, file: File, tag: str) -> _Look:
    """Look at a file's name and its first bytes, decompressed."""
    if (problem := not_json_lines(file, local=corpus.local)) is not None:
        return _Look(tag, problem=problem)
    fetcher = Fetcher(corpus.storage, corpus.retries)
    try:
        head = content(
            RangeStream(fetcher, file, 0, min(HASHED_BYTES, file.size)), name=path_in(file.path)
        ).read(HEAD_BYTES)
    except DAMAGED as error:
        raise BadShard(f"it cannot be decompressed: {error}", offset=0) from error
    if not head:
        raise BadShard("it is empty", offset=0)
    if file.seekable and (kind := kind_of(head)) is not None:
        raise BadShard(not_text(kind), offset=0)
    return _Look(tag)


def _in_one_folder(files: Sequence[File]) -> tuple[str, list[str]]:
    """Return the folder or URL that has all the folders that were given, and the files' names relative to it."""
    # Not by removing the name: in a URL it is quoted.
    folders = [file.shown.rsplit("/", 1 + file.name.count("/"))[0].split("/") for file in files]
    levels = zip(*folders, strict=False)
    common = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, levels)]
    names = []
    for file, folder in zip(files, folders, strict=True):
        between = "/".join(folder[len(common) :])
        web = file.path.startswith("http")
        names.append(posixpath.join(unquote(between) if web else between, file.name))
    return "/".join(common) or "/", names


def _write(path: Path, files: Sequence[File], names: Sequence[str], looks: Sequence[_Look]) -> None:
    """Write the manifest under another name, and rename it when it is complete."""
    schemas: dict[str, int] = {}
    lines = []
    for file, name, found in zip(files, names, looks, strict=True):
        entry: dict[str, Any] = {"name": name, "size": file.size}
        if found.schema is not None:
            entry["schema"] = schemas.setdefault(json.dumps(found.schema), len(schemas))
        entry |= {"tag": found.tag, "rows": found.rows, "groups": found.groups}
        entry["problem"] = found.problem and " ".join(found.problem.split())[:LONGEST_PROBLEM]
        lines.append({key: value for key, value in entry.items() if value is not None})
    header = {"format": FORMAT, "version": VERSION, "schemas": list(map(json.loads, schemas))}
    write_whole(path, "".join(json.dumps(line) + "\n" for line in [header, *lines]).encode())


def _map(look: Any, files: Sequence[File], advance: Any) -> list[_Look]:
    """Look at files in threads; return what was found in the files' order."""
    found = []
    with ThreadPoolExecutor(THREADS) as pool:
        try:
            for each in pool.map(look, files):
                found.append(each)
                advance()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # else the error would come after the last file
            raise
    return found


@contextmanager
def _bar(total: int, *, shown: bool) -> Iterator[Any]:
    try:
        from tqdm import tqdm
    except ImportError:
        shown = False
    if not shown:
        yield lambda: None
        return
    with tqdm(total=total, desc="Scanning", unit=" files", dynamic_ncols=True) as bar:
        yield bar.update
