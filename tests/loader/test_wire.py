"""What travels between processes: the same numbers, and nothing that has to be looked up."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack import Sample
from streampack.loader.wire import fold, unfold
from streampack.packing.assemble import assemble
from streampack.streaming.round_robin import Event
from streampack.types import Fragment, LaneEnd, Pack


def pack_of(seq_lens: list[int], *, largest: int = 7) -> Pack:
    dtype = np.int32 if largest < 2**31 else np.int64
    sequences = [Sample(ids := np.arange(largest - n + 1, largest + 1, dtype=dtype), ids) for n in seq_lens]
    arrays = assemble(sequences, max_seq_len=24, padding_idx=3)
    fragments = [Fragment((2, 2**40 + i), 1, 1 + n, (None, 5)[i % 2]) for i, n in enumerate(seq_lens)]
    return Pack(
        *arrays, tuple(seq_lens), tuple(fragments), epoch=1, number=2, lane=3, receipt=((4, 2**70), b"five")
    )


def travelled(event: Event) -> Event:
    return unfold(pickle.loads(pickle.dumps(fold(event), 5)))


@given(st.lists(st.integers(1, 6), max_size=4), st.sampled_from([7, 2**31 - 1, 2**31, 2**62]))
def test_the_way_changes_nothing(seq_lens: list[int], largest: int) -> None:
    """Whatever the ids; a part-empty pack and a null pack, too."""
    pack = pack_of(seq_lens, largest=largest)
    found = travelled(pack)
    assert isinstance(found, Pack)
    for ours, theirs in zip(found[:2], pack[:2], strict=True):
        assert ours.tolist() == theirs.tolist()
        assert ours.itemsize == (8 if theirs.max() >= 2**31 else 4)
    assert found[2:] == pack[2:]
    assert all(type(fragment) is Fragment for fragment in found.fragments)


def test_wide_arrays_travel_in_32_bits_if_they_can() -> None:
    pack = pack_of([3, 4])
    wide = pack._replace(tokens=pack.tokens.astype(np.int64), labels=pack.labels.astype(np.int64))
    assert pickle.dumps(fold(wide), 5) == pickle.dumps(fold(pack), 5)


def test_arrays_may_differ_in_width() -> None:
    pack = pack_of([3])._replace(labels=np.array([-(2**31) - 1, 0, 5]))
    found = travelled(pack)
    assert isinstance(found, Pack)
    assert (found.tokens.dtype, found.labels.tolist()) == (np.int32, [-(2**31) - 1, 0, 5])


def test_what_arrived_can_be_written_to() -> None:
    pack = pack_of([3])
    found = travelled(pack)
    assert isinstance(found, Pack)
    found.tokens[0] = found.labels[0] = 99
    assert pack.tokens[0] == 5


def test_the_end_of_a_lane_travels() -> None:
    end = LaneEnd(3, 1, ((4, 2**70), b"five"))
    found = travelled(end)
    assert type(found) is LaneEnd
    assert found == end


@pytest.mark.parametrize("event", [pack_of([3, 4]), LaneEnd(3, 1, ((4, 2**70), b"five"))])
def test_no_class_is_named_on_the_way(event: Event) -> None:
    """A proxy for speed: each one would be called, in Python, for every fragment and array."""
    data = pickle.dumps(fold(event), 5)
    assert b"numpy" not in data
    assert b"streampack" not in data
    assert len(data) < 2 * 24 * 4 + 200, "ids of 32 bits, once"
