"""`MultipackBatchSampler`: full and even steps, the same on all ranks, through resumes and loaders."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from streampack import FlatteningCollator, MultipackBatchSampler
from tests.oracle import multipack as published
from tests.oracle.packing import lower_bound

LIMIT = 24
lengths_of = st.lists(st.integers(1, LIMIT), min_size=12, max_size=60)

Step = list[list[int]]


def plan(lengths: Any, *, packs_per_step: int = 2, max_tokens: int = 8, **changes: Any) -> list[Step]:
    """The steps of one rank, whose batches are their packs."""
    sampler = MultipackBatchSampler(
        lengths, max_tokens=max_tokens, packs_per_step=packs_per_step, num_replicas=1, rank=0, shuffle=False, **changes
    )  # fmt: skip
    batches = list(sampler)
    return [batches[i : i + packs_per_step] for i in range(0, len(batches), packs_per_step)]


# The steps.


@given(lengths_of, st.integers(1, 4))
def test_every_sample_exactly_once_within_the_budget(lengths: list[int], count: int) -> None:
    given: Any = {"max_tokens": LIMIT, "packs_per_step": count}
    steps = plan(lengths, **given)
    assert steps == plan(np.array(lengths), **given), "a shift by a numpy integer would overflow at 64 bits"
    packs = list(chain.from_iterable(steps))
    assert sorted(chain.from_iterable(packs)) == list(range(len(lengths)))
    assert all(packs), "no pack is empty"
    assert {len(step) for step in steps} == {count}
    assert max(sum(lengths[i] for i in pack) for pack in packs) <= LIMIT


@pytest.fixture(scope="module")
def chats() -> list[int]:
    return published.chat_lengths(100_000)


def test_fuller_and_more_even_than_the_published_multipack(chats: list[int]) -> None:
    """The figures that the project promises: 8 ranks of 16 x 2,048 tokens, chat-like lengths."""
    room = 16 * 2048
    steps = plan(chats, max_tokens=room, packs_per_step=8)
    other_steps = published.published_steps(chats, room, 8)
    assert len(steps) == lower_bound(chats, 8 * room) < len(other_steps)
    assert sorted(chain.from_iterable(chain.from_iterable(steps))) == list(range(len(chats)))
    ours, theirs = published.measure(steps, chats, room), published.measure(other_steps, chats, room)
    assert ours.efficiency > 0.997
    assert ours.utilization > 0.99
    assert ours.utilization > theirs.utilization
    assert ours.lag < 0.9 * theirs.lag
    made = published.measure([[[0, 1], [2]], [[3], []]], [3, 4, 5, 1, 6], 8)
    assert made == published.Measures(efficiency=13 / 32, utilization=13 / (7 + 7 + 1 + 1), lag=0.5)


# Ranks, epochs and resumes.

LENGTHS = np.random.default_rng(0).integers(1, 40, 400).tolist()
SETTINGS: dict[str, Any] = {"max_tokens": 64, "packs_per_step": 12, "seed": 3}
RANKS = [1, 2, 3, 4, 6, 12]


def sampler_of(ranks: int = 1, rank: int = 0, **changes: Any) -> MultipackBatchSampler:
    return MultipackBatchSampler(LENGTHS, **{**SETTINGS, **changes}, num_replicas=ranks, rank=rank)


@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_share_the_same_steps(ranks: int) -> None:
    batches = list(sampler_of())
    assert sorted(chain.from_iterable(batches)) == list(range(len(LENGTHS)))
    assert max(sum(LENGTHS[i] for i in batch) for batch in batches) <= 64
    for rank in range(ranks):
        sampler = sampler_of(ranks, rank)
        assert len(sampler) == len(batches) // ranks
        assert list(sampler) == batches[rank::ranks], "as accelerate shards the batches of one rank"


def test_an_epoch_depends_on_its_number_and_the_seed_alone() -> None:
    sampler = sampler_of()
    first = list(sampler)
    torch.manual_seed(5)
    np.random.seed(5)  # noqa: NPY002
    sampler.set_epoch(1)
    second = list(sampler)
    assert second != first
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert list(sampler_of(seed=4)) != first
    again = sampler_of()
    again.set_epoch(1)
    assert list(again) == second


@settings(max_examples=40)
@given(st.integers(0, 40), st.sampled_from(RANKS), st.integers(0, 2))
def test_a_resume_goes_on_at_the_next_batch(done: int, ranks: int, epoch: int) -> None:
    """On any number of ranks that divides the batches so far."""
    whole, new = sampler_of(), [sampler_of(ranks, rank) for rank in range(ranks)]
    whole.set_epoch(epoch)
    if done % ranks:
        said = f"done={done} is no multiple of num_replicas={ranks}; set done to"
        with pytest.raises(ValueError, match=said):
            new[0].set_epoch(epoch, done=done)
        return
    for sampler in new:
        sampler.set_epoch(epoch, done=done)
    dealt = [batch for at_once in zip(*map(list, new), strict=True) for batch in at_once]
    assert dealt == list(whole)[done:]
    assert [next(iter(sampler)) for sampler in new] == list(whole)[:ranks], "the next one begins at its start"


# In loaders.


class Rows(Dataset[Any]):
    """A sample, or all those of a batch, as torchtune's recipes want where the sampler makes batches."""

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, list):
            return [self[i] for i in number]
        return {"input_ids": [number] * LENGTHS[number]}


