"""Hugging Face's datasets as sources: loaded or by name, streams by row and by table, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Array2D, Dataset, DatasetDict, Features, IterableDataset, Value

from streampack import AnswersEncoder, ChatEncoder, HFSource, IterablePackedDataset, MapSource, ParquetSource
from streampack.sources import Reading
from streampack.sources.source import shared_by_lanes
from streampack.validation import raised_here
from tests.harness.conformance import lists
from tests.harness.files import small_pieces
from tests.harness.hf_tokenizers import byte_level

Row = dict[str, Any]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def rows_of(count: int) -> list[Row]:
    """Return rows of tokens, whose number is their first one, and of other types."""
    lengths = np.random.default_rng(count).integers(0, 9, count).tolist()
    rows = [{"tokens": [i] * (n + 1), "labels": [-100, *[i] * n]} for i, n in enumerate(lengths)]
    other = [{"text": str(i), "score": [None, 0.5], "empty": None} for i in range(count)]
    return [row | more for row, more in zip(rows, other, strict=True)]


def shards(folder: Path, count: int = 3, rows: int = 40) -> Path:
    """Write files of JSON lines, and of Parquet with row groups of seven rows, to two folders."""
    made = rows_of(rows)
    for kind in ("json", "parquet"):
        (folder / kind).mkdir()
    for shard, part in enumerate(np.array_split(np.arange(rows), count)):
        (folder / "json" / f"train-{shard}.jsonl").write_text("\n".join(json.dumps(made[i]) for i in part))
        table = pa.Table.from_pylist([made[i] for i in part])
        pq.write_table(table, folder / "parquet" / f"{shard}.parquet", row_group_size=7)
    return folder


def streamed(folder: Path, kind: str = "json") -> IterableDataset:
    files = sorted(map(str, (folder / kind).iterdir()))
    return datasets.load_dataset(kind, data_files=files, split="train", streaming=True)


def tables(folder: Path) -> IterableDataset:
    return streamed(folder, "parquet")


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
    # Those of which whole tables are read,
    "tables": tables,
    "tables, some columns": lambda folder: tables(folder).select_columns(["labels", "tokens"]),
    "tables, by row group": lambda folder: tables(folder).reshard(),
    "tables, a shard": lambda folder: tables(folder).shard(3, 1),
    "a list is missing": lambda folder: Dataset.from_list(
        [*rows_of(9), {**rows_of(1)[0], "labels": None}, *rows_of(3)]
    ).to_iterable_dataset(),
    # and those that look like them.
    "tables, mapped": lambda folder: tables(folder).map(lambda row: {"labels": row["tokens"]}),
    "tables, filtered": lambda folder: tables(folder).filter(lambda row: row["tokens"][0] % 3),
    "tables, formatted": lambda folder: tables(folder).select_columns(["tokens"]).with_format("numpy"),
    "decoded": lambda folder: Dataset.from_list(
        [{"tokens": [1], "image": [[1.0]]}],
        features=Features({"tokens": [Value("int32")], "image": Array2D((1, 1), "float32")}),
    ).to_iterable_dataset(),
}
ONE_SHARD = ("interleaved", "taken", "repeated", "a list is missing", "decoded")


@pytest.mark.parametrize("kind", MADE)
def test_rows_are_those_of_the_dataset(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be more lanes than shards. A stream whose shards do not add up to the whole is one shard."""
    small_pieces(monkeypatch)
    dataset = MADE[kind](shards(tmp_path))
    source = HFSource(dataset)
    rows = [row.data for row in source.read(Reading())]
    assert lists(rows) == lists(list(dataset))
    assert [list(row) for row in rows] == [list(row) for row in dataset]
    shuffled = list(source.read(Reading(shuffle_window=5)))
    for some in (shuffled, *([row] for row in shuffled[::9])):
        assert lists(source.fetch_many([row.row_id for row in some])) == [lists(row.data) for row in some]
    expected = sorted(row["tokens"][0] for row in dataset)
    for num_lanes, window in ((2, 7), (5, 0), (17, 7)):
        assert sorted(firsts(source, num_lanes, shuffle_window=window)) == expected
    if kind in ONE_SHARD:
        assert source.natural_lanes() == 1
        shared = "1 shard is shared by 17 lanes: each is read by 17 of them, which take turns with its rows"
        assert shared_by_lanes(source, 17) == [shared]
    assert len(shared_by_lanes(source, 17)) == (kind != "map-style")


