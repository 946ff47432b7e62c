"""A corpus that grew: only its new files are tokenized, into further shards, and what is there stays as it is."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streampack import JSONLSource, ParquetSource, TextEncoder, TokenShardSource
from streampack.sources import Holdout, Reading
from tests.harness.stores import running
from tests.harness.tokenizing import (
    PROBED,
    Dies,
    Killed,
    Letters,
    Logged,
    content,
    into,
    run,
)


def write_numbered(path: Path, first: int, count: int) -> None:
    """Write a file of numbered rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"text": f"{i} " * (1 + i % 7)}) for i in range(first, first + count)]
    path.write_text("\n".join(lines) + "\n")


def add(folder: Path, number: int) -> JSONLSource:
    """Add a file of 40 rows to a folder; return the source of all."""
    write_numbered(folder / f"{'bac'[number]}.jsonl", 100 * number, 40)  # the second comes before the first
    return JSONLSource(str(folder / "*.jsonl"))


def rows(*folders: Path | str, **options: Any) -> list[int]:
    """Return the numbers of the rows of token shards, sorted."""
    found = TokenShardSource(folders if len(folders) > 1 else folders[0], **options).read(Reading())
    return sorted(int(bytes(row.data["tokens"][1:-1].tolist()).split()[0]) for row in found)


def numbered(*files: int) -> list[int]:
    return [100 * number + i for number in files for i in range(40)]


def small(source: Any, out: Any, **options: Any) -> Any:
    return run(source, out, **{"lanes": 2, "shard_tokens": 200, **options})


@pytest.fixture
def grown(tmp_path: Path) -> dict[str, bytes]:
    """The files of a folder that was made of one file, and then of two more, one after the other."""
    for number in range(3):
        out = small(add(tmp_path / "expected", number), tmp_path / "grown")
    return content(out)


def test_only_added_files_are_tokenized(tmp_path: Path) -> None:
    folder, out, log = tmp_path / "corpus", tmp_path / "out", tmp_path / "log"
    before: dict[str, bytes] = {}
    for number in range(3):
        source = add(folder, number)
        log.write_text("")
        small(source, out, encoder=Logged(log), lanes=2 + number)
        assert len(log.read_text().splitlines()) == 40 + (number + 1) * PROBED, (
            "and the rows that tell the encoder"
        )
        now = content(out)
        assert {name: now[name] for name in before if name != "index.json"}.items() <= before.items()
        assert [path.read_bytes() for path in sorted(out.glob("tokens-00000-*"))]
        assert rows(out) == numbered(*range(number + 1))
        before = now
        assert content(small(source, out, lanes=2 + number)) == now, "nothing is new"
    index = json.loads(before["index.json"])
    assert [plan["lanes"] for plan in index["generations"]] == [2, 3, 4]
    names = [shard["name"] for shard in index["shards"]]
    assert names == sorted(names), "in the order of the generations"
    assert {name.split("-")[1] for name in names} == {f"{lane:05d}" for lane in range(9)}


@pytest.mark.parametrize("after", [1, 10, 30, 55, 70, 110])
def test_files_are_added_while_a_call_is_not_done(
    tmp_path: Path, after: int, grown: dict[str, bytes]
) -> None:
    """It is stopped, perhaps before its first shard; then the next call ends what it began before it adds more."""
    folder, out = tmp_path / "corpus", tmp_path / "out"
    for number in (1, 2):
        source = add(folder, number - 1)
        try:
            small(source, out, encoder=Dies(after + (number - 1) * PROBED))
        except Killed:
            small(source, out, shard=(0, 2))  # one of two lanes, so that the generation is begun
            assert len(list(out.glob("generation-*"))) == number
            break
    for number in (1, 2):
        small(add(folder, number), out)
    assert content(out) == grown