@pytest.mark.parametrize("kind", ["batch_sampler", "batch_sampler, 1 worker", "sampler"])
def test_with_torchdatas_stateful_loader(kind: str) -> None:
    """``sampler``: torchtune's recipes use ``len(dataloader)``, ``dataloader.sampler`` and the loader's state."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def loader_of() -> tuple[Any, MultipackBatchSampler]:
        sampler = sampler_of()
        sampler.set_epoch(1)
        by = {"sampler": sampler, "batch_size": None} if kind == "sampler" else {"batch_sampler": sampler}
        workers = int(kind.endswith("worker"))
        loader = stateful.StatefulDataLoader(
            Rows(), collate_fn=FlatteningCollator(), num_workers=workers, **by
        )
        return loader, sampler

    expected = [batch["input_ids"].tolist() for batch in loader_of()[0]]
    begun, _ = loader_of()
    assert len(begun) == len(expected)
    batches = iter(begun)
    for _ in range(5):
        next(batches)
    resumed, sampler = loader_of()
    resumed.load_state_dict(begun.state_dict())
    sampler.set_epoch(1)  # recipes do so at the start of every epoch, the resumed one too
    assert [batch["input_ids"].tolist() for batch in resumed] == expected[5:]


def test_a_loader_of_accelerate_shares_out_the_batches_once() -> None:
    """Its ``BatchSamplerShard`` takes every second batch, which is all of one rank's or half of them."""
    prepare = pytest.importorskip("accelerate.data_loader").prepare_data_loader

    def batches(sampler: MultipackBatchSampler, rank: int) -> list[list[int]]:
        loader: DataLoader[Any] = DataLoader(Rows(), batch_sampler=sampler, collate_fn=FlatteningCollator())
        prepared = prepare(loader, num_processes=2, process_index=rank, even_batches=False)
        return [sorted(set(batch["input_ids"][0].tolist())) for batch in prepared]

    whole = [sorted(batch) for batch in sampler_of()]
    assert [batches(sampler_of(), rank) for rank in range(2)] == [whole[rank::2] for rank in range(2)]
    said = "accelerate shares out batches that num_replicas=2 has shared out already"
    with pytest.raises(ValueError, match=said):
        batches(sampler_of(2, 0), 0)


def test_ranks_come_from_the_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def batches(**ranks: int) -> list[list[int]]:
        return list(MultipackBatchSampler(LENGTHS, **SETTINGS, **ranks))

    assert batches() == list(sampler_of())
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 4)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 3)
    assert batches() == list(sampler_of(4, 3))
    assert batches(num_replicas=6, rank=5) == list(sampler_of(6, 5))


# What is refused.


def planned(lengths: list[Any], **changes: Any) -> Any:
    return lambda: plan(lengths, **changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (planned([3, 9]), "sample 1 has 9 tokens, max_tokens is 8; truncate or remove it, or raise max_tokens"),
        (planned([3, 2.5]), "lengths must be whole numbers of tokens: 'float' object cannot be interpreted as an"),
        (planned([]), "0 samples of 0 tokens do not fill 1 steps of 2 packs of 8: some pack would be empty; lower"),
        (planned([8, 8, 8]), "3 samples of 24 tokens do not fill 2 steps of 2 packs of 8: some pack would be"),
        (planned([3], max_tokens=0), "max_tokens=0 is below 1; give at least 1"),
        (lambda: sampler_of(5, 0), "packs_per_step=12 is no multiple of num_replicas=5; set packs_per_step to 15, or"),
        (lambda: sampler_of(2, 2), "rank=2 is not among the num_replicas=2, which count from 0"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        make()
    assert str(error.value).startswith(message)
