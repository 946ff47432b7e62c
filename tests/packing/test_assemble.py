from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack import IGNORE_INDEX, Sample
from streampack.packing.assemble import assemble, positions
from tests.support import oracle
from tests.support.samples import make_sample

ids = st.integers(0, 99)
labels = st.one_of(st.just(IGNORE_INDEX), ids)
sequences = st.lists(st.lists(st.tuples(ids, labels), min_size=1, max_size=8), max_size=6)


@given(sequences=sequences, spare=st.integers(0, 5), padding_idx=st.sampled_from([0, 7]))
def test_packs_match_the_reference(
    sequences: list[list[tuple[int, int]]], spare: int, padding_idx: int
) -> None:
    pairs = [([t for t, _ in sequence], [y for _, y in sequence]) for sequence in sequences]
    limit = sum(map(len, sequences)) + spare or 1
    lens = [len(sequence) for sequence in sequences]
    ours = assemble([make_sample(*pair) for pair in pairs], max_seq_len=limit, padding_idx=padding_idx)
    ours += (*positions([lens], limit),)
    assert tuple(row.tolist() for row in ours) == oracle.assemble(pairs, limit, padding_idx)
    assert all(row.shape == (limit,) for row in ours)


@pytest.mark.parametrize("padding_idx", [0, 2**31])
@pytest.mark.parametrize("spare", [0, 2])
@pytest.mark.parametrize("kinds", [(), ("ii",), ("ii", "ii"), ("il", "ii"), ("ll", "ii"), ("li",)])
def test_tokens_and_labels_are_int32_if_those_of_all_sequences_are(
    kinds: tuple[str, ...], spare: int, padding_idx: int
) -> None:
    sequences = [Sample(*(np.array([5, 6], dtype) for dtype in kind)) for kind in kinds]
    spare += not kinds
    tokens, labels = assemble(sequences, max_seq_len=2 * len(kinds) + spare, padding_idx=padding_idx)
    padded = spare and padding_idx
    assert tokens.dtype == (np.int64 if padded or any(kind[0] == "l" for kind in kinds) else np.int32)
    assert labels.dtype == (np.int64 if any(kind[1] == "l" for kind in kinds) else np.int32)
    assert tokens.tolist() == [5, 6] * len(kinds) + [padding_idx] * spare
    assert labels.tolist() == [IGNORE_INDEX, 6] * len(kinds) + [IGNORE_INDEX] * spare


@pytest.mark.parametrize("max_seq_len", [5, 7])
@pytest.mark.parametrize("masked", [(), (0,), (1,), (0, 1)])
def test_each_sequence_keeps_its_own_labels(masked: tuple[int, ...], max_seq_len: int) -> None:
    """A pack may hold samples whose labels are their tokens beside samples with masked labels, and padding."""
    parts = [make_sample([2, 3, 4]), make_sample([6, 7])]
    for i in masked:
        parts[i] = Sample(parts[i].tokens, np.where(parts[i].tokens % 2, parts[i].tokens, IGNORE_INDEX))
    tokens, labels = assemble(parts, max_seq_len=max_seq_len, padding_idx=9)
    padding = max_seq_len - 5
    assert tokens.tolist() == [2, 3, 4, 6, 7, *[9] * padding]
    third = IGNORE_INDEX if 0 in masked else 4
    assert labels.tolist() == [IGNORE_INDEX, 3, third, IGNORE_INDEX, 7, *[IGNORE_INDEX] * padding]


def test_packs_share_no_memory_with_samples() -> None:
    """This holds for a sample that fills a pack alone, too: what a trainer writes into a batch stays in the batch."""
    whole = make_sample([1, 2, 3])
    for sequences in ([whole], [whole, make_sample([4])]):
        rows = assemble(sequences, max_seq_len=sum(s.tokens.size for s in sequences))
        for row in rows:
            row[:] = 50
        assert not any(np.shares_memory(a, b) for a in rows for b in rows if a is not b)
    assert (whole.tokens.tolist(), whole.labels.tolist()) == ([1, 2, 3], [1, 2, 3])


def test_too_many_tokens_fail_an_assertion() -> None:
    with pytest.raises(AssertionError, match="4 tokens planned into a pack of 3"):
        assemble([make_sample([1, 2]), make_sample([3, 4])], max_seq_len=3)
