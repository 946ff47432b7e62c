"""Fractions of trained tokens follow the weights, also where those change at a resume."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import count, islice, repeat
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack import (
    IGNORE_INDEX,
    IterablePackedDataset,
    MapSource,
    Mix,
)
from streampack.sources import Reading
from streampack.sources.mixture_scheduler import MixtureScheduler
from tests.support.conformance import check_resume_everywhere
from tests.support.mixtures import (
    ENDLESS,
    SHUFFLED,
    entry,
    make,
    three,
    training,
)


def trained_by_source(
    mix: Mix,
    trained: Mapping[int, Iterable[int]],
    *,
    tokens: int,
    reopened: int | None = None,
    stagger: int = 2048,
    **reading: Any,
) -> list[int]:
    """Read until ``tokens`` tokens are trained, and return how many of them each source trained.

    ``trained`` has the numbers of trained tokens of each source's rows. Every ``reopened`` rows, the reader is replaced
    by a new one at its cursor.
    """
    reader = mix.read(Reading(**reading, stagger=stagger))
    lengths = {i: iter(each) for i, each in trained.items()}
    totals = [0] * len(mix.names)
    for rows_read in count(1):
        row = next(reader)
        number = next(lengths[leaf := mix.source_index(row.row_id)])
        reader.charge(training(number))
        totals[leaf] += number
        if sum(totals) >= tokens:
            return totals
        if reopened and rows_read % reopened == 0:
            front = reader.front
            reader = mix.read(Reading(**reading, start=reader.cursor))
            reader.restore_front(front)
    raise AssertionError


def plain(names: Iterable[str], weights: Iterable[float], size: int = 50) -> Mix:
    """Return a mixture of sources whose rows are not encoded."""
    return Mix(
        [
            entry(n, MapSource([{"i": i} for i in range(size)]), w)
            for n, w in zip(names, weights, strict=True)
        ],
        stop="never",
    )


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.floats(0.01, 1), st.integers(1, 300)), min_size=1, max_size=6),
    st.integers(0, 99),
    st.integers(1, 4000),
    st.integers(0, 300),
)
def test_fractions_stay_within_the_stated_bound(
    sources: list[tuple[float, int]], seed: int, tokens: int, stagger: int
) -> None:
    """The bound is that of `MixtureScheduler`'s docstring."""
    weights, longest = zip(*sources, strict=True)
    mix = plain(map(str, range(len(sources))), weights)
    rng = np.random.default_rng(seed)
    lengths = {i: [1, *rng.integers(0, most + 1, 10_000).tolist()] for i, most in enumerate(longest)}
    totals = trained_by_source(mix, lengths, tokens=tokens, seed=seed, stagger=stagger)
    for got, weight in zip(totals, weights, strict=True):
        wanted = weight / sum(weights) * sum(totals)
        assert abs(got - wanted) <= len(sources) * max(*longest, stagger) + 1e-5 * sum(totals)


def skewed(lane: int) -> dict[int, Iterable[int]]:
    """Lengths of three sources with means of about 10, 100 and 1,000 tokens, exponential, up to 4,000."""
    rng = np.random.default_rng(lane)

    def of_mean(mean: int) -> Iterator[int]:
        while True:
            yield from (min(4000, 1 + int(n)) for n in rng.exponential(mean, 1000))

    return {i: of_mean(10 * 10**i) for i in range(3)}


TARGETS = (0.7, 0.2, 0.1)


