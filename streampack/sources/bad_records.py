"""Broken records and bad shards that a run skips: a list of them, and limits."""

from __future__ import annotations

import json
import logging
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import NoneType
from typing import Any, TypeAlias
from zlib import crc32

from streampack.sources.files import file_sources
from streampack.sources.source import Source
from streampack.storage.base import redact
from streampack.storage.problems import summarize
from streampack.types import RowId
from streampack.validation import require_positive, unknown_arguments, warn_user

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
    """A list of the broken records and the bad shards of a run, with limits for each lane.

    Each lane appends to its own file, such as ``lane-00003.jsonl``, which has a line for each record: ``path`` (of its
    file, or the URL, where it is in one), ``place`` (the same with the line, where lines are cheap to count), ``shard``
    (the name of the file in the corpus), ``offset`` (the byte at which its line begins, or its row number) and
    ``reason``. A lane lists a record once, also if later epochs or a resume
    read it again. In a mixture, later passes over a source are read by other lanes, which list it, too; reports count
    it once. A bad shard has a line in each lane that has rows of it: ``path``, ``shard``, ``reason``, and in place of
    ``offset`` what is known of the rows that the lane loses, ``rows`` or ``bytes``.

    Args:
        folder: where the files of one stream are written, on this machine. Without one nothing is listed, and each
            process logs the first ten records and shards that it skips.
        limit: the most broken records that one lane may skip in one pass over its rows; or, below 1, which fraction of
            the rows that it read, where they are more than 100. So a record counts once in all epochs.
        shard_limit: the most bad shards (files that are empty, gone, or of another kind or schema) that one lane may
            leave out, over all epochs and resumes.
        quiet: if there is no folder, do not log records either.

    Raises:
        ValueError: for a limit that is none, or a folder that cannot be made.
    """

    folder: str | os.PathLike[str] | None = None
    limit: int | float = BAD_FRACTION
    shard_limit: int = 10
    quiet: bool = False
    # For each lane, the (shard, offset) of the records that its file lists; a bad shard has no offset.
    _known: dict[int, set[tuple[str, int | None]]] = field(default_factory=dict, init=False, compare=False)
    _logged: list[str] = field(default_factory=list, init=False, compare=False)  # places

    def __post_init__(self) -> None:
        limit: object = self.limit
        if not isinstance(limit, float):
            require_positive(limit, "skip_bad.limit", least=0)
        elif not 0 < limit < 1:
            raise ValueError(
                f"skip_bad.limit={self.limit} is neither a whole number nor a fraction between 0 and 1"
            )
        require_positive(self.shard_limit, "skip_bad.shard_limit", least=0)
        if self.folder is not None:
            if not isinstance(self.folder, str | os.PathLike):
                raise ValueError(f"skip_bad.folder={self.folder!r} is no path; name a folder of this machine")
            object.__setattr__(self, "folder", folder := os.fspath(self.folder))
            if "://" in folder:
                raise ValueError(
                    f"skip_bad.folder={redact(folder)!r} is a URL; name a folder of this machine"
                )
            paths = (Path(folder), *Path(folder).absolute().parents)
            there = next(path for path in paths if os.access(path, os.F_OK) or path.is_symlink())
            if not there.is_dir():
                raise ValueError(
                    f"skip_bad.folder={folder!r} cannot be made: {there} is no folder; name another one"
                )

    def within(self, name: str) -> Quarantine:
        """Return one with the same limits that lists in a folder within this one's."""
        return replace(self, folder=None if self.folder is None else Path(self.folder, name))

    def skip(self, lane: int, *, source: Source, row_id: RowId, reason: str, before: int, rows: int) -> None:
        """List a record that a lane skips.

        Args:
            lane: which lane skips it.
            source: of the run.
            row_id: of the record.
            reason: why it is skipped.
            before: how many other records the lane has skipped in this pass over its rows.
            rows: how many rows it has read in all passes.

        Raises:
            ValueError: if there are as many others as the limit allows.
        """
        of_rows = isinstance(self.limit, float)
        if before >= (max(MOST_UNJUDGED, self.limit * rows) if of_rows else self.limit):
            raise ValueError(
                f"{source.locate(row_id)}: {reason}; lane {lane} has skipped {before:,} others"
                f"{f' of the {rows:,} rows that it read' if of_rows else ''}, and skip_bad.limit={self.limit} lets no "
                "more pass: look at them, and raise it if they may be left out"
            )
        path, place = source.path_of(row_id), source.locate(row_id)
        self.append(
            lane, shard=source.shard(row_id), offset=row_id[-1], reason=reason, path=path, place=place
        )

    def leave_out(
        self,
        lane: int,
        *,
        source: Source,
        row_id: RowId,
        reason: str,
        lost: Mapping[str, int],
        known: Sequence[int],
    ) -> list[int]:
        """List a bad shard unless the lane has listed it before.

        Args:
            lane: which lane leaves it out.
            source: of the run.
            row_id: of a record in the shard.
            reason: why it cannot be read.
            lost: what is known of the rows that the lane loses.
            known: checksums of the names of the bad shards that the lane has left out so far.

        Returns:
            ``known`` with this shard.

        Raises:
            ValueError: if it has left out as many others as the limit allows.
        """
        shard, path = source.shard(row_id), source.path_of(row_id)
        checksum = crc32(shard.encode("utf-8", "surrogateescape"))
        if checksum in known:
            return list(known)
        if len(known) >= self.shard_limit:
            raise ValueError(
                f"{path or shard}: {reason}; lane {lane} has left out {self.shard_limit} bad shards before this one: "
                "look at them, and raise skip_bad.shard_limit if they may be left out"
            )
        self.append(lane, shard=shard, offset=None, reason=reason, path=path, place=None, **lost)
        return [*known, checksum]

    def append(
        self,
        lane: int,
        *,
        shard: str,
        offset: int | None,
        reason: str,
        path: str | None = None,
        place: str | None = None,
        **lost: int,
    ) -> None:
        """List one record, or a bad shard, which has no offset.

        Its line is written at once, so a kill can cut off only the newest line.
        """
        if self.folder is None:
            if not self.quiet:
                self._log(place or path or shard, reason)
            return
        file = Path(self.folder, f"lane-{lane:05d}.jsonl")
        if lane not in self._known:
            file.parent.mkdir(parents=True, exist_ok=True)
            if file.is_symlink():  # whoever may write to the folder could have any file cut and written to
                raise ValueError(f"{file} is a link, and is not followed; remove it, or name another folder")
            self._known[lane] = _listed(file)
        if (shard, offset) not in self._known[lane]:
            entry = {"path": path, "place": place, "shard": shard, "offset": offset}
            entry |= {"reason": reason[:LONGEST_REASON], **lost}
            line = json.dumps({name: value for name, value in entry.items() if value is not None})
            # The lane's records are forgotten during the write: if that is interrupted, nobody knows whether the line
            # is there, and the next call reads the file again.
            known = self._known.pop(lane)
            with file.open("ab", buffering=0) as stream:
                stream.write(line.encode() + b"\n")
            known.add((shard, offset))
            self._known[lane] = known

    def _log(self, place: str, reason: str) -> None:
        if len(self._logged) > MAX_LOGGED or place in self._logged:
            return
        self._logged.append(place)
        if len(self._logged) > MAX_LOGGED:
            log.warning(
                "more records are skipped, and only counted; set skip_bad to a folder to list them all"
            )
        else:
            log.warning("skipped %s: %s", place, reason[:LONGEST_REASON])

    def report(self) -> str:
        """Count the listed records by the kind of reason, and name the first; empty if none is listed."""
        files = sorted(Path(self.folder).glob("lane-*.jsonl")) if self.folder is not None else []
        found: dict[tuple[str, int | None], dict[str, Any]] = {}
        for path in files:
            for entry in _entries(b"" if path.is_symlink() else path.read_bytes()):
                found.setdefault((entry["shard"], entry.get("offset")), entry)
        if not (entries := list(found.values())):
            return ""
        kinds = Counter(kind_of(entry["reason"]) for entry in entries).most_common(REPORTED_KINDS)
        first = entries[0]
        counts = ", ".join(f"{count:,} {kind[:LONGEST_KIND]}" for kind, count in kinds)
        where = first.get("place", first.get("path", first["shard"]))
        return f"{len(entries):,} listed in {self.folder}: {counts}; the first is {where}"


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
    >>> found.limit, found.shard_limit, found.folder
    (7, 10, 'bad')

    Args:
        skip_bad: False or None; True; the limit; the folder; or all of it, as a mapping too.
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
        for problem in unknown_arguments(Quarantine, map(str, skip_bad)):
            raise ValueError(f"skip_bad {problem}")
        found = Quarantine(**skip_bad)
    else:
        raise ValueError(
            f"skip_bad={skip_bad!r} is a {type(skip_bad).__name__}; give True or False, a limit, a folder, or a "
            "mapping of folder, limit and shard_limit"
        )
    return found if folder is None or found.folder is not None else replace(found, folder=folder)


