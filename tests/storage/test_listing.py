"""Paths as users write them, listings, manifests, look-ups, and how a changed file is named."""

from __future__ import annotations

import glob
import gzip
import io
import json
import os
import re
import tarfile
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streampack import (
    ArrowSource,
    HFSource,
    IterablePackedDataset,
    JSONLSource,
    ParquetSource,
    TextSource,
    TokenShardSource,
    WebDatasetSource,
)
from streampack.fingerprint import digest
from streampack.sources import Reading, as_source
from streampack.storage import File
from streampack.tokenize import tokenize
from tests.harness.conformance import lists
from tests.harness.corpus import PACK, identity_of, numbered, read_all, write
from tests.harness.files import shards, source
from tests.harness.stores import Hub, Web

ROWS = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}, {"input_ids": [6]}]


def lines(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tokens_of(source: Any) -> list[list[int]]:
    return [pack["tokens"].tolist() for pack in IterablePackedDataset(source, max_seq_len=6)]


FOLDER = {
    "b.jsonl": b'{"i": 0}\n',
    "en/a.jsonl.gz": gzip.compress(b'{"i": 1}\n'),
    "en/deep/c.ndjson": b'{"i": 2}\n',
    ".cache/d.jsonl": b'{"i": 8}\n',
    "en/.d.jsonl": b'{"i": 9}\n',
    "README.md": b"no data",
    "old.jsonl/notes.md": b"no data",
}


@contextmanager
def behind_a_url(place: str, files: dict[str, bytes], web: Web) -> Iterator[tuple[str, dict[str, Any]]]:
    """Put files into a folder behind a URL; return the URL, and the options of its storage."""
    if place == "hf":
        with Hub() as hub:
            hub.commit({f"c/{name}": content for name, content in files.items()})
            yield "hf://datasets/org/name/c", hub.options
        return
    if place == "s3":
        pytest.importorskip("s3fs")
        web.files = {f"/bucket/c/{name}": content for name, content in files.items()}
        yield "s3://bucket/c", {"key": "key", "secret": "secret", "endpoint_url": web.url}
        return
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    for name, content in files.items():
        memory.pipe(f"/bucket/c/{name}", content)
    yield "memory://bucket/c", {}


@pytest.mark.parametrize("place", ["memory", "s3", "hf"])
def test_a_folder_behind_a_url_lists_what_a_local_one_does(place: str, web: Web, tmp_path: Path) -> None:
    for name, content in FOLDER.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    here = JSONLSource(tmp_path)
    assert [file.name for file in here.files] == ["b.jsonl", "en/a.jsonl.gz", "en/deep/c.ndjson"]
    with behind_a_url(place, FOLDER, web) as (url, options):
        storage = {"options": options}
        for path in (url, f"{url}/", [url]):
            there = JSONLSource(path, storage=storage)
            assert [(file.name, file.size) for file in there.files] == [
                (file.name, file.size) for file in here.files
            ]
            assert read_all(there) == read_all(here) == [{"i": 0}, {"i": 1}, {"i": 2}]
        for pattern in ("**/*.jsonl", "*/.*"):
            names = [file.name for file in JSONLSource(f"{tmp_path}/{pattern}").files]
            assert [file.name for file in JSONLSource(f"{url}/{pattern}", storage=storage).files] == names
        both = JSONLSource([f"{url}/b.jsonl", f"{url}/en"], storage=storage)
        assert [file.name for file in both.files] == ["b.jsonl", "a.jsonl.gz", "deep/c.ndjson"]
        with pytest.raises(ValueError, match=rf"the folder {place}://.*/c/old.jsonl holds no .jsonl or"):
            JSONLSource(f"{url}/old.jsonl", storage=storage)
        with pytest.raises(ValueError, match=r"c/gone: there is no such file"):
            JSONLSource(f"{url}/gone", storage=storage)


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (("a.parquet", "b/c.parquet"), ParquetSource),
        (("a.jsonl", "b/c.jsonl.gz"), JSONLSource),
        (("folder.parquet/a.parquet",), ParquetSource),
        (("index.json",), TokenShardSource),
        ((".hidden.jsonl",), "holds no .jsonl or .ndjson or .json file; name the files, or a glob of them"),
        (("a.parquet", "b.jsonl"), "holds Parquet and JSON lines; name those to read, such as {}/*.parquet"),
    ],
)
def test_the_content_of_a_folder_says_what_reads_it_here_and_behind_a_url(
    tmp_path: Path, web: Web, names: tuple[str, ...], kind: Any
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        if name == "index.json":
            tokenize(ROWS, out=tmp_path, progress=False)
        elif name.endswith("parquet"):
            pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / name)
        else:
            write(tmp_path / name, ROWS)
    found = {
        str(path.relative_to(tmp_path)): path.read_bytes()
        for path in tmp_path.glob("**/*.*")
        if path.is_file()
    }
    with behind_a_url("memory", found, web) as (url, _):
        for place in (str(tmp_path), url, f"{url}/"):
            if isinstance(kind, str):
                with pytest.raises(ValueError, match=re.escape(kind.format(place.rstrip("/")))):
                    as_source(place)
            else:
                made = as_source(place)
                assert type(made) is kind
                assert tokens_of(made) == tokens_of(as_source(tmp_path))