def worst_errors(lanes: int, few: int, tokens: int, reopened: int) -> tuple[float, float]:
    """Return how far the fractions of a lane, and of all lanes, are from the weights at most."""
    mix = plain("abc", TARGETS, size=64)
    found = [
        trained_by_source(mix, skewed(lane), tokens=tokens, reopened=reopened, lane=lane, num_lanes=lanes)
        for lane in range(0, lanes, max(1, lanes // few))
    ]
    fractions = [np.array(totals) / sum(totals) for totals in [*found, np.sum(found, 0)]]
    off = [float(np.abs(share - TARGETS).max()) for share in fractions]
    return max(off[:-1]), off[-1]


def test_fractions_of_trained_tokens_with_skewed_lengths() -> None:
    """The bound of a lane is 3 x 4,000 / 200,000, so 6 points. After 2 million tokens (next test) it is 0.6 points."""
    worst, together = worst_errors(8, few=2, tokens=200_000, reopened=997)
    assert worst < 0.03
    assert together < 0.03


@pytest.mark.slow
def test_fractions_within_half_a_point_after_two_million_tokens_in_every_lane() -> None:
    worst, together = worst_errors(64, few=16, tokens=2_000_000, reopened=997)
    assert worst < 0.005
    assert together < 0.005


def test_errors_of_lanes_cancel() -> None:
    """After few tokens in each, 64 lanes together are nearer to the weights than a lane is on average."""
    mix = plain("abc", TARGETS, size=64)
    for tokens in (300, 1000, 3000):
        found = [
            trained_by_source(
                mix, {i: repeat(10 * 10**i) for i in range(3)}, tokens=tokens, lane=lane, num_lanes=64
            )
            for lane in range(64)
        ]
        together = np.sum(found, 0) / np.sum(found)
        alone = [np.abs(np.array(totals) / sum(totals) - TARGETS).max() for totals in found]
        assert np.abs(together - TARGETS).max() < 0.5 * np.mean(alone)
        assert tokens == 300 or len({tuple(totals) for totals in found}) > 10


def test_only_trained_tokens_count() -> None:
    """Prompts, tokens that are cut off or dropped, and the first token of each sequence do not count."""
    prompts = [{"tokens": [1] * 20, "labels": [IGNORE_INDEX] * 15 + [1] * 5}] * 400
    answers = [{"tokens": [2] * 20, "labels": [2] * 20}] * 400
    giants = [
        {"tokens": [3] * (40 if i % 2 else 11), "labels": [3] * (40 if i % 2 else 11)} for i in range(400)
    ]
    mix = Mix([entry("prompts", prompts), entry("answers", answers), entry("giants", giants)], stop="never")
    for policy, length in (("truncate", 24), ("drop", 24), ("split", 24)):
        data = IterablePackedDataset(mix, max_seq_len=length, overlong=policy, epochs=None, num_lanes=1)
        packs = list(islice(data, 700))
        trained = Counter[int]()
        for pack in packs:
            labels = pack["labels"]
            trained.update(labels[labels != IGNORE_INDEX].tolist())
        source_stats = data.source_stats()
        assert sum(stats.tokens_in for stats in source_stats.values()) == data.ledger().tokens_in
        assert [stats.trained for stats in source_stats.values()] == [trained[1], trained[2], trained[3]]
        assert max(trained.values()) - min(trained.values()) < 0.02 * trained.total()


def resumed(state: dict[str, Any], weights: Iterable[float], **settings: Any) -> IterablePackedDataset:
    data = make(three("never", weights), **settings)
    data.load_state_dict(state)
    return data


def test_weights_changed_at_a_resume() -> None:
    """The waiting rows stay the same, and a second resume with the same weights changes nothing."""
    settings = {**ENDLESS, **SHUFFLED, "num_lanes": 2, "overlong": "split", "max_seq_len": 9}
    before = make(three("never", (7, 2, 1)), **settings)
    for _ in islice(before, 50):
        pass
    with pytest.warns(UserWarning, match="weights changed") as warned:
        after = resumed(before.state_dict(), (1, 2, 7), **settings)
    assert str(warned[0].message) == (
        "the mixture's weights changed since the state was written: short 0.7 -> 0.1, long 0.1 -> 0.7. The rows that "
        "wait were drawn by the old ones; the next are drawn by the new ones, and the fractions approach them"
    )
    old, waiting = before.stream(lane_states=before._lane_states()), after.stream()
    for one, other in zip(old.lanes, waiting.lanes, strict=True):
        assert [piece.row_id for piece in one.planner.waiting] == [
            piece.row_id for piece in other.planner.waiting
        ]

    def make_after() -> IterablePackedDataset:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return resumed(before.state_dict(), (1, 2, 7), **settings)

    check_resume_everywhere(make_after, packs=20)
    started = after.source_stats()
    for _ in islice(after, 400):
        pass
    gained = np.array([stats.trained - started[name].trained for name, stats in after.source_stats().items()])
    assert np.abs(gained / gained.sum() - (0.1, 0.2, 0.7)).max() < 0.03


def rolling(weights: tuple[float, ...]) -> Mix:
    """Return a mixture whose epochs have some twenty rows."""
    return three("first_exhausted", weights, short=12, middling=9, long=7)


@pytest.mark.parametrize(
    ("mixed", "more"),
    [
        (partial(three, "never"), {}),
        (partial(three, "never"), {"overlong": "split", "max_seq_len": 9}),
        (rolling, {"buffer_size": 64}),
    ],
    ids=["whole", "split", "over-epochs"],
)
def test_weights_changed_repeatedly_while_rows_wait(
    mixed: Callable[[tuple[float, ...]], Mix], more: dict[str, Any]
) -> None:
    """The packs match those of one process that changes its weights without a resume."""
    settings = {**ENDLESS, **SHUFFLED, "num_lanes": 1, "strategy": "best_fit", "buffer_size": 32, **more}
    stages = [(7, 2, 1), (1, 2, 7), (1, 1, 1), (5, 1, 1)]
    changing = mixed(stages[0])
    unbroken = make(changing, **settings).stream()
    state, waited = None, 0
    for weights in stages:
        data = make(mixed(weights), **settings)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if state is not None:
                data.load_state_dict(state)
        [lane] = unbroken.lanes
        assert isinstance(lane.piece_reader.reader, MixtureScheduler)
        changing.weights = lane.piece_reader.reader.weights = mixed(weights).weights  # from the next row on
        found = [pack["tokens"].tolist() for pack in islice(data, 60 if weights == stages[-1] else 3)]
        assert found == [pack.tokens.tolist() for pack in islice(unbroken, len(found))]
        state = data.state_dict()
        waited += state["lanes"][0]["next_piece"] > state["lanes"][0]["first"]
    assert waited == len(stages), "rows waited when the weights changed"
