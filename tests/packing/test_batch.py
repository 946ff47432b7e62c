from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streampack import IGNORE_INDEX, Batch, Fragment, IterablePackedDataset, Pack, Sample, collate_packed
from streampack.packing.assemble import assemble
from streampack.packing.batch import null_pack, stack_packs, to_torchtune, unstack_packs
from tests.support import groups, oracle

LIMIT = 12
contents = st.lists(st.integers(1, 6), min_size=1, max_size=LIMIT).filter(lambda lens: sum(lens) <= LIMIT)


def make_pack(seq_lens: list[int], *, first: int = 1) -> Pack:
    sequences, fragments, at = [], [], first
    for i, length in enumerate(seq_lens):
        tokens = np.arange(at, at + length, dtype=np.int32)
        sequences.append(Sample(tokens, tokens))
        fragments.append(Fragment((i,), 0, length))
        at += length
    tokens, labels = assemble(sequences, max_seq_len=LIMIT)
    return Pack(tokens, labels, tuple(seq_lens), tuple(fragments), 3, 5, 2)


@given(contents)
def test_one_pack_becomes_the_dict_of_torchtune(seq_lens: list[int]) -> None:
    pack = make_pack(seq_lens)
    row = to_torchtune(pack)
    padding = LIMIT - sum(seq_lens)
    pairs = [([1] * length, [1] * length) for length in seq_lens]
    expected = (pack.tokens.tolist(), pack.labels.tolist(), oracle.assemble(pairs, LIMIT, 0)[2])
    for name, values in zip(("tokens", "labels", "input_pos"), expected, strict=True):
        assert row[name].dtype == torch.int64
        assert row[name].tolist() == values
    assert row["seq_lens"].tolist() == seq_lens + ([padding] if padding else [])
    assert row["seq_lens"].dtype == torch.int64
    assert row["num_seqs"] == len(seq_lens)
    assert (row["fragments"], row["epoch"], row["lane"]) == (pack.fragments, 3, 2)


def test_a_null_pack_trains_nothing() -> None:
    pack = null_pack(4, padding_idx=9)
    row = to_torchtune(pack)
    assert row["tokens"].tolist() == [9] * 4
    assert row["labels"].tolist() == [IGNORE_INDEX] * 4
    assert (row["seq_lens"].tolist(), row["num_seqs"]) == ([4], 0)
    batch = collate_packed([row, row])
    assert (batch.num_tokens, batch.num_seqs, batch.num_trained.item()) == (0, 0, 0)


@given(st.lists(contents, min_size=1, max_size=4))
def test_a_batch_stacks_its_packs(packs: list[list[int]]) -> None:
    rows = [to_torchtune(make_pack(seq_lens, first=1 + 100 * i)) for i, seq_lens in enumerate(packs)]
    batch = collate_packed(rows)
    for name in ("tokens", "labels", "input_pos"):
        stacked = getattr(batch, name)
        assert stacked.shape == (len(packs), LIMIT)
        assert stacked.tolist() == [row[name].tolist() for row in rows]
    assert batch.seq_lens.dtype == torch.int32
    assert batch.seq_lens.sum(1).tolist() == [LIMIT] * len(packs)
    for lens, row in zip(batch.seq_lens.tolist(), rows, strict=True):
        real = row["seq_lens"].tolist()
        assert lens == real + [0] * (len(lens) - len(real)), "zeros only at the end"
    assert batch.num_seqs == sum(map(len, packs))
    assert batch.num_tokens == sum(map(sum, packs))
    assert batch.num_trained.item() == sum(length - 1 for lens in packs for length in lens)
    assert batch.fragments == tuple(row["fragments"] for row in rows)


