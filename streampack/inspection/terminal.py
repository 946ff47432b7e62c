"""The report in a terminal, by rich."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING

from streampack.inspection.drawing import LEGEND, draw_packs
from streampack.inspection.report import Report

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

WIDTH = 110
SHOWN_SEQUENCES = 12
"""Sequences of the first pack in the table of its boundaries."""


def require_rich() -> None:
    """Raise ImportError, with what to install, if rich is not there."""
    if importlib.util.find_spec("rich") is None:
        raise ImportError(
            "the report is printed by rich, which is not installed: pip install 'streampack[inspect]'"
        )


def print_report(report: Report, *, console: Console | None = None) -> None:
    """Print a report.

    Raises:
        ImportError: without rich, which the extra ``inspect`` installs.
    """
    require_rich()
    from rich.console import Console

    console = console or Console()
    if not console.is_terminal:  # a file or a pipe has no width of its own
        console.width = WIDTH
    for part in _parts(report, console):
        console.print(part)


def _parts(report: Report, console: Console) -> Iterator[RenderableType]:
    from rich.rule import Rule
    from rich.text import Text

    width = min(console.width, WIDTH)
    yield Rule(Text(f"streampack inspect: {report.title}" if report.title else "streampack inspect"))
    yield _summary(report)
    yield _heading("Lengths, in tokens")
    yield _quantiles(report)
    yield _histogram(report, width)
    yield Text("longest: " + "; ".join(f"{row.tokens:,} {row.place}" for row in report.lengths.longest[:3]))
    if report.losses:
        yield _heading("Dropped, cut off, or not trained")
        yield _losses(report)
    yield _heading("Ways to make batches")
    yield _outcomes(report)
    if report.sources:
        yield _heading("Sources of the mixture")
        yield _sources(report)
    yield _heading("Attention")
    yield _attention(report)
    if report.attention.imbalance:
        yield _imbalance(report)
    if report.packs:
        yield _heading("The first packs")
        yield Text.from_ansi(
            draw_packs(report.packs, width=width - 2, colour=console.color_system is not None)
        )
        yield Text(LEGEND, style="dim")
        yield _boundaries(report)
    yield _heading("Recommended")
    yield from _advice(report)
    yield _heading("Assumed")
    for line in report.assumed:
        yield Text(f"- {line}", style="dim")


def _heading(title: str) -> RenderableType:
    from rich.text import Text

    return Text(f"\n{title}", style="bold")


def _table(*columns: str, left: int = 1) -> Table:
    """Return a table whose first columns are aligned left, and the others, of numbers, right."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right", overflow="fold")
    return table


def _summary(report: Report) -> RenderableType:
    from rich.text import Text

    coverage, settings, lengths, chosen = (
        report.coverage, report.settings, report.lengths, report.chosen
    )  # fmt: skip
    trained = lengths.trained / max(1, lengths.tokens)
    model = f", model {settings.model} ({settings.parameters:,} parameters)" if settings.model else ""
    return Text(
        f"{coverage}: {lengths.samples:,} samples, {lengths.tokens:,} tokens, {trained:.1%} of them trained\n"
        f"packs of {settings.max_seq_len:,} tokens by {settings.filled_by}{model}\n"
        f"padding {percent(chosen.padding, chosen.error)}{sequence_ends(report)}, {chosen.steps:,.0f} steps an epoch, "
        f"{chosen.speedup:.2f} times fewer tokens than with padding"
    )


def sequence_ends(report: Report) -> str:
    """Return how much of the padding ``pad_seqs_to`` costs, to stand behind it; empty without that setting."""
    if report.settings.pad_seqs_to == 1:
        return ""
    return (
        f", of which pad_seqs_to={report.settings.pad_seqs_to} costs {percent(report.chosen.sequence_ends)}"
    )


def percent(value: float, error: float = 0.0) -> str:
    """Return a fraction in per cent, with its standard error if it has one.

    >>> percent(0.1234), percent(0.1234, 0.001)
    ('12.34 %', '12.34 % ± 0.10')
    """
    return f"{100 * value:.2f} %" + (f" ± {100 * error:.2f}" if error else "")


def _quantiles(report: Report) -> RenderableType:
    quantiles = report.lengths.quantiles
    table = _table("mean", *(f"{100 * float(q):g} %" for q in quantiles), left=0)
    table.add_row(f"{report.lengths.mean:,.0f}", *(f"{value:,}" for value in quantiles.values()))
    return table


def _histogram(report: Report, width: int) -> RenderableType:
    from rich.text import Text

    bins = report.lengths.histogram
    most, limit = max(count for *_, count in bins), report.settings.max_seq_len
    digits = max(len(f"{stop - 1:,}") for _, stop, _ in bins)
    room = max(10, width - 2 * digits - 16)
    text = Text()
    for start, stop, count in bins:
        bar = "█" * round(room * count / most) or ("▏" if count else "")
        text.append(f"{start:>{digits},} - {stop - 1:>{digits},}  ", style="dim")
        text.append(bar, style="red" if start > limit else "blue")
        text.append(f" {count:,}\n")
    text.right_crop(1)
    return text


