"""Object stores that fsspec reaches: a memory file system with ETags; GCS and Azure on loopback, if installed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem

from streampack import JSONLSource, MegatronSource, ParquetSource
from streampack.sources import Reading
from streampack.storage.base import File
from streampack.storage.remote import RemoteStorage, scheme_of
from streampack.storage.retries import Refused, Retries
from tests.harness.conformance import check_resume_everywhere
from tests.harness.corpus import read_all
from tests.harness.files import write_megatron
from tests.harness.files import shards, stream
from tests.harness.stores import Store, Versioned, lacking, running

KINDS = ("versioned", "gs", "az")


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if (what := lacking(request.param)) is not None:
        pytest.skip(what)
    with running(request.param, tmp_path) as found:
        yield found


@pytest.fixture
def versioned(tmp_path: Path) -> Iterator[Store]:
    with running("versioned", tmp_path) as found:
        yield found


def filled(store: Store, kind: str = "jsonl", *, rows: int = 40) -> Any:
    """Put three shards into a store, and return a source of them with short waits between retries."""
    for name, content in shards(kind, 3, rows).items():
        store.put(name.rpartition("/")[2], content)
    make: Any = {"jsonl": JSONLSource, "parquet": ParquetSource}[kind]
    source = make(f"{store.url}/*.{kind}", storage_options=store.options, timeout=10.0)
    source.corpus = replace(source.corpus, retries=Retries(attempts=3, first=0.01, longest=0.05))
    return source


def numbers(source: Any) -> list[int]:
    return sorted(row["i"] for row in read_all(source, num_lanes=2))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_of_a_listing_and_resume_at_every_pack(store: Store, kind: str) -> None:
    source = filled(store, kind)
    assert [file.name for file in source.files] == [f"00{i}.{kind}" for i in range(3)]
    assert all(file.tag for file in source.files), "the listing has versions"
    assert numbers(source) == list(range(120))
    again = type(source)([f"{store.url}/{file.name}" for file in source.files], storage_options=store.options)
    assert again.fingerprint() == source.fingerprint()
    assert len(check_resume_everywhere(lambda: stream(source, num_lanes=2), packs=4)) > 4


def test_tokens_are_read_in_place(store: Store, tmp_path: Path) -> None:
    documents = [[i] * (1 + i % 9) for i in range(60)]
    for path in write_megatron(tmp_path / "tokens", documents, per_file=20).iterdir():
        store.put(path.name, path.read_bytes())
    source = MegatronSource(f"{store.url}/*.bin", storage_options=store.options)
    assert [row["tokens"].tolist() for row in read_all(source)] == documents


def test_a_file_that_changes_during_a_run_is_refused(store: Store) -> None:
    """Another content of the same size, a shorter file, and one that is gone."""
    source = filled(store)
    content = shards("jsonl", 3)["/c/001.jsonl"]
    reader = source.read(Reading())
    next(reader)
    store.put("001.jsonl", content.replace(b"1", b"2"))
    with pytest.raises(ValueError, match=r"001.jsonl is version \S+ and was \S+ when it was listed"):
        list(reader)
    store.put("001.jsonl", content[:90])
    with pytest.raises(ValueError, match="001.jsonl has 90 bytes and had .* when it was listed"):
        list(source.read(Reading()))
    store.remove("001.jsonl")
    with pytest.raises(ValueError, match=r"001.jsonl from byte \d+ on: there is no such file"):
        list(source.read(Reading()))


def test_a_file_that_is_replaced_just_before_its_bytes_come_is_refused(versioned: Store) -> None:
    """A version that was looked up before the bytes would not be theirs."""
    source = filled(versioned)
    content = shards("jsonl", 3)["/c/001.jsonl"]
    file = source.files[1]

    def replaced(path: str, start: int, stop: int) -> bytes | None:
        versioned.put("001.jsonl", content.replace(b"1", b"2"))
        return None

    Versioned.fault = staticmethod(replaced)
    with pytest.raises(ValueError, match="001.jsonl is version"):
        source.corpus.storage.fetch(file, 0, 100)


def test_a_store_that_refuses_a_range_behind_the_end_does_not_hide_that_the_file_is_shorter(
    versioned: Store,
) -> None:
    source = filled(versioned)
    versioned.put("001.jsonl", b"{}\n")

    def refuse(path: str, start: int, stop: int) -> bytes | None:
        raise OSError("416")

    Versioned.fault = staticmethod(refuse)
    with pytest.raises(ValueError, match="001.jsonl has 3 bytes and had"):
        source.corpus.storage.fetch(source.files[1], 10, 100)
    with pytest.raises(ConnectionError, match=r"000.jsonl: OSError"):
        source.corpus.storage.fetch(source.files[0], 10, 100)


def test_reads_that_fail_for_a_while_are_tried_again(versioned: Store) -> None:
    source = filled(versioned)
    turns = cycle(["error", "short", None, "timeout", None])

    def fail(path: str, start: int, stop: int) -> bytes | None:
        kind = next(turns)
        if kind == "error":
            raise OSError("canary: reset")
        if kind == "timeout":
            raise TimeoutError
        return b"{" if kind == "short" else None

    Versioned.fault = staticmethod(fail)
    assert numbers(source) == list(range(120))

    def always(path: str, start: int, stop: int) -> bytes | None:
        raise OSError("canary: reset")

    Versioned.fault = staticmethod(always)
    with pytest.raises(ConnectionError, match=r"versioned://bucket/000.jsonl: OSError") as error:
        numbers(source)
    assert "canary" not in str(error.value)


class Failing(AsyncFileSystem):  # type: ignore[misc]
    """A file system that raises, or does not answer."""

    protocol = "failing"
    error: Exception | None = None

    async def _cat_file(self, path: str, start: Any = None, end: Any = None, **settings: Any) -> bytes:
        if self.error is None:
            await asyncio.sleep(60)
        raise self.error or OSError

    async def _info(self, path: str, **settings: Any) -> dict[str, Any]:
        return {"name": path, "size": 9, "type": "file"}


class HttpError(Exception):
    """An error as gcsfs raises it."""

    def __init__(self, code: int) -> None:
        super().__init__("canary")
        self.code = code


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (None, TimeoutError, "failing://b/a: no answer within 0.2 s"),
        (HttpError(403), PermissionError, "failing://b/a: HTTP 403, access is denied"),
        (HttpError(503), OSError, "failing://b/a: HTTP 503"),
        (HttpError(400), Refused, "failing://b/a: HTTP 400"),
        (OSError("Forbidden: canary"), PermissionError, "failing://b/a: access is denied"),
        (FileNotFoundError("canary"), FileNotFoundError, "failing://b/a: there is no such file"),
        (RuntimeError("canary"), ConnectionError, "failing://b/a: RuntimeError"),
    ],
)
def test_errors_of_file_systems_tell_whether_another_try_may_help_and_no_secrets(
    error: Exception | None, kind: type[Exception], message: str
) -> None:
    fsspec.register_implementation("failing", Failing, clobber=True)
    Failing.error = error
    storage = RemoteStorage("failing", options={}, patience=0.2)
    with pytest.raises(kind) as caught:
        storage.fetch(File("failing://b/a?key=canary", "a", 9), 0, 9)
    assert str(caught.value) == message


def test_only_stores_and_registered_file_systems_are_read() -> None:
    for scheme in ("gs", "gcs", "az", "abfs", "abfss", "memory"):
        assert scheme_of(f"{scheme}://bucket/a.jsonl") == scheme
    fsspec.register_implementation("versioned", Versioned, clobber=True)
    assert scheme_of("versioned://a") == "versioned"
    fsspec.filesystem("file")  # a file system that fsspec knows is not one that a user has registered
    for scheme in (
        "file",
        "zip",
        "reference",
        "simplecache",
        "unheard",
        "gs::file",
        "gs://a::zip",
        "zip://a::https://me:canary@host",
    ):
        with pytest.raises(ValueError, match="are refused: only plain ones of .* and no chains") as error:
            scheme_of(f"{scheme}://a")
        assert "canary" not in str(error.value)


@pytest.mark.parametrize(("scheme", "extra"), [("gs", "gs"), ("abfs", "az")])
def test_a_missing_package_is_named_by_its_extra(
    scheme: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(scheme: str, **options: Any) -> Any:
        raise ImportError("Please install it")

    monkeypatch.setattr(fsspec, "filesystem", missing)
    with pytest.raises(
        ImportError, match=rf"reading {scheme}:// needs more: pip install 'streampack\[{extra}\]'"
    ):
        JSONLSource(f"{scheme}://bucket/a.jsonl")


def test_options_that_do_not_fit_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(scheme: str, **options: Any) -> Any:
        raise ValueError("canary: an account name is needed")

    monkeypatch.setattr(fsspec, "filesystem", refuse)
    with pytest.raises(
        Refused, match=r"storage_options do not fit az:// \(ValueError\): it may lack the account"
    ) as e:
        JSONLSource("az://bucket/a.jsonl", storage_options={"sas_token": "canary"})
    assert "canary" not in str(e.value)
