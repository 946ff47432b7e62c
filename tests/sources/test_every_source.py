"""What every source promises, whatever it reads: each row once, in an order that the seed decides, found again by its
number, resumed at every cursor and every pack, and told from another corpus."""

from __future__ import annotations

import io
import json
import pickle
import random
import tarfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from streampack import (
    ArrowSource,
    DatatroveSource,
    FlatTokensSource,
    HFSource,
    Holdout,
    IterablePackedDataset,
    IterableSource,
    JSONLSource,
    MapSource,
    MDSSource,
    MegatronSource,
    Mix,
    ParquetSource,
    Sample,
    Source,
    TextSource,
    TokenShardSource,
)
from streampack.sources import Reading, as_source
from streampack.tokenize import tokenize
from tests.harness.conformance import check_cursors, check_resume_everywhere, content, lists
from tests.harness.corpus import PACK, identity_of, in_memory, numbered, write
from tests.harness.files import small_pieces, write_datatrove, write_flat, write_mds, write_megatron

COUNT = 42
Rows = list[dict[str, Any]]
ROWS: Rows = numbered(COUNT)
OTHERS = [{"i": 9, "text": ""}, *ROWS[1:]]  # in files of the same sizes


class Own(Source):
    """A user's source."""

    def __init__(self, rows: Rows) -> None:
        self.data = rows

    def identity(self) -> dict[str, Any]:
        return {"own": str(self.data)}

    def rows(self, start: int, step: int) -> Iterator[dict[str, Any]]:
        yield from self.data[start::step]


def files(rows: Rows) -> list[Rows]:
    return [rows[:13], rows[13:27], rows[27:]]


def documents(rows: Rows) -> list[list[int]]:
    return [[row["i"]] * (1 + place % 9) for place, row in enumerate(rows)]


def lines(folder: Path, rows: Rows, *suffixes: str) -> JSONLSource:
    paths = [folder / f"{i}.jsonl{suffix}" for i, suffix in enumerate(suffixes)]
    return JSONLSource([write(path, part) for path, part in zip(paths, files(rows), strict=True)])


def arrays(folder: Path, rows: Rows, *suffixes: str) -> Path:
    """Write JSON arrays: on one line, and with a field on each; the third file is one of JSON lines."""
    for i, (suffix, part) in enumerate(zip(suffixes, files(rows), strict=True)):
        data = (
            json.dumps(part, indent=[None, 4, None][i])
            if i < 2
            else "".join(json.dumps(row) + "\n" for row in part)
        )
        (folder / f"{i}.json{suffix}").write_bytes(PACK[suffix](data.encode()))
    return folder


def saved(folder: Path, rows: Rows) -> Path:
    path = folder / f"{folder.name}-saved"
    Dataset.from_list(rows).save_to_disk(path, num_shards=3)
    return path


def feather(folder: Path, rows: Rows) -> Path:
    for i, part in enumerate(files(rows)):
        pa.feather.write_feather(pa.Table.from_pylist(part), folder / f"{i}.feather", chunksize=5)
    return folder


def texts(folder: Path, rows: Rows, *suffixes: str, each: bool = False) -> Path:
    """Write a line for each row, or a file."""
    for i, part in enumerate([[row] for row in rows] if each else files(rows)):
        data = "\n".join(json.dumps(row) for row in part).encode()
        (folder / f"{i:02}.txt{suffixes[i % 3]}").write_bytes(PACK[suffixes[i % 3]](data))
    return folder