def test_a_shuffled_stream_is_refused(tmp_path: Path) -> None:
    dataset = streamed(shards(tmp_path))
    for shuffled in (
        dataset.shuffle(seed=1),
        dataset.shuffle(seed=1, buffer_size=1).map(lambda row: row),
        datasets.concatenate_datasets([dataset, dataset.shuffle(seed=1)]),
    ):
        message = "the stream is shuffled, and datasets loses the shuffle buffer on resume"
        for door in (HFSource, lambda rows: IterablePackedDataset(rows, max_seq_len=8)):
            with pytest.raises(ValueError, match=message):
                door(shuffled)
    HFSource(Dataset.from_list(rows_of(5)).shuffle(seed=1))  # by number: nothing to lose


def test_only_a_stream_of_all_rows_of_its_split_knows_their_number(tmp_path: Path) -> None:
    stream = streamed(shards(tmp_path, count=1))
    stream.info.splits = datasets.SplitDict({"train": datasets.SplitInfo("train", num_examples=40)})
    streams = (stream, stream.map(dict), stream.take(10), stream.repeat(2))
    assert [HFSource(each).size for each in streams] == [40, 40, None, None]


@pytest.mark.parametrize("streaming", [True, False])
def test_a_dataset_is_loaded_by_name(tmp_path: Path, streaming: bool) -> None:
    folder = shards(tmp_path) / "json"
    files = str(folder / "*.jsonl")
    source = HFSource("json", data_files=files, split="train", streaming=streaming, columns=["tokens"])
    assert sorted(firsts(source, 2)) == list(range(40))
    assert list(source.fetch_many([(0, 0) if streaming else (0,)])[0]) == ["tokens"]
    assert sorted(firsts(HFSource(str(folder), split="train", streaming=streaming))) == list(range(40))
    with pytest.raises(ValueError, match="the dataset has several splits; name one: split='train'"):
        HFSource("json", data_files=files, streaming=streaming)


def test_no_code_of_a_dataset_is_run(tmp_path: Path) -> None:
    """Neither a dataset's own script, nor one to be trusted, nor pickles."""
    (folder := tmp_path / "scripted").mkdir()
    (folder / "scripted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(
        ValueError, match=r"(?i)^datasets cannot load '.*/scripted': .*(script|data files)"
    ) as refused:
        HFSource(str(folder), split="train")
    assert raised_here(refused.value), "one line, and no traceback"
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
        (rows, {"columns": ["words"]}, "no column 'words'; it has 'tokens', 'labels', 'text'"),
        (stream, {"columns": ["words"]}, "no column 'words'; it has 'tokens', 'labels', 'text'"),
    ):
        with pytest.raises(ValueError, match=message):
            HFSource(dataset, **how)


def test_errors_of_the_stream_consume_nothing(tmp_path: Path) -> None:
    failures = [True, True]

    def hiccup(row: Row) -> Row:
        if row["tokens"][0] == 7 and failures:
            failures.pop()
            raise ConnectionError("a hiccup")
        return row

    source, got = HFSource(streamed(shards(tmp_path)).map(hiccup)), []
    reader = source.read(Reading())
    while True:
        try:
            got.append(next(reader).data["tokens"][0])
        except StopIteration:
            break
        except ConnectionError as error:
            assert error.__notes__[-1] == "while reading shard 0, row 7"
            reader = source.read(Reading(start=reader.cursor))
    assert (got, failures) == (list(range(40)), [])


# Arrow gives every record of a column the fields of all of them.


def called(name: str, arguments: Any) -> Row:
    """Return a row of a call of a tool, whose parameters are like no other tool's."""
    function = {"name": name, "parameters": {"type": "object", "properties": {name: {"type": "integer"}}}}
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    asked = {"role": "user", "content": "call"}
    answers = [{"role": "assistant", "content": text, "tool_calls": [call]} for text in ("yes", "no")]
    return {
        "messages": [asked, answers[0]], "tools": [{"type": "function", "function": function}],
        "prompt": [asked], "chosen": answers[0], "rejected": answers[1:],
    }  # fmt: skip


# No number: where one is missing, pandas makes floats of those of the others.
CALLED = [called("first", {"first": True}), called("second", {"more": [{"a": "x"}, {"b": False}]})]


def parquet(folder: Path, rows: list[Row], **how: Any) -> str:
    (path := folder / "called.parquet").unlink(missing_ok=True)
    Dataset.from_list(rows, **how).to_parquet(path)
    return str(path)


def stream_of_parquet(folder: Path, rows: list[Row]) -> IterableDataset:
    return datasets.load_dataset("parquet", data_files=parquet(folder, rows), split="train", streaming=True)


def with_ids(rows: list[Row]) -> list[Row]:
    return [{**row, "input_ids": [1, 2, 3]} for row in rows]


