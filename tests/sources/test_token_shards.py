"""Token shards: the format, against a reader of a few lines; the source, of local files and behind a URL."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from streampack import Holdout, IterablePackedDataset, MDSSource, Mix, TokenShardSource
from streampack.packing.encoders import TokensEncoder
from streampack.packing.samples import sample_from_columns
from streampack.sources import Reading, token_shards
from streampack.sources.token_files import ShardWriter
from streampack.storage.folders import LocalFolder
from streampack.tokenize.tokenize import tokenize
from streampack.types import IGNORE_INDEX
from tests.harness.files import header_of
from tests.harness.corpus import in_memory, read_all
from tests.harness.stores import running

Rows = list[dict[str, list[int]]]


def rows_of(count: int, *, masked: bool, seed: int = 0, top: int = 60_000) -> Rows:
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        tokens = rng.integers(0, top, rng.integers(0, 30)).tolist()
        labels = [token if not masked or rng.random() < 0.5 else IGNORE_INDEX for token in tokens]
        rows.append({"tokens": tokens, "labels": labels})
    return rows


def make(rows: Rows, folder: Path, **options: Any) -> Path:
    return tokenize(rows, out=folder, progress=False, **options)


def lists(source: TokenShardSource, **reading: Any) -> Rows:
    return [{key: value.tolist() for key, value in row.items()} for row in read_all(source, **reading)]


def naive(folder: Path) -> Rows:
    """Read the documents of a folder, following the table in `token_files` alone."""
    found = []
    for path in sorted(folder.glob("tokens-*.bin")):
        data = path.read_bytes()
        header = json.loads(data[:4096])
        width = {"uint16": 2, "uint32": 4}[header["dtype"]]
        words = [int.from_bytes(data[4096 + i * width :][:width], "little") for i in range(header["tokens"])]
        at = 4096 + header["tokens"] * width
        at += -at % 8
        ends = [int.from_bytes(data[at + 8 * i :][:8], "little") for i in range(header["documents"] + 1)]
        bits = data[at + 8 * len(ends) :]
        for start, end in pairwise(ends):
            trained = [not header["masked"] or bits[i // 8] >> i % 8 & 1 for i in range(start, end)]
            tokens = words[start:end]
            labels = [t if yes else IGNORE_INDEX for t, yes in zip(tokens, trained, strict=True)]
            found.append({"tokens": tokens, "labels": labels})
    return found


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_the_format_is_as_documented(tmp_path: Path, dtype: str, masked: bool) -> None:
    rows = rows_of(40, masked=masked)
    assert rows[0]["tokens"]
    rows[0]["labels"] = rows[0]["tokens"]  # only later documents need a mask
    make(rows, tmp_path, dtype=dtype, lanes=1, shard_tokens=200)
    assert len(list(tmp_path.glob("tokens-*"))) > 1
    assert naive(tmp_path) == rows
    assert lists(TokenShardSource(tmp_path)) == rows
    for path in tmp_path.glob("tokens-*"):
        assert path.stat().st_size == TokenShardSource(tmp_path).shards[int(path.stem[-5:])].size


def allocated(make: Any) -> tuple[Any, int]:
    """Return the result of a call, and its peak of allocated bytes."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    made = make()
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    return made, peak


def test_a_document_is_copied_once(tmp_path: Path) -> None:
    """4 bytes a token: the shard is mapped, the tokens are read once, and the sample is the row's own memory."""
    count = 200_000
    make([{"tokens": list(range(count)), "labels": list(range(count))}], tmp_path, dtype="uint32", lanes=1)
    reader = TokenShardSource(tmp_path).read(Reading())
    row, peak = allocated(lambda: next(reader))
    assert 4 * count <= peak < 4.2 * count
    assert row.data["labels"] is row.data["tokens"]
    sample, peak = allocated(lambda: sample_from_columns(row.data))
    assert peak < 0.1 * count
    assert np.shares_memory(sample.tokens, row.data["tokens"])
    assert sample.labels is sample.tokens


