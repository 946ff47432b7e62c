"""What an operator watches: counts of reading, from worker processes too, and how far each source is."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streampack import IterablePackedDataset, IterableSource, JSONLSource, MapSource, Mix, PackedDataLoader
from streampack.accounting import Shares
from streampack.loader import merge, workers
from streampack.sources import ParquetSource
from streampack.streaming.read_report import ReadReport
from tests.support.corpus import Numbers, rows, write

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
    for _ in data.stream():
        pass
    here = data.lane_config.use.bytes
    assert here >= source.files[0].size
    loader = PackedDataLoader(data, num_workers=2)
    for _ in loader:
        pass
    assert loader.metrics()["read_bytes"] == pytest.approx(here, rel=0.05)


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
    assert after > 1.2 * loader_of(jsonl(tmp_path)).dataset.lane_config.source.files[0].size


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("make", [jsonl, parquet, in_memory])
def test_the_fraction_consumed_follows_the_packs(
    tmp_path: Path, make: Callable[[Path], Any], num_workers: int
) -> None:
    total = sum(1 for _ in loader_of(make(tmp_path)).dataset.stream())
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


@pytest.mark.parametrize("every", [1, 7, 100, 130])
def test_recent_shares_are_those_of_a_hundred_steps(every: int) -> None:
    counts = [{"a": step, "b": step * step} for step in range(400)]
    shares, seen = Shares(), []
    for step in range(0, 400, every):
        found = shares.metrics(counts[step], step=step)
        seen.append(step)
        if len(seen) == 1:
            assert not any("recent" in name for name in found)
            continue
        # From the newest call that is at least 100 steps ago; if there is none, from the first.
        base = max((old for old in seen[:-1] if old <= step - 100), default=seen[0])
        gained = {name: counts[step][name] - counts[base][name] for name in "ab"}
        assert found["source_a_recent_fraction"] == gained["a"] / sum(gained.values())
        assert found["source_a_fraction"] == counts[step]["a"] / max(1, sum(counts[step].values()))


def test_reports_add_up() -> None:
    one, other = ReadReport(1, 2.0, 3, 4.0, ((0.5, 1),)), ReadReport(10, 20.0, 30, 40.0, ((0.25, 3),))
    assert ReadReport.total([one, ReadReport(), other]) == ReadReport(11, 22.0, 33, 44.0, ((0.75, 4),))
    assert other.since(one) == ReadReport(9, 18.0, 27, 36.0, ((0.25, 3),))
    assert ReadReport(consumed=((0.5, 2), (0.0, 0))).fractions() == [0.25, None]


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
