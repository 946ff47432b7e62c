"""Datatrove's `.ds` files: documents against a naive reader and datatrove's own writer; losses; damaged files."""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streampack import DatatroveSource, IterablePackedDataset
from streampack.sources import Reading
from streampack.types import IGNORE_INDEX
from tests.support.corpus import in_memory
from tests.support.foreign_tokens import write_datatrove

Rows = list[tuple[list[int], list[int]]]


def documents_of(count: int, *, top: int, seed: int = 0) -> tuple[list[list[int]], list[list[int]]]:
    """Return documents, some of them empty, and losses."""
    rng = np.random.default_rng(seed)
    found = [rng.integers(0, top, rng.integers(0, 40)).tolist() for _ in range(count)]
    return found, [rng.integers(0, 2, len(document)).tolist() for document in found]


def naive(path: Path, *, width: int, loss: bool) -> Rows:
    """Read a file by the description in `streampack.sources.datatrove` alone, one number at a time."""
    data, index = path.read_bytes(), path.with_name(f"{path.name}.index").read_bytes()
    marks = path.with_name(f"{path.name}.loss").read_bytes() if loss else b"\x01" * (len(data) // width)
    ends = [0, *(int.from_bytes(index[i : i + 8], "little") for i in range(0, len(index), 8))]
    rows = []
    for start, end in pairwise(ends):
        tokens = [int.from_bytes(data[width * i :][:width], "little") for i in range(start, end)]
        labels = [t if marks[start + i] else IGNORE_INDEX for i, t in enumerate(tokens)]
        rows.append((tokens, labels))
    return rows


def read_all(source: DatatroveSource, num_lanes: int = 1, **reading: Any) -> Rows:
    lanes = [source.read(Reading(lane, num_lanes=num_lanes, **reading)) for lane in range(num_lanes)]
    return [(row.data["tokens"].tolist(), row.data["labels"].tolist()) for lane in lanes for row in lane]


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("loss", [False, True])
@pytest.mark.parametrize("width", [2, 4])
def test_documents_are_those_of_the_index(tmp_path: Path, width: int, loss: bool, remote: bool) -> None:
    documents, losses = documents_of(70, top=60_000 if width == 2 else 2**32)
    folder = write_datatrove(tmp_path, documents, losses=losses if loss else None, width=width, per_file=30)
    expected = [row for path in sorted(folder.glob("*.ds")) for row in naive(path, width=width, loss=loss)]
    assert [tokens for tokens, _ in expected] == documents
    source = DatatroveSource(f"{in_memory(tmp_path)}/*.ds" if remote else tmp_path)
    assert read_all(source) == expected
    assert sorted(read_all(source, 3, shuffle_window=9)) == sorted(expected)
    assert (source.num_rows(), source.tokens) == (70, sum(map(len, documents)))
    assert source.ids_below == {2: 1 << 16, 4: 1 << 32}[width]
    every = DatatroveSource(tmp_path, loss=False)
    assert read_all(every) == [(tokens, tokens) for tokens in documents]
    assert (every.fingerprint() == DatatroveSource(tmp_path).fingerprint()) == (not loss)


def test_the_same_tokens_as_the_own_reader_of_datatrove(tmp_path: Path) -> None:
    """Files that datatrove's code wrote, and tokens that its code read."""
    tokenizer = pytest.importorskip("datatrove.pipeline.tokens.tokenizer")
    dataset = pytest.importorskip("datatrove.utils.dataset")
    documents, losses = documents_of(40, top=60_000)
    written = tokenizer.TokenizedFile(str(tmp_path), "00000_x.ds", save_loss_metadata=True, token_size=2)
    for document, loss in zip(documents, losses, strict=True):
        written.write(document, np.array(loss))
    written.close()
    source = DatatroveSource(tmp_path)
    assert [tokens for tokens, _ in read_all(source)] == documents
    assert read_all(source) == naive(tmp_path / "00000_x.ds", width=2, loss=True)
    theirs = dataset.DatatroveFileDataset(str(tmp_path / "00000_x.ds"), seq_len=9)
    flat = [token for tokens, _ in read_all(source) for token in tokens]
    found = [theirs[i]["input_ids"].tolist() for i in range(len(theirs))]  # it has no end if it is iterated
    assert len(found) > 20
    assert found == [flat[10 * i : 10 * i + 10] for i in range(len(found))]


def test_a_resume_with_another_loss_is_refused(tmp_path: Path) -> None:
    documents, losses = documents_of(40, top=100)

    def opened() -> IterablePackedDataset:
        return IterablePackedDataset(DatatroveSource(tmp_path), max_seq_len=40, num_lanes=1, empty="drop")

    write_datatrove(tmp_path, documents, losses=losses)
    dataset = opened()
    next(iter(dataset))
    state = dataset.state_dict()
    opened().load_state_dict(state)
    write_datatrove(tmp_path, documents, losses=[[1 - mark for mark in loss] for loss in losses])
    with pytest.raises(ValueError, match=r"00000_unshuffled.ds"):
        opened().load_state_dict(state)


NAME = "00000_unshuffled.ds"


def cut(name: str, left: int) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:left])


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no index": (
        lambda folder: (folder / f"{NAME}.index").unlink(),
        f"there is no {NAME}.index beside it, which says where documents end; tokenize with save_index=True, or",
    ),
    "odd index": (
        cut(f"{NAME}.index", 77),
        f"{NAME}.index has 77 bytes, and an index has 8 for each document",
    ),
    "empty index": (
        cut(f"{NAME}.index", 0),
        f"{NAME}.index has 0 bytes, and an index has 8 for each document",
    ),
    "short index": (
        cut(f"{NAME}.index", 72),
        "it has 60 bytes, and the 27 tokens of its index take 54 or 108",
    ),
    "cut tokens": (
        cut(NAME, 58),
        "it has 58 bytes, and the 30 tokens of its index take 60 or 120; one of the two",
    ),
    "odd tokens": (cut(NAME, 59), "it has 59 bytes"),
    "no tokens": (cut(NAME, 0), "it is empty"),
    "cut loss": (
        cut(f"{NAME}.loss", 29),
        f"{NAME}.loss has 29 bytes, and the file has 30 tokens; one of the two",
    ),
}


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("kind", BROKEN)
def test_files_that_do_not_fit_are_refused_at_the_start(tmp_path: Path, kind: str, remote: bool) -> None:
    change, message = BROKEN[kind]
    write_datatrove(tmp_path, [[i, i, i] for i in range(10)], losses=[[1, 0, 1]] * 10)
    change(tmp_path)
    with pytest.raises(ValueError, match=rf"{NAME}: .*{message}"):
        DatatroveSource(f"{in_memory(tmp_path) if remote else tmp_path}/{NAME}", retries=0)


