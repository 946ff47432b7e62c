"""Mixtures: ends of epochs, fractions of trained tokens, small sources, encoders and names, resumes, refusals."""

from __future__ import annotations

import pickle
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack import IGNORE_INDEX, IterablePackedDataset, MapSource, Mix, Sample
from streampack.sources import Holdout, Reading
from tests.harness.conformance import check_resume_everywhere, content
from tests.harness.corpus import Numbers, rows
from tests.harness.mixtures import (
    APART,
    ENDLESS,
    ONCE,
    SHUFFLED,
    TWICE,
    entry,
    make,
    shifted,
    three,
    training,
)


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
    assert max(begun) == 3, "a source that is rarely read may not have begun when another ends"
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
        if num_lanes == 1:  # a pass over the source has 60 rows, and the last pass of an epoch may have fewer
            rows_of_epochs = [sum(n for (s, _), n in came[e].items() if s == source) for e in (0, 1)]
            assert stats.epochs == sum(-(-n // 60) for n in rows_of_epochs)
    trained = np.array([stats.trained for stats in source_stats.values()])
    assert np.abs(trained / trained.sum() - (0.7, 0.2, 0.1)).max() < 0.03


def test_names_order_and_stop_may_not_change() -> None:
    data = make(three())
    next(iter(data))
    state = data.state_dict()
    for other in (three("never"), Mix(list(reversed(three().entries))), Mix(three().entries[:2])):
        with pytest.raises(ValueError, match=r"the state was made with corpus\.(stop|names)="):
            make(other).load_state_dict(state)
    make(three()).load_state_dict(pickle.loads(pickle.dumps(state)))


def test_each_source_has_its_encoder_and_its_name() -> None:
    class Doubled(Numbers):
        def __call__(self, row: Mapping[str, Any], /) -> Sample:
            one = super().__call__(row)
            return Sample(np.tile(one.tokens, 2), np.tile(one.labels, 2))

        def decode(self, tokens: list[int]) -> str:
            return f"{len(tokens)} doubled"

    def source(i: int) -> list[dict[str, int]]:
        return shifted(rows(20, longest=6, seed=i), APART * i)

    mix = Mix(
        [
            entry("own", source(0)),
            entry("plain", source(1), encoder=Numbers("other")),
            entry("twice", source(2), encoder=Doubled()),
        ]
    )
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
            assert traced["place"] == f"{name}: sample {traced['row']['i'] % APART}"
            assert traced["row"]["i"] // APART == mix.names.index(name)
            assert ("text" in traced) == (name == "twice")
            texts.add(traced.get("text"))
    assert len(texts) > 3


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "a mixture of no sources has no rows; name at least one"),
        ([{"name": "a"}] * 2, "two sources are named 'a'; give each a name of its own"),
        ([{"name": "a/b"}], "a source of a mixture is named 'a/b'; give it a name without a slash"),
        ([{"name": ""}], "a source of a mixture is named ''; give it a name without a slash"),
        ([{"wieght": 1}], "source 'a' has no 'wieght'; its keys are name, source, weight, encoder"),
        ([{"weight": None}], "source 'a' has no weight; its keys are"),
        ([{"source": None}], "source 'a' has no source; its keys are"),
        (
            [{"stop": "sometime"}],
            "stop='sometime' is unknown; choose one of 'first_exhausted', 'all_exhausted', 'ne",
        ),
        *(
            (
                [{"weight": weight}],
                "source 'a' has weight=.*; give its fraction of the trained tokens, 0 to leave",
            )
            for weight in (-1, float("nan"), float("inf"), "1", True)
        ),
    ],
)
def test_bad_mixtures_are_refused(entries: list[dict[str, Any]], message: str) -> None:
    whole = [entry("a", rows(3)) | changes for changes in entries]
    stop = next((each.pop("stop") for each in whole if "stop" in each), "never")
    with pytest.raises(ValueError, match=message):
        Mix([{key: value for key, value in each.items() if value is not None} for each in whole], stop=stop)


def test_sources_by_name_are_refused() -> None:
    sources: Any = {"a": {"source": rows(3), "weight": 1}}
    with pytest.raises(
        ValueError, match="a source of a mixture is 'a'; give a list of mappings, each with name, "
    ):
        Mix(sources)


def test_a_mixture_within_a_mixture_is_refused() -> None:
    with pytest.raises(
        ValueError, match="source 'web' is a mixture; name its sources in this one, with weights"
    ):
        Mix([entry("code", rows(3)), entry("web", Mix([entry("en", rows(3))]))])


