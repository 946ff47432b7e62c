"""A mixture: where its epochs end, its encoders and names, and the mixtures that are refused."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streampack import (
    IGNORE_INDEX,
    IterablePackedDataset,
    JSONLSource,
    MapSource,
    Mix,
    Sample,
    TokensEncoder,
)
from streampack.sources import Holdout, Reading
from streampack.sources.holdout import hold_out
from tests.support.corpus import Numbers, all_of, in_memory, rows, samples_in, write
from tests.support.mixtures import (
    APART,
    SHUFFLED,
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
    assert max(begun) == 3 * num_lanes, "a source that is rarely read may not have begun when another ends"
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


def test_never_restarts_sources_within_one_epoch() -> None:
    data = make(three("never"), epochs=1, num_lanes=1, **SHUFFLED)
    order: list[int] = []
    for pack in islice(data, 400):
        assert pack["epoch"] == 0
        order += [fragment.row_id[1] for fragment in pack["fragments"] if fragment.row_id[0] == 0]
    stats = data.source_stats()["short"]
    assert stats.epochs > 3
    assert stats.epochs == -(-stats.samples // 60)
    times = Counter(order)
    assert set(times) == set(range(60))
    assert max(times.values()) - min(times.values()) <= 2, "every pass over the source has all of its rows"


def test_restarts_epochs_and_sources_are_shuffled_differently() -> None:
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
            assert traced["place"] == f"{name}: sample {traced['row']['i'] % APART}"
            assert traced["row"]["i"] // APART == mix.names.index(name)
            assert ("text" in traced) == (name == "in/twice")
            texts.add(traced.get("text"))
    assert len(texts) > 3
    one = data._identity.plain()["encoder"]
    assert (
        make(Mix([entry("own", source(0), encoder=Doubled("b")), entry("in", inner)]))._identity.plain()[
            "encoder"
        ]
        != one
    )


@pytest.mark.parametrize(
    ("names", "stop", "message"),
    [
        ([], "never", "a mixture of no sources has no rows; name at least one"),
        ("a", "sometime", "stop='sometime' is unknown; choose one of 'first_exhausted', 'all_exhausted', 'never'"),
        ("aa", "never", "two sources are named 'a'; give each a name of its own"),
        (["a/b"], "never", "a source of a mixture is named 'a/b'; give it a name without a slash"),
        ([""], "never", "a source of a mixture is named ''; give it a name without a slash"),
    ],
)  # fmt: skip
def test_bad_mixtures_are_refused(names: list[str], stop: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        Mix([entry(name, rows(3)) for name in names], stop=stop)
    assert str(error.value) == message


def test_a_mixture_within_a_mixture_becomes_its_sources() -> None:
    own, outer = TokensEncoder(), TokensEncoder()
    rest = Mix([entry("de", rows(3), 4, encoder=own), entry("fr", rows(3), 1)])
    web = Mix([entry("en", rows(3), 3), entry("rest", rest, 2)])
    mix = Mix([entry("code", rows(3)), entry("web", web, encoder=outer)])
    assert mix.target_fractions == {"code": 0.5, "web/en": 0.3, "web/rest/de": 0.16, "web/rest/fr": 0.04}
    assert [leaf.encoder for leaf in mix.entries] == [None, outer, own, outer]
    with pytest.raises(ValueError) as error:
        Mix([entry("web", web)], stop="never")
    assert str(error.value) == (
        "source 'web' is a mixture with stop='all_exhausted', within one with stop='never'; give both the same stop"
    )


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), "1", True])
def test_a_weight_that_is_no_number_is_refused(weight: Any) -> None:
    with pytest.raises(
        ValueError, match=r"source 'a' has weight=.*; give its fraction of the trained tokens, 0 to leave"
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


@pytest.mark.parametrize("bad", ["masked", "broken"])
def test_a_source_that_trains_nothing_is_refused(tmp_path: Path, bad: str) -> None:
    (tmp_path / "a.jsonl").write_text("{\n" * 5)
    masked = [{"tokens": [1, 2], "labels": [IGNORE_INDEX] * 2}] * 5
    good = [{"tokens": [1, 2], "labels": [1, 2]}] * 5
    mix = Mix(
        [entry("good", good), entry("bad", masked if bad == "masked" else tmp_path / "a.jsonl")], stop="never"
    )
    skipping = {"on_bad_record": "skip", "max_bad_records": 10**6}
    with pytest.raises(ValueError, match="lane 0 of 1: the last 1000 rows of source 'bad' trained no token"):
        list(IterablePackedDataset(mix, max_seq_len=8, num_lanes=1, **skipping))  # type: ignore[arg-type]


def test_a_mixture_behind_a_holdout_is_refused() -> None:
    data = make(Holdout(three(), fraction=0.5, part="train"))
    with pytest.raises(RuntimeError, match="hold rows out of its sources, not of the whole"):
        list(data)


def test_a_fraction_is_held_out_of_every_source() -> None:
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


def test_a_fraction_is_held_out_of_the_sources_that_are_named() -> None:
    small = three("all_exhausted", (1, 1, 1), short=1)
    train, held_out = hold_out(small, fraction={"middling": 0.3, "long": 0.6, "short": 0})
    assert held_out.names == ["middling", "long"]
    found = [samples_in(make(part, num_lanes=1)) for part in (train, held_out)]
    assert not set(found[0]) & set(found[1])
    assert 0 in found[0], "the one row of the small source"
    assert {i // APART for i in found[1]} == {1, 2}
    assert [entry.source.fraction for entry in held_out.entries] == [0.3, 0.6]  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="out of 'other', and the sources are short, middling, long"):
        hold_out(small, fraction={"other": 0.1})
    with pytest.raises(ValueError, match="out of 'short', and the sources are no mixture"):
        hold_out(MapSource(rows(30)), fraction={"short": 0.1})
    with pytest.raises(ValueError, match="nothing is held out of any source"):
        hold_out(small, fraction={"long": 0})


@pytest.mark.parametrize("stop", ["all_exhausted", "first_exhausted"])
def test_an_epochs_packs_are_estimated(stop: str) -> None:
    mix = three(stop, (3, 2, 5), short=900, middling=300, long=300)
    data = make(mix, num_lanes=1)
    packs = len(list(data))
    assert abs(data.estimate().packs - packs) < 0.1 * packs
    with pytest.raises(ValueError, match="a mixture with stop='never' has no end; set max_steps"):
        make(three("never")).estimate()
    masked = Mix([entry("a", [{"tokens": [1, 2], "labels": [IGNORE_INDEX] * 2}] * 5)])
    with pytest.raises(ValueError, match="no token of source 'a' is trained, as far as a sample tells"):
        IterablePackedDataset(masked, max_seq_len=4).estimate()


def test_a_probe_sees_all_sources() -> None:
    found, scale = three().probe(30)
    assert {row.data["i"] // APART for row in found} == {0, 1, 2}
    assert all(three().fetch(row.row_id) == row.data for row in found)
    assert len(found) * scale == pytest.approx(180)


def test_a_mixture_is_local_if_all_of_its_sources_are(tmp_path: Path) -> None:
    """Of others, lanes are prepared before their turn."""
    folder = tmp_path / "mixed"
    folder.mkdir()
    path = write(folder / "a.jsonl", rows(3))
    here, there = JSONLSource(path), JSONLSource(f"{in_memory(folder)}/a.jsonl")
    for second, local in ((here, True), (there, False)):
        entries = [{"name": "a", "source": here, "weight": 1}, {"name": "b", "source": second, "weight": 1}]
        assert Mix(entries).local is local
