"""Lists of a corpus's files: what they hold, runs that start by them and look at no file, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from streampack import JSONLSource, cli
from streampack.sources import ParquetSource
from streampack.sources.scan import scan  # private: named in docs/guides/data.md
from tests.harness.conformance import check_resume_everywhere, content
from tests.harness.files import CASES, HARM, corpus, listed, shards, skipping, survivors
from tests.harness.stores import Web

KINDS = ("jsonl", "gz", "parquet")


LEFT_OUT = "ignore:.* cannot be read and are left out"


def opened(kind: str, manifest: Path | str, folder: Path | str | None = None) -> Any:
    """Open a corpus by its manifest."""
    if kind == "parquet":
        return ParquetSource(folder, manifest=manifest, columns=["i", "n"])
    return JSONLSource(folder, manifest=manifest)


@pytest.mark.parametrize("kind", KINDS)
def test_packs_and_states_are_those_of_a_listing(tmp_path: Path, kind: str) -> None:
    files = corpus(kind, tmp_path / "data")
    scan(files.paths, out=tmp_path / "corpus.manifest", progress=False)
    listing = skipping(files.open())
    running = iter(listing)
    packs = [next(running) for _ in range(5)]
    by_manifest = skipping(opened(kind, tmp_path / "corpus.manifest", tmp_path / "data"))
    by_manifest.load_state_dict(listing.state_dict())
    packs += list(by_manifest)
    assert list(map(content, packs)) == list(map(content, skipping(files.open())))


@pytest.mark.parametrize(("kind", "most"), [("jsonl", 40), ("parquet", 60)])
def test_a_thousand_files_behind_a_url_cost_a_few_requests_to_the_first_pack(
    tmp_path: Path, kind: str, most: int
) -> None:
    """Of files that were not scanned, each costs one; of Parquet files, another one for the footer."""
    few = list(shards(kind, 4, 20).values())
    with Web({f"/c/{i:04}.{kind}": few[i % 4] for i in range(1000)}) as web:
        names = tmp_path / "names"
        names.write_text("\n".join(f"{i:04}.{kind}" for i in range(1000)))
        found = scan(f"{web.url}/c", manifest=names, out=tmp_path / "manifest", progress=False)
        assert found.files == 1000
        asked = len(web.requests)
        assert asked >= 1000
        data = opened(kind, tmp_path / "manifest", f"{web.url}/c")
        assert len(web.requests) == asked
        dataset = skipping(data, num_lanes=8, shuffle=False, skip_bad=False, storage={"read_ahead": 0})
        next(iter(dataset))
        assert len(web.requests) - asked <= most
        web.files["/m"] = (tmp_path / "manifest").read_bytes()
        asked = len(web.requests)
        again = opened(kind, f"{web.url}/m", f"{web.url}/c")
        assert len(web.requests) - asked == 2, "the manifest's size, and the manifest"
        assert again.files == data.files


@pytest.mark.filterwarnings(LEFT_OUT)
@pytest.mark.parametrize(
    ("kind", "harm", "reason"), [case for case in CASES if case[0] in KINDS and case[1] != "gone"]
)
def test_problems_are_known_at_the_start_of_every_run(
    tmp_path: Path, kind: str, harm: str, reason: str
) -> None:
    files = corpus(kind, tmp_path / "data")
    for i in (1, 4):
        HARM[harm](files.paths[i])
    found = scan(tmp_path / "data", out=tmp_path / "data" / "manifest", columns=["i", "n"], progress=False)
    assert [shown for shown, _ in found.problems] == [str(files.paths[1]), str(files.paths[4])]
    assert all(reason in why for _, why in found.problems)
    with pytest.raises(ValueError, match="2 of 6 files cannot be read") as error:
        skipping(opened(kind, found.manifest), skip_bad=False)
    assert str(error.value).count(reason) == 2
    dataset = skipping(opened(kind, found.manifest), skip_bad=tmp_path / "bad")
    packs = list(dataset)
    assert survivors(packs) == files.rest(1, 4)
    assert {entry["shard"] for entry in listed(tmp_path / "bad")} == {files.paths[i].name for i in (1, 4)}
    listing = skipping(files.open())
    found_out = list(map(content, listing))
    if kind != "jsonl" or harm == "empty":
        assert list(map(content, packs)) == found_out, "as without a manifest"
    else:  # without one, only the first part of a file tells that it is of another kind
        with pytest.raises(ValueError, match="left_out="):
            listing.load_state_dict(dataset.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_gone_since_the_scan_is_left_out_and_a_resume_gives_the_same_packs(
    tmp_path: Path, kind: str
) -> None:
    files = corpus(kind, tmp_path / "data")
    scan(tmp_path / "data", out=tmp_path / "data" / "manifest", progress=False)
    files.paths[2].unlink()

    def make() -> Any:
        return skipping(opened(kind, tmp_path / "data" / "manifest"), skip_bad=tmp_path / "bad")

    packs = check_resume_everywhere(make, packs=30, whole_every=10)
    assert survivors([*packs, *list(make())][-len(list(make())) :]) == files.rest(2)
    assert {entry["shard"] for entry in listed(tmp_path / "bad")} == {files.paths[2].name}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", ["size", "content"])
def test_a_file_that_is_another_one_than_was_scanned_is_named_when_it_is_read(
    tmp_path: Path, kind: str, change: str
) -> None:
    files = corpus(kind, tmp_path / "data")
    scan(tmp_path / "data", out=tmp_path / "data" / "manifest", progress=False)
    data = files.paths[3].read_bytes()
    data = data + b"\n" if change == "size" else data[:10] + bytes([data[10] ^ 1]) + data[11:]
    files.paths[3].write_bytes(data)
    what = "has .* bytes and had .*" if change == "size" else "does not have the content that it had"
    message = f"{files.paths[3]} {what} when it was listed; a corpus must not change"
    with pytest.raises(ValueError, match=message):
        list(skipping(opened(kind, tmp_path / "data" / "manifest")))


BAD_LINES = [
    ('{"name": "a.jsonl", "size": 4, "rows": -1}', "rows=-1 is no number of rows"),
    ('{"name": "a.jsonl", "size": 4, "rows": 3, "groups": [2, 9]}', "do not add up to rows"),
    ('{"name": "a.jsonl", "size": 4, "rows": 2, "groups": [2, 1e9]}', "do not add up to rows"),
    ('{"name": "a.jsonl", "size": 4, "schema": 1}', "schema=1 is none of the 1 of the first line"),
    ('{"name": "a.jsonl", "size": 4, "problem": 3}', "a problem is text without line breaks"),
    ('{"name": "a.jsonl", "size": 4, "problem": "a\\nb"}', "a problem is text without line breaks"),
    ('{"format": "streampack-manifest", "version": 2}', "version 2 is not read"),
    ('{"format": "streampack-manifest", "version": 1, "schemas": [3]}', "schemas is a list of objects"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_a_manifest_is_not_trusted(tmp_path: Path, line: str, message: str) -> None:
    header = {"format": "streampack-manifest", "version": 1, "schemas": [{"a": "string"}]}
    (tmp_path / "manifest").write_text(f"{json.dumps(header)}\n{line}\n")
    with pytest.raises(ValueError, match=message) as error:
        JSONLSource(manifest=tmp_path / "manifest")
    assert str(error.value).startswith(f"{tmp_path}/manifest:2: ")


def test_an_error_that_may_pass_leaves_no_manifest(tmp_path: Path) -> None:
    with Web(shards("parquet", 3)) as web:
        paths = [web.url + path for path in web.files]
        web.fault = lambda path: "503" if path.endswith("1.parquet") else None
        with pytest.raises(OSError, match="HTTP 503"):
            scan(paths, out=tmp_path / "manifest", retries=0, progress=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("harm", "rows"), [(None, 180), ("no footer", 150)])
def test_the_command_prints_a_summary_and_exits_with_1_for_problems(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], harm: str | None, rows: int
) -> None:
    files = corpus("parquet", tmp_path / "data")
    if harm is not None:
        HARM[harm](files.paths[0])
    words = ["scan", str(tmp_path / "data"), "--out", str(tmp_path / "out"), "--columns", "i,n"]
    assert cli.main(words) == int(harm is not None)
    first, *problems, last = capsys.readouterr().out.splitlines()
    size = sum(path.stat().st_size for path in files.paths)
    assert first == f"6 files of {size:,} bytes and {rows} rows, {len(problems)} with problems"
    assert [line.split(": ")[0].strip() for line in problems] == [str(files.paths[0])] * (harm is not None)
    assert last == f"read it with paths='{tmp_path}/data', manifest='{tmp_path}/out'"
