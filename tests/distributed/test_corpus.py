"""Ranks read a part of the corpus each, and find what a single process would find."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from streampack import (
    IterablePackedDataset,
    JSONLSource,
    MapSource,
    MDSSource,
    Mix,
    PackedDataLoader,
    ParquetSource,
    TokenShardSource,
)
from streampack.distributed.corpus import divide_across_ranks, identify_across_ranks
from streampack.distributed.one_run import require_same_run
from streampack.sources import Reading
from streampack.sources.holdout import Holdout
from streampack.sources.row_groups import Footers
from streampack.sources.source import Source
from streampack.storage import base as storage
from streampack.storage.base import LocalStorage
from streampack.tokenize.tokenize import tokenize
from tests.harness.corpus import Numbers, rows, write
from tests.harness.hub import Hub
from tests.harness.mds import write_mds
from tests.harness.processes import run_forked
from tests.harness.threads import Board, ThreadSync, on_ranks
from tests.sources import test_parquet

FILES = 7


def jsonl(folder: Path) -> JSONLSource:
    folder.mkdir(exist_ok=True)
    for number in range(FILES):
        write(folder / f"{number}.jsonl", rows(20 + number, seed=number))
    return JSONLSource(f"{folder}/*.jsonl")


def parquet(folder: Path) -> ParquetSource:
    folder.mkdir(exist_ok=True)
    for number in range(FILES):
        test_parquet.write(folder / f"{number}.parquet", rows(20, seed=number))
    return ParquetSource(f"{folder}/*.parquet")


def mds(folder: Path) -> MDSSource:
    data = [{"i": i} for i in range(10 * FILES)]
    return MDSSource(write_mds(folder, data, {"i": "int"}))


def mix(folder: Path) -> Mix:
    folder.mkdir()
    held_out = Holdout(parquet(folder / "b"), fraction=0.5, part="train")
    parts = {"a": jsonl(folder / "a"), "b": held_out, "c": MapSource(rows(9))}
    return Mix([{"name": name, "source": source, "weight": 1} for name, source in parts.items()])


ADVICE = (
    "all ranks must read one corpus: check what is mounted there, and whether its listing is an old one from a cache; "
    "of the Hub, name the commit, hf://datasets/org/name@<commit>"
)


def loader_of(source: Source, board: Board, rank: int) -> PackedDataLoader:
    data = IterablePackedDataset(source, encoder=Numbers(), max_seq_len=40, num_lanes=12)
    loader = PackedDataLoader(data)
    loader.rank_sync = ThreadSync(board, rank)
    return loader


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count how often the ends of each file are read."""
    counts: Counter[str] = Counter()
    lock, own = threading.Lock(), LocalStorage.tag

    def tag(self: LocalStorage, file: Any) -> str:
        with lock:
            counts[file.path] += 1
        return own(self, file)

    monkeypatch.setattr(LocalStorage, "tag", tag)
    return counts


@pytest.mark.parametrize(("make", "size"), [(jsonl, 2), (parquet, FILES + 2), (mds, 2), (mix, FILES + 2)])
def test_ranks_find_the_fingerprint_of_a_single_process(
    make: Callable[[Path], Any], size: int, tmp_path: Path, read: Counter[str]
) -> None:
    made = make(tmp_path / "a")
    alone = copy.deepcopy(made).fingerprint()
    once = Counter(read)
    assert len(once) == (2 * FILES if make is mix else FILES)
    read.clear()

    def act(rank_sync: ThreadSync) -> str:
        source = copy.deepcopy(made)
        identify_across_ranks(source, rank_sync)
        return str(source.fingerprint())

    assert on_ranks(size, act) == [alone] * size
    assert read == once, "over all ranks, as much as one alone reads"


