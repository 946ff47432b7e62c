"""Files of tokens, of this package and of other programs, and MDS: against readers of a few lines."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
import zlib
from collections.abc import Callable
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack import (
    IGNORE_INDEX,
    DatatroveSource,
    FlatTokensSource,
    Holdout,
    IterablePackedDataset,
    MDSSource,
    MegatronSource,
    Mix,
    TokenShardSource,
)
from streampack.sources import Reading
from streampack.tokenize import tokenize
from tests.harness.conformance import lists, read_with_cursors
from tests.harness.corpus import identity_of, in_memory, read_all
from tests.harness.files import small_pieces, write_datatrove, write_flat, write_mds, write_megatron

Rows = list[tuple[list[int], list[int]]]  # (tokens, labels)
EOS, BOS = 0, 1


def documents_of(count: int, *, seed: int = 0, top: int = 120) -> list[list[int]]:
    """Return documents, some of them empty; the last one is not."""
    rng = np.random.default_rng(seed)
    return [*(rng.integers(0, top, rng.integers(0, 40)).tolist() for _ in range(count)), [7, 8]]


def losses_of(documents: list[list[int]]) -> list[list[int]]:
    """Return marks of 0 and 1, with none of the first document that is not trained."""
    rng = np.random.default_rng(1)
    return [
        [1] * len(documents[0]),
        *(rng.integers(0, 2, len(document)).tolist() for document in documents[1:]),
    ]


def tokens_of(count: int, *, seed: int = 0) -> list[int]:
    """Return tokens of which a tenth each are `EOS` and `BOS`, often one behind the other."""
    rng = np.random.default_rng(seed)
    found = rng.integers(2, 100, count)
    found[rng.random(count) < 0.1] = EOS
    found[rng.random(count) < 0.1] = BOS
    after = np.flatnonzero(found[:-1] == EOS) + 1
    found[after[::2]] = BOS
    return found.tolist()


# Naive readers, by the descriptions of the formats alone.


def naive_megatron(folder: Path) -> Rows:
    found: Rows = []
    for path in sorted(folder.glob("*.idx")):
        index, data = path.read_bytes(), path.with_suffix(".bin").read_bytes()
        assert index[:17] == b"MMIDIDX\x00\x00\x01" + bytes(7)
        sequences, entries = struct.unpack("<QQ", index[18:34])
        form = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}[index[17]]
        at, numbers = 34, []
        for size, letter, count in ((4, "i", sequences), (8, "q", sequences), (8, "q", entries)):
            numbers.append([struct.unpack_from(f"<{letter}", index, at + size * i)[0] for i in range(count)])
            at += size * count
        lengths, pointers, firsts = numbers
        read = [
            list(struct.unpack_from(f"<{n}{form}", data, start))
            for n, start in zip(lengths, pointers, strict=True)
        ]
        documents = [list(chain.from_iterable(read[first:last])) for first, last in pairwise(firsts)]
        found += [(document, document) for document in documents]
    return found


def naive_datatrove(folder: Path, width: int) -> Rows:
    found: Rows = []
    for path in sorted(folder.glob("*.ds")):
        data, index = path.read_bytes(), path.with_name(f"{path.name}.index").read_bytes()
        loss = path.with_name(f"{path.name}.loss")
        marks = loss.read_bytes() if loss.exists() else b"\x01" * (len(data) // width)
        ends = [0, *(int.from_bytes(index[i : i + 8], "little") for i in range(0, len(index), 8))]
        for start, end in pairwise(ends):
            tokens = [int.from_bytes(data[width * i :][:width], "little") for i in range(start, end)]
            found.append((tokens, [t if marks[start + i] else IGNORE_INDEX for i, t in enumerate(tokens)]))
    return found


def naive_shards(folder: Path) -> Rows:
    """Read the documents of a folder of token shards, following the table in `token_shards` alone."""
    found: Rows = []
    for path in sorted(folder.glob("tokens-*.bin")):
        data = path.read_bytes()
        header = json.loads(data[:4096])
        width = {"uint16": 2, "uint32": 4}[header["dtype"]]
        words = [int.from_bytes(data[4096 + i * width :][:width], "little") for i in range(header["tokens"])]
        at = 4096 + header["tokens"] * width
        at += -at % 8
        ends = [int.from_bytes(data[at + 12 * i :][:8], "little") for i in range(header["documents"] + 1)]
        bits = data[at + 12 * len(ends) :]
        for number, (start, end) in enumerate(pairwise(ends)):
            trained = [not header["masked"] or bits[i // 8] >> i % 8 & 1 for i in range(start, end)]
            tokens = words[start:end]
            covered = data[4096 + start * width : 4096 + end * width]
            covered += bytes(map(bool, trained)) if header["masked"] else b""
            assert int.from_bytes(data[at + 12 * number + 8 :][:4], "little") == zlib.crc32(covered)
            labels = [t if yes else IGNORE_INDEX for t, yes in zip(tokens, trained, strict=True)]
            found.append((tokens, labels))
    return found


def naive_flat(tokens: list[int], rule: str) -> Rows:
    """Cut tokens into documents, asking at each token whether one begins there."""
    documents: list[list[int]] = []
    for i, token in enumerate(tokens):
        begins = {
            "eos": i and tokens[i - 1] == EOS,
            "bos": token == BOS,
            "both": i and tokens[i - 1] == EOS and token == BOS,
            "length": i % 7 == 0,
        }[rule]
        if i == 0 or begins:
            documents.append([])
        documents[-1].append(token)
    return [(document, document) for document in documents]


class Format(NamedTuple):
    """How files are written to a folder, returning what a naive reader finds in them; and how they are opened."""

    write: Callable[[Path], Rows]
    open: Callable[[Any], Any]
    pattern: str  # of the files to name behind a URL; "" for the folder
    below: int | None  # a bound of the ids that the format gives


RULES: dict[str, dict[str, int]] = {
    "eos": {"eos_token_id": EOS},
    "bos": {"bos_token_id": BOS},
    "both": {"eos_token_id": EOS, "bos_token_id": BOS},
    "length": {"document_length": 7},
}


def megatron(dtype: str, sentence: int | None) -> Format:
    def write(folder: Path) -> Rows:
        # Ids that need all bits of two bytes: read as signed ones, they would be negative.
        documents = documents_of(60, top=60_000 if dtype == "uint16" else 120)
        return naive_megatron(write_megatron(folder, documents, dtype=dtype, per_file=25, sentence=sentence))

    return Format(write, MegatronSource, "/*.bin", {"uint8": 1 << 8, "uint16": 1 << 16}.get(dtype))


def datatrove(width: int, *, loss: bool) -> Format:
    def write(folder: Path) -> Rows:
        documents = documents_of(70, top=60_000 if width == 2 else 2**32)
        losses = losses_of(documents) if loss else None
        write_datatrove(folder, documents, losses=losses, width=width, per_file=30)
        return naive_datatrove(folder, width)

    return Format(write, DatatroveSource, "/*.ds", 1 << 8 * width)


def token_shards(dtype: str, *, masked: bool) -> Format:
    def write(folder: Path) -> Rows:
        documents = documents_of(60, top=60_000 if dtype == "uint16" else 2**32)
        losses = losses_of(documents) if masked else [[1] * len(document) for document in documents]
        rows = [
            {
                "tokens": ids,
                "labels": [t if mark else IGNORE_INDEX for t, mark in zip(ids, marks, strict=True)],
            }
            for ids, marks in zip(documents, losses, strict=True)
            if ids  # a document without a token is a bad record
        ]
        tokenize(rows, out=folder, dtype=dtype, lanes=1, shard_tokens=300, progress=False)
        assert naive_shards(folder) == [(row["tokens"], row["labels"]) for row in rows], "all is written"
        return naive_shards(folder)

    return Format(write, TokenShardSource, "", {"uint16": 1 << 16, "uint32": 1 << 32}[dtype])


def flat(rule: str, *, dtype: str = "uint16", headers: tuple[str | None, ...] = (None, None)) -> Format:
    def write(folder: Path) -> Rows:
        found: Rows = []
        for number, header in enumerate(headers):
            own = tokens_of(300 - 101 * number, seed=number)
            write_flat(folder / f"{number}.bin", own, dtype=dtype, header=header)
            found += naive_flat(own, rule)
        return found

    below = {"uint8": 1 << 8, "uint16": 1 << 16, "uint32": 1 << 32}.get(dtype)
    return Format(write, lambda paths: FlatTokensSource(paths, dtype=dtype, **RULES[rule]), "/*.bin", below)


FORMATS: dict[str, Format] = {
    **{
        f"megatron {dtype} {sentence}": megatron(dtype, sentence)
        for dtype, sentence in (
            *((dtype, None) for dtype in ("uint8", "int8", "int16", "uint16", "int32", "int64")),
            *((dtype, 7) for dtype in ("uint16", "int32")),
        )
    },
    **{
        f"datatrove {width} {loss}": datatrove(width, loss=loss) for width in (2, 4) for loss in (False, True)
    },
    **{
        f"tokens {dtype} {masked}": token_shards(dtype, masked=masked)
        for dtype in ("uint16", "uint32")
        for masked in (False, True)
    },
    **{f"flat {rule}": flat(rule) for rule in RULES},
    **{f"flat {dtype}": flat("eos", dtype=dtype) for dtype in ("uint8", "uint32", "int64")},
    "flat numpy": flat("both", dtype="uint32", headers=("numpy", "numpy")),
    "flat llm.c": flat("eos", dtype="uint32", headers=("llm.c", "llm.c")),
    "flat mixed": flat("bos", headers=(None, "numpy", "llm.c")),
}


def pairs(source: Any, **reading: Any) -> Rows:
    return [(row["tokens"].tolist(), row["labels"].tolist()) for row in read_all(source, **reading)]


@pytest.mark.parametrize("remote", [False, True], ids=["local", "url"])
@pytest.mark.parametrize("kind", FORMATS)
def test_rows_are_those_of_a_naive_reader(
    tmp_path: Path, kind: str, remote: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts, chunks and blocks are so small that documents cross their ends."""
    small_pieces(monkeypatch, block=47)
    made, folder = FORMATS[kind], tmp_path / tmp_path.name
    folder.mkdir()
    expected = made.write(folder)
    source = made.open(f"{in_memory(folder)}{made.pattern}" if remote else folder)
    assert pairs(source) == expected
    for reading in ({"num_lanes": 2}, {"num_lanes": 7}, {"num_lanes": 3, "shuffle_window": 9}):
        assert sorted(pairs(source, **reading)) == sorted(expected)
    assert source.ids_below == made.below
    if kind.startswith("flat") and kind != "flat length":
        assert source.size is None
    else:
        assert source.size == len(expected)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    rule=st.sampled_from(list(RULES)),
    chunk=st.integers(1, 9),
    num_lanes=st.integers(1, 7),
)
def test_each_flat_document_is_in_one_lane_wherever_files_are_cut(
    tmp_path_factory: pytest.TempPathFactory, tokens: list[int], rule: str, chunk: int, num_lanes: int
) -> None:
    """Reading goes on from the cursor of each document."""
    path = write_flat(tmp_path_factory.mktemp("flat") / "a.bin", tokens)
    source = FlatTokensSource(path, dtype="uint16", **RULES[rule])
    with pytest.MonkeyPatch.context() as patch:
        small_pieces(patch)
        patch.setattr("streampack.sources.formats.flat_tokens.CHUNK", chunk)  # private: see `small_pieces`
        found: list[list[int]] = []
        for lane in range(num_lanes):
            rows, cursors = read_with_cursors(source.read(Reading(lane, num_lanes=num_lanes)))
            own = [row.data["tokens"].tolist() for row in rows]
            for k, cursor in enumerate(cursors):
                again = source.read(Reading(lane, num_lanes=num_lanes, start=cursor))
                assert [each.data["tokens"].tolist() for each in again] == own[k:]
            found += own
    assert sorted(found) == sorted(document for document, _ in naive_flat(tokens, rule))