def test_ids_that_need_32_bits_are_int64(tmp_path: Path) -> None:
    rows = [{"tokens": tokens, "labels": tokens} for tokens in ([1, 2**31, 2**32 - 1], [2**31 - 1], [])]
    make(rows, tmp_path, dtype="uint32", lanes=1)
    samples = [sample_from_columns(row.data) for row in TokenShardSource(tmp_path).read(Reading())]
    assert [sample.tokens.tolist() for sample in samples] == [row["tokens"] for row in rows]
    assert [sample.tokens.itemsize for sample in samples] == [8, 4, 4]


def test_a_large_id_is_found_in_whichever_stretch_of_documents_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many short documents are looked at together, long ones each by itself."""
    rows = [{"tokens": [n], "labels": [n]} for n in (1, 2, 3, 2**31, 5, 6, 7, 8, 9)]
    make(rows, tmp_path, dtype="uint32", lanes=1)
    monkeypatch.setattr(token_shards, "OFFSETS_AT_ONCE", 3)
    for most in (0, 2, 3, 100):
        monkeypatch.setattr(token_shards, "LOOKED_AT", most)
        found = [sample_from_columns(row.data).tokens for row in TokenShardSource(tmp_path).read(Reading())]
        assert [tokens.tolist() for tokens in found] == [row["tokens"] for row in rows]
        assert [tokens.itemsize for tokens in found] == [4, 4, 4, 8, 4, 4, 4, 4, 4]


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_ids_are_checked_unless_the_dtype_bounds_them(tmp_path: Path, dtype: str) -> None:
    """The bound is the dtype's, not that of the ids that are there: a byte may change later."""
    rows = [{"tokens": [7, 300, 8], "labels": [-100, 300, 8]}, {"tokens": [5], "labels": [5]}]
    source = TokenShardSource(make(rows, tmp_path, lanes=1, dtype=dtype))
    every = 1 << {"uint16": 16, "uint32": 32}[dtype]

    class Encoder(TokensEncoder):
        """An encoder of a user."""

    class Own(TokenShardSource):
        """A source of a user."""

    def checks(of: Any, **settings: Any) -> bool:
        return IterablePackedDataset(of, max_seq_len=8, **settings).lane_config.checks

    for of in (source, Holdout(source, fraction=0.5, part="train")):
        assert [checks(of, vocab_size=n) for n in (None, every, every - 1)] == [False, False, True]
        assert checks(of, encoder=Encoder())
        assert checks(of, encoder=TokensEncoder(tokens="labels")), "-100 is no id"
    for of in (rows, Own(tmp_path), Mix([{"name": "a", "source": source, "weight": 1}])):
        assert checks(of)
    with pytest.raises(ValueError, match="document 0: token id 300 is outside the vocabulary of 300"):
        list(IterablePackedDataset(source, max_seq_len=8, vocab_size=300))


@pytest.mark.parametrize(
    ("name", "remote"), [("./{}", False), ("./{}", True), ("link.bin", False), ("linked.bin", False)]
)
def test_a_shard_by_two_names_is_refused(tmp_path: Path, name: str, remote: bool) -> None:
    """Otherwise all of its documents would be trained twice in each epoch."""
    folder = make(rows_of(9, masked=False), tmp_path / "shards", lanes=1)
    index = json.loads((folder / "index.json").read_text())
    [entry] = index["shards"]
    first = entry["name"]
    (folder / "link.bin").symlink_to(folder / first)
    os.link(folder / first, folder / "linked.bin")
    index["shards"].append({**entry, "name": name.format(first)})
    (folder / "index.json").write_text(json.dumps(index))
    place = in_memory(folder) if remote else folder
    with pytest.raises(ValueError, match="(is named twice|and .* are one file); name every file once"):
        TokenShardSource(place)


@pytest.mark.parametrize(
    "index",
    ["[]", "{", '{"shards": []}', '{"shards": [{"name": "../x", "size": 9}]}'],
)
def test_errors_of_an_index_hold_no_secret(index: str, tmp_path: Path) -> None:
    """Neither those of broken indexes nor those of missing shards."""
    with running("versioned", tmp_path):
        fsspec.filesystem("versioned").pipe("/host/folder/index.json?key=canary", index.encode())
        for make_source in (TokenShardSource, MDSSource):
            with pytest.raises(ValueError) as caught:
                make_source("versioned://host/folder?key=canary", retries=0)
            assert "canary" not in str(caught.value)