def require_sound(source: Source, quarantine: Quarantine | None) -> None:
    """Warn once of the bad shards of a source that are known so far, and let it do without files that are gone.

    Raises:
        ValueError: if bad records are not skipped; it names ten of the shards.
    """
    leaves = file_sources(source).values()
    for each in leaves:
        each.corpus.tolerant = quarantine is not None
    if not (bad := [problem for each in leaves for problem in each.bad_shards()]):
        return
    files = sum(len(each.files) for each in leaves)
    if quarantine is None:
        raise ValueError(
            f"{summarize(bad, files=files)}; restore them, remove them from the corpus, or leave them out with "
            "skip_bad=True"
        )
    told = [each.warned_of for each in leaves]
    new = [problem for problem in bad if not any(problem[0] in each for each in told)]
    if new and not quarantine.quiet:
        for known in told:
            known.update(shown for shown, _ in new)
        shown, reason = new[0]
        warn_user(
            f"{len(new):,} of {files:,} files cannot be read and are left out; the first is {shown}: {reason}"
        )


def _listed(path: Path) -> set[tuple[str, int | None]]:
    """Return the (shard, offset) of the records that a file lists. An incomplete last line is removed from the file."""
    if not path.exists():
        return set()
    lines = path.read_bytes()
    whole = lines.rfind(b"\n") + 1
    if whole < len(lines):
        os.truncate(path, whole)
    return {(entry["shard"], entry.get("offset")) for entry in _entries(lines)}


def _entries(lines: bytes) -> list[dict[str, Any]]:
    """Return the entries of a list, without lines that are damaged: a kill, a full disk, a lane that is writing it."""
    found = []
    for line in lines.split(b"\n")[:-1]:
        with suppress(ValueError):
            entry = json.loads(line)
            known = isinstance(entry, dict) and [
                type(entry.get(key)) for key in ("shard", "reason", "offset")
            ]
            if known in ([str, str, int], [str, str, NoneType]):
                found.append(entry)
    return found
