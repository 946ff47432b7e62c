"""Hugging Face's datasets as sources: loaded or by name, streams by row and by table, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Array2D, Dataset, DatasetDict, Features, IterableDataset, Value
from torch.utils.data import DataLoader

from streampack import HFSource, IterablePackedDataset
from streampack.sources import Reading, hugging_face
from streampack.sources.arrow_rows import ArrowRow
from tests.harness.conformance import check_cursors

Row = dict[str, Any]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def rows_of(count: int) -> list[Row]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 20, count).tolist()
    return [{"tokens": [i] * n, "labels": [i] * n} for i, n in enumerate(lengths)]


def shards(folder: Path, count: int = 3, rows: int = 40) -> Path:
    (folder / "shards").mkdir()
    for shard, part in enumerate(np.array_split(np.arange(rows), count)):
        lines = [json.dumps(rows_of(rows)[i]) for i in part]
        (folder / "shards" / f"train-{shard}.jsonl").write_text("\n".join(lines))
    return folder / "shards"


def streamed(folder: Path, **options: Any) -> IterableDataset:
    return datasets.load_dataset(
        "json", data_files=str(folder / "*.jsonl"), split="train", streaming=True, **options
    )


def firsts(source: HFSource, num_lanes: int = 1, **reading: Any) -> list[int]:
    """Return the first token of every row."""
    lanes = [source.read(Reading(lane, num_lanes=num_lanes, **reading)) for lane in range(num_lanes)]
    return [row.data["tokens"][0] for lane in lanes for row in lane]


MADE: dict[str, Callable[[Path], Any]] = {
    "map-style": lambda folder: Dataset.from_list(rows_of(40)),
    "stream": streamed,
    "mapped": lambda folder: streamed(folder).map(lambda row: {"labels": row["labels"]}),
    "filtered": lambda folder: streamed(folder).filter(lambda row: row["tokens"][0] % 3),
    "concatenated": lambda folder: datasets.concatenate_datasets([streamed(folder), streamed(folder)]),
    "interleaved": lambda folder: datasets.interleave_datasets(
        [streamed(folder), streamed(folder).map(lambda row: {"tokens": [t + 100 for t in row["tokens"]]})]
    ),
    "taken": lambda folder: streamed(folder).take(10),
    "repeated": lambda folder: streamed(folder).repeat(2),
    "of a generator": lambda folder: Dataset.from_list(rows_of(40)).to_iterable_dataset(num_shards=4),
}


@pytest.mark.parametrize("kind", MADE)
def test_rows_are_those_of_the_dataset(tmp_path: Path, kind: str) -> None:
    """Also with more lanes than shards. A stream whose shards do not add up to the whole is one shard."""
    dataset = MADE[kind](shards(tmp_path))
    source = HFSource(dataset)
    expected = sorted(row["tokens"][0] for row in dataset)
    for num_lanes in (1, 2, 5, 17):
        assert sorted(firsts(source, num_lanes)) == expected
        assert sorted(firsts(source, num_lanes, shuffle_window=7)) == expected
    one_shard = kind in ("interleaved", "taken", "repeated")
    assert source.natural_lanes() == 1 if one_shard or kind == "map-style" else source.natural_lanes() > 2
    shared = source.shared(17)
    assert len(shared) == (kind != "map-style")
    if one_shard:
        assert shared == [
            "1 shard is shared by 17 lanes: each is read by 17 of them, which take turns with its rows"
        ]


@pytest.mark.parametrize("kind", ["stream", "filtered", "interleaved"])
def test_reading_resumes_at_every_cursor(tmp_path: Path, kind: str) -> None:
    source = HFSource(MADE[kind](shards(tmp_path, rows=14)))
    for num_lanes in (2, 5):
        for lane in range(num_lanes):
            check_cursors(
                lambda start, lane=lane, num_lanes=num_lanes: source.read(  # type: ignore[misc]
                    Reading(lane, num_lanes=num_lanes, shuffle_window=3, start=start)
                )
            )


@pytest.mark.parametrize(("consumers", "lanes"), [(2, 4), (3, 3)])
def test_fewer_consumers_than_shards_get_as_many_lanes_each(
    tmp_path: Path, consumers: int, lanes: int
) -> None:
    (tmp_path / "shards").mkdir()
    for shard in range(4):
        rows = "".join(json.dumps({"input_ids": [1 + 10 * shard + i] * 4}) + "\n" for i in range(10))
        (tmp_path / "shards" / f"{shard}.jsonl").write_text(rows)
    dataset = streamed(tmp_path / "shards")
    assert dataset.num_shards == 4
    packs = IterablePackedDataset(dataset, max_seq_len=8)
    found = [
        token
        for consumer in range(consumers)
        for pack in packs.stream(consumer, consumers)
        for token in pack.tokens.tolist()
    ]
    assert packs.num_lanes == lanes
    assert sorted(set(found)) == list(range(1, 41))


def test_a_shuffled_stream_is_refused(tmp_path: Path) -> None:
    dataset = streamed(shards(tmp_path))
    for shuffled in (
        dataset.shuffle(seed=1),
        dataset.shuffle(seed=1, buffer_size=1).map(lambda row: row),
        datasets.concatenate_datasets([dataset, dataset.shuffle(seed=1)]),
    ):
        with pytest.raises(
            ValueError, match="the stream is shuffled, and datasets loses the shuffle buffer on resume"
        ):
            HFSource(shuffled)
        with pytest.raises(ValueError, match="the stream is shuffled"):
            IterablePackedDataset(shuffled, max_seq_len=8)
    HFSource(Dataset.from_list(rows_of(5)).shuffle(seed=1))  # by number: nothing to lose


def test_parquet_is_resharded_by_row_group(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows_of(40)), tmp_path / "rows.parquet", row_group_size=10)
    dataset = datasets.load_dataset(
        "parquet", data_files=str(tmp_path / "rows.parquet"), split="train", streaming=True
    )
    assert HFSource(dataset).natural_lanes() == 1
    source = HFSource(dataset.reshard())
    assert source.natural_lanes() == 4
    assert sorted(firsts(source, 4)) == list(range(40))


@pytest.mark.parametrize("streaming", [True, False])
def test_a_dataset_is_loaded_by_name(tmp_path: Path, streaming: bool) -> None:
    folder = shards(tmp_path)
    files = str(folder / "*.jsonl")
    source = HFSource("json", data_files=files, split="train", streaming=streaming, columns=["tokens"])
    assert sorted(firsts(source, 2)) == list(range(40))
    assert list(source.fetch((0, 0) if streaming else (0,))) == ["tokens"]
    assert sorted(firsts(HFSource(str(folder), split="train", streaming=streaming))) == list(range(40))
    with pytest.raises(ValueError, match="the dataset has several splits; name one: split='train'"):
        HFSource("json", data_files=files, streaming=streaming)


def test_no_code_of_a_dataset_is_run(tmp_path: Path) -> None:
    """Neither a dataset's own script, nor one to be trusted, nor pickles."""
    folder = tmp_path / "scripted"
    folder.mkdir()
    (folder / "scripted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(Exception, match=r"(?i)script|data files"):
        HFSource(str(folder), split="train")
    with pytest.raises(TypeError, match="trust_remote_code"):
        HFSource(str(folder), split="train", trust_remote_code=True)  # type: ignore[call-arg]
    (folder / "rows.pkl").write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR.")
    for dataset, files in (("pandas", str(folder / "rows.pkl")), (str(folder), None)):
        with pytest.raises(Exception):  # noqa: B017 - whatever datasets says
            firsts(HFSource(dataset, data_files=files, split="train"))
    assert not (tmp_path / "ran").exists()


def test_unusable_datasets_are_refused(tmp_path: Path) -> None:
    rows, stream = Dataset.from_list(rows_of(3)), streamed(shards(tmp_path))
    for dataset, how, message in (
        ([1], {}, "a list is no Hugging Face dataset; give one, or its name"),
        (rows, {"split": "train"}, "name, split, data_files and revision are for a dataset by name"),
        (DatasetDict(test=rows), {}, "the dataset has several splits; name one: split='test'"),
        (rows, {"columns": ["text"]}, "the dataset has no column 'text'; it has 'tokens', 'labels'"),
        (stream, {"columns": ["text"]}, "the dataset has no column 'text'; it has 'tokens', 'labels'"),
    ):
        with pytest.raises(ValueError, match=message):
            HFSource(dataset, **how)


def test_rows_are_located_by_shard_and_number(tmp_path: Path) -> None:
    source = HFSource(streamed(shards(tmp_path)))
    for row in source.read(Reading(shuffle_window=5)):
        assert source.fetch(row.row_id) == row.data
    assert [HFSource(Dataset.from_list(rows_of(3))).locate((2,)), source.locate((2, 5))] == [
        "sample 2",
        "shard 2, row 5",
    ]


def test_the_fingerprint_depends_on_the_columns(tmp_path: Path) -> None:
    folder = shards(tmp_path)
    assert (
        HFSource(streamed(folder), columns=["tokens"]).fingerprint()
        != HFSource(streamed(folder)).fingerprint()
    )


def test_errors_of_the_stream_consume_nothing(tmp_path: Path) -> None:
    failures = [True, True]

    def hiccup(row: Row) -> Row:
        if row["tokens"][0] == 7 and failures:
            failures.pop()
            raise ConnectionError("a hiccup")
        return row

    reader, got = HFSource(streamed(shards(tmp_path)).map(hiccup)).read(Reading()), []
    while True:
        try:
            got.append(next(reader).data["tokens"][0])
        except StopIteration:
            break
        except ConnectionError as error:
            assert error.__notes__[-1] == "while reading shard 0, row 7"
    assert got == list(range(40))
    assert not failures


def test_a_torch_worker_reads_all_shards_of_a_stream(tmp_path: Path) -> None:
    """There, ``iter`` of a stream gives only the worker's own shards."""
    data = IterablePackedDataset(streamed(shards(tmp_path)), max_seq_len=32, num_lanes=3)
    packs = list(DataLoader(data, batch_size=None, num_workers=2))
    assert len(packs) > 5
    seen = {
        token
        for pack in packs
        for token in pack["tokens"][: int(pack["seq_lens"][: pack["num_seqs"]].sum())].tolist()
    }
    assert seen == set(range(40))


# By table: the same rows, but several at a time.


def table_rows(count: int) -> list[Row]:
    rng = np.random.default_rng(count)
    lengths = rng.integers(0, 9, count).tolist()
    rows = [{"tokens": [i] * (n + 1), "labels": [-100, *[i] * n]} for i, n in enumerate(lengths)]
    other = [{"text": str(i), "score": [None, 0.5], "empty": None} for i in range(count)]
    return [row | more for row, more in zip(rows, other, strict=True)]


def files(folder: Path, *, rows: int = 45) -> list[str]:
    """Write three files with row groups of seven rows."""
    made = table_rows(rows)
    paths = []
    for number, part in enumerate(np.array_split(np.arange(rows), 3)):
        table = pa.Table.from_pylist([made[i] for i in part])
        paths.append(str(folder / f"{number}.parquet"))
        pq.write_table(table, paths[-1], row_group_size=7)
    return paths


def tables(folder: Path, rows: int = 45) -> IterableDataset:
    return datasets.load_dataset(
        "parquet", data_files=files(folder, rows=rows), split="train", streaming=True
    )


BY_TABLE: dict[str, Callable[[Path], Any]] = {
    "files": tables,
    "some columns": lambda folder: tables(folder).select_columns(["labels", "text"]),
    "row groups": lambda folder: tables(folder).reshard(),
    "a shard": lambda folder: tables(folder).shard(3, 1),
    "a table": lambda folder: Dataset.from_list(table_rows(45)).to_iterable_dataset(num_shards=2),
    "a list is missing": lambda folder: Dataset.from_list(
        [*table_rows(9), {**table_rows(1)[0], "tokens": None}, *table_rows(3)]
    ).to_iterable_dataset(),
}


@pytest.mark.parametrize(("kind", "batch_bytes"), [("files", 100), *((kind, 1 << 24) for kind in BY_TABLE)])
def test_rows_of_a_table_are_those_of_the_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, batch_bytes: int
) -> None:
    monkeypatch.setattr(hugging_face, "BATCH_BYTES", batch_bytes)
    dataset = BY_TABLE[kind](tmp_path)
    source = HFSource(dataset)
    assert source.source.by_table
    expected = list(dataset)
    rows = [row.data for row in source.read(Reading())]
    assert all(type(row) is ArrowRow for row in rows) or kind == "a list is missing"
    assert rows == expected
    assert [list(row) for row in rows] == [list(row) for row in expected]
    for number, row in enumerate(dataset.shard(dataset.num_shards, 0)):
        assert source.fetch((0, number)) == row


