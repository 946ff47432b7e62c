"""Ranks with different data, encoders, settings or states raise, all of them, before they iterate, save or load."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streampack import (
    Holdout,
    IterablePackedDataset,
    IterableSource,
    JSONLSource,
    MapSource,
    MDSSource,
    Mix,
    PackedDataLoader,
    ParquetSource,
    Source,
    TokenShardSource,
)
from streampack.sources.formats import row_groups  # private: whose reads of footers are counted
from streampack.storage.base import (  # private: whose reads of the ends of files are counted
    File,
    LocalStorage,
)
from streampack.tokenize import tokenize
from tests.harness.corpus import Numbers, rows, write
from tests.harness.files import write_mds
from tests.harness.stores import Hub
from tests.harness.threads import ThreadSync, on_ranks

DATA = rows(60)


def loader(rank_sync: ThreadSync, source: Any, encoder: Any = None, **settings: Any) -> PackedDataLoader:
    own = {"max_seq_len": 24, "num_lanes": 4, **settings}
    batching = {name: own.pop(name) for name in ("batch_size", "packs_per_step") if name in own}
    made = PackedDataLoader(IterablePackedDataset(source, encoder=encoder or Numbers(), **own), **batching)
    made.rank_sync = rank_sync
    return made


STATE = PackedDataLoader(
    IterablePackedDataset(MapSource(DATA), encoder=Numbers(), max_seq_len=24, num_lanes=4)
).state_dict()

BEGIN: dict[str, Callable[[PackedDataLoader], Any]] = {
    "iterate": iter,
    "save": PackedDataLoader.state_dict,
    "load": lambda made: made.load_state_dict(STATE),
}


def refused(begin: str, make: Callable[[ThreadSync], PackedDataLoader], *, ranks: int = 3) -> str:
    """Return the message that all ranks raise."""
    errors = on_ranks(ranks, lambda rank_sync: BEGIN[begin](make(rank_sync)))
    assert all(isinstance(error, ValueError) for error in errors), errors
    assert len(set(map(str, errors))) == 1
    return str(errors[0])


SLICED = (
    "; give every rank the whole dataset: streampack divides it among the ranks itself, so remove slices such as "
    "rows[rank::world_size], split_dataset_by_node and DistributedSampler"
)


def assert_other_rows(words: str, rank: int, corpus: str) -> None:
    assert words.startswith(f"rank {rank} has {corpus}.content")
    assert words.endswith(SLICED)


@pytest.mark.parametrize("begin", BEGIN)
def test_a_slice_for_each_rank_is_refused(begin: str) -> None:
    """Each rank would read a part of its part, and the rest would never be trained."""
    words = refused(begin, lambda rank_sync: loader(rank_sync, MapSource(DATA[rank_sync.rank :: 3])))
    assert_other_rows(words, 1, "corpus")
    words = refused(begin, lambda rank_sync: loader(rank_sync, MapSource(DATA[rank_sync.rank :])))
    assert words == f"rank 1 has corpus.rows=59 and rank 0 has corpus.rows=60{SLICED}"


def test_a_slice_of_an_iterable_is_refused() -> None:
    def sliced(rank_sync: ThreadSync) -> PackedDataLoader:
        return loader(rank_sync, IterableSource(DATA[rank_sync.rank :: 3]))

    assert_other_rows(refused("iterate", sliced), 1, "corpus")


def test_a_dataset_split_by_node_is_refused() -> None:
    datasets = pytest.importorskip("datasets")
    from datasets.distributed import split_dataset_by_node

    whole = datasets.Dataset.from_list(DATA).to_iterable_dataset(num_shards=6)

    def split(rank_sync: ThreadSync) -> PackedDataLoader:
        given = split_dataset_by_node(whole, rank=rank_sync.rank, world_size=rank_sync.world_size)
        return loader(rank_sync, given, num_lanes=2)

    assert_other_rows(refused("iterate", split, ranks=2), 1, "corpus")


def test_a_difference_names_the_source_of_a_mixture() -> None:
    def mixed(rank_sync: ThreadSync) -> PackedDataLoader:
        sources = {"a": DATA, "b": DATA[1:] if rank_sync.rank == 2 else DATA[:-1]}
        return loader(rank_sync, Mix([{"name": n, "source": s, "weight": 1} for n, s in sources.items()]))

    assert_other_rows(refused("iterate", mixed), 2, "corpus.b/")


def test_another_encoder_is_refused() -> None:
    def encoded(rank_sync: ThreadSync) -> PackedDataLoader:
        moved = rank_sync.rank // 2
        return loader(rank_sync, MapSource(DATA), lambda row: Numbers()({**row, "i": row["i"] + moved}))

    words = refused("iterate", encoded)
    assert words.startswith("rank 2 has encoder.samples")
    assert words.endswith(
        "; give all ranks the same encoder: the same code, and the same files of its tokenizer"
    )


SETTINGS: list[tuple[str, Any, Any, dict[str, Any]]] = [
    ("max_seq_len", 32, 24, {"max_seq_len": 32}),
    ("epochs", None, 1, {"epochs": None}),
    ("skip_bad", True, False, {"skip_bad": True}),
    ("packs_per_step", 12, 3, {"packs_per_step": 12}),
    ("packs_per_step", 6, 3, {"batch_size": 2}),
]


@pytest.mark.parametrize(("name", "theirs", "ours", "change"), SETTINGS)
def test_another_setting_is_refused(name: str, theirs: Any, ours: Any, change: dict[str, Any]) -> None:
    def make(rank_sync: ThreadSync) -> PackedDataLoader:
        return loader(rank_sync, MapSource(DATA), **(change if rank_sync.rank == 1 else {}))

    assert refused("iterate", make) == (
        f"rank 1 has {name}={theirs!r} and rank 0 has {name}={ours!r}; give all ranks the same"
    )


def test_a_state_that_only_one_rank_loads_is_refused() -> None:
    def act(rank_sync: ThreadSync) -> None:
        made = loader(rank_sync, MapSource(DATA))
        if rank_sync.rank == 0:
            made.load_state_dict(STATE)
        iter(made)

    for error in on_ranks(2, act):
        assert isinstance(error, ValueError)
        assert str(error) == (
            "rank 1 has doing='iterate' and rank 0 has doing='load a state'; "
            "all ranks must do the same, in the same order"
        )


def test_states_of_different_steps_are_refused() -> None:
    def act(rank_sync: ThreadSync) -> None:
        state = {**STATE, "slot": 4 * rank_sync.rank}
        loader(rank_sync, MapSource(DATA)).load_state_dict(state)

    for error in on_ranks(2, act):
        assert "rank 1 has state='" in str(error)


class Unknown(MapSource):
    """Cannot say what it is."""

    def identity(self) -> dict[str, Any]:
        raise ValueError("no idea")


@pytest.mark.parametrize("begin", BEGIN)
def test_an_error_while_preparing_is_raised_on_all(begin: str) -> None:
    """The others must not wait for a rank that cannot begin."""

    def failing(rank_sync: ThreadSync) -> PackedDataLoader:
        return loader(rank_sync, Unknown(DATA) if rank_sync.rank == 1 else MapSource(DATA))

    first, guilty, last = on_ranks(3, lambda rank_sync: BEGIN[begin](failing(rank_sync)))
    assert isinstance(guilty, (ValueError, TypeError))
    for other in (first, last):
        assert isinstance(other, RuntimeError)
        assert str(other).startswith("rank 1 failed while preparing to ")


def test_too_few_lanes_on_one_rank_are_raised_on_all() -> None:
    def make(rank_sync: ThreadSync) -> PackedDataLoader:
        return loader(rank_sync, MapSource(DATA), num_lanes=3 - 2 * rank_sync.rank)

    errors = on_ranks(2, lambda rank_sync: iter(make(rank_sync)))
    assert isinstance(errors[0], RuntimeError)
    assert isinstance(errors[1], ValueError)
    assert "num_lanes=1 gives 1 of 2 ranks nothing to read" in str(errors[0])


FILES = 7


def jsonl(folder: Path) -> JSONLSource:
    folder.mkdir(exist_ok=True)
    for number in range(FILES):
        write(folder / f"{number}.jsonl", rows(20 + number, seed=number))
    return JSONLSource(f"{folder}/*.jsonl")


def parquet(folder: Path) -> ParquetSource:
    folder.mkdir(exist_ok=True)
    for number in range(FILES):
        pq.write_table(
            pa.Table.from_pylist(rows(20, seed=number)), folder / f"{number}.parquet", row_group_size=6
        )
    return ParquetSource(f"{folder}/*.parquet")


def mds(folder: Path) -> MDSSource:
    return MDSSource(write_mds(folder, rows(70), {"i": "int", "n": "int"}, per_shard=10))


def mix(folder: Path) -> Mix:
    folder.mkdir()
    held_out = Holdout(parquet(folder / "b"), fraction=0.5, part="train")
    parts = {"a": jsonl(folder / "a"), "b": held_out, "c": MapSource(rows(9))}
    return Mix([{"name": name, "source": source, "weight": 1} for name, source in parts.items()])


ADVICE = (
    "all ranks must read one corpus: check what is mounted there, and whether its listing is an old one from a cache; "
    "of the Hub, name the commit, hf://datasets/org/name@<commit>"
)


def loader_of(source: Any, rank_sync: ThreadSync, **settings: Any) -> PackedDataLoader:
    common = {"encoder": Numbers(), "max_seq_len": 40, "num_lanes": 12}
    made_loader = PackedDataLoader(IterablePackedDataset(source, **{**common, **settings}))
    made_loader.rank_sync = rank_sync
    return made_loader


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, str]]:
    """Count how often the ends of each file are read, and the footers of Parquet files."""
    counts: Counter[tuple[str, str]] = Counter()
    lock = threading.Lock()

    def counted(where: Any, name: str) -> None:
        own = getattr(where, name)

        def count(*args: Any) -> Any:
            [file] = [each for each in args if isinstance(each, File)]
            with lock:
                counts[name, file.path] += 1
            return own(*args)

        monkeypatch.setattr(where, name, count)

    counted(LocalStorage, "tag")
    counted(row_groups, "_read")
    return counts


@pytest.mark.parametrize(
    ("make", "size"),
    [(jsonl, 3), (parquet, FILES + 2), (mds, 2), (mix, FILES + 2)],
    ids=["jsonl", "parquet", "mds", "mix"],
)
def test_ranks_read_the_corpus_once_and_find_what_one_finds(
    make: Callable[[Path], Any], size: int, tmp_path: Path, read: Counter[tuple[str, str]]
) -> None:
    """The footers when they divide it, the ends of files when a state is taken, and at a resume."""
    made = make(tmp_path / "a")

    def begin(rank_sync: ThreadSync) -> Any:
        made_loader = loader_of(copy.deepcopy(made), rank_sync, num_lanes=18)
        batches = iter(made_loader)
        rank_sync.gather("all have divided")
        footers = Counter(read)
        rank_sync.gather("all have noted that")
        next(batches)
        states = [made_loader.state_dict(), made_loader.state_dict()]
        assert states[0] == states[1]
        return footers, states[0]

    def ends() -> dict[Any, int]:
        return {key: count for key, count in read.items() if key[0] == "tag"}

    [(footers, alone)] = on_ranks(1, begin)
    once = ends()
    assert {*once.values(), *footers.values()} == {1}
    assert (len(once), len(footers)) == {mix: (2 * FILES, FILES), parquet: (FILES, FILES)}.get(
        make, (FILES, 0)
    )
    read.clear()
    found = on_ranks(size, begin)
    state = found[0][1]
    for divided, theirs in found:
        assert theirs == state
        assert divided.keys() == footers.keys()
        assert sum(count > 1 for count in divided.values()) <= 1, "but that of a row which all ranks compare"
    assert ends() == once, "over all ranks, as much as one alone reads"
    assert state["identity"] == alone["identity"]

    def resume(rank_sync: ThreadSync) -> Any:
        made_loader = loader_of(copy.deepcopy(made), rank_sync, num_lanes=18)
        made_loader.load_state_dict(state)
        again = made_loader.state_dict()
        iter(made_loader)
        return again

    read.clear()
    assert on_ranks(2, resume) == [state] * 2
    assert ends() == once


def test_a_rank_may_have_divided_the_corpus_before(tmp_path: Path) -> None:
    """All take part in reading footers, also one that knows them."""
    made = parquet(tmp_path / "a")

    def act(rank_sync: ThreadSync, first: int | None) -> Any:
        made_loader = loader_of(copy.deepcopy(made), rank_sync, balance_window=0)
        if rank_sync.rank == first:
            next(made_loader.dataset.stream())
        return [batch.fragments for batch in made_loader]

    for first in (0, 1):
        found = on_ranks(2, partial(act, first=first))
        assert found == on_ranks(2, partial(act, first=None))
        assert len(found[0]) > 3


@pytest.mark.parametrize(
    ("make", "where", "name", "doing"),
    [
        (jsonl, LocalStorage, "tag", "reading the ends of the corpus's files"),
        (parquet, row_groups, "_read", "dividing the corpus into lanes"),
    ],
)
def test_a_file_that_cannot_be_read_is_raised_on_all_ranks(
    make: Callable[[Path], Any],
    where: Any,
    name: str,
    doing: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = make(tmp_path / "a")
    bad, good = made.files[4], getattr(where, name)

    def fails(*args: Any) -> Any:
        if bad in args:
            raise OSError("no luck")
        return good(*args)

    monkeypatch.setattr(where, name, fails)

    def begin(rank_sync: ThreadSync) -> Any:
        made_loader = loader_of(copy.deepcopy(made), rank_sync)
        return iter(made_loader) if make is parquet else made_loader.state_dict()

    first, guilty, last = on_ranks(3, begin)
    assert isinstance(guilty, OSError), "file 4 of rank 4 % 3"
    for other in (first, last):
        assert isinstance(other, RuntimeError)
        assert str(other).startswith(f"rank 1 failed while {doing}: OSError: no luck")


def test_ranks_with_another_number_of_lanes_are_refused(tmp_path: Path) -> None:
    def act(rank_sync: ThreadSync, source: Source) -> Any:
        data = IterablePackedDataset(
            source, encoder=Numbers(), max_seq_len=40, num_lanes=2 + 10 * rank_sync.rank
        )
        made_loader = PackedDataLoader(data)
        made_loader.rank_sync = rank_sync
        iter(made_loader)

    for source in (jsonl(tmp_path / "a"), MapSource(rows(9000))):
        for error in on_ranks(2, partial(act, source=source)):
            assert isinstance(error, ValueError)
            assert str(error).startswith("rank 1 has num_lanes=12 and rank 0 has num_lanes=")


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
        made_loader = loader_of(JSONLSource(f"{folder}/*.jsonl"), rank_sync)
        {
            "iterate": made_loader.__iter__,
            "save": made_loader.state_dict,
            "load": lambda: made_loader.load_state_dict(state),
        }[begin]()

    for error in on_ranks(3, act):
        assert isinstance(error, ValueError)
        assert str(error).startswith("rank 1 has files.")
        assert " and rank 0 has files." in str(error)
        assert str(error).endswith(ADVICE)


@pytest.mark.parametrize("begin", ["load", "iterate"])
def test_ranks_with_other_token_shards_are_refused(tmp_path: Path, begin: str) -> None:
    """With the same names and sizes; no fingerprint reads them."""
    for name, first in {"a": 1, "b": 1, "other": 2}.items():
        data = [{"tokens": [first, i], "labels": [first, i]} for i in range(50)]
        tokenize(data, out=tmp_path / name, lanes=3, progress=False)
    sizes = [[path.stat().st_size for path in sorted((tmp_path / n).glob("*.bin"))] for n in ("a", "other")]
    assert sizes[0] == sizes[1]

    def made_loader(rank_sync: ThreadSync, folder: str) -> PackedDataLoader:
        parts = {"plain": MapSource(rows(9)), "shards": TokenShardSource(tmp_path / folder)}
        mixed = Mix([{"name": name, "source": part, "weight": 1} for name, part in parts.items()])
        return loader_of(Holdout(mixed, fraction=0.1, part="train"), rank_sync)

    [state] = on_ranks(1, lambda rank_sync: made_loader(rank_sync, "a").state_dict())

    def act(rank_sync: ThreadSync, folder: str) -> None:
        made = made_loader(rank_sync, folder if rank_sync.rank == 1 else "a")
        {"iterate": made.__iter__, "save": made.state_dict, "load": lambda: made.load_state_dict(state)}[
            begin
        ]()

    assert on_ranks(3, lambda rank_sync: act(rank_sync, "b")) == [None] * 3, "a copy is as good"
    for error in on_ranks(3, lambda rank_sync: act(rank_sync, "other")):
        assert isinstance(error, ValueError)
        assert str(error).startswith("rank 1 has files.names_sizes_and_versions='")
        assert str(error).endswith(ADVICE)


def test_ranks_at_other_commits_of_the_hub_are_refused() -> None:
    """Even if the shards are the same: a branch that moves while ranks begin may change files read by name."""
    with Hub() as hub:
        files = {f"c/{i}.jsonl": b'{"tokens": [1], "labels": [1]}\n' for i in range(3)}
        commits = [hub.commit({**files, "README.md": words}) for words in (b"first", b"second")]

        def act(rank_sync: ThreadSync, others: str) -> None:
            commit = others if rank_sync.rank == 1 else commits[0]
            source = JSONLSource(
                f"hf://datasets/org/name@{commit}/c/*.jsonl", storage={"options": hub.options}
            )
            iter(loader_of(source, rank_sync, encoder=None, num_lanes=2))

        assert on_ranks(2, lambda rank_sync: act(rank_sync, commits[0])) == [None] * 2
        for error in on_ranks(2, lambda rank_sync: act(rank_sync, commits[1])):
            assert isinstance(error, ValueError)
            assert str(error).startswith("rank 1 has files.names_sizes_and_versions='")
            assert str(error).endswith(ADVICE)
