"""What travels between processes: the same numbers, and nothing that has to be looked up."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streampack import Ledger, Sample
from streampack.accounting import SourceStats
from streampack.loader.wire import fold, unfold
from streampack.packing.assemble import assemble
from streampack.streaming.lane_state import LaneEvent, LaneState
from streampack.types import Fragment, Pack
from tests.harness.corpus import plain


def pack_of(seq_lens: list[int], *, largest: int = 7) -> Pack:
    dtype = np.int32 if largest < 2**31 else np.int64
    sequences = [Sample(ids := np.arange(largest - n + 1, largest + 1, dtype=dtype), ids) for n in seq_lens]
    arrays = assemble(sequences, max_seq_len=24, padding_idx=3)
    fragments = [Fragment((2, 2**40 + i), 1, 1 + n, (None, 5)[i % 2]) for i, n in enumerate(seq_lens)]
    return Pack(*arrays, tuple(seq_lens), tuple(fragments), epoch=1, number=2, lane=3)


STATE = LaneState(3, False, 1, (2, 2**40), 40, 0, 42, 2**70, Ledger(tokens_in=7), (SourceStats(1, 2),))


def folded(pack: Pack) -> bytes:
    return pickle.dumps(fold(LaneEvent(3, 1, pack, STATE)), 5)


def travelled(pack: Pack) -> Pack:
    event = unfold(pickle.loads(folded(pack)))
    assert (event.lane, event.epoch, event.state) == (3, 1, STATE)
    assert event.pack is not None
    return event.pack


@given(st.lists(st.integers(1, 6), max_size=4), st.sampled_from([7, 2**31 - 1, 2**31, 2**62]))
def test_unfold_inverts_fold(seq_lens: list[int], largest: int) -> None:
    """Whatever the ids; a part-empty pack and a null pack, too."""
    pack = pack_of(seq_lens, largest=largest)
    found = travelled(pack)
    assert plain(found) == plain(pack)
    for ours, theirs in ((found.tokens, pack.tokens), (found.labels, pack.labels)):
        assert ours.itemsize == (8 if theirs.max() >= 2**31 else 4)
    assert all(type(fragment) is Fragment for fragment in found.fragments)


def test_wide_arrays_travel_in_32_bits_if_they_can() -> None:
    pack = pack_of([3, 4])
    wide = replace(pack, tokens=pack.tokens.astype(np.int64), labels=pack.labels.astype(np.int64))
    assert folded(wide) == folded(pack)


def test_arrays_may_differ_in_width() -> None:
    pack = replace(pack_of([3]), labels=np.array([-(2**31) - 1, 0, 5]))
    found = travelled(pack)
    assert (found.tokens.dtype, found.labels.tolist()) == (np.int32, [-(2**31) - 1, 0, 5])


def test_unfolded_arrays_are_writable() -> None:
    pack = pack_of([3])
    found = travelled(pack)
    found.tokens[0] = found.labels[0] = 99
    assert pack.tokens[0] == 5


def test_the_end_of_a_lane_is_folded() -> None:
    end = LaneEvent(3, 1, None, STATE)
    assert unfold(pickle.loads(pickle.dumps(fold(end), 5))) == end


def test_folded_events_pickle_no_class_but_the_state() -> None:
    """A proxy for speed: each one would be called, in Python, for every fragment and array."""
    data = folded(pack_of([3, 4]))
    assert b"numpy" not in data
    assert b"types" not in data
    state = len(pickle.dumps(STATE, 5))
    assert len(data) < 2 * 24 * 4 + 150 + state, "ids of 32 bits, once"
