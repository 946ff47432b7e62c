"""Iterating again is the next epoch, wherever a loader of torch puts the dataset."""

from __future__ import annotations

import copy
import multiprocessing as mp
import pickle
from itertools import chain, islice
from typing import Any

import pytest
from torch.utils.data import DataLoader

from streampack import (
    IterablePackedDataset,
    MultipackBatchSampler,
    PackedDataLoader,
    PackedDataset,
    method_loader,
)
from streampack.map_style.samplers import PlannedSampler

ROWS = [{"tokens": [i + 1] * 5, "labels": [i + 1] * 5} for i in range(40)]


def dataset(**settings: Any) -> IterablePackedDataset:
    return IterablePackedDataset(ROWS, **{"max_seq_len": 10, "shuffle": True, "num_lanes": 2, **settings})


def order(packs: Any) -> list[Any]:
    """What comes, in its order, with the number of its epoch."""
    return [(pack["epoch"], pack["lane"], pack["tokens"].tolist()) for pack in packs]


def torch_loader(
    data: Any, workers: int, *, keep: bool = False, context: str | None = "fork"
) -> DataLoader[Any]:
    return DataLoader(
        data,
        batch_size=None,
        num_workers=workers,
        persistent_workers=keep,
        multiprocessing_context=context if workers else None,
    )


EXPECTED = order(dataset(epochs=3))


def epoch(number: int) -> list[Any]:
    return [pack for pack in EXPECTED if pack[0] == number]


def test_iterating_a_dataset_again_is_the_next_epoch() -> None:
    data = dataset()
    for number in range(3):
        assert order(data) == epoch(number)
        assert data.epoch == number
        assert data.state_dict()["epoch"] == number
    data.set_epoch(1)
    assert order(data) == epoch(1)
    data.set_epoch(1)
    assert order(data) == epoch(1), "also where it is the number that it has"
    assert order(data) == epoch(2)


def test_several_epochs_at_a_time() -> None:
    data = dataset(epochs=2)
    assert order(data) == epoch(0) + epoch(1)
    assert order(data)[:20] == epoch(2)


@pytest.mark.parametrize("count", [0, 1, 4])
def test_a_new_iteration_goes_on_behind_what_the_one_before_gave(count: int) -> None:
    data = dataset()
    begun = order(islice(data, count))
    assert data.epoch == 0
    assert begun + order(data) == epoch(0)
    assert order(data) == epoch(1)
    begun = order(islice(data, count))
    data.set_epoch(2)
    assert order(data) == epoch(2), "unless an epoch is set"


def test_iterating_again_after_a_resume_is_the_next_epoch() -> None:
    first = dataset()
    list(first)
    iterator = iter(first)
    begun = order(next(iterator) for _ in range(7))
    data = dataset()
    data.load_state_dict(first.state_dict())
    assert data.epoch == 1
    assert begun + order(data) == epoch(1)
    assert order(data) == epoch(2)


def test_a_stream_without_an_end_reorders_each_epoch() -> None:
    data = dataset(epochs=None)
    first = order(pack for pack, _ in zip(data, range(25), strict=False))  # of 20 in an epoch
    again = order(pack for pack, _ in zip(data, range(25), strict=False))
    assert first != again


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("keep", [False, True])
def test_iterating_a_loader_of_torch_again_is_the_next_epoch(workers: int, keep: bool) -> None:
    data = dataset()
    loader = torch_loader(data, workers, keep=keep and workers > 0)
    for number in range(3):
        assert sorted(order(loader)) == sorted(epoch(number))
    data.set_epoch(1)
    for number in (1, 2):
        assert sorted(order(loader)) == sorted(epoch(number)), (
            "what is set wins, over workers that are kept too"
        )


def test_spawned_workers_begin_the_next_epoch() -> None:
    loader = torch_loader(dataset(), 1, context="spawn")
    assert [order(loader)[0][0] for _ in range(2)] == [0, 1]


def test_copies_count_for_themselves() -> None:
    data = dataset()
    list(data)
    for made in (copy.deepcopy(data), pickle.loads(pickle.dumps(data))):
        assert [order(made)[0][0] for _ in range(2)] == [1, 2]
    assert order(data) == epoch(1)


