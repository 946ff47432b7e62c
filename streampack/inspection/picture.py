"""The first packs of a run, with the rows, texts and labels of their sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

from streampack.inspection.report import PackView, Run
from streampack.inspection.report import Sequence as SequenceView
from streampack.packing.groups import ROOT
from streampack.streaming.lane import Lane
from streampack.streaming.lane_config import LaneConfig
from streampack.types import IGNORE_INDEX, Pack

MOST_TEXT = 240
"""Characters of a run of tokens that are kept, half of them from its end."""
MOST_RUNS = 8
"""Runs of a sequence whose text is kept. A conversation has two a turn."""
MOST_SEQUENCES = 400
"""Sequences of a pack that are kept with text."""


def first_packs(config: LaneConfig, num_lanes: int, count: int) -> list[PackView]:
    """Make the first packs of a run: the first one of each lane, then the second of each.

    With ``balance_window``, of which each lane plans a whole one first, all are of lane 0.

    Args:
        config: a `tolerant` one.
        num_lanes: of the run.
        count: how many packs to make at most.
    """
    lanes = [
        Lane(config, lane=lane, num_lanes=num_lanes)
        for lane in range(1 if config.balance_window else min(num_lanes, count))
    ]
    found: list[PackView] = []
    while lanes and len(found) < count:
        for lane in list(lanes):
            pack = lane.next_event().pack
            if pack is None:
                lanes.remove(lane)
            elif len(found) < count:
                found.append(view(pack, config))
    return found


def view(pack: Pack, config: LaneConfig) -> PackView:
    """Describe a pack: what `IterablePackedDataset.trace` tells of each of its sequences, and what is trained."""
    sequences, source = [], config.source
    starts = [0, *accumulate(pack.seq_lens)]
    for number, (fragment, start) in enumerate(zip(pack.fragments, starts, strict=False)):
        length = fragment.stop - fragment.start
        trained = (pack.labels[start : start + length] != IGNORE_INDEX).tolist()
        parent = ROOT if pack.groups is None else pack.groups.parents[number]
        if pack.groups is not None and parent != ROOT:
            trained[0] = pack.groups.first_labels[number] != IGNORE_INDEX  # by the last token of the parent
        decode = _decoder(config.encoder(fragment.row_id)) if number < MOST_SEQUENCES else None
        tokens = pack.tokens[start : start + length].tolist()
        sequences.append(
            SequenceView(
                place=source.locate(fragment.row_id),
                source=source.names[source.source_index(fragment.row_id)] if source.names else None,
                start=start,
                length=length,
                of_sample=(fragment.start, fragment.stop),
                trained=sum(trained),
                runs=_runs(tokens, trained, start, decode, continues=parent != ROOT),
                parent=parent,
                padding=fragment.padding,
            )
        )
    size = pack.tokens.size
    bounds = starts if starts[-1] == size else [*starts, size]
    return PackView(pack.lane, pack.number, size, size - starts[-1], sequences, bounds)


def _decoder(encode: Any) -> Callable[[list[int]], str] | None:
    return encode.decode if hasattr(encode, "decode") else None


def _runs(
    tokens: Sequence[int],
    trained: Sequence[bool],
    start: int,
    decode: Callable[[list[int]], str] | None,
    *,
    continues: bool,
) -> list[Run]:
    """Divide a sequence where training begins or ends.

    The first token of a sequence that continues no other has no label, and is no run of its own where the next one is
    trained.
    """
    flags = list(trained)
    if len(flags) > 1 and not continues:
        flags[0] = flags[1]
    cuts = [0, *(i for i in range(1, len(flags)) if flags[i] != flags[i - 1]), len(flags)]
    found = []
    for number, (begin, end) in enumerate(pairwise(cuts)):
        text = None
        if decode is not None and number < MOST_RUNS:
            text = _shortened(tokens[begin:end], decode)
        found.append(Run(start + begin, start + end, bool(flags[begin]), text))
    return found


def _shortened(tokens: Sequence[int], decode: Callable[[list[int]], str]) -> str:
    """Decode tokens, and leave out the middle of a long text."""
    half = MOST_TEXT // 2
    if len(tokens) > 2 * MOST_TEXT:  # a token is rarely more than a character shorter
        head, tail = decode(list(tokens[:MOST_TEXT])), decode(list(tokens[-MOST_TEXT:]))
        return f"{head[:half]} [...] {tail[-half:]}"
    text = decode(list(tokens))
    return text if len(text) <= MOST_TEXT else f"{text[:half]} [...] {text[-half:]}"
