"""Parquet files and Arrow tables: the rows that their lists would be, row groups as parts, footers that are wrong."""

from __future__ import annotations

import copy
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Array2D, Dataset, Features, Value, concatenate_datasets
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack import (
    IGNORE_INDEX,
    HFSource,
    Holdout,
    IterablePackedDataset,
    MapSource,
    PackedDataset,
    ParquetSource,
    TokensEncoder,
)
from streampack.sources import Reading, as_source
from tests.harness.corpus import identity_of, read_all
from tests.harness.files import listed, small_pieces

# Any columns, of any types.

NUMBERS = {
    pa.int8(): (-128, 127),
    pa.uint8(): (0, 255),
    pa.int16(): (-(2**15), 2**15 - 1),
    pa.uint16(): (0, 2**16 - 1),
    pa.int32(): (-(2**31), 2**31 - 1),
    pa.uint32(): (0, 2**32 - 1),
    pa.int64(): (-(2**63), 2**63 - 1),
    pa.uint64(): (0, 2**64 - 1),
}
ENCODERS = [
    TokensEncoder(),
    TokensEncoder(labels=None),
    TokensEncoder(tokens="input_ids"),
    TokensEncoder(tokens="ids", labels="targets"),
]
NAMES = ("tokens", "input_ids", "labels", "ids", "targets", "attention_mask", "completion_mask")


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    """Draw columns of pyarrow, slices of longer ones."""
    rows = draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows))
    if draw(st.booleans()):
        lengths = [lengths[0]] * rows
    found = {}
    for name in draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True)):
        kind = draw(st.sampled_from(list(NUMBERS)))
        low, high = NUMBERS[kind]
        usual = st.integers(max(low, IGNORE_INDEX if name in ("labels", "targets") else 0), min(high, 9))
        some = draw(st.sampled_from([usual, usual, st.integers(low, high), st.none() | usual]))
        values = [draw(st.lists(some, min_size=length, max_size=length)) for length in lengths]
        lists = draw(st.sampled_from([pa.list_, pa.large_list]))
        if set(lengths) == {lengths[0]} - {0} and draw(st.booleans()):  # Parquet has none of no length
            lists = lambda kind: pa.list_(kind, lengths[0])  # noqa: E731
        elif draw(st.integers(0, 9)) == 0:
            values[0] = None
        before = draw(st.integers(0, 2))
        outer = [[7] * lengths[0]] * before + values + [[7] * lengths[0]]
        found[name] = pa.array(outer, lists(kind)).slice(before, rows)
    return pa.table({**found, "text": pa.array([f"row {i}" for i in range(rows)])})


def packed(source: Any, encoder: TokensEncoder, vocab_size: int | None, *, skip_bad: bool) -> Any:
    """Return what is packed of a source, or the message of the error."""
    settings: dict[str, Any] = {"num_lanes": 1, "skip_bad": skip_bad, "untrained": "keep"}
    try:
        data = IterablePackedDataset(
            source, max_seq_len=16, encoder=encoder, vocab_size=vocab_size, **settings
        )
        return [
            (pack["tokens"].tolist(), pack["labels"].tolist(), pack["seq_lens"].tolist()) for pack in data
        ]
    except (TypeError, ValueError) as error:  # the first for None in an attention_mask
        return str(error).rpartition(": ")[2]


@settings(max_examples=30, deadline=None)
@given(table=tables(), encoder=st.sampled_from(ENCODERS), vocab_size=st.sampled_from([None, 5, 10, 300]))
def test_rows_and_packs_are_those_of_lists(
    tmp_path_factory: pytest.TempPathFactory, table: pa.Table, encoder: TokensEncoder, vocab_size: int | None
) -> None:
    """Errors are the same, too: ids that are checked by the batch are checked no less."""
    path = tmp_path_factory.mktemp("table") / "a.parquet"
    pq.write_table(table, path)
    wanted = table.to_pylist()
    source = ParquetSource(path)
    rows = read_all(source)
    assert rows == wanted
    for row, lists in zip(rows, wanted, strict=True):
        assert (list(row), len(row), repr(row)) == (list(lists), len(lists), repr(lists))
        assert "nothing" not in row
        assert dict(row) == copy.deepcopy(row) == pickle.loads(pickle.dumps(row)) == lists
    for skip_bad in (False, True):
        expected = packed(MapSource(wanted), encoder, vocab_size, skip_bad=skip_bad)
        assert packed(source, encoder, vocab_size, skip_bad=skip_bad) == expected
        assert packed(Dataset(table), encoder, vocab_size, skip_bad=skip_bad) == expected
    for part in ("train", "validation"):
        held = [Holdout(each, fraction=0.5, part=part) for each in (source, MapSource(wanted))]
        assert read_all(held[0]) == read_all(held[1])


