"""The steps of multipack against a naive plan, and `MultipackBatchSampler`: ranks, resumes, loaders."""

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
from streampack.map_style.multipack import FILLED_BY_COST, Step, _fill_step, plan_steps
from tests.oracle import multipack as published
from tests.oracle.packing import lower_bound

LIMIT = 24
lengths_of = st.lists(st.integers(1, LIMIT), min_size=12, max_size=60)
objectives = st.sampled_from(["quadratic", "linear"])


def naive_step(
    waiting: list[int], lengths: list[int], count: int, *, squared: bool, last: bool
) -> tuple[Step, list[int]]:
    """Plan one step as the docstrings describe it, without a heap, a bitset or a window."""
    packs: Step = [[] for _ in range(count)]

    def tokens(pack: int) -> int:
        return sum(lengths[i] for i in packs[pack])

    def cost(pack: int) -> int:
        return sum(lengths[i] ** (2 if squared else 1) for i in packs[pack])

    left = []
    laying = True
    for place, i in enumerate(sorted(waiting, key=lambda i: -lengths[i])):
        laid = sum(map(tokens, range(count)))
        if laid + lengths[i] > count * LIMIT * (1 if last else FILLED_BY_COST) and place >= count:
            laying = False
        cheapest = min(range(count), key=lambda pack: (cost(pack), pack))
        if laying and tokens(cheapest) + lengths[i] <= LIMIT:
            packs[cheapest].append(i)
        else:
            left.append(i)
    left.sort()
    order = sorted(range(count), key=cost)
    if not last:
        for pack in order:
            fill = fullest(left, lengths, LIMIT - tokens(pack))
            packs[pack] += reversed(fill)
            left = [i for i in left if i not in fill]
        order.sort(key=cost)
    return [packs[pack] for pack in reversed(order)], left


def fullest(left: list[int], lengths: list[int], room: int) -> list[int]:
    """Return the fullest subset, of equal ones the one that is complete first."""
    best: dict[int, list[int]] = {0: []}  # sum -> the first subset that made it
    for i in left:
        if room in best:
            break
        for total, members in sorted(best.items(), reverse=True):
            if total + lengths[i] <= room:
                best.setdefault(total + lengths[i], [*members, i])
    return best[max(best)]


