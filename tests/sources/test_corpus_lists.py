"""Lists of a corpus's files: runs that start by them look at no file, and notice one that is another now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streampack import JSONLSource
from streampack.sources import ParquetSource
from tests.harness.conformance import check_resume_everywhere, content
from tests.harness.files import corpus, listed, shards, skipping, survivors
from tests.harness.stores import Web

KINDS = ("jsonl", "gz", "parquet")


def opened(kind: str, manifest: Path | str, folder: Path | str | None = None) -> Any:
    """Open a corpus by its manifest."""
    if kind == "parquet":
        return ParquetSource(folder, manifest=manifest, columns=["i", "n"])
    return JSONLSource(folder, manifest=manifest)


def write_manifest(source: Any, path: Path) -> Path:
    path.write_text(source.corpus.manifest())
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_packs_and_states_are_those_of_a_listing(tmp_path: Path, kind: str) -> None:
    files = corpus(kind, tmp_path / "data")
    manifest = write_manifest(files.open(), tmp_path / "corpus.manifest")
    listing = skipping(files.open())
    running = iter(listing)
    packs = [next(running) for _ in range(5)]
    by_manifest = skipping(opened(kind, manifest, tmp_path / "data"))
    by_manifest.load_state_dict(listing.state_dict())
    packs += list(by_manifest)
    assert list(map(content, packs)) == list(map(content, skipping(files.open())))


@pytest.mark.parametrize(("kind", "most"), [("jsonl", 40), ("parquet", 60)])
def test_a_thousand_files_behind_a_url_cost_a_few_requests_to_the_first_pack(
    tmp_path: Path, kind: str, most: int
) -> None:
    """A file that was not listed costs a request of its own."""
    few = list(shards(kind, 4, 20).values())
    with Web({f"/c/{i:04}.{kind}": few[i % 4] for i in range(1000)}) as web:
        names = tmp_path / "names"
        names.write_text("\n".join(f"{i:04}.{kind}" for i in range(1000)))
        write_manifest(opened(kind, names, f"{web.url}/c"), tmp_path / "manifest")
        asked = len(web.requests)
        assert asked >= 1000
        data = opened(kind, tmp_path / "manifest", f"{web.url}/c")
        assert len(web.requests) == asked
        dataset = skipping(data, num_lanes=8, shuffle=False, skip_bad=False, prefetch=0)
        next(iter(dataset))
        assert len(web.requests) - asked <= most
        web.files["/m"] = (tmp_path / "manifest").read_bytes()
        asked = len(web.requests)
        again = opened(kind, f"{web.url}/m", f"{web.url}/c")
        assert len(web.requests) - asked == 2, "the manifest's size, and the manifest"
        assert [*again.files] == [*data.files]


# Parquet is cut by its footers, and says at the start that one is gone.
@pytest.mark.parametrize("kind", ["jsonl", "gz"])
def test_a_file_that_is_gone_is_left_out_and_a_resume_gives_the_same_packs(tmp_path: Path, kind: str) -> None:
    files = corpus(kind, tmp_path / "data")
    manifest = write_manifest(files.open(), tmp_path / "data" / "manifest")
    files.paths[2].unlink()

    def make() -> Any:
        return skipping(opened(kind, manifest), skip_bad=tmp_path / "bad")

    check_resume_everywhere(make, packs=30, whole_every=10)
    assert survivors(make()) == files.rest(2)
    assert {Path(entry["path"]).name for entry in listed(tmp_path / "bad")} == {files.paths[2].name}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", ["size", "content"])
def test_a_file_that_is_another_one_than_was_listed_is_named_when_it_is_read(
    tmp_path: Path, kind: str, change: str
) -> None:
    files = corpus(kind, tmp_path / "data")
    manifest = write_manifest(files.open(), tmp_path / "data" / "manifest")
    data = files.paths[3].read_bytes()
    data = data + b"\n" if change == "size" else data[:10] + bytes([data[10] ^ 1]) + data[11:]
    files.paths[3].write_bytes(data)
    what = "has .* bytes and had .*" if change == "size" else "does not have the content that it had"
    message = f"{files.paths[3]} {what} when it was listed; a corpus must not change"
    with pytest.raises(ValueError, match=message):
        list(skipping(opened(kind, manifest)))