def test_ids_are_checked_whatever_the_dtype_bounds(tmp_path: Path) -> None:
    rows = [{"tokens": [7, 300, 8], "labels": [-100, 300, 8]}, {"tokens": [5], "labels": [5]}]
    source = TokenShardSource(tokenize(rows, out=tmp_path, lanes=1, dtype="uint16", progress=False))

    class Own(TokenShardSource):
        """A source of a user."""

    mix = Mix([{"name": "a", "source": source, "weight": 1}])
    both = [Holdout(source, fraction=0.5, part=part) for part in ("train", "validation")]
    [held] = [each for each in both if any(row.data["tokens"].size == 3 for row in each.read(Reading()))]
    for data in (source, held, mix, Own(tmp_path)):
        with pytest.raises(ValueError, match="document 0: token id 300 is outside the vocabulary of 300"):
            list(IterablePackedDataset(data, max_seq_len=8, vocab_size=300))
        assert list(IterablePackedDataset(data, max_seq_len=8, vocab_size=301))


def test_paths_of_megatron_are_prefixes_names_folders_or_globs(tmp_path: Path) -> None:
    documents = documents_of(20)
    write_megatron(tmp_path, documents, per_file=7)
    prefixes = [tmp_path / f"text_document_{i}" for i in range(3)]
    given_: list[Any] = [tmp_path, str(tmp_path / "*.bin"), prefixes, [f"{path}.bin" for path in prefixes]]
    found = [[tokens for tokens, _ in pairs(MegatronSource(paths))] for paths in [*given_, prefixes[1]]]
    assert found == [documents] * 4 + [documents[7:14]]


