from __future__ import annotations

import pickle
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import count, cycle, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack import (
    IGNORE_INDEX,
    IterablePackedDataset,
    IterableSource,
    MapSource,
    Mix,
    PackedDataLoader,
    Sample,
    TokensEncoder,
)
from streampack.accounting import Ledger, SourceStats
from streampack.sources import Holdout, Reading
from streampack.sources.base import Reader
from streampack.sources.mixture import TOTAL_WEIGHT
from streampack.sources.mixture_parts import hold_out
from streampack.sources.mixture_scheduler import MixtureScheduler, Stand, Weighing
from streampack.streaming.lane import Lane
from streampack.streaming.lane_state import Receipt, numbers_of
from tests.support.conformance import check_positions, check_resume_everywhere, content
from tests.support.corpus import Numbers, all_of, rows, samples_in, write

SHUFFLED = {"shuffle": True, "shuffle_window": 7, "seed": 3}
APART = 100_000  # between the numbers of the first rows of two sources


def shifted(data: list[dict[str, int]], by: int) -> list[dict[str, int]]:
    return [{"i": row["i"] + by, "n": row["n"]} for row in data]


def entry(name: str, source: Any, weight: float = 1, **more: Any) -> dict[str, Any]:
    return {"name": name, "source": source, "weight": weight, **more}


def three(stop: str = "all_exhausted", weights: Iterable[float] = (7, 2, 1), **sizes: int) -> Mix:
    """Three sources of short, middling and long samples."""
    longest = {"short": 4, "middling": 12, "long": 24}
    return Mix(
        [
            entry(
                name,
                MapSource(shifted(rows(sizes.get(name, 60), longest=longest[name], seed=i), APART * i)),
                weight,
            )
            for i, (name, weight) in enumerate(zip(longest, weights, strict=True))
        ],
        stop=stop,
    )


def make(source: Any, **settings: Any) -> IterablePackedDataset:
    return IterablePackedDataset(
        source, **{"max_seq_len": 24, "buffer_size": 8, "encoder": Numbers(), **settings}
    )


def training(tokens: int) -> list[Sample]:
    """A sample of which so many tokens are trained."""
    ids = np.zeros(tokens + 1, dtype=np.int32)
    return [Sample(ids, ids)]


def drawn(
    mix: Mix,
    trained: Mapping[int, Iterable[int]],
    *,
    tokens: int,
    reopened: int | None = None,
    stagger: int = 2048,
    **reading: Any,
) -> list[int]:
    """The tokens of each source when the rows train what ``trained`` says, in turn: no packing, no encoding.

    Read from a new reader at its cursor every ``reopened`` rows.
    """
    draws = mix.read(Reading(**reading, stagger=stagger))
    lengths = {i: iter(each) for i, each in trained.items()}
    totals = [0] * len(mix.names)
    for drawn in count(1):
        row = next(draws)
        number = next(lengths[leaf := mix.source_index(row.row_id)])
        draws.charge(training(number))
        totals[leaf] += number
        if sum(totals) >= tokens:
            return totals
        if reopened and drawn % reopened == 0:
            draws = mix.read(Reading(**reading, start=draws.cursor))
    raise AssertionError


def plain(names: Iterable[str], weights: Iterable[float], size: int = 50) -> Mix:
    """Sources that only have rows, whatever these say."""
    return Mix(
        [
            entry(n, MapSource([{"i": i} for i in range(size)]), w)
            for n, w in zip(names, weights, strict=True)
        ],
        stop="never",
    )


# The shares.


@given(
    st.lists(st.tuples(st.floats(0.01, 1), st.integers(1, 300)), min_size=1, max_size=6),
    st.integers(0, 99),
    st.integers(1, 4000),
    st.integers(0, 300),
)
def test_no_source_is_further_from_its_share_than_the_longest_sample_of_each(
    sources: list[tuple[float, int]], seed: int, tokens: int, stagger: int
) -> None:
    """The bound that `MixtureScheduler` states."""
    weights, longest = zip(*sources, strict=True)
    mix = plain(map(str, range(len(sources))), weights)
    rng = np.random.default_rng(seed)
    lengths = {i: [1, *rng.integers(0, most + 1, 10_000).tolist()] for i, most in enumerate(longest)}
    totals = drawn(mix, lengths, tokens=tokens, seed=seed, stagger=stagger)
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


SHARES = (0.7, 0.2, 0.1)


