"""Samples that are cut: groups to fit, their new last token, how many of their tokens are trained."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from streampack.accounting import trained_tokens
from streampack.packing.groups import Group
from streampack.packing.settings import Packing
from streampack.types import IGNORE_INDEX, INT64, Sample


def with_eos_of(whole: Sample, beginning: Sample, eos_ids: Collection[int | None]) -> Sample:
    """Return the beginning of a sample, in a copy with the EOS for its last token if the sample ended with it."""
    eos = int(whole.tokens[-1])
    if eos not in eos_ids:
        return beginning
    tokens, labels = (array.astype(array.dtype if eos < 2**31 else INT64) for array in beginning)
    tokens[-1] = eos
    if labels[-1] != IGNORE_INDEX:
        labels[-1] = eos
    return Sample(tokens, labels)


def cut_group(group: Group, packing: Packing) -> list[tuple[int, Sample]]:
    """Return a group whole, or shortened so that it fits, and 0, where it starts; none if it is dropped.

    Raises:
        ValueError: for settings that groups cannot have, or for one that is too long; the caller adds its place.
    """
    length = group.tokens.size
    if packing.split_across_pack:
        raise ValueError("is a group of segments, which is never split; leave split_across_pack out")
    if packing.max_seqs_per_pack is not None:
        raise ValueError("is a group of segments, of which max_seqs_per_pack cannot count each; leave it out")
    if packing.pad_seqs_to > 1:
        raise ValueError(
            f"is a group of segments, and pad_seqs_to={packing.pad_seqs_to} pads samples only: answers could not "
            "continue a padded prompt; leave it out"
        )
    if length <= packing.max_seq_len:
        return [(0, group)]
    if packing.overlong in ("truncate", "truncate_left"):
        side = "right" if packing.overlong == "truncate" else "left"
        short = group.truncated(packing.max_seq_len, side=side)
        return [] if short is None else [(0, short)]
    if packing.overlong == "drop":
        return []
    raise ValueError(
        f"is a group of {length} tokens, max_seq_len is {packing.max_seq_len}, and a group is never split; set "
        "overlong to 'truncate' or 'drop', or raise max_seq_len"
    )


def trained_if_split(
    sample: Sample, start: int, stop: int, *, packing: Packing, isolated: bool = True
) -> int | None:
    """Count the trained tokens in all fragments of a sample, ``[start, stop)`` being one; None if it is not split.

    It is the value of `Fragment.trained`. If samples are ``isolated``, the first label of every fragment is not
    trained. If they are not, it is trained except where the fragment begins a pack.

    >>> trained_if_split(Sample(np.arange(10), np.arange(10)), 4, 8, packing=Packing(4, overlong="split"))
    7
    """
    if start == 0 and stop == sample.tokens.size:
        return None
    bounds = packing.pieces_of(sample.tokens.size)
    kept_start, kept_stop = bounds[0][0], bounds[-1][1]  # what overlong leaves of the sample
    cuts = packing.cuts(kept_stop - kept_start, start - kept_start, stop - kept_start)
    if not cuts:
        return None
    kept = sample.cut(kept_start, kept_stop)
    if isolated:
        return trained_tokens(kept, cuts)
    # After each cut a new pack begins. The sample's first fragment begins a pack, too, if it fills one.
    pack_starts = [0, *cuts] if cuts[0] == packing.max_seq_len else cuts
    not_trained = sum(1 for start in pack_starts if kept.labels[start] != IGNORE_INDEX)
    return int(np.count_nonzero(kept.labels != IGNORE_INDEX)) - not_trained


def untrained_error(length: int, packing: Packing) -> ValueError:
    """Make the error for a sample of ``length`` tokens that trains nothing; the caller adds its place."""
    kept = sum(stop - start for start, stop in packing.pieces_of(length))
    left, way_out = f"its {length} tokens", "look at its labels (the first is never trained)"
    if kept < length:
        left = f"the {kept} tokens that overlong={packing.overlong!r} leaves of its {length}"
        way_out = "raise max_seq_len, choose another overlong"
    return ValueError(
        f"trains nothing: none of {left} has a label to train; {way_out}, or set untrained to 'drop' or 'keep'"
    )
