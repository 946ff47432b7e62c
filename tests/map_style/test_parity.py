"""``parity="torchtune"`` against torchtune's own class, and the differences without it."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from streampack.map_style.dataset import PackedDataset
from streampack.types import IGNORE_INDEX

torchtune_datasets = pytest.importorskip("torchtune.datasets")

BLOCKS = [0, *(pytest.param(block, marks=pytest.mark.slow) for block in range(1, 10))]
BLOCK = 100  # data sets
KEYS = ("tokens", "labels", "input_pos", "seq_lens")


@pytest.fixture(autouse=True)
def _no_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        def __init__(self, **_: Any) -> None: ...
        def update(self) -> None: ...

    monkeypatch.setattr("torchtune.datasets._packed.tqdm", Silent)


def rows_of(lengths: list[int], rng: np.random.Generator | None = None) -> list[dict[str, list[int]]]:
    """Samples of distinct tokens; with ``rng``, some labels are masked."""
    rows = []
    for i, length in enumerate(lengths):
        tokens = [100 * (i + 1) + j for j in range(length)]
        masked = rng.random(length) < 0.3 if rng else [False] * length
        labels = [IGNORE_INDEX if mask else token for token, mask in zip(tokens, masked, strict=True)]
        rows.append({"tokens": tokens, "labels": labels})
    return rows


class Reads(list[Any]):
    """A dataset that remembers how far it was read."""

    furthest = -1

    def __getitem__(self, index: Any) -> Any:
        row = super().__getitem__(index)
        self.furthest = max(self.furthest, index)
        return row

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))


def outcome(make: Any, rows: list[Any], **settings: Any) -> tuple[Any, str, int]:
    """(packs, error, how far it read) of one packing."""
    reads = Reads(rows)
    try:
        packed = make(reads, **settings)
    except ValueError as error:
        return None, str(error), reads.furthest
    furthest = reads.furthest
    return [packed[i] for i in range(len(packed))], "", furthest


def torchtunes_packs(ds: Any, **settings: Any) -> PackedDataset:
    return PackedDataset(ds, **settings, parity="torchtune")


def check_parity(rows: list[Any], seen: Counter[str], make: Any = torchtunes_packs, **settings: Any) -> None:
    theirs, their_error, they_read = outcome(torchtune_datasets.PackedDataset, rows, **settings)
    ours, our_error, we_read = outcome(make, rows, **settings)
    assert we_read == they_read
    seen["error"] += bool(their_error)
    if their_error:
        length, limit = re.findall(r"\d+", their_error)
        assert our_error.startswith(f"sample {they_read} has {length} tokens, max_seq_len is {limit}; ")
        return
    assert not our_error
    assert len(ours) == len(theirs)
    for our, their in zip(ours, theirs, strict=True):
        assert set(their) == set(KEYS)
        for key in KEYS:
            assert our[key].dtype == their[key].dtype == torch.int64
            assert our[key].tolist() == their[key].tolist(), key
        seen["empty sample kept"] += 0 in their["seq_lens"]
        seen["continues at a position above 0"] += bool(their["input_pos"][0])
        seen["padding's positions clamped"] += (
            their["input_pos"].tolist().count(settings["max_seq_len"] - 1) > 1
        )
        seen["full to the last token"] += int(their["tokens"][-1]) >= 100
    seen["packs"] += len(theirs)
    seen["stopped early"] += 0 <= they_read < len(rows) - 1
    seen["no packs"] += not theirs


def generated(rng: np.random.Generator) -> tuple[list[int], int]:
    """Lengths of one data set and ``max_seq_len``: short ones, exact fits, empty ones, many packs long ones."""
    max_seq_len = int(rng.integers(1, 17))
    longest = int(rng.choice([max(1, max_seq_len // 2), max_seq_len, max_seq_len + 1, 4 * max_seq_len]))
    lengths = rng.integers(rng.integers(0, 2), longest + 1, int(rng.integers(0, 25)))
    exact = rng.random(lengths.size) < 0.1
    return np.where(exact, max_seq_len, lengths).tolist(), max_seq_len


@pytest.mark.parametrize("block", BLOCKS)
def test_generated_data_sets_give_the_same_packs(block: int) -> None:
    seen: Counter[str] = Counter()
    for number in range(BLOCK):
        rng = np.random.default_rng((block, number))
        lengths, max_seq_len = generated(rng)
        rows = rows_of(lengths, rng)
        for split_across_pack in (False, True):
            for max_packs in (None, 0, 1, int(rng.integers(2, 6))):
                settings = {"max_seq_len": max_seq_len, "max_packs": max_packs}
                settings |= {"split_across_pack": split_across_pack, "padding_idx": int(rng.integers(3))}
                try:
                    check_parity(rows, seen, **settings)
                except AssertionError as error:
                    error.add_note(f"block {block}, data set {number}: {lengths}, {settings}")
                    raise
    # Every block covers all cases.
    assert seen["packs"] > 2000
    assert min(seen.values()) > 20, seen
    assert len(seen) == 8, seen


@pytest.mark.parametrize("lengths", [[3, 3], [8], [7, 3]])
def test_packs_without_parity_differ(lengths: list[int]) -> None:
    with pytest.raises(AssertionError):
        check_parity(rows_of(lengths), Counter(), PackedDataset, max_seq_len=8)


def test_an_empty_dataset_makes_no_packs() -> None:
    check_parity([], Counter(), max_seq_len=8)


def test_the_ledger_counts_under_parity_too() -> None:
    packed = PackedDataset(rows_of([5, 0, 6, 7]), max_seq_len=8, max_packs=1, parity="torchtune")
    ledger = packed.ledger()
    # The third sample closes the pack of the first two, and waits; the fourth is never read.
    assert (ledger.samples, ledger.tokens_in, ledger.packed, ledger.buffered) == (3, 11, 5, 6)
    assert repr(packed) == ("<PackedDataset: 1 packs of 8 tokens from 3 samples, 37.5% padding, torchtune>")


def test_collates_like_torchtunes() -> None:
    from torchtune.data import padded_collate_packed

    rows = rows_of([3, 0, 6, 2])
    for split in (False, True):
        theirs = torchtune_datasets.PackedDataset(
            rows, max_seq_len=4 + 4 * (not split), split_across_pack=split
        )
        ours = PackedDataset(
            rows, max_seq_len=4 + 4 * (not split), split_across_pack=split, parity="torchtune"
        )
        expected = padded_collate_packed([theirs[i] for i in range(len(theirs))])
        actual = padded_collate_packed([ours[i] for i in range(len(ours))])
        assert all(torch.equal(actual[key], expected[key]) for key in expected)


def test_the_default_packs_more_tightly() -> None:
    lengths = (np.random.default_rng(0).lognormal(3, 0.7, 500).astype(int) + 1).clip(max=128).tolist()
    rows = rows_of(lengths)
    fewest = -(-sum(lengths) // 128)
    assert len(PackedDataset(rows, max_seq_len=128)) == fewest
    assert len(torchtune_datasets.PackedDataset(rows, max_seq_len=128)) > 1.05 * fewest
