"""Rows of Arrow tables, of Parquet files and datasets: the same as of Python lists, whatever their types and chunks."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Array2D, Dataset, Features, Value, concatenate_datasets
from hypothesis import given
from hypothesis import strategies as st

from streampack import (
    IGNORE_INDEX,
    HFSource,
    IterablePackedDataset,
    MapSource,
    PackedDataset,
    ParquetSource,
    TokensEncoder,
)
from streampack.packing.samples import check_sample
from streampack.sources import arrow_dataset, arrow_rows
from streampack.sources.arrow_dataset import ArrowDataset
from streampack.sources.arrow_rows import ArrowBatch, ArrowRow, column_of
from streampack.sources.as_source import as_source
from streampack.sources.holdout import PARTS, Holdout, hold_out

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


NAMES = (
    "tokens",
    "input_ids",
    "labels",
    "ids",
    "targets",
    "attention_mask",
    "position_ids",
    "completion_mask",
)


@st.composite
def columns(draw: st.DrawFn) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Draw columns of pyarrow, slices of longer ones, and their rows as lists."""
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
        if len(set(lengths)) == 1 and draw(st.booleans()):
            lists = lambda kind: pa.list_(kind, lengths[0])  # noqa: E731
        elif draw(st.integers(0, 9)) == 0:
            values[0] = None
        before = draw(st.integers(0, 2))
        outer = [[7] * lengths[0]] * before + values + [[7] * lengths[0]]
        found[name] = pa.array(outer, lists(kind)).slice(before, rows)
    found["text"] = pa.array([f"row {i}" for i in range(rows)])
    return found, pa.table(found).to_pylist()


def encoded(encoder: TokensEncoder, row: Any, vocab_size: int | None, *, known: bool = False) -> Any:
    """Return a sample as lists, or the message of the error; ids are not checked that are ``known``."""
    try:
        sample = encoder(row)
        if not known:
            check_sample(sample, vocab_size)
    except (TypeError, ValueError) as error:  # the first for None in an attention_mask
        return str(error)
    assert {array.dtype for array in sample} <= {np.dtype(np.int32), np.dtype(np.int64)}
    return sample.tokens.tolist(), sample.labels.tolist()


@given(given=columns(), whole=st.booleans(), vocab_size=st.sampled_from([None, 5, 10, 300]))
def test_a_row_is_equal_to_its_lists(given: Any, whole: bool, vocab_size: int | None) -> None:
    arrays, wanted = given
    batch = ArrowBatch(arrays, whole=whole)
    for index, lists in enumerate(wanted):
        row = batch.row(index)
        for encoder in ENCODERS:
            found = encoded(encoder, lists, vocab_size)
            assert encoded(encoder, row, vocab_size) == found
            ids = encoder.checked_in(batch) if type(row) is ArrowRow else None
            if ids is not None and (vocab_size is None or ids.below <= vocab_size):
                sample = ids.sample(index)
                assert (sample.tokens.tolist(), sample.labels.tolist()) == found, "an error would be missed"
                assert {array.dtype for array in sample} == {np.dtype(np.int32)}
                one_by_one = encoder(row)
                assert (sample.tokens is sample.labels) == (one_by_one.tokens is one_by_one.labels)
        assert row == lists
        assert dict(row) == lists
        assert list(row) == list(lists)
        assert len(row) == len(lists)
        assert repr(row) == repr(lists)
        assert "text" in row
        assert "nothing" not in row
        for held in PARTS:
            part = Holdout(MapSource([lists]), fraction=0.5, part=held)
            assert part.keeps(row) == part.keeps(lists)


def test_ids_are_arrays_without_a_copy() -> None:
    numbers = np.arange(6, dtype=np.int32)
    column = pa.ListArray.from_arrays([0, 2, 6], numbers)
    row = ArrowBatch({"tokens": column, "n": pa.array([1, 2])}, whole=True).row(1)
    ids = column_of(row, "tokens")
    assert ids.tolist() == [2, 3, 4, 5]
    assert np.shares_memory(ids, numbers)
    assert not ids.flags.writeable
    tokens, labels = TokensEncoder(labels=None)(row)
    assert np.shares_memory(tokens, numbers)
    assert tokens is labels
    assert column_of(row, "n") == 2
    assert column_of(row, "nothing") is None


