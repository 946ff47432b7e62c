"""Shards behind HTTP and in object stores: what is read of them and how much, by what names, and what is never said.

A memory file system with versions stands for the stores; GCS and Azure on loopback, where they are installed.
"""

from __future__ import annotations

import io
import json
import logging
import multiprocessing
import pickle
import traceback
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow.parquet as pq
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
from streampack.sources import Reading
from streampack.storage.corpus import listed_by
from streampack.tokenize import tokenize
from tests.harness.conformance import check_resume_everywhere, lists, read_with_cursors
from tests.harness.corpus import identity_of, plain, read_all
from tests.harness.files import (
    COLUMNS,
    shards,
    small_pieces,
    source,
    stream,
    write_datatrove,
    write_flat,
    write_mds,
    write_megatron,
)
from tests.harness.stores import Store, Web, lacking, random_faults, running, short_waits

KINDS = ("jsonl", "gz", "parquet")
S3 = {"key": "canary-key", "secret": "canary-secret"}


@pytest.fixture(params=["versioned", "gs", "az"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if (what := lacking(request.param)) is not None:
        pytest.skip(what)
    with running(request.param, tmp_path) as found:
        yield found


def urls(web: Web) -> list[str]:
    return [web.url + path for path in web.files]


def packs(data: Any, **settings: Any) -> list[Any]:
    return [plain(pack) for pack in stream(data, **settings).stream()]


def used(kind: str, files: dict[str, bytes]) -> int:
    """Bytes that a reader needs: whole files; of Parquet the footers and the columns that are read."""
    if kind != "parquet":
        return sum(map(len, files.values()))
    total = 0
    for raw in files.values():
        footer = pq.read_metadata(io.BytesIO(raw))
        total += footer.serialized_size + 8
        for group in map(footer.row_group, range(footer.num_row_groups)):
            columns = map(group.column, range(group.num_columns))
            total += sum(c.total_compressed_size for c in columns if c.path_in_schema in COLUMNS)
    return total


@pytest.mark.parametrize("kind", KINDS)
def test_a_seek_reads_only_from_there(web: Web, kind: str) -> None:
    web.files = shards(kind, 1, 2000)
    data = source(kind, urls(web))
    found, cursors = read_with_cursors(data.read(Reading()))
    whole, web.bytes = web.bytes, 0
    row = next(data.read(Reading(start=cursors[1990])))
    assert row == found[1990]
    assert web.bytes <= {"jsonl": 0.1, "parquet": 0.35, "gz": 1}[kind] * whole, (
        "of Parquet, a row group of four"
    )
    web.bytes = 0
    assert data.fetch_many([row.row_id]) == [row.data]
    assert kind != "jsonl" or web.bytes <= 4096
    assert data.locate(row.row_id).startswith(web.url)


def test_forked_workers_read_after_their_parent_has_read(web: Web) -> None:
    """A forked child has none of its parent's threads, and must not wait for them. A spawned one gets a copy."""
    web.files = shards("jsonl", 4)
    data = source("jsonl", urls(web))
    expected = packs(data)
    loader = PackedDataLoader(stream(data), num_workers=2)
    assert sum(len(batch.tokens) for batch in loader) == len(expected)
    assert packs(pickle.loads(pickle.dumps(data))) == expected, "and a spawned one gets its own"


def test_s3_through_a_listing(web: Web) -> None:
    pytest.importorskip("s3fs")
    kind, pattern = "parquet", "s3://bucket/c/*.parquet"
    web.files = {f"/bucket{path}": content for path, content in shards(kind, 6, 80).items()}
    options = {**S3, "endpoint_url": web.url}
    data = source(kind, pattern, storage={"options": options})
    assert len(web.requests) <= 2, "the listing is enough"
    assert len(data.files) == 6
    packs(data)
    assert web.bytes <= 1.05 * used(kind, web.files) + 4000  # the listing


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_of_a_listing_and_resume_at_every_pack(store: Store, kind: str) -> None:
    for name, raw in shards(kind, 3).items():
        store.put(name.rpartition("/")[2], raw)
    data = source(kind, f"{store.url}/*.{kind}", storage={"options": store.options})
    assert [file.name for file in data.files] == [f"00{i}.{kind}" for i in range(3)]
    assert all(file.tag for file in data.files), "the listing has versions"
    assert sorted(row["i"] for row in read_all(data, num_lanes=2)) == list(range(120))
    named = source(
        kind, [f"{store.url}/{file.name}" for file in data.files], storage={"options": store.options}
    )
    assert identity_of(named) == identity_of(data)
    assert len(check_resume_everywhere(lambda: stream(data), packs=4)) > 4
    with pytest.raises(ValueError, match="no file matches"):
        source(kind, f"{store.url}/*.txt", storage={"options": store.options})


# Files with an index.

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


def maker(kind: str) -> Any:
    flat = partial(FlatTokensSource, eos_token_id=0, dtype="uint16")
    others: dict[str, Any] = {"megatron": MegatronSource, "datatrove": DatatroveSource, "flat": flat}
    return others.get(kind, TokenShardSource if "tokens" in kind else MDSSource)


def indexed(kind: str, place: str, web: Web, **settings: Any) -> Any:
    """Make a source of that kind, that is patient."""
    url, options = f"{web.url}/bucket/a", None
    if place == "s3":
        pytest.importorskip("s3fs")
        url, options = "s3://bucket/a", {**S3, "endpoint_url": web.url}
    paths: Any = url
    if ending := {"megatron": ".bin", "datatrove": ".ds", "flat": ".bin"}.get(kind):
        names = sorted(Path(path).name for path in web.files if path.endswith(ending))
        paths = [f"{url}/{name}" for name in names]
    return maker(kind)(paths, storage={"options": options or {}, **settings})


@pytest.mark.parametrize(("kind", "place"), [*((kind, "http") for kind in INDEXED[1:-1]), ("tokens", "s3")])
def test_little_more_than_the_ranges_is_read_while_requests_fail(
    web: Web, tmp_path: Path, kind: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_waits(monkeypatch)
    small_pieces(monkeypatch, block=4096)
    reading: dict[str, Any] = {"num_lanes": 2, "shuffle_window": 16}
    expected = lists(read_all(maker(kind)(written(kind, tmp_path, 300)), **reading))
    web.files = published(tmp_path)
    data = indexed(kind, place, web)
    assert lists(read_all(data, **reading)) == expected
    assert web.bytes <= 1.05 * sum(map(len, web.files.values()))
    web.fault = random_faults(1, 0.03)
    assert lists(read_all(indexed(kind, place, web, timeout=0.3), **reading)) == expected
    assert len(set(web.faults)) >= 3, web.faults


@pytest.mark.parametrize("kind", ["tokens", "megatron", "datatrove", "flat"])
def test_one_rank_looks_at_files_behind_urls_for_all(web: Web, tmp_path: Path, kind: str) -> None:
    written(kind, tmp_path, 30)
    web.files = published(tmp_path)
    told: list[tuple[str, Any]] = []

    def first(work: Any, /, *, of: str) -> Any:
        told.append((of, work()))
        return told[-1][1]

    def another(work: Any, /, *, of: str) -> Any:
        known, found = told.pop(0)
        assert known == of
        return found

    with listed_by(first):
        files = [*indexed(kind, "http", web).files]
    web.requests.clear()
    with listed_by(another):
        assert [*indexed(kind, "http", web).files] == files
    assert not web.requests
    assert not told
    assert [*indexed(kind, "http", web).files] == files
    assert web.requests, "outside of it, each process looks for itself"


# Secrets, and what is not read.


@pytest.mark.parametrize("place", ["url", "s3"])
def test_a_secret_appears_nowhere(
    web: Web, place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in logs, errors, states and lists nor in a process's command line, whatever fails."""
    short_waits(monkeypatch)
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
        return source("jsonl", paths, storage={"options": options, "timeout": 1.0, **settings})

    def run(**settings: Any) -> PackedDataLoader:
        skip_bad = tmp_path / "bad" if "max_outage" not in settings else False
        workers = 0 if "max_outage" in settings or place == "s3" else 2  # each makes a client, in a second
        return PackedDataLoader(stream(data(**settings), num_lanes=2, skip_bad=skip_bad), num_workers=workers)

    caplog.set_level(logging.DEBUG, "streampack")
    web.fault = random_faults(1, kinds=("503", "429", "reset", "short"))
    loader = run()
    for _ in loader:
        for child in (each.pid for each in multiprocessing.active_children()):
            with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                said.append(Path(f"/proc/{child}/cmdline").read_text())
    said += [
        repr(loader.state_dict()),
        repr(loader.dataset),
        repr([*data().files]),
    ]
    said += [path.read_text() for path in (tmp_path / "bad").iterdir()]
    assert "broken" not in said[-1]
    assert any("not a line of JSON" in line for line in said)
    for fault in ("503", "reset", "stall", "404", "403") if place == "url" else ("403",):
        web.fault = lambda path: None
        loader = run(max_outage=0.02)
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


@pytest.mark.parametrize("index", ["[]", "{", '{"shards": []}', '{"shards": [{"name": "../x", "size": 9}]}'])
def test_errors_of_an_index_hold_no_secret(index: str, tmp_path: Path) -> None:
    """Neither those of broken indexes nor those of missing shards."""
    with running("versioned", tmp_path):
        fsspec.filesystem("versioned").pipe("/host/folder/index.json?key=canary", index.encode())
        for make_source in (TokenShardSource, MDSSource):
            with pytest.raises(ValueError) as caught:
                make_source("versioned://host/folder?key=canary", storage={"max_outage": 0})
            assert "canary" not in str(caught.value)


def test_only_stores_and_registered_file_systems_are_read() -> None:
    """A file system that fsspec knows is not one that a user has registered, and chains of them are none."""
    fsspec.filesystem("file")
    for scheme in ("file", "zip", "reference", "simplecache", "unheard", "gs::file", "gs://a::zip",
                   "zip://a::https://me:canary@host"):  # fmt: skip
        with pytest.raises(ValueError, match="are refused: only plain ones of .* and no chains") as error:
            JSONLSource(f"{scheme}://a")
        assert "canary" not in str(error.value)


@pytest.mark.parametrize(
    ("scheme", "error", "message"),
    [
        ("gs", ImportError("canary"), r"reading gs:// needs more: pip install 'streampack\[remote\]'"),
        ("abfs", ImportError("canary"), r"reading abfs:// needs more: pip install 'streampack\[remote\]'"),
        (
            "az",
            ValueError("canary"),
            r"the storage's options do not fit az:// \(ValueError\): it may lack the account",
        ),
    ],
)
def test_a_missing_package_and_options_that_do_not_fit_are_named_at_once(
    scheme: str, error: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(scheme: str, **options: Any) -> Any:
        raise error

    monkeypatch.setattr(fsspec, "filesystem", fails)
    with pytest.raises((ImportError, OSError), match=message) as caught:
        JSONLSource(f"{scheme}://bucket/a.jsonl", storage={"options": {"sas_token": "canary"}})
    assert "canary" not in str(caught.value)
