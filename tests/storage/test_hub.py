"""Shards of a repository of the Hub, on loopback: ranges, commits, refusals and secrets."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streampack import PackedDataLoader, TokenShardSource
from streampack.sources import Reading
from streampack.tokenize import tokenize
from tests.harness.conformance import content
from tests.harness.corpus import identity_of, plain
from tests.harness.files import shards, small_pieces, source, stream
from tests.harness.stores import Hub, random_faults, short_waits

TOKEN = "hf_canarytoken"


DATA = "hf://datasets/org/name"


def packs(data: Any, **settings: Any) -> list[Any]:
    return [plain(pack) for pack in stream(data, **settings).stream()]


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub(token=TOKEN) as served:
        yield served


def committed(hub: Hub, kind: str, count: int = 4, per_shard: int = 40, **options: Any) -> dict[str, bytes]:
    """Commit shards to main, beside a README. Returns them by their path in the repository."""
    files = {path.lstrip("/"): raw for path, raw in shards(kind, count, per_shard, **options).items()}
    hub.commit({"README.md": b"canary", "c/notes.txt": b"canary", **files})
    return files


def data(hub: Hub, kind: str, *, revision: str = "", **settings: Any) -> Any:
    pattern = f"{DATA}{revision}/c/*.{'jsonl.gz' if kind == 'gz' else kind}"
    return source(kind, pattern, storage={"options": hub.options, **settings})


# What is read.


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_little_more_than_the_ranges_is_read_while_requests_fail(
    hub: Hub, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = committed(hub, kind, 4, 240)
    made = data(hub, kind)
    assert [file.name for file in made.files] == [path.removeprefix("c/") for path in files]
    about, hub.web.bytes = hub.bytes, 0
    whole = packs(made)
    for path, raw in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(raw)
    assert whole == packs(source(kind, [str(tmp_path / path) for path in files])), "as here"
    assert hub.bytes <= 1.05 * sum(map(len, files.values()))
    assert about < 5000, "commit and listing"
    read = [request for request in hub.web.requests if "/resolve/" in request[0]]
    assert all(ranged for _, ranged in [*read, *hub.store.requests])
    assert bool(hub.store.requests) == (kind == "parquet"), "large files lie elsewhere"
    small_pieces(monkeypatch, block=8192)
    short_waits(monkeypatch)
    made = data(hub, kind, timeout=0.6)
    hub.web.fault, hub.store.fault = random_faults(1, 0.03), random_faults(2, 0.03)
    assert packs(made) == whole
    assert len({*hub.web.faults, *hub.store.faults}) >= 4


@pytest.mark.parametrize("revision", ["", "@v1.0", "@refs%2Fconvert%2Fparquet", "@refs/convert/parquet"])
def test_a_path_is_pinned_to_a_commit(hub: Hub, revision: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "streampack")
    files = committed(hub, "jsonl")
    [head] = hub.commits
    for branch in ("v1.0", "refs/convert/parquet"):
        hub.branches[branch] = head
    named = source("jsonl", [f"{DATA}{revision}/{path}" for path in files], storage={"options": hub.options})
    assert [file.path for file in named.files] == [f"{DATA}@{head}/{path}" for path in files]
    commits = [path for path, _ in hub.web.requests if "expand=sha" in path]
    assert len(commits) == 1, "asked once for all"
    assert len([path for path, _ in hub.web.requests if "/tree/" in path]) == 1, "and listed once"
    assert next(r.getMessage() for r in caplog.records).endswith(f" is read at commit {head}")
    assert [*named.files] == [*data(hub, "jsonl", revision=f"@{head}").files], "which names it already"
    assert len(list(named.read(Reading()))) == 160


def test_a_manifest_and_token_shards(hub: Hub, tmp_path: Path) -> None:
    files = committed(hub, "jsonl")
    lines = "".join(json.dumps({"name": Path(path).name}) + "\n" for path in files)
    rows = [{"tokens": [i] * 20, "labels": [i] * 20} for i in range(50)]
    folder = tokenize(rows, out=tmp_path, lanes=2, progress=False)
    tokens = {f"t/{path.name}": path.read_bytes() for path in folder.iterdir()}
    hub.commit({**files, **tokens, "c/shards.txt": lines.encode()})
    listed = source("jsonl", manifest=f"{DATA}/c/shards.txt", storage={"options": hub.options})
    there = TokenShardSource(f"{DATA}/t", storage={"options": hub.options})
    hub.commit({"README.md": b"all is gone"})
    assert len(list(listed.read(Reading()))) == 160
    assert sorted(row.data["tokens"][0] for row in there.read(Reading())) == list(range(50))


# A branch that moves.


def test_a_branch_that_moves_does_not_move_a_run(hub: Hub) -> None:
    kind = "parquet"
    committed(hub, kind, 4, 40)
    [old] = hub.commits
    whole = list(map(content, stream(data(hub, kind))))
    running = stream(data(hub, kind), prefetch=0)
    iterator = iter(running)
    got = [content(next(iterator)) for _ in range(5)]
    state = running.state_dict()
    committed(hub, kind, 4, 40, text=100)
    assert [*got, *map(content, iterator)] == whole
    with pytest.raises(ValueError, match="corpus"):
        stream(data(hub, kind)).load_state_dict(state)
    again = stream(data(hub, kind, revision=f"@{old}"))
    again.load_state_dict(state)
    assert [*got, *map(content, again)] == whole


def test_a_commit_that_leaves_the_shards_alone_changes_nothing(hub: Hub) -> None:
    files = committed(hub, "jsonl")
    before = data(hub, "jsonl")
    hub.commit({**files, "README.md": b"better words"})
    after = data(hub, "jsonl")
    assert before.files[0].path != after.files[0].path
    assert identity_of(before) == identity_of(after)


def test_a_commit_that_is_gone(hub: Hub) -> None:
    """A squash of the history removes commits."""
    committed(hub, "jsonl", 1)
    made = data(hub, "jsonl")
    [old] = hub.commits
    hub.commits.clear()
    message = f"{DATA}@{old}/c/000.jsonl, byte 0: there is no such file"
    with pytest.raises(ValueError, match=message):
        list(made.read(Reading()))


# What is refused, and how often it is tried.


def test_missing_repositories_and_files(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once: none of them would be there if it were tried again."""
    monkeypatch.setattr("streampack.storage.retries.sleep", lambda seconds: pytest.fail("it is tried again"))
    committed(hub, "jsonl")
    missing = "there is no such repository or revision, or it needs a token"
    for path, message in {
        "hf://datasets/org/other/c/*.jsonl": missing,
        f"{DATA}@v9/c/*.jsonl": missing,
        f"{DATA}/c/*.txt.gz": "no file matches",
        f"{DATA}/c/999.jsonl": "there is no such file",
        f"{DATA}/d/999.jsonl": "there is no such file",
        f"hf://gpt2@{'0' * 40}/a.jsonl": "huggingface_hub refuses the path; name the repository with its namespace",
        "hf://datasets/squad@main/*.jsonl": "huggingface_hub refuses the path; name the repository with its namespace",
        "hf://buckets/org/name/a.jsonl": "a bucket has no commits, so its files could change during a run",
    }.items():
        with pytest.raises((FileNotFoundError, ValueError), match=message):
            source("jsonl", path, storage={"options": hub.options})
    with pytest.raises(FileNotFoundError, match=missing):
        source("jsonl", f"{DATA}/c/*.jsonl", storage={"options": {**hub.options, "token": False}})