def write_tokens(path: Path, rows: int = 300, **changed: list[Any]) -> Path:
    rng = np.random.default_rng(0)
    tokens = [rng.integers(1, 99, n).tolist() for n in rng.integers(1, 30, rows)]
    labels = [[-100, *ids[1:]] for ids in tokens]
    columns = {"tokens": tokens, "labels": labels, "attention_mask": [[1] * len(ids) for ids in tokens]}
    pq.write_table(pa.table({**columns, **changed}), path, row_group_size=70)
    return path


@pytest.mark.parametrize(
    ("column", "bad"),
    [("tokens", [5, 100]), ("tokens", [-1]), ("tokens", [2**40]), ("tokens", None), ("tokens", [1, None]),
     ("labels", [-99]), ("labels", [100]), ("labels", [1, 2, 3]), ("attention_mask", [0, 1])],
)  # fmt: skip
def test_a_bad_row_is_found_with_its_place(tmp_path: Path, column: str, bad: Any) -> None:
    whole = pq.read_table(write_tokens(tmp_path / "a.parquet")).to_pydict()
    if bad is not None and column != "tokens" and len(bad) == 1:
        bad = bad * len(whole["tokens"][123])
    values = [*whole[column][:123], bad, *whole[column][124:]]
    changed = {column: values}
    if column == "tokens" and bad is not None:
        changed["labels"] = [*whole["labels"][:123], [1] * len(bad), *whole["labels"][124:]]
    path = write_tokens(tmp_path / "a.parquet", **changed)
    settings: dict[str, Any] = {"max_seq_len": 64, "num_lanes": 3, "vocab_size": 100, "overlong": "split"}
    with pytest.raises(ValueError, match="row 123"):
        list(IterablePackedDataset(str(path), **settings))
    data = IterablePackedDataset(str(path), **settings, skip_bad=tmp_path / "bad")
    list(data)
    assert data.ledger().samples == 299
    assert [line["offset"] for line in listed(tmp_path / "bad")] == [123]


def test_functions_of_users_get_dicts_and_lists(tmp_path: Path) -> None:
    kinds = set()

    def encode(row: Any) -> list[int]:
        kinds.add((type(row), *map(type, row.values())))
        return row.pop("tokens") + [99]  # noqa: RUF005

    data = IterablePackedDataset(str(write_tokens(tmp_path / "a.parquet")), max_seq_len=64, encoder=encode)
    next(iter(data))
    assert kinds == {(dict, list, list, list)}


# Datasets of Hugging Face, by number.


