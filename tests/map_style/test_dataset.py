"""`PackedDataset`. test_parity.py compares its packs with torchtune's."""

from __future__ import annotations

import copy
import pickle
import re
import sys
import tracemalloc
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset

from streampack.map_style.dataset import PackedDataset
from streampack.packing.planner import plan_packs
from streampack.packing.strategies import STRATEGIES
from streampack.streaming.dataset import IterablePackedDataset
from streampack.types import IGNORE_INDEX
from tests.support.strategies import WAYS, settings_of


def rows_of(lengths: list[int]) -> list[dict[str, list[int]]]:
    """Samples of tokens ``1000 * (sample + 1) + place``; every third label is masked."""
    rows = []
    for i, length in enumerate(lengths):
        tokens = [1000 * (i + 1) + j for j in range(length)]
        rows.append({"tokens": tokens, "labels": [IGNORE_INDEX if t % 3 == 0 else t for t in tokens]})
    return rows


class Counted(Dataset[Any]):
    """A dataset that makes samples on demand, and counts reads."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.reads: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads[index] += 1
        tokens = np.full(self.lengths[index], index)
        return {"tokens": tokens, "labels": tokens}


settings_of_all_kinds = st.fixed_dictionaries(
    {
        "max_seq_len": st.integers(1, 12),
        "strategy": st.sampled_from(sorted(STRATEGIES)),
        "buffer_size": st.integers(1, 6),
        "split_across_pack": st.booleans(),
        "overlong": st.sampled_from(["drop", "truncate", "split"]),
        "truncate_side": st.sampled_from(["right", "left"]),
    }
)
some_lengths = st.lists(st.integers(1, 20), min_size=1, max_size=30)


# Contents of packs


@given(some_lengths, settings_of_all_kinds)
def test_packs_are_those_of_the_plan(lengths: list[int], settings: Any) -> None:
    rows = rows_of(lengths)
    packed = PackedDataset(rows, **settings, padding_idx=7)
    plan = list(plan_packs(lengths, **settings))
    assert len(packed) == len(plan)
    for pack, spans in zip(packed, plan, strict=True):
        assert [tuple(f[:3]) for f in pack["fragments"]] == [((i,), start, stop) for i, start, stop in spans]
        tokens, labels, positions = [], [], []
        for i, start, stop in spans:
            tokens += rows[i]["tokens"][start:stop]
            labels += [IGNORE_INDEX, *rows[i]["labels"][start + 1 : stop]]
            positions += range(stop - start)
        padding = settings["max_seq_len"] - len(tokens)
        assert pack["tokens"].tolist() == tokens + [7] * padding
        assert pack["labels"].tolist() == labels + [IGNORE_INDEX] * padding
        assert pack["input_pos"].tolist() == [*positions, *range(padding)]
        assert pack["seq_lens"].tolist() == [s.stop - s.start for s in spans] + [padding] * (padding > 0)
        assert pack["num_seqs"] == len(spans)


@given(some_lengths, settings_of_all_kinds)
def test_the_same_packs_as_the_stream_of_one_lane(lengths: list[int], settings: Any) -> None:
    rows = rows_of(lengths)
    mapped = list(PackedDataset(rows, **settings, truncate_eos=5))
    stream = IterablePackedDataset(rows, **settings, truncate_eos=5, num_lanes=1)
    streamed = list(stream) if mapped else []  # one without packs is an error
    assert len(mapped) == len(streamed)
    for ours, theirs in zip(mapped, streamed, strict=True):
        assert ours.keys() == theirs.keys()
        for key in ("tokens", "labels", "input_pos", "seq_lens"):
            assert torch.equal(ours[key], theirs[key])
        assert ours["fragments"] == theirs["fragments"]


# The ledger


@given(some_lengths, settings_of_all_kinds, st.none() | st.integers(0, 6), st.booleans())
def test_every_token_is_packed_buffered_or_dropped(
    lengths: list[int], settings: Any, max_packs: int | None, some_empty: bool
) -> None:
    lengths = [0, *lengths, 0] if some_empty else lengths
    data = Counted(lengths)
    packed = PackedDataset(data, **settings, max_packs=max_packs, empty="drop")
    ledger, limit = packed.ledger(), settings["max_seq_len"]
    read = [lengths[i] for i in data.reads]
    assert list(data.reads) == list(range(len(read)))
    assert (ledger.samples, ledger.tokens_in) == (len(read), sum(read))
    # Counted from the packs themselves, token by token: none twice.
    places = [(f.row_id, i) for pack in packed for f in pack["fragments"] for i in range(f.start, f.stop)]
    assert len(places) == len(set(places)) == ledger.packed
    assert (ledger.packs, ledger.capacity) == (len(packed), len(packed) * limit)
    overlong = [n for n in read if n > limit]
    lost = {"drop": sum(overlong), "truncate": sum(overlong) - limit * len(overlong), "split": 0}
    reason = {"drop": "overlong", "truncate": "truncated"}.get(settings["overlong"])
    for name, tokens in ledger.dropped.items():
        assert tokens == (lost[settings["overlong"]] if name == reason else 0)
    assert ledger.dropped_samples["empty"] == read.count(0)
    assert ledger.dropped_samples[reason or "overlong"] == (len(overlong) if reason else 0)
    assert ledger.buffered == sum(read) - len(places) - lost[settings["overlong"]] >= 0
    if max_packs is None:
        assert len(read) == len(lengths)
        assert ledger.buffered == 0


# max_packs


@given(some_lengths, settings_of_all_kinds, st.integers(0, 6))
def test_max_packs_makes_the_first_of_all_packs(lengths: list[int], settings: Any, max_packs: int) -> None:
    rows = rows_of(lengths)
    every, some = PackedDataset(rows, **settings), PackedDataset(rows, **settings, max_packs=max_packs)
    assert len(some) == min(max_packs, len(every))
    assert [p["tokens"].tolist() for p in some] == [p["tokens"].tolist() for p in every][:max_packs]


@pytest.mark.parametrize("strategy", WAYS)
def test_max_packs_stops_the_reading(strategy: str) -> None:
    data = Counted([3, 5] * 500)
    PackedDataset(data, max_seq_len=8, max_packs=5, buffer_size=32, **settings_of(strategy))
    assert len(data.reads) <= 5 * 2 + 32
    assert set(data.reads.values()) == {1}


# Indexing


def test_indexing_is_like_that_of_a_list() -> None:
    packed = PackedDataset(rows_of([5, 4, 2, 3, 4]), max_seq_len=8)
    firsts = [pack["tokens"][0].item() for pack in packed]
    assert firsts == [1000, 2000, 3000]
    for index in (-3, -1, np.int64(2), torch.tensor(1)):
        assert packed[index]["tokens"][0] == firsts[index]
    for index in (3, -4):
        with pytest.raises(IndexError, match=f"there is no pack {index}: the dataset has 3 packs"):
            packed[index]
    for index in (slice(0, 2), "0"):
        with pytest.raises(TypeError):
            packed[index]


def test_a_sample_is_read_once_to_plan_and_once_per_pack() -> None:
    data = Counted([20, 4])
    packed = PackedDataset(data, max_seq_len=8, overlong="split", strategy="first_fit")
    assert [pack["seq_lens"].tolist() for pack in packed] == [[8], [8], [4, 4]]
    assert data.reads == {0: 1 + 3, 1: 1 + 1}
    data = Counted([4, 4])
    assert len(PackedDataset(data, max_seq_len=2, split_across_pack=True)) == 4
    data = Counted([6])
    whole = PackedDataset(data, max_seq_len=8, overlong="split")
    whole[0]
    assert data.reads == {0: 2}


def test_trace_leads_back_to_the_sample() -> None:
    rows = rows_of([5, 7])
    packed = PackedDataset(rows, max_seq_len=8, split_across_pack=True)
    pack = packed[1]
    [fragment] = pack["fragments"]
    assert packed.trace(fragment) == {"place": "sample 1", "row": rows[1], "tokens": [2003, 2004, 2005, 2006]}
    assert packed.trace(fragment)["tokens"] == pack["tokens"][: pack["seq_lens"][0]].tolist()


# Memory


def test_memory_is_that_of_the_plan() -> None:
    data = Ones(np.random.default_rng(0).integers(1, 400, 5_000))
    PackedDataset(Ones([1]), max_seq_len=4096)  # imports what it needs
    tracemalloc.start()
    try:
        packed = PackedDataset(data, max_seq_len=4096)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    plan = 5_000 * 32 + len(packed) * 8  # bytes; torchtune keeps 3 x 8 for each of the million tokens
    assert kept < 1.1 * plan + 100_000
    assert peak < 3 * plan + 500_000
    assert len(pickle.dumps(packed)) - len(pickle.dumps(data)) < 1.1 * plan


class Ones(Counted):
    """Samples of ones, without counting."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = np.full(self.lengths[index], 1)
        return {"tokens": tokens, "labels": tokens}


