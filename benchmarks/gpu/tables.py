"""The rows of one device, drawn as tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks import report
from benchmarks.gpu.journal import Done
from benchmarks.gpu.settings import ROWS, Settings

NONE = "-"
HEADER = (
    "batches",
    "real tok/s",
    "x padding",
    "of ceiling",
    "step ms",
    "p10 to p90",
    "peak GiB",
    "MFU",
    "graphs",
    "padding",
)


def rate(row: Done) -> float:
    """Real tokens a second."""
    return float(row["tokens"] / row["seconds"])


def draw(parts: Mapping[str, Settings | None], done: Iterable[Done]) -> str:
    """All that was found on one device with one torch. ``done`` are rows of the settings in ``parts``."""
    found: dict[str, dict[str, Done]] = {part: {} for part in parts}
    for row in done:
        found[row["part"]][row["row"]] = row
    rows = [row for part in found.values() for row in part.values()]
    latest = max(rows, key=lambda row: row["call"])
    days = sorted({row["call"][:10] for row in rows})
    sections = [
        f"# Training on {latest['device']}",
        f"{' to '.join(dict.fromkeys((days[0], days[-1])))} · {latest['device']} · {latest['about']}",
        "How to read it: ../README.md.",
    ]
    for part, settings in parts.items():
        if found[part]:
            sections.append(f"## {part}")
            sections += draw_tests(found[part]) if settings is None else draw_part(settings, found[part])
    return "\n\n".join(sections)


def draw_tests(rows: Mapping[str, Done]) -> list[str]:
    """What became of the tests marked gpu."""
    lines = []
    for file, row in sorted(rows.items()):
        if "passed" in row:
            counts = [f"{row[key]:,}" for key in ("passed", "failed", "skipped")]
            lines.append([file, *counts, f"{row['seconds']:.0f}"])
        else:
            lines.append([f"{file}: {row['outcome']}", *[NONE] * 4])
    names = [f"- **failed**: `{name}`" for row in rows.values() for name in row.get("failures", ())]
    table = report.table(("tests", "passed", "failed", "skipped", "seconds"), lines)
    return [table, *(["\n".join(names)] if names else [])]


def draw_part(settings: Settings, rows: Mapping[str, Done]) -> list[str]:
    """One table, with the settings above and what must be said below."""
    measured = {name: row for name, row in rows.items() if row["outcome"] == "measured"}
    lines = []
    for name in ROWS:
        if name in measured:
            lines.append(cells(name, measured))
        elif name in rows:
            lines.append([f"{ROWS[name].label}: {rows[name]['outcome']}", *[NONE] * (len(HEADER) - 1)])
    return [about(settings), report.table(HEADER, lines), *notes(rows, measured)]


def cells(name: str, measured: Mapping[str, Done]) -> list[str]:
    """One line of the table."""
    row = measured[name]

    def against(other: str, form: str) -> str:
        return format(rate(row) / rate(measured[other]), form) if other in measured else NONE

    def shown(value: float | None, form: str) -> str:
        return NONE if value is None else format(value, form)

    low, high = row["step_p10_p90"]
    late = row["compiled_late"]
    return [
        ROWS[name].label,
        f"{rate(row):,.0f}",
        against("padding", ".2f"),
        against("ceiling", ".1%"),
        f"{row['step_median'] * 1e3:,.0f}",
        f"{low * 1e3:,.0f} to {high * 1e3:,.0f}",
        shown(row["peak_bytes"] and row["peak_bytes"] / 2**30, ".1f"),
        shown(row["mfu"], ".1%"),
        f"{row['compiled']}" + f" ({late} late)" * (late > 0),
        f"{row['padding']:.2%}",
    ]


def about(settings: Settings) -> str:
    """The settings in words."""
    return (
        f"max_seq_len {settings.max_seq_len:,}; {settings.lengths}-like lengths, cut off there; "
        f"about {settings.tokens_per_step:,} real tokens a step, {settings.warmup} + 1 steps to warm up. "
        f"Model {settings.model}, {settings.dtype}, random weights; fused AdamW; "
        f"activation checkpointing {on(settings.activation_checkpointing)}, layers compiled {on(settings.compile)}; "
        f"passes of at most {settings.most_places:,} places; seed {settings.seed}."
    )


def on(value: bool) -> str:
    """A switch in a word."""
    return "on" if value else "off"


def notes(rows: Mapping[str, Done], measured: Mapping[str, Done]) -> list[str]:
    """What a reader must know of these rows."""
    said = []
    for name, row in measured.items():
        if row["passes"] > row["steps"]:
            said.append(f"{ROWS[name].label}: {row['passes']} passes for {row['steps']} steps.")
    calls = {row["call"] for row in rows.values()}
    if len(calls) > 1:
        said.append(f"The rows come from {len(calls)} calls, so ratios are across calls.")
    return ["\n".join(said)] if said else []


def save(text: str, device: str, folder: Path) -> Path:
    """Write the table and return where. One file for each device: it grows as parts are done."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"gpu-{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.md"
    path.write_text(text.rstrip() + "\n", encoding="utf-8")
    return path
