"""How far a shuffle reaches: the figures that are printed, compared with the order in which rows are read."""

from __future__ import annotations

import gzip
import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streampack import IterablePackedDataset, MapSource, Mix
from streampack.sources import JSONLSource, Reading, Source, as_source
from streampack.streaming.mixing import AUTO_BYTES, auto_window, mixing, mixing_lines


def write(folder: Path, *, files: int, rows: int, compressed: bool = False) -> str:
    rng = random.Random(files)
    folder.mkdir(exist_ok=True)
    for number in range(files):
        count = rng.randint(rows // 2, rows * 3 // 2)
        lines = [json.dumps({"input_ids": [7] * rng.randint(1, 40)}) + "\n" for _ in range(count)]
        text = "".join(lines).encode()
        path = folder / f"{number:03}.jsonl{'.gz' * compressed}"
        path.write_bytes(gzip.compress(text) if compressed else text)
    return str(folder)


def dataset(source: Any, **settings: Any) -> IterablePackedDataset:
    return IterablePackedDataset(source, max_seq_len=64, seed=3, **settings)


def counted(source: Source, lanes: int, window: int) -> float:
    """The spread of the rows of a file, from the positions at which they are read."""
    places = defaultdict(list)
    for lane in range(lanes):
        reading = Reading(lane, num_lanes=lanes, seed=3, shuffle_window=window)
        ids = [row.row_id for row in source.read(reading)]
        for at, row_id in enumerate(ids):
            places[row_id[0]].append((at + 0.5) / len(ids))
    rows = sum(map(len, places.values()))
    return float(np.sqrt(12 * sum(len(each) * np.var(each) for each in places.values()) / rows))


@pytest.mark.parametrize(
    ("corpus", "lanes", "window"),
    [
        ({"files": 4, "rows": 1000}, 1, 0),
        ({"files": 40, "rows": 100}, 1, 512),
        ({"files": 40, "rows": 100}, 8, 64),
        ({"files": 100, "rows": 40}, 8, 256),
        ({"files": 20, "rows": 200, "compressed": True}, 4, 100),
        ({"files": 2, "rows": 1000, "compressed": True}, 4, 100),
    ],
)
def test_the_spread_is_that_of_a_counted_run(
    tmp_path: Path, corpus: dict[str, Any], lanes: int, window: int
) -> None:
    data = dataset(write(tmp_path, **corpus), shuffle=window)
    [found] = mixing(data.lane_config, lanes).values()
    assert found.spread == pytest.approx(counted(data.lane_config.source, lanes, window), abs=0.05)


def test_windows_hold_their_fraction_of_the_rows(tmp_path: Path) -> None:
    folder = write(tmp_path, files=4, rows=1000)
    rows = sum(path.read_bytes().count(b"\n") for path in tmp_path.iterdir())
    [found] = mixing(dataset(folder, shuffle=50).lane_config, 8).values()
    assert found.at_once == pytest.approx(8 * 50 / rows, rel=0.1)
    assert "windows of 50 rows in 8 lanes mix" in found.text(8)
    [found] = mixing(dataset(folder, shuffle=10_000).lane_config, 8).values()
    assert found.text(8) == "shuffle: all rows are mixed"
    [line] = mixing_lines(dataset(folder).lane_config, 1)
    assert line.startswith("shuffle: rows are not shuffled; the rows of one file lie within ")


def test_sources_of_a_mixture_have_a_line_each(tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 2]}] * 10
    entries = [("files", write(tmp_path, files=3, rows=40)), ("rows", MapSource(rows))]
    mix = Mix([{"name": name, "source": as_source(source), "weight": 1.0} for name, source in entries])
    lines = mixing_lines(dataset(mix, shuffle=8).lane_config, 2)
    assert [line.partition(":")[0] for line in lines] == ["files", "rows"]
    assert lines[1] == "rows: shuffle: all rows are mixed"


def test_auto_takes_the_smallest_window_that_spreads_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streampack.streaming.mixing.SHUFFLE_WINDOW", 16)
    folder = write(tmp_path, files=60, rows=80)
    source = JSONLSource(folder)
    window = auto_window(source, 4, seed=3)
    spreads = [counted(source, 4, each) for each in (window // 2, window)]
    assert spreads[0] < 0.9 <= spreads[1] + 0.05
    assert dataset(folder, shuffle="auto", num_lanes=4).lane_config.shuffle_window == window > 16
    monkeypatch.setattr("streampack.streaming.mixing.AUTO_BYTES", 20_000)
    assert 16 <= auto_window(source, 4, seed=3) < window
    assert AUTO_BYTES == 1 << 28


def test_a_resume_keeps_the_window_that_auto_chose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path, files=3, rows=60)

    def run() -> IterablePackedDataset:
        return dataset(folder, shuffle="auto", num_lanes=2)

    monkeypatch.setattr("streampack.streaming.dataset.auto_window", lambda *_, **__: 16)
    begun = run()
    packs = iter(begun)
    for _ in range(5):
        next(packs)
    state = json.loads(json.dumps(begun.state_dict()))
    rest = [pack["tokens"].tolist() for pack in packs]
    monkeypatch.setattr("streampack.streaming.dataset.auto_window", lambda *_, **__: 4096)
    resumed = run()
    resumed.load_state_dict(state)
    assert resumed.lane_config.shuffle_window == 16
    assert [pack["tokens"].tolist() for pack in resumed] == rest


def test_a_refused_state_leaves_the_window_as_it_was(tmp_path: Path) -> None:
    """An automatic window becomes that of a state only if the state is of this corpus."""
    lines = [json.dumps({"input_ids": [number] * 9}) + "\n" for number in range(6000)]
    for number in range(30):
        (tmp_path / f"{number}.jsonl").write_text("".join(lines[number::30]))

    def dataset(*numbers: int) -> IterablePackedDataset:
        files = [tmp_path / f"{number}.jsonl" for number in numbers]
        return IterablePackedDataset(JSONLSource(files), max_seq_len=64, shuffle="auto", num_lanes=1)

    other, data = dataset(0), dataset(*range(30))
    next(iter(other))
    window = data.lane_config.shuffle_window
    assert window > other.lane_config.shuffle_window
    with pytest.raises(ValueError, match="the state was made with"):
        data.load_state_dict(other.state_dict())
    assert data.lane_config.shuffle_window == window
