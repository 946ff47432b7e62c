"""Files of tokens of other programs: Megatron's, datatrove's and flat ones, against naive readers of their formats."""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack import (
    DatatroveSource,
    FlatTokensSource,
    IterablePackedDataset,
    MegatronSource,
    Mix,
)
from streampack.sources import Reading, flat_tokens, megatron
from streampack.sources.parts import Part
from streampack.storage.remote import RemoteStorage
from streampack.types import IGNORE_INDEX
from tests.harness.conformance import check_resume_everywhere
from tests.harness.corpus import in_memory, read_all
from tests.harness.files import write_datatrove, write_flat, write_megatron

Rows = list[list[int]]


def tokens_in(source: Any, **reading: Any) -> Rows:
    return [row["tokens"].tolist() for row in read_all(source, **reading)]


Pairs = list[tuple[list[int], list[int]]]


# Megatron.


def documents_of(count: int, *, seed: int = 0, top: int = 120, longest: int = 40) -> Rows:
    rng = np.random.default_rng(seed)
    found = [rng.integers(0, top, rng.integers(0, longest)).tolist() for _ in range(count)]
    return [*found, [7, 8]]  # the file is never empty


def naive_megatron(prefix: Path) -> Rows:
    """Read a pair of files by the table in `streampack.sources.megatron` alone, one number at a time."""
    index, data = prefix.with_suffix(".idx").read_bytes(), prefix.with_suffix(".bin").read_bytes()
    assert index[:17] == b"MMIDIDX\x00\x00\x01" + bytes(7)
    sequences, entries = struct.unpack("<QQ", index[18:34])
    form = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}[index[17]]
    at, numbers = 34, []
    for size, letter, count in ((4, "i", sequences), (8, "q", sequences), (8, "q", entries)):
        numbers.append([struct.unpack(f"<{letter}", index[at + size * i :][:size])[0] for i in range(count)])
        at += size * count
    lengths, pointers, firsts = numbers
    read = [
        list(struct.unpack_from(f"<{n}{form}", data, start))
        for n, start in zip(lengths, pointers, strict=True)
    ]
    return [list(chain.from_iterable(read[first:last])) for first, last in pairwise(firsts)]


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("sentence", [None, 7])
@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint16", "int32", "int64"])
def test_documents_are_those_of_the_index(
    tmp_path: Path, dtype: str, sentence: int | None, remote: bool
) -> None:
    documents = documents_of(60)
    write_megatron(tmp_path, documents, dtype=dtype, sentence=sentence)
    assert naive_megatron(tmp_path / "text_document_0") == documents
    source = MegatronSource(f"{in_memory(tmp_path)}/text_document_0" if remote else tmp_path)
    assert tokens_in(source) == documents
    assert sorted(tokens_in(source, num_lanes=3, shuffle_window=9)) == sorted(documents)
    assert source.num_rows() == len(documents)
    assert source.tokens == sum(map(len, documents))
    assert source.ids_below == {"uint8": 256, "uint16": 65536}.get(dtype)
    row = source.fetch((0, len(documents) - 1))
    assert row["tokens"].tolist() == [7, 8]
    assert row["labels"] is row["tokens"]


def test_paths_are_prefixes_names_folders_or_globs(tmp_path: Path) -> None:
    documents = documents_of(20)
    write_megatron(tmp_path, documents, per_file=7)
    prefixes = [tmp_path / f"text_document_{i}" for i in range(3)]
    given: list[Any] = [tmp_path, str(tmp_path / "*.bin"), prefixes, [f"{path}.bin" for path in prefixes]]
    assert [tokens_in(MegatronSource(paths)) for paths in given] == [documents] * 4
    assert tokens_in(MegatronSource(prefixes[1])) == documents[7:14]


def test_ids_of_four_bytes_are_views_of_the_file(tmp_path: Path) -> None:
    """An array of another memory would own it; those of two bytes are widened, and so copied."""
    for dtype, copied in (("int32", False), ("uint16", True)):
        write_megatron(tmp_path, [[1, 2, 3], [4]], dtype=dtype)
        row = next(MegatronSource(tmp_path).read(Reading()))
        assert row.data["tokens"].flags.owndata == copied
        assert not row.data["tokens"].flags.writeable


