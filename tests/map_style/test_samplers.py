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
from streampack.map_style.samplers import resolve_rank

LENGTHS = np.random.default_rng(0).integers(1, 40, 400).tolist()
SETTINGS: dict[str, Any] = {"max_tokens": 64, "packs_per_step": 12, "seed": 3}
RANKS = [1, 2, 3, 4, 6, 12]


def sampler_of(ranks: int = 1, rank: int = 0, **changes: Any) -> MultipackBatchSampler:
    return MultipackBatchSampler(LENGTHS, **{**SETTINGS, **changes}, num_replicas=ranks, rank=rank)


def steps_of(samplers: list[MultipackBatchSampler]) -> list[set[tuple[int, ...]]]:
    """Return the batches of each step of all ranks, which must have equally many batches."""
    shares = [list(sampler) for sampler in samplers]
    assert len({len(share) for share in shares}) == 1
    dealt = [tuple(batch) for at_once in zip(*shares, strict=True) for batch in at_once]
    return [set(dealt[i : i + 12]) for i in range(0, len(dealt), 12)]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("objective", ["quadratic", "linear"])
def test_ranks_share_the_same_steps(ranks: int, objective: str) -> None:
    alone = steps_of([sampler_of(objective=objective)])
    batches = list(sampler_of(objective=objective))
    samplers = [sampler_of(ranks, rank, objective=objective) for rank in range(ranks)]
    for rank, sampler in enumerate(samplers):
        assert list(sampler) == batches[rank::ranks], "as accelerate shards the batches of one rank"
        sampler.set_epoch(0)
    assert steps_of(samplers) == alone
    assert sorted(chain.from_iterable(chain.from_iterable(alone))) == list(range(len(LENGTHS)))
    assert {len(sampler) for sampler in samplers} == {len(alone) * 12 // ranks}
    assert max(sum(LENGTHS[i] for i in batch) for step in alone for batch in step) <= 64
    assert all(sampler.dropped == 0 for sampler in samplers)


def test_an_epoch_depends_on_its_number_and_the_seed_alone() -> None:
    sampler = sampler_of()
    first = list(sampler)
    sampler.set_epoch(0)
    assert list(sampler) == first, "the same epoch again"
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


def test_batches_of_padded_samples_keep_to_the_budget() -> None:
    options: dict[str, Any] = {"max_tokens": 64, "num_replicas": 1, "rank": 0, "packs_per_step": 2}
    lengths = np.random.default_rng(0).integers(1, 40, 200)
    padded = lengths + -lengths % 16
    batches = list(MultipackBatchSampler(lengths, pad_seqs_to=16, **options))
    assert batches == list(MultipackBatchSampler(padded, **options))
    assert max(padded[batch].sum() for batch in batches) == 64
    assert max(padded[batch].sum() for batch in MultipackBatchSampler(lengths, **options)) > 64


def test_drop_last_is_counted() -> None:
    kept = sampler_of(drop_last=True)
    samples = list(chain.from_iterable(kept))
    assert kept.dropped == len(LENGTHS) - len(set(samples)) > 0
    assert len(kept) == len(sampler_of()) - 12


@settings(max_examples=40)
@given(st.integers(0, 40), st.sampled_from(RANKS), st.sampled_from(RANKS), st.integers(0, 2))
def test_a_resume_goes_on_at_the_next_batch(stop: int, before: int, after: int, epoch: int) -> None:
    """On any number of ranks that divides the batches so far."""
    old = [sampler_of(before, rank) for rank in range(before)]
    whole = sampler_of()
    whole.set_epoch(epoch)
    stop = min(stop, len(whole) // before)
    states = []
    for sampler in old:
        sampler.set_epoch(epoch)
        batches = iter(sampler)
        for _ in range(stop):
            next(batches)
        states.append(sampler.state_dict())
    assert all(state == states[0] for state in states), "every rank saves the same"
    new = [sampler_of(after, rank) for rank in range(after)]
    if stop * before % after:
        message = f"stands after {stop * before} batches of all ranks, which {after} ranks cannot share; save"
        with pytest.raises(ValueError, match=message):
            new[0].load_state_dict(states[0])
        return
    for sampler in new:
        sampler.load_state_dict(states[0])
        sampler.set_epoch(epoch)  # recipes do so at the start of every epoch, the resumed one too
    shares = [list(sampler) for sampler in new]
    dealt = [batch for at_once in zip(*shares, strict=True) for batch in at_once]
    assert dealt == list(whole)[stop * before :]
    for sampler in new:
        sampler.set_epoch(epoch + 1)
    whole.set_epoch(epoch + 1)
    assert [next(iter(sampler)) for sampler in new] == list(whole)[:after], (
        "the next epoch begins at its start"
    )


def test_a_state_of_consumed_batches() -> None:
    """A DataLoader's workers ask for batches ahead of the loop."""
    loader = DataLoader(
        [{"input_ids": [i] * n} for i, n in enumerate(LENGTHS)],
        batch_sampler=(sampler := sampler_of()),
        collate_fn=FlatteningCollator(),
        num_workers=1,
        prefetch_factor=4,
    )
    batches = iter(loader)
    seen = [next(batches) for _ in range(3)]
    ahead = sampler.state_dict()
    state = sampler.state_dict(consumed=3)
    assert ahead["dealt"] > state["dealt"] == 3
    new = sampler_of()
    new.load_state_dict(state)
    rest = list(new)
    assert [sorted(set(batch["input_ids"][0].tolist())) for batch in seen] + [sorted(b) for b in rest] == [
        sorted(batch) for batch in sampler_of()
    ]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_with_torchdatas_stateful_loader() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def loader_of(sampler: MultipackBatchSampler, workers: int) -> Any:
        data = [{"input_ids": [i] * n} for i, n in enumerate(LENGTHS)]
        return stateful.StatefulDataLoader(
            data, batch_sampler=sampler, collate_fn=FlatteningCollator(), num_workers=workers
        )

    for workers in (0, 1):
        expected = [batch["input_ids"].tolist() for batch in loader_of(sampler_of(), workers)]
        loader = loader_of(sampler_of(), workers)
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        state = loader.state_dict()
        resumed = loader_of(sampler_of(), workers)
        resumed.load_state_dict(state)
        assert [batch["input_ids"].tolist() for batch in resumed] == expected[5:]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_as_the_sampler_of_torchtunes_recipes() -> None:
    """The recipes use ``len(dataloader)``, call ``dataloader.sampler.set_epoch`` and save the loader's state."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    class Lists(Dataset[list[dict[str, Any]]]):
        def __getitem__(self, numbers: list[int]) -> list[dict[str, Any]]:
            return [{"input_ids": [i] * LENGTHS[i]} for i in numbers]

    def loader_of() -> Any:
        return stateful.StatefulDataLoader(
            Lists(), batch_size=None, sampler=sampler_of(), collate_fn=FlatteningCollator()
        )

    loader = loader_of()
    loader.sampler.set_epoch(1)
    expected = [batch["input_ids"].tolist() for batch in loader]
    assert len(expected) == len(loader)
    loader = loader_of()
    loader.sampler.set_epoch(1)
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    resumed = loader_of()
    resumed.load_state_dict(loader.state_dict())
    resumed.sampler.set_epoch(1)
    assert [batch["input_ids"].tolist() for batch in resumed] == expected[4:]


@pytest.mark.parametrize(
    "changes",
    [
        {"max_tokens": 65},
        {"seed": 4},
        {"packs_per_step": 6},
        {"objective": "linear"},
        {"shuffle": False},
        {"drop_last": True},
    ],
    ids=str,
)
def test_a_state_of_other_settings_is_refused(changes: dict[str, Any]) -> None:
    [(name, value)] = changes.items()
    state = sampler_of().state_dict()
    with pytest.raises(ValueError) as error:
        sampler_of(**changes).load_state_dict(state)
    assert str(error.value) == (
        f"the state was made with {name}={state[name]!r}, this sampler has {name}={value!r}; go on with what the run "
        "began with, or start anew without the state"
    )


def test_a_state_of_other_keys_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"the state holds \['epoch'\]; this sampler's holds \['dealt', 'drop_last'"
    ):
        sampler_of().load_state_dict({"epoch": 0})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: sampler_of(5, 0),
            "packs_per_step=12 is no multiple of 5, the packs that all ranks take at once; make it one, so that every "
            "rank gets as many",
        ),
        (lambda: sampler_of(2, 2), "rank=2 is not among the num_replicas=2, which count from 0"),
        (lambda: sampler_of(0, 0), "num_replicas=0 is below 1; give at least 1"),
        (
            lambda: sampler_of(max_tokens=8),
            f"sample 0 has {LENGTHS[0]} tokens, max_tokens is 8; truncate or remove it, or raise max_tokens",
        ),
        (lambda: sampler_of(max_tokens=2.5), "max_tokens=2.5 is not a whole number; give one of at least 1"),
        (lambda: sampler_of(packs_per_step=0), "packs_per_step=0 is below 1; give at least 1"),
    ],
)
def test_bad_settings_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        make()
    assert str(error.value) == message


def test_ranks_come_from_the_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_rank(None, None) == (1, 0)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 4)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 3)
    assert resolve_rank(None, None) == (4, 3)
    assert resolve_rank(8, 5) == (8, 5)
