"""Which samples share a pack: `plan_packs` against the rules written with plain lists, and what its settings refuse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.lengths import lengths as benchmark_lengths
from streampack import IterablePackedDataset, PackedDataset, plan_packs
from tests.oracle import packing as oracle
from tests.oracle.packing import WAYS, settings_of


@st.composite
def corpora(
    draw: st.DrawFn, *, longest: int = 1, largest: int = 40, multiple: int = 1
) -> tuple[list[int], int]:
    """Draw (lengths, max_seq_len), where no sample is longer than ``longest * max_seq_len``."""
    limit = multiple * draw(st.integers(1, 24))
    short = st.integers(1, max(1, limit // 3))
    any_length = st.integers(1, limit * longest)
    return draw(st.lists(st.one_of(short, any_length), max_size=largest)), limit


def plan(
    lengths: Any, limit: int, *, strategy: str = "exact_fit", **options: Any
) -> list[list[tuple[int, int, int]]]:
    packs = plan_packs(lengths, limit, **settings_of(strategy), **options)
    return [[tuple(span) for span in pack] for pack in packs]


def sizes(packs: list[list[tuple[int, int, int]]]) -> list[list[int]]:
    return [[stop - start for _, start, stop in pack] for pack in packs]


@pytest.mark.parametrize("strategy", WAYS)
@given(
    corpus=corpora(longest=4),
    buffer_size=st.integers(1, 6),
    overlong=st.sampled_from(["split", "drop", "truncate", "truncate_left"]),
    convert=st.sampled_from([list, np.array, lambda values: [np.int32(v) for v in values]]),
)
def test_plans_match_the_reference_implementation(
    strategy: str, corpus: tuple[list[int], int], buffer_size: int, overlong: str, convert: Any
) -> None:
    lengths, limit = corpus
    common: Any = {"strategy": strategy, "buffer_size": buffer_size, "overlong": overlong}
    assert plan(convert(lengths), limit, **common) == oracle.plan(lengths, limit, **common)


@settings(max_examples=60)
@given(
    corpus=st.integers(1, 6).flatmap(lambda m: st.tuples(corpora(multiple=m), st.just(m))),
    way=st.sampled_from(WAYS),
)
def test_padded_samples_are_planned_as_samples_of_the_padded_lengths(
    corpus: tuple[tuple[list[int], int], int], way: str
) -> None:
    (lengths, limit), multiple = corpus
    padded = [-(-length // multiple) * multiple for length in lengths]
    reference = oracle.plan(padded, limit, strategy=way, buffer_size=8)
    wanted = [[(i, start, min(stop, lengths[i])) for i, start, stop in pack] for pack in reference]
    assert plan(lengths, limit, strategy=way, buffer_size=8, pad_seqs_to=multiple) == wanted


@pytest.mark.parametrize(
    ("strategy", "expected", "limited"),
    [
        ("next_fit", [[5], [4, 2], [3, 4, 1]], [[0, 1, 2], [3, 4, 5], [6, 7, 8]]),
        ("first_fit", [[5, 2, 1], [4, 3], [4]], [[0, 1, 2], [3, 4, 5], [6, 7, 8]]),
        ("best_fit", [[5, 3], [4, 4], [2, 1]], [[0, 5, 8], [1, 2, 3], [4, 6, 7]]),
        # Number 8 was not pulled for the first pack, whose sum was exact before.
        ("exact_fit", [[5, 3], [4, 4], [2, 1]], [[0, 1, 5], [2, 3, 8], [4, 6, 7]]),
        ("wrap", [[5, 3], [1, 2, 3, 2], [2, 1]], [[0, 1, 2], [3, 4, 5], [6, 7, 8]]),
    ],
)
def test_packs_of_examples_worked_out_by_hand(
    strategy: str, expected: list[list[int]], limited: list[list[int]]
) -> None:
    """``limited``: what a strategy takes when ``max_seqs_per_pack`` forbids its choice, as `STRATEGIES` lists."""
    assert sizes(plan([5, 4, 2, 3, 4, 1], 8, strategy=strategy)) == expected
    packs = plan([1, 1, 1, 1, 1, 5, 1, 1, 4], 12, strategy=strategy, max_seqs_per_pack=3)
    assert [[i for i, _, _ in pack] for pack in packs] == limited
    lengths = [5, 4, 2, 3, 4, 8, 1, 1, 6]
    unlimited = plan(lengths, 8, strategy=strategy)
    assert plan(lengths, 8, strategy=strategy, max_seqs_per_pack=8) == unlimited, "no pack reaches the limit"


@pytest.mark.parametrize("strategy", WAYS)
@given(corpus=corpora(longest=3), buffer_size=st.integers(1, 200), data=st.data())
def test_every_kept_token_is_packed_once_and_in_order(
    strategy: str, corpus: tuple[list[int], int], buffer_size: int, data: Any
) -> None:
    """This holds for every plan, without a reference to compare with; and no pack is too long."""
    lengths, limit = corpus
    overlong = data.draw(st.sampled_from(["split", "drop", "truncate"]))
    most = data.draw(st.none() | st.integers(1, 6))
    packs = plan(
        lengths, limit, strategy=strategy, buffer_size=buffer_size, overlong=overlong, max_seqs_per_pack=most
    )
    assert all(0 < sum(of_pack) <= limit for of_pack in sizes(packs))
    assert most is None or all(len(pack) <= most for pack in packs)
    too_long = {"split": lambda length: length, "drop": lambda length: 0, "truncate": lambda length: limit}
    kept = [length if length <= limit else too_long[overlong](length) for length in lengths]
    expected = [(i, at) for i, length in enumerate(kept) for at in range(length)]
    tokens = [(i, at) for pack in packs for i, start, stop in pack for at in range(start, stop)]
    assert sorted(tokens) == expected
    if strategy == "wrap":
        assert tokens == expected, "samples are packed in order"
        assert all(sum(of_pack) == limit or len(of_pack) == most for of_pack in sizes(packs)[:-1]), (
            "all but one full"
        )


class Read:
    """Lengths that know how many packs were made when each was read."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.packs = 0
        self.read_in: list[int] = []

    def __iter__(self) -> Iterator[int]:
        for length in self.lengths:
            self.read_in.append(self.packs)
            yield length


