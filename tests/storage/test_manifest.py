"""Manifests and paths: which names are read, and which are refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from streampack import JSONLSource, PackedDataLoader
from streampack.sources import Reading
from streampack.storage.base import redact
from tests.support.shards import shards, source, stream, urls
from tests.support.web import Web

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
    assert data.fingerprint() == source("jsonl", [url for url in urls(web) if "jsonl" in url]).fingerprint()
    web.files["/c/shards.txt"] = b"000.jsonl\n\n003.jsonl\n"
    assert len(list(source("jsonl", manifest=f"{web.url}/c/shards.txt").read(Reading()))) == 80


def test_thousands_of_listed_shards(web: Web) -> None:
    [content] = shards("jsonl", 1, 8).values()
    names = [f"{i // 100:03}/{i:05}.jsonl" for i in range(3000)]
    web.files = {f"/c/{name}": content for name in names}
    tag = hashlib.md5(content).hexdigest()
    lines = [json.dumps({"name": name, "size": len(content), "tag": tag}) for name in names]
    web.files["/c/shards.txt"] = "\n".join(lines).encode()
    loader = PackedDataLoader(stream(source("jsonl", manifest=f"{web.url}/c/shards.txt"), num_lanes=8))
    assert next(iter(loader)).tokens.shape == (1, 24)
    assert loader.state_dict()
    assert len(web.requests) < 300, "32 for each lane are fetched ahead"


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
        ("none.jsonl", "none.jsonl: there is no such file"),
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
    ],
)
def test_chains_and_other_schemes_are_refused(url: str) -> None:
    with pytest.raises(
        ValueError,
        match="are refused: only plain ones of http, https, s3, hf, gs, .* are read, and no chains",
    ) as error:
        source("jsonl", url)
    assert "canary" not in str(error.value)


def test_settings_are_checked(web: Web, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="name the files, or a manifest of them"):
        JSONLSource()
    with pytest.raises(
        ValueError, match="is a glob, and a web server does not list files; name each file, or a manifest"
    ):
        JSONLSource(f"{web.url}/*.jsonl")
    with pytest.raises(ValueError, match=r"lie in several places \(http://127.0.0.1:\d+, this machine\)"):
        JSONLSource([f"{web.url}/a.jsonl", str(tmp_path / "a.jsonl")])
    web.files = {"/a.jsonl": b""}
    with pytest.raises(ValueError, match="/a.jsonl: it is empty"):
        JSONLSource(f"{web.url}/a.jsonl")


def test_redact_removes_user_query_and_fragment() -> None:
    assert redact("https://u:p@host:1/a/b.jsonl?x=1#y") == "https://host:1/a/b.jsonl"
    assert redact("s3://bucket/a.jsonl") == "s3://bucket/a.jsonl"
    assert redact("/a/b?c") == "/a/b?c"
    assert redact("hf://gpt2@main/a.jsonl") == "hf://gpt2@main/a.jsonl"
    assert redact("hf://u:p@gpt2/a.jsonl") == "hf://gpt2/a.jsonl"
