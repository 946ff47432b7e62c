"""A self-contained page: its frame, and tables, bars and facts of plain values. All text is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import NamedTuple

# The page may not load anything, whatever a text of the data says.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'"


class Markup(str):
    """Text that is HTML already; any other text is escaped."""


def markup(value: object) -> Markup:
    """Return a value as HTML.

    >>> markup("a < b"), markup(Markup("<b>"))
    ('a &lt; b', '<b>')
    """
    return value if isinstance(value, Markup) else Markup(escape(str(value)))


def page(title: str, parts: Iterable[Markup]) -> str:
    """Return a document with its styles and script, which asks no server for anything."""
    own = files(__package__)
    style, script = (own.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{markup(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(parts)
        + f"\n</main>\n<script>\n{script}</script>\n</body>\n</html>\n"
    )


def section(title: str, *parts: Markup) -> Markup:
    """Return a heading with what belongs to it."""
    return Markup(f"<section>\n<h2>{markup(title)}</h2>\n" + "\n".join(parts) + "\n</section>")


def paragraph(text: object, *, kind: str = "") -> Markup:
    """Return a paragraph; ``kind`` is its class of styles, such as ``"note"``."""
    return Markup(f'<p class="{kind}">{markup(text)}</p>' if kind else f"<p>{markup(text)}</p>")


def bullets(lines: Iterable[object]) -> Markup:
    """Return a list."""
    return Markup("<ul>" + "".join(f"<li>{markup(line)}</li>" for line in lines) + "</ul>")


class Fact(NamedTuple):
    """A figure with its name, and a note below it."""

    name: str
    value: object
    note: object = ""


def facts(found: Iterable[Fact]) -> Markup:
    """Return the figures that a reader looks for first."""
    each = (
        f"<div><dt>{markup(fact.name)}</dt><dd>{markup(fact.value)}"
        + (f"<small>{markup(fact.note)}</small>" if fact.note else "")
        + "</dd></div>"
        for fact in found
    )
    return Markup('<dl class="facts">' + "".join(each) + "</dl>")


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    caption: str = "",
    chosen: int | None = None,
    text: Sequence[int] = (),
) -> Markup:
    """Return a table whose first column names the row; on a narrow screen each row becomes a card.

    Args:
        columns: names of all columns, the first one's too.
        rows: a value for each column.
        caption: above the table.
        chosen: the number of the row that stands out.
        text: numbers of the columns that hold text; others hold numbers.
    """
    head = "".join(
        f'<th scope="col"{" class=text" if at in text else ""}>{markup(column)}</th>'
        for at, column in enumerate(columns)
    )
    body = []
    for number, row in enumerate(rows):
        cells = "".join(
            f'<td{" class=text" if at in text else ""} data-label="{markup(columns[at])}">'
            f"<span>{markup(value)}</span></td>"
            for at, value in enumerate(row[1:], 1)
        )
        style = ' class="chosen"' if number == chosen else ""
        body.append(f'<tr{style}><th scope="row">{markup(row[0])}</th>{cells}</tr>')
    title = f"<caption>{markup(caption)}</caption>" if caption else ""
    return Markup(
        f'<table class="cards">{title}<thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table>'
    )


class Bar(NamedTuple):
    """A bar of a chart."""

    name: object
    size: float
    note: object
    hatched: float = 0.0  # fraction of the bar, from its end
    over: bool = False  # in the colour of what is lost


def bars(found: Sequence[Bar], *, caption: str, columns: Sequence[str]) -> Markup:
    """Return a chart of horizontal bars, as a table: names, bars, notes."""
    most = max((bar.size for bar in found), default=0) or 1
    rows = []
    for bar in found:
        inner = f'<span class="hatched" style="width:{bar.hatched:.3%};margin-left:auto"></span>'
        drawn = f'<div class="bar{" over" if bar.over else ""}" style="width:{bar.size / most:.3%}">'
        shown = f"{drawn}{inner if bar.hatched else ''}</div>" if bar.size else ""
        rows.append(
            f'<tr><th scope="row">{markup(bar.name)}</th><td>{shown}</td><td>{markup(bar.note)}</td></tr>'
        )
    names = "".join(f'<th scope="col">{markup(column)}</th>' for column in columns)
    return Markup(
        f'<table class="bars"><caption>{markup(caption)}</caption><thead><tr>{names}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )
