"""Views of packs: the rows, texts and labels of their sequences, and a line of blocks for each pack."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, groupby, islice, pairwise

from streampack.lanes.lane import Lane
from streampack.lanes.lane_config import LaneConfig
from streampack.packing.assemble import lengthened
from streampack.packing.groups import ROOT
from streampack.types import IGNORE_INDEX, Pack

MOST_TEXT = 240
"""The most tokens of a run that are decoded, and the most characters of its text."""
MOST_RUNS = 8
"""Runs of a sequence that have text. A conversation has two in each turn."""
MOST_TEXTS = 120
"""Sequences of a pack that have text."""
MOST_REPEATED = 3
"""Equal tokens in a row that are decoded in a sequence with images, where each image is hundreds of them."""

Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of a sequence that are all trained, or all masked."""

    start: int  # in the pack
    stop: int
    trained: bool
    text: str | None  # decoded; None if the encoder cannot


@dataclass(frozen=True)
class SequenceView:
    """A sequence of a pack and its row."""

    place: str
    source: str | None  # of a mixture
    start: int  # in the pack
    length: int
    of_sample: tuple[int, int]  # first token and last token + 1 in its sample
    trained: int
    runs: list[Run]
    parent: int = ROOT  # the sequence of the pack that it continues, in a group
    padding: int = 0  # tokens of padding after its ``length`` tokens
    media: int = 0  # its part of ``max_media``

    @property
    def stop(self) -> int:
        """The end of the sequence and its padding in the pack."""
        return self.start + self.length + self.padding


@dataclass(frozen=True)
class PackView:
    """A pack, its sequences and its padding."""

    lane: int
    number: int  # in its lane
    max_seq_len: int
    padding: int
    sequences: list[SequenceView]


def first_packs(config: LaneConfig, num_lanes: int, count: int) -> list[PackView]:
    """Make the first packs of a run: the first one of each lane, then the second of each.

    ``config`` is a `tolerant` one. With ``balance_window`` all packs are of lane 0, because each lane must first plan a
    complete window.
    """
    own = 1 if config.balance_window else min(num_lanes, count)
    lanes = [Lane(config, lane=lane, num_lanes=num_lanes) for lane in range(own)]
    found: list[Pack] = []
    while lanes and len(found) < count:
        for lane in list(lanes):
            pack = lane.next_event().pack
            if pack is None:
                lanes.remove(lane)
            elif len(found) < count:
                found.append(pack)
    size = max([pack.tokens.size for pack in found], default=0)  # padded batches have packs of any length
    return [view(lengthened(pack, size, config.padding_idx), config) for pack in found]


def view(pack: Pack, config: LaneConfig, *, whole: bool = False) -> PackView:
    """Describe the sequences of a pack: their rows, what is trained, and their texts.

    Args:
        pack: of a run.
        config: of its dataset.
        whole: keep all text, and show ids if the encoder cannot decode them.
    """
    sequences, source = [], config.source
    media = pack.media or (None,) * len(pack.fragments)
    hidden = cache(lambda decode, token: not decode([token]))
    starts = [0, *accumulate(pack.seq_lens)]
    for number, (fragment, start) in enumerate(zip(pack.fragments, starts, strict=False)):
        length = fragment.stop - fragment.start
        trained = (pack.labels[start : start + length] != IGNORE_INDEX).tolist()
        parent = ROOT if pack.groups is None else pack.groups.parents[number]
        if pack.groups is not None and parent != ROOT:
            trained[0] = pack.groups.first_labels[number] != IGNORE_INDEX  # by the last token of the parent
        flags = list(trained)
        if length > 1 and parent == ROOT:  # the first token has no label, which makes no run
            flags[0] = flags[1]
        decode = getattr(config.encoder(fragment.row_id), "decode", None) or (_ids if whole else None)
        cuts = [0, *(i for i in range(1, length) if flags[i] != flags[i - 1]), length]
        runs = []
        for at, (begin, end) in enumerate(pairwise(cuts)):
            text = None
            if decode and (whole or (number < MOST_TEXTS and at < MOST_RUNS)):
                ids = pack.tokens[start + begin : start + end].tolist()
                if media[number] and not whole:
                    ids = [token for _, run in groupby(ids) for token in islice(run, MOST_REPEATED)]
                text = _spell(decode, ids, hidden, whole)
            runs.append(Run(start + begin, start + end, bool(flags[begin]), text))
        sequences.append(
            SequenceView(
                place=source.locate(fragment.row_id),
                source=source.names[source.source_index(fragment.row_id)] if source.names else None,
                start=start,
                length=length,
                of_sample=(fragment.start, fragment.stop),
                trained=sum(trained),
                runs=runs,
                parent=parent,
                padding=fragment.padding,
                media=own.cost if (own := media[number]) else 0,
            )
        )
    size = pack.tokens.size
    return PackView(pack.lane, pack.number, size, size - starts[-1], sequences)


def _ids(tokens: list[int]) -> str:
    return "".join(f"{token} " for token in tokens)


def _spell(decode: Decode, tokens: list[int], hidden: Callable[[Decode, int], bool], whole: bool) -> str:
    """Decode tokens, with ``<id>`` for special ones, which torchtune's tokenizers decode to nothing."""
    text = "".join(
        "".join(f"<{token}>" for token in run) if special else decode(list(run))
        for special, run in groupby(
            tokens if whole else tokens[:MOST_TEXT], lambda token: hidden(decode, token)
        )
    )
    return text if whole or max(len(tokens), len(text)) <= MOST_TEXT else f"{text[:MOST_TEXT]} [...]"


# Lines of blocks. Okabe and Ito's colours, which are safe for color blindness, as near as 256 colors come.
COLOURS = (33, 208, 36, 170, 220, 75, 166)
TRAINED, MASKED, PADDING, END = "█", "▒", "·", "▌"
LEGEND = f"{TRAINED} trained  {MASKED} masked  {PADDING} padding  {END} end of a sequence"


def draw_packs(packs: Sequence[PackView], *, width: int = 64, colour: bool = True) -> str:
    """Draw packs, one a line: each sequence in the next colour, trained tokens solid, masked shaded, padding dotted.

    >>> first = SequenceView("a:1", None, 0, 8, (0, 8), 4, [Run(0, 4, False, None), Run(4, 8, True, None)])
    >>> second = SequenceView("a:2", None, 8, 4, (0, 4), 3, [Run(8, 12, True, None)])
    >>> pack = PackView(0, 0, 16, 4, [first, second])
    >>> print(draw_packs([pack], width=16, colour=False))
    ▒▒▒▒███▌███▌····

    Args:
        packs: to draw.
        width: characters of a line.
        colour: whether to colour it by escape codes of a terminal.
    """
    return "\n".join("".join(_cells(pack, width, colour)) for pack in packs)


def _cells(pack: PackView, width: int, colour: bool) -> Iterator[str]:
    bounds = [number * pack.max_seq_len // width for number in range(width + 1)]
    number = 0  # of the sequence at the middle of the cell
    for start, stop in pairwise(bounds):
        middle = (start + stop) // 2
        while number < len(pack.sequences) and middle >= pack.sequences[number].stop:
            number += 1
        if number == len(pack.sequences):
            yield PADDING
            continue
        sequence = pack.sequences[number]
        # After the runs comes the padding at the sequence's end (`pad_seqs_to`).
        mark = next(
            (TRAINED if run.trained else MASKED for run in sequence.runs if middle < run.stop), PADDING
        )
        end = sequence.start + sequence.length
        if start < end <= stop and sequence.length * width > pack.max_seq_len:
            mark = END
        yield f"\x1b[38;5;{COLOURS[number % len(COLOURS)]}m{mark}\x1b[0m" if colour else mark
