"""What a state, or another rank, was made with: known by content, and refused by the name of what differs."""

from __future__ import annotations

import functools
import itertools
import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streampack import (
    Holdout,
    IterablePackedDataset,
    IterableSource,
    JSONLSource,
    MapSource,
    MDSSource,
    Mix,
    Sample,
)
from streampack.sources import Reading, Source
from tests.harness.corpus import Numbers, rows, write
from tests.harness.files import write_mds

ENDING = "; resume with what the run began with, or start a new run"


def dataset(source: Any, encoder: Any = None, **settings: Any) -> IterablePackedDataset:
    settings = {"max_seq_len": 24, "num_lanes": 2, **settings}
    return IterablePackedDataset(source, encoder=encoder or Numbers(), **settings)


def refusal(before: IterablePackedDataset, after: IterablePackedDataset) -> str | None:
    """What a state of one is refused with by the other."""
    state = pickle.loads(pickle.dumps(before.state_dict()))
    try:
        after.load_state_dict(state)
    except ValueError as error:
        assert str(error).endswith(ENDING)
        return str(error).removesuffix(ENDING)
    return None


# Encoders.


def shifted(k: int) -> Callable[[Mapping[str, Any]], Sample]:
    def encode(row: Mapping[str, Any]) -> Sample:
        return Sample(*[np.arange(row["n"]) + row["i"] + k] * 2)

    return encode


def renamed(row: Mapping[str, Any]) -> Sample:
    return shifted(0)(row)


def by_keyword(row: Mapping[str, Any], *, k: int) -> Sample:
    return shifted(k)(row)


class Method:
    def __init__(self, k: int) -> None:
        self.k = k

    def encode(self, row: Mapping[str, Any]) -> Sample:
        return shifted(self.k)(row)


KINDS: dict[str, Callable[[int], Any]] = {
    "closure": shifted,
    "partial": lambda k: functools.partial(by_keyword, k=k),
    "method": lambda k: Method(k).encode,
    "lambda": lambda k: lambda row: shifted(k)(row),
}


def sources(folder: Path) -> dict[str, Any]:
    data = rows(100)
    plain_file, packed = (write(folder / f"a.jsonl{suffix}", data) for suffix in ("", ".gz"))
    return {
        "map": lambda: MapSource(data),
        "iterable": lambda: IterableSource(data),
        "jsonl": lambda: JSONLSource(plain_file),
        "gz": lambda: JSONLSource(packed),
        "mds": lambda: MDSSource(write_mds(folder / "mds", data, {"i": "int", "n": "int"})),
        "holdout": lambda: Holdout(MapSource(data), fraction=0.2, part="train"),
        "bare": lambda: Bare(data),
    }


class Bare(Source):
    """A user's source, with the methods that must be there and no others."""

    def __init__(self, data: list[Any]) -> None:
        self.data = data

    def identity(self) -> dict[str, Any]:
        return {"rows": len(self.data)}

    def rows(self, start: int, step: int) -> Iterator[Any]:
        return iter(self.data[start::step])


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        *((kind, "map") for kind in KINDS),
        *(("closure", source) for source in ("iterable", "jsonl", "gz", "mds", "holdout", "bare")),
    ],
)
def test_encoders_are_compared_by_their_output(kind: str, source: str, tmp_path: Path) -> None:
    make, encoder = sources(tmp_path)[source], KINDS[kind]
    lanes = {"num_lanes": 1}
    before = dataset(make(), encoder(0), **lanes)
    words = refusal(before, dataset(make(), encoder(1000), **lanes))
    row = r"encoder\.samples(\.\d+)+='\w{8}'"
    assert re.fullmatch(f"the state was made with {row} and this dataset has {row}", words or ""), words
    assert refusal(before, dataset(make(), encoder(0), **lanes)) is None
    assert refusal(before, dataset(make(), renamed, **lanes)) is None, "a name decides nothing"


