"""Paths as users write them: folders, ``~``, and files in formats that are not ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from streampack import IterablePackedDataset, JSONLSource, ParquetSource, TokenShardSource
from streampack.sources import Reading
from streampack.sources.as_source import as_source
from streampack.tokenize.tokenize import tokenize

ROWS = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}, {"input_ids": [6]}]


def lines(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tokens_of(source: Any) -> list[list[int]]:
    return [pack["tokens"].tolist() for pack in IterablePackedDataset(source, max_seq_len=6)]


def test_a_folder_of_json_lines(tmp_path: Path) -> None:
    lines(tmp_path / "en" / "a.jsonl", ROWS[:1])
    lines(tmp_path / "b.ndjson", ROWS[1:])
    lines(tmp_path / ".cache" / "c.jsonl", ROWS)
    (tmp_path / "README.md").write_text("not data")
    assert [file.name for file in JSONLSource(tmp_path).files] == ["b.ndjson", "en/a.jsonl"]
    for source in (tmp_path, str(tmp_path), JSONLSource([tmp_path])):
        assert tokens_of(source) == [[4, 5, 6, 1, 2, 3]]


def test_an_empty_path_is_not_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(lines(tmp_path / "a.jsonl", ROWS).parent)
    with pytest.raises(ValueError, match="no file matches ''"):
        as_source("")
    assert tokens_of(".") == [[1, 2, 3, 4, 5, 6]]


def test_a_folder_of_parquet_and_one_of_both(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    (tmp_path / "data").mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "data" / "a.parquet")
    assert isinstance(as_source(tmp_path), ParquetSource)
    assert tokens_of(tmp_path) == [[1, 2, 3, 4, 5, 6]]
    lines(tmp_path / "b.jsonl", ROWS)
    with pytest.raises(
        ValueError, match=r"holds Parquet and JSON lines; name those to read, such as .*/\*.parquet"
    ):
        as_source(tmp_path)


def test_a_folder_of_token_shards(tmp_path: Path) -> None:
    tokenize(ROWS, out=tmp_path, progress=False)
    assert isinstance(as_source(tmp_path), TokenShardSource)
    assert tokens_of(tmp_path) == [[1, 2, 3, 4, 5, 6]]


def test_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    lines(tmp_path / "data" / "a.jsonl", ROWS)
    tokenize(ROWS, out=tmp_path / "shards", progress=False)
    (tmp_path / "names.txt").write_text("data/a.jsonl\n")
    for source in (
        "~/data/a.jsonl", "~/data/*.jsonl", "~/data", "~/shards", JSONLSource(manifest="~/names.txt"),
        TokenShardSource("~/shards"),
    ):  # fmt: skip
        assert tokens_of(source) == [[1, 2, 3, 4, 5, 6]], source


@pytest.mark.parametrize("indent", [None, 1])
def test_a_json_array_is_refused_with_a_source_that_reads_it(tmp_path: Path, indent: int | None) -> None:
    pytest.importorskip("datasets")
    from streampack import HFSource

    path = tmp_path / "rows.json"
    path.write_text(json.dumps(ROWS, indent=indent))
    with pytest.raises(ValueError) as error:
        as_source(path)
    assert str(error.value).startswith(f"{path}: it is one JSON array and no lines; let datasets read it: ")
    way_out = str(error.value).split("read it: ")[1]
    assert tokens_of(eval(way_out, {"HFSource": HFSource})) == [[1, 2, 3, 4, 5, 6]]
    lines(tmp_path / "lines.json", ROWS)  # the ending does not say that it is none
    assert tokens_of(tmp_path / "lines.json") == [[1, 2, 3, 4, 5, 6]]


def test_a_json_document_with_another_ending_is_a_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROWS[0], indent=1))
    with pytest.raises(
        ValueError, match=r"rows.jsonl:1: not a line of JSON .*; if the file is one JSON document, let"
    ):
        tokens_of(path)


@pytest.mark.parametrize(("ending", "separator"), [("csv", ","), ("tsv", "\t")])
def test_formats_that_datasets_reads(tmp_path: Path, ending: str, separator: str) -> None:
    datasets = pytest.importorskip("datasets")
    from streampack import HFSource

    path = tmp_path / f"rows.{ending}"
    path.write_text(f"text{separator}n\nred dog{separator}1\n")
    with pytest.raises(ValueError) as error:
        as_source(str(path))
    start, _, way_out = str(error.value).partition("read it: ")
    assert start == f"{path}: it is no file of JSON lines; let datasets "
    source = eval(way_out, {"HFSource": HFSource, "datasets": datasets})
    assert [row.data for row in source.read(Reading())] == [{"text": "red dog", "n": 1}]
