"""Results on disk, one JSON object a line, each written as it is measured, so that a later call can skip it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

Done = Mapping[str, Any]
Key = tuple[str, ...]
KEYS = ("device", "torch", "part", "settings", "row")


def key_of(done: Done) -> Key:
    """Return the values that identify a row."""
    return tuple(done[key] for key in KEYS)


def settings_key(settings: Any) -> str:
    """Return a short hash of a dataclass of settings."""
    return hashlib.sha256(json.dumps(asdict(settings), sort_keys=True).encode()).hexdigest()[:12]


def machine_line(rows: Sequence[Done]) -> str:
    """Return days, device and versions of some rows, the line under a result's title."""
    latest = max(rows, key=lambda row: row["call"])
    days = sorted({row["call"][:10] for row in rows})
    return f"{' to '.join(dict.fromkeys((days[0], days[-1])))} · {latest['device']} · {latest['about']}"


class Journal:
    """The rows of one file, by key.

    The last line of a key counts. The last line of the file may be incomplete, after a call that was killed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[Key, Done] = {}
        self._incomplete = False
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            self._incomplete = False
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                self._incomplete = True
                continue
            self.rows[key_of(row)] = row

    def add(self, row: Done) -> None:
        """Write a row; it is on the disk when this returns."""
        if self._incomplete:
            self._rewrite()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.rows[key_of(row)] = row

    def forget(self, keys: Container[Key]) -> None:
        """Drop rows, to measure them again."""
        self.rows = {key: row for key, row in self.rows.items() if key not in keys}
        if self.path.exists():
            self._rewrite()

    def _rewrite(self) -> None:
        temporary = self.path.with_suffix(".new")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in self.rows.values()), encoding="utf-8")
        temporary.replace(self.path)
        self._incomplete = False