def test_packs_trace_back_to_file_and_document(tmp_path: Path) -> None:
    write_megatron(tmp_path, [[i] * 5 for i in range(12)], per_file=5)
    dataset = IterablePackedDataset(MegatronSource(tmp_path), max_seq_len=16, num_lanes=2)
    found = []
    for pack in dataset:
        starts = [0, *pack["seq_lens"].cumsum(0).tolist()]
        for fragment, start in zip(pack["fragments"], starts, strict=False):
            number = int(pack["tokens"][start])
            place = f"{tmp_path}/text_document_{number // 5}.bin, document {number % 5}"
            assert place in str(dataset.trace(fragment))
            found.append(number)
    assert sorted(found) == list(range(12))


def test_a_mixture_of_all_files_of_tokens_resumes_at_every_pack(tmp_path: Path) -> None:
    documents = [[i] * (1 + i % 7) for i in range(1, 91)]
    flat = [token for document in documents[60:] for token in (*document, 0)]
    sources: dict[str, Any] = {
        "megatron": MegatronSource(write_megatron(tmp_path / "m", documents[:30])),
        "datatrove": DatatroveSource(write_datatrove(tmp_path / "d", documents[30:60])),
        "flat": FlatTokensSource(write_flat(tmp_path / "f.bin", flat), eos_token_id=0, dtype="uint16"),
    }

    def stream() -> IterablePackedDataset:
        mixture = Mix([{"name": name, "source": source, "weight": 1} for name, source in sources.items()])
        return IterablePackedDataset(
            mixture, max_seq_len=32, num_lanes=2, shuffle=True, shuffle_window=4, untrained="keep"
        )

    packs = check_resume_everywhere(stream, packs=12)
    found = {token for pack in [*packs, *stream()] for token in pack["tokens"].tolist()}
    assert found == set(range(91))


def test_a_file_that_lacks_its_index_is_left_out(tmp_path: Path) -> None:
    write_megatron(tmp_path, [[i, i, i] for i in range(1, 31)], per_file=10)
    (tmp_path / "text_document_1.idx").unlink()
    source = MegatronSource(tmp_path)
    with pytest.raises(ValueError, match="1 of 3 files cannot be read: .*text_document_1.bin: there is no"):
        next(iter(IterablePackedDataset(source, max_seq_len=8, num_lanes=2)))
    with pytest.warns(UserWarning, match="1 of 3 files cannot be read and are left out"):
        dataset = IterablePackedDataset(source, max_seq_len=8, num_lanes=2, on_bad_record="skip")
    tokens = {token for pack in dataset for token in pack["tokens"].tolist()}
    assert tokens - {0} == {*range(1, 11), *range(21, 31)}
    assert dataset.ledger().bad_shards == 1


def test_a_large_index_is_read_at_four_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = documents_of(50)
    write_megatron(tmp_path, documents)
    monkeypatch.setattr(megatron, "HEAD_BYTES", 64)
    assert tokens_in(MegatronSource(tmp_path)) == documents


# Datatrove.


def marked_documents(count: int, *, top: int, seed: int = 0) -> tuple[list[list[int]], list[list[int]]]:
    """Return documents, some of them empty, and losses."""
    rng = np.random.default_rng(seed)
    found = [rng.integers(0, top, rng.integers(0, 40)).tolist() for _ in range(count)]
    return found, [rng.integers(0, 2, len(document)).tolist() for document in found]


def naive_datatrove(path: Path, *, width: int, loss: bool) -> Pairs:
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


def pairs_in(source: DatatroveSource, **reading: Any) -> Pairs:
    return [(row["tokens"].tolist(), row["labels"].tolist()) for row in read_all(source, **reading)]


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("loss", [False, True])
@pytest.mark.parametrize("width", [2, 4])
def test_documents_and_losses_are_those_of_the_index(
    tmp_path: Path, width: int, loss: bool, remote: bool
) -> None:
    documents, losses = marked_documents(70, top=60_000 if width == 2 else 2**32)
    folder = write_datatrove(tmp_path, documents, losses=losses if loss else None, width=width, per_file=30)
    expected = [
        row for path in sorted(folder.glob("*.ds")) for row in naive_datatrove(path, width=width, loss=loss)
    ]
    assert [tokens for tokens, _ in expected] == documents
    source = DatatroveSource(f"{in_memory(tmp_path)}/*.ds" if remote else tmp_path)
    assert pairs_in(source) == expected
    assert sorted(pairs_in(source, num_lanes=3, shuffle_window=9)) == sorted(expected)
    assert (source.num_rows(), source.tokens) == (70, sum(map(len, documents)))
    assert source.ids_below == {2: 1 << 16, 4: 1 << 32}[width]
    every = DatatroveSource(tmp_path, loss=False)
    assert pairs_in(every) == [(tokens, tokens) for tokens in documents]
    assert (every.fingerprint() == DatatroveSource(tmp_path).fingerprint()) == (not loss)


