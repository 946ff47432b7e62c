"""Broken records, and parts of files that cannot be read, which a run skips: a list of them, and a limit."""

from __future__ import annotations

import json
import logging
import os
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from streampack.sources.mechanics.files import file_sources
from streampack.sources.source import Source
from streampack.storage.base import redact, summarize
from streampack.types import RowId
from streampack.validation import require_positive, warn_user, wrong_arguments

log = logging.getLogger(__name__)
LONGEST_REASON = 300  # characters; the rest is cut off, as an encoder's message may hold the whole row
BAD_RECORDS_FOLDER = "bad_records"  # the default folder, within a run's output folder
REPORTED_KINDS = 3  # kinds of reasons that a report counts
LONGEST_KIND = 60  # characters of a kind of reason in a report
MAX_LOGGED = 10  # records that each process logs if no folder lists them
BAD_FRACTION = 0.01  # the default limit
MOST_UNJUDGED = 100  # bad records of a lane that no fraction forbids: of the first rows it would tell nothing


@dataclass(frozen=True, slots=True)
class Quarantine:
    """A list of the bad records of a run, with a limit for each lane. A part that cannot be read is one bad record.

    Each lane appends to its own file, such as ``lane-00003.jsonl``, which has a line for each record: ``path`` (of its
    file, or the URL, where it is in one), ``place`` (the same with the line, where lines are cheap to count),
    ``offset`` (the byte at which its line, or what is left of its file, begins, or its row number) and ``reason``. A
    lane lists a record once, also if later epochs or a resume read it again. In a mixture, later passes over a source
    are read by other lanes, which list it, too; reports count it once.

    Args:
        folder: where the files of one stream are written, on this machine. Without one nothing is listed, and each
            process logs the first ten records that it skips.
        limit: the most bad records that one lane may skip in one pass over its rows; or, below 1, which fraction of
            the rows that it read, where they are more than 100. So a record counts once in all epochs.
        quiet: if there is no folder, do not log records either.

    Raises:
        ValueError: for a limit that is none, or a folder that cannot be made.
    """

    folder: str | os.PathLike[str] | None = None
    limit: int | float = BAD_FRACTION
    quiet: bool = False
    # For each lane, the (path or place, offset) of the records that its file lists, and the file's size with them. A
    # worker that is started again, and another dataset, have an older set than the file.
    _known: dict[int, tuple[set[tuple[str, int]], int]] = field(
        default_factory=dict, init=False, compare=False
    )
    _logged: set[str] = field(default_factory=set, init=False, compare=False)  # places
    _warned_of: set[str] = field(default_factory=set, init=False, compare=False)  # files

    def __post_init__(self) -> None:
        limit: object = self.limit
        if not isinstance(limit, float):
            require_positive(limit, "skip_bad.limit", least=0)
        elif not 0 < limit < 1:
            raise ValueError(
                f"skip_bad.limit={self.limit} is neither a whole number nor a fraction between 0 and 1"
            )
        if self.folder is None:
            return
        if not isinstance(self.folder, str | os.PathLike):
            raise ValueError(f"skip_bad.folder={self.folder!r} is no path; name a folder of this machine")
        if "://" in (given := os.fspath(self.folder)):
            raise ValueError(f"skip_bad.folder={redact(given)!r} is a URL; name a folder of this machine")
        folder = str(Path(given).expanduser())
        object.__setattr__(self, "folder", folder)
        paths = (Path(folder), *Path(folder).absolute().parents)
        there = next(path for path in paths if os.access(path, os.F_OK) or path.is_symlink())
        if not there.is_dir():
            raise ValueError(
                f"skip_bad.folder={folder!r} cannot be made: {there} is no folder; name another one"
            )

    def within(self, name: str) -> Quarantine:
        """Return one with the same limit that lists in a folder within this one's."""
        return replace(self, folder=None if self.folder is None else Path(self.folder, name))

    def skip(self, lane: int, *, source: Source, row_id: RowId, reason: str, before: int, rows: int) -> None:
        """List a record that a lane skips; raise ValueError if it has reached the limit.

        It has skipped ``before`` others in this pass over its rows, and has read ``rows`` in all passes.
        """
        of_rows = isinstance(self.limit, float)
        if before >= (max(MOST_UNJUDGED, self.limit * rows) if of_rows else self.limit):
            raise ValueError(
                f"{source.locate(row_id)}: {reason}; lane {lane} has skipped {before:,} others"
                f"{f' of the {rows:,} rows that it read' if of_rows else ''}, and skip_bad.limit={self.limit} lets no "
                "more pass: look at them, and raise it if they may be skipped"
            )
        if self.folder is None:
            self._log(source.locate(row_id), reason)
            return
        file, path = Path(self.folder, f"lane-{lane:05d}.jsonl"), source.path_of(row_id)
        key = (path or source.locate(row_id), row_id[-1])
        # The lane's records are forgotten during the write: if that is interrupted, nobody knows whether the line is
        # there, and the next call reads the file again.
        known, size = self._known.pop(lane, (set(), -1))
        if not file.exists() or file.stat().st_size != size:
            known = _begun(file)
        if key not in known:
            entry: dict[str, Any] = {} if path is None else {"path": path}
            entry |= {"place": source.locate(row_id), "offset": row_id[-1], "reason": reason[:LONGEST_REASON]}
            line = json.dumps(entry)
            with file.open("ab", buffering=0) as stream:  # a kill can cut off only the newest line
                stream.write(line.encode() + b"\n")
            known.add(key)
        self._known[lane] = known, file.stat().st_size

    def _log(self, place: str, reason: str) -> None:
        if self.quiet or len(self._logged) > MAX_LOGGED or place in self._logged:
            return
        self._logged.add(place)
        if len(self._logged) > MAX_LOGGED:
            log.warning(
                "more records are skipped, and only counted; set skip_bad to a folder to list them all"
            )
        else:
            log.warning("skipped %s: %s", place, reason[:LONGEST_REASON])

    def report(self) -> str:
        """Count the listed records by the kind of reason, and name the first; empty if none is listed."""
        files = sorted(Path(self.folder).glob("lane-*.jsonl")) if self.folder is not None else []
        found: dict[tuple[str, int], dict[str, Any]] = {}
        for path in files:
            for entry in _entries(b"" if path.is_symlink() else path.read_bytes()):
                found.setdefault(_key(entry), entry)
        if not (entries := list(found.values())):
            return ""
        kinds = Counter(kind_of(entry["reason"]) for entry in entries).most_common(REPORTED_KINDS)
        counts = ", ".join(f"{count:,} {kind[:LONGEST_KIND]}" for kind, count in kinds)
        return f"{len(entries):,} listed in {self.folder}: {counts}; the first is {entries[0]['place']}"


