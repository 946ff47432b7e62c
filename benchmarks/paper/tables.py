"""The rows of one device, drawn as tables, and what they show of the paper's findings."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks import report
from benchmarks.gpu.journal import Done
from benchmarks.paper.settings import ROWS, Row, Settings

Seeds = list[Done]  # of one row, in the order of their seeds
NONE = "-"
HEADER = (
    "method",
    "a step",
    "rows",
    "steps",
    "padding",
    "seconds",
    "real tok/s",
    "x padding",
    "peak MiB",
    "train loss",
    "validation loss",
)
PADDING, FLATTENED = "samples/random_padding", "samples/minibatch_packing"


def draw(data: Mapping[str, Settings], done: Iterable[Done]) -> str:
    """All that was found on one device. ``done`` are rows of the settings in ``data``, but for the seed."""
    rows = sorted(done, key=lambda row: row["seed"])
    latest = max(rows, key=lambda row: row["call"])
    days = sorted({row["call"][:10] for row in rows})
    sections = [
        "# Every method of batching, after one epoch",
        f"{' to '.join(dict.fromkeys((days[0], days[-1])))} · {latest['device']} · {latest['about']}",
        "How to read it: ../README.md. What to take from it: ../../docs/guides/methods.md.",
        *load(rows),
    ]
    for name, settings in data.items():
        found: dict[str, Seeds] = {}
        for row in rows:
            if row["part"] == name:
                found.setdefault(row["row"], []).append(row)
        if found:
            sections += [f"## {name}", *draw_part(settings, found)]
    return "\n\n".join(sections)


def load(rows: Iterable[Done]) -> list[str]:
    """How busy the machine was, in a line."""
    loads = [row["load"] for row in rows if row.get("load") is not None]
    if not loads:
        return []
    return [
        f"The system's load was {statistics.median(loads):.1f} when rows ended (median; {min(loads):.1f} to "
        f"{max(loads):.1f}): above the number of cores, others used the machine too."
    ]


def draw_part(settings: Settings, found: Mapping[str, Seeds]) -> list[str]:
    """One data set: the settings, the table, the findings."""
    measured = {
        name: seeds for name, seeds in found.items() if all(row["outcome"] == "measured" for row in seeds)
    }
    lines = []
    for name, row in ROWS.items():
        if name in measured:
            lines.append(cells(row, measured, settings))
        elif name in found:
            outcome = next(done["outcome"] for done in found[name] if done["outcome"] != "measured")
            lines.append([f"{row.method}: {outcome}", row.step, *[NONE] * (len(HEADER) - 2)])
    shown = [f"- {line}" for line in findings(measured)]
    return [about(settings, measured), report.table(HEADER, lines), *(["\n".join(shown)] if shown else [])]


def about(settings: Settings, measured: Mapping[str, Seeds]) -> str:
    """The settings in words."""
    one = next(iter(measured.values()), [])
    said = [
        f"max_seq_len {settings.max_seq_len:,}; mini-batches of {settings.batch_size * settings.accumulate} samples; "
        f"model {settings.model}, {settings.dtype}; AdamW, learning rate {settings.lr:g}; "
        f"{settings.validation:,} samples held out."
    ]
    if one:
        said.insert(0, f"{one[0]['samples']:,} samples, {one[0]['tokens']:,} tokens;")
        numbers = ", ".join(str(row["seed"]) for row in one)
        said.append(f"Seeds {numbers}: medians of seconds and memory, means of losses ± their spread.")
        if one[0]["floor"] is not None:
            said.append(f"No model can have a lower validation loss than {one[0]['floor']:.3f}.")
    return " ".join(said)


def cells(row: Row, measured: Mapping[str, Seeds], settings: Settings) -> list[str]:
    """One line of the table."""
    seeds = measured[row.name]
    peaks = [done["peak_bytes"] for done in seeds if done["peak_bytes"] is not None]
    return [
        row.method,
        step_in_words(row, seeds[0], settings),
        f"{seeds[0]['rows']:,}",
        f"{seeds[0]['steps']:,}",
        f"{middle(seeds, 'padding'):.1%}",
        f"{middle(seeds, 'seconds'):.1f}",
        f"{rate(seeds):,.0f}",
        f"{rate(seeds) / rate(measured[PADDING]):.2f}" if PADDING in measured else NONE,
        f"{statistics.median(peaks) / 2**20:,.0f}" if peaks else NONE,
        mean_and_spread(seeds, "train_loss"),
        mean_and_spread(seeds, "validation_loss"),
    ]


def step_in_words(row: Row, done: Done, settings: Settings) -> str:
    """What an optimizer step is made of."""
    count = done["batch_size"] * done["accumulate"]
    unit = "sample" if row.step == "samples" else "pack"
    faster = f", lr x {done['lr'] / settings.lr:.1f}" if row.step == "scaled" else ""
    return f"{count} {unit}{'s' * (count != 1)}{faster}"


def middle(seeds: Seeds, name: str) -> float:
    """The median over seeds."""
    return statistics.median(row[name] for row in seeds)


def rate(seeds: Seeds) -> float:
    """Real tokens a second, the median over seeds."""
    return statistics.median(row["tokens"] / row["seconds"] for row in seeds)


def mean_and_spread(seeds: Seeds, name: str) -> str:
    """Mean and standard deviation over seeds."""
    return f"{statistics.fmean(row[name] for row in seeds):.3f} ± {spread(seeds, name):.3f}"


def spread(seeds: Seeds, name: str) -> float:
    """The standard deviation over seeds; 0 for a single one."""
    return statistics.stdev(row[name] for row in seeds) if len(seeds) > 1 else 0.0


def findings(measured: Mapping[str, Seeds]) -> list[str]:
    """The three findings of the paper, with the figures that show them here, or do not, and what a learning rate mends.

    Rows are compared seed by seed, and a difference counts as shown if every seed has it.
    """
    said = []
    if {PADDING, FLATTENED} <= measured.keys():
        apart = max(map(abs, gaps(measured, FLATTENED, PADDING)))
        noise = spread(measured[PADDING], "validation_loss")
        pairs = zip(measured[FLATTENED], measured[PADDING], strict=True)
        times = [padded["seconds"] / flat["seconds"] for flat, padded in pairs]  # of the same tokens
        said.append(
            f"{verdict(apart <= noise and min(times) > 1)}: mini-batch packing ends with padding's validation loss "
            f"(at most {apart:.5f} apart, {noise:.5f} between seeds) at {min(times):.2f} to {max(times):.2f} times its "
            "token rate."
        )
    for step in ("wide", "narrow"):
        leaky, kept = f"{step}/fixed_length", f"{step}/fixed_length_posid"
        if {leaky, kept} <= measured.keys():
            worse = gaps(measured, leaky, kept)
            said.append(
                f"{verdict(min(worse) > 0)}: {step} steps, fixed-length packing without position ids ends higher than "
                f"with them, by {in_words(worse)}."
            )
    # Not of sorted packing: what it ends with hangs on its order, the shortest samples last, more than on its steps.
    worse = [
        gap
        for row in ROWS.values()
        if row.step == "wide" and row.method != "sorted_packing"
        if {row.name, f"narrow/{row.method}"} <= measured.keys()
        for gap in gaps(measured, row.name, f"narrow/{row.method}")
    ]
    if worse:
        said.append(
            f"{verdict(min(worse) > 0)}: with fewer, wider steps, the same packs (but for sorted ones) end higher than "
            f"with narrow ones, by {in_words(worse)}."
        )
    wide, narrow, scaled = (f"{step}/exact_fit" for step in ("wide", "narrow", "scaled"))
    if {wide, narrow, scaled} <= measured.keys():
        lost, won = (statistics.fmean(gaps(measured, wide, other)) for other in (narrow, scaled))
        times = measured[scaled][0]["lr"] / measured[wide][0]["lr"]
        said.append(
            f"Of the {lost:.3f} nats that its wide steps cost `exact_fit`, {times:.1f} times the learning rate wins "
            f"back {won:.3f}."
        )
    return said


def gaps(measured: Mapping[str, Seeds], one: str, other: str) -> list[float]:
    """By how much the validation loss of one row is above the other's, seed by seed."""
    pairs = zip(measured[one], measured[other], strict=True)
    return [a["validation_loss"] - b["validation_loss"] for a, b in pairs]


def in_words(values: Sequence[float]) -> str:
    """A range of losses."""
    return f"{min(values):+.3f} to {max(values):+.3f} nats"


def verdict(holds: bool) -> str:
    """In a word or two."""
    return "**Shown**" if holds else "**Not shown**"


def save(text: str, device: str, name: str, folder: Path = report.RESULTS) -> Path:
    """Write the table and return where; a GPU's name stands before the CPU's."""
    gpu = "" if device == "cpu" else "-" + re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return report.save(f"paper{gpu}", text, folder)