def test_the_same_tokens_as_the_own_reader_of_datatrove(tmp_path: Path) -> None:
    """Files that datatrove's code wrote, and tokens that its code read."""
    tokenizer = pytest.importorskip("datatrove.pipeline.tokens.tokenizer")
    dataset = pytest.importorskip("datatrove.utils.dataset")
    documents, losses = marked_documents(40, top=60_000)
    written = tokenizer.TokenizedFile(str(tmp_path), "00000_x.ds", save_loss_metadata=True, token_size=2)
    for document, loss in zip(documents, losses, strict=True):
        written.write(document, np.array(loss))
    written.close()
    source = DatatroveSource(tmp_path)
    assert [tokens for tokens, _ in pairs_in(source)] == documents
    assert pairs_in(source) == naive_datatrove(tmp_path / "00000_x.ds", width=2, loss=True)
    theirs = dataset.DatatroveFileDataset(str(tmp_path / "00000_x.ds"), seq_len=9)
    flat = [token for tokens, _ in pairs_in(source) for token in tokens]
    found = [theirs[i]["input_ids"].tolist() for i in range(len(theirs))]  # it has no end if it is iterated
    assert len(found) > 20
    assert found == [flat[10 * i : 10 * i + 10] for i in range(len(found))]


def test_a_file_without_the_loss_that_others_have_is_not_trained_on_unmasked(tmp_path: Path) -> None:
    write_datatrove(tmp_path, [[i, i, i] for i in range(10)], losses=[[1, 0, 1]] * 10, per_file=5)
    (tmp_path / "00001_unshuffled.ds.loss").unlink()
    source = DatatroveSource(tmp_path)
    [(shown, problem)] = source.bad_shards()
    assert Path(shown).name == "00001_unshuffled.ds"
    assert "there is no 00001_unshuffled.ds.loss beside it, while other files have one" in problem
    assert DatatroveSource(tmp_path, loss=False).bad_shards() == []


