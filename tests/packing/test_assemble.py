from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from streampack import IGNORE_INDEX, Sample
from streampack.accounting import trained_tokens
from streampack.packing.assemble import (
    as_sample,
    assemble,
    check_sample,
    narrowed,
    positions,
    with_eos,
)
from tests.support import oracle

ids = st.integers(0, 99)
labels = st.one_of(st.just(IGNORE_INDEX), ids)
sequences = st.lists(st.lists(st.tuples(ids, labels), min_size=1, max_size=8), max_size=6)


def sample(tokens: list[int], labels: list[int] | None = None) -> Sample:
    tokens_array = np.array(tokens, np.int64)
    return Sample(tokens_array, tokens_array if labels is None else np.array(labels, np.int64))


@given(sequences=sequences, spare=st.integers(0, 5), padding_idx=st.sampled_from([0, 7]))
def test_a_pack_is_the_oracles(sequences: list[list[tuple[int, int]]], spare: int, padding_idx: int) -> None:
    pairs = [([t for t, _ in sequence], [y for _, y in sequence]) for sequence in sequences]
    limit = sum(map(len, sequences)) + spare or 1
    lens = [len(sequence) for sequence in sequences]
    ours = assemble([sample(*pair) for pair in pairs], max_seq_len=limit, padding_idx=padding_idx)
    ours += (*positions([lens], limit),)
    assert tuple(row.tolist() for row in ours) == oracle.assemble(pairs, limit, padding_idx)
    assert all(row.shape == (limit,) for row in ours)


@pytest.mark.parametrize("padding_idx", [0, 2**31])
@pytest.mark.parametrize("spare", [0, 2])
@pytest.mark.parametrize("kinds", [(), ("ii",), ("ii", "ii"), ("il", "ii"), ("ll", "ii"), ("li",)])
def test_an_array_of_a_pack_has_32_bits_if_all_in_it_has(
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


anything = st.one_of(
    ids, st.integers(-(2**70), 2**70), st.floats(), st.booleans(), st.none(), st.text(), st.just([1])
)


wide = st.integers(-(2**63), 2**64 - 1)


@given(st.one_of(st.lists(wide, max_size=4), st.lists(anything, max_size=3)))
@example([2**63])
@example([1, 2**64 - 100, 3])
@example([-1, 2**63])
def test_a_list_is_what_numpy_makes_of_it(values: list[Any]) -> None:
    """The short way for lists of ints takes nothing that the long way refuses."""
    try:
        expected = np.asarray(values) if values else np.empty(0, np.int64)
    except ValueError:
        expected = np.empty((0, 0))
    if expected.ndim == 1 and expected.dtype == np.int64:
        made = as_sample({"tokens": values}, labels=None).tokens
        assert made.tolist() == expected.tolist()
        narrow = all(0 <= value < 2**31 for value in values)
        assert made.dtype == (np.int32 if narrow else np.int64)
        assert made.flags.writeable
        assert as_sample({"tokens": [0] * len(values), "labels": values}).labels.tolist() == values
    else:
        message = (
            "which is no int64"
            if expected.dtype.kind == "u"
            else "it must be a flat sequence of whole numbers"
        )
        with pytest.raises(ValueError, match=message):
            as_sample({"tokens": values}, labels=None)
        with pytest.raises(ValueError, match=message):
            as_sample({"tokens": [0] * len(values), "labels": values})


def test_labels_that_are_the_tokens_are_read_once() -> None:
    row = {"tokens": [1, 5, 2]}
    made = as_sample(row | {"labels": row["tokens"]})
    assert made.labels is made.tokens
    assert as_sample(row | {"labels": [1, 5, 2]}).labels is not made.tokens


@pytest.mark.parametrize("max_seq_len", [5, 7])
@pytest.mark.parametrize("masked", [(), (0,), (1,), (0, 1)])
def test_labels_are_each_samples_own(masked: tuple[int, ...], max_seq_len: int) -> None:
    """Where all is trained they are the tokens themselves; beside them, others are not, and padding never is."""
    parts = [sample([2, 3, 4]), sample([6, 7])]
    for i in masked:
        parts[i] = Sample(parts[i].tokens, np.where(parts[i].tokens % 2, parts[i].tokens, IGNORE_INDEX))
    tokens, labels = assemble(parts, max_seq_len=max_seq_len, padding_idx=9)
    padding = max_seq_len - 5
    assert tokens.tolist() == [2, 3, 4, 6, 7, *[9] * padding]
    third = IGNORE_INDEX if 0 in masked else 4
    assert labels.tolist() == [IGNORE_INDEX, 3, third, IGNORE_INDEX, 7, *[IGNORE_INDEX] * padding]


@given(st.integers(1, 12), st.data())
def test_what_is_trained_is_counted_alike(length: int, data: st.DataObject) -> None:
    """By looking at labels, and without, where they are the tokens."""
    tokens = np.arange(length)
    cuts = sorted(data.draw(st.sets(st.integers(1, length - 1)))) if length > 1 else []
    assert trained_tokens(Sample(tokens, tokens), cuts) == trained_tokens(Sample(tokens, tokens.copy()), cuts)


def test_a_pack_shares_no_memory() -> None:
    """The sample that fills a pack alone, too: what a trainer writes into a batch stays in the batch."""
    whole = sample([1, 2, 3])
    for sequences in ([whole], [whole, sample([4])]):
        rows = assemble(sequences, max_seq_len=sum(s.tokens.size for s in sequences))
        for row in rows:
            row[:] = 50
        assert not any(np.shares_memory(a, b) for a in rows for b in rows if a is not b)
    assert (whole.tokens.tolist(), whole.labels.tolist()) == ([1, 2, 3], [1, 2, 3])


def test_too_many_tokens_are_a_bug_of_the_planner() -> None:
    with pytest.raises(AssertionError, match="4 tokens planned into a pack of 3"):
        assemble([sample([1, 2]), sample([3, 4])], max_seq_len=3)


# Rows of ready tokens.


@pytest.mark.parametrize(
    "convert",
    [
        list,
        tuple,
        np.array,
        torch.tensor,
        lambda v: np.array(v, np.int32),
        lambda v: np.array(v, np.uint8),
        lambda v: torch.tensor(v, dtype=torch.int16),
        lambda v: [np.int64(x) for x in v],
    ],
)
def test_columns_may_be_lists_arrays_or_tensors(convert: Any) -> None:
    made = as_sample({"tokens": convert([1, 5, 2]), "labels": convert([1, 5, 2])})
    for column in (made.tokens, made.labels):
        assert column.dtype == np.int32
        assert column.tolist() == [1, 5, 2]


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16])
def test_a_sample_has_memory_of_its_own(dtype: Any) -> None:
    """Whoever reads into one buffer again and again, or gives slices of a huge one, is not found out later."""
    buffer = np.arange(1000, dtype=dtype)
    for column in (buffer, buffer[:5], buffer[5:10]):
        made = as_sample({"tokens": column, "labels": column + 0})
        for ids in made:
            assert not np.shares_memory(ids, buffer)
            assert ids.nbytes == 4 * column.size
            assert ids.base is None
    buffer.flags.writeable = False
    assert not np.shares_memory(as_sample({"tokens": buffer[:5]}, labels=None).tokens, buffer)


