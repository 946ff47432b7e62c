"""Generations of a folder of token shards: the files that it began with, and those that were added later."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from streampack.sources.corpus_identity import first_difference
from streampack.sources.corpus_lists import Entry, changes
from streampack.sources.files import file_sources
from streampack.sources.source import Source
from streampack.storage.folders import Folder, write_file


@dataclass(frozen=True)
class Generation:
    """The files whose rows some lanes of a folder hold; it is saved before the first of their shards.

    So a call with more files knows which of them are new, and can end what an earlier call began.
    """

    plan: Mapping[str, Any]
    """All that decides the bytes of the shards, as plain values."""

    files: Sequence[Entry] | None
    """None for a source that is not made of files, to which nothing can be added."""

    def save(self, folder: Folder, number: int, *, replace: bool) -> None:
        """Save it as the folder's generation of this number; if there is one, only with ``replace``."""
        name = name_of(number)
        with folder.lock(name, way_out="wait until it ends, or stop it"):
            if replace or folder.whole(name) is None:
                content = json.dumps({"plan": self.plan, "files": self.files}, separators=(",", ":")).encode()
                write_file(folder, name, gzip.compress(content, 6, mtime=0))


class Divided(NamedTuple):
    """The files of a corpus as (number in the corpus, name that the file had): of each generation, and the new ones."""

    generations: list[list[tuple[int, str]]]
    new: list[tuple[int, str]]


def read_generations(folder: Folder) -> list[Generation]:
    """Read the generations of a folder.

    Raises:
        ValueError: if one is damaged.
    """
    found: list[Generation] = []
    while (content := folder.whole(name := name_of(len(found)))) is not None:
        try:
            read = json.loads(gzip.decompress(content))
            files = read["files"]
            entries = None if files is None else [Entry(str(a), int(b), str(c)) for a, b, c in files]
            found.append(Generation(dict(read["plan"]), entries))
        except (OSError, EOFError, ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{folder.shown}/{name} is damaged ({error}); restore it from a copy, or give another folder"
            ) from None
    return found


def entries_of(source: Source) -> list[Entry] | None:
    """Return the files of a source; None if it is not made of files."""
    return next((each.listed() for each in file_sources(source).values()), None)


def divided(now: Sequence[Entry], recorded: Sequence[Sequence[Entry]], *, shown: str) -> Divided:
    """Find the files of earlier generations among those of now.

    A file is the same if its size and tag are, and one name is the end of the other: names are relative to the folder
    or pattern that was given, which may be one above.

    >>> divided([Entry("en/a", 1, "x"), Entry("fr/b", 2, "y")], [[Entry("a", 1, "x")]], shown="out")
    Divided(generations=[[(0, 'a')]], new=[(1, 'fr/b')])

    Raises:
        ValueError: if a file is not there any more, or has changed. It names the file.
    """
    left: dict[tuple[int, str, str], list[int]] = {}
    for number, entry in enumerate(now):
        left.setdefault(_key(entry), []).append(number)
    found: dict[tuple[int, int], int] = {}
    before = {(g, f): entry for g, files in enumerate(recorded) for f, entry in enumerate(files)}
    for same in (_same_name, _same_end):  # so that no file is taken for another one that is still there
        for place, entry in before.items():
            alike = left.get(_key(entry), [])
            match = next((n for n in alike if same(now[n].name, entry.name)), None)
            if place not in found and match is not None:
                alike.remove(match)
                found[place] = match
    new = sorted(number for numbers in left.values() for number in numbers)
    if len(found) < len(before):
        lost = [entry for place, entry in before.items() if place not in found]
        raise ValueError(
            f"{shown} holds tokens of files that are not as they were: {_lost(lost, [now[n] for n in new])}. Restore "
            "them; or tokenize to another folder, all files or the new ones alone, as TokenShardSource reads several "
            "folders as one corpus. What is there was left as it is"
        )
    of = [[(found[g, f], entry.name) for f, entry in enumerate(files)] for g, files in enumerate(recorded)]
    return Divided(of, [(number, now[number].name) for number in new])


def require_plan(ours: Mapping[str, Any], theirs: Mapping[str, Any], *, shown: str) -> None:
    """Refuse to go on with shards of another plan.

    Raises:
        ValueError: which names the first setting that differs, and ``shown``.
    """
    if (found := first_difference(theirs, ours)) is not None:
        name, before, now = found
        raise ValueError(
            f"{shown} was made with {name}={before!r} and this is {name}={now!r}; give another folder, or remove the "
            "old shards"
        )


def name_of(number: int) -> str:
    """Return the name of the file of a generation."""
    return f"generation-{number:03d}.json.gz"


def _key(entry: Entry) -> tuple[int, str, str]:
    return entry.size, entry.tag, PurePosixPath(entry.name).name


def _same_name(one: str, other: str) -> bool:
    return one == other


def _same_end(one: str, other: str) -> bool:
    longer, shorter = (one, other) if len(one) > len(other) else (other, one)
    return f"/{longer}".endswith(f"/{shorter}")


def _lost(lost: Iterable[Entry], new: Iterable[Entry]) -> str:
    """Describe files that are gone or have changed."""
    names = {entry.name for entry in lost}
    return changes(list(lost), [entry for entry in new if entry.name in names])