@pytest.mark.parametrize(
    ("write", "make"),
    [
        (lambda f, n, loss: write_megatron(f, [[1, 2, 3] * n] * (20 // n)), MegatronSource),
        (
            lambda f, n, loss: write_datatrove(f, [[1, 2, 3]] * 20, losses=[[1, loss, 1]] * 20),
            DatatroveSource,
        ),
    ],
    ids=["another index", "another loss"],
)
def test_the_same_tokens_divided_or_masked_otherwise_are_another_corpus(
    tmp_path: Path, write: Callable[..., Any], make: Callable[..., Any]
) -> None:
    def opened(*how: int) -> IterablePackedDataset:
        write(tmp_path, *how)
        return IterablePackedDataset(make(tmp_path), max_seq_len=8, num_lanes=1)

    dataset = opened(1, 0)
    next(iter(dataset))
    opened(1, 0).load_state_dict(dataset.state_dict())
    with pytest.raises(ValueError, match=r"text_document_0.bin|00000_unshuffled.ds"):
        opened(2, 1).load_state_dict(dataset.state_dict())


# Flat files.


EOS, BOS = 0, 1


RULES: dict[str, dict[str, int]] = {
    "eos": {"eos_token_id": EOS},
    "bos": {"bos_token_id": BOS},
    "both": {"eos_token_id": EOS, "bos_token_id": BOS},
    "length": {"document_length": 7},
}


def naive(tokens: list[int], rule: str) -> list[list[int]]:
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
    return documents


def tokens_of(count: int, *, seed: int = 0, top: int = 100) -> list[int]:
    """Return tokens of which a tenth each are `EOS` and `BOS`, often one behind the other."""
    rng = np.random.default_rng(seed)
    found = rng.integers(2, top, count)
    found[rng.random(count) < 0.1] = EOS
    found[rng.random(count) < 0.1] = BOS
    after = np.flatnonzero(found[:-1] == EOS) + 1
    found[after[::2]] = BOS
    return found.tolist()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make parts, chunks and blocks so small that documents cross their ends."""
    monkeypatch.setattr(flat_tokens, "LEAST_PART", 1)
    monkeypatch.setattr(flat_tokens, "CHUNK", 13)
    monkeypatch.setattr(flat_tokens, "ONE_DOCUMENT", 16)
    monkeypatch.setattr(RemoteStorage, "block", 47)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int64"])
@pytest.mark.parametrize("rule", RULES)
def test_documents_are_those_between_boundaries(tmp_path: Path, rule: str, dtype: str, remote: bool) -> None:
    tokens = [tokens_of(300), tokens_of(151, seed=1)]
    for number, own in enumerate(tokens):
        write_flat(tmp_path / f"{number}.npy", own, dtype=dtype)
    source = FlatTokensSource(
        f"{in_memory(tmp_path)}/*.npy" if remote else tmp_path, dtype=dtype, **RULES[rule]
    )
    expected = [document for own in tokens for document in naive(own, rule)]
    assert tokens_in(source) == expected
    for num_lanes in (2, 7):
        assert sorted(tokens_in(source, num_lanes=num_lanes)) == sorted(expected)
    assert sorted(tokens_in(source, num_lanes=3, shuffle_window=9)) == sorted(expected)
    assert source.ids_below == {"uint8": 256, "uint16": 1 << 16, "uint32": 1 << 32}.get(dtype)
    if rule == "length":
        assert source.num_rows() == len(expected)
    else:
        with pytest.raises(ValueError, match="the length of FlatTokensSource is unknown; set max_steps"):
            source.num_rows()


@pytest.mark.usefixtures("small")
@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    rule=st.sampled_from(list(RULES)),
    chunk=st.integers(1, 9),
    cuts=st.sets(st.integers(1, 39), max_size=5),
    data=st.data(),
)
def test_each_document_is_in_one_part_wherever_files_are_cut(
    tmp_path_factory: pytest.TempPathFactory,
    tokens: list[int],
    rule: str,
    chunk: int,
    cuts: set[int],
    data: Any,
) -> None:
    """And reading goes on from the offset of each, and from any offset at the next document's."""
    path = write_flat(tmp_path_factory.mktemp("flat") / "a.bin", tokens)
    source = FlatTokensSource(path, dtype="uint16", **RULES[rule])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat_tokens, "CHUNK", chunk)
        bounds = [0, *sorted(cut for cut in cuts if cut < len(tokens)), len(tokens)]
        parts = [Part(0, start, stop) for start, stop in pairwise(bounds)]
        records = [list(source.records(part, part.start, source.fetcher())) for part in parts]
        found = [raw.tolist() for own in records for _, raw, _ in own]
        assert found == naive(tokens, rule)
        offset = data.draw(st.integers(0, len(tokens)))
        every = [record[0] for own in records for record in own]
        rest = list(source.records(Part(0), offset, source.fetcher()))
        assert [record[0] for record in rest] == [start for start in every if start >= offset]


@pytest.mark.parametrize(("header", "dtype"), [("numpy", "uint32"), ("llm.c", "uint16"), ("llm.c", "uint32")])
@pytest.mark.parametrize("remote", [False, True])
def test_a_header_says_the_type(tmp_path: Path, header: str, dtype: str, remote: bool) -> None:
    tokens = tokens_of(500, top=60_000)
    write_flat(tmp_path / "a.npy", tokens, dtype=dtype, header=header)
    paths: Any = f"{in_memory(tmp_path)}/a.npy" if remote else tmp_path / "a.npy"
    assert tokens_in(FlatTokensSource(paths, eos_token_id=EOS, dtype=dtype)) == naive(tokens, "eos")


def test_raw_and_described_files_may_lie_side_by_side(tmp_path: Path) -> None:
    tokens = [tokens_of(60, seed=seed) for seed in range(3)]
    for number, (own, header) in enumerate(zip(tokens, (None, "numpy", "llm.c"), strict=True)):
        write_flat(tmp_path / f"{number}.bin", own, header=header)
    source = FlatTokensSource(tmp_path, bos_token_id=BOS, dtype="uint16")
    assert tokens_in(source) == [document for own in tokens for document in naive(own, "bos")]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "say where documents end: eos_token_id, bos_token_id or both; or else document_length"),
        ({"eos_token_id": 0, "document_length": 9}, "say where documents end"),
        ({"document_length": 0}, "document_length"),
        (
            {"eos_token_id": 0, "dtype": "float32"},
            "dtype='float32' is no type of ids; it can be uint8, uint16",
        ),
        (
            {"eos_token_id": 50256, "dtype": "uint8"},
            r"eos_token_id=50256 is none of uint8 \(0 to 255\), the type of",
        ),
        ({"eos_token_id": -1}, r"eos_token_id=-1 is none of uint16 \(0 to 65535\)"),
        ({"bos_token_id": 1.5}, "bos_token_id=1.5 is none of uint16"),
    ],
)
def test_settings_that_find_no_documents_are_refused(tmp_path: Path, settings: Any, message: str) -> None:
    write_flat(tmp_path / "a.bin", tokens_of(10))
    with pytest.raises(ValueError, match=message):
        FlatTokensSource(tmp_path, **{"dtype": "uint16", **settings})


