"""Megatron's `.bin` and `.idx` files: documents against a naive reader and Megatron's rules; damaged pairs."""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streampack import (
    DatatroveSource,
    FlatTokensSource,
    Holdout,
    IterablePackedDataset,
    MegatronSource,
    Mix,
)
from streampack.sources import Reading, megatron
from tests.support.conformance import check_resume_everywhere
from tests.support.corpus import in_memory
from tests.support.foreign_tokens import write_datatrove, write_flat, write_megatron

Rows = list[list[int]]


def documents_of(count: int, *, seed: int = 0, top: int = 120, longest: int = 40) -> Rows:
    rng = np.random.default_rng(seed)
    found = [rng.integers(0, top, rng.integers(0, longest)).tolist() for _ in range(count)]
    return [*found, [7, 8]]  # the file is never empty


def naive(prefix: Path) -> Rows:
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


def read_all(source: MegatronSource, num_lanes: int = 1, **reading: Any) -> Rows:
    lanes = [source.read(Reading(lane, num_lanes=num_lanes, **reading)) for lane in range(num_lanes)]
    return [row.data["tokens"].tolist() for lane in lanes for row in lane]


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("sentence", [None, 7])
@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint16", "int32", "int64"])
def test_documents_are_those_of_the_index(
    tmp_path: Path, dtype: str, sentence: int | None, remote: bool
) -> None:
    documents = documents_of(60)
    write_megatron(tmp_path, documents, dtype=dtype, sentence=sentence)
    assert naive(tmp_path / "text_document_0") == documents
    source = MegatronSource(f"{in_memory(tmp_path)}/text_document_0" if remote else tmp_path)
    assert read_all(source) == documents
    assert sorted(read_all(source, 3, shuffle_window=9)) == sorted(documents)
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
    assert [read_all(MegatronSource(paths)) for paths in given] == [documents] * 4
    assert read_all(MegatronSource(prefixes[1])) == documents[7:14]


def test_ids_of_four_bytes_are_views_of_the_file(tmp_path: Path) -> None:
    """An array of another memory would own it; those of two bytes are widened, and so copied."""
    for dtype, copied in (("int32", False), ("uint16", True)):
        write_megatron(tmp_path, [[1, 2, 3], [4]], dtype=dtype)
        row = next(MegatronSource(tmp_path).read(Reading()))
        assert row.data["tokens"].flags.owndata == copied
        assert not row.data["tokens"].flags.writeable


def test_the_fingerprint_is_of_both_files(tmp_path: Path) -> None:
    """The same tokens, divided into other documents, are another corpus."""
    found = set()
    for name, documents in (("a", [[1, 2], [3, 4]]), ("b", [[1, 2], [3, 5]]), ("c", [[1], [2, 3, 4]])):
        write_megatron(tmp_path / name, documents)
        found.add(MegatronSource(tmp_path / name).fingerprint())
    assert len(found) == 3
    write_megatron(tmp_path / "d", [[1, 2], [3, 4]])
    assert MegatronSource(tmp_path / "d").fingerprint() in found


def test_a_resume_with_another_index_is_refused(tmp_path: Path) -> None:
    def opened() -> IterablePackedDataset:
        return IterablePackedDataset(MegatronSource(tmp_path), max_seq_len=8, num_lanes=1)

    write_megatron(tmp_path, [[1, 2, 3]] * 20)
    dataset = opened()
    next(iter(dataset))
    state = dataset.state_dict()
    write_megatron(tmp_path, [[1, 2, 3, 1, 2, 3]] * 10)
    with pytest.raises(ValueError, match=r"text_document_0.bin"):
        opened().load_state_dict(state)


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


def test_it_can_be_held_out(tmp_path: Path) -> None:
    documents = [[i, i + 1] for i in range(200)]
    source = MegatronSource(write_megatron(tmp_path, documents, dtype="uint16"))
    parts = [read_all(Holdout(source, fraction=0.3, part=part)) for part in ("train", "validation")]  # type: ignore[arg-type]
    assert sorted(parts[0] + parts[1]) == documents
    assert 30 < len(parts[1]) < 90


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


