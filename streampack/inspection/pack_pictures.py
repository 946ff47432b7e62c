"""Packs as pictures on a page: a bar of sequences, and the text of each."""

from __future__ import annotations

from html import escape

from streampack.inspection.report import PackView, Run, Sequence

COLOURS = 7
"""Sequences take turns with so many colours, which the page's style sheet has."""
MOST_LISTED = 30
"""Sequences of a pack whose text is on the page."""


def pack_picture(pack: PackView, *, step: int) -> str:
    """Return a pack as HTML: a bar with a colour for each sequence, and the text of its first sequences.

    Args:
        pack: to draw.
        step: which trained it.
    """
    size = pack.max_seq_len
    filled = size - pack.padding
    title = (
        f"A pack of step {step:,}: {len(pack.sequences):,} sequence{'s' * (len(pack.sequences) != 1)}, "
        f"{filled:,} of {size:,} tokens, {pack.padding / size:.1%} padding"
    )
    bars = "".join(_bar(sequence, number) for number, sequence in enumerate(pack.sequences))
    if pack.padding:  # the style sheet hatches the picture's background
        bars += f'<rect class="padding" x="{filled}" width="{pack.padding}" height="1"><title>padding</title></rect>'
    items = "".join(_item(sequence, number) for number, sequence in enumerate(pack.sequences[:MOST_LISTED]))
    more = len(pack.sequences) - MOST_LISTED
    rest = f"<p>{more:,} more are not listed.</p>" if more > 0 else ""
    return (
        f'<figure class="pack"><figcaption>{escape(title)}</figcaption><svg class="bar" viewBox="0 0 {size} 1" '
        f'preserveAspectRatio="none" role="img" aria-label="{escape(title)}">{bars}</svg>'
        f"<details><summary>Its sequences</summary><ol>{items}</ol>{rest}</details></figure>"
    )


def _bar(sequence: Sequence, number: int) -> str:
    """Draw a sequence: trained tokens in full colour, masked ones pale."""
    runs = "".join(
        f'<rect class="{"trained" if run.trained else "masked"}" x="{run.start}" width="{run.stop - run.start}" '
        'height="1"/>'
        for run in sequence.runs
    )
    title = f"<title>{escape(f'{sequence.place}: {sequence.length:,} tokens')}</title>"
    edge = f'<path class="edge" d="M{sequence.start + sequence.length} 0V1"/>'
    return f'<g class="s{number % COLOURS}">{title}{runs}{edge}</g>'


def _item(sequence: Sequence, number: int) -> str:
    start, stop = sequence.of_sample
    part = f", tokens {start:,} to {stop:,} of its sample" if start else ""
    source = f" of {sequence.source}" if sequence.source is not None else ""
    about = f"{sequence.place}{source}: {sequence.length:,} tokens, {sequence.trained:,} trained{part}"
    texts = "".join(map(_text, sequence.runs))
    text = f'<p class="text">{texts}</p>' if texts else ""
    return f'<li class="s{number % COLOURS}"><p class="place">{escape(about)}</p>{text}</li>'


def _text(run: Run) -> str:
    if not run.text:
        return ""
    kind = "trained" if run.trained else "masked"
    return f'<span class="{kind}">{escape(run.text)}</span>'
