"""Rows of Python objects: what a user's data is taken for, rows by number, iterables, columns, own sources."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data import IterableDataset as TorchIterable

from streampack import (
    IterablePackedDataset,
    IterableSource,
    JSONLSource,
    MapSource,
    Mix,
    PackedDataLoader,
    PackedDataset,
    Source,
    TextEncoder,
)
from streampack.sources import Reading, as_source
from streampack.tokenize import tokenize
from tests.harness.corpus import numbered, read_all


@pytest.mark.parametrize("as_array", [False, True])
def test_what_a_hugging_face_tokenizer_returns_is_a_corpus(as_array: bool) -> None:
    """A batch of a tokenizer is rows by columns; rows of its kind are rows. Padding in it is refused, not packed."""
    transformers = pytest.importorskip("transformers")
    ids = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    columns: Any = {"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]}
    batch = transformers.BatchEncoding(columns)
    if as_array:
        batch = [transformers.BatchEncoding({"input_ids": np.array(row)}) for row in ids]
    packs = IterablePackedDataset(batch, max_seq_len=5, num_lanes=1)
    assert [pack["tokens"].tolist() for pack in packs] == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 0]]
    padded = {
        "input_ids": np.array([[1, 2, 0], [4, 5, 6]]),
        "attention_mask": np.array([[1, 1, 0], [1, 1, 1]]),
    }
    with pytest.raises(ValueError, match="tokenize without padding"):
        list(IterablePackedDataset(transformers.BatchEncoding(padded), max_seq_len=5))


ROWS = [{"input_ids": [5, 6]}]


def stream(source: Any = ROWS, **settings: Any) -> IterablePackedDataset:
    return IterablePackedDataset(source, max_seq_len=8, **settings)


def mix(source: Any, **more: Any) -> Mix:
    return Mix([{"name": "a", "source": source, "weight": 1, **more}])


def table() -> Any:
    return pytest.importorskip("pyarrow").table({"input_ids": [[1]]})


TWICE = "gives packs, not rows; give the dataset that was packed, or leave packing to one of the two"
ONCE = "can be read only once.*pass a function that makes it"
REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a number": (lambda _: as_source(3), "a int holds no rows; give a source, a path"),
    "nothing": (lambda _: as_source(None), "a NoneType holds no rows; give a source, a path"),
    "no rows": (lambda _: MapSource([]), r"the dataset \(list\) is empty; it must have at least one row"),
    "unequal columns": (
        lambda _: as_source({"input_ids": IDS, "labels": IDS[:2]}),
        "the columns must be of one length, .* 'input_ids': 3, 'labels': 2",
    ),
    "datasets by name": (
        lambda _: as_source({"train": "a.jsonl", "test": "b.jsonl"}),
        "a dict of 'train', 'test' holds no columns of rows; .* make a Mix",
    ),
    "a table": (lambda _: as_source(table()), r"give datasets.Dataset\(table\), or of polars"),
    "a generator": (lambda _: IterableSource(row for row in ROWS), ONCE),
    "a map": (lambda _: as_source(map(dict, ROWS)), ONCE),
    "packs": (lambda _: stream(stream()), f"IterablePackedDataset {TWICE}"),
    "a loader": (lambda _: stream(PackedDataLoader(stream())), f"PackedDataLoader {TWICE}"),
    "packs in a mixture": (lambda _: mix(stream()), f"IterablePackedDataset {TWICE}"),
    "a class": (
        lambda _: stream(JSONLSource),
        r"the source is the class JSONLSource; make one of it: JSONLSource\(path\)",
    ),
    "a class of an encoder": (
        lambda _: stream(encoder=TextEncoder),
        r"is the class TextEncoder; give an encoder, such as TextEncoder\(tokenizer\)",
    ),
    "to be tokenized": (
        lambda out: tokenize(ROWS, out=out, encoder=TextEncoder),
        "is the class TextEncoder; give an encoder",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_holds_no_rows_is_refused_at_construction(tmp_path: Path, case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        make(tmp_path / "out")


IDS = [[1, 2, 3], [4, 5], [6]]


def tokens_of(data: Any) -> list[list[int]]:
    return [pack["tokens"].tolist() for pack in IterablePackedDataset(data, max_seq_len=6)]


def test_a_dict_of_columns() -> None:
    labels = [[-100, 2, 3], [4, 5], [6]]
    for columns in ({"input_ids": IDS}, {"tokens": [np.array(ids) for ids in IDS], "labels": labels}):
        assert tokens_of(columns) == [[1, 2, 3, 4, 5, 6]]
        assert PackedDataset(columns, max_seq_len=6)[0]["tokens"].tolist() == [1, 2, 3, 4, 5, 6]
    assert tokens_of({"input_ids": np.arange(6).reshape(2, 3)}) == [[0, 1, 2, 3, 4, 5]]


def test_a_pandas_frame() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"input_ids": IDS, "weight": [0.5, 1, 2], "n": [1, 2, 3]})
    assert tokens_of(frame[frame["weight"] < 2]) == [[1, 2, 3, 4, 5, 0]]
    assert PackedDataset(frame, max_seq_len=6)[0]["tokens"].tolist() == [1, 2, 3, 4, 5, 6]
    source = as_source(frame)
    assert isinstance(source, MapSource)
    assert source.fetch_many([(1,)])[0] == {"input_ids": [4, 5], "weight": 1.0, "n": 2}


def test_a_dict_of_rows_by_number_is_not_read_as_columns() -> None:
    rows = {i: {"input_ids": ids} for i, ids in enumerate(IDS)}
    assert tokens_of(rows) == [[1, 2, 3, 4, 5, 6]]


@pytest.mark.parametrize("rows", [numbered(10), lambda: iter(numbered(10)), lambda: numbered(10)])
def test_iterables_and_functions_of_iterables(rows: Any) -> None:
    source = IterableSource(rows)
    assert read_all(source) == numbered(10)
    assert read_all(source) == numbered(10), "and once more"


def test_an_iterable_may_change_the_rows_of_a_window() -> None:
    def rows() -> Iterator[dict[str, Any]]:
        message = {"content": -1}
        row = {"messages": [message]}
        for i in range(20):
            message["content"] = i
            yield row

    found = list(IterableSource(rows).read(Reading(shuffle_window=4)))
    assert sorted(row.data["messages"][0]["content"] for row in found) == list(range(20))


def test_a_resume_within_a_window_that_has_other_records_now_is_refused() -> None:
    rows = [{"i": i} for i in range(20)]
    source = IterableSource(lambda: iter(rows))
    next(reader := source.read(Reading(shuffle_window=8)))
    del rows[5:]
    with pytest.raises(ValueError, match="lane 0: other records are read than when the state was made"):
        next(source.read(Reading(shuffle_window=8, start=reader.cursor)))


@pytest.mark.parametrize(("window", "lane"), [(0, 0), (4, 1)])
def test_a_generator_that_raises_midway(window: int, lane: int) -> None:
    """A generator that raised is finished, which is not the end of the data: a new reader goes on at the cursor."""
    broken = [True]

    def rows() -> Iterator[dict[str, Any]]:
        for row in numbered(20):
            if row["i"] == 11 and broken[0]:
                raise OSError("gone")
            yield row

    source = IterableSource(rows)
    reading = partial(Reading, lane, num_lanes=2, shuffle_window=window)
    reader = source.read(reading())
    found = []
    for _ in range(3):
        with pytest.raises(OSError, match="gone"):
            found.extend(row.data["i"] for row in reader)
        reader = source.read(reading(start=reader.cursor))
    broken[0] = False
    found += [row.data["i"] for row in reader]
    assert sorted(found) == list(range(lane, 20, 2))


class SharesOut(TorchIterable[dict[str, Any]]):
    """A dataset that shares out its rows among torch's workers."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        start, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        yield from [{"input_ids": [1 + i] * 5} for i in range(40)][start::step]