@pytest.mark.parametrize(("fault", "message"), [("503", "HTTP 503"), ("200", "JSONDecodeError")])
def test_an_outage_at_the_beginning_is_not_taken_for_a_bad_path(hub: Hub, fault: str, message: str) -> None:
    """A proxy may answer instead, by a page of its own."""
    committed(hub, "jsonl", 1)
    hub.web.fault = lambda path: fault
    with pytest.raises(OSError, match=message):
        data(hub, "jsonl", max_outage=0)


def test_an_outage_is_retried_as_often_as_set(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub's own file system would try five times below our own tries."""
    short_waits(monkeypatch)
    committed(hub, "jsonl", 1)
    made = data(hub, "jsonl", max_outage=0)
    hub.web.fault = lambda path: "503"
    before = len(hub.web.requests)
    with pytest.raises(OSError, match=r"c/000.jsonl: HTTP 503"):
        packs(made, prefetch=0)
    assert len(hub.web.requests) - before == 1


# What is never said.


def test_the_token_appears_nowhere(
    hub: Hub, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_waits(monkeypatch)
    files = committed(hub, "parquet")
    caplog.set_level(logging.DEBUG, "streampack")
    hub.web.fault = hub.store.fault = random_faults(1, kinds=("503", "429", "reset", "short"))
    loader = PackedDataLoader(stream(data(hub, "parquet"), num_lanes=2), num_workers=2)
    assert sum(len(batch.tokens) for batch in loader) == len(packs(data(hub, "parquet")))
    said = [repr(loader.state_dict()), repr(loader.dataset)]
    hub.web.fault = hub.store.fault = lambda path: None
    made = data(hub, "parquet", max_outage=0)
    said += [repr([*made.files]), made.locate((0, 0))]
    for fault in ("503", "reset", "403", "404"):
        hub.web.fault = hub.store.fault = lambda path, fault=fault: fault  # type: ignore[misc]
        with pytest.raises(
            ValueError if fault == "404" else OSError
        ) as error:  # files that are gone are told at once
            packs(made, prefetch=0)
        said.append("".join(traceback.format_exception(error.value)))
        with pytest.raises((OSError, ValueError)) as error:
            data(hub, "parquet", max_outage=0)
        said.append("".join(traceback.format_exception(error.value)))
    said.append("\n".join(r.getMessage() for r in caplog.records if r.name.startswith("streampack")))
    assert "trying again" in said[-1]
    assert all(f"Bearer {TOKEN}" in headers.values() for headers in map(lowered, hub.web.headers)), (
        "it is used"
    )
    assert len(hub.store.requests) >= len(files)
    assert TOKEN not in json.dumps(hub.store.headers), "and not sent on to the other host"
    assert any("canary-signature" in path for path, _ in hub.store.requests)
    assert "canary" not in "\n".join(said)


def lowered(headers: dict[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}