ARROW: dict[str, Callable[[Path, list[Row]], Any]] = {
    "dataset": lambda _, rows: Dataset.from_list(rows),
    "dataset of a source": lambda _, rows: MapSource(Dataset.from_list(rows)),
    "dataset with ids": lambda _, rows: Dataset.from_list(with_ids(rows)),
    "dataset with images": lambda _, rows: Dataset.from_list(
        [{**row, "icon": datasets.Image().encode_example(np.zeros((1, 1, 3), np.uint8))} for row in rows]
    ).cast_column("icon", datasets.Image()),
    "dataset with a transform": lambda _, rows: Dataset.from_list(rows).with_transform(dict),
    "frame of Parquet": lambda folder, rows: pandas.read_parquet(parquet(folder, rows)),
    "subset": lambda _, rows: torch.utils.data.Subset(Dataset.from_list(rows), range(len(rows))),
    "concatenated": lambda _, rows: torch.utils.data.ConcatDataset([Dataset.from_list(rows)]),
    "some of it is JSON": lambda _, rows: Dataset.from_list(rows, on_mixed_types="use_json"),
    "parquet": lambda folder, rows: ParquetSource(parquet(folder, rows)),
    "parquet with ids": lambda folder, rows: ParquetSource(parquet(folder, with_ids(rows))),
    "parquet, some of it is JSON": lambda folder, rows: ParquetSource(
        parquet(folder, rows, on_mixed_types="use_json")
    ),
    "stream": stream_of_parquet,
    "stream by table": lambda folder, rows: stream_of_parquet(folder, with_ids(rows)),
    "stream, mapped": lambda folder, rows: stream_of_parquet(folder, rows).map(dict),
    "stream of a dataset": lambda _, rows: Dataset.from_list(rows).to_iterable_dataset(),
    "generator": lambda _, rows: IterableDataset.from_generator(
        lambda: iter(rows), features=Dataset.from_list(rows).features
    ),
}
JSON = ("some of it is JSON", "parquet, some of it is JSON")
WRITTEN: dict[str, Callable[[Path, list[Row]], Any]] = {
    "list": lambda _, rows: rows,
    "frame": lambda _, rows: pandas.DataFrame(rows),
    "generator": lambda _, rows: IterableDataset.from_generator(lambda: iter(rows)),
    "generator, mapped": lambda _, rows: IterableDataset.from_generator(lambda: iter(rows)).map(dict),
    **{name: ARROW[name] for name in JSON},
}


def packs_of(data: Any, encoder: Any) -> list[Any]:
    packs = IterablePackedDataset(data, encoder=encoder, max_seq_len=1024, num_lanes=1)
    return [(pack["tokens"].tolist(), pack["labels"].tolist()) for pack in packs]


@pytest.mark.parametrize("kind", ARROW)
@pytest.mark.parametrize("encode", [ChatEncoder, AnswersEncoder])
def test_rows_of_arrow_are_trained_as_those_of_a_list(tmp_path: Path, kind: str, encode: Any) -> None:
    """No argument of another row's call, nor parameter of another row's tool, comes in as null."""
    ignore = ["input_ids", "icon", "messages" if encode is AnswersEncoder else "prompt", "chosen", "rejected"]
    encoder = encode(byte_level(), ignore=ignore)
    if kind not in JSON:
        assert "None" in str(list(Dataset.from_list(CALLED))), "Arrow makes nulls of them"
    packs = packs_of(ARROW[kind](tmp_path, CALLED), encoder)
    assert packs == packs_of(CALLED, encoder)
    assert "null" not in encoder.decode(packs[0][0])
    if encode is ChatEncoder:  # the call is in the answer, and all of the second one's tools in the prompt
        assert '"arguments": {"more": [{"a": "x"}, {"b": false}]}' in encoder.decode(packs[0][0])


@pytest.mark.parametrize("kind", WRITTEN)
def test_an_authors_null_is_trained(tmp_path: Path, kind: str) -> None:
    encoder = ChatEncoder(byte_level(), ignore=["prompt", "chosen", "rejected"])
    rows = [called("first", {"first": None}), called("second", {"second": "s"})]
    packs = packs_of(WRITTEN[kind](tmp_path, rows), encoder)
    assert packs == packs_of(rows, encoder)
    assert '"arguments": {"first": null}' in encoder.decode(packs[0][0])


@pytest.mark.parametrize("kind", ARROW)
def test_an_authors_null_in_json_text_is_trained(tmp_path: Path, kind: str) -> None:
    """The way out where Arrow's nulls cannot be told from the author's."""
    encoder = ChatEncoder(byte_level(), ignore=["input_ids", "icon", "prompt", "chosen", "rejected"])
    rows = [called("first", '{"first": null}'), called("second", '{"second": "s"}')]
    packs = packs_of(ARROW[kind](tmp_path, rows), encoder)
    assert packs == packs_of(rows, encoder)
    assert '"arguments": {"first": null}' in encoder.decode(packs[0][0])
