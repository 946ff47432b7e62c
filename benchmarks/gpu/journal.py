"""The rows that are done, one JSON object a line, kept as each one ends: what a later call need not do again."""

from __future__ import annotations

import json
import os
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

Done = Mapping[str, Any]
Key = tuple[str, ...]
KEYS = ("device", "torch", "part", "settings", "row")


def key_of(done: Done) -> Key:
    """What makes a row the same row."""
    return tuple(done[key] for key in KEYS)


class Journal:
    """The rows of one file, by key; the last line of a key counts. A call that was killed may have torn its last."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[Key, Done] = {}
        self._torn = False
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            self._torn = False
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                self._torn = True
                continue
            self.rows[key_of(row)] = row

    def add(self, row: Done) -> None:
        """Keep a row, on the disk when this returns."""
        if self._torn:
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
        beside = self.path.with_suffix(".new")
        beside.write_text("".join(json.dumps(row) + "\n" for row in self.rows.values()), encoding="utf-8")
        beside.replace(self.path)
        self._torn = False