# In other tools


def same(ours: Any, theirs: Any) -> bool:
    return all(
        torch.equal(a["tokens"], b["tokens"]) and a["fragments"] == b["fragments"]
        for a, b in zip(ours, theirs, strict=True)
    )


def test_pickles_and_copies() -> None:
    packed = PackedDataset(rows_of([5, 4, 2, 3, 4]), max_seq_len=8)
    copies = [pickle.loads(pickle.dumps(packed, n)) for n in range(2, pickle.HIGHEST_PROTOCOL + 1)]
    for other in (*copies, copy.copy(packed), copy.deepcopy(packed)):
        assert type(other) is PackedDataset
        assert same(other, packed)
        assert other.ledger() == packed.ledger()


@pytest.fixture(scope="module")
def torchtune_datasets() -> Any:
    return pytest.importorskip("torchtune.datasets")


def test_is_a_torchtune_packed_dataset(torchtune_datasets: Any) -> None:
    packed = PackedDataset(rows_of([3, 4]), max_seq_len=8)
    assert isinstance(packed, torchtune_datasets.PackedDataset)
    assert isinstance(packed, PackedDataset)
    assert isinstance(packed, Dataset)
    assert not isinstance(packed, torchtune_datasets.ConcatDataset)
    assert isinstance(pickle.loads(pickle.dumps(packed)), torchtune_datasets.PackedDataset)
    assert type(packed) is PackedDataset
    assert packed.__class__ is packed.__class__
    assert issubclass(packed.__class__, PackedDataset)
    assert packed.__class__.__name__ == "PackedDataset"
    assert repr(packed) == "<PackedDataset: 1 packs of 8 tokens from 2 samples, 12.5% padding, exact_fit>"


