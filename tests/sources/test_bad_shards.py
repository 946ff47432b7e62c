"""Bad shards: of files that are empty, gone, or of another kind or schema, each part is one bad record."""

from __future__ import annotations

import json
import pickle
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from streampack import Holdout, Mix
from streampack.sources import Reading
from streampack.tokenize import tokenize
from tests.harness.conformance import check_resume_everywhere, content
from tests.harness.corpus import Numbers
from tests.harness.files import (
    CASES,
    FORMATS,
    HARM,
    KNOWN_AT_START,
    corpus,
    listed,
    shards,
    skipping,
    source,
    survivors,
)
from tests.harness.stores import Web, short_waits

GONE = "there is no such file"


@contextmanager
def unwarned() -> Iterator[None]:
    """Ignore the warning that shards are left out, which has a test of its own."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* files cannot be read and are skipped")
        yield


@pytest.mark.parametrize(("kind", "harm", "reason"), CASES)
def test_each_part_of_a_bad_shard_is_left_out_as_one_bad_record(
    tmp_path: Path, kind: str, harm: str, reason: str
) -> None:
    files = corpus(kind, tmp_path / "data")
    HARM[harm](files.paths[2])
    with unwarned():
        dataset = skipping(files.open(), skip_bad=tmp_path / "bad", epochs=2)
        packs = list(dataset)
    assert survivors(packs) == sorted(2 * files.rest(2))
    entries = listed(tmp_path / "bad")
    assert {Path(entry["path"]).name for entry in entries} == {files.paths[2].name}
    assert reason in min(entries, key=itemgetter("offset"))["reason"]
    assert all(reason in entry["reason"] or "records lead out" in entry["reason"] for entry in entries)
    ledger = dataset.ledger()
    assert ledger.as_dict()["bad_records"] == 2 * len(entries), "listed once, counted in each of two epochs"
    parts = {(entry["path"], entry["offset"]) for entry in entries}
    assert len(parts) == len(entries) <= 6


RESUMED = [
    ("jsonl", "zeros"),
    ("jsonl", "a JSON array"),
    ("gz", "gone"),
    ("parquet", "no column"),
    ("tokens", "another header"),
]
RESUMED += [("mds", "zeros"), ("megatron", "no index")]


@pytest.mark.parametrize(("kind", "harm"), RESUMED)
def test_resume_at_every_pack(tmp_path: Path, kind: str, harm: str) -> None:
    files = corpus(kind, tmp_path / "data")
    HARM[harm](files.paths[2])
    with unwarned():
        data = files.open()
        check_resume_everywhere(lambda: skipping(data, skip_bad=tmp_path / "bad"), packs=25, whole_every=12)
    entries = listed(tmp_path / "bad")
    assert len({(entry["path"], entry["offset"]) for entry in entries}) == len(entries)


@pytest.mark.parametrize(
    "broken",
    [
        b"off}\n",
        b"cut\n\noff\n",
        pytest.param(b"\n" * 70_000, id="blank lines"),
        pytest.param((b'{"n":"' + b"\xe9" * 400 + b'"}\n') * 170, id="no UTF-8"),
    ],
)
@pytest.mark.parametrize("only", [False, True])
def test_json_lines_that_begin_with_broken_rows_are_read(tmp_path: Path, broken: bytes, only: bool) -> None:
    """A piece of a file that was split by size begins in the middle of a row. A few lines tell of no other kind."""
    files = corpus("jsonl", tmp_path / "data")
    files.paths[2].write_bytes(broken + (b"" if only else files.paths[2].read_bytes()))
    expected = files.rest(2) if only else files.rest()
    assert survivors(skipping(files.open(), skip_bad=tmp_path / "bad")) == expected
    assert len(listed(tmp_path / "bad")) == len(broken.split())


@pytest.mark.parametrize("kind", ["parquet", "tokens", "mds"])
def test_each_part_of_a_shard_that_is_overwritten_is_a_bad_record(tmp_path: Path, kind: str) -> None:
    """Also where the file was whole when it was divided, and another process reads it."""
    files = corpus(kind, tmp_path / "data")
    data = files.open()
    parts = sum(part.file == 2 for lane in data.corpus_list(2).lanes for part in lane)
    files.paths[2].write_bytes(bytes(files.paths[2].stat().st_size if kind == "parquet" else 0))
    with unwarned():
        dataset = skipping(pickle.loads(pickle.dumps(data)), skip_bad=tmp_path / "bad", num_lanes=2)
        assert survivors(dataset) == files.rest(2)
    assert len(listed(tmp_path / "bad")) == dataset.ledger().as_dict()["bad_records"] == parts > 1


@pytest.mark.parametrize(("kind", "harm", "reason"), CASES)
def test_without_skip_all_bad_shards_are_named_at_once(
    tmp_path: Path, kind: str, harm: str, reason: str
) -> None:
    """They are named at the start if a listing or an index tells, otherwise the first one when it is read."""
    files = corpus(kind, tmp_path / "data")
    bad = [files.paths[i] for i in (1, 3)]
    for path in bad:
        HARM[harm](path)
    with pytest.raises((ValueError, OSError)) as error:
        list(skipping(files.open(), skip_bad=False, shuffle=False))
    message = str(error.value)
    assert reason in message
    assert str(bad[0]) in message
    if harm in KNOWN_AT_START:
        assert message.startswith(f"2 of {len(files.paths)} files cannot be read: {bad[0]}: ")
        assert str(bad[1]) in message
        assert message.endswith("or skip them with skip_bad=True")


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_that_is_gone_in_mid_run(tmp_path: Path, kind: str) -> None:
    """What was read before stays, the rest is left out; it is named without skip, and where a resume must read it."""
    files = corpus(kind, tmp_path / "data")
    settings: Any = {"shuffle": False, "num_lanes": 1, "buffer_size": 2}
    before = [content(pack) for pack in skipping(files.open(), **settings)]
    data = files.open()
    strict, begun = (
        skipping(data, **{**settings, **each}) for each in ({"skip_bad": False}, {"buffer_size": 6})
    )
    next(pack for pack in begun if set(survivors([pack])) & set(files.rows_of[3]))
    dataset = skipping(data, skip_bad=tmp_path / "bad", **settings)
    packs, iterator = [], iter(dataset)
    packs += list(islice(iterator, 4))
    files.paths[3].unlink()
    packs += list(iterator)
    assert [content(pack) for pack in packs[:4]] == before[:4]
    assert survivors(packs) == files.rest(3)
    entries = listed(tmp_path / "bad")
    assert {(Path(entry["path"]).name, entry["reason"]) for entry in entries} == {(files.paths[3].name, GONE)}
    assert dataset.ledger().dropped_samples["bad"] == len(entries)
    with pytest.raises(FileNotFoundError) as error:
        list(strict)
    assert files.paths[3].name in str(error.value.__notes__)
    resumed = skipping(data, **{**settings, "buffer_size": 6})
    resumed.load_state_dict(begun.state_dict())
    with pytest.raises(FileNotFoundError) as error:
        next(iter(resumed))
    assert files.paths[3].name in str(error.value.__notes__), "rows of it waited"


@pytest.mark.parametrize("kind", ["tokens", "mds"])
def test_a_shard_that_is_gone_at_a_resume_moves_no_other(tmp_path: Path, kind: str) -> None:
    """The index still knows its rows, so files are cut as before."""
    files = corpus(kind, tmp_path / "data")
    begun = skipping(files.open(), shuffle=False)
    packs = list(islice(begun, 3))
    files.paths[3].unlink()
    with unwarned():
        resumed = skipping(files.open(), shuffle=False)
        resumed.load_state_dict(begun.state_dict())
        assert survivors([*packs, *resumed]) == files.rest(3)


@pytest.mark.parametrize("kind", ["jsonl", "gz", "parquet"])
def test_a_shard_behind_a_url(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """404 and 410 do not pass; other errors stay errors after their retries, also with skip."""
    short_waits(monkeypatch)
    with Web(shards(kind, 4)) as web, unwarned():
        paths = [web.url + path for path in web.files]
        bad = list(web.files)[2]
        data = source(kind, paths)
        data.read(Reading(num_lanes=2))  # footers are read to divide the files
        expected = survivors(skipping(source(kind, paths[:2] + paths[3:]), shuffle=False))
        web.fault = lambda path: "410" if path == bad else None
        dataset = skipping(data, skip_bad=tmp_path, shuffle=False)
        assert survivors(dataset) == expected
        assert {entry["reason"] for entry in listed(tmp_path)} == {"HTTP 410, there is no such file"}
        for status in ("403", "503"):
            web.fault = lambda path, status=status: status if path == bad else None  # type: ignore[misc]
            with pytest.raises(OSError, match=f"HTTP {status}"):
                list(skipping(data))
        del web.files[bad]
        web.fault = lambda path: None
        at_start = skipping(source(kind, paths), shuffle=False)
        assert survivors(at_start) == expected
        with pytest.raises(
            ValueError, match=r"1 of 4 files cannot be read: .*HTTP 404, there is no such file"
        ):
            skipping(source(kind, paths), skip_bad=False)


def test_the_limit_of_bad_records_holds_for_parts_too(tmp_path: Path) -> None:
    files = corpus("gz", tmp_path / "data")
    for i in (1, 2, 4):
        HARM["zeros"](files.paths[i])
    settings: Any = {"num_lanes": 1, "shuffle": False, "epochs": 2}
    whole = list(skipping(files.open(), skip_bad=3, **settings))
    strict, packs = skipping(files.open(), skip_bad=2, **settings), []
    with pytest.raises(ValueError) as error:
        packs.extend(strict)
    assert str(error.value).startswith(
        f"{files.paths[4]}:1: it cannot be decompressed: Not a gzipped file (b'\\x00\\x00'); lane 0 has skipped 2 "
        "others, and skip_bad.limit=2 lets no more pass"
    )
    again, lenient = (skipping(files.open(), skip_bad=limit, **settings) for limit in (2, 3))
    for resumed in (again, lenient):
        resumed.load_state_dict(strict.state_dict())
    with pytest.raises(ValueError, match="has skipped 2 others"):
        list(again)
    assert len(packs) + len(list(lenient)) == len(whole)


def test_a_mixture_and_a_holdout_leave_out_bad_shards(tmp_path: Path) -> None:
    one, two = (corpus(kind, tmp_path / kind) for kind in ("jsonl", "parquet"))
    HARM["empty"](one.paths[0])
    HARM["no footer"](two.paths[1])
    mix = Mix(
        [
            {"name": "a", "weight": 1, "source": Holdout(one.open(), fraction=0.01, part="train")},
            {"name": "b", "weight": 1, "source": two.open()},
        ]
    )
    with unwarned():
        dataset = skipping(mix, skip_bad=tmp_path / "bad")
        found = set(survivors(dataset))
        check_resume_everywhere(lambda: skipping(mix), packs=15, whole_every=8)
    assert found >= set(two.rest(1))
    assert {Path(entry["path"]).name for entry in listed(tmp_path / "bad")} == {"0.jsonl", "1.parquet"}
    with pytest.raises(ValueError, match="2 of 12 files cannot be read"):
        skipping(mix, skip_bad=False)


def test_tokenize_leaves_out_bad_shards_and_counts_them(tmp_path: Path) -> None:
    files = corpus("jsonl", tmp_path / "data")
    HARM["gzip data"](files.paths[2])
    settings: Any = {"encoder": Numbers(), "progress": False, "lanes": 2}
    with pytest.raises(ValueError, match="2.jsonl:1: it is compressed: let its name end in .gz"):
        tokenize(files.open(), out=tmp_path / "strict", **settings)
    out = tokenize(files.open(), out=tmp_path / "out", skip_bad=True, **settings)
    index = json.loads((out / "index.json").read_text())
    assert index["bad_records"] == len(listed(out / "bad_records")) > 0
    assert sum(shard["documents"] for shard in index["shards"]) == len(files.rest(2))
    assert {Path(entry["path"]).name for entry in listed(out / "bad_records")} == {"2.jsonl"}


def test_a_file_that_came_back_between_two_runs_is_another_corpus(tmp_path: Path) -> None:
    """The state was made with a corpus in which the file was named and could not be read."""
    files = corpus("jsonl", tmp_path)
    kept = files.paths[2].read_bytes()
    files.paths[2].unlink()
    with unwarned():
        dataset = skipping(files.open())
        next(iter(dataset))
        state = dataset.state_dict()
        again = skipping(files.open())
        again.load_state_dict(state)
    files.paths[2].write_bytes(kept)
    back = skipping(files.open())
    with pytest.raises(ValueError, match="made with corpus.files="):
        back.load_state_dict(state)


def test_a_corpus_of_nothing_but_bad_shards_is_an_error(tmp_path: Path) -> None:
    for harm, message in (
        ("empty", "6 of 6 files cannot be read"),
        ("zeros", "all 6 that were read are dropped (6 broken, and skipped)"),
    ):
        files = corpus("gz", tmp_path / harm)
        for path in files.paths:
            HARM[harm](path)
        with pytest.raises(ValueError, match=re.escape(message)):
            list(skipping(files.open(), num_lanes=1))