def test_the_rule_is_part_of_the_fingerprint_and_a_resume_names_it(tmp_path: Path) -> None:
    path = write_flat(tmp_path / "a.bin", tokens_of(300))
    found = [FlatTokensSource(path, dtype="uint16", **rule).fingerprint() for rule in RULES.values()]
    found.append(FlatTokensSource(path, dtype="uint32", eos_token_id=EOS).fingerprint())
    assert len(set(found)) == 5

    def opened(**rule: Any) -> IterablePackedDataset:
        return IterablePackedDataset(
            FlatTokensSource(path, dtype="uint16", **rule), max_seq_len=64, num_lanes=1
        )

    for name, before, now in (("eos_token_id", EOS, BOS), ("document_length", 5, 7)):
        dataset = opened(**{name: before})
        next(iter(dataset))
        with pytest.raises(ValueError, match=f"{name}={before} and this dataset has .*{name}={now}"):
            opened(**{name: now}).load_state_dict(dataset.state_dict())


def test_wide_ids_are_views_of_the_file(tmp_path: Path) -> None:
    write_flat(tmp_path / "a.bin", [5, 6, EOS, 2**31, EOS], dtype="uint32")
    rows = list(FlatTokensSource(tmp_path, eos_token_id=EOS, dtype="uint32").read(Reading()))
    assert [row.data["tokens"].tolist() for row in rows] == [[5, 6, EOS], [2**31, EOS]]
    assert [row.data["tokens"].flags.owndata for row in rows] == [False, True], "the second is widened"


def test_the_first_packs_of_ten_gigabytes_need_a_few_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has holes, and documents at the beginnings of parts only."""
    size, lanes = 10 * 10**9, 8
    path = tmp_path / "large.bin"
    with path.open("wb") as file:
        file.truncate(size)
        source = FlatTokensSource(path, eos_token_id=7, dtype="uint16", max_document_tokens=1 << 20)
        for part in (part for lane in source._lanes(lanes) for part in lane):
            file.seek(2 * part.start)
            file.write(np.array(([*range(8, 58), 7]) * 40, "<u2").tobytes())
    looked: list[int] = []
    starts = FlatTokensSource._starts

    def counted(source: FlatTokensSource, at: int, before: int | None, chunk: Any) -> list[int]:
        looked.append(chunk.size)
        return starts(source, at, before, chunk)

    monkeypatch.setattr(FlatTokensSource, "_starts", counted)
    dataset = IterablePackedDataset(source, max_seq_len=510, num_lanes=lanes, shuffle=True, shuffle_window=20)
    packs = [next(iterator) for iterator in [iter(dataset)] for _ in range(lanes)]
    assert {pack["lane"] for pack in packs} == set(range(lanes))
    assert sum(looked) < 64 * flat_tokens.CHUNK
    looked.clear()
    wrong = FlatTokensSource(path, eos_token_id=60, dtype="uint16", max_document_tokens=1 << 20)
    with pytest.raises(
        ValueError, match="more than max_document_tokens=1,048,576 by eos_token_id=60: correct the id"
    ):
        next(iter(IterablePackedDataset(wrong, max_seq_len=510, num_lanes=lanes)))
    assert sum(looked) <= (1 << 20) + flat_tokens.CHUNK