def test_forked_processes_count_for_themselves() -> None:
    """Ranks that were forked, each with workers of its own."""
    data, context = dataset(), mp.get_context("fork")
    epochs = context.SimpleQueue()

    def rank() -> None:
        loader = torch_loader(data, 1)
        epochs.put([order(loader)[0][0] for _ in range(2)])

    for _ in range(2):
        process = context.Process(target=rank)
        process.start()
        process.join()
        assert epochs.get() == [0, 1]


@pytest.mark.parametrize("workers", [0, 2])
def test_iterating_a_packed_loader_again_is_the_next_epoch(workers: int) -> None:
    data = dataset()
    loader = PackedDataLoader(data, batch_size=2, num_workers=workers)

    def tokens() -> list[Any]:
        return [row.tolist() for batch in loader for row in batch.tokens]

    for number in range(2):
        assert sorted(tokens()) == sorted(pack[2] for pack in epoch(number))
        assert loader.epoch == loader.state_dict()["epoch"] == number
    state = loader.state_dict()
    data.set_epoch(0)
    assert sorted(tokens()) == sorted(pack[2] for pack in epoch(0))
    loader.load_state_dict(state)
    assert tokens() == [], "the state is of the end of epoch 1"
    assert sorted(tokens()) == sorted(pack[2] for pack in epoch(2))


def test_an_error_at_the_beginning_begins_no_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    data = dataset()
    list(data)
    with monkeypatch.context() as patch:
        patch.setattr(data, "lanes_for", lambda consumers: 1 / 0)
        for iterate in (lambda: iter(data), lambda: iter(PackedDataLoader(data))):
            with pytest.raises(ZeroDivisionError):
                iterate()
    assert order(data) == epoch(1)


def test_an_error_at_the_beginning_keeps_the_loaded_state(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = PackedDataLoader(dataset())
    batches = [batch.tokens.tolist() for batch in loader]
    first = PackedDataLoader(dataset())
    iterator = iter(first)
    for _ in range(5):
        next(iterator)
    resumed = PackedDataLoader(dataset())
    resumed.load_state_dict(first.state_dict())
    with monkeypatch.context() as patch:
        patch.setattr(resumed.dataset, "lanes_for", lambda consumers: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            iter(resumed)
    assert [batch.tokens.tolist() for batch in resumed] == batches[5:]


def test_iterating_a_sampler_again_is_the_next_epoch() -> None:
    sampler = PlannedSampler(lambda epoch: [[epoch, i] for i in range(4)], settings={})
    assert [batch[0] for _ in range(3) for batch in sampler] == [0] * 4 + [1] * 4 + [2] * 4
    sampler.set_epoch(1)
    assert next(iter(sampler)) == [1, 0]
    assert sampler.state_dict() == {"epoch": 1, "dealt": 1}
    resumed = PlannedSampler(lambda epoch: [[epoch, i] for i in range(4)], settings={})
    resumed.load_state_dict({"epoch": 1, "dealt": 3})
    assert [list(resumed), next(iter(resumed))] == [[[1, 3]], [2, 0]]


@pytest.mark.parametrize("keep", [False, True])
def test_iterating_a_map_style_loader_again_is_the_next_epoch(keep: bool) -> None:
    sampler = MultipackBatchSampler([len(row["tokens"]) for row in ROWS], max_tokens=20)
    ready = [{**row, "tokens": row["tokens"][:1]} for row in ROWS]
    loader = DataLoader(
        ready, batch_sampler=sampler, num_workers=int(keep), persistent_workers=keep, collate_fn=_first_tokens
    )
    first, second = list(loader), list(loader)
    assert first != second
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(1, 41))
    batches = method_loader(ROWS, method="exact_fit", max_seq_len=10, batch_size=2)
    first, second = ([batch.tokens.tolist() for batch in batches] for _ in range(2))
    assert first != second
    packs = PackedDataset(ROWS, max_seq_len=10)
    shuffled = DataLoader(packs, batch_size=None, shuffle=True)  # torch's own sampler, which draws anew
    assert [p["tokens"].tolist() for p in shuffled] != [p["tokens"].tolist() for p in shuffled]


def _first_tokens(rows: list[Any]) -> list[int]:
    return [row["tokens"][0] for row in rows]