@pytest.mark.parametrize("bad", ["masked", "broken"])
def test_a_source_that_trains_nothing_is_refused(tmp_path: Path, bad: str) -> None:
    (tmp_path / "a.jsonl").write_text("{\n" * 5)
    masked = [{"tokens": [1, 2], "labels": [IGNORE_INDEX] * 2}] * 5
    good = [{"tokens": [1, 2], "labels": [1, 2]}] * 5
    mix = Mix(
        [entry("good", good), entry("bad", masked if bad == "masked" else tmp_path / "a.jsonl")], stop="never"
    )
    with pytest.raises(ValueError, match="lane 0 of 1: the last 1000 rows of source 'bad' trained no token"):
        list(IterablePackedDataset(mix, max_seq_len=8, num_lanes=1, skip_bad=10**6))


@pytest.mark.parametrize("stop", ["all_exhausted", "first_exhausted"])
def test_an_epochs_packs_are_estimated(stop: str) -> None:
    mix = three(stop, (3, 2, 5), short=900, middling=300, long=300)
    data = make(mix, num_lanes=1)
    packs = len(list(data))
    assert abs(data.estimate().packs - packs) < 0.1 * packs
    with pytest.raises(ValueError, match="a mixture with stop='never' has no end; set max_steps"):
        make(three("never")).estimate()
    masked = Mix([entry("a", [{"tokens": [1, 2], "labels": [IGNORE_INDEX] * 2}] * 5)])
    with pytest.raises(ValueError, match="no token of source 'a' is trained, in 5 rows from all over it"):
        IterablePackedDataset(masked, max_seq_len=4).estimate()


# Fractions.


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
            reader = mix.read(Reading(**reading, start=reader.cursor))
    raise AssertionError


def unencoded(names: Iterable[str], weights: Iterable[float], size: int = 50) -> Mix:
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
    """The bound is that of `MixtureReader`'s docstring."""
    weights, longest = zip(*sources, strict=True)
    mix = unencoded(map(str, range(len(sources))), weights)
    rng = np.random.default_rng(seed)
    lengths = {i: [1, *rng.integers(0, most + 1, 10_000).tolist()] for i, most in enumerate(longest)}
    totals = trained_by_source(mix, lengths, tokens=tokens, seed=seed, stagger=stagger)
    for got, weight in zip(totals, weights, strict=True):
        wanted = weight / sum(weights) * sum(totals)
        assert abs(got - wanted) <= len(sources) * max(*longest, stagger) + 1e-5 * sum(totals)


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
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the mixture's weights changed")
        data.load_state_dict(state)
    return data


@pytest.mark.parametrize("window", [0, 6])
def test_weights_changed_at_a_resume(window: int) -> None:
    """A second resume with the same weights changes nothing, also in a window of packs that the old ones planned."""
    settings = {**ENDLESS, **SHUFFLED, "num_lanes": 2, "overlong": "split", "max_seq_len": 9}
    settings["balance_window"] = window
    before = make(three("never", (7, 2, 1)), **settings)
    for _ in islice(before, 50):
        pass
    with pytest.warns(UserWarning, match="weights changed") as warned:
        make(three("never", (1, 2, 7)), **settings).load_state_dict(before.state_dict())
    assert str(warned[0].message) == (
        "the mixture's weights changed since the state was written: short 0.7 -> 0.1, long 0.1 -> 0.7. The rows that "
        "wait were drawn by the old ones; the next are drawn by the new ones, and the fractions approach them"
    )
    check_resume_everywhere(lambda: resumed(before.state_dict(), (1, 2, 7), **settings), packs=20)
    after = resumed(before.state_dict(), (1, 2, 7), **settings)
    started = after.source_stats()
    for _ in islice(after, 400):
        pass
    gained = np.array([stats.trained - started[name].trained for name, stats in after.source_stats().items()])
    assert np.abs(gained / gained.sum() - (0.1, 0.2, 0.7)).max() < 0.03


def test_other_weights_drop_what_an_open_balance_window_had_planned() -> None:
    """The window holds several ends of epochs here; resumes are exact from there on."""
    settings = {**ENDLESS, "num_lanes": 1, "max_seq_len": 9, "balance_window": 60}

    def dataset(weights: tuple[int, int], state: Any = None) -> IterablePackedDataset:
        data = [[{"tokens": [k] * n, "labels": [k] * n} for n in (3, 4, 5) * 6] for k in (1, 2)]
        mix = Mix([entry(f"{k}", rows, weights[k]) for k, rows in enumerate(data)], stop="all_exhausted")
        made = IterablePackedDataset(mix, **settings)
        if state is not None:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="the mixture's weights changed")
                made.load_state_dict(state)
        return made

    for done in (1, 20, 56):
        begun = dataset((3, 1))
        list(islice(begun, done))
        state, before = begun.state_dict(), begun.ledger()
        uncut, cut = dataset((1, 3), state), dataset((1, 3), state)
        dropped = uncut.ledger().dropped["removed"]
        assert before.buffered - 128 * 5 <= dropped <= 9 * (60 - done)
        assert dropped > 4 * (60 - done), "packs of at least one sample"
        found = list(map(content, islice(cut, 3)))
        found += map(content, islice(dataset((1, 3), cut.state_dict()), 77))
        assert found == list(map(content, islice(uncut, 80)))
        gained = [after.trained for after in uncut.source_stats().values()]
        gained = [now - then.trained for now, then in zip(gained, begun.source_stats().values(), strict=True)]
        assert gained[1] > 2 * gained[0], "drawn by the new weights"


