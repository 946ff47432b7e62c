"""Rows that a later call need not measure again: one JSON object a line, on the disk as soon as it is measured.

``python -m benchmarks.journal cuda`` prints device and versions as JSON. It has a process of its own, because one that
initialises CUDA holds half a gigabyte of the device.
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks import report

Done = Mapping[str, Any]
Key = tuple[str, ...]
KEYS = ("device", "torch", "part", "settings", "row")
PACKAGES = ("torch", "triton", "torchtune", "torchao", "transformers", "flash-attn", "flash-attn-4")


class Journal:
    """The rows of one file, by their values of `KEYS`; of equal ones the last counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self.rows = {key_of(row): row for row in map(json.loads, filter(None, lines))}

    def add(self, row: Done) -> None:
        """Write a row; a call that is killed meanwhile leaves the file as it was."""
        self.rows[key_of(row)] = row
        self._write()

    def forget(self, keys: Iterable[Key]) -> None:
        """Drop rows, to measure them again."""
        for key in keys:
            self.rows.pop(key, None)
        self._write()

    def _write(self) -> None:
        temporary = report.write(
            self.path.with_suffix(".new"), "\n".join(json.dumps(row) for row in self.rows.values())
        )
        temporary.replace(self.path)


def key_of(row: Done) -> Key:
    """Return the values that identify a row."""
    return tuple(row[key] for key in KEYS)


def settings_key(settings: Any) -> str:
    """Return a short hash of a dataclass of settings: a row measured with others does not count."""
    return hashlib.sha256(json.dumps(asdict(settings), sort_keys=True).encode()).hexdigest()[:12]


def machine_line(rows: Sequence[Done]) -> str:
    """Return days, device and versions of some rows, the line under a result's title."""
    latest = max(rows, key=lambda row: row["call"])
    days = sorted({row["call"][:10] for row in rows})
    return f"{' to '.join(dict.fromkeys((days[0], days[-1])))} · {latest['device']} · {latest['about']}"


def failed(row: Done) -> bool:
    """Return whether a row failed. Running out of memory, and a package that is not installed, are no failures."""
    return str(row["outcome"]).startswith("failed")


def this_call(device: str) -> dict[str, str]:
    """Describe this call, in a process of its own: ``device`` and ``torch``, ``about`` the machine, and the time."""
    command = [sys.executable, "-m", "benchmarks.journal", device]
    run = subprocess.run(command, cwd=report.ROOT, capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(run.stderr.strip().splitlines()[-1])
    return {**json.loads(run.stdout), "call": datetime.now().isoformat(timespec="seconds")}


def describe(device: str) -> dict[str, str]:
    """Describe the device that torch calls ``device``.

    Raises:
        ValueError: if it is ``"cuda"`` and torch sees none.
    """
    import torch

    name, memory = f"{report.cpu_model()}, {report.cpu_count()} cores", ""
    if device != "cpu":
        if not torch.cuda.is_available():
            raise ValueError(f"torch {torch.__version__} sees no CUDA device; set DEVICE=cpu, or find one")
        properties = torch.cuda.get_device_properties(device)
        name = properties.name
        memory = f"{properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda} · "
    about = f"{memory}{platform.system()} · Python {platform.python_version()}, {report.versions(*PACKAGES)}"
    return {"device": name, "torch": torch.__version__, "about": about}


if __name__ == "__main__":
    print(json.dumps(describe(sys.argv[1])))