def kind_of(reason: str) -> str:
    """Return what the reasons of records that fail alike have in common: the first clause, without numbers.

    >>> kind_of("ValueError: 'tokens' has 2 entries and 'labels' has 1; labels are unshifted")
    "'tokens' has N entries and 'labels' has N"
    """
    return re.sub(r"\d+", "N", re.split(r"[;(]|: ", reason.removeprefix("ValueError: "))[0]).strip()


SkipBad: TypeAlias = bool | float | str | os.PathLike[str] | Mapping[str, Any] | Quarantine | None


def quarantine_for(skip_bad: SkipBad, *, folder: str | os.PathLike[str] | None = None) -> Quarantine | None:
    """Make the quarantine of a run; return None if a bad record is an error.

    >>> found = quarantine_for({"limit": 7}, folder="bad")
    >>> found.limit, found.folder
    (7, 'bad')

    Args:
        skip_bad: False or None; True; the limit; the folder; or both, as a mapping too.
        folder: of the lists if ``skip_bad`` has none.

    Raises:
        ValueError: for anything else, and as `Quarantine`.
    """
    if skip_bad is None or skip_bad is False:
        return None
    if isinstance(skip_bad, Quarantine):
        found = skip_bad
    elif skip_bad is True:
        found = Quarantine()
    elif isinstance(skip_bad, int | float):
        found = Quarantine(limit=skip_bad)
    elif isinstance(skip_bad, str | os.PathLike):
        found = Quarantine(skip_bad)
    elif isinstance(skip_bad, Mapping):
        for problem in wrong_arguments(Quarantine, skip_bad):
            raise ValueError(f"skip_bad {problem}")
        found = Quarantine(**skip_bad)
    else:
        raise ValueError(
            f"skip_bad={skip_bad!r} is a {type(skip_bad).__name__}; give True or False, a limit, a folder, or a "
            "mapping of folder and limit"
        )
    return found if folder is None or found.folder is not None else replace(found, folder=folder)


def require_sound(source: Source, quarantine: Quarantine | None) -> None:
    """Warn once of the files that cannot be read; raise ValueError, naming ten, if bad records are not skipped."""
    leaves = file_sources(source).values()
    if not (bad := [problem for each in leaves for problem in each.bad_files()]):
        return
    files = sum(len(each.files) for each in leaves)
    if quarantine is None:
        raise ValueError(
            f"{summarize(bad, files=files)}; restore them, remove them from the corpus, or skip them with "
            "skip_bad=True"
        )
    new = {shown: reason for shown, reason in bad if shown not in quarantine._warned_of}
    if new and not quarantine.quiet:
        quarantine._warned_of.update(new)
        shown, reason = next(iter(new.items()))
        warn_user(
            f"{len(new):,} of {files:,} files cannot be read and are skipped; the first is {shown}: {reason}"
        )


def _begun(path: Path) -> set[tuple[str, int]]:
    """Return the keys of the records that a lane's file lists. An incomplete last line is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():  # or others who may write to the folder could have any file cut and written to
        raise ValueError(f"{path} is a link, and is not followed; remove it, or name another folder")
    if not path.exists():
        return set()
    lines = path.read_bytes()
    whole = lines.rfind(b"\n") + 1
    if whole < len(lines):
        os.truncate(path, whole)
    return {_key(entry) for entry in _entries(lines)}


def _key(entry: Mapping[str, Any]) -> tuple[str, int]:
    return entry.get("path", entry["place"]), entry["offset"]


def _entries(lines: bytes) -> list[dict[str, Any]]:
    """Return the entries of a list, without lines that are damaged: a kill, a full disk, a lane that is writing it."""
    found = []
    for line in lines.split(b"\n")[:-1]:
        with suppress(ValueError):
            entry = json.loads(line)
            kinds = {"place": str, "reason": str, "offset": int}
            if isinstance(entry, dict) and {key: type(entry.get(key)) for key in kinds} == kinds:
                found.append(entry)
    return found
