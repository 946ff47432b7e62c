"""The results of one device as Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from benchmarks import report
from benchmarks.gpu.settings import ROWS, Settings
from benchmarks.journal import Done, machine_line

HEADER = (
    "batches | real tok/s | x padding | of ceiling | step ms | p10 to p90 | peak GiB | MFU | graphs | padding"
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
    lines = [
        [file, *(f"{row[key]:,}" for key in ("passed", "failed", "skipped")), f"{row['seconds']:.0f}"]
        if "passed" in row
        else [f"{file}: {row['outcome']}"]
        for file, row in sorted(rows.items())
    ]
    names = [f"- **failed**: `{name}`" for row in rows.values() for name in row.get("failures", ())]
    return [
        report.table("tests | passed | failed | skipped | seconds", lines),
        *(["\n".join(names)] if names else []),
    ]


def draw_part(settings: Settings, rows: Mapping[str, Done]) -> list[str]:
    """Format one part: its settings, the table, notes."""
    measured = {name: row for name, row in rows.items() if row["outcome"] == "measured"}
    lines = []
    for name in (name for name in ROWS if name in rows):
        if name in measured:
            lines.append(cells(name, measured))
        else:
            lines.append([f"{ROWS[name].label}: {rows[name]['outcome']}"])
    notes = [
        f"{ROWS[name].label}: {row['passes']} passes for {row['steps']} steps."
        for name, row in measured.items()
        if row["passes"] > row["steps"]
    ]
    if (calls := len({row["call"] for row in rows.values()})) > 1:
        notes.append(f"The rows come from {calls} calls, so ratios are across calls.")
    return [about(settings), report.table(HEADER, lines), *(["\n".join(notes)] if notes else [])]


def cells(name: str, measured: Mapping[str, Done]) -> list[str]:
    """Format one row of the table."""
    row = measured[name]

    def against(other: str, form: str) -> str:
        return format(rate(row) / rate(measured[other]), form) if other in measured else report.NONE

    low, high = row["step_p10_p90"]
    late = row["compiled_late"]
    return [
        ROWS[name].label,
        f"{rate(row):,.0f}",
        against("padding", ".2f"),
        against("ceiling", ".1%"),
        f"{row['step_median'] * 1e3:,.0f}",
        f"{low * 1e3:,.0f} to {high * 1e3:,.0f}",
        report.NONE if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.1f}",
        report.NONE if row["mfu"] is None else f"{row['mfu']:.1%}",
        f"{row['compiled']}" + f" ({late} late)" * (late > 0),
        f"{row['padding']:.2%}",
    ]


def about(settings: Settings) -> str:
    """Describe the settings."""
    switch = {True: "on", False: "off"}
    return (
        f"max_seq_len {settings.max_seq_len:,}; {settings.lengths}-like lengths, cut off there; "
        f"about {settings.tokens_per_step:,} real tokens a step, {settings.warmup} + 1 steps to warm up. "
        f"Model {settings.model}, {settings.dtype}, random weights; fused AdamW; activation checkpointing "
        f"{switch[settings.activation_checkpointing]}, layers compiled {switch[settings.compile]}; "
        f"passes of at most {settings.most_places:,} places; seed {settings.seed}."
    )