def worst_and_all(lanes: int, few: int, tokens: int, reopened: int) -> tuple[float, float]:
    """How far the shares of a lane, and of all together, are from the weights at most."""
    mix = plain("abc", SHARES, size=64)
    found = [
        drawn(mix, skewed(lane), tokens=tokens, reopened=reopened, lane=lane, num_lanes=lanes)
        for lane in range(0, lanes, max(1, lanes // few))
    ]
    shares = [np.array(totals) / sum(totals) for totals in [*found, np.sum(found, 0)]]
    off = [float(np.abs(share - SHARES).max()) for share in shares]
    return max(off[:-1]), off[-1]


@pytest.mark.parametrize("lanes", [1, 8, 64])
def test_shares_of_trained_tokens_whatever_the_lengths(lanes: int) -> None:
    """After 200,000 tokens in a lane, the bound is 3 x 4,000 / 200,000, six points; at 2 M (below) it is 0.6."""
    worst, together = worst_and_all(lanes, few=2, tokens=200_000, reopened=997)
    assert worst < 0.03
    assert together < 0.03


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [1, 8, 64])
def test_shares_within_half_a_point_after_two_million_tokens_in_every_lane(lanes: int) -> None:
    worst, together = worst_and_all(lanes, few=64, tokens=2_000_000, reopened=997)
    print(f"{lanes} lanes: worst {worst:.5f}, together {together:.5f}")
    assert worst < 0.005
    assert together < 0.005


def test_lanes_do_not_err_in_phase() -> None:
    """After few tokens in each, 64 lanes together are nearer to the shares than one that does as they all would."""
    mix = plain("abc", SHARES, size=64)
    for tokens in (300, 1000, 3000):
        found = [
            drawn(mix, {i: repeat(10 * 10**i) for i in range(3)}, tokens=tokens, lane=lane, num_lanes=64)
            for lane in range(64)
        ]
        together = np.sum(found, 0) / np.sum(found)
        alone = [np.abs(np.array(totals) / sum(totals) - SHARES).max() for totals in found]
        assert np.abs(together - SHARES).max() < 0.5 * np.mean(alone)
        assert tokens == 300 or len({tuple(totals) for totals in found}) > 10


def test_lanes_of_a_dataset_begin_with_different_sources() -> None:
    data = make(three("never", (1, 1, 1)), **ENDLESS, num_lanes=12)
    first = {pack["lane"]: pack["fragments"][0].row_id[0] for pack in islice(data, 12)}
    assert set(first.values()) == {0, 1, 2}


def test_nested_mixtures_have_the_product_of_their_weights_in_the_long_run() -> None:
    shares = (0.5, 0.3, 0.16, 0.04)
    flat = plain("abcd", shares, size=64)
    source = MapSource([{"i": 0}] * 64)
    rest = Mix([entry("de", source, 4), entry("fr", source, 1)], stop="never")
    web = Mix([entry("en", source, 3), entry("rest", rest, 2)], stop="never")
    nested = Mix([entry("code", source), entry("web", web)], stop="never")
    assert nested.names == ["code", "web/en", "web/rest/de", "web/rest/fr"]
    assert nested.target_fractions == {
        "code": 0.5, "web": 0.5, "web/en": 0.6, "web/rest": 0.4, "web/rest/de": 0.8, "web/rest/fr": 0.2
    }  # fmt: skip
    default, own = TokensEncoder(), TokensEncoder()
    with_own = Mix([{**entry("code", source), "encoder": own}, entry("web", web)], stop="never")
    leaves = with_own.leaves(default)
    assert [leaf.name for leaf in leaves] == nested.names
    assert [leaf.encoder is own for leaf in leaves] == [True, False, False, False]
    assert [leaf.weight for leaf in leaves] == pytest.approx(list(flat.target_fractions.values()), abs=1e-6)
    for mix in (flat, nested):
        totals = drawn(mix, {i: cycle(range(1, 8 * 3**i)) for i in range(4)}, tokens=80_000, reopened=101)
        assert np.abs(np.array(totals) / sum(totals) - shares).max() < 0.03


def test_what_is_not_trained_does_not_count() -> None:
    """Prompts, what is cut off, what is dropped, and the first token of each sequence."""
    prompts = [{"tokens": [1] * 20, "labels": [IGNORE_INDEX] * 15 + [1] * 5}] * 400
    answers = [{"tokens": [2] * 20, "labels": [2] * 20}] * 400
    giants = [
        {"tokens": [3] * (40 if i % 2 else 11), "labels": [3] * (40 if i % 2 else 11)} for i in range(400)
    ]
    mix = Mix([entry("prompts", prompts), entry("answers", answers), entry("giants", giants)], stop="never")
    for policy, length in (("truncate", 24), ("drop", 24), ("split", 24)):
        data = IterablePackedDataset(mix, max_seq_len=length, overlong=policy, epochs=None, num_lanes=1)
        packs = list(islice(data, 2000))
        trained = Counter[int]()
        for pack in packs:
            labels = pack["labels"]
            trained.update(labels[labels != IGNORE_INDEX].tolist())
        source_stats = data.source_stats()
        assert sum(stats.tokens_in for stats in source_stats.values()) == data.ledger().tokens_in
        assert [stats.trained for stats in source_stats.values()] == [trained[1], trained[2], trained[3]]
        assert max(trained.values()) - min(trained.values()) < 0.02 * trained.total()


# Resume.

ENDLESS, ONCE, TWICE = {"epochs": None}, {"epochs": 1}, {"epochs": 2}
NESTED = "nested"
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("all-twice", "all_exhausted", {**TWICE, **SHUFFLED, "num_lanes": 2}),
    ("first-twice", "first_exhausted", {**TWICE, **SHUFFLED, "num_lanes": 3}),
    ("first-endless", "first_exhausted", {**ENDLESS, **SHUFFLED, "num_lanes": 2}),
    ("all-endless-wrap", "all_exhausted", {**ENDLESS, **SHUFFLED, "num_lanes": 2, "strategy": "wrap"}),
    ("never-split", "never", {**ENDLESS, **SHUFFLED, "num_lanes": 2, "overlong": "split", "max_seq_len": 9}),
    ("never-drop", "never", {**ENDLESS, "num_lanes": 1, "overlong": "drop", "max_seq_len": 14}),
    ("all-truncate", "all_exhausted", {**ONCE, "overlong": "truncate", "max_seq_len": 14, "strategy": "best_fit"}),
    ("nested-never", NESTED, {**ENDLESS, **SHUFFLED, "num_lanes": 2}),
    ("nested-split", NESTED, {**ENDLESS, "overlong": "split", "max_seq_len": 9, "strategy": "best_fit"}),
]  # fmt: skip


