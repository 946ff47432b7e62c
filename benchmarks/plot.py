"""Draw the newest results of growth and straggling as docs/pictures/cost.svg: ``python -m benchmarks.plot``."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from benchmarks import report

PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "cost.svg"
TITLE = "Cost of a token over max_seq_len and corpus size; cost of the dearest rank over contexts and ranks"
STYLE = {
    "svg.fonttype": "none",  # text stays text, in the font of the page's reader
    "svg.hashsalt": "streampack",  # the same results make the same file
    "font.size": 11,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
}
PLANNED, EVENED = "#c44e00", "#0060b0"  # apart also for readers who do not see red and green
Table = list[dict[str, str]]


def newest(name: str, folder: Path = report.RESULTS) -> Path:
    """Return the newest result of a benchmark, by the date in its name."""
    return max(folder.glob(f"{name}-*.md"), key=lambda path: path.stem[-len("2026-01-01") :])


def tables(path: Path) -> dict[str, Table]:
    """Return the tables of a result by the header of their first column; each row by column."""
    found: dict[str, Table] = {}
    header: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if cells and not header:
            header = cells
            found[header[0]] = []
        elif cells and not set(line) <= set("|-: "):
            found[header[0]].append(dict(zip(header, cells, strict=True)))
        elif not cells:
            header = []
    return found


def short(size: str) -> str:
    """Return a size as the label of a tick.

    >>> short("4,096"), short("1,048,576"), short("100,000")
    ('4k', '1M', '10⁵')
    """
    number = int(size.replace(",", ""))
    if number % 1024:
        return "10" + str(len(str(number)) - 1).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{number >> 20}M" if number >= 1 << 20 else f"{number >> 10}k"


def draw() -> str:
    """Return the picture as SVG.

    Raises:
        ModuleNotFoundError: without matplotlib.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    growth, straggling = tables(newest("growth")), tables(newest("straggling"))["context"]
    with rc_context(STYLE):
        figure = Figure(figsize=(8, 3.2), dpi=100, layout="constrained", facecolor="white")
        over_length, over_corpus, over_ranks = figure.subplots(1, 3, width_ratios=(5, 4, 6))
        cost(over_length, growth["max_seq_len"], "max_seq_len, tokens", title="Longer packs")
        cost(over_corpus, growth["samples"], "corpus, samples", title="A larger corpus")
        most = max(over_length.get_ylim()[1], over_corpus.get_ylim()[1])
        for axes in (over_length, over_corpus):
            axes.set_ylim(0, 1.1 * most)
        imbalance(over_ranks, straggling)
        over_length.set_ylabel("CPU time, ns a token")
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Title": TITLE})
    return out.getvalue()


def cost(axes: Any, rows: Table, label: str, *, title: str) -> None:
    """Draw the cost of a token over the sizes of the first column."""
    sizes = [next(iter(row.values())) for row in rows]
    costs = [1e3 / float(row["Mtok/s"]) for row in rows]
    axes.plot(range(len(rows)), costs, "o-", color=EVENED)
    axes.set_xticks(range(len(rows)), list(map(short, sizes)))
    axes.set_xlabel(label)
    axes.set_title(title, fontsize=11)


def imbalance(axes: Any, rows: Table) -> None:
    """Draw the work of the dearest rank over the mean, as planned and with a window, for each number of ranks."""
    contexts = list(dict.fromkeys(row["context"] for row in rows))
    for column, name, colour in (
        ("as planned", "as planned", PLANNED),
        ("window 64", "window of 64", EVENED),
    ):
        for ranks, line in (("8", "o-"), ("64", "s--")):
            own = [row for row in rows if row["ranks"] == ranks]
            places = [contexts.index(row["context"]) for row in own]
            ratios = [float(row[column]) for row in own]
            axes.plot(places, ratios, line, color=colour, label=f"{name}, {ranks} ranks")
    axes.set_xticks(range(len(contexts)), list(map(short, contexts)))
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("dearest rank / mean of ranks")
    axes.set_title("Waiting for the dearest rank", fontsize=11)
    axes.legend(frameon=False, fontsize=9, loc="upper left")


def save(path: Path = PICTURE) -> Path:
    """Write the picture and return its path."""
    return report.write(path, draw())


if __name__ == "__main__":
    print(save())