@pytest.mark.parametrize(
    ("ids", "dtype"),
    [([1, 2**40], np.int64), ([-(2**31) - 1], np.int64), ([7], np.int64), ([7], np.int32), ([], np.int64)],
)
def test_narrowing_copies(ids: list[int], dtype: Any) -> None:
    """Who made the array may fill it anew."""
    array = np.array(ids, dtype)
    made = narrowed(array)
    array[:] = 0
    assert made.tolist() == ids


def test_64_bits_are_kept_where_an_id_needs_them() -> None:
    for values in ([1, 2**31], [-(2**31) - 1, 5]):
        assert as_sample({"tokens": np.array(values)}, labels=None).tokens.tolist() == values
    made = as_sample({"tokens": np.array([1, 2]), "labels": np.array([-(2**31), 2**31 - 1])})
    assert made.labels.dtype == np.int32
    assert made.labels.tolist() == [-(2**31), 2**31 - 1]


def test_a_part_of_what_is_all_trained_is_all_trained() -> None:
    """And known to be: what looks at labels looks at them once."""
    assert (part := sample([1, 2, 3]).cut(1, 3)).labels is part.tokens
    assert sample([1, 2, 3], [-100, 2, 3]).cut(1, 3).labels.tolist() == [2, 3]


@pytest.mark.parametrize("eos", [2, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1])
def test_an_end_may_be_any_id(eos: int) -> None:
    ended = with_eos(Sample(ids := np.array([1, 2, 3], np.int32), ids), eos)
    assert ended.tokens.tolist() == ended.labels.tolist() == [1, 2, eos]


def test_masked_lists_have_32_bits_too() -> None:
    made = as_sample({"tokens": [1, 5, 2], "labels": [-100, 5, 2]})
    assert (made.tokens.dtype, made.labels.dtype) == (np.int32, np.int32)
    assert made.labels.tolist() == [-100, 5, 2]