def tars(folder: Path, rows: Rows, *suffixes: str) -> Path:
    """Write three tars, whose samples have two members and now and then one that is left out."""
    for i, part in enumerate(files(rows)):
        with tarfile.open(fileobj=(file := io.BytesIO()), mode="w") as tar:
            for row in part:
                fields = json.dumps({"i": row["i"]}).encode()
                members = {
                    "json": fields,
                    "txt": row["text"].encode(),
                    **({} if row["i"] % 3 else {"npy": b"x" * 700}),
                }
                for ending, data in members.items():
                    info = tarfile.TarInfo(f"{'deep/' * (row['i'] % 30)}{row['i']}.{ending}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        (folder / f"{i}.tar{suffixes[i]}").write_bytes(PACK[suffixes[i]](file.getvalue()))
    return folder


def parquet_files(folder: Path, rows: Rows, *, row_group_size: int = 4) -> ParquetSource:
    for i, part in enumerate(files(rows)):
        pq.write_table(pa.Table.from_pylist(part), folder / f"{i}.parquet", row_group_size=row_group_size)
    return ParquetSource(folder)


def one_row_group(folder: Path, rows: Rows) -> ParquetSource:
    pq.write_table(pa.Table.from_pylist(rows), folder / "a.parquet")
    return ParquetSource(folder)


def tokens(folder: Path, rows: Rows, *, masked: bool = False) -> Path:
    made = [{"tokens": np.array(ids), "labels": np.array(ids)} for ids in documents(rows)]
    for row in made[1::2] if masked else []:
        row["labels"][:2] = -100
    return tokenize(made, out=folder, lanes=1, shard_tokens=70, progress=False)


def marked(folder: Path, rows: Rows) -> Path:
    losses = [[j % 3 > 0 for j in range(len(document))] for document in documents(rows)]
    return write_datatrove(folder, documents(rows), losses=losses, per_file=14)


def flat_files(folder: Path, rows: Rows, *, end: bool) -> Path:
    """Write files of tokens whose documents end, or begin, with the token 999; behind the latter is their number."""
    for number in range(3):
        own = [[*document, 999] for document in documents(rows)[14 * number : 14 * (number + 1)]]
        ids = [token for document in own for token in (document if end else document[::-1])]
        write_flat(folder / f"{number}.bin", ids, header=None if end else "numpy")
    return folder


def kept(row: Mapping[str, Any]) -> bool:
    return row["i"] % 3 < 2


COLUMNS = {"i": "int", "text": "str"}
MAKE: dict[str, Callable[[Path, Rows], Any]] = {
    "jsonl": lambda folder, rows: lines(folder, rows, "", "", ""),
    "compressed": lambda folder, rows: lines(folder, rows, ".gz", ".zst", ""),
    "bzip2, xz, lz4": lambda folder, rows: lines(folder, rows, ".bz2", ".xz", ".lz4"),
    "one compressed file": lambda folder, rows: JSONLSource(write(folder / "all.jsonl.zst", rows)),
    "json arrays": lambda folder, rows: JSONLSource(arrays(folder, rows, "", "", "")),
    "json arrays by url": lambda folder, rows: JSONLSource(in_memory(arrays(folder, rows, "", ".xz", ""))),
    "saved by datasets": lambda folder, rows: as_source(saved(folder, rows)),
    "arrow streams by url": lambda folder, rows: ArrowSource(in_memory(saved(folder, rows))),
    "feather": lambda folder, rows: as_source(feather(folder, rows)),
    "feather by url": lambda folder, rows: as_source(in_memory(feather(folder, rows))),
    "text": lambda folder, rows: as_source(texts(folder, rows, "", ".bz2", ".xz")),
    "documents": lambda folder, rows: TextSource(
        texts(folder, rows, "", "", ".gz", each=True), sample_by="document"
    ),
    "tars": lambda folder, rows: as_source(tars(folder, rows, "", "", ".xz")),
    "tars by url": lambda folder, rows: as_source(in_memory(tars(folder, rows, "", ".bz2", ""))),
    "parquet": parquet_files,
    "large row groups": lambda folder, rows: parquet_files(folder, rows, row_group_size=100),
    "one row group": one_row_group,
    "mds.zstd": lambda folder, rows: MDSSource(write_mds(folder, rows, COLUMNS, compression="zstd:3")),
    "one compressed shard": lambda folder, rows: MDSSource(
        write_mds(folder, rows, COLUMNS, compression="gz", per_shard=COUNT)
    ),
    "mds by url": lambda folder, rows: MDSSource(in_memory(write_mds(folder, rows, COLUMNS))),
    "tokens": lambda folder, rows: TokenShardSource(tokens(folder, rows)),
    "masked tokens by url": lambda folder, rows: TokenShardSource(
        in_memory(tokens(folder, rows, masked=True))
    ),
    "megatron": lambda folder, rows: MegatronSource(
        write_megatron(folder, documents(rows), per_file=14, sentence=4)
    ),
    "datatrove with loss by url": lambda folder, rows: DatatroveSource(
        f"{in_memory(marked(folder, rows))}/*.ds"
    ),
    "flat": lambda folder, rows: FlatTokensSource(
        flat_files(folder, rows, end=True), eos_token_id=999, dtype="uint16"
    ),
    "flat by url": lambda folder, rows: FlatTokensSource(
        f"{in_memory(flat_files(folder, rows, end=False))}/*.bin", bos_token_id=999
    ),
    "datasets": lambda folder, rows: HFSource(Dataset.from_list(rows)),
    "stream": lambda folder, rows: HFSource(Dataset.from_list(rows).to_iterable_dataset(num_shards=3)),
    "one shard": lambda folder, rows: HFSource(Dataset.from_list(rows).to_iterable_dataset()),
    "filtered stream": lambda folder, rows: HFSource(
        Dataset.from_list(rows).to_iterable_dataset(num_shards=3).filter(kept)
    ),
    "taken stream": lambda folder, rows: HFSource(
        Dataset.from_list(rows).to_iterable_dataset(num_shards=3).take(COUNT)
    ),
    "tables": lambda folder, rows: HFSource(
        Dataset.from_list([{"tokens": ids, "labels": ids} for ids in documents(rows)]).to_iterable_dataset(
            num_shards=3
        )
    ),
    "map": lambda folder, rows: MapSource(rows),
    "iterable": lambda folder, rows: IterableSource(rows),
    "holdout": lambda folder, rows: Holdout(MapSource(rows), fraction=0.3, part="train"),
    "own": lambda folder, rows: Own(rows),
}
SHARED = {
    **dict.fromkeys(
        ("arrow streams by url", "feather by url"),
        "3 Arrow files are shared by 8 lanes: each is read by 2 to 3",
    ),
    "tars by url": "2 tar files are shared by 7 lanes: each is read by 3 to 4",
    "compressed": "2 compressed files are shared by 4 lanes: each is read by 2",
    "bzip2, xz, lz4": "3 compressed files are shared by 8 lanes: each is read by 2 to 3",
    "one compressed file": "1 compressed file is shared by 8 lanes: each is read by 8",
    "one row group": "1 row group is shared by 8 lanes: each is read by 8",
    "one compressed shard": "1 compressed shard is shared by 8 lanes: each is read by 8",
    **dict.fromkeys(("one shard", "taken stream"), "1 shard is shared by 8 lanes: each is read by 8"),
    "iterable": "1 iterable is shared by 8 lanes: each is read by 8",
}
STREAMS = ("stream", "one shard", "filtered stream", "taken stream", "tables")
# Several files, of different lengths.
SEVERAL = ("compressed", "bzip2, xz, lz4", "arrow streams by url", "feather by url", "tars by url")
UNKNOWN = ("iterable", "own", "arrow streams by url", "feather by url")  # how many rows there are


@pytest.fixture(params=MAKE)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    small_pieces(monkeypatch)
    return str(request.param)


@pytest.fixture
def source(kind: str, tmp_path: Path) -> Any:
    return MAKE[kind](tmp_path, ROWS)


def number(row: Mapping[str, Any]) -> int:
    if row.keys() == {"text"}:
        row = json.loads(row["text"])
    return int(row["i"] if "i" in row else next(token for token in row["tokens"] if token != 999))


def expected(source: Any, kind: str) -> list[int]:
    if kind == "filtered stream":
        return [row["i"] for row in ROWS if kept(row)]
    keeps = source.keeps if isinstance(source, Holdout) else lambda row: True
    return [row["i"] for row in ROWS if keeps(row)]


def stream(source: Any, **settings: Any) -> IterablePackedDataset:
    def encode(row: Mapping[str, Any]) -> Sample:
        ids = np.full(1 + number(row) % 9, number(row))
        return Sample(ids, ids)

    shuffled = {"shuffle": 5, "num_lanes": 2}
    return IterablePackedDataset(
        source, encoder=encode, max_seq_len=24, buffer_size=4, **{**shuffled, **settings}
    )


@pytest.mark.parametrize(("num_lanes", "window"), [(1, 0), (3, 7), (8, 1000)])
def test_each_row_comes_once_and_is_fetched_again(
    source: Any, kind: str, num_lanes: int, window: int
) -> None:
    """From lanes that are read side by side, one row of one, then some of another."""
    rng, found, rows = np.random.default_rng(0), [], {}
    readers = {
        lane: source.read(Reading(lane, num_lanes=num_lanes, shuffle_window=window))
        for lane in range(num_lanes)
    }
    came = dict.fromkeys(readers, 0)
    while readers:
        lane = rng.choice(list(readers))
        if (row := next(readers[lane], None)) is None:
            del readers[lane]
            continue
        came[lane] += 1
        found.append(number(row.data))
        rows[row.row_id] = lists(row.data)
    some = [
        [*rows][i] for i in rng.integers(len(rows), size=9)
    ]  # in any order, and perhaps the same one twice
    for ids in (some, [*rows], []):
        assert list(map(lists, source.fetch_many(ids))) == [rows[row_id] for row_id in ids]
    assert sorted(found) == expected(source, kind)
    assert num_lanes > 1 or found == sorted(found)
    if kind in SHARED and kind not in SEVERAL:
        assert max(came.values()) - min(came.values()) <= 2, "lanes that share are about as long"


@pytest.mark.parametrize(
    ("num_lanes", "window"), [*(pytest.param(3, window, marks=pytest.mark.slow) for window in (0, 7)), (8, 3)]
)
def test_reading_resumes_at_every_cursor(source: Any, kind: str, num_lanes: int, window: int) -> None:
    reading = {"num_lanes": num_lanes, "epoch": 1, "seed": 2, "shuffle_window": window}
    found = []
    for lane in range(num_lanes):
        found += check_cursors(
            lambda start, lane=lane: source.read(Reading(lane, start=start, **reading)),  # type: ignore[misc]
        )
    assert sorted(map(number, found)) == expected(source, kind)


def test_resume_at_every_pack(source: Any) -> None:
    assert len(check_resume_everywhere(lambda: stream(source), packs=5)) > 5


def test_a_source_can_be_pickled(source: Any, kind: str) -> None:
    list(source.read(Reading()))
    again = pickle.loads(pickle.dumps(source))
    assert [number(row.data) for row in again.read(Reading())] == expected(source, kind)
    assert identity_of(again) == identity_of(source)


def test_a_corpus_may_move_and_another_one_is_refused(source: Any, kind: str, tmp_path: Path) -> None:
    """The other one has one row that differs, and files of the same sizes."""
    folders = [tmp_path.with_name(f"{tmp_path.name}-{name}") for name in ("same", "other")]
    for folder in folders:
        folder.mkdir()
    same, other = MAKE[kind](folders[0], ROWS), MAKE[kind](folders[1], OTHERS)
    assert identity_of(same) == identity_of(source) != identity_of(other)
    dataset = stream(source)
    running = iter(dataset)
    packs = [next(running) for _ in range(3)]
    moved = stream(same)
    moved.load_state_dict(dataset.state_dict())
    assert list(map(content, [*packs, *moved])) == list(map(content, stream(source)))
    with pytest.raises(ValueError, match="the state was made with corpus."):
        stream(other).load_state_dict(dataset.state_dict())


def test_a_probe_scales_to_all_rows(source: Any, kind: str) -> None:
    if kind in (*UNKNOWN, *STREAMS):
        with pytest.raises(ValueError, match="the length of .* is unknown; set max_steps"):
            source.sample(10)
        return
    found, scale = source.sample(COUNT)
    assert len(found) * scale == pytest.approx(len(expected(source, kind)), rel=0.1)
    assert [*map(number, source.fetch_many([row.row_id for row in found]))] == [
        number(row.data) for row in found
    ]
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


def test_the_log_says_what_lanes_share(source: Any, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    said = SHARED.get(kind, "")
    data = stream(Mix([{"name": "a", "source": source, "weight": 1}]), num_lanes=8 if said else 3)
    assert len([next(iter(data)), *data]) > 1, "iterated twice"
    found = [message for message in caplog.messages if "take turns" in message]
    assert found == [f"a: {said} of them, which take turns with its rows"] * bool(said)
