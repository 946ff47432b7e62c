"""Rows of samples and of packs: `FlatteningCollator`, `PaddedCollator`, `flatten_batch` and `join_documents`."""

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
    Group,
    IterablePackedDataset,
    PackedDataset,
    PaddedCollator,
    collate_packed,
)
from streampack.map_style import flatten_batch, join_documents
from streampack.packing.batch import null_pack, to_torchtune

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
    # Options of a single call.
    theirs = transformers.DataCollatorWithFlattening()(batch, return_tensors="np", separator_id=5)
    assert_same(FlatteningCollator()(batch, return_tensors="np", separator_id=5), theirs)


SIZES: list[dict[str, int]] = [
    {}, {"pad_to_multiple_of": 8}, {"max_tokens": 72}, {"max_tokens": 72, "max_seqs": 6}
]  # fmt: skip


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6), st.sampled_from([1, 2, 4]), st.sampled_from(SIZES)
)
def test_sequences_and_rows_are_padded(lengths: list[int], multiple: int, sizes: dict[str, int]) -> None:
    """Each sequence has its own padding, with positions that go on; the row's padding is a sequence of its own."""
    samples = samples_of(lengths)
    batch = FlatteningCollator(**VARLEN, **sizes, padding_idx=9, pad_seqs_to=multiple)(samples)
    tokens, labels, positions, numbers, ends = [], [], [], [], [0]
    for number, sample in enumerate(samples):
        ids = list(sample["input_ids"])
        filler = -len(ids) % multiple
        tokens += ids + [9] * filler
        labels += [IGNORE_INDEX, *sample["labels"][1:]] + [IGNORE_INDEX] * filler
        positions += range(len(ids) + filler)
        numbers += [number] * (len(ids) + filler)
        ends.append(len(tokens))
    whole = sizes.get("pad_to_multiple_of", 1)
    size = sizes.get("max_tokens") or -(-len(tokens) // whole) * whole
    rest = size - len(tokens)
    assert batch["input_ids"].tolist() == [tokens + [9] * rest]
    assert batch["labels"].tolist() == [labels + [IGNORE_INDEX] * rest]
    assert batch["position_ids"].tolist() == [positions + list(range(rest))]
    assert batch["seq_idx"].tolist() == [numbers + [len(lengths)] * rest]
    ends += [size] * (rest > 0)
    longest = max(np.diff(ends))
    if "max_seqs" in sizes:
        ends += [size] * (6 + 2 - len(ends))
        longest = size
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


# Batches, not rows: padding left out, and documents joined.


@given(lengths_of, st.integers(1, 3), st.sampled_from([{}, {"pad_pack_to": 8}]), st.sampled_from([1, 4]))
def test_a_flat_batch_is_what_the_collator_makes(
    lengths: list[int], size: int, padded: dict[str, int], multiple: int
) -> None:
    packs = packs_of(lengths, pad_seqs_to=multiple)[:size]
    whole = collate_packed(packs)
    flat = flatten_batch(whole, padding_idx=9, **padded)
    expected = FlatteningCollator(
        pad_to_multiple_of=padded.get("pad_pack_to"), padding_idx=9, return_flash_attn_kwargs=True
    )(packs)
    assert flat.labels.tolist() == expected["labels"].tolist()
    assert flat.input_pos.tolist() == expected["position_ids"].tolist()
    assert flat.seq_lens.cumsum(1).tolist() == [expected["cu_seq_lens_q"].tolist()[1:]]
    assert flat.seq_lens.dtype == torch.int32
    assert flat.tokens.tolist() == expected["input_ids"].tolist()
    assert (flat.num_tokens, flat.num_seqs) == (whole.num_tokens, whole.num_seqs)
    assert flat.num_trained == whole.num_trained
    assert padded or flat.unpadded_lens.sum() == flat.num_tokens


def test_a_batch_of_padding_becomes_one_token() -> None:
    nothing = collate_packed([to_torchtune(null_pack(6)), to_torchtune(null_pack(6))])
    flat = flatten_batch(nothing, padding_idx=9)
    assert (flat.tokens.tolist(), flat.labels.tolist()) == ([[9]], [[IGNORE_INDEX]])
    assert flat.seq_lens.tolist() == [[1]]
    assert flatten_batch(nothing, pad_pack_to=4).tokens.shape == (1, 4)


@given(lengths_of, st.integers(1, 3), st.booleans())
def test_joined_documents_are_one_sequence(lengths: list[int], size: int, null: bool) -> None:
    packs = packs_of(lengths)[:size]
    apart = collate_packed([*packs, *[to_torchtune(null_pack(16))] * null])
    joined = join_documents(apart)
    for row, pack in enumerate(packs):
        used = sum(pack["seq_lens"].tolist()[: pack["num_seqs"]])
        assert joined.seq_lens[row].tolist() == [used, 16 - used]
        assert joined.input_pos[row].tolist() == [*range(used), *range(16 - used)]
    if null:
        assert (joined.seq_lens[-1].tolist(), joined.input_pos[-1].tolist()) == ([16, 0], [*range(16)])
    assert joined.seq_lens.dtype == torch.int32
    assert joined.fragments == apart.fragments
    assert torch.equal(joined.tokens, apart.tokens)
    assert torch.equal(joined.labels, apart.labels)


# What is refused.


PACK = packs_of([1])[0]
PAIR = Group([5, 6, 7, 8, 9], [-100, -100, 7, 8, 9], lengths=[2, 2, 1], parents=[-1, 0, 0])
ONLY = "a batch holds packs of streampack.PackedDataset or IterablePackedDataset only, or samples only"
SAME = "give all samples the same columns"


@pytest.mark.parametrize("collate", [FlatteningCollator(), PaddedCollator()])
@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([], "the batch is empty; give at least one sample"),
        ([{"tokens": [1], "input_ids": [1], "labels": [1]}],
         "sample 0 of the batch: there are both 'tokens' and 'input_ids'; remove the one that is not to be"),
        ([{"input_ids": [1]}, {"tokens": [1], "labels": [1]}],
         f"sample 1 of the batch has 'tokens' and the first does not agree; {SAME}"),
        ([{"input_ids": [1], "labels": [1]}, {"input_ids": [1]}],
         f"sample 1 of the batch lacks 'labels' and the first does not agree; {SAME}"),
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
        (flat(PACK, {"input_ids": [1]}), f"feature 1 has no 'labels', 'num_seqs', 'seq_lens', 'tokens'; {ONLY}"),
        (flat({**PACK, "num_seqs": 0}), "the packs of this batch hold no sequence; give at least one that does"),
        (lambda: PaddedCollator()([PACK]), "a pack came where a sample was expected: an attention_mask of rows does"),
        (flat({"input_ids": [1, 2, 3]}, max_tokens=2), "the batch has 3 tokens, max_tokens is 2; raise max_tokens"),
        (flat({"input_ids": [1]}, {"input_ids": [2]}, max_tokens=8, max_seqs=1),
         "the batch has 2 sequences, max_seqs is 1; raise max_seqs, or give batches of fewer samples"),
        (flat(max_tokens=8, pad_to_multiple_of=4), "pad_to_multiple_of=4 and max_tokens=8: give one of the two"),
        (flat(max_seqs=8), "max_seqs=8 without max_tokens: the row's length would still vary; give both"),
        (flat(return_tensors="tf"), "return_tensors='tf' is unknown; choose one of 'pt', 'np'"),
        (flat(pad_seqs_to=4, max_tokens=10), "max_tokens=10 is no multiple of pad_seqs_to=4; set max_tokens to 12, or"),
        (lambda: PaddedCollator(pad_to_multiple_of=0), "pad_to_multiple_of=0 is below 1; give at least 1"),
        (lambda: join_documents(collate_packed(packs_of([3, 2], pad_seqs_to=4))),
         "would attend to that padding; leave pad_seqs_to out"),
        (lambda: flatten_batch(collate_packed(list(
            IterablePackedDataset([0], encoder=lambda _: PAIR, max_seq_len=8)))), "the batch has groups, and flatten"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        make()
    assert message in str(error.value)