@pytest.mark.parametrize("wrap", [IterableSource, mix])
def test_an_iterable_that_shares_out_its_rows_loses_none(wrap: Any) -> None:
    data = IterablePackedDataset(wrap(SharesOut()), max_seq_len=8)
    with pytest.raises(ValueError, match="2 worker processes would take turns with the rows of an iterable"):
        list(DataLoader(data, batch_size=None, num_workers=2))
    for read in (
        DataLoader(IterablePackedDataset(wrap(SharesOut()), max_seq_len=8), batch_size=None, num_workers=1),
        PackedDataLoader(IterablePackedDataset(wrap(SharesOut()), max_seq_len=8), num_workers=2),
    ):
        found = [int(batch["tokens"][0] if isinstance(batch, dict) else batch.tokens[0, 0]) for batch in read]
        assert sorted(found) == list(range(1, 41))


class Squares(Source):
    def __init__(self, count: int, *, broken: int | None = None) -> None:
        self.count = count
        self.broken = broken

    def identity(self) -> dict[str, Any]:
        return {"squares below": self.count}

    def rows(self, start: int, step: int) -> Iterator[dict[str, Any]]:
        for n in range(start, self.count, step):
            if n == self.broken:
                raise ValueError(f"{n} is broken")
            yield {"input_ids": [n % 1000] * (n % 7 + 1)}


def test_an_error_names_the_row_and_is_raised_again() -> None:
    data = IterablePackedDataset(Squares(9, broken=5), max_seq_len=64, num_lanes=1)
    for _ in range(2):
        with pytest.raises(ValueError, match="5 is broken") as error:
            next(iter(data))
        assert "while reading row 5" in error.value.__notes__[0]


def test_a_resume_reads_the_rows_that_wait_in_one_pass() -> None:
    class Slow(Squares):
        """A source that comes to a row by the rows before it, as a stream does."""

        passes = yielded = 0

        def rows(self, start: int, step: int) -> Iterator[dict[str, Any]]:
            self.passes += 1
            for n, row in enumerate(super().rows(0, 1)):
                self.yielded += 1
                if n >= start and not (n - start) % step:
                    yield row

    def make(source: Source) -> IterablePackedDataset:
        return IterablePackedDataset(source, max_seq_len=512, num_lanes=1, buffer_size=400)

    first = make(Slow(3000))
    packs = iter(first)
    for _ in range(9):
        next(packs)
    state, rest = first.state_dict(), [pack["tokens"].tolist() for pack in packs]
    source = Slow(3000)
    [expected] = source.fetch_many([(0, 7)])
    assert source.fetch_many([(0, 7), (0, 2), (0, 7)]) == [expected, *source.fetch_many([(0, 2)]), expected]
    assert source.fetch_many([]) == []
    with pytest.raises(ValueError, match="the rows end before row 3000; the data changed"):
        source.fetch_many([(0, 5), (0, 3000)])
    source = Slow(3000)
    second = make(source)
    second.load_state_dict(state)
    assert [pack["tokens"].tolist() for pack in second] == rest
    assert source.passes == 2, "for the rows that wait, and from the cursor on"
    assert source.yielded < 1.5 * 3000


def test_a_source_without_rows_or_read_is_an_error() -> None:
    class Empty(Source):
        def identity(self) -> dict[str, Any]:
            return {}

    with pytest.raises(NotImplementedError, match="Empty needs either rows, or read, locate and fetch_many"):
        next(iter(IterablePackedDataset(Empty(), max_seq_len=8, num_lanes=1)))
