from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from streampack.inspection.page_report import report_page
from streampack.inspection.report import Report, SourceShare
from streampack.inspection.survey import inspect_dataset
from streampack.inspection.terminal import print_report
from tests.harness.inspection import dataset


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return inspect_dataset(
        dataset("chat", tmp_path_factory.mktemp("chat")), rows=None, title="a [bold]title[/bold]"
    )


def printed(report: Report, *, width: int = 110, terminal: bool = False) -> str:
    text = io.StringIO()
    print_report(report, console=Console(file=text, width=width, force_terminal=terminal))
    return text.getvalue()


def test_the_figures_are_those_of_the_report(report: Report) -> None:
    shown = printed(report)
    assert f"padding {100 * report.chosen.padding:.2f} %, {report.chosen.steps:,.0f} steps an epoch" in shown
    for outcome in report.outcomes:
        lines = [line for line in shown.splitlines() if line.startswith(f"{outcome.name} ")]
        assert any(
            f"{100 * outcome.padding:.2f} %" in line and f"{outcome.tokens:,.0f}" in line for line in lines
        )
    for loss in report.losses:
        assert f"{loss.rows:,}" in shown
    assert all(advice.title in shown for advice in report.advice)


def test_the_cost_of_padded_sequences_is_told(tmp_path: Path, report: Report) -> None:
    padded = inspect_dataset(dataset("chat", tmp_path, pad_seqs_to=16), rows=None)
    cost = f"of which pad_seqs_to=16 costs {100 * padded.chosen.sequence_ends:.2f} %"
    assert cost in " ".join(printed(padded).split())
    assert cost in str(report_page(padded))
    assert "pad_seqs_to" not in printed(report)


@pytest.mark.parametrize("width", [60, 110, 200])
@pytest.mark.parametrize("terminal", [True, False])
def test_no_line_is_wider_than_the_terminal(report: Report, width: int, terminal: bool) -> None:
    shown = printed(report, width=width, terminal=terminal)
    widest = max(Text.from_ansi(line).cell_len for line in shown.splitlines())
    assert widest <= (width if terminal else 110)


def test_square_brackets_of_the_data_are_shown_as_they_are(report: Report) -> None:
    """rich would take them for styles, and a slash in them for an error."""
    odd = "f[/x].jsonl:3: [red]bad[/red]"
    losses = [replace(report.losses[0], examples=[odd])]
    longest = [replace(report.lengths.longest[0], place=odd)]
    sequence = replace(report.packs[0].sequences[0], place=odd)
    packs = [replace(report.packs[0], sequences=[sequence])]
    share = SourceShare(odd, 1.0, 1, 1, 1, 1.0, 1.0, None)
    changed = replace(
        report, losses=losses, lengths=replace(report.lengths, longest=longest), packs=packs, sources=[share]
    )
    shown = printed(changed, width=200)
    assert shown.count(odd) == 4
    assert "a [bold]title[/bold]" in shown