def test_a_file_without_the_loss_that_others_have_is_not_trained_on_unmasked(tmp_path: Path) -> None:
    write_datatrove(tmp_path, [[i, i, i] for i in range(10)], losses=[[1, 0, 1]] * 10, per_file=5)
    (tmp_path / "00001_unshuffled.ds.loss").unlink()
    source = DatatroveSource(tmp_path)
    [(shown, problem)] = source.bad_shards()
    assert Path(shown).name == "00001_unshuffled.ds"
    assert "there is no 00001_unshuffled.ds.loss beside it, while other files have one" in problem
    assert DatatroveSource(tmp_path, loss=False).bad_shards() == []


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("end", [0, 2**40, 2**63])
def test_damaged_ends_are_bad_records(tmp_path: Path, end: int, remote: bool) -> None:
    write_datatrove(tmp_path, [[i, i, i] for i in range(60)])
    index = tmp_path / f"{NAME}.index"
    data = bytearray(index.read_bytes())
    struct.pack_into("<Q", data, 8 * 30, end)
    index.write_bytes(data)
    source = DatatroveSource(f"{in_memory(tmp_path)}/{NAME}" if remote else tmp_path)
    with pytest.raises(
        ValueError, match=rf"{NAME}, document \d+: the offsets of its records lead out of {NAME}"
    ):
        list(IterablePackedDataset(source, max_seq_len=8, num_lanes=1))
    packs = list(IterablePackedDataset(source, max_seq_len=8, num_lanes=1, on_bad_record="skip"))
    assert len({token for pack in packs for token in pack["tokens"].tolist()}) > 50, (
        "the other parts are read"
    )