def mixture(kind: str, folder: Path) -> Mix:
    if kind != NESTED:
        return three(kind)
    files = [folder / "a.jsonl", folder / "b.jsonl"]
    if not files[0].exists():
        for i, path in enumerate(files):
            write(path, shifted(rows(50, longest=14, seed=i), APART * (3 + i)))
    web = Mix([entry("en", files[0], 2), entry("de", files[1])], stop="first_exhausted")
    return Mix([entry("web", web, 0.6), entry("rest", three("all_exhausted"), 0.4)], stop="never")


@pytest.mark.parametrize(("kind", "settings"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_resume_at_every_step(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    packs = check_resume_everywhere(lambda: make(mixture(kind, tmp_path), **settings), packs=120)
    assert len(packs) > 12


def test_tallies_and_shares_after_a_resume_are_those_of_an_unbroken_run(tmp_path: Path) -> None:
    settings = {**ENDLESS, **SHUFFLED, "num_lanes": 2}
    whole = make(mixture(NESTED, tmp_path), **settings)
    for _ in islice(whole, 150):
        pass
    state = None
    for _ in range(50):
        part = make(mixture(NESTED, tmp_path), **settings)
        if state is not None:
            part.load_state_dict(state)
        for _ in islice(part, 3):
            pass
        state = part.state_dict()
    assert state == whole.state_dict()
    assert part.source_stats() == whole.source_stats()
    source_stats, ledger = whole.source_stats(), whole.ledger()
    assert list(source_stats) == ["web/en", "web/de", "rest/short", "rest/middling", "rest/long"]
    for name in ("samples", "tokens_in", "packed"):
        assert sum(getattr(stats, name) for stats in source_stats.values()) == getattr(ledger, name)


def test_elastic() -> None:
    """Four lanes on one consumer, then on two: the same packs of each lane."""
    settings = {**ENDLESS, **SHUFFLED, "num_lanes": 4}
    one = make(three(), **settings)
    packs = [content(pack) for pack in islice(one, 80)]
    first = make(three(), **settings)
    for _ in islice(first, 40):
        pass
    lanes: dict[int, list[Any]] = {lane: [] for lane in range(4)}
    for consumer in range(2):
        second = make(three(), **settings)
        second.load_state_dict(first.state_dict())
        for pack in islice(second.stream(consumer, 2), 20):
            lanes[pack.lane].append(pack.tokens.astype(np.int64).tobytes())
    for lane, found in lanes.items():
        assert found == [pack[0] for pack in packs[40:] if pack[-1] == lane]


def test_workers_and_a_state_on_disk(tmp_path: Path) -> None:
    """Two processes make the batches that one makes, and count the same; their state is plain."""
    settings = {**ENDLESS, **SHUFFLED, "num_lanes": 4}
    batches, loaders = [], []
    for workers in (0, 2):
        loader = PackedDataLoader(
            make(mixture(NESTED, tmp_path), **settings), batch_size=3, num_workers=workers
        )
        batches.append([batch.tokens.tolist() for batch in islice(loader, 20)])
        loaders.append(loader)
    assert batches[0] == batches[1]
    assert loaders[0].source_stats() == loaders[1].source_stats()
    assert sum(stats.packed for stats in loaders[0].source_stats().values()) == loaders[0].ledger().packed
    state = loaders[0].state_dict()
    torch.save(state, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == state
    assert state["weights"]["web/en"] == pytest.approx(2 / 3)


@given(st.integers(0, 10**6))
@settings(max_examples=25)
def test_positions_of_rows(seed: int) -> None:
    class Charged(Reader):
        """As a lane reads: every row is charged at once."""

        def __init__(self, mix: Mix, start: Any) -> None:
            self.draws = mix.read(Reading(seed=seed, shuffle_window=1, start=start))

        @property
        def cursor(self) -> Any:
            return self.draws.cursor

        def __next__(self) -> Any:
            row = next(self.draws)
            self.draws.charge(training(row.data["n"]))
            return row

        def skip(self) -> None: ...

    mix = three(("all_exhausted", "first_exhausted")[seed % 2], short=9, middling=7, long=5)
    found = check_positions(lambda start: Charged(mix, start), announced=False)
    assert len(found) >= 5


def test_receipts_stay_small() -> None:
    """128 + span / 8 + 48 x sources bytes, for eight sources in a nested mixture with long cursors."""
    many = [entry(str(i), IterableSource(rows(3000, longest=40, seed=i)), 1 / (i + 1)) for i in range(6)]
    mix = Mix([*many, entry("in", Mix([entry("a", rows(500)), entry("b", rows(500))]))], stop="never")
    data = make(mix, **ENDLESS, num_lanes=1, buffer_size=128, max_seq_len=512, shuffle=True)
    sizes = []
    for _ in islice(data, 300):
        receipt = data.state_dict()["lanes"][0]
        span = (found := Receipt.from_bytes(receipt)).next_piece - found.first
        assert len(receipt) <= 128 + span / 8 + 48 * len(mix.names)
        sizes.append(len(receipt))
    assert max(sizes) < 330


def test_receipts_stay_small_at_a_million_steps() -> None:
    """Shards of 1 TB, a billion rows, 2^40 tokens of each source, deficits of 2^18 tokens."""
    sources = 8
    weighing = Weighing([TOTAL_WEIGHT // sources] * sources).numbers()
    cursor = (10_000, 2**40, 2047)
    stand = Stand(-TOTAL_WEIGHT * 2**18, turn=9, exhausted=True, fed=True, cursor=cursor).numbers()
    stats = SourceStats(epochs=9, samples=2**30, tokens_in=2**40, packed=2**40, trained=2**40)
    ledger = Ledger(samples=2**33, tokens_in=2**43, packs=2**31, slots=2**43, packed=2**43)
    receipt = Receipt(
        2**31,
        False,
        0,
        (*weighing, *stand * sources),
        2**33,
        0,
        2**33 + 300,
        2**300 - 1,
        ledger,
        (stats,) * sources,
    )
    assert len(receipt.to_bytes()) <= 128 + 300 / 8 + 48 * sources


def test_errors_consume_nothing() -> None:
    expected = [content(pack) for pack in islice(make(three(), **ENDLESS, num_lanes=1), 40)]
    mix, encoder = three(), Numbers()
    encoder.bad = APART + 7
    data = make(mix, **ENDLESS, num_lanes=1, encoder=encoder)
    iterator, found = iter(data), []
    with pytest.raises(ValueError, match="^middling: sample 7: is out of order$"):
        while True:
            found.append(content(next(iterator)))
    with pytest.raises(ValueError, match="middling: sample 7"):
        next(iterator)
    encoder.bad = None
    assert found + [content(pack) for pack in islice(iterator, 40 - len(found))] == expected
    assert len(found) < 40


@pytest.mark.parametrize("nested", [False, True])
def test_broken_records_are_passed_by(tmp_path: Path, nested: bool) -> None:
    """Every seventh row of each source cannot be encoded, and every ninth line of two of them is no JSON."""
    for i, path in enumerate(paths := [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]):
        lines = write(path, shifted(rows(60, longest=14, seed=i), APART * i)).read_text().splitlines()
        path.write_text("".join("{\n" if k % 9 == 0 else f"{line}\n" for k, line in enumerate(lines)))

    class Sevenths(Numbers):
        def __call__(self, row: Mapping[str, Any], /) -> Sample:
            if row["i"] % 7 == 0:
                raise ValueError("is a seventh")
            return super().__call__(row)

    def make_it() -> IterablePackedDataset:
        mix = Mix([entry("a", paths[0], 2), entry("b", paths[1])])
        if nested:
            mix = Mix([entry("in", mix), entry("c", shifted(rows(60), 2 * APART))])
        settings = {**TWICE, **SHUFFLED, "num_lanes": 2, "on_bad_record": "skip", "max_bad_records": 1000}
        return make(mix, encoder=Sevenths(), quarantine=tmp_path / "bad", **settings)

    check_resume_everywhere(make_it, packs=120)
    for path in (tmp_path / "bad").iterdir():
        path.unlink()
    data = make_it()
    came = samples_in(data)
    whole = [row for i in range(2 + nested) for row in shifted(rows(60, longest=14, seed=i), APART * i)]
    good = {r["i"] for r in whole if r["i"] % 7 and (r["i"] >= 2 * APART or r["i"] % APART % 9)}
    assert set(came) == good
    listed = "".join(path.read_text() for path in (tmp_path / "bad").iterdir())
    assert len(listed.splitlines()) == 60 * (2 + nested) - len(good), "each once"
    assert ('"shard": "in/b/b.jsonl"' if nested else '"shard": "b/b.jsonl"') in listed
    assert ('"shard": "c/list"' in listed) == nested
    assert all(stats.epochs >= 4 for stats in data.source_stats().values()), "two lanes, two epochs"


# The end of an epoch.


def seen(data: IterablePackedDataset) -> tuple[list[Any], dict[int, Counter[int]]]:
    packs = list(data)
    came: dict[int, Counter[int]] = {i: Counter() for i in range(3)}
    for pack in packs:
        came[pack["epoch"]].update(fragment.row_id[:2] for fragment in pack["fragments"])  # type: ignore[arg-type]
    return packs, came


@pytest.mark.parametrize("num_lanes", [1, 3])
def test_first_exhausted_repeats_no_row(num_lanes: int) -> None:
    data = make(three("first_exhausted"), epochs=3, num_lanes=num_lanes, **SHUFFLED)
    _, came = seen(data)
    for counts in came.values():
        assert set(counts.values()) == {1}
        sizes = Counter(source for source, _ in counts)  # type: ignore[misc]
        assert num_lanes > 1 or 60 in sizes.values(), "one source was read to its end"
        assert num_lanes == 1 or max(sizes.values()) >= 60 / num_lanes
    begun = {stats.epochs for stats in data.source_stats().values()}
    assert max(begun) == 3 * num_lanes, "one that comes late may not have begun when another ends"
    assert data.ledger().buffered == 0


@pytest.mark.parametrize("num_lanes", [1, 3])
def test_all_exhausted_repeats_some_and_leaves_none_out(num_lanes: int) -> None:
    data = make(three(), epochs=2, num_lanes=num_lanes, **SHUFFLED)
    _, came = seen(data)
    for epoch in (0, 1):
        counts = came[epoch]
        assert len(counts) == 180, "every row of the three"
        assert num_lanes > 1 or 1 in {
            max(n for (s, _), n in counts.items() if s == source) for source in range(3)
        }
    source_stats = data.source_stats()
    for source, stats in enumerate(source_stats.values()):
        samples = sum(n for counts in came.values() for (s, _), n in counts.items() if s == source)
        assert stats.samples == samples
        if num_lanes == 1:  # per epoch, so many turns as it was read to the end, and one that was begun
            turns = [sum(n for (s, _), n in came[e].items() if s == source) for e in (0, 1)]
            assert stats.epochs == sum(-(-n // 60) for n in turns)
    shares = np.array([stats.trained for stats in source_stats.values()])
    assert np.abs(shares / shares.sum() - SHARES).max() < 0.03


def test_never_goes_on_within_one_epoch_and_shuffles_every_turn_anew() -> None:
    data = make(three("never"), epochs=1, num_lanes=1, **SHUFFLED)
    order: list[int] = []
    for pack in islice(data, 400):
        assert pack["epoch"] == 0
        order += [fragment.row_id[1] for fragment in pack["fragments"] if fragment.row_id[0] == 0]
    stats = data.source_stats()["short"]
    assert stats.epochs > 3
    assert stats.epochs == -(-stats.samples // 60)
    turns = [tuple(sorted(order[i : i + 60])) for i in range(0, 180, 60)]
    assert sum(turn == tuple(range(60)) for turn in turns) <= 3


def test_turns_and_epochs_are_all_shuffled_differently_and_sources_of_equal_size_too() -> None:
    mix = Mix(
        [entry("a", [{"i": i} for i in range(30)]), entry("b", [{"i": i} for i in range(30)])], stop="never"
    )
    orders = []
    for epoch in (0, 1):
        draws = mix.read(Reading(epoch=epoch, seed=1, shuffle_window=5))
        came: dict[int, list[int]] = {0: [], 1: []}
        for row in islice(draws, 125):
            came[row.row_id[0]].append(row.data["i"])
            draws.charge(training(1))
        orders += [tuple(came[s][i : i + 30]) for s in (0, 1) for i in (0, 30)]
    assert len(set(orders)) == 8
    assert {tuple(sorted(order)) for order in orders} == {tuple(range(30))}


# Other weights at a resume.


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(1, 4)), max_size=5),
    st.lists(st.integers(1, 7), min_size=1, max_size=12),
)
def test_weights_hold_for_the_pieces_that_they_drew(
    changes: list[tuple[int, int]], rows_read: list[int]
) -> None:
    """Rows of so many pieces, under weights of which each was taken over so many pieces after the one before."""
    weighing, ends, begin = Weighing((9,)), [], 0
    for pieces, weight in changes:
        begin += pieces
        ends.append((begin, weighing.last))
        weighing.change((weight,), after=begin)
    ends.append((10**9, weighing.last))
    read = 0
    for pieces in rows_read:
        again = Weighing.from_numbers(iter(weighing.numbers()), count=1)
        assert again.now == weighing.now == next(weights for end, weights in ends if read < end)
        weighing.tick(pieces)
        read += pieces


def resumed(state: dict[str, Any], weights: Iterable[float], **settings: Any) -> IterablePackedDataset:
    data = make(three("never", weights), **settings)
    data.load_state_dict(state)
    return data


@pytest.mark.parametrize("more", [{"num_lanes": 2}, {"num_lanes": 1, "overlong": "split", "max_seq_len": 9}])
def test_weights_changed_at_a_resume(more: dict[str, Any]) -> None:
    """The rows that wait are the old ones; resumed again at every step, with what the state says, nothing changes."""
    settings = {**ENDLESS, **SHUFFLED, **more}
    before = make(three("never", (7, 2, 1)), **settings)
    for _ in islice(before, 50):
        pass
    with pytest.warns(UserWarning, match="weights changed") as warned:
        after = resumed(before.state_dict(), (1, 2, 7), **settings)
    assert str(warned[0].message) == (
        "the mixture's weights changed since the state was written: short 0.7 -> 0.1, long 0.1 -> 0.7. The rows that "
        "wait were drawn by the old ones; the next are drawn by the new ones, and the fractions approach them"
    )
    old, waiting = before.stream(receipts=numbers_of(before.state_dict()["lanes"])), after.stream()
    for one, other in zip(old.lanes, waiting.lanes, strict=True):
        assert [piece.row_id for piece in one.held.values()] == [
            piece.row_id for piece in other.held.values()
        ]

    def make_after() -> IterablePackedDataset:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return resumed(before.state_dict(), (1, 2, 7), **settings)

    check_resume_everywhere(make_after, packs=60)
    started = after.source_stats()
    for _ in islice(after, 600):
        pass
    gained = np.array([stats.trained - started[name].trained for name, stats in after.source_stats().items()])
    assert np.abs(gained / gained.sum() - (0.1, 0.2, 0.7)).max() < 0.03


def rolling(weights: tuple[float, ...]) -> Mix:
    """Epochs of some twenty rows."""
    return three("first_exhausted", weights, short=12, middling=9, long=7)


def nested(weights: tuple[float, ...]) -> Mix:
    first, *others = weights
    web = [entry(str(i), shifted(rows(9, seed=i), APART * i), weight) for i, weight in enumerate(others)]
    code = entry("code", shifted(rows(40), 5 * APART), first)
    return Mix([entry("web", Mix(web, stop="first_exhausted"), sum(others)), code], stop="never")


@pytest.mark.parametrize(
    ("mixed", "more"),
    [
        (partial(three, "never"), {}),
        (partial(three, "never"), {"overlong": "split", "max_seq_len": 9}),
        (rolling, {"buffer_size": 64}),
        (nested, {"buffer_size": 64}),
        (nested, {"overlong": "split", "max_seq_len": 5}),
    ],
    ids=["flat", "split", "over-epochs", "nested", "nested-split"],
)
def test_weights_changed_again_and_again_while_rows_of_the_first_wait(
    mixed: Callable[[tuple[float, ...]], Mix], more: dict[str, Any]
) -> None:
    """Against one process that changes them in its stride: what the old weights drew, and then what the new ones do."""
    settings = {**ENDLESS, **SHUFFLED, "num_lanes": 1, "strategy": "best_fit", "buffer_size": 32, **more}
    stages = [(7, 2, 1), (1, 2, 7), (1, 1, 1), (5, 1, 1)]
    unbroken = make(mixed(stages[0]), **settings).stream()
    state, most = None, 0
    for weights in stages:
        data = make(mixed(weights), **settings)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if state is not None:
                data.load_state_dict(state)
        [lane] = unbroken.lanes
        assert isinstance(lane.reader, MixtureScheduler)
        lane.reader.weighing.last = mixed(weights).weights  # from the next row on
        found = [pack["tokens"].tolist() for pack in islice(data, 60 if weights == stages[-1] else 3)]
        assert found == [pack.tokens.tolist() for pack in islice(unbroken, len(found))]
        state = data.state_dict()
        most = max(most, Receipt.from_bytes(state["lanes"][0]).cursor[0])
    assert most >= 1, "weights that waiting rows were drawn by"


def test_weights_of_a_nested_mixture_are_compared_too() -> None:
    before = make(nested((1, 9, 1)))
    next(iter(before))
    with pytest.warns(
        UserWarning, match=r"since the state was written: web/0 0\.9 -> 0\.1, web/1 0\.1 -> 0\.9\. "
    ):
        make(nested((1, 1, 9))).load_state_dict(before.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(nested((2, 18, 2))).load_state_dict(before.state_dict())


def test_names_order_and_stop_may_not_change() -> None:
    data = make(three())
    next(iter(data))
    state = data.state_dict()
    for other in (three("never"), Mix(list(reversed(three().entries))), Mix(three().entries[:2])):
        with pytest.raises(ValueError, match=r"the state was made with corpus\.(stop|names)="):
            make(other).load_state_dict(state)
    make(three()).load_state_dict(pickle.loads(pickle.dumps(state)))


# What else a mixture is.


def test_each_source_has_its_encoder_and_its_name() -> None:
    class Doubled(Numbers):
        def __call__(self, row: Mapping[str, Any], /) -> Sample:
            one = super().__call__(row)
            return Sample(np.tile(one.tokens, 2), np.tile(one.labels, 2))

        def decode(self, tokens: list[int]) -> str:
            return f"{len(tokens)} doubled"

    def source(i: int) -> list[dict[str, int]]:
        return shifted(rows(20, longest=6, seed=i), APART * i)

    inner = Mix([entry("plain", source(1), encoder=Numbers("other")), entry("twice", source(2))])
    mix = Mix([entry("own", source(0)), entry("in", inner, encoder=Doubled())])
    data = make(mix, num_lanes=1)
    texts = set()
    for pack in data:
        begin = 0
        for fragment, length in zip(pack["fragments"], pack["seq_lens"].tolist(), strict=False):
            traced = data.trace(fragment)
            assert traced["tokens"] == pack["tokens"][begin : begin + length].tolist()
            begin += length
            name = mix.names[mix.source_index(fragment.row_id)]
            assert traced["source"] == name
            assert traced["place"] == f"{name.replace('/', ': ')}: sample {traced['row']['i'] % APART}"
            assert traced["row"]["i"] // APART == mix.names.index(name)
            assert ("text" in traced) == (name == "in/twice")
            texts.add(traced.get("text"))
    assert len(texts) > 3
    one = data.identity()["encoder"]
    assert (
        make(Mix([entry("own", source(0), encoder=Doubled("b")), entry("in", inner)])).identity()["encoder"]
        != one
    )


@pytest.mark.parametrize(
    ("sources", "stop", "message"),
    [
        ([], "never", "a mixture of no sources has no rows; name at least one"),
        (
            ["a"],
            "sometime",
            "stop='sometime' is unknown; choose one of 'first_exhausted', 'all_exhausted', 'never'",
        ),
        (["a", "a"], "never", "two sources are named 'a'; give each a name of its own"),
        (["a/b"], "never", "a source of a mixture is named 'a/b'; give it a name without a slash"),
        ([""], "never", "a source of a mixture is named ''; give it a name without a slash"),
    ],
)
def test_bad_mixtures_are_refused(sources: list[str], stop: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        Mix([entry(name, rows(3)) for name in sources], stop=stop)
    assert str(error.value) == message


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf"), "1", True])
def test_weights_are_numbers_above_0(weight: Any) -> None:
    with pytest.raises(
        ValueError, match=r"source 'a' has weight=.*; give a number above 0, its fraction of the"
    ):
        Mix([entry("a", rows(3), weight)])


def test_keys_of_a_source_are_checked() -> None:
    with pytest.raises(
        ValueError, match="source 'a' has no 'wieght'; its keys are name, source, weight, encoder"
    ):
        Mix([{"name": "a", "source": rows(3), "wieght": 1}])
    with pytest.raises(ValueError, match="source 'a' has no weight; its keys are"):
        Mix([{"name": "a", "source": rows(3)}])
    with pytest.raises(ValueError, match="source 'a' has no source; its keys are"):
        Mix([{"name": "a", "weight": 3}])


def test_every_source_must_have_rows_in_every_lane() -> None:
    mix = Mix([entry("many", rows(50)), entry("few", shifted(rows(2), APART))])
    assert make(mix).lanes_for(1) == 1, "the smallest source says how many lanes there are"
    with pytest.raises(
        ValueError, match="lane 2 of 4 has no rows of source 'few', and a mixture needs some of every"
    ):
        list(make(mix, num_lanes=4))


def test_a_source_that_trains_nothing_is_refused() -> None:
    masked = [{"tokens": [1, 2], "labels": [IGNORE_INDEX] * 2}] * 5
    mix = Mix(
        [entry("good", [{"tokens": [1, 2], "labels": [1, 2]}] * 5), entry("masked", masked)], stop="never"
    )
    with pytest.raises(
        ValueError, match="lane 0 of 1: source 'masked' trains no token from its beginning to its"
    ):
        list(IterablePackedDataset(mix, max_seq_len=8, num_lanes=1))


def test_a_source_of_broken_records_alone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{\n" * 5)
    mix = Mix([entry("good", rows(50)), entry("bad", tmp_path / "a.jsonl")], stop="never")
    with pytest.raises(
        ValueError, match="lane 0 of 1: source 'bad' trains no token from its beginning to its end"
    ):
        list(make(mix, num_lanes=1, on_bad_record="skip"))


def test_the_narrowest_source_is_named() -> None:
    inner = Mix([entry("map", rows(3)), entry("stream", IterableSource(rows(3)))])
    mix = Mix([entry("map", rows(50)), entry("in", inner)])
    assert mix.max_lanes == 1
    with pytest.raises(
        ValueError, match=r"^in/stream \(IterableSource\) can be read as 1 lane\(s\) and 2 are"
    ):
        list(make(mix, num_lanes=2))


def test_a_mixture_behind_a_holdout_is_refused() -> None:
    data = make(Holdout(three(), fraction=0.5, part="train"))
    with pytest.raises(RuntimeError, match="hold rows out of its sources, not of the whole"):
        list(data)


def test_a_share_is_held_out_of_every_source() -> None:
    train, held_out = hold_out(three("all_exhausted", (1, 1, 1)), fraction=0.3)
    assert isinstance(held_out, Mix)
    assert (train.stop, held_out.stop) == ("all_exhausted", "first_exhausted")  # type: ignore[attr-defined]
    assert held_out.names == ["short", "middling", "long"]
    found = [samples_in(make(part, num_lanes=1)) for part in (train, held_out)]
    assert not set(found[0]) & set(found[1])
    everything = all_of(row for i in range(3) for row in shifted(rows(60), APART * i))
    assert set(found[0]) < set(everything)
    assert {i // APART for i in found[1]} == {0, 1, 2}
    alone = hold_out(MapSource(rows(30)), fraction=0.3)
    assert all(isinstance(part, Holdout) for part in alone)


@pytest.mark.parametrize("stop", ["all_exhausted", "first_exhausted"])
def test_the_estimate_of_an_epoch(stop: str) -> None:
    mix = three(stop, (3, 2, 5), short=900, middling=300, long=300)
    data = make(mix, num_lanes=1)
    packs = len(list(data))
    assert abs(data.estimate_packs() - packs) < 0.1 * packs
    with pytest.raises(ValueError, match="a mixture with stop='never' has no end; set max_steps"):
        make(three("never")).estimate_packs()
    masked = Mix([entry("a", [{"tokens": [1, 2], "labels": [IGNORE_INDEX] * 2}] * 5)])
    with pytest.raises(ValueError, match="no token of source 'a' is trained, as far as a sample tells"):
        IterablePackedDataset(masked, max_seq_len=4).estimate_packs()


def test_a_probe_sees_all_sources() -> None:
    found, scale = three().probe(30)
    assert {row["i"] // APART for row in found} == {0, 1, 2}
    assert len(found) * scale == pytest.approx(180)


def test_a_replay_encodes_what_is_gone() -> None:
    """A resume must know what the rows in between train, to draw the same ones again."""
    data = make(three(), **ENDLESS, num_lanes=1)
    for _ in islice(data, 30):
        pass
    found = Receipt.from_bytes(data.state_dict()["lanes"][0])
    encoder = Numbers()
    resumed = make(three(), **ENDLESS, num_lanes=1, encoder=encoder)
    Lane(resumed.lane_config, receipt=found.numbers())
    assert encoder.calls == found.next_piece - found.first
