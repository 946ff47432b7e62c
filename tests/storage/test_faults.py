"""Storage that fails for a moment costs a moment; an outage costs its budget; what fails for good is named at once."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import traceback
import tracemalloc
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import cycle
from pathlib import Path
from ssl import SSLCertVerificationError
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.asyn import AsyncFileSystem

from streampack import Holdout, JSONLSource, MDSSource, Mix, PackedDataLoader
from streampack.sources import Reading
from tests.harness.corpus import in_memory, plain, recorded, rows, write
from tests.harness.files import shards, small_pieces, source, stream
from tests.harness.stores import Reply, Store, Versioned, Web, random_faults, running, short_waits
from tests.harness.threads import ThreadSync, on_ranks

WAITS = [0.5, 1, 2, 4, 8, 16]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let waits pass at once, and list them."""
    return short_waits(monkeypatch)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with running("versioned", tmp_path) as found:
        yield found


def filled(store: Store, kind: str = "jsonl", count: int = 1, per_shard: int = 40, **settings: Any) -> Any:
    """Put shards into a store, and return a source of them."""
    for name, content in shards(kind, count, per_shard).items():
        store.put(name.rpartition("/")[2], content)
    return source(kind, f"{store.url}/*.{'jsonl.gz' if kind == 'gz' else kind}", **settings)


def fault(act: Callable[[str, int, int], bytes | None]) -> None:
    """Let ``act`` look at each read of the store: it may raise, or return other bytes."""
    Versioned.fault = staticmethod(act)


def failing(times: int, error: Callable[[], BaseException]) -> None:
    """Let so many reads fail."""
    left = [times]

    def read(path: str, start: int, stop: int) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise error()

    fault(read)


def packs(data: Any, **settings: Any) -> list[Any]:
    return [plain(pack) for pack in stream(data, **settings).stream()]


# Trying again.


@pytest.mark.parametrize("error", [ConnectionResetError, TimeoutError, RuntimeError])
@pytest.mark.parametrize("times", [1, 5])
def test_a_read_is_tried_again_until_it_succeeds(
    store: Store, waits: list[float], times: int, error: type[Exception]
) -> None:
    data = filled(store)
    failing(times, error)
    assert len(packs(data, prefetch=0)) > 5
    assert len(waits) == times


@pytest.mark.parametrize("max_outage", [0, 2])
def test_waits_double_each_with_its_jitter_and_the_last_error_is_raised(
    store: Store, waits: list[float], max_outage: int
) -> None:
    """The users' generators are not touched."""
    data, found = filled(store, storage={"max_outage": max_outage}), []
    before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002 - the global one must not change
    for _ in range(60):
        failing(10**6, OSError)
        with pytest.raises(OSError, match=r"versioned://bucket/000.jsonl: OSError"):
            packs(data, prefetch=0)
        found.append(list(waits))
        waits.clear()
    if not max_outage:
        assert not any(found)
    else:
        assert np.allclose([sum(each) for each in found], 120, atol=2)
        shares = np.array([each[: len(WAITS)] for each in found]) / WAITS
        assert (shares >= 0.5).all()
        assert (shares <= 1).all()
        assert (np.ptp(shares, axis=0) > 0.3).all(), "a thousand ranks do not come back at once"
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # noqa: NPY002


@pytest.mark.parametrize(
    ("asked_for", "times", "expected"), [("3", 2, [3.0, 3.0]), ("10", 99, [10.0, 5.0]), ("0.1", 1, [0.5])]
)
def test_a_server_that_names_a_wait_is_waited_for_within_the_budget(
    waits: list[float], asked_for: str, times: int, expected: list[float]
) -> None:
    """Our own wait, if that is longer; and one last try when the budget is used up."""
    with Web(shards("jsonl", 1)) as web:
        data = source("jsonl", web.url + next(iter(web.files)), storage={"max_outage": 0.25})
        busy = Reply(429, headers={"Retry-After": asked_for})
        begun = len(web.requests)
        web.route = lambda path, *_: busy if len(web.requests) - begun <= times else path
        if times == 99:
            with pytest.raises(OSError, match="HTTP 429"):
                packs(data, prefetch=0)
            assert len(web.requests) - begun == 3
        else:
            assert packs(data, prefetch=0)
    assert waits == pytest.approx(expected, rel=0.5 if asked_for == "0.1" else 0.05)