def rows_of(count: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(count)
    ids = [rng.integers(1, 99, n).tolist() for n in rng.integers(1, 9, count)]
    return [{"input_ids": each, "labels": [-100, *each[1:]], "text": str(i)} for i, each in enumerate(ids)]


def whole() -> Dataset:
    return Dataset.from_list(rows_of(50))


def saved(folder: Path) -> Dataset:
    whole().save_to_disk(folder, num_shards=3)
    return Dataset.load_from_disk(folder)


def side_by_side(folder: Path) -> Dataset:
    parts = [Dataset.from_list(rows_of(40)[part]) for part in (slice(15), slice(15, 40))]
    rest = concatenate_datasets(parts).remove_columns("input_ids")
    return concatenate_datasets([Dataset.from_list(rows_of(40)).select_columns("input_ids"), rest], axis=1)


DATASETS = {
    "a list": lambda folder: whole(),
    "several chunks": lambda folder: concatenate_datasets(
        [Dataset.from_list(rows_of(n)) for n in (9, 1, 30)]
    ),
    "side by side": side_by_side,
    "selected": lambda folder: whole().select([3, 3, 40, 0, 7]),
    "a range": lambda folder: whole().select(range(10, 30)),
    "some columns": lambda folder: whole().select_columns(["input_ids"]),
    "filtered": lambda folder: whole().filter(lambda row: len(row["input_ids"]) > 3),
    "on disk": saved,
    "formatted": lambda folder: whole().with_format("numpy"),
    "decoded": lambda folder: Dataset.from_list(
        [{"input_ids": [1], "image": [[1.0]]}],
        features=Features({"input_ids": [Value("int32")], "image": Array2D((1, 1), "float32")}),
    ),
}


@pytest.mark.parametrize("make", DATASETS.values(), ids=DATASETS)
def test_rows_and_packs_are_those_of_the_dataset(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_pieces(monkeypatch)
    dataset = make(tmp_path)
    source = pickle.loads(pickle.dumps(as_source(dataset)))
    for i in [*range(len(dataset)), *np.random.default_rng(0).permutation(len(dataset)).tolist()]:
        row = source.fetch_many([(i,)])[0]
        assert list(row) == list(dataset[i])
        assert repr(row) == repr(dataset[i])
    with pytest.raises(IndexError):
        source.fetch_many([(len(dataset),)])

    def packs_of(source: Any) -> Any:
        data = IterablePackedDataset(source, max_seq_len=16, num_lanes=2, shuffle=True, vocab_size=99)
        return [([pack[key].tolist() for key in ("tokens", "labels")], data.state_dict()) for pack in data]

    by_row = packs_of(MapSource(dataset))
    assert packs_of(dataset) == by_row
    assert [pack for pack, _ in packs_of(HFSource(dataset))] == [pack for pack, _ in by_row]
    assert identity_of(source) == identity_of(HFSource(dataset)) == identity_of(MapSource(dataset))
    packs, other = (PackedDataset(data, max_seq_len=16) for data in (dataset, list(dataset)))
    assert [pack["tokens"].tolist() for pack in packs] == [pack["tokens"].tolist() for pack in other]


# Files.


DOTTED = {
    "a.b": ["x", "y"], "a": [{"b": "deep", "c": 1}, {"b": "deeper", "c": 2}], "text": ["t", "u"], "m.l": [[1], [2, 3]],
    "a.b.c": [4, 5],
}  # fmt: skip


@pytest.mark.parametrize("columns", [
    [pa.array([1], pa.int32()), pa.array([1], pa.int64()), pa.array([1.0]), pa.array([1]).dictionary_encode()],
    [pa.array(["a"]), pa.array(["a"], pa.large_string()), pa.array(["a"]).dictionary_encode(), pa.nulls(1)],
    [pa.array([[1]], pa.list_(pa.int32())), pa.array([[1]], pa.large_list(pa.uint16())), pa.array([[]])],
    [pa.array([[{"role": "a"}]]), pa.array(["[]"]), pa.array([[{"role": "a", "name": "b"}]])],
])  # fmt: skip
def test_files_whose_columns_hold_the_same_in_other_types(tmp_path: Path, columns: list[Any]) -> None:
    for number, column in enumerate(columns):
        pq.write_table(pa.table({"a": column}), tmp_path / f"{number}.parquet")
    source = ParquetSource(tmp_path, columns=["a"])
    found = [row.data["a"] for row in source.read(Reading())]
    assert found == [column[0].as_py() for column in columns]


@pytest.mark.parametrize("error", [None, ConnectionError("out of reach")])
def test_a_footer_is_read_once_for_all_lanes_that_need_it(tmp_path: Path, error: Exception | None) -> None:
    """After an error they try side by side: no outage is waited out by one after the other."""
    pq.write_table(pa.table({"a": [1]}), tmp_path / "a.parquet")
    source, asked = ParquetSource(tmp_path), []

    def take(block: Any) -> bytes:
        asked.append(block)
        time.sleep(0.3)  # until the others wait
        if error is not None:
            raise error
        return source.fetcher().take(block)

    begun = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        found = [pool.submit(source.footers.get, 0, take) for _ in range(8)]
        assert {type(each.exception()) for each in found} == {type(error)}
    assert len(asked) == (8 if error else 1)
    assert time.monotonic() - begun < 2


@pytest.mark.parametrize("columns", [None, ["a.b"], ["a"], ["m.l"], ["a.b", "text"]])
def test_names_with_dots_are_names(tmp_path: Path, columns: list[str] | None) -> None:
    """pyarrow also takes them for paths into nested columns."""
    pq.write_table(pa.table(DOTTED), tmp_path / "a.parquet", row_group_size=1)
    names = columns or list(DOTTED)
    expected = [{name: DOTTED[name][i] for name in DOTTED if name in names} for i in range(2)]
    assert read_all(ParquetSource(tmp_path / "a.parquet", columns=columns)) == expected
    with pytest.raises(ValueError, match="has no column 'a.c'; it has 'a.b', 'a'"):
        read_all(ParquetSource(tmp_path / "a.parquet", columns=["a.c"]))
