"""The journal: whole lines survive a kill, a file appears only when it is complete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from streampack.scoring.journal import open_journal

SETTINGS = {"model": "a", "overlong": "error"}


def write(out: Path, rows: list[dict[str, Any]], *, finish: bool = True) -> int:
    with open_journal(out, settings=SETTINGS) as journal:
        for row in rows:
            journal.write(row)
        if finish:
            journal.finish()
        return journal.kept


@pytest.mark.parametrize("torn", [b"", b'{"n": 2', b'{"n": 2}'])
def test_a_job_goes_on_behind_the_last_whole_line(tmp_path: Path, torn: bytes) -> None:
    out = tmp_path / "scores.jsonl"
    assert write(out, [{"n": 0}, {"n": 1}], finish=False) == 0
    with (tmp_path / "scores.jsonl.unfinished" / "rows.jsonl").open("ab") as file:
        file.write(torn)
    assert not out.exists()
    with open_journal(out, settings=SETTINGS) as journal:
        assert [row["n"] for row in journal.rows()] == [0, 1]
    assert write(out, [{"n": 2, "text": "größer\n"}]) == 2
    assert [json.loads(line) for line in out.read_text().splitlines()][1:] == [
        {"n": 1},
        {"n": 2, "text": "größer\n"},
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["scores.jsonl"]


def test_parquet(tmp_path: Path) -> None:
    out = tmp_path / "scores.parquet"
    write(
        out,
        [{"a": np.array([1.5, 2.0]), "b": np.int64(3), "c": "x"}, {"a": [], "b": 4, "c": "y" * 9_000_000}],
    )
    table = pq.read_table(out)
    assert table.column("a").to_pylist() == [[1.5, 2.0], []]
    assert table.column("b").to_pylist() == [3, 4]
    assert [path.name for path in tmp_path.iterdir()] == ["scores.parquet"]


def test_an_empty_job_writes_an_empty_file(tmp_path: Path) -> None:
    for name in ("scores.jsonl", "scores.parquet"):
        write(tmp_path / name, [])
    assert (tmp_path / "scores.jsonl").read_text() == ""
    assert pq.read_table(tmp_path / "scores.parquet").num_rows == 0


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ends in '.csv'; name a file that ends in .jsonl or .parquet"):
        write(tmp_path / "scores.csv", [])
    out = tmp_path / "scores.jsonl"
    write(out, [])
    with pytest.raises(ValueError, match="exists; name another file, or remove it"):
        write(out, [])
    other = tmp_path / "other.jsonl"
    write(other, [{"n": 0}], finish=False)
    with (
        pytest.raises(ValueError, match=r"a job with model=a, and this has model=b; go on with"),
        open_journal(other, settings=SETTINGS | {"model": "b"}),
    ):
        pass
    with pytest.raises(
        ValueError, match=r"a bytes: the result keeps the row's columns, .* \(--without-rows\)"
    ):
        write(other, [{"n": b"1"}])
    assert write(other, [{"n": 1}]) == 1
    assert other.read_text().count("\n") == 2
