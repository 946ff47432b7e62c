"""Plumbing of all benchmarks: command lines, time and memory, the machine of a result, tables and result files."""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import NamedTuple, TypeVar

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
NONE = "-"  # an empty cell
T = TypeVar("T")


# Commands and their results.


def parser(description: str | None, *, smoke: str) -> argparse.ArgumentParser:
    """Return a parser with the options ``--smoke`` and ``--out``; ``smoke`` says what the former runs."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--smoke", action="store_true", help=f"a quick check that it runs: {smoke}, no file")
    made.add_argument("--out", type=Path, help="folder of the result file (benchmarks/results)")
    return made


def publish(
    options: argparse.Namespace, name: str, title: str, *sections: str, packages: Iterable[str] = ()
) -> None:
    """Print a result, and write it to ``<name>-<machine>-<date>.md`` unless it is that of ``--smoke``.

    Args:
        options: of `parser`.
        name: of the benchmark.
        title: of the page; the line below it names the machine.
        sections: what follows: how it was measured, tables.
        packages: whose versions that line gives, besides streampack's and torch's.
    """
    text = "\n\n".join([f"# {title}", machine_line("streampack", "torch", *packages), *sections])
    print(text)
    if options.out or not options.smoke:
        print(f"\nwritten to {write((options.out or RESULTS) / page_of(name), text)}")


def page_of(name: str) -> str:
    """Return the file name of a result of today on this machine."""
    return f"{name}-{slug(f'{cpu_model()} {cpu_count()} cores')}-{date.today()}.md"


def write(path: Path, text: str) -> Path:
    """Write a text with one newline at its end, make folders that are missing, and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.rstrip() + "\n", encoding="utf-8")
    return path


def progress(total: int) -> Callable[[str], None]:
    """Return a function to call as each of ``total`` steps begins; it writes a line to stderr."""
    steps = iter(range(1, total + 1))
    return lambda step: print(f"[{next(steps, total)}/{total}] {step}", file=sys.stderr)


# Time and memory.


class Cost(NamedTuple):
    """Time of a run."""

    seconds: float  # elapsed
    cpu: float  # seconds of this process and of those that it started and waited for


def timed(run: Callable[[], T]) -> tuple[Cost, T]:
    """Run once; return the cost and the result."""
    begun, cpu = time.perf_counter(), _cpu_seconds()
    result = run()
    return Cost(time.perf_counter() - begun, _cpu_seconds() - cpu), result


def _cpu_seconds() -> float:
    return time.process_time() + sum(os.times()[2:4])


def take_turns(
    ways: Mapping[str, Callable[[], T]], *, rounds: int
) -> tuple[dict[str, list[float]], dict[str, T]]:
    """Run all ways one after the other, again and again.

    Load of the machine falls on all ways of a round, so ratios within a round hold. The first round warms up.

    Returns:
        The elapsed seconds of the later rounds of each way, and its last result.
    """
    done = [{way: timed(run) for way, run in ways.items()} for _ in range(rounds + 1)]
    seconds = {way: [each[way][0].seconds for each in done[1:]] for way in ways}
    return seconds, {way: result for way, (_, result) in done[-1].items()}


def quotients(values: Iterable[float], others: Iterable[float]) -> list[float]:
    """Divide the values of some rounds by others of the same rounds."""
    return [value / other for value, other in zip(values, others, strict=True)]


def median_and_range(values: Sequence[float]) -> tuple[str, str]:
    """Format the median of some rounds, and their range.

    >>> median_and_range([0.75, 1.0, 2.0])
    ('1.00', '0.75 to 2.00')
    """
    return f"{statistics.median(values):.2f}", f"{min(values):.2f} to {max(values):.2f}"


def give_memory_back() -> None:
    """Return freed memory to the system where the libc can (glibc), so that the next allocation is of fresh pages.

    Without it, a later round of a floor may find pages or not: a factor of three.
    """
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def resident_memory(field: str) -> int | None:
    """Return the bytes of ``VmRSS`` (now) or ``VmHWM`` (peak) of this process; None where there is no /proc.

    (``ru_maxrss`` would not do: a process inherits it from the one that started it.)
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    found = re.search(rf"^{field}:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


# The machine.


def cpu_model() -> str:
    """Return the CPU's name as the system gives it."""
    try:
        names = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def cpu_count() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def slug(name: str) -> str:
    """Turn a name into letters, digits and dashes, for a file name.

    >>> slug("AMD EPYC (2 cores)")
    'amd-epyc-2-cores'
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def versions(*packages: str) -> str:
    """Return the installed version of each package as one line."""
    found = []
    for package in packages:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            found.append(f"{package} not installed")
    return ", ".join(found)


def machine_line(*packages: str) -> str:
    """Return date, machine and versions, the line under a result's title."""
    memory = ""
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = f", {os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB"
    return (
        f"{date.today()} · {cpu_model()}, {cpu_count()} cores{memory} · {platform.system()} · "
        f"Python {platform.python_version()}, {versions(*packages)}"
    )


def table(header: str, rows: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table with aligned columns: the first to the left, the others to the right.

    The header has `` | `` between its columns. Rows may be shorter; their last cells are empty.

    >>> print(table("packer | packs | padding", [["ours", "3", "1.5%"], ["theirs: not installed"]]))
    | packer                | packs | padding |
    | --------------------- | ----: | ------: |
    | ours                  |     3 |    1.5% |
    | theirs: not installed |     - |       - |
    """
    columns = header.split(" | ")
    lines = [columns, *([*row, *[NONE] * (len(columns) - len(row))] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines.insert(1, rule)
    return "\n".join(
        "| " + " | ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) + " |"
        for line in lines
    )