@pytest.mark.parametrize("remote", [True, False])
def test_a_shard_that_was_replaced_under_its_index(tmp_path: Path, remote: bool) -> None:
    """The new shard has the same size, and the index is unchanged."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for number, folder in enumerate(folders):
        make([{"tokens": [number, i], "labels": [number, i]} for i in range(60)], folder, lanes=1)
    [path], [other] = (list(folder.glob("*.bin")) for folder in folders)
    assert path.stat().st_size == other.stat().st_size

    def opened() -> IterablePackedDataset:
        source = TokenShardSource(in_memory(folders[0]) if remote else folders[0])
        return IterablePackedDataset(source, max_seq_len=16, num_lanes=1)

    running = opened()
    next(iter(running))
    state = running.state_dict()
    crc32, now = header_of(path)["crc32"], header_of(other)["crc32"]
    path.write_bytes(other.read_bytes())
    resumed = opened()
    resumed.load_state_dict(state)
    source: Any = resumed.lane_config.source
    message = (
        f"{source.files[0].shown}, document {{}}: it is not the shard that its index describes: its header says crc32 "
        f"{now}, the index crc32 {crc32}; one of them was replaced: copy the folder anew, the index and all shards"
    )
    for number, read in ((8, lambda: next(iter(resumed))), (3, lambda: source.fetch((0, 3)))):
        for _ in range(2):  # asked again, it is looked at again
            with pytest.raises(ValueError) as error:
                read()
            assert str(error.value) == message.format(number)
    path.write_bytes(bytes(4096) + other.read_bytes()[4096:])
    with pytest.raises(
        ValueError,
        match=r"tokens-00000-00000.bin, document 0: the shard is no token shard: it does not begin with a",
    ):
        next(iter(opened()))


def test_an_abandoned_writer_leaves_no_file(tmp_path: Path) -> None:
    writer = ShardWriter(LocalFolder(tmp_path), "x.bin", dtype="uint16")
    writer.append(np.array([1]), np.array([True]))
    with pytest.raises(
        ValueError, match=r'token id 65536 does not fit into uint16 \(0 to 65535\); use dtype="uint32"'
    ):
        writer.append(np.array([65536]), np.array([True]))
    writer.abandon()
    assert list(tmp_path.iterdir()) == []


def numbered(folder: Path, first: int) -> Path:
    rows = [{"tokens": [i], "labels": [i]} for i in range(first, first + 20)]
    return make(rows, folder, lanes=2)


def test_several_folders_are_one_corpus(tmp_path: Path) -> None:
    one, two = numbered(tmp_path / "one", 0), numbered(tmp_path / "two", 20)
    source = TokenShardSource([one, str(two)])
    for num_lanes in (1, 3):
        found = [row["tokens"] for row in lists(source, num_lanes=num_lanes)]
        assert sorted(found) == [[i] for i in range(40)]
    assert source.num_rows() == source.tokens == 40
    assert source.locate((2, 5)) == f"{two}/tokens-00000-00000.bin, document 5"
    assert source.fetch((2, 5))["tokens"].tolist() == [30]
    alone, rows = TokenShardSource(one), lists(source)
    assert [file.name for file in alone.files] == [file.name for file in source.files[:2]]
    one.rename(tmp_path / "moved")
    assert TokenShardSource([tmp_path / "moved", two]).fingerprint() == source.fingerprint()
    assert alone.fingerprint() != source.fingerprint()
    remote = TokenShardSource([in_memory(tmp_path / "moved"), in_memory(two)])
    assert remote.fingerprint() == source.fingerprint()
    assert lists(remote) == rows


def test_folders_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    one, two = numbered(tmp_path / "one", 0), numbered(tmp_path / "two", 20)
    shutil.copytree(one, tmp_path / "copy")
    for folders, message in (
        ([], "no folders given; name at least one"),
        ([one, one], "one/tokens-00000-00000.bin are the same shard; name each folder once"),
        (
            [one, two, tmp_path / "copy"],
            "copy/tokens-00000-00000.bin are the same shard; name each folder once",
        ),
        ([one, in_memory(two)], "lie in several places; make a source of each"),
        ([one, tmp_path / "nothing"], "there is no .*nothing/index.json"),
    ):
        with pytest.raises(ValueError, match=message):
            TokenShardSource(folders)
