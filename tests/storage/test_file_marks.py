"""A hundred thousand files in two kilobytes, which still name the one that was changed."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack import IterablePackedDataset, JSONLSource
from streampack.storage.base import File
from streampack.storage.file_marks import MAX_GROUPS, FileMarks
from tests.support.corpus import Numbers, rows, write


def marks(files: dict[str, tuple[int, str]]) -> FileMarks:
    """Make marks of files, given as (size, tag) by name."""
    listed = [File(f"/c/{name}", name, size) for name, (size, _) in files.items()]
    return FileMarks(listed, [tag for _, tag in files.values()])


def corpus(count: int) -> dict[str, tuple[int, str]]:
    return {f"{number:06}.jsonl": (1000 + number % 7, f"{number:016x}") for number in range(count)}


COUNTS = [1, 7, 2000]


@pytest.mark.parametrize("count", COUNTS)
def test_a_changed_file_is_named(count: int) -> None:
    files = corpus(count)
    before = marks(files).state()
    assert marks(files).difference(before) is None
    for number in {0, count // 2, count - 1}:
        name = f"{number:06}.jsonl"
        changed = marks({**files, name: (files[name][0], "other")})
        assert changed.difference(before) == f"/c/{name} is another file"
        longer = marks({**files, name: (files[name][0] + 5, "other")})
        total = sum(size for size, _ in files.values())
        assert longer.difference(before) == (
            f"/c/{name} is another file; it had {count:,} file(s) of {total:,} bytes, and now there are {count:,} of "
            f"{total + 5:,}"
        )


@pytest.mark.parametrize("count", COUNTS)
def test_a_new_a_missing_and_a_renamed_file(count: int) -> None:
    files = corpus(count)
    more = {**files, "zz.jsonl": (5, "new")}
    assert str(marks(more).difference(marks(files).state())).startswith("/c/zz.jsonl is new; it had ")
    words = str(marks(files).difference(marks(more).state()))
    assert words.startswith("files in 1 of ")
    assert words.endswith(f"and now there are {count:,} of {sum(size for size, _ in files.values()):,}")
    first, *others = files
    renamed = {**{name: files[name] for name in others}, "zz.jsonl": files[first]}
    assert "/c/zz.jsonl is new" in str(marks(renamed).difference(marks(files).state()))


def test_the_order_of_files_is_compared() -> None:
    files = corpus(20)
    turned = marks(dict(reversed(files.items())))
    assert turned.difference(marks(files).state()) == "its files are the same, in another order"


@given(st.integers(1, 300), st.sets(st.integers(0, 299), min_size=1))
def test_only_changed_files_are_named(count: int, changed: set[int]) -> None:
    files = corpus(count)
    names = {f"{number:06}.jsonl" for number in changed if number < count}
    after = marks({name: (size, "other" if name in names else tag) for name, (size, tag) in files.items()})
    words = after.difference(marks(files).state())
    assert (words is None) == (not names)
    if words is not None and words.startswith("/c/"):
        assert words.split()[0].removeprefix("/c/") in names


def test_marks_of_20_000_files_take_two_kilobytes() -> None:
    files = corpus(20_000)
    before = marks(files)
    state = before.state()
    assert len(pickle.dumps(state)) < 16 * MAX_GROUPS + 200 < 2300
    files["017777.jsonl"] = (1, "other")
    assert str(marks(files).difference(state)).startswith("/c/017777.jsonl is another file; ")


@pytest.mark.parametrize("sums", [b"", b"x", b"x" * 16, b"x" * 48, b"\xff" * 16 * 4096, "text", None])
def test_damaged_marks_are_no_error(sums: Any) -> None:
    state = {**marks(corpus(9)).state(), "content": "0" * 16, "sums": sums}
    assert isinstance(marks(corpus(9)).difference(state), str)
    for odd in (None, 3, {}, [], "x"):
        assert marks(corpus(9)).difference(odd) == "nothing is known of the files it was made with"


def test_a_refused_state_names_the_changed_file(tmp_path: Path) -> None:
    for number in range(9):
        write(tmp_path / f"{number}.jsonl", rows(20, seed=number))

    def data() -> IterablePackedDataset:
        return IterablePackedDataset(JSONLSource(f"{tmp_path}/*.jsonl"), encoder=Numbers(), max_seq_len=24)

    state = data().state_dict()
    path = tmp_path / "4.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"n": 1', b'"n": 2'))
    with pytest.raises(ValueError) as error:
        data().load_state_dict(state)
    assert str(error.value) == (
        f"the state was made with another corpus: {path} is another file; resume with what the run began with, "
        "or start a new run"
    )