@pytest.mark.parametrize("size", [1, 3])
def test_a_loader_reads_the_corpus_once_over_all_ranks(size: int, tmp_path: Path, read: Counter[str]) -> None:
    jsonl(tmp_path / "a")

    def act(rank_sync: ThreadSync) -> Any:
        loader = loader_of(JSONLSource(f"{tmp_path}/a/*.jsonl"), rank_sync.board, rank_sync.rank)
        batches = iter(loader)
        next(batches)
        assert not read, "not before it is needed"
        states = [loader.state_dict(), loader.state_dict()]
        assert states[0] == states[1]
        return states[0]

    [state, *others] = on_ranks(size, act)
    assert others == [state] * (size - 1)
    assert set(read.values()) == {1}
    assert len(read) == FILES

    def resume(rank_sync: ThreadSync) -> Any:
        loader = loader_of(JSONLSource(f"{tmp_path}/a/*.jsonl"), rank_sync.board, rank_sync.rank)
        loader.load_state_dict(state)
        return loader.state_dict()

    for ranks in (1, 2):
        read.clear()
        assert on_ranks(ranks, resume) == [state] * ranks
        assert set(read.values()) == {1}
        assert len(read) == FILES


@pytest.mark.parametrize(
    ("make", "share", "doing"),
    [
        (jsonl, identify_across_ranks, "reading the ends of the corpus's files"),
        (parquet, partial(divide_across_ranks, num_lanes=12), "dividing the corpus into lanes"),
    ],
)
def test_an_unreadable_file_is_raised_on_all_ranks(
    make: Callable[[Path], Any], share: Callable[..., None], doing: str, tmp_path: Path
) -> None:
    made = make(tmp_path / "a")
    Path(made.files[4].path).unlink()
    first, guilty, last = on_ranks(3, lambda rank_sync: share(copy.deepcopy(made), rank_sync=rank_sync))
    assert isinstance(guilty, FileNotFoundError), "file 4 of rank 4 % 3"
    for other in (first, last):
        assert isinstance(other, RuntimeError)
        assert str(other).startswith(f"rank 1 failed while {doing}: FileNotFoundError: {guilty}")


