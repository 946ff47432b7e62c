"""Rows that are encoded together: packs, states, ledgers and bad records are those of rows encoded one by one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streampack import Encoder, IterablePackedDataset, MapSource, Mix, Sample
from streampack.lanes import window_reader
from streampack.sources import IterableSource, JSONLSource
from tests.harness.conformance import check_resume_everywhere, content


class Letters(Encoder):
    """One token a letter. Batches are recorded."""

    def __init__(self, batch_rows: int, *, fails: bool = False) -> None:
        self.batch_rows, self.fails, self.batches = batch_rows, fails, list[int]()

    def __call__(self, row: Mapping[str, Any], /) -> Sample:
        if "#" in row["text"]:
            raise ValueError("it has a #")
        ids = np.array([ord(letter) for letter in row["text"]], np.int32)
        return Sample(ids, ids)

    def encode_many(self, rows: Sequence[Mapping[str, Any]], /) -> list[Sample | Exception]:
        self.batches.append(len(rows))
        if self.fails:
            raise RuntimeError("the batch call is broken")
        return super().encode_many(rows)

    def characters(self, row: Mapping[str, Any], /) -> int:
        return len(row["text"])

    def fingerprint(self) -> str:
        return "letters"


def texts(first: int, count: int) -> list[dict[str, Any]]:
    """Texts of uneven lengths; some cannot be encoded, one is too long, and some have no text."""
    rows: list[dict[str, Any]] = [
        {"text": f"{number}." * (1 + number * 7 % 9)} for number in range(first, first + count)
    ]
    rows[3]["text"] = "a#"
    rows[5] = {"other": 1}
    rows[count // 2]["text"] = "long " * 300
    rows[-1]["text"] = ""
    return rows


def write(folder: Path, name: str, rows: Sequence[Mapping[str, Any]]) -> Path:
    path = folder / f"{name}.jsonl"
    lines = [json.dumps(row) for row in rows]
    lines[7] = "{broken"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def sources(folder: Path) -> dict[str, Any]:
    a, b = (write(folder, name, texts(1000 * i, 60)) for i, name in enumerate("ab"))
    entries = [("a", JSONLSource(a), 1.0), ("b", JSONLSource(b), 2.5), ("c", MapSource(texts(5000, 30)), 1.0)]
    mix = [{"name": name, "source": source, "weight": weight} for name, source, weight in entries]
    return {
        "files": JSONLSource([a, b]),
        "rows": MapSource(texts(0, 90)),
        "mixture": Mix(mix, stop="all_exhausted"),
    }


def run(
    source: Any, encoder: Letters, **settings: Any
) -> tuple[list[Any], list[str], dict[str, Any], dict[str, Any]]:
    data = IterablePackedDataset(source, encoder=encoder, max_seq_len=40, **{"num_lanes": 2} | settings)
    packs, states = [], []
    for pack in data:
        packs.append(content(pack))
        states.append(json.dumps(data.state_dict(), sort_keys=True))
    return packs, states, data.ledger().as_dict(), data.source_stats()


@pytest.mark.parametrize("kind", ["files", "rows", "mixture"])
@pytest.mark.parametrize(
    "settings",
    [
        {"overlong": "split", "max_document_tokens": 50},
        {"split_across_pack": True, "shuffle": 11, "epochs": 2},
        {"overlong": "drop", "shuffle": True, "balance_window": 4},
    ],
)
def test_all_is_as_with_one_row_at_a_time(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    source = sources(tmp_path)[kind]
    alone, together = Letters(1), Letters(8)
    found = [
        run(source, encoder, skip_bad=tmp_path / f"bad{encoder.batch_rows}", **settings)
        for encoder in (alone, together)
    ]
    assert found[0] == found[1]
    assert alone.batches == []
    assert max(together.batches) == 8
    listed = [
        [path.read_text() for path in sorted((tmp_path / f"bad{n}").glob("lane-*.jsonl"))] for n in (1, 8)
    ]
    assert listed[0] == listed[1] != []


@pytest.mark.parametrize("kind", ["files", "mixture"])
def test_a_resume_at_every_pack_is_exact(tmp_path: Path, kind: str) -> None:
    def make() -> IterablePackedDataset:
        return IterablePackedDataset(
            sources(tmp_path)[kind],
            encoder=Letters(8),
            max_seq_len=40,
            num_lanes=2,
            overlong="split",
            shuffle=9,
            skip_bad=True,
        )

    assert len(check_resume_everywhere(make, packs=12)) >= 12


@pytest.mark.parametrize(("row", "message"), [(2, "it has a #"), (4, "'text'")])
def test_an_error_comes_at_its_row(tmp_path: Path, row: int, message: str) -> None:
    """The rows before it are packed, although the batch holds it."""
    rows: list[dict[str, Any]] = [{"text": "abcd"} for _ in range(9)]
    rows[row] = {"text": "#"} if row == 2 else {}
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    data = IterablePackedDataset(JSONLSource(path), encoder=Letters(8), max_seq_len=4, num_lanes=1)
    packs = []
    with pytest.raises((ValueError, KeyError), match=message) as raised:
        packs += data
    assert f"rows.jsonl:{row + 1}" in f"{raised.value}{getattr(raised.value, '__notes__', '')}"
    packs = []
    data.set_epoch(0)
    with pytest.raises((ValueError, KeyError)):
        for pack in data:
            packs.append(pack)
    assert len(packs) == row


def test_windows_end_with_a_large_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_reader, "MOST_CHARACTERS", 100)
    path = tmp_path / "rows.jsonl"
    sizes = [30, 30, 30, 30, 200, 30, 150, 30]
    path.write_text("".join(json.dumps({"text": "x" * size}) + "\n" for size in sizes))
    encoder = Letters(64)
    run(JSONLSource(path), encoder, overlong="split", num_lanes=1)
    assert encoder.batches == [4, 1, 2, 1]


def test_a_batch_that_fails_is_encoded_row_by_row(tmp_path: Path) -> None:
    source, settings = sources(tmp_path)["files"], {"overlong": "split", "skip_bad": True}
    assert run(source, Letters(8, fails=True), **settings) == run(source, Letters(1), **settings)


def test_a_batch_must_have_a_sample_for_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Letters, "encode_many", lambda self, rows: Encoder.encode_many(self, rows)[1:])
    message = "Letters.encode_many returned 7 samples for 8 rows; return one for each row, or its exception"
    with pytest.raises(ValueError, match=message):
        run(MapSource([{"text": "abc"}] * 20), Letters(8), num_lanes=1)


def test_rows_of_an_iterable_are_encoded_one_by_one() -> None:
    encoder = Letters(8)
    run(IterableSource([{"text": "abc"}] * 20), encoder)
    assert encoder.batches == []


class Reused:
    """A map-style dataset that fills one dict again for each row."""

    def __init__(self) -> None:
        self.row = {"text": ""}

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, str]:
        self.row["text"] = chr(ord("a") + index)
        return self.row


class OneArray(Encoder):
    """Fills one array again for each row, and leaves batches to `Encoder`."""

    batch_rows = 8

    def __init__(self) -> None:
        self.ids = np.zeros(1, np.int32)

    def __call__(self, row: Mapping[str, Any], /) -> Sample:
        self.ids[:] = ord(row["text"])
        return Sample(self.ids, self.ids)

    def fingerprint(self) -> str:
        return "one array"


@pytest.mark.parametrize(
    ("rows", "encoder"),
    [(Reused(), Letters(8)), ([{"text": each} for each in "abcdefghijklmnopqrst"], OneArray())],
)
def test_memory_may_be_used_again(rows: Any, encoder: Encoder) -> None:
    data = IterablePackedDataset(rows, encoder=encoder, max_seq_len=5, num_lanes=1)
    tokens = [token for pack in data for token in pack["tokens"].tolist()]
    assert tokens == list(map(ord, "abcdefghijklmnopqrst"))
