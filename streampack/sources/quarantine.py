"""Broken records that a run passes by: a list of them, and how many are too many."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from streampack.plan import require_positive

LONGEST_REASON = 300  # characters: an encoder's message may hold the whole row


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Where the broken records of a run are listed, and how many one lane may have.

    Each lane appends to a file of its own, ``lane-00003.jsonl``, a line for each record: ``shard`` (its name in the
    corpus), ``offset`` (the byte of its line, or its row number) and ``reason``. What a lane's file already
    names is not written again: after a resume, and in later epochs, every record is listed once.

    Args:
        folder: for the files of one stream; None lists nothing.
        limit: of broken records in one lane, over all epochs; counted in its ledger, so that a resume counts on.
    """

    folder: str | None = None
    limit: int = 100
    _known: dict[int, set[tuple[str, int]]] = field(default_factory=dict, compare=False)  # by lane

    def __post_init__(self) -> None:
        require_positive(self.limit, "max_bad_records", least=0)

    def keep(self, lane: int, *, shard: str, offset: int, reason: str) -> None:
        """List one record. One write each, so that a kill leaves at most the newest line torn."""
        if self.folder is None:
            return
        path = Path(self.folder, f"lane-{lane:05d}.jsonl")
        if lane not in self._known:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._known[lane] = _mended(path)
        if (shard, offset) not in self._known[lane]:
            line = json.dumps({"shard": shard, "offset": offset, "reason": reason[:LONGEST_REASON]})
            with path.open("ab", buffering=0) as stream:
                stream.write(line.encode() + b"\n")
            self._known[lane].add((shard, offset))


def _mended(path: Path) -> set[tuple[str, int]]:
    """The records that a file names, after a torn last line was cut off: it is written again."""
    if not path.exists():
        return set()
    lines = path.read_bytes()
    whole = lines.rfind(b"\n") + 1
    if whole < len(lines):
        os.truncate(path, whole)
    entries = map(json.loads, lines[:whole].splitlines())
    return {(entry["shard"], entry["offset"]) for entry in entries}