BY_ROW: dict[str, Callable[[Path], Any]] = {
    "mapped": lambda folder: tables(folder).map(lambda row: {"labels": row["tokens"]}),
    "filtered": lambda folder: tables(folder).filter(lambda row: row["tokens"][0] % 3),
    "formatted": lambda folder: tables(folder).select_columns(["tokens", "labels"]).with_format("numpy"),
    "text": lambda folder: tables(folder).select_columns(["text"]),
    "concatenated": lambda folder: datasets.concatenate_datasets([tables(folder)] * 2),
    "decoded": lambda folder: Dataset.from_list(
        [{"tokens": [1], "image": [[1.0]]}],
        features=Features({"tokens": [Value("int32")], "image": Array2D((1, 1), "float32")}),
    ).to_iterable_dataset(),
}


@pytest.mark.parametrize("kind", BY_ROW)
def test_other_streams_are_read_by_row(tmp_path: Path, kind: str) -> None:
    dataset = BY_ROW[kind](tmp_path)
    source = HFSource(dataset)
    assert not source.source.by_table
    found = [{name: np.asarray(v).tolist() for name, v in row.data.items()} for row in source.read(Reading())]
    assert found == [{name: np.asarray(v).tolist() for name, v in row.items()} for row in dataset]


def test_packs_and_states_are_those_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = tables(tmp_path)

    def run() -> list[Any]:
        data = IterablePackedDataset(dataset, max_seq_len=16, num_lanes=5, shuffle=True, shuffle_window=6)
        return [([pack[key].tolist() for key in ("tokens", "labels")], data.state_dict()) for pack in data]

    by_table = run()
    monkeypatch.setattr(hugging_face, "BY_TABLE", frozenset())
    assert not HFSource(dataset).source.by_table
    assert run() == by_table


def test_errors_of_a_stream_of_tables_consume_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [3, 2, 0]
    whole = IterableDataset.iter

    def hiccup(self: IterableDataset, batch_size: int) -> Iterator[Any]:
        last = failures.pop() if failures else None
        for number, table in enumerate(whole(self, batch_size)):
            if number == last:
                raise ConnectionError("a hiccup")
            yield table

    source = HFSource(tables(tmp_path))
    monkeypatch.setattr(IterableDataset, "iter", hiccup)
    reader, got = source.read(Reading()), []
    while True:
        try:
            got.append(next(reader).data["tokens"][0])
        except StopIteration:
            break
        except ConnectionError as error:
            assert error.__notes__[-1].startswith("while reading shard 0, row ")
    assert got == list(range(45))
    assert not failures
