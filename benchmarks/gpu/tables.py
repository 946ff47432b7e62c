"""The results of one device as Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks import report
from benchmarks.gpu.journal import Done, machine_line
from benchmarks.gpu.settings import ROWS, Settings

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
    """Return the real tokens a second."""
    return float(row["tokens"] / row["seconds"])


def draw(parts: Mapping[str, Settings | None], done: Iterable[Done]) -> str:
    """Format all results of one device and torch. ``done`` are rows of the settings in ``parts``."""
    found: dict[str, dict[str, Done]] = {part: {} for part in parts}
    for row in done:
        found[row["part"]][row["row"]] = row
    rows = [row for part in found.values() for row in part.values()]
    sections = [f"# Training on {rows[0]['device']}", machine_line(rows), "Explained in ../README.md."]
    for part, settings in parts.items():
        if found[part]:
            sections.append(f"## {part}")
            sections += draw_tests(found[part]) if settings is None else draw_part(settings, found[part])
    return "\n\n".join(sections)


def draw_tests(rows: Mapping[str, Done]) -> list[str]:
    """Format the results of the tests marked gpu."""
    lines = []
    for file, row in sorted(rows.items()):
        if "passed" in row:
            counts = [f"{row[key]:,}" for key in ("passed", "failed", "skipped")]
            lines.append([file, *counts, f"{row['seconds']:.0f}"])
        else:
            lines.append([f"{file}: {row['outcome']}", *[report.NONE] * 4])
    names = [f"- **failed**: `{name}`" for row in rows.values() for name in row.get("failures", ())]
    table = report.table(("tests", "passed", "failed", "skipped", "seconds"), lines)
    return [table, *(["\n".join(names)] if names else [])]


def draw_part(settings: Settings, rows: Mapping[str, Done]) -> list[str]:
    """Format one part: its settings, the table, notes."""
    measured = {name: row for name, row in rows.items() if row["outcome"] == "measured"}
    lines = []
    for name in ROWS:
        if name in measured:
            lines.append(cells(name, measured))
        elif name in rows:
            lines.append([f"{ROWS[name].label}: {rows[name]['outcome']}", *[report.NONE] * (len(HEADER) - 1)])
    return [about(settings), report.table(HEADER, lines), *notes(rows, measured)]


def cells(name: str, measured: Mapping[str, Done]) -> list[str]:
    """Format one row of the table."""
    row = measured[name]

    def against(other: str, form: str) -> str:
        return format(rate(row) / rate(measured[other]), form) if other in measured else report.NONE

    def shown(value: float | None, form: str) -> str:
        return report.NONE if value is None else format(value, form)

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
    """Describe the settings."""
    return (
        f"max_seq_len {settings.max_seq_len:,}; {settings.lengths}-like lengths, cut off there; "
        f"about {settings.tokens_per_step:,} real tokens a step, {settings.warmup} + 1 steps to warm up. "
        f"Model {settings.model}, {settings.dtype}, random weights; fused AdamW; "
        f"activation checkpointing {on(settings.activation_checkpointing)}, layers compiled {on(settings.compile)}; "
        f"passes of at most {settings.most_places:,} places; seed {settings.seed}."
    )


def on(value: bool) -> str:
    """Name the state of a switch."""
    return "on" if value else "off"


def notes(rows: Mapping[str, Done], measured: Mapping[str, Done]) -> list[str]:
    """Note what the table does not show of its rows."""
    lines = []
    for name, row in measured.items():
        if row["passes"] > row["steps"]:
            lines.append(f"{ROWS[name].label}: {row['passes']} passes for {row['steps']} steps.")
    calls = {row["call"] for row in rows.values()}
    if len(calls) > 1:
        lines.append(f"The rows come from {len(calls)} calls, so ratios are across calls.")
    return ["\n".join(lines)] if lines else []


def save(text: str, device: str, folder: Path) -> Path:
    """Write the tables of one device to its file, and return the path."""
    return report.write(folder / f"gpu-{report.slug(device)}.md", text)