def edit(path: Path, at: int, form: str, *values: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        data = bytearray((folder / path).read_bytes())
        struct.pack_into(form, data, at, *values)
        (folder / path).write_bytes(data)

    return change


IDX, BIN = Path("text_document_0.idx"), Path("text_document_0.bin")


def cut(path: Path, left: int) -> Callable[[Path], Any]:
    return lambda folder: (folder / path).write_bytes((folder / path).read_bytes()[:left])


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no index": (
        lambda folder: (folder / IDX).unlink(),
        "there is no text_document_0.idx beside it; name pairs of Megatron's files, or read a file without an index as",
    ),
    "another format": (
        edit(IDX, 0, "<9s", b"TNTIDX\0\0\0"),  # type: ignore[arg-type]
        r"text_document_0.idx is no index of Megatron-LM: it begins with b'TNTIDX",
    ),
    "version": (edit(IDX, 9, "<Q", 2), "is of version 2, and version 1 is read; write both files anew"),
    "floats": (edit(IDX, 17, "<B", 7), "has ids of type 7; they can be 1, 2, 3, 4, 5, 8"),
    "cut header": (cut(IDX, 20), "has 20 bytes, fewer than its header; it was cut off"),
    "cut index": (cut(IDX, 90), "has 90 bytes, and 10 sequences and 10 documents take 242; it was cut off or"),
    "cut tokens": (cut(BIN, 100), "it has 100 bytes, and its index describes 120; one of the two was cut off or"),
    "odd tokens": (cut(BIN, 119), "it has 119 bytes, and its index describes 120"),
    "another dtype": (edit(IDX, 17, "<B", 8), "it has 120 bytes, and its index describes 114"),
    "no tokens": (cut(BIN, 0), "it is empty"),
    "too many sequences": (edit(IDX, 18, "<Q", 2**61), "sequences and 10 documents take"),
    "no documents": (edit(IDX, 26, "<Q", 0), "and 10 sequences and -1 documents take"),
    "other documents": (edit(IDX, 34 + 120, "<q", 1), "divides sequences 1 to 10 of 10 into documents"),
}  # fmt: skip


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("kind", BROKEN)
def test_a_pair_that_does_not_fit_is_refused_at_the_start(tmp_path: Path, kind: str, remote: bool) -> None:
    change, message = BROKEN[kind]
    write_megatron(tmp_path, [[i, i, i] for i in range(10)])
    change(tmp_path)
    prefix = f"{in_memory(tmp_path) if remote else tmp_path}/text_document_0"
    with pytest.raises(ValueError, match=rf"text_document_0.bin: .*{message}"):
        MegatronSource(prefix, retries=0)


def test_a_multimodal_corpus_is_refused(tmp_path: Path) -> None:
    write_megatron(tmp_path, [[1, 2]] * 3, modes=True)
    with pytest.raises(ValueError, match="text_document_0.idx has modes: multimodal corpora are not read"):
        MegatronSource(tmp_path)


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        edit(IDX, 34 + 4 * 30, "<i", 1),  # a length that leaves tokens out
        edit(IDX, 34 + 4 * 30, "<i", -3),
        edit(IDX, 34 + 4 * 60 + 8 * 30, "<q", 2**62),  # a pointer out of the file
        edit(IDX, 34 + 4 * 60 + 8 * 30, "<q", 359),  # between two ids
        edit(IDX, 34 + 12 * 60 + 8 * 30, "<q", 28),  # a document that ends before it begins
        edit(IDX, 34 + 12 * 60 + 8 * 30, "<q", 2**61),
    ],
)
def test_a_damaged_table_is_a_bad_record(
    tmp_path: Path, change: Callable[[Path], None], remote: bool
) -> None:
    write_megatron(tmp_path, [[i, i, i] for i in range(60)])
    change(tmp_path)
    source = MegatronSource(f"{in_memory(tmp_path)}/text_document_0" if remote else tmp_path)
    settings: Any = {"max_seq_len": 8, "num_lanes": 1}
    with pytest.raises(ValueError, match=r"text_document_0.bin, document \d+: the index is damaged: its doc"):
        list(IterablePackedDataset(source, **settings))
    packs = list(IterablePackedDataset(source, on_bad_record="skip", **settings))
    found = {token for pack in packs for token in pack["tokens"].tolist()}
    assert len(found) > 50, "the other parts are read"


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
    assert read_all(MegatronSource(tmp_path)) == documents
