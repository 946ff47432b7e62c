"""Shards behind HTTP and S3, on loopback: what is read, what is tried again, what is refused, what is never said."""

from __future__ import annotations

import gc
import gzip
import hashlib
import io
import json
import logging
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streampack import IterablePackedDataset, JSONLSource, PackedDataLoader
from streampack.sources import ParquetSource, Reading
from streampack.storage.base import redact
from streampack.storage.remote import RemoteStorage, scheme_of
from streampack.storage.retries import Retries
from tests.support.conformance import check_positions, check_resume_everywhere
from tests.support.corpus import Numbers, rows
from tests.support.ranks import run_ranks
from tests.support.web import FAULTS, Web, random_faults

KINDS = ("jsonl", "gz", "parquet")
COLUMNS = ["i", "n", "text"]


def shards(kind: str, count: int, per_shard: int = 40, *, text: int = 300) -> dict[str, bytes]:
    """``/c/000.jsonl`` and so on; rows for `Numbers`, with a text of varying length."""
    rng = np.random.default_rng(0)
    data = [
        {**row, "text": bytes(rng.integers(97, 123, rng.integers(1, 2 * text), np.uint8)).decode()}
        for row in rows(count * per_shard)
    ]
    files = {}
    for shard in range(count):
        part = data[shard * per_shard : (shard + 1) * per_shard]
        if kind == "parquet":
            stream = io.BytesIO()
            table = pa.Table.from_pylist([{**row, "other": row["text"] * 3} for row in part])
            pq.write_table(table, stream, row_group_size=max(1, per_shard // 4))
            content = stream.getvalue()
        else:
            content = "".join(json.dumps(row) + "\n" for row in part).encode()
            content = gzip.compress(content) if kind == "gz" else content
        files[f"/c/{shard:03}.{'jsonl.gz' if kind == 'gz' else kind}"] = content
    return files


def source(kind: str, paths: Any = None, **settings: Any) -> Any:
    """Of that kind; its waits are short."""
    if kind == "parquet":
        made: Any = ParquetSource(paths, columns=COLUMNS, **{"retries": 9, **settings})
    else:
        made = JSONLSource(paths, **{"retries": 9, **settings})
    made.corpus = replace(
        made.corpus, retries=Retries(attempts=settings.get("retries", 9), first=0.01, longest=0.05)
    )
    return made


def stream(data: Any, **settings: Any) -> IterablePackedDataset:
    common = {"max_seq_len": 24, "buffer_size": 6, "encoder": Numbers(), "num_lanes": 2, "shuffle": True}
    return IterablePackedDataset(data, **{**common, "shuffle_window": 8, "epochs": 1, **settings})


def packs(data: Any, **settings: Any) -> list[Any]:
    return [(pack.tokens.tolist(), pack[2:]) for pack in stream(data, **settings).stream()]


def used(kind: str, files: dict[str, bytes]) -> int:
    """Bytes that hold what is read: whole files; of Parquet the footers and the needed columns."""
    if kind != "parquet":
        return sum(map(len, files.values()))
    total = 0
    for content in files.values():
        footer = pq.read_metadata(io.BytesIO(content))
        total += footer.serialized_size + 8
        for group in map(footer.row_group, range(footer.num_row_groups)):
            columns = map(group.column, range(group.num_columns))
            total += sum(c.total_compressed_size for c in columns if c.path_in_schema in COLUMNS)
    return total


@pytest.fixture
def web() -> Iterator[Web]:
    with Web({}) as server:
        yield server


def urls(web: Web) -> list[str]:
    return [web.url + path for path in web.files]


# What is read.


@pytest.mark.parametrize("kind", KINDS)
def test_a_lane_reads_ranges_and_little_else(web: Web, kind: str) -> None:
    web.files = shards(kind, 6, 400)
    found = []
    data = source(kind, urls(web))
    assert len(web.requests) == 6, "one byte of each, for its size"
    for lane in range(2):
        found += list(data.read(Reading(lane, num_lanes=2)))
    assert sorted(row.data["i"] for row in found) == list(range(2400))
    assert web.bytes <= 1.05 * used(kind, web.files)
    assert all(ranged for _, ranged in web.requests)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_64_shards_with_and_without_faults(web: Web, kind: str) -> None:
    web.files = shards(kind, 64, 400, text=700)
    whole = packs(source(kind, urls(web)), num_lanes=8, max_seq_len=128)
    assert web.bytes <= 1.05 * used(kind, web.files)
    web.fault = random_faults(3)
    assert packs(source(kind, urls(web), timeout=0.5), num_lanes=8, max_seq_len=128) == whole
    assert set(web.faults) == set(FAULTS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_seek_reads_only_from_there(web: Web, kind: str) -> None:
    web.files = shards(kind, 1, 2000)
    data = source(kind, urls(web), read_ahead=0)
    reader = data.read(Reading())
    found = [next(reader) for _ in range(1801)]
    before, web.bytes = web.bytes, 0
    [row] = [next(data.read(Reading(start=found[-1].cursor)))]
    assert row == found[-1]
    if kind == "jsonl":
        assert web.bytes < 0.12 * len(web.files["/c/000.jsonl"])
    if kind == "parquet":
        assert web.bytes < 0.3 * before, "a row group of four"
    web.bytes = 0
    assert data.fetch(row.row_id) == row.data
    if kind == "jsonl":
        assert web.bytes == 4096
    assert data.locate(row.row_id).startswith(web.url)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [0, 7])
def test_positions_over_http(web: Web, kind: str, window: int) -> None:
    web.files = shards(kind, 3, 12, text=20)
    data = source(kind, urls(web))
    found = []
    for lane in range(2):
        found += check_positions(
            lambda start, lane=lane: data.read(  # type: ignore[misc]
                Reading(lane, num_lanes=2, epoch=1, seed=5, shuffle_window=window, start=start)
            )
        )
    assert sorted(row["i"] for row in found) == list(range(36))


@pytest.mark.parametrize("kind", KINDS)
def test_resume_everywhere_over_http(web: Web, kind: str) -> None:
    web.files = shards(kind, 4, 10, text=20)
    check_resume_everywhere(lambda: stream(source(kind, urls(web)), epochs=2), packs=14, whole_every=20)


def test_workers_read_what_this_process_has_read_before(web: Web) -> None:
    """A forked child has none of its parent's threads, and must not wait for them."""
    web.files = shards("jsonl", 4)
    data = source("jsonl", urls(web))
    expected = packs(data)
    loader = PackedDataLoader(stream(data), num_workers=2)
    assert sum(len(batch.tokens) for batch in loader) == len(expected)
    assert packs(pickle.loads(pickle.dumps(data))) == expected, "and a spawned one gets its own"


def test_a_fork_does_not_end_its_parents_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = RemoteStorage("memory", options={}, patience=1.0)
    first = weakref.ref(storage.filesystem())
    assert storage.filesystem() is first()
    # The module's own name for it: others who are asked for their process meanwhile answer truly.
    monkeypatch.setattr("streampack.storage.remote.os", SimpleNamespace(getpid=lambda: 1))
    assert storage.filesystem() is not first()
    gc.collect()
    assert first() is not None, "let go of, s3fs closes its sockets, which are the parent's, too"


def test_read_ahead_is_bounded(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RemoteStorage, "block", 10_000)
    web.files = shards("jsonl", 2, 1000)
    size = sum(map(len, web.files.values()))
    data = source("jsonl", urls(web), read_ahead=45_000)
    reader = data.read(Reading())
    next(reader)
    time.sleep(0.3)
    assert 30_000 < web.bytes < 60_000 < size
    assert len(list(reader)) == 1999
    assert web.bytes <= 1.05 * size


def test_a_process_ends_while_it_reads_ahead(web: Web) -> None:
    web.files = shards("jsonl", 2, 1000)
    web.fault = lambda path: None if len(web.requests) < 8 else "stall"
    code = f"""
from streampack.sources import JSONLSource, Reading
from streampack.storage.remote import RemoteStorage
RemoteStorage.block = 10_000
print(next(JSONLSource({urls(web)!r}).read(Reading())).data["i"])
"""
    begun = time.monotonic()
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert (run.stdout, run.stderr) == ("0\n", "")
    assert time.monotonic() - begun < 20


# What is tried again.


@pytest.mark.parametrize("kind", KINDS)
def test_faults_change_nothing(web: Web, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RemoteStorage, "block", 8192)
    web.files = shards(kind, 6, 60)
    whole = packs(source(kind, urls(web)))
    web.fault = random_faults(1)
    assert packs(source(kind, urls(web), timeout=0.3)) == whole
    assert len(set(web.faults)) >= 5, web.faults


@pytest.mark.parametrize("kind", KINDS)
def test_an_outage_names_shard_and_offset_within_the_budget(web: Web, kind: str) -> None:
    web.files = shards(kind, 4, 200)
    said = []
    for _ in range(2):
        web.fault = lambda path: None
        data = source(kind, urls(web), retries=3)
        running = stream(data, shuffle=False, num_lanes=1).stream()
        next(running)
        web.fault = lambda path: "503" if "002" in path else None
        begun = time.monotonic()
        with pytest.raises(OSError) as error:
            list(running)
        assert time.monotonic() - begun < data.retry_budget + 10
        said.append("\n".join([str(error.value), *error.value.__notes__]))
    assert said[0] == said[1]
    unit = "row" if kind == "parquet" else "byte"
    shard = next(path for path in web.files if "002" in path)
    assert f"while reading {web.url}{shard} from {unit} 0 on" in said[0]
    web.fault = lambda path: None
    assert list(running), "and when it is over, the stream goes on"


def rank_meets_outage(paths: list[str], began: Path) -> tuple[str, float]:
    """What a rank raises, and how long after the server began to fail."""
    data = source("gz", paths, retries=3, read_ahead=0)
    loader = PackedDataLoader(stream(data, shuffle=False, num_lanes=2))
    iterator = iter(loader)
    next(iterator)
    (began / os.environ["RANK"]).touch()
    begun = time.monotonic()
    try:
        list(iterator)
    except Exception as error:
        return " ".join([str(error), *getattr(error, "__notes__", ())]), time.monotonic() - begun
    raise AssertionError("no error")


@pytest.mark.slow
def test_an_outage_is_raised_on_all_ranks_with_shard_and_offset(web: Web, tmp_path: Path) -> None:
    web.files = shards("gz", 4, 2000)  # a compressed shard is read by one lane, so by one rank
    web.fault = lambda path: "503" if "002" in path and len(list(tmp_path.iterdir())) == 2 else None
    outcomes = run_ranks(rank_meets_outage, 2, urls(web), tmp_path)
    places = {
        re.search(r"while reading (http://\S+/c/002.jsonl.gz from byte \d+) on", said) for said, _ in outcomes
    }
    assert len({place and place[1] for place in places}) == 1
    assert None not in places
    assert all(took < 0.15 + 10 for _, took in outcomes)


@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [
        ("404", FileNotFoundError, "HTTP 404, there is no such file"),
        ("403", PermissionError, "HTTP 403, access is denied"),
        ("401", PermissionError, "HTTP 401, access is denied"),
        ("400", OSError, "HTTP 400"),
    ],
)
def test_what_does_not_pass_is_raised_at_once(
    web: Web, status: str, kind: type[OSError], message: str
) -> None:
    web.files = shards("jsonl", 1)
    web.fault = lambda path: status
    with pytest.raises(kind) as error:
        source("jsonl", urls(web))
    assert str(error.value) == f"{web.url}/c/000.jsonl: {message}"
    assert len(web.requests) == 1


def test_a_server_without_ranges_is_refused(web: Web) -> None:
    web.files = shards("jsonl", 1)
    web.ranges = False
    with pytest.raises(OSError, match="the server sends whole files only; serve them with range requests"):
        source("jsonl", urls(web))


def bent(web: Web, monkeypatch: pytest.MonkeyPatch, **bend: Callable[[str], str]) -> None:
    """A server whose headers are other ones: ``ETag`` and ``Content-Range``, as functions of what they were."""
    handler: Any = web.server.RequestHandlerClass
    send = handler._send

    def _send(self: Any, status: int, data: bytes, headers: Any = None, promised: int | None = None) -> None:
        headers = {
            name: bend.get(name.replace("-", ""), str)(value) for name, value in (headers or {}).items()
        }
        send(self, status, data, headers, promised)

    monkeypatch.setattr(handler, "_send", _send)


@pytest.mark.parametrize("place", ["http", "s3"])
def test_a_server_that_does_not_tell_sizes_is_refused(
    web: Web, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    web.files = {f"/bucket{path}": content for path, content in shards("jsonl", 1).items()}
    bent(web, monkeypatch, ContentRange=lambda said: said.partition("/")[0] + "/*")
    [url], options = urls(web), None
    if place == "s3":
        pytest.importorskip("s3fs")
        url, options = "s3://bucket/c/000.jsonl", {**S3, "endpoint_url": web.url}
    with pytest.raises(OSError) as error:
        source("jsonl", url, storage_options=options)
    assert str(error.value) == (
        f"{url}: the server does not tell the file's size, by which a file that was cut off or has grown is noticed; "
        "serve the file with its size in Content-Range, or copy it to this machine"
    )
    assert len(web.requests) == 1, "it would say so again"


def test_a_weak_tag_names_the_same_version(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where one of several proxies marks what it passes on; and as a manifest may have copied it."""
    web.files = shards("jsonl", 2)
    strong = source("jsonl", urls(web)).fingerprint()
    marks = cycle(["W/", ""])
    bent(web, monkeypatch, ETag=lambda tag: next(marks) + tag)
    data = source("jsonl", urls(web), read_ahead=0)
    assert data.fingerprint() == strong
    lanes = [data.read(Reading(lane, num_lanes=4)) for lane in range(4)]
    assert sum(len(list(lane)) for lane in lanes) == 80
    assert len(web.requests) > 6, "of each file, both were seen"
    tags = [f'W/"{hashlib.md5(content).hexdigest()}"' for content in web.files.values()]
    lines = [
        json.dumps({"name": path[3:], "size": len(content), "tag": tag})
        for (path, content), tag in zip(web.files.items(), tags, strict=True)
    ]
    web.files["/c/shards.txt"] = "\n".join(lines).encode()
    listed = source("jsonl", manifest=f"{web.url}/c/shards.txt")
    assert listed.fingerprint() == strong
    assert len(list(listed.read(Reading()))) == 80


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", ["longer", "another"])
def test_a_shard_that_changes_during_a_run_is_refused(web: Web, kind: str, change: str) -> None:
    web.files = shards(kind, 2, 100)
    data = source(kind, urls(web), read_ahead=0)
    reader = data.read(Reading())
    next(reader)
    last = list(web.files)[1]
    web.files[last] = b" " + web.files[last][change == "another" :]
    with pytest.raises(
        ValueError, match=f"{last} (has|is version).* when the run began; a corpus must not change"
    ):
        list(reader)


def test_the_fingerprint_is_the_servers_tag_not_its_address(web: Web) -> None:
    web.files = shards("jsonl", 3)
    before = source("jsonl", urls(web)).fingerprint()
    web.files = {f"/moved{path}": content for path, content in web.files.items()}
    assert source("jsonl", urls(web)).fingerprint() == before
    web.files["/moved/c/001.jsonl"] = web.files["/moved/c/001.jsonl"].replace(b"a", b"b")
    assert source("jsonl", urls(web)).fingerprint() != before


# S3, and the others.


S3 = {"key": "canary-key", "secret": "canary-secret"}


@pytest.mark.parametrize("kind", KINDS)
def test_s3_through_a_listing(web: Web, kind: str) -> None:
    pytest.importorskip("s3fs")
    web.files = {f"/bucket{path}": content for path, content in shards(kind, 6, 300).items()}
    options = {**S3, "endpoint_url": web.url}
    pattern = f"s3://bucket/c/*.{'jsonl.gz' if kind == 'gz' else kind}"
    data = source(kind, pattern, storage_options=options)
    assert len(web.requests) <= 2, "the listing says it all"
    assert len(data.files) == 6
    whole = packs(data)
    assert web.bytes <= 1.05 * used(kind, web.files) + 4000  # the listing
    web.fault = random_faults(2)
    assert packs(source(kind, pattern, storage_options=options, timeout=0.5)) == whole
    web.fault = lambda path: None
    last = list(web.files)[-1]
    data.fingerprint()
    web.files[last] = b" " + web.files[last][1:]
    with pytest.raises(ValueError, match=r"005.* is version .* and was .* when the run began"):
        packs(data)


def test_a_file_system_without_ranged_requests_of_its_own() -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    for path, content in shards("jsonl", 3).items():
        memory.pipe(path, content)
    try:
        data = source("jsonl", "memory://c/*.jsonl")
        assert [file.name for file in data.files] == ["000.jsonl", "001.jsonl", "002.jsonl"]
        assert sorted(row.data["i"] for row in data.read(Reading())) == list(range(120))
        assert data.fingerprint() == source("jsonl", "memory://c/*.jsonl").fingerprint()
        memory.pipe("/c/001.jsonl", memory.cat("/c/001.jsonl") + b"{}")
        with pytest.raises(ValueError, match="001.jsonl has .* bytes and had .* when the run began"):
            list(data.read(Reading()))
        with pytest.raises(ValueError, match=r"no file matches 'memory://c/\*.txt'"):
            source("jsonl", "memory://c/*.txt")
    finally:
        memory.rm("/c", recursive=True)


# Manifests.


def test_a_manifest_with_sizes_spares_a_request_each(web: Web) -> None:
    web.files = shards("jsonl", 4)
    lines = [json.dumps({"name": path[3:], "size": len(content)}) for path, content in web.files.items()]
    web.files["/c/shards.txt"] = "\n".join(lines).encode()
    data = source("jsonl", manifest=f"{web.url}/c/shards.txt?key=1")
    assert {path.partition("?")[0] for path, _ in web.requests} == {"/c/shards.txt"}
    assert len(list(data.read(Reading()))) == 160
    assert {path.partition("?")[2] for path, _ in web.requests} == {"key=1"}, "the query goes with every name"
    assert data.fingerprint() == source("jsonl", [url for url in urls(web) if "jsonl" in url]).fingerprint()
    web.files["/c/shards.txt"] = b"000.jsonl\n\n003.jsonl\n"
    assert len(list(source("jsonl", manifest=f"{web.url}/c/shards.txt").read(Reading()))) == 80


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_10_000_listed_shards(web: Web, kind: str) -> None:
    [content] = shards(kind, 1, 8).values()
    names = [f"{i // 100:03}/{i:05}.{kind}" for i in range(10_000)]
    web.files = {f"/c/{name}": content for name in names}
    tag = hashlib.md5(content).hexdigest()
    lines = [json.dumps({"name": name, "size": len(content), "tag": tag}) for name in names]
    web.files["/c/shards.txt"] = "\n".join(lines).encode()
    begun = time.monotonic()
    loader = PackedDataLoader(stream(source(kind, manifest=f"{web.url}/c/shards.txt"), num_lanes=8))
    assert next(iter(loader)).tokens.shape == (1, 24)
    assert loader.state_dict()
    assert time.monotonic() - begun < 5
    assert len(web.requests) < 200


# What is refused.


@pytest.mark.parametrize(
    "name",
    [
        "../a.jsonl",
        "sub/../../a.jsonl",
        "..",
        "/etc/passwd",
        "~/a.jsonl",
        "file:///etc/passwd",
        "https://elsewhere/a.jsonl",
        "pipe:cat /etc/passwd",
        "zip::a.jsonl",
        "simplecache::https://elsewhere/a.jsonl",
        "a\\..\\b.jsonl",
        "C:\\a.jsonl",
        "a\x00b.jsonl",
    ],
)
@pytest.mark.parametrize("place", ["here", "web"])
def test_names_that_lead_out_of_a_manifests_folder(web: Web, tmp_path: Path, name: str, place: str) -> None:
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "a.jsonl").write_text('{"i": 1}\n')
    text = json.dumps({"name": name})
    (tmp_path / "in" / "shards.txt").write_text(text)
    web.files["/in/shards.txt"] = text.encode()
    manifest = str(tmp_path / "in/shards.txt") if place == "here" else f"{web.url}/in/shards.txt"
    with pytest.raises(ValueError) as error:
        source("jsonl", manifest=manifest)
    said = f"{manifest}:1: the name {name!r} is refused: it must be relative and stay below the manifest's folder"
    assert str(error.value) == said
    assert all(path == "/in/shards.txt" for path, _ in web.requests)


def test_links_out_of_a_manifests_folder(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (tmp_path / "secret.jsonl").write_text('{"i": 1}\n')
    (folder / "good.jsonl").write_text('{"i": 2}\n')
    (folder / "inner").mkdir()
    (folder / "inner" / "target.jsonl").write_text('{"i": 3}\n')
    (folder / "good-link.jsonl").symlink_to(folder / "inner" / "target.jsonl")
    (folder / "bad-link.jsonl").symlink_to(tmp_path / "secret.jsonl")
    (folder / "bad-folder").symlink_to(tmp_path)
    manifest = folder / "shards.txt"
    manifest.write_text("good.jsonl\ngood-link.jsonl\n")
    assert sorted(row.data["i"] for row in JSONLSource(manifest=manifest).read(Reading())) == [2, 3]
    for name in ("bad-link.jsonl", "bad-folder/secret.jsonl"):
        manifest.write_text(f"good.jsonl\n{name}\n")
        with pytest.raises(
            ValueError, match=f":2: the name '{name}' is refused: it is a link that leads out"
        ):
            JSONLSource(manifest=manifest)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no file"),
        ("{", ":1: Expecting property name"),
        ('{"name": 3}', ":1: an entry has a name"),
        ('{"name": "a.jsonl", "size": "3"}', ":1: an entry has a name"),
        ('{"size": 3}', ":1: an entry has a name"),
        ("none.jsonl", ":1: there is no file 'none.jsonl'"),
    ],
)
def test_bad_manifests(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "shards.txt").write_text(text)
    with pytest.raises(ValueError, match=message):
        JSONLSource(manifest=tmp_path / "shards.txt")


@pytest.mark.parametrize(
    "url",
    [
        "simplecache::https://user:canary@host/a.jsonl",
        "zip://a.jsonl::https://host/a.zip?canary",
        "file:///etc/passwd",
        "ssh://user:canary@host/a.jsonl",
        "reference://a.jsonl",
        "pipe://cat",
        "https://host/a.zip::b",
    ],
)
def test_chains_and_other_schemes_are_refused(url: str) -> None:
    with pytest.raises(
        ValueError, match="are refused: only plain ones of http, https, s3, hf, memory"
    ) as error:
        source("jsonl", url)
    assert "canary" not in str(error.value)


def test_what_is_no_url_is_a_name_of_a_file() -> None:
    assert scheme_of("pipe:cat") is None
    with pytest.raises(ValueError, match="no file matches 'pipe:cat /etc/passwd'"):
        source("jsonl", "pipe:cat /etc/passwd")


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("canary"),)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_pickles_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.pkl").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ValueError, match="not a line of JSON|no Parquet file"):
        list(source(kind, "a.pkl").read(Reading()))
    assert not Path("canary").exists()


def test_settings_are_checked(web: Web, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="either paths or manifest"):
        JSONLSource()
    with pytest.raises(ValueError, match="either paths or manifest"):
        JSONLSource("a", manifest="b")
    with pytest.raises(
        ValueError, match="is a glob, and a web server does not list files; name each file, or a manifest"
    ):
        JSONLSource(f"{web.url}/*.jsonl")
    with pytest.raises(ValueError, match=r"lie in several places \(http://127.0.0.1:\d+, this machine\)"):
        JSONLSource([f"{web.url}/a.jsonl", str(tmp_path / "a.jsonl")])
    web.files = {"/a.jsonl": b""}
    with pytest.raises(ValueError, match="/a.jsonl is empty; remove it"):
        JSONLSource(f"{web.url}/a.jsonl")


# What is never said.


def test_redacted() -> None:
    assert redact("https://u:p@host:1/a/b.jsonl?x=1#y") == "https://host:1/a/b.jsonl"
    assert redact("s3://bucket/a.jsonl") == "s3://bucket/a.jsonl"
    assert redact("/a/b?c") == "/a/b?c"
    assert redact("hf://gpt2@main/a.jsonl") == "hf://gpt2@main/a.jsonl"
    assert redact("hf://u:p@gpt2/a.jsonl") == "hf://gpt2/a.jsonl"


@pytest.mark.parametrize("place", ["url", "s3"])
def test_a_secret_appears_nowhere(
    web: Web, place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in what is logged, raised, stored, listed or shown of a process, whatever goes wrong."""
    said: list[str] = []
    files = shards("jsonl", 3)
    files["/c/001.jsonl"] += b"{broken\n"
    web.files = {f"/bucket{path}": content for path, content in files.items()}
    monkeypatch.setenv("AWS_SESSION_TOKEN", "canary-token")
    if place == "url":
        host = web.url.removeprefix("http://")
        paths = [f"http://user:canary-password@{host}{path}?sig=canary-query" for path in web.files]
        options: dict[str, Any] = {"headers": {"X-Token": "canary-header"}}
    else:
        pytest.importorskip("s3fs")
        paths = [f"s3:/{path}" for path in web.files]
        options = {**S3, "endpoint_url": web.url}

    def data(**settings: Any) -> Any:
        return source("jsonl", paths, storage_options=options, timeout=1.0, **settings)

    def run(**settings: Any) -> PackedDataLoader:
        quarantine = (
            {"on_bad_record": "skip", "quarantine": tmp_path / "bad"} if "retries" not in settings else {}
        )
        workers = 0 if "retries" in settings else 2
        return PackedDataLoader(stream(data(**settings), num_lanes=2, **quarantine), num_workers=workers)

    caplog.set_level(logging.DEBUG, "streampack")
    web.fault = random_faults(1)
    loader = run()
    for _ in loader:
        said += [Path(f"/proc/{child}/cmdline").read_text() for child in children()]
    said += [
        repr(loader.state_dict()),
        repr(loader.dataset),
        repr(loader.dataset.lane_config),
        repr(data().files),
    ]
    said += [path.read_text() for path in (tmp_path / "bad").iterdir()]
    assert "broken" not in said[-1]
    assert any("not a line of JSON" in line for line in said)
    for fault in ("503", "reset", "stall", "404", "403"):
        web.fault = lambda path: None
        loader = run(retries=1)
        web.fault = lambda path, fault=fault: fault  # type: ignore[misc]
        with pytest.raises((OSError, RuntimeError, ValueError)) as error:
            list(loader)
        said.append("".join(traceback.format_exception(error.value)))
    web.fault = lambda path: None
    with pytest.raises(ValueError) as broken:
        list(PackedDataLoader(stream(data())))
    said += ["".join(traceback.format_exception(broken.value)), caplog.text]
    assert "trying again" in caplog.text
    sent = json.dumps([web.requests, web.headers])
    assert "canary" in sent, "it is used, or this test says nothing"
    assert "canary" not in "\n".join(said)


def children() -> list[int]:
    return [child.pid for child in multiprocessing.active_children() if child.pid]