def test_labels_may_be_left_to_the_tokens() -> None:
    made = as_sample({"ids": [1, 5]}, tokens="ids", labels=None)
    assert made.labels.tolist() == [1, 5]
    assert as_sample({"tokens": [], "labels": []}).tokens.dtype == np.int32


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"labels": [1], "text": "a"},
            "column 'tokens' is missing; the row's columns are 'labels', 'text'",
        ),
        ({"tokens": [1]}, "column 'labels' is missing; the row's columns are 'tokens'"),
        ({}, "column 'tokens' is missing; the row's columns are none"),
        (
            {"tokens": [1, 2], "labels": [1]},
            "'tokens' has 2 entries and 'labels' has 1; labels are unshifted, one per token, "
            "-100 where nothing is trained",
        ),
        (
            {"tokens": [1.0, 2.5], "labels": [1, 2]},
            "column 'tokens' has shape [2] and type float64; it must be a flat sequence of whole numbers",
        ),
        ({"tokens": [1, 2], "labels": [1.0, 2.0]}, "column 'labels' has shape [2] and type float64"),
        ({"tokens": [[1, 2]], "labels": [1, 2]}, "column 'tokens' has shape [1, 2]"),
        ({"tokens": [True, False], "labels": [1, 2]}, "column 'tokens' has shape [2] and type bool"),
        ({"tokens": "text", "labels": [1]}, "column 'tokens' has shape []"),
        ({"tokens": [1, None], "labels": [1, 2]}, "column 'tokens' has shape [2] and type object"),
        ({"tokens": [2**70], "labels": [1]}, "column 'tokens' has shape [1] and type object"),
        ({"tokens": [[1, 2], [3]], "labels": [1, 2]}, "column 'tokens'"),  # ragged
    ],
)
def test_bad_columns(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        as_sample(row)
    assert str(error.value).startswith(message)


# The vocabulary.


@pytest.mark.parametrize(
    ("tokens", "labels", "vocab_size", "message"),
    [
        ([3, 10], None, 10, "token id 10 is outside the vocabulary of 10 ids (0 to 9)"),
        ([3, -1], None, 10, "token id -1 is outside the vocabulary of 10 ids (0 to 9)"),
        ([3, -1], None, None, "token id -1 is outside the vocabulary of ids from 0"),
        ([-(2**63), 3], None, None, f"token id {-(2**63)} is outside the vocabulary of ids from 0"),
        ([3, -100], [3, 3], 10, "token id -100 is outside the vocabulary of 10 ids (0 to 9)"),
        ([3, 4], [10, 4], 10, "label 10 is neither -100 nor in the vocabulary of 10 ids (0 to 9)"),
        ([3, 4], [-100, -1], 10, "label -1 is neither -100 nor in the vocabulary of 10 ids (0 to 9)"),
        ([3, 4], [-100, -1], None, "label -1 is neither -100 nor in the vocabulary of ids from 0"),
        ([3, 4], [-101, 4], None, "label -101 is neither -100 nor in the vocabulary of ids from 0"),
    ],
)
def test_ids_outside_the_vocabulary(
    tokens: list[int], labels: list[int] | None, vocab_size: int | None, message: str
) -> None:
    with pytest.raises(ValueError) as error:
        check_sample(sample(tokens, labels), vocab_size)
    assert str(error.value) == message


@given(st.lists(st.integers(-3, 12), max_size=6), st.integers(1, 12))
def test_vocabulary_is_checked_id_by_id(tokens: list[int], vocab_size: int) -> None:
    inside = all(0 <= token < vocab_size for token in tokens)
    try:
        check_sample(sample(tokens), vocab_size)
    except ValueError:
        assert not inside
    else:
        assert inside


def test_what_the_vocabulary_allows() -> None:
    check_sample(sample([0, 9], [IGNORE_INDEX, 9]), 10)
    check_sample(sample([0, 2**62]), None)
    check_sample(sample([]), 1)


# A truncated sample's end.


@pytest.mark.parametrize(
    ("labels", "expected"), [([1, 2, 3], [1, 2, 9]), ([1, 2, IGNORE_INDEX], [1, 2, IGNORE_INDEX])]
)
def test_eos_replaces_the_last_token_and_its_label_where_trained(
    labels: list[int], expected: list[int]
) -> None:
    before = sample([1, 2, 3], labels)
    after = with_eos(before, 9)
    assert (after.tokens.tolist(), after.labels.tolist()) == ([1, 2, 9], expected)
    assert (before.tokens.tolist(), before.labels.tolist()) == ([1, 2, 3], labels), "the row keeps its own"