# Resumes.


CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("all-twice", "all_exhausted", {**TWICE, **SHUFFLED, "num_lanes": 2}),
    ("first-endless", "first_exhausted", {**ENDLESS, **SHUFFLED, "num_lanes": 2}),
    ("all-endless-wrap", "all_exhausted", {**ENDLESS, **SHUFFLED, "num_lanes": 2, "split_across_pack": True}),
    ("never-split", "never", {**ENDLESS, **SHUFFLED, "num_lanes": 2, "overlong": "split", "max_seq_len": 9}),
    ("all-truncate", "all_exhausted", {**ONCE, "overlong": "truncate", "max_seq_len": 14, "strategy": "best_fit"}),
]  # fmt: skip


FEW = {"short": 24, "middling": 16, "long": 10}  # so that epochs end within the packs that are looked at


@pytest.mark.parametrize(("kind", "settings"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_resume_at_every_pack(kind: str, settings: dict[str, Any]) -> None:
    packs = check_resume_everywhere(lambda: make(three(kind, **FEW), **settings), packs=30)
    assert len(packs) > 8


# Sources that have fewer rows than there are lanes.


LANES = 32
QUICK = ((2, "never"), (33, "all_exhausted"))


def small_and_large(small: Any, *, weight: float = 0.1, large: int = 2000, stop: str = "never") -> Mix:
    return Mix(
        [entry("small", small, weight), entry("large", shifted(rows(large, longest=12), APART), 1 - weight)],
        stop=stop,
    )


@pytest.mark.parametrize(
    ("count", "stop"),
    [
        pytest.param(count, stop, marks=() if (count, stop) in QUICK else pytest.mark.slow)
        for count in (1, 2, 5, 33)
        for stop in ("never", "all_exhausted")
    ],
)
def test_a_source_of_few_rows_keeps_its_weight_and_each_comes_as_often(count: int, stop: str) -> None:
    data = make(small_and_large(rows(count, longest=12), stop=stop), epochs=None, num_lanes=LANES, **SHUFFLED)
    lanes, came = Counter[int](), Counter[int]()
    for pack in islice(data, 2000):
        lanes[pack["lane"]] += 1
        came.update(row_id[1] for row_id in (f.row_id for f in pack["fragments"]) if row_id[0] == 0)
    assert set(lanes) == set(range(LANES))
    assert max(lanes.values()) - min(lanes.values()) <= 1, "no lane ended"
    stats = data.source_stats()
    trained = [source.trained for source in stats.values()]
    assert abs(trained[0] / sum(trained) - 0.1) < (0.01 if stop == "never" else 0.03), (
        "epochs have 70 rows a lane"
    )
    assert set(came) == set(range(count))
    if stop == "never":
        assert max(came.values()) - min(came.values()) <= 0.2 * max(came.values())
        passes = stats["small"].epochs
        assert abs(passes * count - stats["small"].samples) < 0.1 * stats["small"].samples, (
            "a lane counts the passes in which it has no rows as well"
        )


@pytest.mark.parametrize(
    ("stop", "how"), [("never", ENDLESS), ("all_exhausted", ENDLESS), ("first_exhausted", ONCE)]
)
def test_a_run_with_a_source_of_two_rows_resumes_at_every_pack(stop: str, how: dict[str, Any]) -> None:
    mix = small_and_large(rows(2, longest=9), weight=0.3, large=60, stop=stop)
    packs = check_resume_everywhere(lambda: make(mix, num_lanes=5, **how, **SHUFFLED), packs=40)
    assert len(packs) > 5


@pytest.mark.parametrize("stop", ["never", "all_exhausted", "first_exhausted"])
def test_a_source_without_rows_is_refused(stop: str) -> None:
    """A lane that has no rows looks whether the others have some."""
    none = Holdout(MapSource(rows(1)), fraction=1e-9, part="validation")
    with pytest.raises(ValueError) as error:
        list(make(small_and_large(none, weight=0.5, stop=stop), num_lanes=4))
    assert str(error.value) == (
        "lane 0 of 4: source 'small' has no rows in 9 passes over it, so its weight cannot be reached; leave the "
        "source out"
    )
