"""Listings ask once for each file, and refuse a file with two names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import fsspec
import pytest

from streampack import JSONLSource
from tests.support.corpus import numbered, write


def test_a_listing_asks_once_for_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metadata servers are the first bottleneck of 1,024 ranks."""
    names = [write(tmp_path / f"{i:03}.jsonl", [{"text": "x" * 5000}]) for i in range(100)]
    asked, look = [], os.stat

    def watched(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        asked.append(str(path))
        return look(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", watched)
    for paths in (names, str(tmp_path / "*.jsonl")):
        asked.clear()
        assert len(JSONLSource(paths).files) == 100
        assert sorted(path for path in asked if path.endswith("0.jsonl")) == sorted(map(str, names[::10]))


def twice(folder: Path, how: str) -> dict[str, Any]:
    """Return arguments of a file source that name ``data`` twice."""
    folder.mkdir(exist_ok=True)
    (folder / "sub").mkdir()
    [data] = folder.glob("data.*")
    link = data.with_name("link" + "".join(data.suffixes))
    if how == "a link beside it":
        link.symlink_to(data.name)
        return {"paths": str(folder / f"*{data.suffix}")}
    if how == "another name of it":
        os.link(data, link)
        return {"paths": [data, link]}
    if how == "a linked folder":
        (folder / "also").symlink_to(folder)
        return {"paths": [data, folder / "also" / data.name]}
    (folder / "names.txt").write_text(f"./{data.name}\n{data.name}")
    return {"manifest": folder / "names.txt"}


HOWS = ("a link beside it", "another name of it", "a linked folder", "a manifest")


@pytest.mark.parametrize("how", HOWS)
def test_a_file_by_two_names_is_refused(tmp_path: Path, how: str) -> None:
    write(tmp_path / "data.jsonl", numbered(5))
    arguments = twice(tmp_path, how)
    with pytest.raises(ValueError, match="(is named twice|and .* are one file); name every file once"):
        JSONLSource(**arguments)


def test_a_url_by_two_names_is_refused() -> None:
    lines = b'{"name": "./a b.jsonl", "size": 9}\n{"name": "a b.jsonl", "size": 9}\n'
    fsspec.filesystem("memory").pipe("/twice/names.txt", lines)
    with pytest.raises(ValueError, match="are one file; name every file once"):
        JSONLSource(manifest="memory://twice/names.txt")
