"""Properties of all sources: each row once, cursors, resume, shuffling, rows found again."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streampack import (
    DatatroveSource,
    FlatTokensSource,
    Holdout,
    IterablePackedDataset,
    IterableSource,
    JSONLSource,
    MapSource,
    MDSSource,
    MegatronSource,
    ParquetSource,
    Sample,
    Source,
    TokenShardSource,
)
from streampack.fingerprint import plain
from streampack.sources import Reading, flat_tokens, parquet, row_groups
from streampack.sources.base import Reader
from streampack.tokenize.tokenize import tokenize
from streampack.types import Row
from tests.support.conformance import check_cursors, check_resume_everywhere
from tests.support.corpus import in_memory, write
from tests.support.foreign_tokens import write_datatrove, write_flat, write_megatron
from tests.support.mds import write_mds

COUNT = 42
ROWS = [{"i": i, "text": "x" * (i * 7 % 23)} for i in range(COUNT)]
DOCUMENTS = [[i] * (1 + i % 9) for i in range(COUNT)]
LOSSES = [[j % 3 > 0 for j in range(len(document))] for document in DOCUMENTS]
FILES = [ROWS[:13], ROWS[13:27], ROWS[27:]]


class Own(Source):
    """A user's source."""

    def fingerprint(self) -> str:
        return "own"

    def rows(self, start: int, step: int) -> Iterator[dict[str, Any]]:
        yield from ROWS[start::step]


def lines(folder: Path, *suffixes: str) -> JSONLSource:
    return JSONLSource(
        [
            write(folder / f"{i}.jsonl{suffix}", rows)
            for i, (rows, suffix) in enumerate(zip(FILES, suffixes, strict=True))
        ]
    )


def parquet_files(folder: Path, *, row_group_size: int = 4) -> ParquetSource:
    for i, rows in enumerate(FILES):
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{i}.parquet", row_group_size=row_group_size)
    return ParquetSource(folder)


def tokens(folder: Path, *, masked: bool = False) -> Path:
    rows = [{"tokens": np.full(1 + i % 9, i), "labels": np.full(1 + i % 9, i)} for i in range(COUNT)]
    for row in rows[1::2] if masked else []:
        row["labels"][:2] = -100
    return tokenize(rows, out=folder, lanes=1, shard_tokens=70, progress=False)


def flat_files(folder: Path, *, end: bool) -> Path:
    """Write files of tokens whose documents end, or begin, with the token 999; behind the latter is their number."""
    for number in range(3):
        own = [[*document, 999] for document in DOCUMENTS[14 * number : 14 * (number + 1)]]
        tokens = [token for document in own for token in (document if end else document[::-1])]
        write_flat(folder / f"{number}.bin", tokens, header=None if end else "numpy")
    return folder


COLUMNS = {"i": "int", "text": "str"}
MAKE: dict[str, Any] = {
    "jsonl": lambda folder: lines(folder, "", "", ""),
    "compressed": lambda folder: lines(folder, ".gz", ".zst", ""),
    "one compressed file": lambda folder: JSONLSource(write(folder / "all.jsonl.zst", ROWS)),
    "parquet": parquet_files,
    "large row groups": lambda folder: parquet_files(folder, row_group_size=100),
    "whole parquet files": parquet_files,
    "mds.zstd": lambda folder: MDSSource(write_mds(folder, ROWS, COLUMNS, compression="zstd:3")),
    "one compressed shard": lambda folder: MDSSource(
        write_mds(folder, ROWS, COLUMNS, compression="gz", per_shard=COUNT)
    ),
    "tokens": lambda folder: TokenShardSource(tokens(folder)),
    "masked tokens by url": lambda folder: TokenShardSource(in_memory(tokens(folder, masked=True))),
    "megatron": lambda folder: MegatronSource(write_megatron(folder, DOCUMENTS, per_file=14, sentence=4)),
    "datatrove with loss by url": lambda folder: DatatroveSource(
        f"{in_memory(write_datatrove(folder, DOCUMENTS, losses=LOSSES, per_file=14))}/*.ds"
    ),
    "flat": lambda folder: FlatTokensSource(flat_files(folder, end=True), eos_token_id=999, dtype="uint16"),
    "flat by url": lambda folder: FlatTokensSource(
        f"{in_memory(flat_files(folder, end=False))}/*.bin", bos_token_id=999
    ),
    "mds by url": lambda folder: MDSSource(in_memory(write_mds(folder, ROWS, COLUMNS))),
    "map": lambda folder: MapSource(ROWS),
    "iterable": lambda folder: IterableSource(ROWS),
    "holdout": lambda folder: Holdout(MapSource(ROWS), fraction=0.3, part="train"),
    "own": lambda folder: Own(),
}


