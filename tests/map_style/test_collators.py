"""Rows of samples and of packs: `FlatteningCollator`."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streampack import (
    IGNORE_INDEX,
    FlatteningCollator,
    IterablePackedDataset,
    PackedDataset,
)

lengths_of = st.lists(st.integers(1, 12), min_size=1, max_size=12)
VARLEN: dict[str, Any] = {"return_flash_attn_kwargs": True, "return_seq_idx": True}


def samples_of(lengths: list[int], *, ids: str = "input_ids") -> list[dict[str, list[int]]]:
    """Make samples whose second label is masked."""
    made = []
    for i, length in enumerate(lengths, start=1):
        tokens = [100 * i + j for j in range(length)]
        made.append({ids: tokens, "labels": [IGNORE_INDEX if j == 1 else t for j, t in enumerate(tokens)]})
    return made


def packs_of(lengths: list[int], **settings: Any) -> list[dict[str, Any]]:
    rows = samples_of(lengths)
    return list(IterablePackedDataset(rows, **{"max_seq_len": 16, "num_lanes": 1} | settings))


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Compare names, their order, types, dtypes, shapes and values."""
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert type(ours[name]) is type(value), name
        if isinstance(value, int):
            assert ours[name] == value, name
        else:
            assert ours[name].dtype == value.dtype, name
            assert ours[name].shape == value.shape, name
            assert ours[name].tolist() == value.tolist(), name


def test_equals_transformers_collator() -> None:
    transformers = pytest.importorskip("transformers")
    rng = np.random.default_rng(0)
    choices = {
        "return_position_ids": (True, False), "return_flash_attn_kwargs": (True, False),
        "return_seq_idx": (True, False),
    }  # fmt: skip
    options = [dict(zip(choices, chosen, strict=True)) for chosen in itertools.product(*choices.values())]
    convert = (lambda values: values, np.array, torch.tensor)
    for number in range(400):
        chosen = options[number % len(options)]
        columns = convert[int(rng.integers(3))]
        batch = [
            {"input_ids": columns(rng.integers(0, 1000, size).tolist())}
            for size in rng.integers(1, 40, rng.integers(1, 9)).tolist()
        ]
        if rng.random() < 0.7:
            for sample in batch:
                labels = [int(token) if rng.random() < 0.5 else IGNORE_INDEX for token in sample["input_ids"]]
                sample["labels"] = columns(labels)
        theirs = transformers.DataCollatorWithFlattening(**chosen)(batch)
        assert_same(FlatteningCollator(**chosen)(batch), theirs)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.sampled_from([1, 8, 72]))
def test_rows_are_padded(lengths: list[int], multiple: int) -> None:
    """The row's padding is a sequence of its own."""
    samples = samples_of(lengths)
    bare = FlatteningCollator(**VARLEN)(samples)
    batch = FlatteningCollator(**VARLEN, pad_to_multiple_of=multiple, padding_idx=9)(samples)
    used = sum(lengths)
    rest = -used % multiple
    fillers = {"input_ids": [9] * rest, "labels": [IGNORE_INDEX] * rest, "position_ids": [*range(rest)],
               "seq_idx": [len(lengths)] * rest}  # fmt: skip
    for name, filler in fillers.items():
        assert batch[name].tolist() == [bare[name][0].tolist() + filler], name
    for side in ("q", "k"):
        ends = bare[f"cu_seq_lens_{side}"].tolist() + [used + rest] * (rest > 0)
        assert batch[f"cu_seq_lens_{side}"].tolist() == ends
        assert batch[f"cu_seq_lens_{side}"].dtype == torch.int32
        assert batch[f"max_length_{side}"] == max(*lengths, rest)


@given(lengths_of, st.sampled_from(["stream", "map", "torchtune"]))
def test_packs_flatten_as_their_samples_do(lengths: list[int], kind: str) -> None:
    rows = samples_of(lengths, ids="tokens")
    if kind == "stream":
        packs = list(IterablePackedDataset(rows, max_seq_len=12, num_lanes=1))
    else:
        parity = "torchtune" if kind == "torchtune" else None
        packs = list(PackedDataset(rows, max_seq_len=12, parity=parity))
    before = repr((rows, packs))
    order = [fragment.row_id[-1] for pack in packs for fragment in pack["fragments"]]
    assert sorted(order) == list(range(len(lengths)))
    assert_same(FlatteningCollator(**VARLEN)(packs), FlatteningCollator(**VARLEN)([rows[i] for i in order]))
    assert repr((rows, packs)) == before, "samples and packs are not changed"


# What is refused.


PACK = packs_of([1])[0]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([], "the batch holds no sequence; give at least one sample"),
        ([{"tokens": [1], "input_ids": [1], "labels": [1]}],
         "sample 0 of the batch: there are both 'tokens' and 'input_ids'; remove the one that is not to be"),
        ([{"input_ids": [1]}, {"labels": [1]}],
         "sample 1 of the batch: it has no 'tokens' and no 'input_ids'; its columns are 'labels'. A Trainer removes"),
        ([{"input_ids": []}], "sample 0 of the batch: it has 0 tokens; remove it"),
        ([{"tokens": [1]}], "sample 0 of the batch: column 'labels' is missing; the row's columns are 'tokens'"),
        ([{"input_ids": [1, 2], "labels": [1]}],
         "sample 0 of the batch: 'input_ids' has 2 entries and 'labels' has 1; labels are unshifted, one per token"),
    ],
)  # fmt: skip
def test_bad_batches_are_refused(batch: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError) as error:
        FlatteningCollator()(batch)
    assert str(error.value).startswith(message)


def flat(*features: Any, **settings: Any) -> Any:
    return lambda: FlatteningCollator(**settings)(list(features))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (flat({name: PACK[name] for name in ("tokens", "labels", "seq_lens")}), "column 'seq_lens': it is a pack al"),
        (flat({**PACK, "num_seqs": 0}), "the batch holds no sequence; give at least one sample"),
        (flat(pad_to_multiple_of=0), "pad_to_multiple_of=0 is below 1; give at least 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        make()
    assert message in str(error.value)