def test_a_file_without_the_loss_that_others_have_is_not_trained_on_unmasked(tmp_path: Path) -> None:
    write_datatrove(tmp_path, [[i, i, i] for i in range(10)], losses=[[1, 0, 1]] * 10, per_file=5)
    masked = identity_of(DatatroveSource(tmp_path))
    every = DatatroveSource(tmp_path, loss=False)
    assert all(tokens == labels for tokens, labels in pairs(every))
    assert identity_of(every) != masked
    (tmp_path / "00001_unshuffled.ds.loss").unlink()
    problem = (
        "1 of 2 files cannot be read: .*/00001_unshuffled.ds: there is no 00001_unshuffled.ds.loss beside it"
    )
    with pytest.raises(ValueError, match=problem):
        IterablePackedDataset(DatatroveSource(tmp_path), max_seq_len=8)
    assert list(IterablePackedDataset(DatatroveSource(tmp_path, loss=False), max_seq_len=8))


ANOTHER: dict[str, tuple[Callable[[Path, int], Any], Callable[..., Any], str]] = {
    "another index": (
        lambda folder, n: write_megatron(folder, [[1, 2, 3] * (1 + n)] * (20 // (1 + n))),
        MegatronSource,
        "corpus.files=.* file",
    ),
    "another loss": (
        lambda folder, n: write_datatrove(folder, [[1, 2, 3]] * 20, losses=[[1, n, 1]] * 20),
        DatatroveSource,
        "corpus.files=.* file",
    ),
    **{
        f"another {name}": (
            lambda folder, n: write_flat(folder / "a.bin", tokens_of(300)),
            lambda folder, n, name=name, before=before, now=now: FlatTokensSource(
                folder, dtype="uint16", **{name: now if n else before}
            ),
            f"{name}={before} and this dataset has .*{name}={now}",
        )
        for name, before, now in (("eos_token_id", EOS, BOS), ("document_length", 5, 7))
    },
}  # fmt: skip


@pytest.mark.parametrize("case", ANOTHER)
def test_the_same_tokens_divided_or_masked_otherwise_are_another_corpus(tmp_path: Path, case: str) -> None:
    write, make, message = ANOTHER[case]

    def opened(number: int) -> IterablePackedDataset:
        write(tmp_path, number)
        source = make(tmp_path, number) if case.endswith(("id", "length")) else make(tmp_path)
        return IterablePackedDataset(source, max_seq_len=64, num_lanes=1)

    dataset = opened(0)
    next(iter(dataset))
    opened(0).load_state_dict(dataset.state_dict())
    with pytest.raises(ValueError, match=message):
        opened(1).load_state_dict(dataset.state_dict())


SETTINGS = [
    ({}, "say where documents end: eos_token_id, bos_token_id or both; or else document_length"),
    ({"eos_token_id": 0, "document_length": 9}, "say where documents end"),
    ({"document_length": 0}, "document_length"),
    ({"eos_token_id": 0, "dtype": "float32"}, "dtype='float32' is no type of ids; it can be uint8, uint16"),
    (
        {"eos_token_id": 50256, "dtype": "uint8"},
        r"eos_token_id=50256 is none of uint8 \(0 to 255\), the type",
    ),
    ({"eos_token_id": -1}, r"eos_token_id=-1 is none of uint16 \(0 to 65535\)"),
    ({"bos_token_id": 1.5}, "bos_token_id=1.5 is none of uint16"),
]


@pytest.mark.parametrize(("how", "message"), SETTINGS)
def test_settings_that_find_no_documents_are_refused(tmp_path: Path, how: Any, message: str) -> None:
    write_flat(tmp_path / "a.bin", tokens_of(10))
    with pytest.raises(ValueError, match=message):
        FlatTokensSource(tmp_path, **{"dtype": "uint16", **how})


def test_a_wrong_end_of_documents_is_noticed_early_in_ten_gigabytes(tmp_path: Path) -> None:
    """The file has holes, so that reading on would take minutes."""
    path = tmp_path / "large.bin"
    with path.open("wb") as file:
        file.truncate(10 * 10**9)
    wrong = FlatTokensSource(path, eos_token_id=60, dtype="uint16", max_document_tokens=1 << 20)
    with pytest.raises(
        ValueError, match="more than max_document_tokens=1,048,576 by eos_token_id=60: correct the id"
    ):
        next(iter(IterablePackedDataset(wrong, max_seq_len=510, num_lanes=8)))


# Folders of token shards.


def numbered_shards(folder: Path, first: int, count: int = 20, **options: Any) -> Path:
    rows = [{"tokens": [i], "labels": [i]} for i in range(first, first + count)]
    return tokenize(rows, out=folder, progress=False, **{"lanes": 2, **options})


def test_several_folders_are_one_corpus(tmp_path: Path) -> None:
    one, two = numbered_shards(tmp_path / "one", 0), numbered_shards(tmp_path / "two", 20)
    source = TokenShardSource([one, str(two)])
    for num_lanes in (1, 3):
        found = [tokens for tokens, _ in pairs(source, num_lanes=num_lanes)]
        assert sorted(found) == [[i] for i in range(40)]
    assert source.size == source.tokens == 40
    assert source.locate((2, 5)) == f"{two}/tokens-00000-00000.bin, document 5"
    assert source.fetch_many([(2, 5)])[0]["tokens"].tolist() == [30]
    alone, rows = identity_of(TokenShardSource(one)), pairs(source)
    one.rename(tmp_path / "moved")
    assert identity_of(TokenShardSource([tmp_path / "moved", two])) == identity_of(source) != alone
    remote = TokenShardSource([in_memory(tmp_path / "moved"), in_memory(two)])
    assert identity_of(remote) == identity_of(source)
    assert pairs(remote) == rows


def test_lanes_are_balanced_by_tokens_whatever_headers_add(tmp_path: Path) -> None:
    """A header has 4,096 bytes, as many as 2,048 ids: by bytes, the long document's lane got short ones, too."""
    long = tokenize([{"tokens": [7] * 2000, "labels": [7] * 2000}], out=tmp_path / "long", progress=False)
    short = [numbered_shards(tmp_path / f"{i}", i, 1, lanes=1) for i in range(6)]
    source = TokenShardSource([long, *short])
    lanes = [source.read(Reading(lane, num_lanes=2)) for lane in range(2)]
    held = [[row.data["tokens"].size for row in lane] for lane in lanes]
    assert held == [[2000], [1] * 6]


def test_folders_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    one, two = numbered_shards(tmp_path / "one", 0), numbered_shards(tmp_path / "two", 20)
    shutil.copytree(one, copy := tmp_path / "copy")
    same = "tokens-00000-00000.bin are the same shard; name each folder once"
    for folders, message in (
        ([], "no folders given; name at least one"),
        ([one, one], "one/tokens-00000-00000.bin is named twice"),
        ([one, two, copy], f"copy/{same}"),
        ([one, in_memory(two)], "are in several places .*; make a source of each"),
        ([one, tmp_path / "nothing"], "there is no .*nothing/index.json"),
        ([one / "index.json"], "there is no .*index.json/index.json; name the folder"),
    ):
        with pytest.raises(ValueError, match=message):
            TokenShardSource(folders)


def test_a_shard_by_two_names_is_refused(tmp_path: Path) -> None:
    """All of its documents would be trained twice in each epoch."""
    folder = numbered_shards(tmp_path, 0, lanes=1)
    index = json.loads((folder / "index.json").read_text())
    [entry] = index["shards"]
    (folder / "link.bin").symlink_to(folder / entry["name"])
    for name, message in ((f"./{entry['name']}", "is named twice"), ("link.bin", "link.bin are one file")):
        index["shards"] = [entry, {**entry, "name": name}]
        (folder / "index.json").write_text(json.dumps(index))
        with pytest.raises(ValueError, match=f"{message}; name every file once"):
            TokenShardSource(folder)


# MDS.


@pytest.mark.parametrize("compression", [None, "gz", "zstd:3"])
def test_every_encoding_of_mds(tmp_path: Path, compression: str | None) -> None:
    row = {
        "str": "naïve 漢字",
        "bytes": b"\x00\xff",
        "json": {"a": [1, None, "x"]},
        "int": -(2**62),
        "uint16": 65535,
        "float32": 0.5,
        "str_int": 10**30,
        "str_float": 0.1,
        "ndarray": np.arange(6, dtype=np.int64).reshape(2, 3),
        "ndarray:uint16": np.array([1, 2, 3], np.uint16),
        "ndarray:uint16:2,3": np.arange(6, dtype=np.uint16).reshape(2, 3),
    }
    write_mds(tmp_path, [row] * 35, {name: name for name in row}, compression=compression)
    source = pickle.loads(pickle.dumps(MDSSource(tmp_path)))  # as for a worker that is spawned
    found = list(source.read(Reading()))
    assert len(found) == 35
    for got in (each.data for each in found):
        assert list(got) == list(row)
        assert lists(got) == lists(row)
        assert isinstance(got["uint16"], int)
        assert got["ndarray"].dtype == np.int64
    ending = {None: "", "gz": ".gz", "zstd:3": ".zstd"}[compression]
    assert source.locate((1, 2)) == f"{tmp_path}/shard.00001.mds{ending}, sample 2"
    assert source.natural_lanes() == (4 if compression else 1)


def test_only_the_named_columns_of_mds_are_read(tmp_path: Path) -> None:
    """Another one may be pickled, which is never read."""
    folder = write_mds(tmp_path, [{"text": "a", "id": i} for i in range(3)], {"text": "str", "id": "int"})
    assert read_all(MDSSource(folder, columns=["id"])) == [{"id": i} for i in range(3)]
    with pytest.raises(ValueError, match="shard.00000.mds: it has no column 'ids'; it has 'text', 'id'"):
        MDSSource(folder, columns=["ids"])
    index = folder / "index.json"
    index.write_text(index.read_text().replace('["str", "int"]', '["pkl", "int"]'))
    assert read_all(MDSSource(folder, columns=["id"])) == [{"id": i} for i in range(3)]
    with pytest.raises(ValueError, match="column 'text' is pickled"):
        MDSSource(folder)