def test_parts_of_the_work_and_a_store(tmp_path: Path, grown: dict[str, bytes]) -> None:
    folder = tmp_path / "corpus"
    with running("versioned", tmp_path) as store:
        place = f"{store.url}/tokens"
        for number in range(3):
            source = add(folder, number)
            for part in (1, 0):
                small(source, tmp_path / "out", shard=(part, 2))
                into(store, source, place, lanes=2, shard_tokens=200, shard=(part, 2))
            small(source, tmp_path / "out", finish=True)
            found = into(store, source, place, lanes=2, shard_tokens=200, finish=True)
            assert rows(place, storage_options=store.options) == numbered(*range(number + 1))
    assert found == content(tmp_path / "out") == grown


def test_parts_that_find_different_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Files come while parts are written: what one part saw and the other did not is missing, and is said to be."""
    folder, out = tmp_path / "corpus", tmp_path / "out"
    small(add(folder, 0), out, shard=(0, 2))
    source = add(folder, 1)
    small(source, out, shard=(1, 2))
    with pytest.raises(ValueError, match=r"2 lanes|1 of 2 lanes are missing or end early \(2\)"):
        small(source, out, finish=True)
    small(source, out, shard=(0, 2))
    source = add(folder, 2)
    with caplog.at_level(logging.WARNING):
        small(source, out, finish=True)
    assert "1 file(s) that were added are in no shard, such as c.jsonl; tokenize them" in caplog.text
    assert rows(out) == numbered(0, 1)
    assert rows(small(source, out)) == numbered(0, 1, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.unlink(), r"1 removed \(b.jsonl\)"),
        (lambda path: write_numbered(path, 7, 41), r"1 changed \(b.jsonl\)"),
        (lambda path: path.rename(path.with_name("z.jsonl")), r"1 removed \(b.jsonl\)"),
    ],
)
def test_a_file_that_is_gone_or_has_changed_is_an_error(tmp_path: Path, change: Any, message: str) -> None:
    out = small(add(tmp_path / "corpus", 0), tmp_path / "out")
    before = content(out)
    source = add(tmp_path / "corpus", 1)
    change(tmp_path / "corpus" / "b.jsonl")
    source = JSONLSource(tmp_path / "corpus")
    for options in ({}, {"shard": (0, 2)}, {"finish": True}):
        with pytest.raises(
            ValueError, match=f"out holds tokens of files that are not as they were: {message}. Rest"
        ):
            small(source, out, **options)
    assert content(out) == before
    assert rows(out, small(JSONLSource(tmp_path / "corpus" / "a.jsonl"), tmp_path / "more")) == numbered(0, 1)


def test_another_encoder_or_type_for_added_files_is_an_error(tmp_path: Path) -> None:
    class Other(Letters):
        def encode(self, text: str, *, add_bos: bool, add_eos: bool) -> list[int]:
            return super().encode(text.upper() + "!", add_bos=add_bos, add_eos=add_eos)

    out = small(add(tmp_path / "corpus", 0), tmp_path / "out")
    before, source = content(out), add(tmp_path / "corpus", 1)
    for options in ({"encoder": TextEncoder(Other())}, {"dtype": "uint32"}):
        with pytest.raises(
            ValueError, match=r"generation-000.json.gz was made with (encoder\.samples|dtype='uint16')"
        ):
            small(source, out, **options)
    assert content(out) == before
    (out / "generation-000.json.gz").write_bytes(b"{}")
    with pytest.raises(ValueError, match=r"generation-000.json.gz is damaged \(.*\); restore it from a copy"):
        small(source, out)


def test_parquet_and_a_holdout(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    parts = {part: tmp_path / part for part in ("train", "validation")}
    for number in range(2):
        table = pa.table({"text": [f"{i} " for i in numbered(number)], "other": numbered(number)})
        pq.write_table(table, folder / f"{'ba'[number]}.parquet", row_group_size=10)
        for part, out in parts.items():
            small(Holdout(ParquetSource(folder, columns=["text"]), fraction=0.3, part=part), out)
    train, validation = map(rows, parts.values())
    assert sorted(train + validation) == numbered(0, 1)
    assert 10 < len(validation) < 40
    assert min(len(set(validation) & set(numbered(number))) for number in range(2)) > 3
    with pytest.raises(ValueError, match="was made with corpus="):
        small(Holdout(ParquetSource(folder), fraction=0.3, part="train"), tmp_path / "train")