def test_paths_globs_and_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    a, b = write(tmp_path / "a.jsonl", [{"i": 1}]), write(tmp_path / "deep" / "b.jsonl", [{"i": 2}])
    c = write(tmp_path / "deep" / "er" / "c.jsonl", [{"i": 3}])

    def names(paths: Any) -> list[str]:
        return [file.name for file in JSONLSource(paths).files]

    assert names(a) == names(str(a)) == names([str(a)]) == ["a.jsonl"]
    assert names([b, a]) == names((a, str(b))) == names(path for path in (a, b)) == ["a.jsonl", "b.jsonl"]
    assert names(str(tmp_path / "**" / "*.jsonl")) == ["a.jsonl", "deep/b.jsonl", "deep/er/c.jsonl"]
    assert names([str(tmp_path / "*.jsonl"), c]) == ["a.jsonl", "c.jsonl"]
    assert names([tmp_path / "deep", a]) == ["a.jsonl", "b.jsonl", "er/c.jsonl"]
    assert names(f"{glob.escape(str(tmp_path))}/d*/**/*.jsonl") == ["deep/b.jsonl", "deep/er/c.jsonl"]
    odd = write(tmp_path / "a[1]*.jsonl", [{"i": 1}])
    write(tmp_path / "a1x.jsonl", [{"i": 2}])
    assert read_all(JSONLSource(odd)) == [{"i": 1}], "a name that looks like a glob"
    monkeypatch.chdir(tmp_path / "deep")
    assert names("*.jsonl") == ["b.jsonl"]
    relative = JSONLSource("b.jsonl")
    monkeypatch.chdir("/")
    assert read_all(relative) == [{"i": 2}], "the path holds wherever the process goes"


REFUSED = {
    "none": "no file matches '{d}/none'; check the path or the glob",
    "sub": "the folder {d}/sub holds no .jsonl or",
    "empty": "{d}/empty: it is empty",
}


@pytest.mark.parametrize("name", REFUSED)
def test_names_that_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError) as error:
        JSONLSource(tmp_path / name)
    assert str(error.value).startswith(REFUSED[name].format(d=tmp_path, cwd=Path.cwd()))
    path = write(tmp_path / "a.jsonl", [{"i": 1}])
    for paths in ([], "", [path, path], [path, tmp_path / "sub" / ".." / "a.jsonl"]):
        with pytest.raises(
            ValueError, match="no files given; name at least|no file matches ''|is named twice"
        ):
            JSONLSource(paths)


