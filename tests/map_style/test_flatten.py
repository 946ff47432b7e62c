from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streampack import (
    IGNORE_INDEX,
    FlatteningCollator,
    Group,
    IterablePackedDataset,
    PackedDataLoader,
    collate_packed,
)
from streampack.map_style import flatten_batch, join_documents
from streampack.packing.batch import null_pack, to_torchtune

lengths_of = st.lists(st.integers(1, 12), min_size=1, max_size=20)


def rows_of(lengths: list[int]) -> list[dict[str, list[int]]]:
    return [
        {"tokens": [100 * i + j for j in range(length)], "labels": [100 * i + j for j in range(length)]}
        for i, length in enumerate(lengths, start=1)
    ]


def stream_of(lengths: list[int], **settings: Any) -> IterablePackedDataset:
    return IterablePackedDataset(rows_of(lengths), num_lanes=1, **settings)


@given(lengths_of, st.integers(1, 3), st.sampled_from([1, 8]))
def test_flattening_leaves_out_the_padding(lengths: list[int], batch_size: int, multiple: int) -> None:
    packs = list(stream_of(lengths, max_seq_len=16))[:batch_size]
    flat = flatten_batch(collate_packed(packs), pad_pack_to=multiple, padding_idx=9)
    expected = FlatteningCollator(pad_to_multiple_of=multiple, padding_idx=9, return_flash_attn_kwargs=True)(
        packs
    )
    assert flat.tokens.tolist() == expected["input_ids"].tolist()
    assert flat.labels.tolist() == expected["labels"].tolist()
    assert flat.input_pos.tolist() == expected["position_ids"].tolist()
    assert flat.seq_lens.cumsum(1).tolist() == [expected["cu_seq_lens_q"].tolist()[1:]]
    assert flat.seq_lens.dtype == torch.int32
    whole = collate_packed(packs)
    assert (flat.num_tokens, flat.num_seqs) == (whole.num_tokens, whole.num_seqs)
    assert flat.num_trained == whole.num_trained


@given(lengths_of)
def test_flattening_keeps_the_padding_inside_sequences(lengths: list[int]) -> None:
    packs = list(stream_of(lengths, max_seq_len=16, pad_seqs_to=4))
    whole = collate_packed(packs)
    flat = flatten_batch(whole)
    kept = [
        n
        for row, pack in zip(whole.seq_lens, whole.fragments, strict=True)
        for n in row[: len(pack)].tolist()
    ]
    assert flat.seq_lens.tolist() == [kept]
    real = flat.unpadded_lens.sum().item()
    assert real == flat.num_tokens == sum(lengths)
    row = FlatteningCollator(return_flash_attn_kwargs=True)(packs)
    assert row["cu_seq_lens_q"].diff().tolist() == kept
    assert torch.equal(row["input_ids"], flat.tokens)
    assert torch.equal(row["labels"], flat.labels)


def test_documents_that_are_padded_are_not_joined() -> None:
    with pytest.raises(ValueError, match="would attend to that padding; leave pad_seqs_to out"):
        join_documents(collate_packed(list(stream_of([3, 2], max_seq_len=16, pad_seqs_to=4))))


@given(lengths_of, st.integers(1, 4))
def test_a_stream_of_mini_batches(lengths: list[int], size: int) -> None:
    """Rows of ``size`` samples in the order of arrival, without padding."""
    stream = stream_of(lengths, max_seq_len=12 * size, strategy="next_fit", max_seqs_per_pack=size)
    flat = [flatten_batch(batch) for batch in PackedDataLoader(stream)]
    rows = rows_of(lengths)
    expected = [
        list(chain(*(row["tokens"] for row in rows[i : i + size]))) for i in range(0, len(rows), size)
    ]
    assert [batch.tokens.tolist() for batch in flat] == [[row] for row in expected]
    assert [batch.seq_lens.tolist() for batch in flat] == [
        [lengths[i : i + size]] for i in range(0, len(lengths), size)
    ]


def test_a_batch_of_padding_becomes_one_token() -> None:
    nothing = collate_packed([to_torchtune(null_pack(6)), to_torchtune(null_pack(6))])
    flat = flatten_batch(nothing, padding_idx=9)
    assert (flat.tokens.tolist(), flat.labels.tolist(), flat.seq_lens.tolist()) == (
        [[9]],
        [[IGNORE_INDEX]],
        [[1]],
    )
    assert flatten_batch(nothing, pad_pack_to=4).tokens.shape == (1, 4)


def test_groups_are_refused() -> None:
    pair = Group([5, 6, 7, 8, 9], [-100, -100, 7, 8, 9], lengths=[2, 2, 1], parents=[-1, 0, 0])
    packs = IterablePackedDataset([0], encoder=lambda _: pair, max_seq_len=8)
    with pytest.raises(
        ValueError, match="has groups, and flatten_batch would part answers from their prompts"
    ):
        flatten_batch(collate_packed(list(packs)))


@given(lengths_of, st.integers(1, 3), st.booleans())
def test_joined_documents_are_one_sequence(lengths: list[int], batch_size: int, null: bool) -> None:
    packs = list(stream_of(lengths, max_seq_len=16))[:batch_size]
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
    for name in ("tokens", "labels"):
        assert torch.equal(getattr(joined, name), getattr(apart, name))
