"""Flat files of tokens: boundaries against a naive reader, at any cut, chunk and block; headers; refusals."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack import FlatTokensSource, IterablePackedDataset
from streampack.sources import Reading, flat_tokens
from streampack.sources.parts import Part
from streampack.storage.remote import RemoteStorage
from tests.support.conformance import check_resume_everywhere
from tests.support.corpus import in_memory
from tests.support.foreign_tokens import write_flat

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


def read_all(source: FlatTokensSource, num_lanes: int = 1, **reading: Any) -> list[list[int]]:
    lanes = [source.read(Reading(lane, num_lanes=num_lanes, **reading)) for lane in range(num_lanes)]
    return [row.data["tokens"].tolist() for lane in lanes for row in lane]


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
    assert read_all(source) == expected
    for num_lanes in (2, 7):
        assert sorted(read_all(source, num_lanes)) == sorted(expected)
    assert sorted(read_all(source, 3, shuffle_window=9)) == sorted(expected)
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


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("rule", RULES)
def test_resume_at_every_pack(tmp_path: Path, rule: str) -> None:
    paths = [write_flat(tmp_path / f"{i}.bin", tokens_of(150, seed=i)) for i in range(3)]
    source = FlatTokensSource(paths, dtype="uint16", **RULES[rule])

    def stream() -> IterablePackedDataset:
        return IterablePackedDataset(
            source,
            max_seq_len=40,
            num_lanes=2,
            shuffle=True,
            shuffle_window=5,
            buffer_size=3,
            overlong="split",
        )

    assert len(check_resume_everywhere(stream, packs=9)) > 8


@pytest.mark.parametrize(("header", "dtype"), [("numpy", "uint32"), ("llm.c", "uint16"), ("llm.c", "uint32")])
@pytest.mark.parametrize("remote", [False, True])
def test_a_header_says_the_type(tmp_path: Path, header: str, dtype: str, remote: bool) -> None:
    tokens = tokens_of(500, top=60_000)
    write_flat(tmp_path / "a.npy", tokens, dtype=dtype, header=header)
    paths: Any = f"{in_memory(tmp_path)}/a.npy" if remote else tmp_path / "a.npy"
    assert read_all(FlatTokensSource(paths, eos_token_id=EOS), 3) != []
    assert read_all(FlatTokensSource(paths, eos_token_id=EOS, dtype=dtype)) == naive(tokens, "eos")
    with pytest.raises(
        ValueError, match=f"a.npy: its header says {dtype}, and dtype is 'int64'; leave dtype out"
    ):
        FlatTokensSource(paths, eos_token_id=EOS, dtype="int64")


def test_raw_and_described_files_may_lie_side_by_side(tmp_path: Path) -> None:
    tokens = [tokens_of(60, seed=seed) for seed in range(3)]
    for number, (own, header) in enumerate(zip(tokens, (None, "numpy", "llm.c"), strict=True)):
        write_flat(tmp_path / f"{number}.bin", own, header=header)
    source = FlatTokensSource(tmp_path, bos_token_id=BOS, dtype="uint16")
    assert read_all(source) == [document for own in tokens for document in naive(own, "bos")]


def cut(path: Path, left: int) -> None:
    path.write_bytes(path.read_bytes()[:left])


def other(array: Any) -> Callable[[Path], None]:
    return lambda path: np.save(path, array)


BROKEN: dict[str, tuple[str | None, Any, Callable[[Path], Any], str]] = {
    "no dtype": (None, None, lambda path: None, "it has no header that says how ids are stored; give dtype, such as"),
    "odd": (None, "uint16", lambda path: cut(path, 99), "it has 99 bytes, no multiple of the 2 of uint16; it was cut"),
    "empty": (None, "uint16", lambda path: cut(path, 0), "it is empty"),
    "cut numpy": ("numpy", None, lambda path: cut(path, 200), "it has 200 bytes, and its header describes 328"),
    "cut header": ("numpy", None, lambda path: cut(path, 40), "its numpy header cannot be read"),
    "cut llm.c": ("llm.c", None, lambda path: cut(path, 1100), "it has 1,100 bytes, and its header describes 1,224"),
    "matrix": (None, None, other(np.ones((3, 4), np.int32)), r"it holds an array of int32 of shape \(3, 4\); save one"),
    "floats": (None, None, other(np.ones(9)), "it holds an array of float64"),
    "big endian": (None, None, other(np.ones(9, ">i4")), "it holds an array of >i4"),
    "objects": (None, None, other(np.array([None])), "it holds an array of object"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_a_file_that_is_no_flat_file_is_refused_at_the_start(tmp_path: Path, kind: str) -> None:
    header, dtype, change, message = BROKEN[kind]
    path = write_flat(tmp_path / "a.npy", tokens_of(100), header=header)
    change(path)
    with pytest.raises(ValueError, match=f"a.npy: {message}"):
        FlatTokensSource(path, eos_token_id=EOS, dtype=dtype)
    write_flat(tmp_path / "b.npy", tokens_of(100), header="numpy")
    both = FlatTokensSource(tmp_path, eos_token_id=EOS, dtype=dtype)
    assert [Path(shown).name for shown, _ in both.bad_shards()] == ["a.npy"]
    with pytest.warns(UserWarning, match="1 of 2 files cannot be read and are left out"):
        packs = IterablePackedDataset(both, max_seq_len=200, num_lanes=2, on_bad_record="skip")
    assert sum(int(pack["seq_lens"][: pack["num_seqs"]].sum()) for pack in packs) == 100
    assert packs.ledger().bad_shards == 1


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


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("remote", [False, True])
def test_a_document_that_is_too_long_is_a_bad_record(tmp_path: Path, remote: bool) -> None:
    """The rest of it is skipped, and the next one is read, in whichever part it begins."""
    tokens = [5, 5, EOS, *[6] * 100, EOS, 7, EOS, *[8] * 20, EOS, *[9] * 21, EOS, 7]
    write_flat(tmp_path / "a.bin", tokens)
    place: Any = f"{in_memory(tmp_path)}/a.bin" if remote else tmp_path
    source = FlatTokensSource(place, eos_token_id=EOS, dtype="uint16", max_document_tokens=21)
    with pytest.raises(
        ValueError, match=r"a.bin, token 3: the document has more than max_document_tokens=21 by eos_to"
    ):
        list(IterablePackedDataset(source, max_seq_len=64, num_lanes=1))
    for num_lanes in (1, 3):
        dataset = IterablePackedDataset(source, max_seq_len=64, num_lanes=num_lanes, on_bad_record="skip")
        found = dict.fromkeys(range(5, 10), 0)
        for pack in dataset:
            for token in pack["tokens"][: int(pack["seq_lens"][: pack["num_seqs"]].sum())].tolist():
                found[token] = found.get(token, 0) + 1
        assert [found[token] for token in range(5, 10)] == [2, 0, 2, 20, 0]
        assert dataset.ledger().as_dict()["bad_records"] == 2


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