def test_an_encoders_own_fingerprint_is_compared_too() -> None:
    assert refusal(dataset(rows(9)), dataset(rows(9), Numbers("letters"))) == (
        "the state was made with encoder.fingerprint='numbers' and this dataset has encoder.fingerprint='letters'"
    )


def test_an_encoder_that_makes_random_tokens_warns() -> None:
    rng = np.random.default_rng(0)

    def encode(row: Mapping[str, Any]) -> Sample:
        return Sample(*[rng.integers(0, 9, row["n"])] * 2)

    with pytest.warns(
        UserWarning, match=r"encode makes other tokens of the same row each time \(row \d+\): a resum"
    ):
        state = dataset(rows(50), encode).state_dict()
    with pytest.warns(UserWarning, match="each time"):
        dataset(rows(50), encode).load_state_dict(state)


ELSEWHERE = """
import json
from streampack import Holdout, IterablePackedDataset, MapSource
from streampack.sources import Reading

class Held:
    def __init__(self, i):
        self.words = {"a", "b", "c", f"d{i}"}
        self.rule = lambda text: text

data = [{"i": i, "held": Held(i), "set": {"x", "y", "z"}, "tokens": [1], "labels": [1]} for i in range(300)]
source = Holdout(MapSource(data), fraction=0.3, part="validation")
kept = [row.data["i"] for row in source.read(Reading())]
found = [IterablePackedDataset(source, max_seq_len=8).state_dict()["identity"]["corpus"], kept]
"""


def test_identities_are_equal_in_another_process() -> None:
    """No address and no order of a set gets into them: nor into what decides which rows are held out."""
    run = subprocess.run(
        [sys.executable, "-c", ELSEWHERE + "print(json.dumps(found))"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        env={"PYTHONHASHSEED": "77"},
    )
    here: dict[str, Any] = {"__name__": "__main__"}
    exec(ELSEWHERE, here)
    assert json.loads(run.stdout) == json.loads(json.dumps(here["found"]))
    assert 50 < len(here["found"][1]) < 130


# Rows.


def test_map_style_data_are_compared_by_more_than_ten_rows() -> None:
    data = rows(10_000)
    for number in (0, 9999):
        changed = list(data)
        changed[number] = {**data[number], "n": 20}
        words = refusal(dataset(data), dataset(changed))
        assert words
        assert words.startswith(f"the state was made with corpus.content.{number}=")
    few = rows(11)
    for number in range(11):
        changed = [{**row, "n": 20} if row["i"] == number else row for row in few]
        assert refusal(dataset(few), dataset(changed))


def in_columns(data: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in data] for name in data[0]}


FORMS: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "dicts": lambda data: data,
    "columns": in_columns,
    "a frame": lambda data: pytest.importorskip("pandas").DataFrame(data),
    "arrays": lambda data: [{name: np.array(value) for name, value in row.items()} for row in data],
    "bare lists": lambda data: [row["tokens"] for row in data],
    "pairs": lambda data: [(row["tokens"], row["labels"]) for row in data],
    "a mixture": lambda data: Mix([{"name": "a", "source": data, "weight": 1}]),
    "a hold-out": lambda data: Holdout(MapSource(data), fraction=0.1, part="train"),
}


@pytest.mark.parametrize("form", FORMS)
def test_rows_in_memory_are_compared_by_the_lengths_of_all(form: str) -> None:
    """One other row of 400 was taken for the same data."""

    def packs(lengths: list[int]) -> IterablePackedDataset:
        data = [{"tokens": [i] * n, "labels": [i] * n, "id": i} for i, n in enumerate(lengths)]
        return IterablePackedDataset(FORMS[form](data), max_seq_len=64, encoder=lambda row: [1, 2])

    lengths = [5 + i % 7 for i in range(400)]
    assert refusal(packs(lengths), packs(lengths)) is None
    for number in (1, 17, 200, 398):
        changed = [n + (i == number) for i, n in enumerate(lengths)]
        assert "content" in (refusal(packs(lengths), packs(changed)) or "")


