"""A file has the same name whatever other files a corpus has, and wherever it lies; so a run can go on with others."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fsspec
import pytest

from streampack import JSONLSource
from streampack.sources.scan import scan
from tests.streaming.test_corpus_changes import PER_FILE, Rows, everything, resumed, tokens_of
from tests.support.conformance import content
from tests.support.corpus import write
from tests.support.mixtures import make

LONGEST = 30


def rows(number: int, count: int = 40) -> list[dict[str, int]]:
    return [{"i": PER_FILE * number + k, "n": 1 + (7 * number + k) % 12} for k in range(count)]


def put(folder: Path, files: Rows) -> None:
    """Write the files, and nothing else, into a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, lines in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write(folder / name, lines)


def folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir())


def in_memory(folder: Path) -> JSONLSource:
    files = fsspec.filesystem("memory")
    if files.exists("/names"):
        files.rm("/names", recursive=True)
    files.put(str(folder), "/names", recursive=True)
    return JSONLSource("memory://names/**/*.jsonl")


def scanned(folder: Path) -> JSONLSource:
    scan(str(folder / "**/*.jsonl"), out=folder.with_suffix(".manifest"), progress=False)
    return JSONLSource(folder, manifest=folder.with_suffix(".manifest"))


def listed(folder: Path) -> JSONLSource:
    names = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*.jsonl"))]
    (folder / "names.txt").write_text("\n".join(names))
    return JSONLSource(manifest=folder / "names.txt")


SOURCES: dict[str, Callable[[Path], JSONLSource]] = {
    "a folder": JSONLSource,
    "a glob": lambda folder: JSONLSource(str(folder / "**" / "*.jsonl")),
    "several folders": lambda folder: JSONLSource(folders(folder)),
    "several globs": lambda folder: JSONLSource([str(path / "*.jsonl") for path in folders(folder)]),
    "paths": lambda folder: JSONLSource(sorted(folder.rglob("*.jsonl"))),
    "a URL": in_memory,
    "a manifest": listed,
    "a scan": scanned,
}
EN = {"en/0.jsonl": rows(0), "en/1.jsonl": rows(1), "en/2.jsonl": rows(2)}
# The first has the name and the size of a file of the other folder.
FR = {"fr/0.jsonl": rows(12), "fr/x.jsonl": rows(4)}


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    given = {"num_lanes": 2, "epochs": 2, "corpus_changes": "allow", "corpus_lists": folder / "lists"}
    return {**given, "shuffle": True, "shuffle_window": 16, **changes}


@pytest.mark.parametrize("begins", ["with one folder", "with two"])
@pytest.mark.parametrize("how", SOURCES)
def test_a_folder_that_joins_or_goes_changes_no_other_files_name(
    how: str, begins: str, tmp_path: Path
) -> None:
    before, now = (EN, {**EN, **FR}) if begins == "with one folder" else ({**EN, **FR}, EN)
    put(tmp_path / "data", before)
    data = make(SOURCES[how](tmp_path / "data"), **settings(tmp_path))
    packs = list(itertools.islice(data, 10))
    assert {pack["epoch"] for pack in packs} == {0}
    state = data.state_dict()
    put(tmp_path / "data", now)
    data = resumed(make(SOURCES[how](tmp_path / "data"), **settings(tmp_path)), state)
    packs += data
    stayed, all_now = everything([EN], LONGEST), everything([now], LONGEST)
    first = tokens_of(packs, 0)
    assert not stayed - first, (
        f"{(stayed - first).total()} of {stayed.total()} tokens of files that stayed are lost"
    )
    assert max(first.values()) == 1
    if begins == "with one folder":
        assert first == stayed
    assert tokens_of(packs, 1) == all_now


@pytest.mark.parametrize("how", [how for how in SOURCES if how != "a URL"])
def test_a_corpus_may_be_moved(how: str, tmp_path: Path) -> None:
    put(tmp_path / "data", {**EN, **FR})
    keeps = settings(tmp_path, corpus_changes="error", corpus_lists=None)
    data = make(SOURCES[how](tmp_path / "data"), **keeps)
    iterator = iter(data)
    list(itertools.islice(iterator, 10))
    state = data.state_dict()
    rest = [content(pack) for pack in iterator]
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    data = make(SOURCES[how](tmp_path / "elsewhere"), **keeps)
    data.load_state_dict(state)
    assert [content(pack) for pack in data] == rest


def begun(folder: Path, source: Any, **changes: Any) -> Mapping[str, Any]:
    data = make(source, **settings(folder, **changes))
    list(itertools.islice(data, 10))
    return data.state_dict()


def test_a_corpus_whose_files_look_renamed_is_refused_where_changes_are_allowed(tmp_path: Path) -> None:
    put(tmp_path / "data", EN)
    state = begun(tmp_path, JSONLSource(tmp_path / "data" / "en"))
    # The same files by a folder above: nothing would be read of them in this epoch.
    for changes in ("allow", "error"):
        with pytest.raises(ValueError) as error:
            make(
                JSONLSource(tmp_path / "data"), **settings(tmp_path, corpus_changes=changes)
            ).load_state_dict(state)
        assert str(error.value) == (
            "3 of the 3 files that the run began with look renamed: 0.jsonl is now en/0.jsonl. Nothing more of them "
            "would be read in this epoch. A file's name is relative to the folder that is given, or to the part of "
            "the pattern before its first wildcard: give what the run began with, or begin a new run from the weights"
        )
    # Without the lists, too, the message says what names are relative to.
    with pytest.raises(
        ValueError, match=r"as many files of as many bytes, so they may be the same by other names"
    ):
        make(
            JSONLSource(tmp_path / "data"), **settings(tmp_path, corpus_changes="error", corpus_lists=None)
        ).load_state_dict(state)
    put(tmp_path / "data", {"en/7.jsonl": rows(7), "en/8.jsonl": rows(8)})
    with pytest.raises(
        ValueError, match="none of the 3 files that the run began with .0.jsonl, 1.jsonl, 2.jsonl. is"
    ):
        make(JSONLSource(tmp_path / "data" / "en"), **settings(tmp_path)).load_state_dict(state)
    # One of three renamed is a file that went and one that came.
    put(tmp_path / "data", {**{name: EN[name] for name in list(EN)[:2]}, "en/3.jsonl": EN["en/2.jsonl"]})
    data = resumed(make(JSONLSource(tmp_path / "data" / "en"), **settings(tmp_path)), state)
    assert tokens_of(data, 1) == everything([EN], LONGEST)


def test_copies_of_a_file_are_told_apart(tmp_path: Path) -> None:
    """Equal in name, size and content, they are two files all the same."""
    put(tmp_path / "data", {**EN, **{f"fr/{i}.jsonl": EN[f"en/{i}.jsonl"] for i in range(3)}})

    def source() -> JSONLSource:
        return JSONLSource(folders(tmp_path / "data"))

    data = make(source(), **settings(tmp_path))
    packs = list(itertools.islice(data, 20))
    state = data.state_dict()
    write(tmp_path / "data" / "fr" / "x.jsonl", rows(9))
    data = resumed(make(source(), **settings(tmp_path)), state)
    packs += data
    twice = everything([EN, EN], LONGEST)
    assert tokens_of(packs, 0) == twice
    assert tokens_of(packs, 1) == twice + everything([{"x": rows(9)}], LONGEST)