@pytest.mark.parametrize("kind", ["gz", "parquet"])
def test_rows_stay_the_same_while_requests_fail_in_all_ways(
    kind: str, waits: list[float], monkeypatch: pytest.MonkeyPatch, store: Store
) -> None:
    small_pieces(monkeypatch, block=8192)
    with Web(shards(kind, 4, 60)) as web:
        urls = [web.url + path for path in web.files]
        whole = packs(source(kind, urls))
        web.fault = random_faults(1)
        assert packs(source(kind, urls, storage={"timeout": 0.2})) == whole
        assert len(set(web.faults)) >= 5, web.faults
    data = filled(store, kind, 4, 60)
    turns = cycle(["error", "short", None, "timeout", None])

    def act(path: str, start: int, stop: int) -> bytes | None:
        what = next(turns)
        if what is not None and what != "short":
            raise OSError("canary: reset") if what == "error" else TimeoutError
        return b"{" if what == "short" else None

    fault(act)
    assert packs(data) == whole


def test_a_failure_names_the_place_and_the_stream_goes_on_when_it_is_over(
    store: Store, waits: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    small_pieces(monkeypatch, block=2048)
    data = filled(store)
    settings: dict[str, Any] = {"num_lanes": 1, "shuffle": False, "prefetch": 0}
    expected = packs(data, **settings)
    found, states = [], {}
    running = recorded(stream(data, **settings).events(), states)

    def behind(path: str, start: int, stop: int) -> None:
        if start >= 6000:
            raise OSError("reset")

    fault(behind)
    with caplog.at_level(logging.WARNING, "streampack"), pytest.raises(OSError) as error:
        found.extend(map(plain, running))
    note = error.value.__notes__[-1]
    offset = int(
        note.removeprefix("while reading versioned://bucket/000.jsonl from byte ").removesuffix(" on")
    )
    assert 4000 < offset < 8000
    logged = [message for message in caplog.messages if "trying again" in message]
    assert len(logged) == len(waits) >= 5
    assert f"; trying again in {waits[0]:.1f} s, giving up in 30 s" in logged[0]
    fault(lambda *_: None)
    found.extend(map(plain, recorded(stream(data, **settings).events(lane_states=states), {})))
    assert found == expected


# What fails for good. Nothing of the libraries' own errors is shown, as they hold URLs and headers.


class HttpError(Exception):
    """An error as gcsfs raises it."""

    def __init__(self, code: int) -> None:
        super().__init__("canary")
        self.code = code


class NoCredentialsError(Exception):
    """botocore's, which is known by its name."""


class Failing(AsyncFileSystem):  # type: ignore[misc]
    """A file system that raises, or does not answer."""

    protocol = "failing"
    error: Exception | None = None

    async def _cat_file(self, path: str, start: Any = None, end: Any = None, **settings: Any) -> bytes:
        if self.error is None:
            await asyncio.sleep(60)
        raise self.error or OSError

    async def _info(self, path: str, **settings: Any) -> dict[str, Any]:
        return {"name": path, "size": 9, "type": "file", "etag": '"1"'}


ERRORS: dict[str, tuple[Exception | None, type[Exception], str, bool]] = {
    "no answer": (None, TimeoutError, "no answer within 0.2 s", True),
    "503": (HttpError(503), OSError, "HTTP 503", True),
    "a bug that may pass": (RuntimeError("canary"), ConnectionError, "RuntimeError", True),
    "forbidden": (OSError("Forbidden: canary"), PermissionError, "access is denied", False),
    "gone": (FileNotFoundError("canary"), FileNotFoundError, "there is no such file", False),
    "credentials": (
        NoCredentialsError("canary"),
        OSError,
        "NoCredentialsError; set AWS_ACCESS_KEY_ID",
        False,
    ),
    "a bug": (AttributeError("canary"), OSError, "AttributeError", False),
    "a wrong value": (ValueError("canary"), OSError, "ValueError", False),
    "another's certificate": (SSLCertVerificationError("canary"), OSError, "SSLCertVerificationError", False),
}
"""What a library raises -> the error and what it says, and whether the read is tried again."""


@pytest.mark.parametrize("case", ERRORS)
def test_errors_of_libraries_tell_whether_another_try_may_help_and_no_secrets(
    case: str, waits: list[float]
) -> None:
    error, kind, message, again = ERRORS[case]
    fsspec.register_implementation("failing", Failing, clobber=True)
    Failing.error = error
    data = JSONLSource("failing://b/a.jsonl?key=canary", storage={"max_outage": 0.02, "timeout": 0.2})
    with pytest.raises(kind) as caught:
        packs(data, prefetch=0)
    assert str(caught.value).startswith("failing://b/a.jsonl")
    assert message in str(caught.value)
    assert bool(waits) == again
    said = "".join(traceback.format_exception(caught.value))
    assert "canary" not in said


SERVED: dict[str, tuple[str, str]] = {
    "404": ("HTTP 404, there is no such file", "ValueError"),
    "403": ("HTTP 403, access is denied", "PermissionError"),
    "400": ("HTTP 400", "Refused"),
    "whole": ("the server sends whole files only; serve them with range requests", "Refused"),
}


@pytest.mark.parametrize("case", SERVED)
def test_what_a_web_server_refuses_is_not_asked_for_again(case: str) -> None:
    message, kind = SERVED[case]
    with Web(shards("jsonl", 1)) as web:
        if case == "whole":
            web.ranges = False
        else:
            web.fault = lambda path: case
        [url] = [web.url + path for path in web.files]
        with pytest.raises((OSError, ValueError)) as error:
            packs(source("jsonl", url), prefetch=0)
        assert str(error.value).startswith(f"{url}: ")
        assert message in str(error.value)
        assert type(error.value).__name__ == kind
        assert len(web.requests) <= 3, "a look is a HEAD, and a GET if that is refused"


# Sizes that lie.


@pytest.mark.parametrize("size", [10**16, 10**19])
@pytest.mark.parametrize("told_by", ["server", "manifest", "index"])
def test_a_file_of_a_size_that_no_file_has_is_refused(tmp_path: Path, told_by: str, size: int) -> None:
    with Web(shards("jsonl", 1)) as web:
        [name] = web.files
        web.bend["Content-Length"] = lambda length: str(size)
        with pytest.raises(ValueError, match=rf"{size:,} bytes, and a file has 281,474,976,710,656 at most"):
            if told_by == "server":
                JSONLSource(web.url + name)
            elif told_by == "manifest":
                (tmp_path / "manifest").write_text(f'{{"name": "{name[1:]}", "size": {size}}}')
                JSONLSource(web.url, manifest=tmp_path / "manifest")
            else:
                columns = {"column_names": ["i"], "column_encodings": ["int"], "column_sizes": [8]}
                (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": [{
                    "format": "mds", "version": 2, "samples": 3, "compression": None, **columns,
                    "raw_data": {"basename": "a.mds", "bytes": size, "hashes": {}}}]}))  # fmt: skip
                MDSSource(in_memory(tmp_path))