def test_lengths_that_are_not_known_are_equal_to_any() -> None:
    """The same rows may come as a list, or from an object that reads each when it is asked for."""

    class Lazy:
        def __init__(self, data: list[Any]) -> None:
            self.data = data

        def __len__(self) -> int:
            return len(self.data)

        def __getitem__(self, index: int) -> Any:
            return self.data[index]

    data = [{"tokens": [i] * 5, "labels": [i] * 5} for i in range(40)]
    forms = (data, Lazy(data), in_columns(data), FORMS["arrays"](data))
    for first, second in itertools.permutations(forms, 2):
        assert refusal(*(IterablePackedDataset(each, max_seq_len=64) for each in (first, second))) is None


def test_iterables_are_compared_by_their_first_rows() -> None:
    data = rows(40)
    for i in range(12):
        changed = [*data[:i], {**data[i], "n": 20}, *data[i + 1 :]]
        words = refusal(
            dataset(IterableSource(data), num_lanes=1), dataset(IterableSource(changed), num_lanes=1)
        )
        assert words
        assert words.startswith(f"the state was made with corpus.content.0.{i}=")
    short = [dataset(IterableSource(data[:count]), num_lanes=1) for count in (5, 6)]
    words = [refusal(*pair) or "" for pair in (short, reversed(short))]
    assert "made with corpus.content.0.5='end' and " in words[0]
    assert words[1].endswith(" has corpus.content.0.5='end'")


class Handle:
    """Rows of one file handle: iterated again, it goes on where it stood."""

    def __init__(self) -> None:
        self.rows = iter(rows(100))

    def __iter__(self) -> Iterator[Any]:
        yield from self.rows


def test_an_iterable_that_gives_other_rows_each_time_is_refused() -> None:
    message = (
        "Handle gives other rows each time it is iterated, so neither a second epoch nor a resume is possible"
    )
    data = dataset(IterableSource(Handle()), num_lanes=1)
    iterator = iter(data)
    next(iterator)
    with pytest.raises(ValueError, match=re.escape(message)):
        data.state_dict()


# The hold-out.


def held_out_after(columns: list[str] | None, folder: Path, part: str) -> IterablePackedDataset:
    return dataset(Holdout(MDSSource(folder, columns=columns), fraction=0.3, part=part))


@pytest.mark.parametrize("part", ["train", "validation"])
def test_a_holdout_of_other_columns_is_refused(part: str, tmp_path: Path) -> None:
    """Which rows are held out follows from what is read of them: with another selection, held-out rows are trained."""
    data = [{**row, "url": f"u{row['i']}"} for row in rows(92)]
    folder = write_mds(tmp_path, data, {"i": "int", "n": "int", "url": "str"})
    before, after = (held_out_after(columns, folder, part) for columns in (None, ["i", "n"]))
    split = [{row.data["i"] for row in one.lane_config.source.read(Reading())} for one in (before, after)]
    assert split[0] != split[1], "or nothing is shown"
    assert refusal(before, after) == (
        "the state was made with corpus.columns='i, n, url' and this dataset has corpus.columns='i, n'"
    )
    assert refusal(before, held_out_after(["url", "n", "i"], folder, part)) is None, "the same rows"


def test_an_identity_reads_a_few_rows_once(tmp_path: Path) -> None:
    """A few rows of a corpus of many: neither all of it, nor any of them twice."""
    path = write(tmp_path / "a.jsonl", [{"i": i, "n": 3, "text": "x" * 200} for i in range(20_000)])
    source, encoder = JSONLSource(path), Numbers()
    data = dataset(source, encoder)
    for _ in range(5):
        data.state_dict()
    assert source.bytes_read < 40 * 300
    assert encoder.calls == 2 * 12, "each twice, to see whether it makes the same"
