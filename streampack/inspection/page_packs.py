"""Packs on a page: a row of blocks for each, what a block holds, the mask and the boundaries of one pack."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from streampack.inspection.page import Markup, markup, paragraph, table
from streampack.inspection.report import PackView
from streampack.inspection.report import Sequence as SequenceView
from streampack.packing.groups import ROOT

COLOURS = 7
MOST_BLOCKS = 300
"""Sequences of a pack that are drawn one by one; the rest is one block."""
MOST_TEXT = 600
"""Characters of a sequence that the page holds."""
MOST_TEXTS = 120
"""Sequences of a pack whose text the page holds."""
MOST_ROWS = 16
"""Sequences in the table of boundaries."""


def packs_figure(packs: Sequence[PackView], *, names: Sequence[str] | None = None) -> Markup:
    """Return packs as rows of blocks, of which hover or focus shows the text, file and row.

    Args:
        packs: to draw.
        names: of the packs; None names each by its lane and number.
    """
    if names is None:
        names = [f"lane {pack.lane}, pack {pack.number}" for pack in packs]
    rows = [
        _pack(pack, title, f"packs-{number}")
        for number, (pack, title) in enumerate(zip(packs, names, strict=True))
    ]
    templates = "".join(
        _template(sequence, f"packs-{number}-{at}", with_text=at < MOST_TEXTS)
        for number, pack in enumerate(packs)
        for at, sequence in enumerate(pack.sequences[:MOST_BLOCKS])
    )
    key = (
        '<ul class="key"><li><i class="s0"></i>trained</li><li><i class="m0"></i>masked (prompt)</li>'
        '<li><i class="hatched"></i>padding</li><li>each sequence has the next colour</li></ul>'
    )
    hint = "Point at a sequence, or focus a pack and use the arrow keys: its row and text appear here."
    return Markup(
        f'<div data-packs>{key}<div class="packs">{"".join(rows)}</div>'
        f'<div class="detail" role="status">{paragraph(hint, kind="note")}</div>{templates}</div>'
    )


def _pack(pack: PackView, title: str, name: str) -> str:
    drawn = pack.sequences[:MOST_BLOCKS]
    blocks = [_block(sequence, at, f"{name}-{at}") for at, sequence in enumerate(drawn)]
    if rest := sum(sequence.stop - sequence.start for sequence in pack.sequences[MOST_BLOCKS:]):
        blocks.append(f'<i class="s6" style="flex:{rest} 0 0"></i>')
    blocks.append(_hatched(pack.padding))
    about = f"{title}: {len(pack.sequences)} sequences, {pack.padding} tokens of padding"
    return f'<div class="name">{title}</div><div class="pack" role="group" aria-label="{about}">{"".join(blocks)}</div>'


def _block(sequence: SequenceView, number: int, name: str) -> str:
    colour = number % COLOURS
    runs = "".join(
        f'<i class="{"s" if run.trained else "m"}{colour}" style="flex:{run.stop - run.start} 0 0"></i>'
        for run in sequence.runs
    )
    about = (
        f"sequence {number}, {sequence.length} tokens, {sequence.trained} trained: {escape(sequence.place)}"
    )
    button = (
        f'<button type="button" aria-pressed="false" tabindex="{-1 if number else 0}" data-detail="{name}" '
        f'style="flex:{sequence.length} 0 0" aria-label="{about}">{runs}</button>'
    )
    return button + _hatched(sequence.padding)


def _hatched(tokens: int) -> str:
    """Return so many tokens of padding, drawn; nothing for none."""
    return f'<i class="hatched" style="flex:{tokens} 0 0"></i>' if tokens else ""


def _template(sequence: SequenceView, name: str, *, with_text: bool) -> str:
    start, stop = sequence.of_sample
    source = f", source {sequence.source}" if sequence.source is not None else ""
    where = (
        f"tokens {sequence.start:,} to {sequence.start + sequence.length:,} of the pack, {start:,} to {stop:,} of the "
        f"sample; {sequence.trained:,} trained{source}"
    )
    said = f'<div class="said">{"".join(_said(sequence))}</div>' if with_text else ""
    return (
        f'<template id="{name}"><p><strong>{markup(sequence.place)}</strong></p>{paragraph(where, kind="note")}{said}'
        "</template>"
    )


def _said(sequence: SequenceView) -> Iterator[str]:
    """Yield what a sequence says, run by run, up to a limit."""
    left = MOST_TEXT
    for run in sequence.runs:
        if run.text is None:
            continue
        text = run.text if len(run.text) <= left else f"{run.text[:left]} [...]"
        yield f'<span class="{"trained" if run.trained else "masked"}">{markup(text)}</span>'
        left -= len(run.text)
        if left <= 0:
            return


def mask_figure(pack: PackView) -> Markup:
    """Return a picture of which tokens (rows) attend to which (columns) in a pack: a triangle for each sequence.

    Of a group there is a rectangle besides for each segment that a segment continues.
    """
    size = 400
    scale = size / pack.max_seq_len
    shapes = []
    for number, sequence in enumerate(pack.sequences):
        start, stop = sequence.start * scale, sequence.stop * scale
        shapes.append(
            f'<path class="s{number % COLOURS}" d="M{start:.2f} {start:.2f}V{stop:.2f}H{stop:.2f}Z"/>'
        )
        parent = sequence.parent
        while parent != ROOT:
            before = pack.sequences[parent]
            left, right = before.start * scale, (before.start + before.length) * scale
            shapes.append(
                f'<path class="s{parent % COLOURS}" d="M{left:.2f} {start:.2f}V{stop:.2f}H{right:.2f}V{start:.2f}Z"/>'
            )
            parent = before.parent
    if pack.padding:
        start = (pack.max_seq_len - pack.padding) * scale
        shapes.append(
            f'<path fill="none" stroke="var(--hatch)" d="M{start:.2f} {start:.2f}V{size}H{size}Z"/>'
        )
    outside = "nothing"
    if any(sequence.parent != ROOT for sequence in pack.sequences):
        outside = "rectangles where one sequence continues another"
    about = (
        f"block-causal mask: {len(pack.sequences)} triangles on the diagonal, and {outside} outside of them"
    )
    return Markup(
        f'<svg class="mask" role="img" aria-label="{about}" viewBox="0 0 {size} {size}">{"".join(shapes)}</svg>'
    )


def boundaries(pack: PackView) -> Markup:
    """Return a table of a pack's ``cu_seqlens`` and positions."""
    rows: list[list[object]] = []
    for number, sequence in enumerate(pack.sequences[:MOST_ROWS]):
        bounds = f"{sequence.start:,} - {sequence.stop:,}"
        first, last = pack.positions[number]
        rows.append([sequence.place, bounds, f"{first:,} - {last:,}", f"{sequence.trained:,}"])
    if (more := len(pack.sequences) - MOST_ROWS) > 0:
        rows.append([f"and {more:,} more", "", "", ""])
    if pack.padding:
        start = pack.max_seq_len - pack.padding
        rows.append(["padding", f"{start:,} - {pack.max_seq_len:,}", f"0 - {pack.padding - 1:,}", "0"])
    return table(["sequence", "cu_seqlens", "positions", "trained"], rows)
