"""The record of a run: what it logged, as JSON lines in its ``output_dir``, whatever metric logger the config names."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
"""The file in ``output_dir`` that rank 0 writes."""


class MetricRecord:
    """Appends one JSON line a log to a file: ``step`` and the numbers by name. NaN and infinities become null.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), METRICS_FILE)
    >>> MetricRecord(path).write({"loss": 2.5, "padding": 0.01}, step=1)
    >>> MetricRecord(path, resumed=1).write({"loss": 2.25}, step=2)
    >>> read_metrics(path)
    {1: {'loss': 2.5, 'padding': 0.01}, 2: {'loss': 2.25}}

    Args:
        path: of the file. Its folder is made with the first line.
        resumed: the step from which the run goes on. Lines of later steps, which are trained again, are removed, and
            all lines of an earlier run if this one is new (None).
    """

    def __init__(self, path: Path, *, resumed: int | None = None) -> None:
        self.path = path
        keep_until(path, resumed)

    def write(self, values: Mapping[str, Any], *, step: int) -> None:
        """Append the numbers of a step."""
        numbers = {name: _number(value) for name, value in values.items()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_dumps({"step": step, **numbers}))


def keep_until(path: Path, step: int | None) -> None:
    """Remove the lines of later steps from a file of JSON lines, if there is one; all of it if ``step`` is None."""
    if step is None:
        path.unlink(missing_ok=True)
    elif path.exists():
        part = path.with_suffix(".part")
        with part.open("w", encoding="utf-8") as file:
            file.writelines(_dumps(line) for line in read_lines(path) if line["step"] <= step)
        part.replace(path)


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    """Return the numbers of each step by name, in order; of a name that a step has twice, the last one. Null is NaN.

    Returns an empty dict if there is no file.
    """
    steps: dict[int, dict[str, float]] = {}
    for line in read_lines(path) if path.exists() else ():
        step = line.pop("step")
        numbers = {name: math.nan if value is None else value for name, value in line.items()}
        steps.setdefault(step, {}).update(numbers)
    return dict(sorted(steps.items()))


def _number(value: Any) -> int | float | None:
    """Return a number, which may be a tensor, as JSON has it; None if it is not finite."""
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else None


def _dumps(line: Mapping[str, Any]) -> str:
    return json.dumps(line, separators=(",", ":")) + "\n"


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file; not its last one if that is cut off, because the run was killed."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)
