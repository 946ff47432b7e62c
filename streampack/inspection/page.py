"""Reports as pages: one HTML file, which asks no server for anything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from streampack.inspection.packs import PackView
from streampack.inspection.report import Advice, Report
from streampack.inspection.tables import Table, lead, report_tables

MOST_BLOCKS = 300
"""Sequences of a pack that are drawn one by one; the rest is one block."""

# One of the process: it keeps the template, which takes longer to compile than a page to write.
ENVIRONMENT = Environment(
    autoescape=True,
    loader=FileSystemLoader(Path(__file__).parent),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


class Chart(NamedTuple):
    """A chart of one or two metrics over the steps."""

    title: str
    lines: dict[str, str]  # by name, the points of a polyline
    low: str
    high: str
    first: str  # step
    last: str


def page(
    title: str,
    said: str,
    tables: Sequence[Table],
    *,
    packs: Sequence[tuple[str, PackView]] = (),
    charts: Sequence[Chart] = (),
    advice: Sequence[Advice] | None = None,
    assumed: Sequence[str] = (),
    settings: str = "",
) -> str:
    """Return a page. Whatever the texts say, none of them becomes markup: jinja2 escapes them all."""
    return ENVIRONMENT.get_template("page.html").render(
        title=title,
        lead=said,
        tables=tables,
        packs=packs,
        blocks=MOST_BLOCKS,
        charts=charts,
        advice=advice,
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
        assumed=report.assumed,
    )
