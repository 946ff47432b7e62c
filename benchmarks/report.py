"""Helpers of all benchmarks: the machine and versions of a result, memory, tables, result files, a progress bar."""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import platform
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from importlib import metadata
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
NONE = "-"  # an empty cell


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


def proportional_memory(processes: Iterable[int]) -> int | None:
    """Return the ``Pss`` of some processes in bytes, which counts a page that they share once; None without /proc."""
    total = 0
    for process in processes:
        try:
            rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
        except OSError:
            return None
        found = re.search(r"^Pss:\s+(\d+) kB$", rollup, re.MULTILINE)
        total += int(found[1]) * 1024 if found else 0
    return total


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


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table with aligned columns: the first to the left, the others to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines.insert(1, rule)
    return "\n".join(
        "| " + " | ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) + " |"
        for line in lines
    )


def median_and_range(values: Sequence[float]) -> tuple[str, str]:
    """Format the median of some rounds, and their range.

    >>> median_and_range([0.75, 1.0, 2.0])
    ('1.00', '0.75 to 2.00')
    """
    return f"{statistics.median(values):.2f}", f"{min(values):.2f} to {max(values):.2f}"


def parser(description: str | None, *, smoke: str) -> argparse.ArgumentParser:
    """Return a parser with the options ``--smoke`` and ``--out``; ``smoke`` says what the former runs."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--smoke", action="store_true", help=f"a quick check that it runs: {smoke}, no file")
    made.add_argument("--out", type=Path, help="folder of the result file (benchmarks/results)")
    return made


def publish(name: str, options: argparse.Namespace, *sections: str) -> None:
    """Print a result, and write it to ``<name>-<machine>-<date>.md`` unless it is that of ``--smoke``."""
    print("\n\n".join(sections))
    if options.out or not options.smoke:
        print(f"\nwritten to {save(name, *sections, folder=options.out or RESULTS)}")


def save(name: str, *sections: str, folder: Path = RESULTS) -> Path:
    """Write ``<name>-<machine>-<date>.md`` and return its path."""
    machine = slug(f"{cpu_model()} {cpu_count()} cores")
    return write(folder / f"{name}-{machine}-{date.today()}.md", "\n\n".join(sections))


def write(path: Path, text: str) -> Path:
    """Write a text with one newline at its end, make folders that are missing, and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.rstrip() + "\n", encoding="utf-8")
    return path


def progress(total: int) -> Callable[[str], None]:
    """Show a progress bar on stderr, plain lines without tqdm; return a function to call as each step begins."""
    begun = 0
    try:
        from tqdm import tqdm
    except ImportError:
        bar = None
    else:
        layout = "{desc:44.44} {percentage:3.0f}% |{bar}| {elapsed}"
        bar = tqdm(total=total, file=sys.stderr, dynamic_ncols=True, leave=False, bar_format=layout)

    def begin(step: str) -> None:
        nonlocal begun
        begun += 1
        if bar is None:
            print(f"[{begun}/{total}] {step}", file=sys.stderr)
        else:
            bar.n = begun - 1
            bar.set_description_str(step)

    return begin