@pytest.fixture
def footers(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count how often the footer of each file is read."""
    counts: Counter[str] = Counter()
    lock, own = threading.Lock(), Footers._read

    def read(self: Footers, file: Any, fetcher: Any) -> Any:
        with lock:
            counts[file.path] += 1
        return own(self, file, fetcher)

    monkeypatch.setattr(Footers, "_read", read)
    return counts


@pytest.mark.parametrize(("make", "size"), [(parquet, 2), (mix, FILES + 2)])
def test_footers_are_read_once_over_all_ranks(
    make: Callable[[Path], Any], size: int, tmp_path: Path, footers: Counter[str]
) -> None:
    """And all ranks know what a single process finds, also the copies of the source in worker processes."""
    made = make(tmp_path / "a")
    [alone] = copy.deepcopy(made).divisible()
    alone.divide(12, storage.map_in_threads)
    assert len(footers) == FILES
    footers.clear()

    def act(rank_sync: ThreadSync) -> Any:
        source = copy.deepcopy(made)
        divide_across_ranks(source, 12, rank_sync)
        [mine] = pickle.loads(pickle.dumps(source)).divisible()
        return mine._divided

    assert on_ranks(size, act) == [alone._divided] * size
    assert set(footers.values()) == {1}
    assert len(footers) == FILES


def test_a_loader_divides_before_its_workers_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, own = parquet(tmp_path / "a"), Footers._read

    def read(self: Footers, file: Any, fetcher: Any) -> Any:
        with (tmp_path / "read").open("a") as log:
            log.write(f"{os.getpid()}\n")
        return own(self, file, fetcher)

    monkeypatch.setattr(Footers, "_read", read)
    data = IterablePackedDataset(source, encoder=Numbers(), max_seq_len=40, num_lanes=12)
    assert sum(batch.num_seqs for batch in PackedDataLoader(data, num_workers=2)) == 20 * FILES
    assert (tmp_path / "read").read_text() == f"{os.getpid()}\n" * FILES


def test_ranks_may_have_divided_the_corpus_before(tmp_path: Path, footers: Counter[str]) -> None:
    """One rank has read a row or begun an epoch before, another has not."""
    parquet(tmp_path / "a")

    def act(rank_sync: ThreadSync) -> Any:
        source = ParquetSource(f"{tmp_path}/a/*.parquet")
        if rank_sync.rank == 1:
            next(source.read(Reading(num_lanes=12)))
        rank_sync.gather("looked")
        for num_lanes in (12, 5, 12, 5):
            divide_across_ranks(source, num_lanes, rank_sync)
            rank_sync.gather(num_lanes)
            next(source.read(Reading(num_lanes=7 - rank_sync.rank)))
        return source._divided[12], source._divided[5]

    first, second, third = on_ranks(3, act)
    assert first == second == third
    assert [len(lanes) for lanes in first] == [12, 5]


def test_ranks_with_another_number_of_lanes_are_refused(tmp_path: Path) -> None:
    def act(rank_sync: ThreadSync, source: Source) -> Any:
        data = IterablePackedDataset(source, encoder=Numbers(), max_seq_len=40)
        loader = PackedDataLoader(data, num_workers=1 + 5 * rank_sync.rank)
        loader.rank_sync = rank_sync
        iter(loader)

    for source in (jsonl(tmp_path / "a"), MapSource(rows(9000))):
        for error in on_ranks(2, partial(act, source=source)):
            assert isinstance(error, ValueError)
            assert str(error).startswith("rank 1 divides the data into 12 lanes, and rank 0 into ")


def named(folder: Path) -> None:
    (folder / "3.jsonl").rename(folder / "x.jsonl")


def longer(folder: Path) -> None:
    with (folder / "3.jsonl").open("a") as file:
        file.write("\n")


def shifted(folder: Path) -> None:
    longer(folder)
    path = folder / "4.jsonl"
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(("change", "begin"), [(named, "iterate"), (longer, "save"), (shifted, "load")])
def test_ranks_that_list_other_files_are_refused(
    tmp_path: Path, change: Callable[[Path], None], begin: str
) -> None:
    for name in ("a", "b"):
        jsonl(tmp_path / name)
    state = PackedDataLoader(
        IterablePackedDataset(
            JSONLSource(f"{tmp_path}/a/*.jsonl"), encoder=Numbers(), max_seq_len=40, num_lanes=12
        )
    ).state_dict()
    change(tmp_path / "b")

    def act(rank_sync: ThreadSync) -> None:
        folder = tmp_path / ("b" if rank_sync.rank == 1 else "a")
        loader = loader_of(JSONLSource(f"{folder}/*.jsonl"), rank_sync.board, rank_sync.rank)
        {
            "iterate": loader.__iter__,
            "save": loader.state_dict,
            "load": lambda: loader.load_state_dict(state),
        }[begin]()

    for error in on_ranks(3, act):
        assert isinstance(error, ValueError)
        assert str(error).startswith("rank 1 lists 7 file(s) of ")
        assert ", and rank 0 lists 7 file(s) of " in str(error)
        assert str(error).endswith(ADVICE)


def alone(source: Source) -> Source:
    return source


def in_a_mix(source: Source) -> Source:
    parts = {"plain": MapSource(rows(9)), "shards": source}
    return Mix([{"name": name, "source": part, "weight": 1} for name, part in parts.items()])


def held_out(source: Source) -> Source:
    return Holdout(in_a_mix(source), fraction=0.1, part="train")


@pytest.mark.parametrize(("around", "begin"), [(alone, "load"), (held_out, "iterate")])
def test_ranks_with_other_token_shards_are_refused(
    tmp_path: Path, begin: str, around: Callable[[Source], Source]
) -> None:
    """With the same names and sizes; no fingerprint reads them."""
    for name, first in {"a": 1, "b": 1, "other": 2}.items():
        data = [{"tokens": [first, i], "labels": [first, i]} for i in range(50)]
        tokenize(data, out=tmp_path / name, lanes=3, progress=False)
    sizes = [[path.stat().st_size for path in sorted((tmp_path / n).glob("*.bin"))] for n in ("a", "other")]
    assert sizes[0] == sizes[1]

    def loader(rank_sync: ThreadSync, folder: str) -> PackedDataLoader:
        return loader_of(around(TokenShardSource(tmp_path / folder)), rank_sync.board, rank_sync.rank)

    [state] = on_ranks(1, lambda rank_sync: loader(rank_sync, "a").state_dict())

    def act(rank_sync: ThreadSync, folder: str) -> None:
        made = loader(rank_sync, folder if rank_sync.rank == 1 else "a")
        {"iterate": made.__iter__, "save": made.state_dict, "load": lambda: made.load_state_dict(state)}[
            begin
        ]()

    assert on_ranks(3, lambda rank_sync: act(rank_sync, "b")) == [None] * 3, "a copy is as good"
    for error in on_ranks(3, lambda rank_sync: act(rank_sync, "other")):
        assert isinstance(error, ValueError)
        assert str(error).startswith(
            f"rank 1 lists 3 file(s) of {sum(sizes[0]):,} bytes (names, sizes, versions: "
        )
        assert str(error).endswith(ADVICE)


def test_ranks_at_other_commits_of_the_hub_are_refused() -> None:
    """Even if the shards are the same: a branch that moves while ranks begin may change files read by name."""
    with Hub() as hub:
        files = {f"c/{i}.jsonl": b'{"tokens": [1], "labels": [1]}\n' for i in range(3)}
        commits = [hub.commit({**files, "README.md": words}) for words in (b"first", b"second")]

        def act(rank_sync: ThreadSync, others: str) -> None:
            commit = others if rank_sync.rank == 1 else commits[0]
            source = JSONLSource(f"hf://datasets/org/name@{commit}/c/*.jsonl", storage_options=hub.options)
            data = IterablePackedDataset(source, max_seq_len=8, num_lanes=2)
            require_same_run(data, rank_sync, doing="iterate", settings=dict)

        assert on_ranks(2, lambda rank_sync: act(rank_sync, commits[0])) == [None] * 2
        for error in on_ranks(2, lambda rank_sync: act(rank_sync, commits[1])):
            assert isinstance(error, ValueError)
            assert str(error).startswith("rank 1 lists 3 file(s) of 93 bytes (names, sizes, versions: ")
            assert str(error).endswith(ADVICE)


def test_a_state_is_refused_if_a_file_was_another_for_the_rank_that_read_it(tmp_path: Path) -> None:
    for name in ("a", "b"):
        jsonl(tmp_path / name)
    path = tmp_path / "b" / "4.jsonl"
    path.write_bytes(path.read_bytes().replace(b"1", b"2"))

    def act(rank_sync: ThreadSync, other: int) -> Any:
        source = JSONLSource(f"{tmp_path}/{'b' if rank_sync.rank == other else 'a'}/*.jsonl")
        identify_across_ranks(source, rank_sync)
        return source.fingerprint()

    a, b = (JSONLSource(f"{tmp_path}/{name}/*.jsonl").fingerprint() for name in "ab")
    assert on_ranks(3, lambda rank_sync: act(rank_sync, 1)) == [b] * 3, "rank 1 reads file 4"
    assert on_ranks(3, lambda rank_sync: act(rank_sync, 2)) == [a] * 3, "rank 2 does not"


def real(source: Source) -> Any:
    loader = PackedDataLoader(
        IterablePackedDataset(source, encoder=Numbers(), max_seq_len=40, num_lanes=12), timeout=60
    )
    found = []
    own = LocalStorage.tag
    LocalStorage.tag = lambda self, file: found.append(file.name) or own(self, file)  # type: ignore[method-assign, func-returns-value]
    return loader.state_dict()["identity"], sorted(found)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="forks ranks")
def test_real_ranks_split_the_reading_over_gloo(tmp_path: Path) -> None:
    source = mix(tmp_path / "a")
    data = IterablePackedDataset(source, encoder=Numbers(), max_seq_len=40, num_lanes=12)
    outcomes = run_forked(real, 3, source)
    assert [identity for identity, _ in outcomes] == [data._identity.plain()] * 3
    shares = [
        sorted(f"{number}.{kind}" for number in range(rank, FILES, 3) for kind in ("jsonl", "parquet"))
        for rank in range(3)
    ]
    assert [found for _, found in outcomes] == shares