def test_a_copy_is_a_dict_without_the_batch() -> None:
    row = ArrowBatch({"tokens": pa.array([[5, 6], [7]]), "text": pa.array(["a", "b"])}, whole=True).row(0)
    for copied in (copy.copy(row), copy.deepcopy(row), pickle.loads(pickle.dumps(row))):
        assert copied == {"tokens": [5, 6], "text": "a"}
        assert type(copied) is dict


@contextmanager
def lists_only() -> Iterator[None]:
    """Read columns of ids as Python lists."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrow_rows, "id_column", lambda column, *, whole: None)
        yield


def write(path: Path, rows: int = 300, **changed: list[Any]) -> Path:
    rng = np.random.default_rng(0)
    tokens = [rng.integers(1, 99, n).tolist() for n in rng.integers(1, 30, rows)]
    labels = [[-100, *ids[1:]] for ids in tokens]
    columns = {"tokens": tokens, "labels": labels, "attention_mask": [[1] * len(ids) for ids in tokens]}
    pq.write_table(pa.table({**columns, **changed}), path, row_group_size=70)
    return path


def run(path: Path, *, start: Any = None, packs: int = 10**6, part: int | None = None, **changes: Any) -> Any:
    """Return the packs as lists, the state after each, and the ledger's bad records."""
    source: Any = ParquetSource(path)
    if part is not None:
        source = hold_out(source, fraction=0.3)[part]
    settings = {"max_seq_len": 64, "num_lanes": 3, "shuffle": True, "shuffle_window": 40, "overlong": "split"}
    data = IterablePackedDataset(source, **{**settings, "vocab_size": 100, **changes})
    if start is not None:
        data.load_state_dict(start)
    found, states = [], []
    for pack in itertools.islice(data, packs):
        found.append([pack[key].tolist() for key in ("tokens", "labels", "seq_lens")] + [pack["fragments"]])
        states.append(copy.deepcopy(data.state_dict()))
    return found, states