@pytest.fixture(params=MAKE)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(parquet, "PARTS_PER_LANE", 0 if request.param == "whole parquet files" else 16)
    monkeypatch.setattr(row_groups, "BATCH_ROWS", 3)
    monkeypatch.setattr(flat_tokens, "LEAST_PART", 1)
    monkeypatch.setattr(flat_tokens, "CHUNK", 22)
    monkeypatch.setattr(row_groups, "KEPT_GROUPS", 2)
    return str(request.param)


@pytest.fixture
def source(kind: str, tmp_path: Path) -> Any:
    return MAKE[kind](tmp_path)


def number(row: Mapping[str, Any]) -> int:
    return int(row["i"] if "i" in row else next(token for token in row["tokens"] if token != 999))


def expected(source: Any) -> list[int]:
    keeps = source.keeps if isinstance(source, Holdout) else lambda row: True
    return [row["i"] for row in ROWS if keeps(row)]


class Plain(Reader):
    """A reader whose rows compare: lists instead of arrays."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    @property
    def cursor(self) -> Any:
        return self.reader.cursor

    def __next__(self) -> Row:
        row = next(self.reader)
        return row._replace(data={name: plain(value) for name, value in row.data.items()})

    def skip(self) -> None:
        self.reader.skip()


@pytest.mark.parametrize(("num_lanes", "window"), [(1, 0), (3, 7), (5, 1000)])
def test_each_row_comes_once(source: Any, num_lanes: int, window: int) -> None:
    readings = [Reading(lane, num_lanes=num_lanes, shuffle_window=window) for lane in range(num_lanes)]
    found = [number(row.data) for reading in readings for row in source.read(reading)]
    assert sorted(found) == expected(source)
    assert num_lanes > 1 or found == sorted(found)


@pytest.mark.parametrize("window", [0, 7])
def test_reading_resumes_at_every_cursor(source: Any, kind: str, window: int) -> None:
    found = []
    for lane in range(3):
        found += check_cursors(
            lambda start, lane=lane: Plain(  # type: ignore[misc]
                source.read(Reading(lane, num_lanes=3, epoch=1, seed=2, shuffle_window=window, start=start))
            ),
            # A hold-out skips rows only when it has read them; a generator's end is known only when it is asked.
            announced=kind not in ("holdout", "own"),
        )
    assert sorted(map(number, found)) == expected(source)


def test_resume_at_every_pack(source: Any) -> None:
    def encode(row: Mapping[str, Any]) -> Sample:
        ids = np.full(1 + number(row) % 9, number(row))
        return Sample(ids, ids)

    def stream() -> IterablePackedDataset:
        shuffled = {"shuffle": True, "shuffle_window": 5, "num_lanes": 2}
        return IterablePackedDataset(source, encoder=encode, max_seq_len=24, buffer_size=4, **shuffled)

    assert len(check_resume_everywhere(stream, packs=12)) > 5


def test_rows_are_fetched_again_by_row_id(source: Any) -> None:
    places, shards = set(), set()
    for row in source.read(Reading(shuffle_window=7)):
        assert plain(source.fetch(row.row_id)) == plain(row.data)
        places.add(source.locate(row.row_id))
        near = source.locate_cheaply(row.row_id)
        assert near == source.locate(row.row_id) or ", byte " in near
        shards.add(source.shard(row.row_id))
    assert len(places) == len(expected(source))
    assert len(shards) in (1, 3, 5, len(places))


def test_a_source_can_be_pickled(source: Any) -> None:
    list(source.read(Reading()))
    again = pickle.loads(pickle.dumps(source))
    assert [number(row.data) for row in again.read(Reading())] == expected(source)
    assert again.fingerprint() == source.fingerprint()


def test_a_probe_scales_to_all_rows(source: Any, kind: str) -> None:
    if kind in ("iterable", "own"):
        with pytest.raises(ValueError, match="the length of .* is unknown; set max_steps"):
            source.probe(10)
        return
    found, scale = source.probe(COUNT)
    assert len(found) * scale == pytest.approx(len(expected(source)), rel=0.1)
    assert [number(source.fetch(row.row_id)) for row in found] == [number(row.data) for row in found]
    assert source.natural_lanes() >= 1


def test_seed_and_epoch_decide_the_order(source: Any) -> None:
    state, numpy_state = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002 - must not change

    def order(**settings: Any) -> list[int]:
        rows = source.read(Reading(**{"shuffle_window": 20, **settings}))
        return [number(row.data) for row in rows]

    orders = [order(shuffle_window=0), order(), order(epoch=1), order(seed=1), order(epoch=1, seed=1)]
    assert len(set(map(tuple, orders))) == 5
    assert orders[1] == order()
    one, other = (source.read(Reading(shuffle_window=20)) for _ in range(2))
    interleaved = [(number(next(one).data), number(next(other).data)) for _ in range(10)]
    assert [a for a, _ in interleaved] == [b for _, b in interleaved] == orders[1][:10]
    assert random.getstate() == state
    assert np.random.get_state()[1].tolist() == numpy_state  # noqa: NPY002
