"""What an operator reads: how long an epoch is, how much was read, and how far each source is."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streampack import (
    IGNORE_INDEX,
    Holdout,
    IterablePackedDataset,
    IterableSource,
    JSONLSource,
    MapSource,
    Mix,
    PackedDataLoader,
    Sample,
    TokensEncoder,
)
from streampack.loader import merge, workers
from streampack.packing.planner import plan_packs
from streampack.sources import ParquetSource
from tests.harness.corpus import Numbers, rows, write
from tests.harness.hf_trainers import samples

# Skewed, as those of instructions are.
LENGTHS = np.random.default_rng(0).lognormal(4.3, 0.9, 6_000).clip(1, 400).astype(int)
MANY = [{"tokens": [1] * n, "labels": [1] * n} for n in LENGTHS.tolist()]


def estimated(rows: Any, **settings: Any) -> IterablePackedDataset:
    return IterablePackedDataset(rows, **{"max_seq_len": 256, "overlong": "truncate", **settings})


@pytest.mark.parametrize(
    ("settings", "num_lanes"),
    [
        ({}, 1),
        ({"strategy": "next_fit"}, 8),
        ({"split_across_pack": True, "overlong": "split"}, 8),
        ({"shuffle": True}, 8),
    ],
)
def test_small_data_is_counted(settings: dict[str, Any], num_lanes: int) -> None:
    data = estimated(MANY[:500], num_lanes=num_lanes, **settings)
    known = data.estimate(num_lanes=num_lanes)
    assert (known.packs, known.error) == (len(list(data)), 0)
    assert known.at_most == known.packs


@pytest.mark.parametrize("kind", ["map", "jsonl"])
@pytest.mark.parametrize("strategy", ["exact_fit", "next_fit"])
def test_an_estimate_of_much_data_is_upward_and_close(tmp_path: Path, kind: str, strategy: str) -> None:
    """Skewed lengths, packs that the strategy leaves part-empty, and lanes that each end with such a one."""
    source: Any = MANY
    if kind == "jsonl":
        source = tmp_path / "rows.jsonl"
        source.write_text("".join(json.dumps({"tokens": row["tokens"]}) + "\n" for row in MANY))
    encoder = TokensEncoder(labels=None)
    known = estimated(source, strategy=strategy, encoder=encoder).estimate(rows=1024, num_lanes=8)
    actual = sum(
        sum(1 for _ in plan_packs(np.minimum(LENGTHS, 256)[lane::8].tolist(), 256, strategy=strategy))
        for lane in range(8)
    )
    assert 0 < known.error < 0.05 * actual
    assert actual <= known.at_most < 1.1 * actual
    assert known.packs == pytest.approx(actual, rel=0.05)


def test_a_mixture_is_estimated() -> None:
    mix = Mix(
        [
            {"name": "a", "source": MANY[:1500], "weight": 1},
            {"name": "b", "source": MANY[1500:3000], "weight": 2},
        ]
    )
    data = estimated(mix, num_lanes=2)
    known = data.estimate(rows=1024)
    assert known.packs == pytest.approx(len(list(data)), rel=0.1)
    assert known.error > 0


def test_an_estimate_counts_truncated_tokens() -> None:
    """Of 300 samples, a third is long; of half of these, the answer is cut off."""
    short = {"tokens": [1] * 10, "labels": [IGNORE_INDEX] * 5 + [1] * 5}
    answered = {"tokens": [1] * 40, "labels": [IGNORE_INDEX] * 10 + [1] * 30}
    lost = {"tokens": [1] * 40, "labels": [IGNORE_INDEX] * 30 + [1] * 10}
    rows = [short, short, short, short, answered, lost] * 50
    known = estimated(rows, max_seq_len=20).estimate(rows=300)
    assert (known.samples, known.longer, known.untrained) == (300, pytest.approx(1 / 3), pytest.approx(1 / 6))
    assert known.cut == pytest.approx(40 / 120)
    assert known.cut_trained == pytest.approx(30 / 60)
    dropped = estimated(rows, max_seq_len=20, overlong="drop").estimate(rows=300)
    assert (dropped.cut, dropped.cut_trained, dropped.untrained) == (
        pytest.approx(80 / 120), pytest.approx(40 / 60), 0,
    )  # fmt: skip
    split = estimated(rows, max_seq_len=20, overlong="split").estimate(rows=300)
    assert (split.cut, split.cut_trained, split.untrained) == (0, 0, 0)
    left = estimated(rows, max_seq_len=20, untrained="drop")
    assert left.estimate(rows=300).packs == len(list(left))


def test_an_estimate_encodes_a_few_long_documents() -> None:
    read = []

    class Counting(TokensEncoder):
        def __call__(self, row: Any, /) -> Any:
            read.append(1)
            return super().__call__(row)

    document = {"tokens": np.ones(1 << 17, np.int32), "labels": np.ones(1 << 17, np.int32)}
    data = estimated([document] * 500, encoder=Counting(), overlong="split", split_across_pack=True)
    known = data.estimate(rows=1024)
    assert known.packs == pytest.approx(500 * (1 << 17) / 256, rel=0.01)
    assert len(read) == 64


def test_an_estimate_leaves_bad_records_out(caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"tokens": [1] * 10} if i % 10 else {} for i in range(200)]
    data = estimated(rows, encoder=TokensEncoder(labels=None), on_bad_record="skip", num_lanes=1)
    known = data.estimate(rows=50)
    assert not caplog.records
    assert known.packs == len(list(data))


def test_an_estimate_needs_a_length() -> None:
    with pytest.raises(ValueError, match="the length of IterableSource is unknown; set max_steps"):
        estimated(lambda: iter(MANY)).estimate()
    assert estimated(MANY[:1]).estimate().packs == 1


# Map-style data, counted by the lengths of its samples.

LABELLED = [*samples(150), {"tokens": [3] * 70, "labels": [3] * 70}, *samples(50, seed=1)]
HALF = Holdout(Holdout(MapSource(LABELLED), fraction=0.5, part="train"), fraction=0.2, part="train")


def broken(row: Any) -> Sample:
    if row["tokens"][0] % 5 == 0:
        raise ValueError("this one cannot be encoded")
    return Sample(np.array(row["tokens"]), np.array(row["labels"]))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"shuffle": True, "seed": 3},
        {"shuffle": True, "num_lanes": 5, "buffer_size": 3, "strategy": "best_fit"},
        {"split_across_pack": True, "num_lanes": 1},
        {"source": HALF, "shuffle": True, "overlong": "split"},
        {"overlong": "drop", "strategy": "next_fit", "max_seqs_per_pack": 4},
        {"encoder": broken, "on_bad_record": "skip", "truncate_eos": 7},
        {"encoder": lambda row: {"input_ids": row["tokens"]}},
        {
            "source": [
                {**row, "labels": ([-100] * 9 + row["labels"][9:])[: len(row["labels"])]} for row in LABELLED
            ],
            "untrained": "drop",
        },
        {"num_lanes": 3, "source": [*LABELLED, {"tokens": [], "labels": []}], "empty": "drop"},
    ],
)
def test_counted_packs_equal_those_of_an_epoch(changes: dict[str, Any]) -> None:
    given = {
        "source": LABELLED,
        "max_seq_len": 64,
        "overlong": "truncate",
        "num_lanes": 2,
        "epochs": 3,
    } | changes
    if "split_across_pack" in given:
        del given["overlong"]
    data = IterablePackedDataset(given.pop("source"), **given)
    known = data.estimate(num_lanes=given["num_lanes"])
    assert (known.packs, known.error) == (sum(pack["epoch"] == 0 for pack in data), 0)


# What was read, in worker processes too.

ROWS = rows(4000)


@pytest.fixture(autouse=True)
def _report_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "REPORT_EVERY", 0.0)
    monkeypatch.setattr(workers, "REPORT_EVERY", 0.0)


def jsonl(folder: Path, name: str = "a", count: int = 4000) -> JSONLSource:
    return JSONLSource(write(folder / f"{name}.jsonl", ROWS[:count]))


def parquet(folder: Path) -> ParquetSource:
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "a.parquet", row_group_size=100)
    return ParquetSource(folder / "a.parquet")


def in_memory(folder: Path) -> MapSource:
    return MapSource(ROWS)


def loader_of(source: Any, *, num_workers: int = 0, **settings: Any) -> PackedDataLoader:
    common: dict[str, Any] = {"max_seq_len": 64, "buffer_size": 8, "num_lanes": 4, "shuffle": True}
    data = IterablePackedDataset(source, encoder=Numbers(), **{**common, "shuffle_window": 16, **settings})
    return PackedDataLoader(data, num_workers=num_workers)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_bytes_and_rows_are_those_of_the_files(tmp_path: Path, num_workers: int) -> None:
    source = jsonl(tmp_path)
    size = source.files[0].size
    loader = loader_of(source, num_workers=num_workers)
    assert loader.metrics()["read_bytes"] == 0
    for epoch in (1, 2):
        for _ in loader:
            pass
        metrics = loader.metrics()
        assert metrics["read_rows"] == len(ROWS)
        assert epoch * size <= metrics["read_bytes"] <= 1.3 * epoch * size, "both iterations count"
        assert metrics["read_retries"] == metrics["outage_seconds"] == metrics["bad_records"] == 0
        assert metrics["data_wait_seconds"] > metrics["read_seconds"] > 0 or num_workers
        assert metrics["consumed"] == 1


def test_what_was_read_before_a_fork_is_not_counted_again(tmp_path: Path) -> None:
    source = jsonl(tmp_path)
    data = loader_of(source).dataset
    list(data)
    data.set_epoch(0)
    loader = PackedDataLoader(data, num_workers=2)
    list(loader)
    assert loader.metrics()["read_bytes"] == pytest.approx(source.files[0].size, rel=0.3)


def test_what_a_worker_read_before_it_died_is_counted(tmp_path: Path) -> None:
    loader = loader_of(jsonl(tmp_path), num_workers=1)
    batches: Any = iter(loader)
    for _ in range(60):
        next(batches)
    before = loader.metrics()["read_bytes"]
    [worker] = batches.rank_batches.streams
    os.kill(worker.process.pid, signal.SIGKILL)
    for _ in batches:
        pass
    assert worker.restarts == 1
    after = loader.metrics()["read_bytes"]
    assert after - before > 0
    assert after > 1.2 * (tmp_path / "a.jsonl").stat().st_size


@pytest.mark.parametrize(("make", "num_workers"), [(jsonl, 2), (parquet, 0), (in_memory, 0)])
def test_the_fraction_consumed_follows_the_packs(
    tmp_path: Path, make: Callable[[Path], Any], num_workers: int
) -> None:
    total = len(list(loader_of(make(tmp_path)).dataset))
    loader = loader_of(make(tmp_path), num_workers=num_workers)
    found = []
    for number, _ in enumerate(loader, 1):
        found.append(loader.metrics()["consumed"])
        # Rows in windows and in packs made ahead are ahead of the batches.
        assert number / total - 0.03 <= found[-1] <= number / total + (0.1 if num_workers else 0.06)
    assert found[-1] == 1


def test_a_window_of_all_rows_is_not_consumed_when_it_is_read(tmp_path: Path) -> None:
    loader = loader_of(jsonl(tmp_path, count=1000), num_lanes=1, shuffle_window=2048)
    total, found = sum(1 for _ in loader), []
    for number, _ in enumerate(loader, 1):
        found.append(loader.metrics()["consumed"] - number / total)
    assert -0.03 < min(found) <= max(found) < 0.06


def test_a_source_that_cannot_tell_says_nothing() -> None:
    loader = loader_of(IterableSource(lambda: iter(ROWS)), num_lanes=1, shuffle=False)
    next(iter(loader))
    assert "consumed" not in loader.metrics()


def test_each_source_of_a_mixture_is_followed(tmp_path: Path) -> None:
    entries = [
        {"name": "small", "source": jsonl(tmp_path, "small", 500), "weight": 1},
        {"name": "large", "source": jsonl(tmp_path, "large", 4000), "weight": 1},
    ]
    loader = loader_of(Mix(entries, stop="all_exhausted"))
    highest = dict.fromkeys(("small", "large"), 0.0)
    batches = iter(loader)
    for _ in range(150):
        next(batches)
        metrics = loader.metrics()
        for name in highest:
            highest[name] = max(highest[name], metrics.get(f"source_{name}_consumed", 0.0))
    stats = loader.source_stats()
    assert stats["small"].epochs > 4, "of the small one several passes were read"
    assert highest["small"] > 0.8
    assert metrics["source_large_consumed"] == pytest.approx(stats["large"].samples / 4000, abs=0.08)
    trained = {name: each.trained for name, each in stats.items()}
    assert metrics["source_small_fraction"] == trained["small"] / sum(trained.values())
    assert metrics["source_small_recent_fraction"] == pytest.approx(0.5, abs=0.05)


def test_recent_shares_begin_anew_where_an_older_state_is_loaded() -> None:
    """Without that, those of the state would be less than those of the call before."""
    small, large = ([{"i": i, "n": n} for i in range(500)] for n in (3, 9))
    entries = [
        {"name": name, "source": MapSource(each), "weight": 1}
        for name, each in (("small", small), ("large", large))
    ]
    loader = loader_of(Mix(entries, stop="never"), epochs=None)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    for _ in range(30):
        next(batches)
    loader.metrics()
    loader.load_state_dict(state)
    next(iter(loader))
    assert not [name for name in loader.metrics() if "recent" in name]