@pytest.mark.parametrize(
    "changes", [{}, {"shuffle": False}, {"part": 0}, {"part": 1}, {"split_across_pack": True}]
)
def test_a_run_is_the_same_as_with_lists(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = write(tmp_path / "a.parquet")
    packs, states = run(path, **changes)
    assert len(packs) > 10
    with lists_only():
        assert run(path, **changes) == (packs, states)
    for at in (0, len(packs) // 2):
        rest = packs[at + 1 :], states[at + 1 :]
        assert run(path, start=states[at], **changes) == rest
        with lists_only():
            assert run(path, start=states[at], **changes) == rest


def test_the_identity_is_that_of_lists(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet")

    def identity() -> Any:
        source = ParquetSource(path)
        train, held_out = hold_out(source, fraction=0.3)
        return [each.fingerprint() for each in (source, train, held_out)], source.examples(), source.probe(9)

    found = identity()
    with lists_only():
        assert identity() == found


@pytest.mark.parametrize(
    ("column", "bad"),
    [("tokens", [5, 100]), ("tokens", [-1]), ("tokens", [2**40]), ("tokens", None), ("tokens", [1, None]),
     ("labels", [-99]), ("labels", [100]), ("labels", [1, 2, 3]), ("attention_mask", [0, 1])],
)  # fmt: skip
def test_a_bad_row_is_found_with_its_place(tmp_path: Path, column: str, bad: Any) -> None:
    whole = pq.read_table(write(tmp_path / "a.parquet")).to_pydict()
    if bad is not None and column != "tokens" and len(bad) == 1:
        bad = bad * len(whole["tokens"][123])
    values = whole[column]
    values[123] = bad
    changed = {column: values}
    if column == "tokens" and bad is not None:
        changed["labels"] = [*whole["labels"][:123], [1] * len(bad), *whole["labels"][124:]]
    path = write(tmp_path / "a.parquet", **changed)

    def outcome() -> Any:
        with pytest.raises(ValueError, match="row 123") as error:
            run(path)
        folder = tmp_path / f"bad-{next(numbers)}"
        kept = run(path, on_bad_record="skip", quarantine=folder)
        return str(error.value), kept, [file.read_text() for file in sorted(folder.glob("*"))]

    numbers = itertools.count()
    found = outcome()
    assert '"offset": 123' in "".join(found[2])
    with lists_only():
        assert outcome() == found


def test_functions_of_users_get_dicts_and_lists(tmp_path: Path) -> None:
    kinds = set()

    def encode(row: Any) -> list[int]:
        kinds.add((type(row), *map(type, row.values())))
        return row.pop("tokens") + [99]  # noqa: RUF005

    next(iter(IterablePackedDataset(str(write(tmp_path / "a.parquet")), max_seq_len=64, encoder=encode)))
    assert kinds == {(dict, list, list, list)}


def test_long_rows_are_decoded_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.parquet")
    wanted = run(path)
    monkeypatch.setattr("streampack.sources.row_groups.BATCH_BYTES", 1000)
    sizes, init = [], ArrowBatch.__init__

    def seen(self: ArrowBatch, columns: Any, *, whole: bool) -> None:
        sizes.append(len(columns["tokens"]))
        init(self, columns, whole=whole)

    monkeypatch.setattr(ArrowBatch, "__init__", seen)
    assert run(path) == wanted
    assert max(sizes) < 20


# Datasets of Hugging Face, by number.


pytest.importorskip("datasets")


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
}


@pytest.mark.parametrize("make", DATASETS.values(), ids=DATASETS)
def test_rows_and_packs_are_those_of_the_dataset(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = make(tmp_path)
    monkeypatch.setattr(arrow_dataset, "BATCH_ROWS", 4)
    monkeypatch.setattr(arrow_dataset, "KEPT_BATCHES", 3)
    source = as_source(dataset)
    assert isinstance(source.dataset, ArrowDataset)
    rows = pickle.loads(pickle.dumps(source)).dataset
    for i in [*range(len(dataset)), *np.random.default_rng(0).permutation(len(dataset)).tolist(), -1]:
        assert i < 0 or type(rows[i]) is ArrowRow
        assert rows[i] == dataset[i]
        assert list(rows[i]) == list(dataset[i])
    with pytest.raises(IndexError):
        rows[len(dataset)]

    def packs_of(source: Any) -> Any:
        data = IterablePackedDataset(source, max_seq_len=16, num_lanes=2, shuffle=True, vocab_size=99)
        return [([pack[key].tolist() for key in ("tokens", "labels")], data.state_dict()) for pack in data]

    by_row = packs_of(MapSource(dataset))
    assert packs_of(dataset) == by_row
    assert [pack for pack, _ in packs_of(HFSource(dataset))] == [pack for pack, _ in by_row]
    assert source.fingerprint() == HFSource(dataset).fingerprint() == MapSource(dataset).fingerprint()
    packed, other = (PackedDataset(data, max_seq_len=16) for data in (dataset, list(dataset)))
    assert isinstance(packed.ds, ArrowDataset)
    assert [pack["tokens"].tolist() for pack in packed] == [pack["tokens"].tolist() for pack in other]


def test_formatted_and_decoded_datasets_are_read_by_row() -> None:
    dataset = Dataset.from_list(rows_of(5))
    for other in (
        dataset.with_format("numpy"),
        dataset.with_format(columns=["text"]),
        dataset.with_transform(lambda batch: batch),
        dataset.select_columns(["text"]),
        Dataset.from_list(
            [{"tokens": [1], "image": [[1.0]]}],
            features=Features({"tokens": [Value("int32")], "image": Array2D((1, 1), "float32")}),
        ),
    ):
        source = as_source(other)
        assert isinstance(source, MapSource)
        assert source.dataset is other


def test_int32_ids_are_views_of_the_table() -> None:
    features = Features({"tokens": [Value("int32")], "labels": [Value("int32")]})
    dataset = Dataset.from_dict({"tokens": [[1, 2], [3]], "labels": [[1, 2], [3]]}, features=features)
    table = dataset.data.column("tokens").chunk(0).values.to_numpy()
    assert np.shares_memory(ArrowDataset(dataset)[1].stored("tokens"), table)
