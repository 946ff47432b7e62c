"""The report in a terminal, by rich."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from streampack.inspection.packs import LEGEND, draw_packs
from streampack.inspection.report import Report
from streampack.inspection.tables import Table, lead, report_tables

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

WIDTH = 110


def print_report(report: Report, *, console: Console | None = None) -> None:
    """Print a report.

    Raises:
        ImportError: without rich, which the extra ``data`` installs.
    """
    from rich.console import Console

    console = console or Console()
    if not console.is_terminal:  # a file or a pipe has no width of its own
        console.width = WIDTH
    for part in _parts(report, console):
        console.print(part)


def _parts(report: Report, console: Console) -> Iterator[RenderableType]:
    from rich.padding import Padding
    from rich.rule import Rule
    from rich.text import Text

    # All text of the data is a `Text`, in which rich reads no square brackets as styles.
    yield Rule(Text(f"streampack inspect: {report.title}".removesuffix(": ")))
    for line in report.first:
        yield Text(line)
    yield Text(lead(report))
    for table in report_tables(report):
        yield from _table(table)
    if report.packs:
        yield Text("\nThe first packs", style="bold")
        width, colour = min(console.width, WIDTH) - 2, console.color_system is not None
        yield Text.from_ansi(draw_packs(report.packs, width=width, colour=colour))
        yield Text(LEGEND, style="dim")
    yield Text("\nRecommended", style="bold")
    if not report.advice:
        yield Text("nothing: these settings fit the data")
    for advice in report.advice:
        yield Text.assemble((f"{advice.title}: ", "green"), advice.why)
        yield Padding(Text(advice.yaml, style="cyan"), (0, 0, 0, 4))
    yield Text("\nAssumed", style="bold")
    for line in report.assumed:
        yield Text(f"- {line}", style="dim")


def _table(table: Table) -> Iterator[RenderableType]:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as RichTable
    from rich.text import Text

    yield Text(f"\n{table.title}" if table.title else "", style="bold")
    for note in table.notes:
        yield Text(note, style="dim")
    if not table.rows:
        return
    shown = RichTable(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for at, column in enumerate(table.columns):
        shown.add_column(column, justify="left" if at in (0, *table.text) else "right", overflow="fold")
    for number, row in enumerate(table.rows):
        shown.add_row(*map(Text, row), style="bold" if number == table.chosen else None)
    yield shown