def _losses(report: Report) -> RenderableType:
    table = _table("reason", "rows", "tokens", "of all tokens")
    table.add_column("for example", overflow="fold")
    for loss in report.losses:
        name = f"{loss.reason}: the run stops" if loss.stops else loss.reason
        share = percent(loss.fraction, loss.error)
        table.add_row(name, f"{loss.rows:,}", f"{loss.tokens:,}", share, _plain("\n".join(loss.examples)))
    return table


def _plain(text: str) -> RenderableType:
    """Return text of the data, in which rich would read square brackets as styles."""
    from rich.text import Text

    return Text(text)


def _outcomes(report: Report) -> RenderableType:
    columns = ["", "padding", "packs", "steps", "samples a step", "tokens", "speed-up"]
    by_flops = report.chosen.flops_speedup is not None
    table = _table(*columns, *(["by operations"] if by_flops else []))
    for outcome in sorted(report.outcomes, key=lambda outcome: not outcome.chosen):
        table.add_row(
            f"{outcome.name} (yours)" if outcome.chosen else outcome.name,
            percent(outcome.padding, outcome.error),
            f"{outcome.packs:,.0f}",
            f"{outcome.steps:,.0f}",
            f"{outcome.samples_per_step:,.1f}",
            f"{outcome.tokens:,.0f}",
            f"{outcome.speedup:.2f} x",
            *([f"{outcome.flops_speedup:.2f} x"] if outcome.flops_speedup is not None else []),
            style="bold" if outcome.chosen else None,
        )
    return table


def _sources(report: Report) -> RenderableType:
    table = _table("source", "weight", "fraction", "rows", "tokens", "passes an epoch", "in the run")
    for share in report.sources:
        passes = "" if share.passes_in_run is None else f"{share.passes_in_run:,.2f}"
        table.add_row(
            _plain(share.name),
            percent(share.weight),
            percent(share.fraction),
            f"{share.rows:,.0f}",
            f"{share.tokens:,.0f}",
            f"{share.passes:,.2f}",
            passes,
        )
    return table


def _attention(report: Report) -> RenderableType:
    from rich.text import Text

    attention = report.attention
    quantiles = attention.quantiles
    work = attention.share_of_work
    share = "" if work is None else f"; attention is {work:.1%} of the model's operations"
    return Text(
        f"pairs of tokens in a pack: mean {attention.mean:,.0f}, median {quantiles['0.5']:,}, 99 % "
        f"{quantiles['0.99']:,}, largest {attention.largest:,}: {attention.fraction:.1%} of those of one long sample"
        f"{share}"
    )


def _imbalance(report: Report) -> RenderableType:
    table = _table("ranks", "packs a step", "null packs", "steps", "slowest / mean", "balanced", left=0)
    first = report.attention.imbalance[0]
    if first.planned_work is not None:
        table.add_column("of all work", justify="right")
        table.add_column("balanced", justify="right")
    for each in report.attention.imbalance:
        row = [str(each.ranks), f"{each.packs_per_step:,}", f"{each.null_packs:,}", f"{each.steps:,.0f}"]
        row += [f"{each.planned:.3f}", f"{each.balanced:.3f}"]
        if each.planned_work is not None and each.balanced_work is not None:
            row += [f"{each.planned_work:.3f}", f"{each.balanced_work:.3f}"]
        table.add_row(*row)
    table.caption = (
        f"attention of the slowest rank of a step over the mean; balanced: balance_window={first.window}"
    )
    table.caption_justify = "left"
    return table


def _boundaries(report: Report) -> RenderableType:
    pack = report.packs[0]
    table = _table("sequence of pack 0", "cu_seqlens", "positions", "trained")
    for number, sequence in enumerate(pack.sequences[:SHOWN_SEQUENCES]):
        table.add_row(
            _plain(sequence.place),
            f"{sequence.start:,} - {sequence.stop:,}",
            "{:,} - {:,}".format(*pack.positions[number]),
            f"{sequence.trained:,}",
        )
    if (more := len(pack.sequences) - SHOWN_SEQUENCES) > 0:
        table.add_row(f"and {more:,} more", "", "", "")
    if pack.padding:
        start = pack.max_seq_len - pack.padding
        table.add_row("padding", f"{start:,} - {pack.max_seq_len:,}", f"0 - {pack.padding - 1:,}", "0")
    return table


def _advice(report: Report) -> Iterator[RenderableType]:
    from rich.padding import Padding
    from rich.text import Text

    if not report.advice:
        yield Text("nothing: these settings fit the data")
    for advice in report.advice:
        yield Text.assemble((f"{advice.title}: ", "green"), advice.why)
        yield Padding(Text(advice.yaml, style="cyan"), (0, 0, 0, 4))
