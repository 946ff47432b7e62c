"""The plot of the docs: that it shows the kept results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import plot


def test_tables_are_read_by_their_first_column() -> None:
    growth = plot.tables(plot.newest("growth"))
    assert [row["max_seq_len"] for row in growth["max_seq_len"]][::5] == ["1,024", "1,048,576"]
    assert [row["samples"] for row in growth["samples"]] == ["10,000", "100,000", "1,000,000", "10,000,000"]
    kept = plot.newest("straggling").read_text()
    for row in plot.tables(plot.newest("straggling"))["context"]:
        assert re.search(
            rf"^\| {row['context']} +\|.* {row['as planned']} \|.* {row['window 64']} \|", kept, re.M
        )


def test_the_newest_result_is_taken(tmp_path: Path) -> None:
    for name in ("growth-b-machine-2026-01-02", "growth-a-machine-2026-02-01", "growth-c-machine-2025-12-31"):
        (tmp_path / f"{name}.md").touch()
    assert plot.newest("growth", tmp_path).stem == "growth-a-machine-2026-02-01"


def test_the_plot_shows_every_row_of_the_kept_results() -> None:
    """Where it does not, ``python -m benchmarks.plot`` was not run after the benchmarks."""
    pytest.importorskip("matplotlib")  # of the extra bench
    drawn = plot.draw()
    assert plot.PICTURE.read_text() == drawn
    growth, straggling = plot.tables(plot.newest("growth")), plot.tables(plot.newest("straggling"))["context"]
    points = len(growth["max_seq_len"]) + len(growth["samples"]) + 2 * len(straggling)
    in_legend = 4
    assert (
        len(re.findall(r'<use xlink:href="#m\w+" x="[\d.]+" y="[\d.]+" style="fill: #', drawn))
        == points + in_legend
    )