def test_is_an_instance_even_if_torchtune_is_imported_later(
    torchtune_datasets: Any, monkeypatch: Any
) -> None:
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "torchtune.datasets")
        packed = PackedDataset(rows_of([3, 4]), max_seq_len=8)
        assert packed.__class__ is PackedDataset
        assert not isinstance(packed, torchtune_datasets.PackedDataset)
    assert isinstance(packed, torchtune_datasets.PackedDataset)


def test_a_list_of_datasets_is_packed(torchtune_datasets: Any) -> None:
    ours = [PackedDataset(rows_of(lengths), max_seq_len=8) for lengths in ([5, 4], [8, 3, 6])]
    both = torchtune_datasets.ConcatDataset(ours)
    assert both.packed
    assert len(both) == len(ours[0]) + len(ours[1]) == 5
    assert torch.equal(both[2]["tokens"], ours[1][0]["tokens"])
    theirs = torchtune_datasets.PackedDataset(rows_of([3]), max_seq_len=8)
    assert torchtune_datasets.ConcatDataset([*ours, theirs]).packed


# Bad input

GOOD: Any = {"tokens": [1, 2], "labels": [1, 2]}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "the dataset (list) is empty; it must have at least one sample"),
        (
            iter([GOOD]),
            "a list_iterator has no samples by number (it needs __len__ and __getitem__); pack a stream",
        ),
        ([GOOD, {"tokens": [1]}], "sample 1: column 'labels' is missing; the row's columns are 'tokens'"),
        ([{"tokens": [], "labels": []}], "sample 0 has 0 tokens; remove it"),
        ([{"tokens": [100], "labels": [1]}], "sample 0: token id 100 is outside the vocabulary of 100 ids"),
        (
            [GOOD, {"tokens": [1] * 9, "labels": [1] * 9}],
            "sample 1 has 9 tokens, max_seq_len is 8; set overlong",
        ),
    ],
)
def test_bad_rows_are_refused_at_once(rows: Any, message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        PackedDataset(rows, max_seq_len=8, vocab_size=100)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "worst_fit"}, "strategy='worst_fit' is unknown; choose one of"),
        ({"empty": "keep"}, "empty='keep' is unknown; choose one of 'error', 'drop'"),
        ({"max_packs": -1}, "max_packs=-1 is no number of packs; give at least 0, or None for all"),
        ({"max_packs": True}, "max_packs=True is no number of packs"),
        ({"parity": "trl"}, "parity='trl' is unknown; choose one of 'torchtune'"),
        *(
            ({"parity": "torchtune", **setting}, "parity='torchtune' packs as torchtune does, so strategy, ")
            for setting in (
                {"strategy": "best_fit"},
                {"empty": "drop"},
            )
        ),
    ],
)
def test_bad_settings_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        PackedDataset([GOOD], **{"max_seq_len": 8, **settings})


def test_a_sample_that_changed_is_refused() -> None:
    rows = rows_of([3, 4])
    packed = PackedDataset(rows, max_seq_len=8)
    rows[1] = rows_of([0, 5])[1]
    with pytest.raises(
        ValueError, match=r"^sample 1 has 5 tokens and had 4 when the packs were planned; make"
    ):
        packed[0]


def test_an_error_of_the_dataset_names_the_sample() -> None:
    data = Counted([3, 4])
    data.lengths[1] = -1  # numpy refuses it
    with pytest.raises(ValueError, match="negative") as caught:
        PackedDataset(data, max_seq_len=8)
    assert caught.value.__notes__ == ["while reading sample 1"]


# The progress bar


def test_the_progress_bar_needs_tqdm_and_is_on_rank_0_only(monkeypatch: pytest.MonkeyPatch) -> None:
    tqdm = pytest.importorskip("tqdm")
    bars: list[Any] = []

    def fake(numbers: Any, **settings: Any) -> Any:
        bars.append(settings)
        return numbers

    monkeypatch.setattr(tqdm, "tqdm", fake)
    PackedDataset(rows_of([3]), max_seq_len=8)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    PackedDataset(rows_of([3]), max_seq_len=8)
    assert [bar["disable"] for bar in bars] == [False, True]
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert len(PackedDataset(rows_of([3]), max_seq_len=8)) == 1
    assert len(bars) == 2