@given(st.lists(st.integers(1, 9), min_size=8, max_size=40), st.integers(1, 4), st.booleans())
def test_steps_match_the_reference(lengths: list[int], count: int, last: bool) -> None:
    if last and sum(lengths) > count * LIMIT:
        lengths = lengths[: max(1, LIMIT * count // max(lengths))]
    for squared in (True, False):
        costs = [length * length for length in lengths] if squared else lengths
        waiting = list(range(len(lengths)))
        found = _fill_step(waiting, lengths, costs, LIMIT, count, last=last)
        assert found == naive_step(waiting, lengths, count, squared=squared, last=last)


@given(lengths_of, st.integers(1, 4), objectives)
def test_every_sample_exactly_once_within_the_budget(lengths: list[int], count: int, objective: str) -> None:
    settings: Any = {"max_tokens": LIMIT, "packs_per_step": count, "objective": objective}
    steps = plan_steps(lengths, **settings)
    packs = list(chain.from_iterable(steps))
    assert sorted(chain.from_iterable(packs)) == list(range(len(lengths)))
    assert all(packs), "no pack is empty"
    assert {len(step) for step in steps} == {count}
    assert max(sum(lengths[i] for i in pack) for pack in packs) <= LIMIT
    # What drop_last leaves out is less than a step.
    try:
        kept = plan_steps(lengths, **settings, drop_last=True)
    except ValueError:
        assert sum(lengths) < count * LIMIT
        return
    samples = list(chain.from_iterable(chain.from_iterable(kept)))
    assert len(samples) == len(set(samples))
    assert sum(lengths) - sum(lengths[i] for i in samples) < count * LIMIT
    assert len(kept) <= len(steps)


def test_few_samples_still_give_every_rank_a_batch() -> None:
    """17 tokens fill two packs of 8 and one token more; the last step's second pack has to come from somewhere.

    Where the caller pads, packs may be empty.
    """
    steps = plan_steps([1] * 17, max_tokens=8, packs_per_step=2)
    assert [[len(pack) for pack in step] for step in steps] == [[7, 8], [1, 1]]
    steps = plan_steps([8, 8, 8], max_tokens=8, packs_per_step=2, allow_empty=True)
    assert steps == [[[1], [0]], [[2], []]]


@pytest.fixture(scope="module")
def chat() -> list[int]:
    return published.chat_lengths(100_000)


def test_fuller_and_more_even_than_the_published_multipack(chat: list[int]) -> None:
    """The figures that the project promises: 8 ranks of 16 x 2,048 tokens, chat-like lengths."""
    room = 16 * 2048
    steps = plan_steps(chat, max_tokens=room, packs_per_step=8)
    other_steps = published.published_steps(chat, room, 8)
    assert len(steps) == lower_bound(chat, 8 * room) < len(other_steps)
    assert sorted(chain.from_iterable(chain.from_iterable(steps))) == list(range(len(chat)))
    ours, theirs = published.measure(steps, chat, room), published.measure(other_steps, chat, room)
    assert ours.efficiency > 0.997
    assert ours.utilization > 0.99
    assert ours.utilization > theirs.utilization
    assert ours.lag < 0.9 * theirs.lag


def test_linear_steps_are_the_fewest_there_can_be(chat: list[int]) -> None:
    some = chat[:20_000]
    for room, ranks in ((16 * 2048, 64), (4096, 8)):
        steps = plan_steps(some, max_tokens=room, packs_per_step=ranks, objective="linear")
        for step in steps:
            costs = [sum(some[number] for number in pack) for pack in step]
            assert costs == sorted(costs, reverse=True)
        assert len(steps) == lower_bound(some, room * ranks)


@pytest.mark.parametrize("objective", ["quadratic", "linear"])
def test_no_sample_waits_for_the_end(chat: list[int], objective: str) -> None:
    """Short samples fill packs; a plan that saves them up trains on nothing else at the end."""
    chat = chat[:40_000]
    steps = plan_steps(chat, max_tokens=16 * 2048, packs_per_step=8, objective=objective)
    early = [number for step in steps[: len(steps) // 2] for pack in step for number in pack]
    mean = sum(chat[number] for number in early) / len(early)
    assert mean == pytest.approx(sum(chat) / len(chat), rel=0.01)
    lag = [number - len(chat) * at / len(steps) for at, step in enumerate(steps) for number in chain(*step)]
    assert np.mean(np.abs(lag)) < 2 * len(chat) / len(steps), "a sample waits two steps at most, in the mean"


def test_numpy_lengths_are_fine() -> None:
    """A shift by a numpy integer overflows at 64 bits."""
    lengths = np.random.default_rng(0).integers(1, 2048, 500)
    settings = {"max_tokens": 16 * 2048, "packs_per_step": 2}
    assert plan_steps(lengths, **settings) == plan_steps(lengths.tolist(), **settings)


def test_plans_are_measured_as_defined() -> None:
    made = published.measure([[[0, 1], [2]], [[3], []]], [3, 4, 5, 1, 6], 8)
    assert made == published.Measures(efficiency=13 / 32, utilization=13 / (7 + 7 + 1 + 1), lag=0.5)


# The sampler.

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


class Lists(Dataset[list[dict[str, Any]]]):
    """Answers with all samples of a batch, as torchtune's recipes want where the sampler makes batches."""

    def __getitem__(self, numbers: list[int]) -> list[dict[str, Any]]:
        return [{"input_ids": [i] * LENGTHS[i]} for i in numbers]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("kind", ["batch_sampler", "batch_sampler, 1 worker", "sampler"])
def test_with_torchdatas_stateful_loader(kind: str) -> None:
    """``sampler``: torchtune's recipes use ``len(dataloader)``, ``dataloader.sampler`` and the loader's state."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    data = [{"input_ids": [i] * n} for i, n in enumerate(LENGTHS)]

    def loader_of() -> tuple[Any, MultipackBatchSampler]:
        sampler = sampler_of()
        sampler.set_epoch(1)
        by = {"sampler": sampler, "batch_size": None} if kind == "sampler" else {"batch_sampler": sampler}
        rows = Lists() if kind == "sampler" else data
        workers = int(kind.endswith("worker"))
        loader = stateful.StatefulDataLoader(rows, collate_fn=FlatteningCollator(), num_workers=workers, **by)
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


OTHERS: dict[str, Any] = {
    "max_tokens": 65, "seed": 4, "packs_per_step": 6, "objective": "linear", "shuffle": False, "drop_last": True,
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_a_state_of_other_settings_is_refused(name: str) -> None:
    value, state = OTHERS[name], sampler_of().state_dict()
    with pytest.raises(ValueError) as error:
        sampler_of(**{name: value}).load_state_dict(state)
    assert str(error.value).startswith(
        f"the state was made with {name}={state[name]!r}, this sampler has {name}={value!r}; go on with what"
    )


def planned(lengths: list[Any], **settings: Any) -> Any:
    return lambda: plan_steps(lengths, **{"max_tokens": 8, "packs_per_step": 2, **settings})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (planned([3, 9]), "sample 1 has 9 tokens, max_tokens is 8; truncate or remove it, or raise max_tokens"),
        (planned([3, 0]), "sample 1 has 0 tokens; remove it"),
        (planned([3, 2.5]), "lengths must be whole numbers of tokens: 'float' object cannot be interpreted as an"),
        (planned([]), "0 samples of 0 tokens make no step of 2 packs of 8; lower packs_per_step or max_tokens, or"),
        (planned([3, 4], drop_last=True), "2 samples of 7 tokens make no step of 2 packs of 8; lower packs_per_step"),
        (planned([8, 8, 8]), "3 samples do not fill 4 packs, that is 2 steps of 2: some pack would be empty; lower"),
        (planned([3], objective="cubic"), "objective='cubic' is unknown; choose one of 'quadratic', 'linear'"),
        (planned([3], max_tokens=0), "max_tokens=0 is below 1; give at least 1"),
        (planned([3], packs_per_step=0), "packs_per_step=0 is below 1; give at least 1"),
        (lambda: sampler_of(5, 0), "packs_per_step=12 is no multiple of 5, the packs that all ranks take at once"),
        (lambda: sampler_of(2, 2), "rank=2 is not among the num_replicas=2, which count from 0"),
        (lambda: sampler_of(0, 0), "num_replicas=0 is below 1; give at least 1"),
        (lambda: sampler_of(max_tokens=8), f"sample 0 has {LENGTHS[0]} tokens, max_tokens is 8; truncate or remove it"),
        (lambda: sampler_of(max_tokens=2.5), "max_tokens=2.5 is not a whole number; give one of at least 1"),
        (lambda: sampler_of(packs_per_step=0), "packs_per_step=0 is below 1; give at least 1"),
        (lambda: sampler_of().load_state_dict({"epoch": 0}), "the state holds ['epoch']; this sampler's holds"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        make()
    assert str(error.value).startswith(message)


def test_ranks_come_from_the_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def batches(**ranks: int) -> list[list[int]]:
        return list(MultipackBatchSampler(LENGTHS, **SETTINGS, **ranks))

    assert batches() == list(sampler_of())
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 4)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 3)
    assert batches() == list(sampler_of(4, 3))
    assert batches(num_replicas=6, rank=5) == list(sampler_of(6, 5))
