"""Lists of a corpus's files and of the parts of its lanes, kept so that a run can go on when files change."""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from streampack.sources.parts import REMOVED_FILE, Part
from streampack.storage.whole_files import write_whole

SHOWN = 3  # names of files in a message


class Entry(NamedTuple):
    """A file as it was listed; ``tag`` is its ETag or a hash of its ends."""

    name: str
    size: int
    tag: str


@dataclass(frozen=True)
class CorpusList:
    """The files of a corpus, and the parts that each lane reads of them.

    It is written once, as ``<digest>-<lanes>.json.gz``. Lane states count parts, so a run that goes on without some of
    the files needs the parts as they were.
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
        """Read a list that `save` wrote.

        Raises:
            ValueError: if there is none, or it is damaged.
            OSError: if it cannot be read, as without permission.
        """
        path = _path(folder, digest, num_lanes)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise ValueError(
                f"{path} is missing: the list of the files that the run began with. A run can go on with other files "
                "only where it kept their lists (corpus_lists) before they changed"
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
    """Return the number in a newer list of each file of an older one; None if it is not there with the same content.

    >>> moves([Entry("a", 1, "x"), Entry("b", 1, "y")], [Entry("b", 1, "y"), Entry("c", 1, "z")])
    [None, 0]
    """
    places = {key: number for number, key in enumerate(_distinct(now))}
    return [places.get(key) for key in _distinct(before)]


def changes(before: Sequence[Entry], now: Sequence[Entry], *, paths: Sequence[str] = ()) -> str:
    """Describe which files were added, removed and changed; those of ``now`` by their ``paths``, if these are given.

    >>> changes([Entry("a", 1, "x"), Entry("b", 1, "y")], [Entry("b", 2, "z"), Entry("c", 1, "y")])
    '1 added (c), 1 removed (a), 1 changed (b)'
    """
    left = Counter(before)
    came: list[tuple[str, str]] = []
    for entry, path in zip(now, paths or [entry.name for entry in now], strict=True):
        if left[entry]:
            left[entry] -= 1
        else:
            came.append((entry.name, path))
    gone = Counter(entry.name for entry in left.elements())
    found: dict[str, list[str]] = {"added": [], "removed": [], "changed": []}
    for name, path in came:
        found["changed" if gone[name] else "added"].append(path)
        gone[name] -= bool(gone[name])
    found["removed"] += gone.elements()
    return ", ".join(f"{len(files):,} {what} ({_some(files)})" for what, files in found.items() if files)


def renamed(before: Sequence[Entry], now: Sequence[Entry]) -> str | None:
    """Describe that most files have other names, or that none is there any more; None if neither is so.

    >>> renamed([Entry("a", 1, "x"), Entry("b", 1, "y")], [Entry("en/a", 1, "x"), Entry("en/b", 1, "y")])
    '2 of the 2 files that the run began with look renamed: a is now en/a'
    """
    gone, came = Counter(before) - Counter(now), Counter(now) - Counter(before)
    places = {entry[1:]: entry.name for entry in came}
    pairs = Counter(entry[1:] for entry in gone.elements()) & Counter(entry[1:] for entry in came.elements())
    if 2 * pairs.total() > len(before):
        old = next(entry for entry in gone if entry[1:] in pairs)
        what = f"look renamed: {old.name} is now {places[old[1:]]}"
        return f"{pairs.total():,} of the {len(before):,} files that the run began with {what}"
    if {entry.name for entry in before}.isdisjoint(entry.name for entry in now):
        names = [_some([entry.name for entry in each]) for each in (before, now)]
        return (
            f"none of the {len(before):,} files that the run began with ({names[0]}) is there any more; "
            f"there are {names[1]}"
        )
    return None


def _distinct(files: Sequence[Entry]) -> list[tuple[Entry, int]]:
    """Number entries that are equal: copies of a file in two folders are two files."""
    seen: Counter[Entry] = Counter()
    found = []
    for entry in files:
        found.append((entry, seen[entry]))
        seen[entry] += 1
    return found


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")


def _path(folder: Path, digest: str, num_lanes: int) -> Path:
    return folder / f"{digest}-{num_lanes}.json.gz"


def _number(value: Any) -> Any:
    if value is not None and type(value) is not int:
        raise TypeError(f"{value!r} is no number")
    return value