def test_a_lane_has_few_parts_whatever_size_a_file_has(tmp_path: Path) -> None:
    """Parts of 1 GiB each would be 262,144 of them, and more take seconds and gigabytes."""
    with Web(shards("jsonl", 1)) as web:
        [name] = web.files
        (tmp_path / "manifest").write_text(f'{{"name": "{name[1:]}", "size": {1 << 48}}}')
        source = JSONLSource(web.url, manifest=tmp_path / "manifest", storage={"max_outage": 0})
        tracemalloc.start()
        try:
            with pytest.raises(ValueError, match=f"{name}.* bytes and had {1 << 48}"):
                next(source.read(Reading(0, num_lanes=8)))
            assert tracemalloc.get_traced_memory()[1] < 16 << 20
        finally:
            tracemalloc.stop()
        assert [len(parts) for parts in source.corpus_list(8).lanes] == [16] * 8


# Outages.


class Clock:
    """Time that passes in waits, and in requests; the store does not answer in ``down`` (from, to)."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *down: tuple[float, float], request: float = 0
    ) -> None:
        self.now, self.down = 1000.0, [(1000 + start, 1000 + end) for start, end in down]
        self.request, self.tries = request, 0
        monkeypatch.setattr("streampack.storage.retries.monotonic", lambda: self.now)
        monkeypatch.setattr("streampack.storage.retries.sleep", self.sleep)
        fault(self.read)

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds

    def read(self, path: str, start: int, stop: int) -> None:
        self.tries += 1
        if any(start <= self.now < end for start, end in self.down):
            self.now += self.request
            raise TimeoutError


@pytest.mark.parametrize("mixed", [False, True])
def test_a_run_outlives_outages_within_its_patience(
    store: Store, monkeypatch: pytest.MonkeyPatch, mixed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    small_pieces(monkeypatch, block=2048)
    data = filled(store, per_shard=200, storage={"max_outage": 10})
    if mixed:
        data = Mix([{"name": "a", "source": data, "weight": 1}])
    expected = packs(data)
    clock = Clock(monkeypatch, (0, 300), (400, 900))
    run = stream(data, prefetch=0)
    with caplog.at_level(logging.WARNING, "streampack"):
        found, running = [], run.stream()
        for pack in running:
            found.append(plain(pack))
            clock.now += 20
    assert found == expected
    assert clock.now > 1900
    lines = [r.getMessage() for r in caplog.records if "trying again" in r.getMessage()]
    assert len(lines) >= 20
    assert lines[0].endswith(" s, giving up in 600 s")
    clock.down = [(clock.now, clock.now + 700)]
    with pytest.raises(TimeoutError) as error:
        packs(data, prefetch=0)
    assert "it was tried for the 10 min of max_outage" in str(error.value.__notes__)


WAITED = "may be tried again for 120 s and the other ranks wait 0:02:00 at most; lower the max_outage of the"


@pytest.mark.parametrize(("seconds", "refused"), [(120, True), (121, False)])
def test_a_patience_longer_than_the_other_ranks_wait_is_refused(
    tmp_path: Path, seconds: int, refused: bool
) -> None:
    path = write(tmp_path / "a.jsonl", rows(60))
    data = Holdout(JSONLSource(path, storage={"max_outage": 2}), fraction=0.1, part="train")

    def count(rank_sync: ThreadSync) -> int:
        rank_sync.timeout = timedelta(seconds=seconds)
        loader = PackedDataLoader(stream(data))
        loader.rank_sync = rank_sync
        return len(list(loader))

    assert on_ranks(1, count)[0] > 10, "alone, nobody waits"
    for found in on_ranks(2, count):
        assert WAITED in str(found) if refused else found > 5


# Files that change while they are read.

CHANGES = [
    ("local", "jsonl", "longer", "has .* bytes and had .* when it was listed; a corpus must not change"),
    ("http", "jsonl", "longer", "has .* bytes and had .* when it was listed; a corpus must not change"),
    ("http", "gz", "another", "is version .* and was .* when it was listed; a corpus must not change"),
    ("versioned", "jsonl", "another", r"is version \S+ and was \S+ when it was listed"),
    ("versioned", "jsonl", "shorter", "has .* bytes and had .* when it was listed"),
    ("versioned", "parquet", "gone", "there is no such file"),
]


@pytest.mark.parametrize(("place", "kind", "change", "message"), CHANGES)
def test_a_file_that_changes_during_a_run_is_refused(
    store: Store, tmp_path: Path, place: str, kind: str, change: str, message: str
) -> None:
    """At whichever door; and restored, it goes on."""
    files = shards(kind, 2, 100)
    last = list(files)[1]
    changed: bytes | None = {
        "longer": files[last] + b" ",
        "another": b" " + files[last][1:],
        "shorter": files[last][:90],
        "gone": None,
    }[change]
    with Web({}) as web:

        def put(name: str, content: bytes | None) -> None:
            if place == "versioned":
                bare = name.removeprefix("/c/")
                store.put(bare, content) if content is not None else store.remove(bare)
            elif place == "local":
                (tmp_path / name.removeprefix("/c/")).write_bytes(content or b"")
            else:
                web.files[name] = content or b""

        for name, content in files.items():
            put(name, content)
        ending = "jsonl.gz" if kind == "gz" else kind
        paths: Any = {"versioned": f"{store.url}/*.{ending}", "local": f"{tmp_path}/*.{ending}"}.get(place)
        if place == "http":
            paths = [web.url + name for name in files]
        settings: dict[str, Any] = {"num_lanes": 1, "shuffle": False, "prefetch": 0}
        expected = packs(source(kind, paths), **settings)
        data = source(kind, paths)  # whose storage has not read the file that changes
        found, states = [], {}
        running = recorded(stream(data, **settings).events(), states)
        found.append(plain(next(running)))
        put(last, changed)
        with pytest.raises((ValueError, FileNotFoundError), match=f"{last.rpartition('/')[2]}.*{message}"):
            found.extend(map(plain, running))
        assert 15 < len(found) < len(expected) - 15
        put(last, files[last])
        found.extend(map(plain, recorded(stream(data, **settings).events(lane_states=states), {})))
        assert found == expected


def test_a_file_that_is_replaced_just_before_its_bytes_come_is_refused(store: Store) -> None:
    """A version that was looked up before the bytes would not be theirs."""
    data = filled(store)
    content = shards("jsonl", 1)["/c/000.jsonl"]
    fault(lambda *_: store.put("000.jsonl", content.replace(b"1", b"2")))
    with pytest.raises(ValueError, match="000.jsonl is version"):
        packs(data)
