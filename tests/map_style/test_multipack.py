from __future__ import annotations

import re
import statistics
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import multipack as bench
from streampack.map_style.multipack import FILLED_BY_COST, Step, _fill_step, plan_steps

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
    steps = plan_steps(lengths, max_tokens=LIMIT, packs_per_step=count, objective=objective)
    packs = list(chain.from_iterable(steps))
    assert sorted(chain.from_iterable(packs)) == list(range(len(lengths)))
    assert all(packs), "no pack is empty"
    assert {len(step) for step in steps} == {count}
    assert max(sum(lengths[i] for i in pack) for pack in packs) <= LIMIT


@given(lengths_of, st.integers(1, 4), objectives)
def test_drop_last_leaves_out_less_than_a_step(lengths: list[int], count: int, objective: str) -> None:
    whole = plan_steps(lengths, max_tokens=LIMIT, packs_per_step=count, objective=objective)
    try:
        kept = plan_steps(
            lengths, max_tokens=LIMIT, packs_per_step=count, objective=objective, drop_last=True
        )
    except ValueError:
        assert sum(lengths) < count * LIMIT
        return
    samples = list(chain.from_iterable(chain.from_iterable(kept)))
    assert len(samples) == len(set(samples))
    left_out = sum(lengths) - sum(lengths[i] for i in samples)
    assert left_out < count * LIMIT
    assert len(kept) <= len(whole)


def test_few_samples_still_give_every_rank_a_batch() -> None:
    """17 tokens fill two packs of 8 and one token more; the last step's second pack has to come from somewhere."""
    steps = plan_steps([1] * 17, max_tokens=8, packs_per_step=2)
    assert [[len(pack) for pack in step] for step in steps] == [[7, 8], [1, 1]]


def test_empty_packs_are_allowed_where_the_caller_pads() -> None:
    steps = plan_steps([8, 8, 8], max_tokens=8, packs_per_step=2, allow_empty=True)
    assert steps == [[[1], [0]], [[2], []]]


@pytest.fixture(scope="module")
def chat() -> list[int]:
    return bench.draw(bench.CHAT, count=100_000, seed=0, longest=2048).tolist()


def test_fuller_and_more_even_than_the_published_multipack(chat: list[int]) -> None:
    """The figures that the project promises: 8 ranks of 16 x 2,048 tokens, chat-like lengths."""
    room = 16 * 2048
    ours = bench.measure(bench.ours("quadratic")(chat, room, 8), chat, room)
    theirs = bench.measure(bench.published(bench.scheduled)(chat, room, 8), chat, room)
    assert ours.left_out == 0
    assert ours.steps == bench.lower_bound(chat, 8 * room) < theirs.steps
    assert ours.efficiency > 0.997
    assert ours.utilization > 0.99
    assert ours.utilization > theirs.utilization
    assert statistics.fmean(ours.lags) < 0.9 * statistics.fmean(theirs.lags)


def test_linear_steps_are_the_fewest_there_can_be(chat: list[int]) -> None:
    some = chat[:20_000]
    for room, ranks in ((16 * 2048, 64), (4096, 8)):
        steps = plan_steps(some, max_tokens=room, packs_per_step=ranks, objective="linear")
        for step in steps:
            costs = [sum(some[number] for number in pack) for pack in step]
            assert costs == sorted(costs, reverse=True)
        assert len(steps) == bench.lower_bound(some, room * ranks)


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


@pytest.mark.parametrize(
    ("lengths", "settings", "message"),
    [
        (
            [3, 9],
            {},
            "sample 1 has 9 tokens, max_tokens is 8; truncate or remove it, or raise max_tokens",
        ),
        ([3, 0], {}, "sample 1 has 0 tokens; remove it"),
        (
            [3, 2.5],
            {},
            "lengths must be whole numbers of tokens: 'float' object cannot be interpreted as an integer",
        ),
        (
            [],
            {},
            "0 samples of 0 tokens make no step of 2 packs of 8; lower packs_per_step or max_tokens, "
            "or leave drop_last out",
        ),
        (
            [3, 4],
            {"drop_last": True},
            "2 samples of 7 tokens make no step of 2 packs of 8; lower packs_per_step or max_tokens, "
            "or leave drop_last out",
        ),
        (
            [8, 8, 8],
            {},
            "3 samples do not fill 4 packs, that is 2 steps of 2: some pack would be empty; lower packs_per_step, "
            "or set drop_last=True",
        ),
        ([3], {"objective": "cubic"}, "objective='cubic' is unknown; choose one of 'quadratic', 'linear'"),
        ([3], {"max_tokens": 0}, "max_tokens=0 is below 1; give at least 1"),
        ([3], {"packs_per_step": 0}, "packs_per_step=0 is below 1; give at least 1"),
    ],
)
def test_bad_input_is_refused(lengths: list[int], settings: dict, message: str) -> None:
    with pytest.raises(ValueError) as error:
        plan_steps(lengths, **{"max_tokens": 8, "packs_per_step": 2, **settings})
    assert str(error.value) == message


def test_numpy_lengths_are_fine() -> None:
    """A shift by a numpy integer overflows at 64 bits."""
    lengths = np.random.default_rng(0).integers(1, 2048, 500)
    settings = {"max_tokens": 16 * 2048, "packs_per_step": 2}
    assert plan_steps(lengths, **settings) == plan_steps(lengths.tolist(), **settings)


def test_the_benchmark_measures_as_defined() -> None:
    lengths = [3, 4, 5, 1, 6]
    made = bench.measure([[[0, 1], [2]], [[3], []]], lengths, 8)
    assert made == bench.Measured(
        steps=2,
        efficiency=13 / 32,
        utilization=13 / (7 + 7 + 1 + 1),
        lags=[0.0, 1.0],
        left_out=1,
    )


@pytest.mark.parametrize("allot", [bench.scheduled, bench.first_fit_decreasing])
def test_the_published_plan_takes_the_longest_prefix_that_fits(allot) -> None:
    lengths = bench.draw(bench.CHAT, count=300, seed=0, longest=2048).tolist()
    start = 0
    for step in bench.published(allot)(lengths, 8192, 4):
        numbers = sorted(chain.from_iterable(step))
        assert numbers == list(range(start, numbers[-1] + 1))
        assert max(sum(lengths[i] for i in pack) for pack in step) <= 8192
        start = numbers[-1] + 1
        if start < len(lengths):
            more = range(numbers[0], start + 1)
            assert sum(lengths[i] for i in more) > 4 * 8192 or allot(lengths, more, 8192, 4) is None


def test_the_benchmark_runs(capsys: pytest.CaptureFixture[str]) -> None:
    bench.main(["--smoke"])
    out = capsys.readouterr().out
    assert all(re.search(rf"\| {re.escape(name)} +\|", out) for name in bench.planners())
