"""The results as Markdown tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks import report
from benchmarks.paper.settings import ROWS, Row, Settings

Done = Mapping[str, Any]
Seeds = list[Done]  # of one row, in the order of their seeds
HEADER = (
    "method | a step | rows | steps | padding | seconds | real tok/s | x padding | peak MiB | "
    "train loss | validation loss"
)
PADDING, FLATTENED = "samples/random_padding", "samples/minibatch_packing"


def draw(data: Mapping[str, Settings], done: Iterable[Done]) -> str:
    """Format all results, which are rows of the settings in ``data`` for any seed, and all were measured."""
    rows = sorted(done, key=lambda row: row["seed"])
    loads = [row["load"] for row in rows]
    sections = [
        "# Every method of batching, after one epoch",
        report.machine_line("streampack", "torch", "torchtune"),
        "Explained in ../README.md; conclusions are in ../../docs/guides/methods.md.",
        f"The system's load was {statistics.median(loads):.1f} when rows ended (median; {min(loads):.1f} to "
        f"{max(loads):.1f}): above the number of cores, others used the machine too.",
    ]
    for name, settings in data.items():
        found = {row: [each for each in rows if (each["part"], each["row"]) == (name, row)] for row in ROWS}
        if found := {row: seeds for row, seeds in found.items() if seeds}:
            lines = [cells(ROWS[row], seeds, found[PADDING], settings) for row, seeds in found.items()]
            sections += [f"## {name}", about(settings, found[PADDING]), report.table(HEADER, lines)]
    return "\n\n".join(sections)


def about(settings: Settings, seeds: Seeds) -> str:
    """Describe the settings of a data set."""
    one = seeds[0]
    floor = (
        "" if one["floor"] is None else f" No model can have a lower validation loss than {one['floor']:.3f}."
    )
    return (
        f"{one['samples']:,} samples, {one['tokens']:,} tokens; max_seq_len {settings.max_seq_len:,}; mini-batches of "
        f"{settings.batch_size} samples; model tiny, fp32; AdamW, learning rate {settings.lr:g}; "
        f"{settings.validation:,} samples held out. Seeds {', '.join(str(each['seed']) for each in seeds)}: "
        f"medians of seconds and memory, means of losses ± their spread.{floor}"
    )


def cells(row: Row, seeds: Seeds, padded: Seeds, settings: Settings) -> list[str]:
    """Format one row of the table."""
    peaks = [done["peak_bytes"] for done in seeds if done["peak_bytes"] is not None]
    count = seeds[0]["batch_size"]
    unit = "sample" if row.step == "samples" else "pack"
    faster = f", lr x {seeds[0]['lr'] / settings.lr:.1f}" if row.step == "scaled" else ""
    return [
        row.method,
        f"{count} {unit}{'s' * (count != 1)}{faster}",
        f"{seeds[0]['rows']:,}",
        f"{seeds[0]['steps']:,}",
        f"{statistics.median(done['padding'] for done in seeds):.1%}",
        f"{statistics.median(done['seconds'] for done in seeds):.1f}",
        f"{rate(seeds):,.0f}",
        f"{rate(seeds) / rate(padded):.2f}",
        f"{statistics.median(peaks) / 2**20:,.0f}" if peaks else report.NONE,
        *(
            f"{statistics.fmean(done[loss] for done in seeds):.3f} ± {spread(seeds, loss):.3f}"
            for loss in ("train_loss", "validation_loss")
        ),
    ]


def rate(seeds: Seeds) -> float:
    """Return the median over seeds of the real tokens a second."""
    return statistics.median(row["tokens"] / row["seconds"] for row in seeds)


def spread(seeds: Seeds, name: str) -> float:
    """Return the standard deviation over seeds, 0 for a single one."""
    return statistics.stdev(row[name] for row in seeds) if len(seeds) > 1 else 0.0
