"""Rows of samples and of packs: `FlatteningCollator` and `PaddedCollator`."""

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
    PaddedCollator,
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
        "return_seq_idx": (True, False), "separator_id": (IGNORE_INDEX, 7), "position_ids_start": (0, 2),
        "return_tensors": ("pt", "np"),
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


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([None, 8, 72]),
)
def test_sequences_and_rows_are_padded(lengths: list[int], multiple: int, whole: int | None) -> None:
    """Each sequence has its own padding, with positions that go on; the row's padding is a sequence of its own."""
    samples = samples_of(lengths)
    batch = FlatteningCollator(**VARLEN, pad_to_multiple_of=whole, padding_idx=9, pad_seqs_to=multiple)(
        samples
    )
    tokens, labels, positions, numbers, ends = [], [], [], [], [0]
    for number, sample in enumerate(samples):
        ids = list(sample["input_ids"])
        filler = -len(ids) % multiple
        tokens += ids + [9] * filler
        labels += [IGNORE_INDEX, *sample["labels"][1:]] + [IGNORE_INDEX] * filler
        positions += range(len(ids) + filler)
        numbers += [number] * (len(ids) + filler)
        ends.append(len(tokens))
    size = len(tokens) + -len(tokens) % (whole or 1)
    rest = size - len(tokens)
    assert batch["input_ids"].tolist() == [tokens + [9] * rest]
    assert batch["labels"].tolist() == [labels + [IGNORE_INDEX] * rest]
    assert batch["position_ids"].tolist() == [positions + list(range(rest))]
    assert batch["seq_idx"].tolist() == [numbers + [len(lengths)] * rest]
    ends += [size] * (rest > 0)
    longest = max(np.diff(ends))
    for side in ("q", "k"):
        assert batch[f"cu_seq_lens_{side}"].tolist() == ends
        assert batch[f"cu_seq_lens_{side}"].dtype == torch.int32
        assert batch[f"max_length_{side}"] == longest
    packs = packs_of(lengths, max_seq_len=12, pad_seqs_to=multiple, strategy="next_fit")
    again = FlatteningCollator(pad_seqs_to=multiple, padding_idx=9)(packs)
    assert again["labels"].tolist() == [labels], "padded packs are not padded again"


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
    PaddedCollator()(rows)
    assert repr((rows, packs)) == before, "samples and packs are not changed"


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.sampled_from([None, 1, 8]))
def test_padded_rows(lengths: list[int], multiple: int | None) -> None:
    samples = samples_of(lengths)
    batch = PaddedCollator(padding_idx=9, pad_to_multiple_of=multiple)(samples)
    width = -(-max(lengths) // (multiple or 1)) * (multiple or 1)
    for i, sample in enumerate(samples):
        padding = width - lengths[i]
        assert batch["input_ids"][i].tolist() == sample["input_ids"] + [9] * padding
        assert batch["labels"][i].tolist() == [IGNORE_INDEX, *sample["labels"][1:], *[IGNORE_INDEX] * padding]
        assert batch["attention_mask"][i].tolist() == [1] * lengths[i] + [0] * padding
    assert {value.dtype for value in batch.values()} == {torch.int64}
    flat = FlatteningCollator()(samples)
    assert (batch["labels"] != IGNORE_INDEX).sum() == (flat["labels"] != IGNORE_INDEX).sum()


# What is refused.


PACK = packs_of([1])[0]


@pytest.mark.parametrize("collate", [FlatteningCollator(), PaddedCollator()])
@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([], "the batch is empty; give at least one sample"),
        ([{"tokens": [1], "input_ids": [1], "labels": [1]}],
         "sample 0 of the batch: there are both 'tokens' and 'input_ids'; remove the one that is not to be"),
        ([{"input_ids": [1]}, {"labels": [1]}],
         "sample 1 of the batch has no 'tokens' and no 'input_ids'; its columns are 'labels'. A Trainer removes"),
        ([{"input_ids": []}], "sample 0 of the batch has 0 tokens; remove it"),
        ([{"tokens": [1]}], "sample 0 of the batch: column 'labels' is missing; the row's columns are 'tokens'"),
        ([{"input_ids": [1, 2], "labels": [1]}],
         "sample 0 of the batch: 'input_ids' has 2 entries and 'labels' has 1; labels are unshifted, one per token"),
    ],
)  # fmt: skip
def test_bad_batches_are_refused(collate: Any, batch: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError) as error:
        collate(batch)
    assert str(error.value).startswith(message)


def flat(*features: Any, **settings: Any) -> Any:
    return lambda: FlatteningCollator(**settings)(list(features))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (flat({name: PACK[name] for name in ("tokens", "labels", "seq_lens")}), "column 'seq_lens': it is a pack al"),
        (flat({**PACK, "num_seqs": 0}), "the packs of this batch hold no sequence; give at least one that does"),
        (lambda: PaddedCollator()([PACK]), "a pack came where a sample was expected: an attention_mask of rows does"),
        (flat(return_tensors="tf"), "return_tensors='tf' is unknown; choose one of 'pt', 'np'"),
        (flat(pad_seqs_to=4, pad_to_multiple_of=10), "pad_to_multiple_of=10 is no multiple of pad_seqs_to=4; set pad"),
        (lambda: PaddedCollator(pad_to_multiple_of=0), "pad_to_multiple_of=0 is below 1; give at least 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        make()
    assert message in str(error.value)
