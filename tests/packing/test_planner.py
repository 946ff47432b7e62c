from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.lengths import lengths as benchmark_lengths
from streampack.packing.planner import Planner, Span, plan_packs
from streampack.packing.settings import OVERLONG, Packing
from streampack.packing.strategies import STRATEGIES
from tests.support import oracle
from tests.support.strategies import WAYS, settings_of

CHOOSING = tuple(oracle.CHOOSE)


@st.composite
def corpora(draw: st.DrawFn, *, longest: int = 1, largest: int = 40) -> tuple[list[int], int]:
    """Draw (lengths, max_seq_len), where no sample is longer than ``longest * max_seq_len``."""
    limit = draw(st.integers(1, 24))
    short = st.integers(1, max(1, limit // 3))
    any_length = st.integers(1, limit * longest)
    return draw(st.lists(st.one_of(short, any_length), max_size=largest)), limit


def plan(
    lengths: list[int], limit: int, *, strategy: str = "exact_fit", **settings: Any
) -> list[list[tuple[int, int, int]]]:
    packs = plan_packs(lengths, limit, **settings_of(strategy), **settings)
    return [[tuple(span) for span in pack] for pack in packs]


def test_every_strategy_is_tested() -> None:
    assert set(CHOOSING) == set(STRATEGIES)


@settings(max_examples=25)  # the reference tries 2,048 subsets for each pack
@given(corpus=corpora(largest=24))
def test_exact_fit_matches_the_reference_with_a_larger_buffer(corpus: tuple[list[int], int]) -> None:
    lengths, limit = corpus
    settings = {"strategy": "exact_fit", "buffer_size": 11}
    assert plan(lengths, limit, **settings) == oracle.plan(lengths, limit, **settings)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [  # samples of 5, 4, 2, 3, 4 and 1 tokens in packs of 8
        ("next_fit", [[5], [4, 2], [3, 4, 1]]),
        ("first_fit", [[5, 2, 1], [4, 3], [4]]),
        ("best_fit", [[5, 3], [4, 4], [2, 1]]),
        ("exact_fit", [[5, 3], [4, 4], [2, 1]]),
        ("wrap", [[5, 3], [1, 2, 3, 2], [2, 1]]),
    ],
)
def test_packs_of_an_example_worked_out_by_hand(strategy: str, expected: list[list[int]]) -> None:
    packs = plan_packs([5, 4, 2, 3, 4, 1], 8, **settings_of(strategy))
    assert [[span.stop - span.start for span in pack] for pack in packs] == expected


def test_exact_fit_prefers_the_earliest_arrivals() -> None:
    # The 6 leaves room for 4. The pieces of 1 and 3 arrive before the single 4, and in the second line so do 2 and 2.
    assert plan([6, 1, 3, 4], 10)[0] == [(0, 0, 6), (1, 0, 1), (2, 0, 3)]
    assert plan([6, 2, 3, 2, 4], 10)[0] == [(0, 0, 6), (1, 0, 2), (3, 0, 2)]
    # No sum is exact. The fullest that buffer_size=3 allows is 3 + 3 + 3, with the first two of the three waiting 3s.
    assert plan([3, 3, 3, 3, 5], 10, buffer_size=3)[0] == [(0, 0, 3), (1, 0, 3), (2, 0, 3)]


@pytest.mark.parametrize("strategy", WAYS)
@given(
    corpus=corpora(longest=4),
    buffer_size=st.integers(1, 6),
    overlong=st.sampled_from(["split", "drop", "truncate"]),
    side=st.sampled_from(["right", "left"]),
)
def test_plans_match_the_reference_implementation(
    strategy: str, corpus: tuple[list[int], int], buffer_size: int, overlong: str, side: str
) -> None:
    lengths, limit = corpus
    ours = plan(
        lengths, limit, strategy=strategy, buffer_size=buffer_size, overlong=overlong, truncate_side=side
    )
    theirs = oracle.plan(
        lengths, limit, strategy=strategy, buffer_size=buffer_size, overlong=overlong, side=side
    )
    assert ours == theirs


@pytest.mark.parametrize("strategy", WAYS)
@given(corpus=corpora(longest=3), buffer_size=st.integers(1, 200), data=st.data())
def test_every_kept_token_is_packed_once_and_in_order(
    strategy: str, corpus: tuple[list[int], int], buffer_size: int, data: Any
) -> None:
    """This holds for every plan, without a reference to compare with; and no pack is too long."""
    lengths, limit = corpus
    overlong = data.draw(st.sampled_from(["split", "drop", "truncate"]))
    max_seqs = data.draw(st.none() | st.integers(1, 6))
    packs = plan(
        lengths,
        limit,
        strategy=strategy,
        buffer_size=buffer_size,
        overlong=overlong,
        max_seqs_per_pack=max_seqs,
    )
    assert all(0 < sum(stop - start for _, start, stop in pack) <= limit for pack in packs)
    assert max_seqs is None or all(len(pack) <= max_seqs for pack in packs)
    tokens = [(i, at) for pack in packs for i, start, stop in pack for at in range(start, stop)]
    if strategy == "wrap" or overlong == "split":
        expected = [(i, at) for i, length in enumerate(lengths) for at in range(length)]
    elif overlong == "drop":
        expected = [(i, at) for i, length in enumerate(lengths) if length <= limit for at in range(length)]
    else:
        expected = [(i, at) for i, length in enumerate(lengths) for at in range(min(length, limit))]
    if strategy == "wrap" and overlong != "split":
        expected = [
            (i, at)
            for i, length in enumerate(lengths)
            for at in range(length if length <= limit else limit if overlong == "truncate" else 0)
        ]
    assert sorted(tokens) == expected
    if strategy == "wrap":
        assert tokens == expected, "samples are packed in order"
        for pack in packs[:-1]:
            assert sum(b - a for _, a, b in pack) == limit or len(pack) == max_seqs, (
                "every pack but the last is full"
            )
    else:
        firsts = [min(i for i, _, _ in pack) for pack in packs]
        assert firsts == sorted(firsts), "every pack takes the oldest waiting piece"


@pytest.mark.parametrize("strategy", WAYS)
@given(corpus=corpora(), buffer_size=st.integers(1, 12), max_seqs=st.none() | st.integers(1, 6))
def test_a_piece_leaves_within_buffer_size_packs(
    strategy: str, corpus: tuple[list[int], int], buffer_size: int, max_seqs: int | None
) -> None:
    """At most buffer_size pieces wait, and every pack takes the oldest of them."""
    lengths, limit = corpus
    pulled_in: dict[int, int] = {}  # piece -> the pack during which it was pulled
    rest = pieces(lengths)
    packs = 0

    def pull() -> Span | None:
        assert len(planner.waiting) < buffer_size, "pulled into a full buffer"
        piece = next(rest, None)
        if piece is not None:
            pulled_in[piece.index] = packs
        return piece

    packing = Packing(limit, buffer_size=buffer_size, max_seqs_per_pack=max_seqs, **settings_of(strategy))
    planner = Planner(packing, pull)
    while True:
        oldest = planner.waiting[0].index if planner.waiting else len(pulled_in)
        placed = planner.next_pack()
        if not placed:
            break
        assert placed[0][0].index == oldest
        assert [piece.index for piece in planner.waiting] == sorted(piece.index for piece in planner.waiting)
        assert [piece.length for piece in planner.waiting] == planner.lengths
        assert len(planner.lengths) <= buffer_size
        assert all(packs - pulled_in[piece.index] <= buffer_size for piece, _, _ in placed)
        packs += 1
    assert not planner.waiting
    assert planner.buffered == 0


def pieces(lengths: list[int]) -> Iterator[Span]:
    return iter([Span(i, 0, length) for i, length in enumerate(lengths)])


@given(corpus=corpora(), buffer_size=st.integers(1, 12))
def test_exact_fit_pulls_only_while_no_exact_sum_exists(
    corpus: tuple[list[int], int], buffer_size: int
) -> None:
    lengths, limit = corpus
    pulled: list[Span] = []
    rest = pieces(lengths)

    def pull() -> Span | None:
        if (piece := next(rest, None)) is not None:
            pulled.append(piece)
        return piece

    planner = Planner(Packing(limit, "exact_fit", buffer_size), pull)
    before = 0
    while placed := planner.next_pack():
        # If the sum is exact, the search ended with its last member, and nothing after that was pulled.
        if sum(stop - start for _, start, stop in placed) == limit:
            assert len(pulled) == max(before, max(piece.index for piece, _, _ in placed) + 1)
        before = len(pulled)


class PullError(Exception):
    """Raised in place of the next piece."""


@pytest.mark.parametrize("strategy", WAYS)
@given(
    corpus=corpora(),
    buffer_size=st.integers(1, 12),
    failing_calls=st.lists(st.integers(0, 60), max_size=30).map(set),
    max_seqs=st.none() | st.integers(1, 6),
)
def test_an_error_in_pull_changes_nothing(
    strategy: str,
    corpus: tuple[list[int], int],
    buffer_size: int,
    failing_calls: set[int],
    max_seqs: int | None,
) -> None:
    lengths, limit = corpus
    packing = Packing(limit, buffer_size=buffer_size, max_seqs_per_pack=max_seqs, **settings_of(strategy))

    def packs_of(fails: set[int]) -> list[Any]:
        rest, calls, errors = pieces(lengths), itertools.count(), 0

        def pull() -> Span | None:
            if next(calls) in fails:
                raise PullError
            return next(rest, None)

        planner = Planner(packing, pull)
        packs: list[Any] = []
        while True:
            try:
                placed = planner.next_pack()
            except PullError:
                errors += 1
                begun = sum(stop - start for _, start, stop in planner.placed)
                assert planner.buffered == sum(planner.lengths) - planner.offset + begun
                continue
            if not placed:
                assert errors == len(fails & set(range(next(calls))))
                return packs
            packs.append(placed)

    assert packs_of(failing_calls) == packs_of(set())


@pytest.mark.parametrize("strategy", WAYS)
def test_a_pack_reads_no_more_than_a_buffer(strategy: str) -> None:
    """So a stream without an end yields packs."""
    read: list[int] = []

    def stream() -> Iterator[int]:
        for length in itertools.cycle([5, 3, 7, 1]):
            read.append(length)
            yield length

    packs = plan_packs(stream(), 16, buffer_size=32, **settings_of(strategy))
    assert not read, "nothing is read at the call"
    assert next(packs)
    assert len(read) <= (33 if strategy == "best_fit" else 5)  # the oldest, and a buffer of 32


@pytest.mark.parametrize(
    ("name", "extra", "bound"), [("flan", 0, 2124), ("orca", 0, 1945), ("stack", 2, 5933)]
)
def test_pack_counts_of_the_benchmark_distributions(name: str, extra: int, bound: int) -> None:
    """20,000 samples in packs of 4,096, with a buffer of 128; ``bound`` is the lower bound of packs."""
    lengths = benchmark_lengths(name).tolist()
    assert oracle.lower_bound(lengths, 4096) == bound
    counts = {
        s: sum(1 for _ in plan_packs(lengths, 4096, **settings_of(s)))
        for s in ("exact_fit", "wrap", "next_fit")
    }
    assert bound <= counts["exact_fit"] <= bound + extra
    assert counts["wrap"] == bound
    assert counts["next_fit"] == oracle.greedy_count(lengths, 4096)


@pytest.mark.parametrize("strategy", WAYS)
def test_corner_cases(strategy: str) -> None:
    settings = {"strategy": strategy}
    assert plan([], 8, **settings) == []
    assert plan([8], 8, **settings) == [[(0, 0, 8)]]
    assert plan([1] * 3, 1, **settings) == [[(0, 0, 1)], [(1, 0, 1)], [(2, 0, 1)]]
    # A pack may hold more pieces than may wait, for which the buffer is filled again and again.
    for buffer_size in (1, 2, 128):
        ones = plan([1] * 20, 16, buffer_size=buffer_size, **settings)
        assert [len(pack) for pack in ones] == [16, 4]


# Settings and lengths that are wrong.


@pytest.mark.parametrize("name", ["max_seq_len", "buffer_size", "max_seqs_per_pack"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "{name}=0 is below 1; give at least 1"),
        (True, "{name}=True is not a whole number; give one of at least 1"),
        (4.0, "{name}=4.0 is not a whole number; give one of at least 1"),
    ],
)
def test_numbers_out_of_range_raise_at_the_call(name: str, value: object, message: str) -> None:
    with pytest.raises(ValueError) as error:
        plan_packs([1, 2], **{"max_seq_len": 8, name: value})  # not iterated
    assert str(error.value) == message.format(name=name)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"strategy": "wrap"},
            "strategy='wrap' is unknown; choose one of 'next_fit', 'first_fit', 'best_fit', 'exact_fit'; "
            "for documents that continue in the next pack set split_across_pack=True",
        ),
        ({"strategy": None}, "strategy=None is unknown; choose one of 'next_fit'"),
        ({"strategy": ["exact_fit"]}, "strategy=['exact_fit'] is unknown"),
        (
            {"overlong": "cut"},
            "overlong='cut' is unknown; choose one of 'error', 'drop', 'truncate', 'split'",
        ),
        ({"overlong": False}, "overlong=False is unknown"),
        ({"truncate_side": "middle"}, "truncate_side='middle' is unknown; choose one of 'right', 'left'"),
    ],
)
def test_unknown_words_raise_at_the_call(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        plan_packs([1, 2], 8, **settings)
    assert str(error.value).startswith(message)


def test_a_sample_that_is_too_long_is_an_error() -> None:
    packs = plan_packs([3, 9], 8)
    with pytest.raises(ValueError) as error:
        list(packs)
    assert str(error.value) == (
        "sample 1 has 9 tokens, max_seq_len is 8; set overlong to 'split', 'truncate' or 'drop', or raise max_seq_len"
    )


@pytest.mark.parametrize("overlong", OVERLONG)
def test_an_empty_sample_is_an_error(overlong: str) -> None:
    with pytest.raises(ValueError, match="^sample 1 has 0 tokens; remove it"):
        list(plan_packs([3, 0], 8, overlong=overlong))


@pytest.mark.parametrize("convert", [np.array, lambda values: [np.int32(v) for v in values]])
@pytest.mark.parametrize("strategy", ["exact_fit", "wrap"])
def test_numpy_lengths_give_the_same_plan(strategy: str, convert: Callable[[list[int]], Any]) -> None:
    lengths = [5, 4, 2, 3, 4, 1]
    assert plan(convert(lengths), 8, strategy=strategy) == plan(lengths, 8, strategy=strategy)


def test_lengths_that_are_no_whole_numbers_are_errors() -> None:
    with pytest.raises(ValueError, match="sample 1 has 2.5 tokens; give a whole number"):
        list(plan_packs([3, 2.5, 4], 8))  # type: ignore[list-item]


def test_overlong_is_split_by_default_with_split_across_pack_only() -> None:
    assert Packing(8).overlong == "error"
    assert Packing(8, split_across_pack=True).overlong == "split"
    assert Packing(8, split_across_pack=True, overlong="drop").overlong == "drop"
    with pytest.raises(ValueError, match="sample 0 has 9 tokens"):
        list(plan_packs([9], 8, split_across_pack=True, overlong="error"))
    for strategy in CHOOSING:  # no strategy is used
        assert plan([9], 8, split_across_pack=True, strategy=strategy) == [[(0, 0, 8)], [(0, 8, 9)]]


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("next_fit", [[0, 1, 2], [3, 4, 5], [6, 7, 8]]),
        ("first_fit", [[0, 1, 2], [3, 4, 5], [6, 7, 8]]),
        (
            "exact_fit",
            [[0, 1, 5], [2, 3, 8], [4, 6, 7]],
        ),  # number 8 was not pulled for the first pack, whose sum was exact before
        ("best_fit", [[0, 5, 8], [1, 2, 3], [4, 6, 7]]),
        ("wrap", [[0, 1, 2], [3, 4, 5], [6, 7, 8]]),
    ],
)
def test_max_seqs_per_pack_keeps_the_first_or_the_longest(strategy: str, expected: list[list[int]]) -> None:
    """What a strategy takes when the limit forbids its choice is listed in `STRATEGIES`."""
    packs = plan([1, 1, 1, 1, 1, 5, 1, 1, 4], 12, strategy=strategy, max_seqs_per_pack=3)
    assert [[i for i, _, _ in pack] for pack in packs] == expected


def test_a_limit_that_no_pack_reaches_changes_nothing() -> None:
    lengths = [5, 4, 2, 3, 4, 8, 1, 1, 6]
    for strategy in WAYS:
        unlimited = plan(lengths, 8, strategy=strategy)
        assert plan(lengths, 8, strategy=strategy, max_seqs_per_pack=8) == unlimited