@given(st.lists(contents, max_size=4), st.sampled_from([None, LIMIT + 1]), st.booleans())
def test_packs_and_their_dicts_make_the_same_batch(
    lens: list[list[int]], segments: int | None, frozen: bool
) -> None:
    """Arrays that cannot be written to, as some arrive from a pipe, are copied."""
    packs = [null_pack(LIMIT)] + [make_pack(seq_lens, first=1 + 100 * i) for i, seq_lens in enumerate(lens)]
    for pack in packs if frozen else []:
        pack.tokens.flags.writeable = pack.labels.flags.writeable = False
    ours = stack_packs(packs, segments=segments)
    theirs = collate_packed([to_torchtune(pack) for pack in packs], segments=segments)
    for name in ("tokens", "labels", "input_pos", "seq_lens"):
        assert getattr(ours, name).dtype == getattr(theirs, name).dtype
        assert getattr(ours, name).dtype == (torch.int32 if name == "seq_lens" else torch.int64)
        assert torch.equal(getattr(ours, name), getattr(theirs, name))
    assert ours.fragments == theirs.fragments


def test_a_batch_shares_no_memory_with_its_packs() -> None:
    pack = make_pack([3, 4])
    for batch in (collate_packed([to_torchtune(pack)]), stack_packs([pack, pack])):
        batch.tokens.zero_()
        assert pack.tokens.tolist()[:3] == [1, 2, 3]


def test_all_tensors_of_a_batch_move_together() -> None:
    batch = collate_packed([to_torchtune(make_pack([3, 4]))])
    moved = batch.to("meta")
    assert isinstance(moved, Batch)
    for name in ("tokens", "labels", "input_pos", "seq_lens"):
        assert getattr(moved, name).device.type == "meta"
        assert getattr(batch, name).device.type == "cpu"
    assert moved.fragments == batch.fragments


@pytest.mark.parametrize("packs", [[[3, 4]], [[12], [1] * 12, [5, 5]]])
def test_torchtunes_own_collate_takes_the_packs(packs: list[list[int]]) -> None:
    data = pytest.importorskip("torchtune.data")
    rows: list[dict[str, Any]] = [to_torchtune(make_pack(seq_lens)) for seq_lens in packs]
    batch = data.padded_collate_packed(rows)
    for i, row in enumerate(rows):
        assert batch["tokens"][i].tolist() == row["tokens"].tolist()
        assert batch["mask"][i].tolist() == oracle.block_causal_mask(row["seq_lens"].tolist())


def test_segments_sets_the_width_of_seq_lens() -> None:
    packs = [to_torchtune(make_pack(seq_lens)) for seq_lens in ([3, 2], [1])]
    assert collate_packed(packs, segments=4).seq_lens.shape == (2, 4)
    assert torch.equal(collate_packed(packs, segments=4).seq_lens[:, :3], collate_packed(packs).seq_lens)
    with pytest.raises(
        ValueError, match=r"a pack has 3 segments, padding included, and segments=2; give max_seqs"
    ):
        collate_packed(packs, segments=2)
    with pytest.raises(
        ValueError, match=r"a pack has 3 segments, padding included, and segments=2; give max_seqs"
    ):
        stack_packs([make_pack([3, 2])], segments=2)


def test_unstacked_packs_are_copies_without_null_packs() -> None:
    rows = [{"tokens": [i, i + 1], "labels": [i, i + 1]} for i in range(1, 7)]
    packs = list(IterablePackedDataset(rows, max_seq_len=5).stream())
    batch = stack_packs([*packs, null_pack(5)])
    found = unstack_packs(batch)
    batch.tokens.zero_()
    assert len(found) == len(packs)
    for mine, theirs in zip(found, packs, strict=True):
        assert mine.seq_lens == theirs.seq_lens
        assert mine.fragments == theirs.fragments
        assert mine.tokens.tolist() == theirs.tokens.tolist()
        assert mine.labels.tolist() == theirs.labels.tolist()


def test_unstacked_packs_of_groups_are_stacked_to_the_same_batch() -> None:
    batch = groups.batch_of(groups.trees())
    assert batch.groups is not None
    again = stack_packs(unstack_packs(batch))
    assert again.groups is not None
    assert again.groups.parents == batch.groups.parents
    assert torch.equal(again.groups.first_labels, batch.groups.first_labels)
    assert torch.equal(again.input_pos, batch.input_pos)
    assert torch.equal(again.labels, batch.labels)
