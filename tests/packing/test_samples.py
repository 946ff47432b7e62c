"""Columns to samples, and the check of a sample. `test_samples_rows.py` tests rows and encoders in every form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from streampack import IGNORE_INDEX
from streampack.packing.columns import narrowed
from streampack.packing.samples import check_sample, sample_from_columns
from tests.harness.samples import make_sample

anything = st.one_of(
    st.integers(0, 99),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.booleans(),
    st.none(),
    st.text(),
    st.just([1]),
)
around_int64 = st.integers(-(2**63), 2**64 - 1)


@given(st.one_of(st.lists(around_int64, max_size=4), st.lists(anything, max_size=3)))
@example([2**63])
@example([1, 2**64 - 100, 3])
@example([-1, 2**63])
def test_lists_convert_as_numpy_converts_them(values: list[Any]) -> None:
    """The fast path for lists of ints accepts nothing that the path through numpy refuses; nor are booleans ids."""
    try:
        expected = np.asarray(values) if values else np.empty(0, np.int64)
    except ValueError:
        expected = np.empty((0, 0))
    if expected.ndim == 1 and expected.dtype == np.int64 and bool not in map(type, values):
        made = sample_from_columns({"tokens": values}, labels=None).tokens
        assert made.tolist() == expected.tolist()
        narrow = all(0 <= value < 2**31 for value in values)
        assert made.dtype == (np.int32 if narrow else np.int64)
        assert made.flags.writeable
        assert sample_from_columns({"tokens": [0] * len(values), "labels": values}).labels.tolist() == values
    else:
        message = "which is no int64" if expected.dtype.kind == "u" else "whole numbers"
        with pytest.raises(ValueError, match=message):
            sample_from_columns({"tokens": values}, labels=None)
        with pytest.raises(ValueError, match=message):
            sample_from_columns({"tokens": [0] * len(values), "labels": values})


def test_labels_that_are_the_tokens_share_their_array() -> None:
    row = {"tokens": [1, 5, 2]}
    made = sample_from_columns(row | {"labels": row["tokens"]})
    assert made.labels is made.tokens
    assert sample_from_columns(row | {"labels": [1, 5, 2]}).labels is not made.tokens


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
    made = sample_from_columns({"tokens": convert([1, 5, 2]), "labels": convert([1, 5, 2])})
    for column in (made.tokens, made.labels):
        assert column.dtype == np.int32
        assert column.tolist() == [1, 5, 2]


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16])
def test_samples_share_no_memory_with_columns(dtype: Any) -> None:
    """A source may overwrite its buffer with the next row, or return slices of a huge array, which must not be kept."""
    buffer = np.arange(1000, dtype=dtype)
    for column in (buffer, buffer[:5], buffer[5:10]):
        made = sample_from_columns({"tokens": column, "labels": column + 0})
        for ids in made:
            assert not np.shares_memory(ids, buffer)
            assert ids.nbytes == 4 * column.size
            assert ids.base is None
    buffer.flags.writeable = False
    assert not np.shares_memory(sample_from_columns({"tokens": buffer[:5]}, labels=None).tokens, buffer)


@pytest.mark.parametrize(
    ("ids", "dtype"),
    [([1, 2**40], np.int64), ([-(2**31) - 1], np.int64), ([7], np.int64), ([7], np.int32), ([], np.int64)],
)
def test_narrowed_copies_every_array(ids: list[int], dtype: Any) -> None:
    """The caller may reuse its array."""
    array = np.array(ids, dtype)
    made = narrowed(array)
    array[:] = 0
    assert made.tolist() == ids


def test_ids_beyond_int32_stay_int64() -> None:
    for values in ([1, 2**31], [-(2**31) - 1, 5]):
        assert sample_from_columns({"tokens": np.array(values)}, labels=None).tokens.tolist() == values
    made = sample_from_columns({"tokens": np.array([1, 2]), "labels": np.array([-(2**31), 2**31 - 1])})
    assert made.labels.dtype == np.int32
    assert made.labels.tolist() == [-(2**31), 2**31 - 1]


def test_lists_with_masked_labels_become_int32() -> None:
    made = sample_from_columns({"tokens": [1, 5, 2], "labels": [-100, 5, 2]})
    assert (made.tokens.dtype, made.labels.dtype) == (np.int32, np.int32)
    assert made.labels.tolist() == [-100, 5, 2]


def test_labels_none_trains_every_token() -> None:
    made = sample_from_columns({"ids": [1, 5]}, tokens="ids", labels=None)
    assert made.labels.tolist() == [1, 5]
    assert sample_from_columns({"tokens": [], "labels": []}).tokens.dtype == np.int32


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
def test_bad_columns_are_refused_with_the_reason(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        sample_from_columns(row)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("tokens", "labels", "vocab_size", "message"),
    [
        (
            [3, 10],
            None,
            10,
            "token id 10 is outside the vocabulary of 10 ids (0 to 9); use the model's own tokenizer, or resize the "
            "model's embeddings",
        ),
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
def test_ids_outside_the_vocabulary_are_refused(
    tokens: list[int], labels: list[int] | None, vocab_size: int | None, message: str
) -> None:
    with pytest.raises(ValueError) as error:
        check_sample(make_sample(tokens, labels), vocab_size)
    assert str(error.value) == message


@given(st.lists(st.integers(-3, 12), max_size=6), st.integers(1, 12))
def test_one_id_outside_the_vocabulary_is_enough_to_refuse(tokens: list[int], vocab_size: int) -> None:
    inside = all(0 <= token < vocab_size for token in tokens)
    try:
        check_sample(make_sample(tokens), vocab_size)
    except ValueError:
        assert not inside
    else:
        assert inside


def test_ids_within_the_vocabulary_pass() -> None:
    check_sample(make_sample([0, 9], [IGNORE_INDEX, 9]), 10)
    check_sample(make_sample([0, 2**62]), None)
    check_sample(make_sample([]), 1)