def test_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    lines(tmp_path / "data" / "a.jsonl", ROWS)
    tokenize(ROWS, out=tmp_path / "shards", progress=False)
    (tmp_path / "names.txt").write_text("data/a.jsonl\n")
    for paths in (
        "~/data/a.jsonl", "~/data/*.jsonl", "~/data", "~/shards", JSONLSource(manifest="~/names.txt"),
        TokenShardSource("~/shards"),
    ):  # fmt: skip
        assert tokens_of(paths) == [[1, 2, 3, 4, 5, 6]], paths


DOGS = [{"n": "red dog", "input_ids": 1}] * 3
OF_OTHERS: dict[str, tuple[bytes | Callable[[Path], Any], str, list[Any]]] = {
    "a.csv": (
        b"n,input_ids\n" + b"red dog,1\n" * 3,
        "none of its first 4 lines is a JSON object; let datasets read it",
        DOGS,
    ),
    "a.tsv": (
        b"n\tinput_ids\n" + b"red dog\t1\n" * 3,
        "none of its first 4 lines is a JSON object; let datasets read it",
        DOGS,
    ),
    "long.data": (
        b"Once upon\n" * 50,
        "none of its first 50 lines is a JSON object; if it is text",
        [{"text": "Once upon"}] * 50,
    ),
    "tar.data": (
        lambda path: tar(path, {"0.txt": b"Once upon"}),
        "it is a tar",
        [{"__key__": "0", "text": "Once upon"}],
    ),
    "stream.data": (lambda path: arrow(path, pa.ipc.new_stream), "it is an Arrow file", ROWS),
    "file.json": (lambda path: arrow(path, pa.ipc.new_file), "it is an Arrow file", ROWS),
    "named otherwise.pq": (
        lambda path: pq.write_table(pa.Table.from_pylist(ROWS), path),
        "it is a Parquet file",
        ROWS,
    ),
}


def tar(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def arrow(path: Path, open_: Callable[..., Any]) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(path), "wb") as file, open_(file, table.schema) as writer:
        writer.write_table(table)


@pytest.mark.parametrize("by", ["its path", "a glob"])
@pytest.mark.parametrize("name", OF_OTHERS)
def test_files_of_other_kinds_are_refused_with_a_source_that_reads_them(
    tmp_path: Path, name: str, by: str
) -> None:
    datasets = pytest.importorskip("datasets")
    content, what, rows = OF_OTHERS[name]
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content(path)
    with pytest.raises(ValueError) as error:
        next(as_source(str(path if by == "its path" else tmp_path / "*")).read(Reading()))
    assert str(error.value).startswith(f"{path}:1: {what}")
    call = re.search(r"\b[A-Za-z]*Source\(.*?\)(?=;|$)", str(error.value))
    assert call is not None
    known = {
        kind.__name__: kind for kind in (ArrowSource, HFSource, ParquetSource, TextSource, WebDatasetSource)
    }
    source = eval(call[0], {**known, "datasets": datasets})
    assert [lists(row.data) for row in source.read(Reading())] == rows


