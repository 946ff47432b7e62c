"""A small source beside a large one, on simulated ranks with workers: no run ends, and weights and packs hold."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streampack import IterablePackedDataset, IterableSource, JSONLSource, MapSource, Mix, ParquetSource
from tests.harness.corpus import Numbers, rows, write
from tests.harness.mixtures import APART, entry, shifted
from tests.harness.threads import InProcess, Topology, run, steps_of_run


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streampack.loader.merge.Worker", InProcess)


def two_compressed(folder: Path) -> JSONLSource:
    return JSONLSource([write(folder / f"{i}.jsonl.gz", rows(100, longest=50, seed=i)) for i in range(2)])


def row_group(folder: Path) -> ParquetSource:
    pq.write_table(pa.Table.from_pylist(rows(40, longest=50)), folder / "a.parquet")
    return ParquetSource(folder / "a.parquet")


SMALL: dict[str, Callable[[Path], Any]] = {
    "two compressed files": two_compressed,
    "a row group": row_group,
    "five rows": lambda folder: MapSource(rows(5, longest=50)),
    "two lines": lambda folder: JSONLSource(write(folder / "a.jsonl", rows(2, longest=50))),
    "an iterable": lambda folder: IterableSource(rows(30, longest=50)),
}


def maker(small: Any, *, weight: float, num_lanes: int) -> Callable[[], IterablePackedDataset]:
    large = MapSource(shifted(rows(20_000, longest=100, seed=9), APART))
    mix = Mix([entry("small", small, weight), entry("large", large, 1 - weight)], stop="never")
    return lambda: IterablePackedDataset(
        mix, encoder=Numbers(), max_seq_len=128, buffer_size=16, num_lanes=num_lanes, shuffle=True,
        shuffle_window=50, epochs=None, seed=1,
    )  # fmt: skip


@pytest.mark.parametrize("num_lanes", [8, 32])
@pytest.mark.parametrize("kind", SMALL)
def test_the_weight_of_a_small_source_holds(tmp_path: Path, kind: str, num_lanes: int) -> None:
    make = maker(SMALL[kind](tmp_path), weight=0.002, num_lanes=num_lanes)
    made = run(make, Topology(ranks=4, workers=2, batch_size=4), limit=125)
    assert not any(made.ended)
    packs = [pack for step in steps_of_run(made, Topology(4, 2, 4)) for pack in step]
    assert len(packs) == 2000
    data = make()
    data.load_state_dict(made.states[0])
    small, large = data.source_stats().values()
    assert small.trained > 0
    assert abs(small.trained / (small.trained + large.trained) - 0.002) < 0.002


@pytest.mark.parametrize("kind", SMALL)
def test_packs_are_the_same_on_every_topology(tmp_path: Path, kind: str) -> None:
    make = maker(SMALL[kind](tmp_path), weight=0.3, num_lanes=8)
    alone = Topology(1, 0, 8)
    wanted = steps_of_run(run(make, alone, limit=30), alone)
    found, state = [], None
    for topology, steps in [
        (Topology(4, 2, 2), 7), (Topology(2, 1, 4), 8), (Topology(1, 3, 8), 1), (Topology(8, 0, 1), 14)
    ]:  # fmt: skip
        part = run(make, topology, state=state, limit=steps)
        found += steps_of_run(part, topology)
        state = part.states[0]
    assert [sorted(step) for step in found] == [sorted(step) for step in wanted]
    places = [fragment.row_id[0] for _, fragments in chain.from_iterable(found) for fragment in fragments]
    assert places.count(0) > 50
