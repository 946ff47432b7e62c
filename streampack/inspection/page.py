"""Reports as pages: one HTML file, which asks no server for anything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from streampack.inspection.packs import COLOURS, PackView
from streampack.inspection.report import Advice, Report
from streampack.inspection.tables import Table, lead, report_tables
from streampack.packing.groups import ROOT

MOST_BLOCKS = 300
"""Sequences of a pack that are drawn one by one; the rest is one block."""


class Line(NamedTuple):
    """A metric, drawn."""

    name: str
    points: str
    band: str  # of many points: the lowest and the highest of each part, so that spikes stay
    gaps: list[str]  # places of values that are no numbers


class Chart(NamedTuple):
    """A picture of one or two metrics."""

    title: str
    unit: str
    lines: list[Line]
    ticks: list[tuple[int, str]]
    first: str
    last: str


def page(
    title: str,
    said: str,
    tables: Sequence[Table],
    *,
    packs: Sequence[tuple[str, PackView]] = (),
    charts: Sequence[Chart] = (),
    advice: Sequence[Advice] | None = None,
    mask: PackView | None = None,
    assumed: Sequence[str] = (),
    settings: str = "",
) -> str:
    """Return a page. Whatever the texts say, none of them becomes markup: jinja2 escapes them all."""
    environment = Environment(
        autoescape=True,
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        title=title,
        lead=said,
        tables=tables,
        packs=packs,
        blocks=MOST_BLOCKS,
        charts=charts,
        advice=advice,
        mask=[] if mask is None else list(_mask(mask)),
        assumed=assumed,
        settings=settings,
    )


def report_page(report: Report) -> str:
    """Return the page of an inspection."""
    return page(
        f"streampack inspect: {report.title}" if report.title else "streampack inspect",
        lead(report),
        report_tables(report),
        packs=[(f"lane {pack.lane}, pack {pack.number}", pack) for pack in report.packs],
        advice=report.advice,
        mask=report.packs[0] if report.packs else None,
        assumed=report.assumed,
    )


def _mask(pack: PackView) -> Iterator[tuple[int, str]]:
    """Yield which tokens (rows) attend to which (columns) as paths with their colours: a triangle for each sequence.

    Of a group there is a rectangle besides for each segment that a segment continues.
    """
    scale = 400 / pack.max_seq_len
    for number, sequence in enumerate(pack.sequences):
        start, stop = sequence.start * scale, sequence.stop * scale
        yield number % len(COLOURS), f"M{start:.2f} {start:.2f}V{stop:.2f}H{stop:.2f}Z"
        parent = sequence.parent
        while parent != ROOT:
            before = pack.sequences[parent]
            left, right = before.start * scale, (before.start + before.length) * scale
            yield parent % len(COLOURS), f"M{left:.2f} {start:.2f}V{stop:.2f}H{right:.2f}V{start:.2f}Z"
            parent = before.parent