COMPRESSED = {suffix: pack(b"Once upon a time\n" * 9) for suffix, pack in PACK.items() if suffix}
NOT_JSON = {
    "a.data": [
        (content, f":1: it is compressed: let its name end in {suffix[:4]}") for suffix, content in COMPRESSED.items()
    ],
    "b.jsonl": [
        (bytes(3000), "its first 3,000 bytes are zeros: it was not written to its end, so"),
        ('{"i": 1}\n'.encode("utf-16"), "it is UTF-16: convert it to UTF-8"),
        (b"Once upon a time\n" * 3, "; if it is text, TextSource('"),
    ],
    "objects.json": [
        (json.dumps(each, indent=1).encode() * 3, "lines is a JSON object; write each object on one line (jq -c")
        for each in ({"data": ROWS}, ROWS[0])
    ],
    # The time in a gzip file would be in the test's name, which differs between the processes of a test run then.
    "c.jsonl.gz": [
        (gzip.compress(bytes(3000), mtime=0), "its first 3,000 bytes are zeros: it was not written to its end, so")
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content", "what"), [(name, *case) for name in NOT_JSON for case in NOT_JSON[name]]
)
def test_what_is_no_json_lines_is_named_by_its_first_bytes(
    tmp_path: Path, name: str, content: bytes, what: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(what)):
        next(JSONLSource(tmp_path / name).read(Reading()))


@pytest.mark.parametrize("first", ["[1, 2]", "[1,", '"text"', "Once upon", '{"i": 0'])
def test_a_first_line_that_is_no_row_is_one_bad_record_before_rows(tmp_path: Path, first: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f"{first}\n" + "".join(json.dumps({"i": i}) + "\n" for i in range(3)))
    reader = JSONLSource(path).read(Reading())
    with pytest.raises(ValueError, match="not a line of JSON|a row must be a JSON object"):
        next(reader)
    assert [row.data["i"] for row in reader] == [0, 1, 2]


@pytest.mark.parametrize("how", ["a link beside it", "another name of it", "a linked folder", "a manifest"])
def test_a_file_by_two_names_is_refused(tmp_path: Path, how: str) -> None:
    data = write(tmp_path / "data.jsonl", numbered(5))
    arguments: dict[str, Any] = {"paths": str(tmp_path / "*.jsonl")}
    if how == "a link beside it":
        (tmp_path / "link.jsonl").symlink_to(data.name)
    elif how == "another name of it":
        os.link(data, tmp_path / "link.jsonl")
    elif how == "a linked folder":
        (tmp_path / "also").symlink_to(tmp_path)
        arguments = {"paths": [data, tmp_path / "also" / data.name]}
    else:
        (tmp_path / "names.txt").write_text(f"./{data.name}\n{data.name}")
        arguments = {"manifest": tmp_path / "names.txt"}
    with pytest.raises(ValueError, match="(is named twice|and .* are one file); name every file once"):
        JSONLSource(**arguments)


OUTSIDE = (
    "../a.jsonl", "sub/../../a.jsonl", "..", "/etc/passwd", "~/a.jsonl", "file:///etc/passwd", "https://elsewhere/a",
    "pipe:cat /etc/passwd", "zip::a.jsonl", "simplecache::https://elsewhere/a.jsonl", "a\\..\\b.jsonl", "C:\\a.jsonl",
    "a\x00b.jsonl",
)  # fmt: skip


def test_a_manifest_with_sizes_saves_a_request_each(web: Web) -> None:
    web.files = shards("jsonl", 4)
    lines = [json.dumps({"name": path[3:], "size": len(content)}) for path, content in web.files.items()]
    web.files["/c/shards.txt"] = "\n".join(lines).encode()
    data = source("jsonl", manifest=f"{web.url}/c/shards.txt?key=1")
    assert {path.partition("?")[0] for path, _ in web.requests} == {"/c/shards.txt"}
    assert len(list(data.read(Reading()))) == 160
    assert {path.partition("?")[2] for path, _ in web.requests} == {"key=1"}, "the query goes with every name"
    assert identity_of(data) == identity_of(
        source("jsonl", [web.url + path for path in web.files if "jsonl" in path])
    )
    web.files["/c/shards.txt"] = b"000.jsonl\n\n003.jsonl\n"
    assert len(list(source("jsonl", manifest=f"{web.url}/c/shards.txt").read(Reading()))) == 80


@pytest.mark.parametrize("place", ["here", "memory"])
def test_a_manifest_is_kept_in_columns_and_its_tags_are_not_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    names = [f"shard-{i:05}.jsonl" for i in range(5000)]
    lines = [
        json.dumps({"name": name, "size": 10**8 + i, "tag": f"{i:016x}"}) for i, name in enumerate(names)
    ]
    manifest = tmp_path / "names.txt"
    manifest.write_text("\n".join(reversed(lines)))
    folder = f"{tmp_path}/corpus" if place == "here" else "memory://bucket/corpus"

    def make() -> tuple[JSONLSource, Any]:
        source = JSONLSource(folder, manifest=manifest)
        return source, IterablePackedDataset(source, max_seq_len=64, num_lanes=4, skip_bad=True).state_dict()

    made, first, pooled = 0, File.__init__, ThreadPoolExecutor.submit
    calls: list[Any] = []

    def counted(self: File, *args: Any, **settings: Any) -> None:
        nonlocal made
        made += 1
        first(self, *args, **settings)

    def submit(self: Any, *args: Any, **settings: Any) -> Any:
        calls.append(args)
        return pooled(self, *args, **settings)

    monkeypatch.setattr(File, "__init__", counted)
    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
    tracemalloc.start()
    source, state = make()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert made < 200, "files are made where their rows are read: of the examples"
    assert len(calls) < 20
    assert held < 5000 * 150
    assert list(source.files.names) == names
    assert source.files[7] == File(f"{folder}/{names[7]}", names[7], 10**8 + 7, f"{7:016x}")
    described = f"5,000 file(s) of {sum(source.files.sizes):,} bytes, digest {source.corpus.digest()}"
    assert described in str(state)
    assert source.corpus.digest() == digest(*((n, 10**8 + i, f"{i:016x}") for i, n in enumerate(names)))


@pytest.mark.parametrize("place", ["here", "web"])
def test_names_that_lead_out_of_a_manifests_folder(web: Web, tmp_path: Path, place: str) -> None:
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "a.jsonl").write_text('{"i": 1}\n')
    manifest = str(tmp_path / "in/shards.txt") if place == "here" else f"{web.url}/in/shards.txt"
    for name in OUTSIDE:
        text = json.dumps({"name": name})
        (tmp_path / "in" / "shards.txt").write_text(text)
        web.files["/in/shards.txt"] = text.encode()
        with pytest.raises(ValueError) as error:
            source("jsonl", manifest=manifest)
        assert str(error.value) == (
            f"{manifest}:1: the name {name!r} is refused: it must be relative and stay below the manifest's folder"
        )
    assert all(path == "/in/shards.txt" for path, _ in web.requests)


