"""Ranks with different data, encoders, settings or states raise, all of them, before they iterate, save or load."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from streampack import IterablePackedDataset, IterableSource, MapSource, Mix, PackedDataLoader
from tests.harness.corpus import Numbers, rows
from tests.harness.threads import ThreadSync, on_ranks
from tests.streaming.test_run_identity import shifted

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
    "; give every rank the whole dataset: streampack shares it out among the ranks itself, so leave out slices such as "
    "rows[rank::world_size], split_dataset_by_node and DistributedSampler"
)


@pytest.mark.parametrize("begin", BEGIN)
def test_a_slice_for_each_rank_is_refused(begin: str) -> None:
    """Each rank would read a part of its part, and the rest would never be trained."""
    words = refused(begin, lambda rank_sync: loader(rank_sync, MapSource(DATA[rank_sync.rank :: 3])))
    assert words == f"rank 1 is given other rows than rank 0 (corpus){SLICED}"
    words = refused(begin, lambda rank_sync: loader(rank_sync, MapSource(DATA[rank_sync.rank :])))
    assert words == f"rank 1 has corpus.rows=59 and rank 0 has corpus.rows=60{SLICED}"


def test_a_slice_of_an_iterable_is_refused() -> None:
    def sliced(rank_sync: ThreadSync) -> PackedDataLoader:
        return loader(rank_sync, IterableSource(DATA[rank_sync.rank :: 3]))

    assert refused("iterate", sliced) == f"rank 1 is given other rows than rank 0 (corpus){SLICED}"


def test_a_dataset_split_by_node_is_refused() -> None:
    datasets = pytest.importorskip("datasets")
    from datasets.distributed import split_dataset_by_node

    whole = datasets.Dataset.from_list(DATA).to_iterable_dataset(num_shards=6)

    def split(rank_sync: ThreadSync) -> PackedDataLoader:
        given = split_dataset_by_node(whole, rank=rank_sync.rank, world_size=rank_sync.world_size)
        return loader(rank_sync, given, num_lanes=2)

    assert refused("iterate", split, ranks=2).endswith(f" than rank 0 (corpus){SLICED}")


def test_a_difference_names_the_source_of_a_mixture() -> None:
    def mixed(rank_sync: ThreadSync) -> PackedDataLoader:
        sources = {"a": DATA, "b": DATA[1:] if rank_sync.rank == 2 else DATA[:-1]}
        return loader(rank_sync, Mix([{"name": n, "source": s, "weight": 1} for n, s in sources.items()]))

    assert refused("iterate", mixed) == f"rank 2 is given other rows than rank 0 (corpus.b/){SLICED}"


def test_another_encoder_is_refused() -> None:
    words = refused(
        "iterate", lambda rank_sync: loader(rank_sync, MapSource(DATA), shifted(rank_sync.rank // 2))
    )
    assert words.startswith("the encoder of rank 2 is another than that of rank 0 (encoder.samples: ")
    assert words.endswith(
        "); give all ranks the same encoder: the same code, and the same files of its tokenizer"
    )


SETTINGS: list[tuple[str, Any, Any, dict[str, Any]]] = [
    ("max_seq_len", 32, 24, {"max_seq_len": 32}),
    ("epochs", None, 1, {"epochs": None}),
    ("on_bad_record", "skip", "error", {"on_bad_record": "skip"}),
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
            "rank 1 is about to iterate and rank 0 to load a state; all ranks must do the same, in the same order"
        )


def test_states_of_different_steps_are_refused() -> None:
    def act(rank_sync: ThreadSync) -> None:
        state = {**STATE, "slot": 4 * rank_sync.rank}
        loader(rank_sync, MapSource(DATA)).load_state_dict(state)

    for error in on_ranks(2, act):
        assert "rank 1 has state='" in str(error)


@pytest.mark.parametrize("begin", BEGIN)
def test_an_error_while_preparing_is_raised_on_all(begin: str) -> None:
    """The others must not wait for a rank that cannot begin."""

    def failing(rank_sync: ThreadSync) -> PackedDataLoader:
        made = loader(rank_sync, MapSource(DATA))
        if rank_sync.rank == 1:
            made.dataset._identity.plain = partial(int, "x")  # type: ignore[method-assign]
        return made

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
    assert "1 lane cannot feed 2 consumers" in str(errors[0])


def test_ranks_with_the_same_run_are_accepted() -> None:
    def act(rank_sync: ThreadSync) -> Any:
        made = loader(rank_sync, MapSource(list(DATA)), batch_size=2)
        packs = sum(int(batch.num_seqs) for batch in made)
        return packs, made.state_dict()

    (first, state), (second, other) = on_ranks(2, act)
    assert first + second == len([row for row in DATA if row["n"]])
    assert state == other
