"""Parts that several lanes share: every record is the turn of one lane, and reading resumes exactly."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from streampack import (
    HFSource,
    Holdout,
    IterablePackedDataset,
    IterableSource,
    JSONLSource,
    MapSource,
    MDSSource,
    Mix,
    ParquetSource,
    Source,
)
from streampack.sources import Reading
from streampack.sources.files import divide
from streampack.sources.parts import Damage, Part, Record
from streampack.sources.turns import deal, in_turns, share, sharing
from tests.support.conformance import check_cursors, check_resume_everywhere
from tests.support.corpus import PACK, Numbers, numbered, rows, samples_in, write
from tests.support.mds import write_mds

LANES = 8


# Which lanes share a part.


@given(sizes=st.lists(st.integers(1, 100), min_size=1, max_size=3), num_lanes=st.integers(1, 8))
def test_no_other_sharing_has_fewer_bytes_in_its_largest_lane(sizes: list[int], num_lanes: int) -> None:
    shared = share([(Part(i), size) for i, size in enumerate(sizes)], num_lanes)
    count = Counter(part.file for part, _ in shared)
    for i, size in enumerate(sizes):
        assert [(part.turn, part.turns, of_lane) for part, of_lane in shared if part.file == i] == [
            (turn, count[i], size / count[i]) for turn in range(count[i])
        ]
    if len(sizes) >= num_lanes:
        assert set(count.values()) == {1}
        return
    assert all(len(parts) == 1 for parts in deal(shared, num_lanes)), "each lane reads one part"
    ways = product(range(1, num_lanes + 1), repeat=len(sizes))
    best = min(
        max(size / n for size, n in zip(sizes, way, strict=True)) for way in ways if sum(way) == num_lanes
    )
    assert max(size for _, size in shared) == best


def test_files_that_can_be_cut_fill_lanes_as_well() -> None:
    """Of 100 bytes in a compressed file and 300 in a plain one, a quarter of the lanes reads the compressed one."""
    for sizes in ([100, 300], [300, 100]):
        compressed = sizes.index(100)
        lanes = divide(sizes, 8, whole={compressed})
        assert sum(part.file == compressed for lane in lanes for part in lane) == 2
    assert sum(part.turns > 1 for lane in divide([10, 10_000], 8, whole={0}) for part in lane) == 0


def test_the_words_for_shared_parts() -> None:
    assert sharing([1, 1], what="shard") == []
    assert sharing([2, 1, 3], what="shard") == [
        "2 shards are shared by 5 lanes: each is read by 2 to 3 of them, which take turns with its rows"
    ]
    assert sharing([3], what="shard") == [
        "1 shard is shared by 3 lanes: each is read by 3 of them, which take turns with its rows"
    ]


# Reading.


@given(
    steps=st.lists(
        st.tuples(st.integers(1, 4), st.sampled_from(["row", "row", "row", "damage"])), max_size=12
    ),
    lost=st.booleans(),
    turns=st.integers(2, 4),
    start=st.integers(0, 5),
)
def test_lanes_take_turns_with_records_and_damaged_stretches(
    steps: list[tuple[int, str]], lost: bool, turns: int, start: int
) -> None:
    """Compared with a list that is dealt out like cards; then opened anew at each offset."""
    items, at = [], start
    for length, kind in steps:
        items.append((at, kind, at + length))
        at += length
    if lost:
        items.append((at, "lost", at + 1))

    def open_part(part: Part, offset: int, following: Iterator[Part]) -> Iterator[Record]:
        for begin, kind, end in items:
            if begin < offset:
                continue
            if kind != "row":
                raise Damage(kind, offset=begin, resume=None if kind == "lost" else end)
            yield begin, kind, end

    for turn in range(turns):
        part = Part(0, start, None, turn, turns)
        wanted = items[turn::turns]
        for first in range(len(wanted) + 1):
            offset = wanted[first - 1][2] if first else start
            found = [
                (begin, str(raw), end) for begin, raw, end in in_turns(open_part)(part, offset, iter(()))
            ]
            assert found == wanted[first:]


def compressed(folder: Path) -> Source:
    return JSONLSource(write(folder / "a.jsonl.gz", numbered(42)))


def two_compressed(folder: Path) -> Source:
    return JSONLSource(
        [write(folder / "a.jsonl.zst", numbered(30)), write(folder / "b.jsonl.gz", numbered(42)[30:])]
    )


def row_group(folder: Path) -> Source:
    pq.write_table(pa.Table.from_pylist(numbered(42)), folder / "a.parquet")
    return ParquetSource(folder)


def mds(folder: Path) -> Source:
    return MDSSource(write_mds(folder, numbered(42), {"i": "int"}, compression="zstd:3", per_shard=42))


def stream(folder: Path) -> Source:
    return HFSource(Dataset.from_list(numbered(42)).to_iterable_dataset())


MAKE: dict[str, tuple[Callable[[Path], Source], str | None]] = {
    "compressed": (compressed, "1 compressed file is shared by 8 lanes: each is read by 8"),
    "two compressed": (two_compressed, "2 compressed files are shared by 8 lanes: each is read by 3 to 5"),
    "row group": (row_group, "1 row group is shared by 8 lanes: each is read by 8"),
    "mds": (mds, "1 compressed shard is shared by 8 lanes: each is read by 8"),
    "stream": (stream, "1 shard is shared by 8 lanes: each is read by 8"),
    "iterable": (
        lambda folder: IterableSource(numbered(42)),
        "1 iterable is shared by 8 lanes: each is read by 8",
    ),
    "plain": (lambda folder: JSONLSource(write(folder / "a.jsonl", numbered(42))), None),
    "map": (lambda folder: MapSource(numbered(42)), None),
}


@pytest.mark.parametrize("window", [0, 3, 100])
@pytest.mark.parametrize("kind", MAKE)
def test_each_row_is_the_turn_of_one_lane(tmp_path: Path, kind: str, window: int) -> None:
    source = MAKE[kind][0](tmp_path)
    found: list[list[int]] = []
    for lane in range(LANES):
        read = Reading(lane, num_lanes=LANES, shuffle_window=window, seed=1)
        found.append([row.data["i"] for row in source.read(read)])
        again = check_cursors(
            lambda start, lane=lane: source.read(  # type: ignore[misc]
                Reading(lane, num_lanes=LANES, shuffle_window=window, seed=1, start=start)
            ),
            announced=kind != "iterable",
        )
        assert [row["i"] for row in again] == found[-1]
        for row in source.read(read):
            assert source.fetch(row.row_id) == row.data
    assert sorted(i for of_lane in found for i in of_lane) == list(range(42))
    if MAKE[kind][1] is not None:
        assert {len(of_lane) for of_lane in found} <= {4, 5, 6, 10}, "lanes are about as long"


@pytest.mark.parametrize("kind", MAKE)
def test_the_log_says_what_is_shared(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    make, said = MAKE[kind]
    source = make(tmp_path)
    for wrapped, prefix in (
        (source, ""),
        (Holdout(source, fraction=0.1, part="train"), ""),
        (Mix([{"name": "a", "source": source, "weight": 1}]), "a: "),
    ):
        caplog.clear()
        data = IterablePackedDataset(wrapped, max_seq_len=16, num_lanes=LANES, encoder=lambda row: [1, 2, 3])
        with caplog.at_level(logging.WARNING, "streampack.streaming.dataset"):
            assert len([next(iter(data)), *data]) > 1, "iterated twice"
        messages = [r.getMessage() for r in caplog.records if r.name == "streampack.streaming.dataset"]
        assert messages == (
            [] if said is None else [f"{prefix}{said} of them, which take turns with its rows"]
        )
    assert source.shared(1) == []


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_run_over_a_shared_file_resumes_at_every_pack(tmp_path: Path, suffix: str) -> None:
    source = JSONLSource(write(tmp_path / f"a.jsonl{suffix}", data := rows(90)))

    def make() -> IterablePackedDataset:
        return IterablePackedDataset(
            source, encoder=Numbers(), max_seq_len=24, num_lanes=5, shuffle=True, shuffle_window=7, epochs=2
        )

    assert len(check_resume_everywhere(make, packs=100, whole_every=10)) > 30
    found = samples_in(make())
    assert {i: len(tokens) for i, tokens in found.items()} == {row["i"]: 2 * row["n"] for row in data}


# Bad records.


def shared_run(source: Source, bad: Path, **more: Any) -> IterablePackedDataset:
    return IterablePackedDataset(
        source, encoder=Numbers(), max_seq_len=24, num_lanes=5, on_bad_record="skip", quarantine=bad,
        **{"shuffle": True, "shuffle_window": 7, "epochs": 2, **more},
    )  # fmt: skip


def listed(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in folder.iterdir() for line in path.read_text().splitlines()]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_bad_record_of_a_shared_file_is_listed_by_one_lane(tmp_path: Path, shuffle: bool) -> None:
    lines = [json.dumps(row) if row["i"] % 7 else "{" for row in rows(90)]
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(PACK[".gz"]("\n".join(lines).encode()))
    data = shared_run(JSONLSource(path), tmp_path / "bad", shuffle=shuffle)
    assert set(samples_in(data)) == {i for i in range(90) if i % 7}
    assert len(listed(tmp_path / "bad")) == 13
    assert data.ledger().dropped_samples["bad"] == 26, "in each of two epochs"
    check_resume_everywhere(
        lambda: shared_run(JSONLSource(path), tmp_path / "bad", shuffle=shuffle), packs=50
    )
    assert len(listed(tmp_path / "bad")) == 13


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_shared_file_that_is_cut_off_is_listed_by_one_lane(tmp_path: Path, shuffle: bool) -> None:
    rng = np.random.default_rng(0)
    noisy = [{**row, "noise": rng.bytes(500).hex()} for row in rows(900)]
    path = write(tmp_path / "a.jsonl.gz", noisy)
    path.write_bytes(path.read_bytes()[:-2000])
    data = shared_run(JSONLSource(path), tmp_path / "bad", shuffle=shuffle)
    found = samples_in(data)
    assert sorted(found) == list(range(len(found))), "all rows before the damage"
    assert 100 < len(found) < 900
    [entry] = listed(tmp_path / "bad")
    assert "the file is damaged after byte" in entry["reason"]
    assert data.ledger().dropped_samples["bad"] == 2
    with pytest.raises(ValueError, match="the file is damaged after byte"):
        list(IterablePackedDataset(JSONLSource(path), encoder=Numbers(), max_seq_len=24, num_lanes=5))


def test_a_damaged_row_group_that_is_shared_is_listed_by_one_lane(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(rows(4000))
    pq.write_table(
        table, tmp_path / "a.parquet", compression="none", use_dictionary=False, data_page_size=100,
        write_batch_size=50, write_page_checksum=True,
    )  # fmt: skip
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    content[len(content) * 3 // 4] ^= 255
    (tmp_path / "a.parquet").write_bytes(content)
    data = shared_run(ParquetSource(tmp_path / "a.parquet"), tmp_path / "bad", epochs=1)
    assert data.lane_config.source.shared(5)
    found = samples_in(data)
    assert sorted(found) == list(range(len(found)))
    assert 500 < len(found) < 4000
    [entry] = listed(tmp_path / "bad")
    assert "row group 0 is damaged" in entry["reason"]
    assert entry["offset"] == len(found)
