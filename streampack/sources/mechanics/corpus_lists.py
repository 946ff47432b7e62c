"""Lists of a corpus's files and of the parts of its lanes, kept so that a run can continue when files change."""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from streampack.sources.mechanics.parts import REMOVED_FILE, Part
from streampack.storage.folders import write_whole

SHOWN = 3  # names of files in a message


class Entry(NamedTuple):
    """A file as it was listed; ``tag`` is its ETag or a hash of its ends."""

    name: str
    size: int
    tag: str


@dataclass(frozen=True)
class CorpusList:
    """The files of a corpus, and the parts that each lane reads of them.

    It is written once, as ``<digest>-<lanes>.json.gz``. Lane states count parts, so a run that continues without some
    files needs the parts as they were.
    """

    files: Sequence[Entry]
    lanes: Sequence[Sequence[Part]]

    def save(self, folder: Path, digest: str) -> None:
        """Write the list, unless it is there."""
        path = _path(folder, digest, len(self.lanes))
        if path.exists():
            return
        folder.mkdir(parents=True, exist_ok=True)
        content = json.dumps({"files": self.files, "lanes": self.lanes}, separators=(",", ":")).encode()
        write_whole(path, gzip.compress(content, 6, mtime=0))

    @classmethod
    def load(cls, folder: Path, digest: str, num_lanes: int) -> CorpusList:
        """Read a list that `save` wrote; raise ValueError if it is missing or damaged."""
        path = _path(folder, digest, num_lanes)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise ValueError(
                f"{path} is missing: the list of the files that the run began with. A run can continue with other "
                "files only where it kept their lists (corpus_lists) before they changed"
            ) from None
        try:
            found = json.loads(gzip.decompress(content))
            files = [Entry(str(name), int(size), str(tag)) for name, size, tag in found["files"]]
            lanes = [[Part(*map(_number, part)) for part in lane] for lane in found["lanes"]]
        except (gzip.BadGzipFile, EOFError, ValueError, TypeError, KeyError, zlib.error) as error:
            raise ValueError(f"{path} is damaged ({error}); restore it from a copy") from None
        if len(lanes) != num_lanes or any(not 0 <= part.file < len(files) for lane in lanes for part in lane):
            raise ValueError(f"{path} is damaged: its parts do not fit its files; restore it from a copy")
        return cls(files, lanes)

    def parts_in(self, newer: Sequence[Sequence[Entry]]) -> list[list[Part]]:
        """Return the parts of each lane, with the numbers of the files in the last of some ``newer`` lists.

        Those of a file that is not in all of these lists, with the same content, get the number `REMOVED_FILE`.
        """
        found = zip(*(moves(self.files, files) for files in newer), strict=True)
        now = [REMOVED_FILE if None in numbers else numbers[-1] for numbers in found]
        return [[part._replace(file=now[part.file]) for part in lane] for lane in self.lanes]


def moves(before: Sequence[Entry], now: Sequence[Entry]) -> list[int | None]:
    """Return the number in a newer list of each file of an older one; None if its content is not there any more.

    A file of another name is the same one if the content is, and if no file of that content has the old name.

    >>> moves([Entry("a", 1, "x"), Entry("b", 1, "y")], [Entry("b", 1, "y"), Entry("c", 1, "z")])
    [None, 0]
    >>> moves([Entry("a", 1, "x")], [Entry("b", 1, "x")])
    [0]
    """
    numbers: list[int | None] = [None] * len(before)
    left = dict(enumerate(now))
    for first in (0, 1):  # compare names, and then the rest without them
        places: dict[Any, list[int]] = {}
        for number, entry in reversed(left.items()):
            places.setdefault(entry[first:], []).append(number)
        for i, entry in enumerate(before):
            if numbers[i] is None and (same := places.get(entry[first:])):
                left.pop(number := same.pop())
                numbers[i] = number
    return numbers


def changes(before: Sequence[Entry], now: Sequence[Entry], *, paths: Sequence[str] = ()) -> str:
    """Describe which files were added, removed, changed and renamed; those of ``now`` by their ``paths``, if given.

    >>> changes([Entry("a", 1, "x"), Entry("b", 1, "y")], [Entry("b", 2, "z"), Entry("c", 1, "w")])
    '1 added (c), 1 removed (a), 1 changed (b)'
    """
    numbers = moves(before, now)
    kept = {number: entry.name for number, entry in zip(numbers, before, strict=True) if number is not None}
    gone = Counter(entry.name for number, entry in zip(numbers, before, strict=True) if number is None)
    found: dict[str, list[str]] = {"added": [], "removed": [], "changed": [], "renamed": []}
    for number, (entry, path) in enumerate(zip(now, paths or [entry.name for entry in now], strict=True)):
        if number not in kept:
            found["changed" if gone[entry.name] else "added"].append(path)
            gone[entry.name] -= bool(gone[entry.name])
        elif kept[number] != entry.name:
            found["renamed"].append(path)
    found["removed"] += gone.elements()
    return ", ".join(f"{len(files):,} {what} ({some(files)})" for what, files in found.items() if files)


def some(names: Sequence[str]) -> str:
    """Return the first names of files, for a message."""
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")


def _path(folder: Path, digest: str, num_lanes: int) -> Path:
    return folder / f"{digest}-{num_lanes}.json.gz"


def _number(value: Any) -> Any:
    if value is not None and type(value) is not int:
        raise TypeError(f"{value!r} is no number")
    return value