def test_links_out_of_a_manifests_folder(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "inner").mkdir(parents=True)
    (tmp_path / "secret.jsonl").write_text('{"i": 1}\n')
    (folder / "good.jsonl").write_text('{"i": 2}\n')
    (folder / "inner" / "target.jsonl").write_text('{"i": 3}\n')
    (folder / "good-link.jsonl").symlink_to(folder / "inner" / "target.jsonl")
    (folder / "bad-link.jsonl").symlink_to(tmp_path / "secret.jsonl")
    (folder / "bad-folder").symlink_to(tmp_path)
    manifest = folder / "shards.txt"
    manifest.write_text("good.jsonl\ngood-link.jsonl\n")
    assert sorted(row.data["i"] for row in JSONLSource(manifest=manifest).read(Reading())) == [2, 3]
    for name, size in (("bad-link.jsonl", None), ("bad-link.jsonl", 9), ("bad-folder/secret.jsonl", 9)):
        manifest.write_text(f"good.jsonl\n{json.dumps({'name': name, 'size': size})}\n")
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
        ("none.jsonl", "none.jsonl: there is no such file"),
    ],
)
def test_bad_manifests(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "shards.txt").write_text(text)
    with pytest.raises(ValueError, match=message):
        JSONLSource(manifest=tmp_path / "shards.txt")


def test_settings_are_checked(web: Web, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="name the files, or a manifest of them"):
        JSONLSource()
    with pytest.raises(
        ValueError, match="is a glob, and a web server does not list files; name each file, or a manifest"
    ):
        JSONLSource(f"{web.url}/*.jsonl")
    with pytest.raises(ValueError, match=r"are in several places \(http://127.0.0.1:\d+, this machine\)"):
        JSONLSource([f"{web.url}/a.jsonl", str(tmp_path / "a.jsonl")])
    web.files = {"/a.jsonl": b""}
    with pytest.raises(ValueError, match="/a.jsonl: it is empty"):
        JSONLSource(f"{web.url}/a.jsonl")
