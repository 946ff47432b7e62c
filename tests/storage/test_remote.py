"""Shards behind HTTP and in object stores, on loopback: ranges, retries, refusals and secrets."""

from __future__ import annotations

import gc
import gzip
import hashlib
import json
import logging
import multiprocessing
import pickle
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from streampack import (
    DatatroveSource,
    FlatTokensSource,
    JSONLSource,
    MDSSource,
    MegatronSource,
    PackedDataLoader,
    TokenShardSource,
)
from streampack.fingerprint import plain
from streampack.sources import Reading, flat_tokens, megatron
from streampack.storage.ranges import Fetcher
from streampack.storage.read_ahead import NO_READ_AHEAD, ReadAhead
from streampack.storage.remote import RemoteStorage
from streampack.storage.retries import Refused, Retries
from streampack.tokenize.tokenize import tokenize
from tests.harness.files import write_datatrove, write_flat, write_megatron
from tests.harness.files import write_mds
from tests.harness.files import KINDS, packs, shards, source, stream, urls, used
from tests.harness.stores import Web, random_faults

ALONE = Reading(read_ahead=NO_READ_AHEAD)


# What is read.


@pytest.mark.parametrize("kind", KINDS)
def test_a_lane_reads_little_more_than_its_ranges(web: Web, kind: str) -> None:
    web.files = shards(kind, 6, 400)
    found = []
    data = source(kind, urls(web))
    assert len(web.requests) == 6, "one byte of each, for its size"
    for lane in range(2):
        found += list(data.read(Reading(lane, num_lanes=2)))
    assert sorted(row.data["i"] for row in found) == list(range(2400))
    assert web.bytes <= 1.05 * used(kind, web.files)
    assert all(ranged for _, ranged in web.requests)


@pytest.mark.parametrize("kind", KINDS)
def test_a_seek_reads_only_from_there(web: Web, kind: str) -> None:
    web.files = shards(kind, 1, 2000)
    data = source(kind, urls(web))
    reader = data.read(ALONE)
    found = [next(reader) for _ in range(1801)]
    before, web.bytes = web.bytes, 0
    [row] = [next(data.read(replace(ALONE, start=found[-1].cursor)))]
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


def test_forked_workers_read_after_their_parent_has_read(web: Web) -> None:
    """A forked child has none of its parent's threads, and must not wait for them. A spawned one gets a copy."""
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


def test_threads_that_read_ahead_do_not_keep_a_process_alive(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RemoteStorage, "block", 10_000)
    web.files = shards("jsonl", 2, 1000)
    web.fault = lambda path: None if len(web.requests) < 8 else "stall"
    next(source("jsonl", urls(web)).read(Reading()))
    reading = [thread for thread in threading.enumerate() if thread.name.startswith("read ahead")]
    assert reading
    assert all(thread.daemon for thread in reading)


# What is tried again.


@pytest.mark.parametrize("kind", ["gz", "parquet"])
def test_rows_stay_the_same_while_requests_fail(web: Web, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RemoteStorage, "block", 8192)
    web.files = shards(kind, 4, 60)
    whole = packs(source(kind, urls(web)))
    web.fault = random_faults(1)
    assert packs(source(kind, urls(web), timeout=0.2)) == whole
    assert len(set(web.faults)) >= 5, web.faults


def test_an_outage_names_shard_and_offset(web: Web) -> None:
    web.files = shards("parquet", 4, 100)
    data = source("parquet", urls(web), retries=3)
    running = stream(data, shuffle=False, num_lanes=1, read_ahead=0).stream()
    next(running)
    web.fault = lambda path: "503" if "002" in path else None
    with pytest.raises(OSError) as error:
        list(running)
    assert f"while reading {web.url}/c/002.parquet from row 0 on" in error.value.__notes__
    web.fault = lambda path: None
    assert list(running), "and when it is over, the stream goes on"


