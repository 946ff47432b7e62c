"""What lies in a pack and in a batch, token by token, and who may collate packs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from streampack import (
    IGNORE_INDEX,
    Batch,
    IterablePackedDataset,
    PackedDataset,
    collate_packed,
)
from streampack.packing.assemble import null_pack
from streampack.packing.batch import stack_packs, to_torchtune, unstack_packs
from tests.harness import groups
from tests.oracle import packing as oracle
from tests.oracle.packing import WAYS, settings_of

LIMIT = 12
NAMES = ("tokens", "labels", "input_pos", "seq_lens")
ids = st.integers(0, 99)
sequences = st.lists(
    st.lists(st.tuples(ids, st.one_of(st.just(IGNORE_INDEX), ids)), min_size=1, max_size=LIMIT),
    min_size=1, max_size=8,
)  # fmt: skip


def dataset(lengths: list[int], *, rows: Any = None, **changes: Any) -> IterablePackedDataset:
    """Samples of distinct tokens, all of them trained, or given rows."""
    rows = rows or [{"input_ids": list(range(100 * i + 1, 100 * i + 1 + n))} for i, n in enumerate(lengths)]
    return IterablePackedDataset(rows, **{"max_seq_len": LIMIT, "num_lanes": 1} | changes)


def same(ours: Batch, theirs: Batch) -> None:
    for name in (*NAMES, "unpadded_lens"):
        assert getattr(ours, name).dtype == getattr(theirs, name).dtype, name
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    assert ours.fragments == theirs.fragments
    assert repr(ours.groups) == repr(theirs.groups)


@settings(max_examples=150)
@given(
    pairs=sequences, way=st.sampled_from(WAYS), multiple=st.sampled_from([1, 1, 3, 4]),
    most=st.sampled_from([None, 2]), padding_idx=st.sampled_from([0, 777]),
)  # fmt: skip
def test_packs_match_the_reference(
    pairs: list[list[tuple[int, int]]], way: str, multiple: int, most: int | None, padding_idx: int
) -> None:
    """Rows whose labels are all their tokens come without a column of labels, and share a pack with others."""
    rows: list[dict[str, list[int]]] = []
    for pair in pairs:
        tokens, labels = [token for token, _ in pair], [label for _, label in pair]
        rows.append({"input_ids": tokens} if tokens == labels else {"input_ids": tokens, "labels": labels})
    data = IterablePackedDataset(
        rows, max_seq_len=LIMIT, num_lanes=1, padding_idx=padding_idx, pad_seqs_to=multiple,
        max_seqs_per_pack=most, **settings_of(way),
    )  # fmt: skip
    packs = list(data)
    for pack in packs:
        parts, lens = [], []
        for (row,), start, stop, _, padding in pack["fragments"]:
            tokens, labels = [token for token, _ in pairs[row]], [label for _, label in pairs[row]]
            assert padding == (-(stop - start) % multiple if stop == len(tokens) else 0), "ends are padded"
            parts.append(
                (tokens[start:stop] + [padding_idx] * padding, labels[start:stop] + [IGNORE_INDEX] * padding)
            )
            lens.append(stop - start + padding)
        tokens, labels, positions = oracle.assemble(parts, LIMIT, padding_idx)
        assert pack["tokens"].tolist() == tokens
        assert pack["labels"].tolist() == labels
        assert pack["input_pos"].tolist() == positions
        rest = LIMIT - sum(lens)
        assert pack["seq_lens"].tolist() == lens + [rest] * (rest > 0)
        assert all(length % multiple == 0 for length in lens)
        assert pack["num_seqs"] == len(lens) <= (most or LIMIT)
        assert {pack[name].dtype for name in NAMES} == {torch.int64}
    ledger = data.ledger()
    assert (ledger.packed, ledger.capacity) == (sum(map(len, pairs)), LIMIT * len(packs))


@pytest.mark.parametrize("overlong", ["truncate", "split", "drop"])
def test_a_sample_is_too_long_by_its_own_tokens(overlong: str) -> None:
    """One of 16 tokens fits a pack of 16 with any multiple, and one of 17 does not."""
    packs = dataset([15, 16, 17], max_seq_len=16, pad_seqs_to=8, overlong=overlong)
    found = sorted(each.stop - each.start for pack in packs for each in pack["fragments"])
    assert found == {"truncate": [15, 16, 16], "split": [1, 15, 16, 16], "drop": [15, 16]}[overlong]


@given(st.lists(st.integers(1, LIMIT), min_size=1, max_size=12), st.booleans(), st.sampled_from([1, 4]))
def test_a_batch_stacks_its_packs(lengths: list[int], frozen: bool, multiple: int) -> None:
    """Packs and the dicts of them make one batch; arrays that cannot be written to, as from a pipe, are copied."""
    data = dataset(lengths, pad_seqs_to=multiple)
    dicts, packs = list(data), list(dataset(lengths, pad_seqs_to=multiple).stream())
    for pack in packs if frozen else []:
        pack.tokens.flags.writeable = pack.labels.flags.writeable = False
    batch = stack_packs(packs)
    same(batch, collate_packed([to_torchtune(pack) for pack in packs]))
    same(batch, stack_packs(unstack_packs(batch)))
    for name in NAMES[:3]:
        assert getattr(batch, name).dtype == torch.int64
        assert getattr(batch, name).tolist() == [row[name].tolist() for row in dicts]
    assert batch.seq_lens.dtype == torch.int32
    assert batch.fragments == tuple(row["fragments"] for row in dicts)
    for lens, unpadded, row in zip(batch.seq_lens.tolist(), batch.unpadded_lens.tolist(), dicts, strict=True):
        real = row["seq_lens"].tolist()
        assert lens == real + [0] * (len(lens) - len(real)), "zeros only at the end"
        parts = [each.stop - each.start for each in row["fragments"]]
        assert unpadded == parts + lens[len(parts) :], "the padding at the pack's end is a sequence"
    assert sorted(length for pack in batch.sample_lens for length in pack) == sorted(lengths), "no padding"
    assert batch.num_seqs == len(lengths)
    assert batch.num_tokens == sum(lengths)
    assert batch.num_trained == sum(length - 1 for length in lengths)
    # It shares no memory with its packs, which a trainer's writes would change, nor do these with one another.
    before = [pack.tokens.tolist() for pack in packs]
    again = unstack_packs(stack_packs([*packs, null_pack(LIMIT)]))
    batch.tokens.zero_()
    batch.labels.zero_()
    assert [pack.tokens.tolist() for pack in packs] == [pack.tokens.tolist() for pack in again] == before


def test_a_null_pack_trains_nothing() -> None:
    row = to_torchtune(null_pack(4, padding_idx=9))
    assert (row["tokens"].tolist(), row["labels"].tolist()) == ([9] * 4, [IGNORE_INDEX] * 4)
    assert (row["seq_lens"].tolist(), row["num_seqs"]) == ([4], 0)
    batch = collate_packed([row, row])
    assert (batch.num_tokens, batch.num_seqs, batch.num_trained.item()) == (0, 0, 0)
    assert batch.sample_lens == [[], []]


def test_all_tensors_of_a_batch_move_together() -> None:
    plain, grouped = stack_packs(list(dataset([3, 4]).stream())), groups.batch_of(groups.trees())
    for batch in (plain, grouped):
        moved = batch.to("meta")
        assert {getattr(moved, name).device.type for name in NAMES} == {"meta"}
        assert {getattr(batch, name).device.type for name in NAMES} == {"cpu"}
        assert moved.fragments == batch.fragments
        if batch is grouped:
            assert moved.groups.first_labels.device.type == "meta"
            assert moved.groups.parents == batch.groups.parents
    same(stack_packs(unstack_packs(grouped)), grouped)


def test_torchtunes_own_collate_takes_the_packs() -> None:
    data = pytest.importorskip("torchtune.data")
    rows = list(dataset([12, *[1] * 12, 5, 5]))
    batch = data.padded_collate_packed(rows)
    for i, row in enumerate(rows):
        assert batch["tokens"][i].tolist() == row["tokens"].tolist()
        assert batch["mask"][i].tolist() == oracle.block_causal_mask(row["seq_lens"].tolist())


def test_segments_sets_the_width_of_seq_lens() -> None:
    packs = list(dataset([3, 2], max_seqs_per_pack=2).stream())
    assert stack_packs(packs, segments=4).seq_lens.tolist() == [[3, 2, 7, 0]]
    with pytest.raises(
        ValueError, match="a pack has 3 segments, padding included, and segments=2; give max_seqs"
    ):
        collate_packed([to_torchtune(pack) for pack in packs], segments=2)


@pytest.mark.parametrize(("packs", "workers"), [("stream", 0), ("map-style", 0), ("map-style", 1)])
def test_torchs_loader_stacks_packs_by_default(packs: str, workers: int) -> None:
    """Packs hold different numbers of samples. A user's own collator, and single packs, pass."""
    data: Any = dataset([5] * 9) if packs == "stream" else PackedDataset([[5] * 5] * 9, max_seq_len=LIMIT)
    whole = [data[i] for i in range(len(data))] if packs == "map-style" else list(dataset([5] * 9))
    found = list(DataLoader(data, batch_size=2, num_workers=workers))
    wanted = [collate_packed(whole[first : first + 2]) for first in range(0, len(whole), 2)]
    assert len(found) > 1
    for ours, theirs in zip(found, wanted, strict=True):
        same(ours, theirs)
    batch = next(iter(DataLoader(data, batch_size=2, collate_fn=collate_packed, num_workers=workers)))
    assert batch.tokens.shape == (2, LIMIT)
    mine = DataLoader(data, batch_size=2, collate_fn=lambda packs: [pack["tokens"] for pack in packs])
    assert len(next(iter(mine))) == 2
    assert next(iter(DataLoader(data, batch_size=None)))["tokens"].shape == (LIMIT,)
