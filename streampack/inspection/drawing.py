"""Packs as a picture of text: a line for each pack, a colour for each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from streampack.inspection.report import PackView

# Okabe and Ito's colours, which people who see few colours can tell apart, as near as 256 colours come.
COLOURS = (33, 208, 36, 170, 220, 75, 166)
TRAINED, MASKED, PADDING, END = "█", "▒", "·", "▌"
LEGEND = f"{TRAINED} trained  {MASKED} masked  {PADDING} padding  {END} end of a sequence"


def draw_packs(packs: Sequence[PackView], *, width: int = 64, colour: bool = True) -> str:
    """Draw packs, one a line: each sequence in the next colour, trained tokens solid, masked shaded, padding dotted.

    >>> from streampack.inspection.report import Run, Sequence
    >>> first = Sequence("a:1", None, 0, 8, (0, 8), 4, [Run(0, 4, False, None), Run(4, 8, True, None)])
    >>> second = Sequence("a:2", None, 8, 4, (0, 4), 3, [Run(8, 12, True, None)])
    >>> pack = PackView(0, 0, 16, 4, [first, second], [0, 8, 12, 16])
    >>> print(draw_packs([pack], width=16, colour=False))
    ▒▒▒▒███▌███▌····

    Args:
        packs: to draw.
        width: characters of a line.
        colour: whether to colour it by escape codes of a terminal.
    """
    return "\n".join(_line(pack, width, colour) for pack in packs)


def _line(pack: PackView, width: int, colour: bool) -> str:
    bounds = [number * pack.max_seq_len // width for number in range(width + 1)]
    cells = []
    number = 0  # of the sequence in which the cell's middle lies
    for start, stop in pairwise(bounds):
        middle = (start + stop) // 2
        while number < len(pack.sequences) and middle >= pack.cu_seqlens[number + 1]:
            number += 1
        if number == len(pack.sequences):
            cells.append(PADDING)
            continue
        sequence = pack.sequences[number]
        # Behind the runs of tokens lies the padding that `pad_seqs_to` puts at a sequence's end.
        mark = next(
            (TRAINED if run.trained else MASKED for run in sequence.runs if middle < run.stop), PADDING
        )
        end = sequence.start + sequence.length
        if start < end <= stop and sequence.length * width > pack.max_seq_len:
            mark = END
        cells.append(f"\x1b[38;5;{COLOURS[number % len(COLOURS)]}m{mark}\x1b[0m" if colour else mark)
    return "".join(cells)