@pytest.mark.parametrize("strategy", WAYS)
@given(corpus=corpora(), buffer_size=st.integers(1, 12), most=st.none() | st.integers(1, 6))
def test_a_sample_leaves_within_buffer_size_packs(
    strategy: str, corpus: tuple[list[int], int], buffer_size: int, most: int | None
) -> None:
    """At most ``buffer_size`` samples wait, and every pack takes the oldest of them."""
    lengths, limit = corpus
    read = Read(lengths)
    waiting = set(range(len(lengths)))
    options = settings_of(strategy)
    before = 0
    for pack in plan_packs(iter(read), limit, buffer_size=buffer_size, max_seqs_per_pack=most, **options):
        assert min(waiting) == pack[0].index, "the oldest goes first"
        assert all(read.packs - read.read_in[span.index] <= buffer_size for span in pack)
        ended = {span.index for span in pack if span.stop == lengths[span.index]}
        assert ended <= waiting
        waiting -= ended
        assert len(waiting & set(range(len(read.read_in)))) <= buffer_size
        if strategy == "exact_fit" and most is None and sum(span.stop for span in pack) == limit:
            # The search ended with the last member of the exact sum, and nothing after that was read.
            assert len(read.read_in) == max(before, max(span.index for span in pack) + 1)
        before = len(read.read_in)
        read.packs += 1
    assert not waiting


