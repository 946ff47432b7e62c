"""Count the packs of an epoch of map-style data, by its samples' lengths alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from streampack.accounting import trains_nothing
from streampack.packing.assemble import check_sample
from streampack.sources import MapSource
from streampack.streaming.lane import Lane
from streampack.streaming.lane_config import LaneConfig
from streampack.types import Sample


def packed_lengths(config: LaneConfig, rows: Iterable[int]) -> list[int]:
    """Encode rows of map-style data: the tokens of each sample, 0 for samples that the run drops.

    Raises:
        ValueError: for a row that cannot be encoded, with its place, unless such rows are skipped.
    """
    lengths = []
    for number in rows:
        try:
            row = config.source.fetch((number,))
            sample = config.encode(row)
            check_sample(sample, config.vocab_size)
        except Exception as error:
            if config.quarantine is None:
                raise ValueError(f"{config.source.locate((number,))}: {error}") from error
            lengths.append(0)
            continue
        kept = config.source.keeps(row) and not (
            config.untrained == "drop" and _trains_nothing(config, sample)
        )
        lengths.append(sample.tokens.size if kept else 0)
    return lengths


def _trains_nothing(config: LaneConfig, sample: Sample) -> bool:
    length, packing = sample.tokens.size, config.packing
    if not length or (length > packing.max_seq_len and packing.overlong == "error"):
        return False  # counted as what it is
    return all(trains_nothing(sample.cut(*bounds)) for bounds in packing.pieces_of(length))


def count_packs(config: LaneConfig, lengths: list[int], *, epoch: int, lane: int, num_lanes: int) -> int:
    """Count the packs that one lane makes of an epoch, by planning it.

    >>> from streampack.packing.settings import Packing
    >>> config = LaneConfig(MapSource([{"tokens": [1] * n} for n in (5, 4, 3)]), len, Packing(8))
    >>> count_packs(config, [5, 4, 3], epoch=0, lane=0, num_lanes=1)
    2

    Args:
        config: of a stream of map-style data.
        lengths: of all its rows, as `packed_lengths` gives them.
        epoch: from 0; it decides the order when shuffling.
        lane: from 0.
        num_lanes: how many there are.

    Raises:
        ValueError: for a sample that is too long, unless ``overlong`` says what becomes of it.
    """
    tokens = np.ones(max(lengths, default=0), np.int32)
    samples = {length: Sample(tokens[:length], tokens[:length]) for length in set(lengths)}
    for sample in samples.values():
        sample.tokens.flags.writeable = False

    def encode(number: Any) -> Sample:  # the row of a numbered dataset is its number
        return samples[lengths[number]]

    planned = replace(
        config, source=MapSource(range(len(lengths))), encode=encode, empty="drop", endless=False, truncate_eos=None,
        checks=False, quarantine=None, untrained=None,
    )  # fmt: skip
    planning = Lane(planned, lane=lane, num_lanes=num_lanes)
    planning.start_epoch(epoch)
    count = 0
    while planning.next_pack() is not None:
        count += 1
    return count
