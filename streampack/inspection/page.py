"""Reports as pages: one HTML file that makes no requests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader

from streampack.inspection.report import Report
from streampack.inspection.tables import lead, report_tables

MOST_BLOCKS = 300
"""Sequences of a pack that are drawn one by one; the others are one block."""

# One for the process, because compiling the template takes longer than writing a page.
ENVIRONMENT = Environment(
    autoescape=True,
    loader=FileSystemLoader(Path(__file__).parent),
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


def render(context: Mapping[str, Any]) -> str:
    """Return a page with the values that page.html names. No text becomes markup: jinja2 escapes them all."""
    return ENVIRONMENT.get_template("page.html").render(context, blocks=MOST_BLOCKS)


def report_page(report: Report) -> str:
    """Return the page of an inspection."""
    return render(
        {
            "title": f"streampack inspect: {report.title}".removesuffix(": "),
            "lead": lead(report),
            "tables": report_tables(report),
            "packs": [(f"lane {pack.lane}, pack {pack.number}", pack) for pack in report.packs],
            "advice": report.advice,
            "assumed": report.assumed,
        }
    )