@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [
        ("404", ValueError, "HTTP 404, there is no such file"),
        ("403", PermissionError, "HTTP 403, access is denied"),
        ("400", OSError, "HTTP 400"),
    ],
)
def test_permanent_http_errors_are_not_retried(
    web: Web, status: str, kind: type[Exception], message: str
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
    """Change headers of a server, ``ETag`` and ``Content-Range``, by functions of their values."""
    handler: Any = web.server.RequestHandlerClass
    send = handler._send

    def _send(self: Any, status: int, data: bytes, headers: Any = None, promised: int | None = None) -> None:
        headers = {
            name: bend.get(name.replace("-", ""), str)(value) for name, value in (headers or {}).items()
        }
        send(self, status, data, headers, promised)

    monkeypatch.setattr(handler, "_send", _send)


def test_a_server_that_does_not_tell_sizes_is_refused(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    web.files = shards("jsonl", 1)
    bent(web, monkeypatch, ContentRange=lambda said: said.partition("/")[0] + "/*")
    [url] = urls(web)
    with pytest.raises(OSError) as error:
        source("jsonl", url)
    assert str(error.value) == (
        f"{url}: the server does not tell the file's size, by which a file that was cut off or has grown is noticed; "
        "serve the file with its size in Content-Range, or copy it to this machine"
    )
    assert len(web.requests) == 1, "it would say so again"


def test_a_weak_tag_names_the_same_version(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of several proxies may mark tags as weak, and a manifest may hold such a tag."""
    web.files = shards("jsonl", 2)
    strong = source("jsonl", urls(web)).fingerprint()
    marks = cycle(["W/", ""])
    bent(web, monkeypatch, ETag=lambda tag: next(marks) + tag)
    data = source("jsonl", urls(web))
    assert data.fingerprint() == strong
    lanes = [data.read(replace(ALONE, lane=lane, num_lanes=4)) for lane in range(4)]
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


@pytest.mark.parametrize(("kind", "change"), [("jsonl", "longer"), ("gz", "another"), ("parquet", "another")])
def test_a_shard_that_changes_during_a_run_is_refused(web: Web, kind: str, change: str) -> None:
    web.files = shards(kind, 2, 100)
    data = source(kind, urls(web))
    reader = data.read(ALONE)
    next(reader)
    last = list(web.files)[1]
    web.files[last] = b" " + web.files[last][change == "another" :]
    with pytest.raises(
        ValueError, match=f"{last} (has|is version).* when it was listed; a corpus must not change"
    ):
        list(reader)


def test_the_fingerprint_has_the_servers_tag_and_not_its_address(web: Web) -> None:
    web.files = shards("jsonl", 3)
    before = source("jsonl", urls(web)).fingerprint()
    web.files = {f"/moved{path}": content for path, content in web.files.items()}
    assert source("jsonl", urls(web)).fingerprint() == before
    web.files["/moved/c/001.jsonl"] = web.files["/moved/c/001.jsonl"].replace(b"a", b"b")
    assert source("jsonl", urls(web)).fingerprint() != before


# S3, and the others.


S3 = {"key": "canary-key", "secret": "canary-secret"}


def test_s3_through_a_listing(web: Web) -> None:
    pytest.importorskip("s3fs")
    kind, pattern = "parquet", "s3://bucket/c/*.parquet"
    web.files = {f"/bucket{path}": content for path, content in shards(kind, 6, 80).items()}
    options = {**S3, "endpoint_url": web.url}
    data = source(kind, pattern, storage_options=options)
    assert len(web.requests) <= 2, "the listing is enough"
    assert len(data.files) == 6
    packs(data)
    assert web.bytes <= 1.05 * used(kind, web.files) + 4000  # the listing
    last = list(web.files)[-1]
    data.fingerprint()
    web.files[last] = b" " + web.files[last][1:]
    with pytest.raises(ValueError, match=r"005.* is version .* and was .* when it was listed"):
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
        with pytest.raises(ValueError, match="001.jsonl has .* bytes and had .* when it was listed"):
            list(data.read(Reading()))
        with pytest.raises(ValueError, match=r"no file matches 'memory://c/\*.txt'"):
            source("jsonl", "memory://c/*.txt")
    finally:
        memory.rm("/c", recursive=True)


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz"])
def test_names_may_hold_the_marks_of_urls(tmp_path: Path, kind: str) -> None:
    """On this machine and in an object store, where no ``#`` begins a fragment."""
    import fsspec

    names = [f"part#1.{kind}", f"part.{kind}#2", f"part?a=1.{kind}", f"a%20b.{kind}", f"a b.{kind}"]
    pack = gzip.compress if kind.endswith("gz") else bytes
    stored = {name: i for i, name in enumerate(names) if not name.endswith("#2")}
    memory = fsspec.filesystem("memory")
    for i, name in enumerate(names):
        (tmp_path / name).write_bytes(pack(b'{"i": %d}\n' % i))
        memory.pipe(f"/m/{name}", pack(b'{"i": %d}\n' % i))
    try:
        data = JSONLSource(tmp_path)
        assert sorted(row.data["i"] for row in data.read(Reading())) == [0, 2, 3, 4]
        there = JSONLSource(f"memory://m/*.{kind}")
        assert {
            file.name: row.data["i"] for row in there.read(Reading()) for file in [there.files[row.row_id[0]]]
        } == stored
        assert any("part#1" in file.shown for file in there.files)
        both = JSONLSource(f"memory://m/part?*1.{kind}")
        assert [file.name for file in both.files] == [names[0], names[2]], "and it is a wildcard"
        assert both.files[1].shown == "memory://m/part", "it may begin a signature"
    finally:
        memory.rm("/m", recursive=True)


# Errors that are no lost connections.


@pytest.mark.parametrize("kind", [AttributeError, ValueError])
def test_an_error_that_will_not_pass_is_raised_at_once_with_its_place(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    tries = []

    def broken_reader(self: object, path: str, *_: object, **__: object) -> bytes:
        tries.append(path)
        raise kind("canary-secret")

    memory = MemoryFileSystem()
    for path, content in shards("jsonl", 1).items():
        memory.pipe(path, content)
    try:
        data = source("jsonl", "memory://c/*.jsonl")
        monkeypatch.setattr(MemoryFileSystem, "cat_file", broken_reader)
        with pytest.raises(Refused, match=kind.__name__) as error:
            list(data.read(ALONE))
        assert len(tries) == 1
        said = "".join(traceback.format_exception(error.value))
        assert "in broken_reader" in said
        assert "test_remote.py" in said
        assert "canary-secret" not in said
    finally:
        memory.rm("/c", recursive=True)


# Secrets.


@pytest.mark.parametrize("place", ["url", "s3"])
def test_a_secret_appears_nowhere(
    web: Web, place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in logs, errors, states and lists nor in a process's command line, whatever fails."""
    said: list[str] = []
    files = shards("jsonl", 3, 20)
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
        workers = 0 if "retries" in settings or place == "s3" else 2  # each makes a client, in a second
        return PackedDataLoader(stream(data(**settings), num_lanes=2, **quarantine), num_workers=workers)

    caplog.set_level(logging.DEBUG, "streampack")
    web.fault = random_faults(1, kinds=("503", "429", "reset", "short"))
    loader = run()
    for _ in loader:
        for child in children():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                said.append(Path(f"/proc/{child}/cmdline").read_text())
    said += [
        repr(loader.state_dict()),
        repr(loader.dataset),
        repr(loader.dataset.lane_config),
        repr(data().files),
    ]
    said += [path.read_text() for path in (tmp_path / "bad").iterdir()]
    assert "broken" not in said[-1]
    assert any("not a line of JSON" in line for line in said)
    for fault in ("503", "reset", "stall", "404", "403") if place == "url" else ("403",):
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


def test_missing_credentials_are_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoCredentialsError(Exception):
        """botocore's, which is known by its name."""

    def refuse(_: object) -> object:
        raise NoCredentialsError("Unable to locate credentials of AKIASECRET")

    storage = RemoteStorage("s3", options={}, patience=1.0)
    monkeypatch.setattr(storage, "filesystem", lambda: None)
    with pytest.raises(Refused) as error:
        storage._call("s3://bucket/rows.jsonl", refuse)
    assert str(error.value).startswith("s3://bucket/rows.jsonl: NoCredentialsError; set AWS_ACCESS_KEY_ID")
    assert "AKIASECRET" not in str(error.value)


INDEXED = ("tokens", "masked tokens", "mds", "mds.gz", "megatron", "datatrove", "flat")


def written(kind: str, folder: Path, rows: int, *, longest: int = 250) -> Path:
    """Write ``rows`` documents to three shards or more."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, 60_000, rng.integers(1, longest)) for _ in range(rows)]
    total = sum(map(len, documents))
    if "tokens" in kind:
        labels = [d if kind == "tokens" else np.where(rng.random(d.size) < 0.5, d, -100) for d in documents]
        data = [{"tokens": d, "labels": own} for d, own in zip(documents, labels, strict=True)]
        return tokenize(data, out=folder, lanes=1, shard_tokens=total // 3, dtype="uint16", progress=False)
    if kind == "megatron":
        return write_megatron(folder, [d.tolist() for d in documents], per_file=-(-rows // 3), dtype="uint16")
    if kind == "flat":
        for number in range(3):
            own = documents[number * rows // 3 : (number + 1) * rows // 3]
            write_flat(folder / f"{number}.bin", [token for d in own for token in (*d.tolist(), 0)])
        return folder
    if kind == "datatrove":
        losses = [rng.integers(0, 2, d.size).tolist() for d in documents]
        return write_datatrove(folder, [d.tolist() for d in documents], losses=losses, per_file=-(-rows // 3))
    data = [{"tokens": d.astype(np.uint16)} for d in documents]
    compression = "gz" if kind == "mds.gz" else None
    return write_mds(
        folder, data, {"tokens": "ndarray:uint16"}, per_shard=-(-rows // 3), compression=compression
    )


def published(folder: Path) -> dict[str, bytes]:
    return {f"/bucket/a/{path.name}": path.read_bytes() for path in folder.iterdir()}


def indexed(kind: str, place: str, web: Web, **settings: Any) -> Any:
    """Make a indexed of that kind, with short waits between retries."""
    make = maker(kind)
    url, options = f"{web.url}/bucket/a", None
    if place == "s3":
        pytest.importorskip("s3fs")
        url, options = "s3://bucket/a", {"key": "key", "secret": "secret", "endpoint_url": web.url}
    paths: Any = url
    if ending := {"megatron": ".bin", "datatrove": ".ds", "flat": ".bin"}.get(kind):
        names = sorted(Path(path).name for path in web.files if path.endswith(ending))
        paths = [f"{url}/{name}" for name in names]
    made: Any = make(paths, storage_options=options, **{"retries": 9, **settings})
    made.corpus = replace(made.corpus, retries=Retries(attempts=9, first=0.01, longest=0.05))
    return made


def maker(kind: str) -> Any:
    flat = partial(FlatTokensSource, eos_token_id=0, dtype="uint16")
    others: dict[str, Any] = {"megatron": MegatronSource, "datatrove": DatatroveSource, "flat": flat}
    return others.get(kind, TokenShardSource if "tokens" in kind else MDSSource)


def local(kind: str, folder: Path) -> Any:
    return maker(kind)(folder)


def all_rows(data: Any, num_lanes: int = 2, **reading: Any) -> list[Any]:
    lanes = [data.read(Reading(lane, num_lanes=num_lanes, **reading)) for lane in range(num_lanes)]
    return [plain(row.data) for lane in lanes for row in lane]


@pytest.mark.parametrize(("kind", "place"), [*((kind, "http") for kind in INDEXED[1:-1]), ("tokens", "s3")])
def test_little_more_than_the_ranges_is_read_while_requests_fail(
    web: Web, tmp_path: Path, kind: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RemoteStorage, "block", 4096)
    monkeypatch.setattr(megatron, "HEAD_BYTES", 64)  # as small a part of an index as of long ones
    here = local(kind, written(kind, tmp_path, 300))
    expected = all_rows(here, shuffle_window=16)
    web.files = published(tmp_path)
    data = indexed(kind, place, web)
    assert all_rows(data, shuffle_window=16) == expected
    assert web.bytes <= 1.05 * sum(map(len, web.files.values()))
    assert all(ranged for _, ranged in web.requests)
    web.fault = random_faults(1, 0.03)
    assert all_rows(indexed(kind, place, web, timeout=0.3), shuffle_window=16) == expected
    assert len(set(web.faults)) >= 3, web.faults


@pytest.mark.parametrize("kind", ["masked tokens", "mds", "megatron", "datatrove", "flat"])
def test_a_seek_into_an_indexed_file_reads_only_from_there(
    web: Web, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flat_tokens, "ONE_DOCUMENT", 512)
    web.files = published(written(kind, tmp_path, 900))
    data = indexed(kind, "http", web)
    found = list(data.read(ALONE))
    whole, web.bytes = web.bytes, 0
    [row] = [next(data.read(replace(ALONE, start=found[895].cursor)))]
    assert plain(row.data) == plain(found[895].data)
    assert web.bytes < 0.01 * whole, "the last five documents of the last part"
    web.bytes = 0
    assert plain(data.fetch(row.row_id)) == plain(row.data)
    assert web.bytes < 1000


@pytest.mark.parametrize("kind", ["masked tokens", "mds.gz"])
def test_the_next_part_is_fetched_while_this_one_is_read(
    web: Web, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except in the first part, each block was requested before it is needed, in shuffled parts too."""
    monkeypatch.setattr(RemoteStorage, "block", 1000)
    web.files = published(written(kind, tmp_path, 400))
    data, late, asked, most = indexed(kind, "http", web), [], [], [0]
    take = Fetcher.take

    def watched(fetcher: Fetcher, block: Any) -> bytes:
        asked.append(block)
        most[0] = max(most[0], sum(stop - start for _, start, stop in fetcher.in_flight))
        if block not in fetcher.in_flight:
            late.append(block)
        return take(fetcher, block)

    monkeypatch.setattr(Fetcher, "take", watched)
    for _ in data.read(Reading(shuffle_window=4, read_ahead=ReadAhead(20_000, 0, 0, 20_000, 20_000))):
        time.sleep(0.002)  # an answer on loopback takes less
    assert len(asked) > 100
    assert len(late) <= 4, "the first part's header, offsets, mask and first block"
    assert 10_000 < most[0] <= 20_000
    assert web.bytes <= 1.05 * sum(map(len, web.files.values())), "and nothing twice"


def test_an_indexed_shard_that_changes_is_refused(web: Web, tmp_path: Path) -> None:
    """The shard has the same size, and no tag in the index: its ETag differs from the first one seen."""
    web.files = published(written("mds", tmp_path, 300))
    data = indexed("mds", "http", web)
    list(data.read(ALONE))
    last = max(path for path in web.files if "index" not in path)
    web.files[last] = web.files[last][:-1] + bytes([web.files[last][-1] ^ 1])
    with pytest.raises(
        ValueError, match=f"{last} is version .* when it was listed; a corpus must not change"
    ):
        list(data.read(ALONE))
