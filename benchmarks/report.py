"""What every result says of the machine it came from, and how a table is drawn and kept."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from importlib import metadata
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def give_memory_back() -> None:
    """Give what was freed back to the system, so that what is allocated next is fresh; where the libc can (glibc).

    Without it, luck decides whether a later round of a floor has pages or waits for them: a factor of three.
    """
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def cpu_model() -> str:
    """The CPU's name as the system gives it."""
    try:
        names = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def cpu_count() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device() -> str:
    """The machine in a few letters that fit in a file name, such as ``amd-epyc-2-cores``."""
    return re.sub(r"[^a-z0-9]+", "-", f"{cpu_model()} {cpu_count()} cores".lower()).strip("-")


def versions(*packages: str) -> str:
    """The installed version of each package, in words."""
    found = []
    for package in packages:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            found.append(f"{package} not installed")
    return ", ".join(found)


def row_id(*packages: str) -> str:
    """Date, machine and versions, as the lines that stand under a result's title."""
    memory = ""
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = f", {os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB"
    return (
        f"{date.today()} · {cpu_model()}, {cpu_count()} cores{memory} · {platform.system()} · "
        f"Python {platform.python_version()}, {versions(*packages)}"
    )


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table with aligned columns: the first to the left, the others to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines.insert(1, rule)
    return "\n".join(
        "| " + " | ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) + " |"
        for line in lines
    )


def save(stem: str, text: str, folder: Path = RESULTS) -> Path:
    """Write ``<stem>-<device>-<date>.md`` and return where."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}-{device()}-{date.today()}.md"
    path.write_text(text.rstrip() + "\n", encoding="utf-8")
    return path


def progress(total: int) -> Callable[[str], None]:
    """A progress bar on stderr: call it as each step begins. Plain lines where tqdm is not installed."""
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