@pytest.mark.parametrize(
    ("name", "extra", "bound"), [("flan", 0, 2124), ("orca", 0, 1945), ("stack", 1, 5933)]
)
def test_pack_counts_of_the_benchmark_distributions(name: str, extra: int, bound: int) -> None:
    """20,000 samples in packs of 4,096, with a buffer of 128; ``bound`` is the lower bound of packs."""
    lengths = benchmark_lengths(name).tolist()
    assert oracle.lower_bound(lengths, 4096) == bound
    counts = {way: len(plan(lengths, 4096, strategy=way)) for way in ("exact_fit", "wrap", "next_fit")}
    assert bound <= counts["exact_fit"] <= bound + extra
    assert counts["wrap"] == bound
    assert counts["next_fit"] == oracle.greedy_count(lengths, 4096)
    # The padding of sequences is within half a point of what the multiple costs.
    some = lengths[:4000]
    least = oracle.lower_bound([-(-length // 64) * 64 for length in some], 4096)
    made = len(plan(some, 4096, pad_seqs_to=64))
    assert 0 <= sum(some) / (4096 * least) - sum(some) / (4096 * made) < 0.005


@pytest.mark.parametrize("count", [250, 2000])
def test_short_samples_are_hardly_trained_before_long_ones(count: int) -> None:
    """Lengths of up to a pack are the worst case: half of them fit with no other of that half."""
    for largest in (1000, 500):
        found = []
        for seed in range(6):
            lengths = np.random.default_rng(seed).integers(1, largest + 1, count)
            read, packs = Read(lengths.tolist()), np.full(count, -1)
            for pack in plan_packs(iter(read), 1000):
                packs[[span.index for span in pack]] = read.packs
                waiting = packs[: len(read.read_in)] < 0
                large = lengths[: len(read.read_in)][waiting] > 250
                assert large.sum() <= max(12, -(-read.packs // 6))
                read.packs += 1
            found.append(np.corrcoef(lengths, packs)[0, 1])
        assert abs(np.mean(found)) < 0.1


@pytest.mark.parametrize("window", [0, 4])
def test_a_resume_bounds_the_drift_as_the_run_did(window: int) -> None:
    """How many long pieces may wait depends on the number of packs before, also in an open balance window."""
    lengths = np.random.default_rng(1).integers(1, 101, 500).tolist()
    rows = [{"input_ids": [1] * length} for length in lengths]

    def dataset() -> IterablePackedDataset:
        return IterablePackedDataset(rows, max_seq_len=100, num_lanes=1, balance_window=window)

    def contents(packs: Any) -> list[Any]:
        return [pack["fragments"] for pack in packs]

    whole = contents(dataset())
    for count in (100, 150, 201):
        first = dataset()
        packs = iter(first)
        for _ in range(count):
            next(packs)
        again = dataset()
        again.load_state_dict(first.state_dict())
        assert contents(again) == whole[count:]


@pytest.mark.parametrize("strategy", WAYS)
def test_a_resume_limits_sequences_as_the_run_did(strategy: str) -> None:
    """A run may hold more pieces than it looks at for a pack; after a resume only those are read at first."""
    lengths = np.random.default_rng(5).integers(1, 65, 200).tolist()
    rows = [{"input_ids": [1] * length} for length in lengths]

    def dataset() -> IterablePackedDataset:
        options: dict[str, Any] = {"buffer_size": 16, "max_seqs_per_pack": 2, "num_lanes": 1}
        return IterablePackedDataset(rows, max_seq_len=64, **settings_of(strategy), **options)

    first = dataset()
    made = [(pack["fragments"], first.state_dict()) for pack in first]
    for count, (_, state) in enumerate(made[:-1], 1):
        again = dataset()
        again.load_state_dict(state)
        assert [pack["fragments"] for pack in again] == [fragments for fragments, _ in made[count:]]


# What is refused.

POLICIES = ("error", "drop", "truncate", "split")
WRAP = "; for documents that continue in the next pack set split_across_pack=True"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({name: value}, message.format(name=name))
          for name in ("max_seq_len", "buffer_size", "max_seqs_per_pack", "pad_seqs_to")
          for value, message in ((0, "{name}=0 is below 1; give at least 1"),
                                 (True, "{name}=True is not a whole number; give one of at least 1"),
                                 (4.0, "{name}=4.0 is not a whole number; give one of at least 1"))),
        ({"strategy": "wrap"},
         f"strategy='wrap' is unknown; choose one of 'next_fit', 'first_fit', 'best_fit', 'exact_fit', 'padded'{WRAP}"),
        ({"strategy": 3}, "strategy=3 is unknown; choose one of 'next_fit'"),
        ({"strategy": ["exact_fit"]}, "strategy=['exact_fit'] is unknown"),
        ({"overlong": "cut"},
         "overlong='cut' is unknown; choose one of 'error', 'drop', 'truncate', 'truncate_left', 'split'"),
        ({"overlong": False}, "overlong=False is unknown"),
        ({"pad_seqs_to": 16, "max_seq_len": 100},
         "max_seq_len=100 is no multiple of pad_seqs_to=16; set max_seq_len to 112, or choose another pad_seqs_to"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused_at_the_call(options: dict[str, Any], message: str) -> None:
    rows = [{"input_ids": [1]}]
    for make in (plan_packs, IterablePackedDataset, PackedDataset):  # not iterated
        with pytest.raises(ValueError) as error:
            make([1, 2] if make is plan_packs else rows, **{"max_seq_len": 8, **options})
        assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([3, 9], {}, "sample 1 has 9 tokens, max_seq_len is 8; set overlong to 'split', 'truncate' or 'drop', or"),
        ([9], {"strategy": "wrap", "overlong": "error"}, "sample 0 has 9 tokens"),
        *(([3, 0], {"overlong": overlong}, "sample 1 has 0 tokens; remove it") for overlong in POLICIES),
        ([3, 2.5, 4], {}, "sample 1 has 2.5 tokens; give a whole number"),
    ],
)  # fmt: skip
def test_lengths_that_cannot_be_are_refused(lengths: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        plan(lengths, 8, **options)
    assert str(error.value).startswith(message)


def test_overlong_is_split_by_default_with_split_across_pack_only() -> None:
    packs = plan_packs([9], 8, split_across_pack=True)
    assert [[tuple(span) for span in pack] for pack in packs] == [[(0, 0, 8)], [(0, 8, 9)]]
    for strategy in oracle.CHOOSE:
        with pytest.raises(
            ValueError, match=f"^strategy='{strategy}' has no effect with split_across_pack=True, .* out$"
        ):
            plan_packs([9], 8, split_across_pack=True, strategy=strategy)
    assert not list(plan_packs([9], 8, split_across_pack=True, overlong="drop"))
