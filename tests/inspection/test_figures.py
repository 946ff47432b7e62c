"""The figures of an inspection are those of a run with the same settings."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
import pytest

from streampack import (
    IGNORE_INDEX,
    ChatEncoder,
    IterablePackedDataset,
    Mix,
    PackedDataLoader,
)
from streampack.inspection.report import RunShape
from streampack.inspection.survey import inspect_dataset
from tests.harness.hf_tokenizers import byte_level
from tests.harness.inspection import CORPORA, dataset, log_normal, token_rows
from tests.harness.mixtures import entry
from tests.harness.threads import Topology, run

WAYS: dict[str, dict[str, Any]] = {
    **{name: {"strategy": name} for name in ("next_fit", "first_fit", "best_fit", "exact_fit")},
    "split_across_pack": {"split_across_pack": True},
}
STEPS = {"batch_size": 3, "packs_per_step": 6}


def inspected(*sources: Any, shape: RunShape | None = None, **settings: Any) -> Any:
    """The report of all rows."""
    return inspect_dataset(IterablePackedDataset(*sources, **settings), rows=None, shape=shape)


def outcome(report: Any, name: str) -> Any:
    return next(each for each in report.outcomes if each.name == name)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., IterablePackedDataset]:
    folder = tmp_path_factory.mktemp("corpora")
    return lambda name, **settings: dataset(name, folder, **settings)


@pytest.fixture(scope="module")
def whole(corpus: Callable[..., IterablePackedDataset]) -> Callable[..., Any]:
    """Reports of complete corpora; each is made once."""

    @cache
    def report(name: str, pad_seqs_to: int = 1) -> Any:
        return inspect_dataset(corpus(name, pad_seqs_to=pad_seqs_to), rows=None, shape=RunShape(**STEPS))

    return report


@pytest.mark.parametrize(
    ("name", "way", "multiple"),
    [
        *((name, "exact_fit", 1) for name in CORPORA),
        *(("flan", way, 1) for way in WAYS if way != "exact_fit"),
        ("chat", "exact_fit", 16),
    ],
)
def test_each_way_to_pack_comes_to_what_a_run_measures_and_drops(
    name: str, way: str, multiple: int, corpus: Any, whole: Any
) -> None:
    loader = PackedDataLoader(corpus(name, **WAYS[way], pad_seqs_to=multiple), **STEPS)
    batches = list(loader)
    ledger, found = loader.ledger(), outcome(whole(name, multiple), way)
    assert (found.packs, found.steps) == (ledger.packs, len(batches) / loader.batches_per_step)
    assert found.padding == pytest.approx(ledger.padding, abs=1e-12)
    fragments = [each for batch in batches for pack in batch.fragments for each in pack]
    ends = sum(fragment.padding for fragment in fragments)
    assert found.sequence_ends == pytest.approx(ends / ledger.capacity, abs=1e-12)
    assert (ends > 0) == (multiple > 1)
    report = whole(name, multiple)
    assert report.coverage.exact
    assert (report.lengths.tokens, report.lengths.samples) == (ledger.tokens_in, ledger.samples)
    lost = {loss.reason: (loss.tokens, loss.rows) for loss in report.losses if loss.tokens or loss.rows}
    counted = {reason: (ledger.dropped[reason], n) for reason, n in ledger.dropped_samples.items() if n}
    if ledger.untrained:  # also where they are not dropped, the report says how many train nothing
        counted.setdefault("untrained", (0, ledger.untrained))
    assert lost == counted


def test_a_run_of_padded_batches_is_told_its_own_padding() -> None:
    settings: dict[str, Any] = {"max_seq_len": 1024, "num_lanes": 2, "shuffle": True, "pad_seqs_to": 4}
    rows = token_rows(log_normal(600, 40, 0.8))
    data, again = (IterablePackedDataset(rows, strategy="padded", **settings) for _ in range(2))
    report = inspect_dataset(data, rows=None, shape=RunShape(**STEPS), packs=3)
    loader = PackedDataLoader(data, **STEPS)
    batches = list(loader)
    measured = 1 - loader.ledger().packed / sum(batch.tokens.numel() for batch in batches)
    found = report.chosen
    assert (found.name, found.packs, found.steps) == ("padded", 600, 100)
    assert found.padding == pytest.approx(measured, abs=0.03)
    assert measured > 0.3
    assert "Pack by exact_fit" in [advice.title for advice in report.advice]
    first = [pack.tokens.size for pack in islice(again.stream(), 3)]
    assert {pack.max_seq_len for pack in report.packs} == {max(first)}
    assert [pack.max_seq_len - pack.padding for pack in report.packs] == first


@pytest.mark.parametrize("name", CORPORA)
def test_a_sample_comes_near_and_says_how_near(name: str, corpus: Any, whole: Any) -> None:
    sampled, true = inspect_dataset(corpus(name), rows=150, shape=RunShape(**STEPS)), whole(name)
    assert not sampled.coverage.exact
    assert sampled.coverage.rows_in_all == pytest.approx(true.coverage.rows, rel=0.15)
    assert sampled.coverage.error > 0
    for each in sampled.outcomes:
        expected = outcome(true, each.name)
        assert abs(each.padding - expected.padding) < 4 * each.error + 0.01, each.name
        near = 4 * sampled.coverage.error + 4 * each.error + 0.02
        assert each.packs == pytest.approx(expected.packs, rel=near), each.name
        assert each.steps == pytest.approx(expected.steps, rel=near), each.name
    fractions = {loss.reason: loss.fraction for loss in true.losses}
    for loss in sampled.losses:
        assert abs(loss.fraction - fractions[loss.reason]) <= 4 * loss.error + 0.005


def test_the_stated_errors_are_the_spread_of_samples() -> None:
    """Of tokens, of what is truncated, and of padding, where a sample is planned three times."""
    lengths, found = log_normal(4000, 60, 1.2), []
    for seed in range(20):
        rows = token_rows([lengths[i] for i in np.random.default_rng(seed).permutation(len(lengths))])
        data = IterablePackedDataset(rows, max_seq_len=500, overlong="truncate", num_lanes=1)
        report = inspect_dataset(data, rows=400)
        own = outcome(report, "next_fit")
        [loss] = [each for each in report.losses if each.reason == "truncated"]
        tokens = own.packs * (1 - own.padding)
        found.append(
            [(tokens, tokens * report.coverage.error), (loss.fraction, loss.error), (own.padding, own.error)]
        )
    values, errors = np.moveaxis(np.array(found), 2, 0)  # [20, 3] each
    spread = values.std(0, ddof=1) / errors.mean(0)
    # That of padding is a bound: another order each time evens out what the order does.
    assert ((spread > [0.4, 0.4, 0.2]) & (spread < 1.6)).all(), spread


def test_rows_that_stop_a_run_are_counted_and_named() -> None:
    rows: list[Any] = token_rows([5, 90, 7, 3, 80])
    rows[3] = {"tokens": [], "labels": []}
    rows += [{"tokens": "no ids"}, {"tokens": "none"}, {"tokens": [1, 2], "labels": [1]}]
    report = inspected(rows, max_seq_len=16, num_lanes=1)
    found = {loss.reason: (loss.rows, loss.tokens, loss.stops) for loss in report.losses}
    assert found == {"overlong": (2, 170, True), "bad": (4, 0, True)}
    examples = {loss.reason: loss.examples for loss in report.losses}
    assert examples["overlong"] == ["sample 1: 90 tokens", "sample 4: 80 tokens"]
    assert [each.split(":")[0] for each in examples["bad"]] == ["sample 3", "sample 5", "sample 7"]
    assert report.chosen.packs == 1
    said = r"none of the 2 rows looked at can be packed \(2 overlong\): sample 0: 90"
    with pytest.raises(ValueError, match=said):
        inspected(token_rows([90, 80]), max_seq_len=16)


@pytest.mark.parametrize(("shuffle", "lanes"), [(True, 1), (True, 3), (False, 3)])
def test_the_first_of_the_rows_that_stop_a_run_is_the_first_of_the_corpus(shuffle: bool, lanes: int) -> None:
    """In whatever order they are read: nobody finds the rest of them from one in the middle."""
    kinds = [{"tokens": "none", "labels": []} if i % 6 else {"tokens": [i]} for i in range(60)]
    report = inspected([*token_rows([5] * 90), *kinds, *token_rows([5] * 90)], max_seq_len=16, num_lanes=lanes,
                       shuffle=shuffle)  # fmt: skip
    [bad] = [loss for loss in report.losses if loss.reason == "bad"]
    assert bad.rows == 60
    assert [each.split(":")[0] for each in bad.examples] == ["sample 90", "sample 91"]
    [mend] = [each for each in report.advice if "cannot be read" in each.title]
    assert "sample 90" in mend.why
    long = inspected(
        token_rows([*[5] * 50, 80, 5, 90, 70, 60]), max_seq_len=16, num_lanes=lanes, shuffle=shuffle
    )
    assert [each.split(":")[0] for each in long.losses[0].examples] == ["sample 50", "sample 52", "sample 53"]


def test_skipping_is_not_recommended_if_bad_rows_are_many() -> None:
    """The run would end there, or train on a part of the corpus."""
    calls = [{"from": "human", "value": "x"}, {"from": "bot", "value": "{}"}]
    talk = [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]
    encoder = ChatEncoder(byte_level())
    for bad, skips in ((1, True), (60, False)):
        rows = [{"conversations": calls}] * bad + [{"conversations": talk}] * (120 - bad)
        report = inspected(rows, max_seq_len=64, num_lanes=1, encoder=encoder)
        [advice] = [each for each in report.advice if "cannot be read" in each.title]
        assert ("skip_bad: True" in advice.yaml) == skips
        assert "is from 'bot'" in advice.why
        assert "skip" in advice.title.lower() if skips else "50.0%" in advice.why
        assert "roles: {bot: assistant}" in advice.why


def mixture(stop: str) -> Mix:
    short = token_rows(log_normal(300, 20, 0.4), prompt=0.2)
    long = token_rows(log_normal(60, 150, 0.4), prompt=0.5)
    return Mix([entry("short", short, 0.7), entry("long", long, 0.3)], stop=stop)


@pytest.mark.parametrize("stop", ["all_exhausted", "first_exhausted"])
@pytest.mark.parametrize("rows", [None, 100])
def test_a_mixture(stop: str, rows: int | None) -> None:
    settings: dict[str, Any] = {"max_seq_len": 256, "overlong": "truncate", "shuffle": True, "num_lanes": 2}
    mixed = IterablePackedDataset(mixture(stop), **settings)
    packs, stats = sum(1 for _ in mixed), mixed.source_stats()
    fresh = IterablePackedDataset(mixture(stop), **settings)
    report = inspect_dataset(fresh, rows=rows, shape=RunShape(max_steps=10))
    assert report.chosen.packs == (packs if rows is None else pytest.approx(packs, rel=0.1))
    near = 1e-12 if rows is None else 0.05
    assert report.chosen.padding == pytest.approx(mixed.ledger().padding, abs=near)
    trained = sum(each.trained for each in stats.values())
    for share in report.sources:
        assert share.fraction == pytest.approx(stats[share.name].trained / trained, abs=0.03)
        read = stats[share.name].samples / (300 if share.name == "short" else 60)
        assert share.passes == pytest.approx(read, rel=0.15)
        assert share.passes_in_run == pytest.approx(share.passes * 10 / report.chosen.packs)


def test_what_is_lost_of_a_mixture_counts_by_its_weights() -> None:
    """A sample has as many rows of each source; the run reads the second source more often."""
    cut = token_rows(log_normal(600, 300, 0.3), prompt=0)
    short = token_rows(log_normal(600, 30, 0.3), prompt=0)
    settings: dict[str, Any] = {"max_seq_len": 256, "overlong": "truncate", "shuffle": True, "num_lanes": 2}

    def mixed() -> IterablePackedDataset:
        return IterablePackedDataset(Mix([entry("cut", cut, 0.2), entry("short", short, 0.8)]), **settings)

    exact, sampled = (inspect_dataset(mixed(), rows=rows) for rows in (None, 400))
    assert exact.losses[0].fraction < 0.1
    assert sampled.losses[0].fraction == pytest.approx(exact.losses[0].fraction, abs=0.02)


@pytest.mark.parametrize(("rows", "way"), [*((n, "exact_fit") for n in (1, 5, 25)), (300, "next_fit")])
def test_a_sample_that_is_too_small_says_so(rows: int, way: str, corpus: Any, whole: Any) -> None:
    """Ten parts of it, from whose differences the error is taken, have no full pack each, or are nearly the same."""
    found, true = (outcome(each, way) for each in (inspect_dataset(corpus("flan"), rows=rows), whole("flan")))
    assert abs(found.padding - true.padding) <= found.error


def test_a_stream_of_unknown_length() -> None:
    rows = token_rows(log_normal(500, 60, 0.8))
    report = inspect_dataset(IterablePackedDataset(lambda: iter(rows), max_seq_len=2048), rows=100)
    assert (report.coverage.rows, report.coverage.rows_in_all) == (100, None)
    assert any("does not tell its size" in line for line in report.assumed)
    assert all(math.isfinite(each.padding) and math.isfinite(each.steps) for each in report.outcomes)


@pytest.mark.parametrize(
    ("ranks", "packs_per_step", "batch_size"), [(1, 3, 2), (2, 2, 1), (2, 6, 2), (4, 8, 1), (2, 3, 1)]
)
def test_ranks_and_batches_decide_the_steps(ranks: int, packs_per_step: int, batch_size: int) -> None:
    rows = token_rows(log_normal(120, 60, 0.8))
    settings: dict[str, Any] = {"max_seq_len": 512, "num_lanes": 4}
    topology = Topology(ranks=ranks, batch_size=batch_size)
    ran = run(lambda: IterablePackedDataset(rows, **settings), topology, packs_per_step=packs_per_step)
    shape = RunShape(ranks=ranks, batch_size=batch_size, packs_per_step=packs_per_step)
    batches_per_step = -(-packs_per_step // (ranks * batch_size))
    assert inspected(rows, **settings, shape=shape).chosen.steps == len(ran.batches[0]) / batches_per_step


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, {}) for name in CORPORA),
        ("chat", {"split_across_pack": True}),
        ("flan", {"balance_window": 4}),
        ("bimodal", {"pad_seqs_to": 8}),
    ],
)
def test_the_first_packs_are_those_of_a_run(name: str, way: dict[str, Any], corpus: Any) -> None:
    """Rows, texts, what is trained, and boundaries; a window is planned of lane 0 alone."""
    run = corpus(name, **way)
    stream = (pack for pack in run.stream() if "balance_window" not in way or pack.lane == 0)
    views = inspect_dataset(corpus(name, **way), rows=100, packs=5).packs
    assert len(views) == 5
    for view, pack in zip(views, stream, strict=False):
        assert (view.lane, view.number, view.max_seq_len) == (pack.lane, pack.number, pack.tokens.size)
        assert [0, *(each.stop for each in view.sequences)] == np.cumsum([0, *pack.seq_lens]).tolist()
        for sequence, fragment in zip(view.sequences, pack.fragments, strict=True):
            found, stop = run.trace(fragment), sequence.start + sequence.length
            assert sequence.place == found["place"]
            assert sequence.of_sample == (fragment.start, fragment.stop)
            assert sequence.stop - stop == sequence.padding == fragment.padding
            assert pack.tokens[sequence.start : stop].tolist() == found["tokens"]
            assert sequence.trained == np.count_nonzero(pack.labels[sequence.start : stop] != IGNORE_INDEX)
            assert [sequence.start, *(each.stop for each in sequence.runs)] == [
                *(each.start for each in sequence.runs), stop
            ]  # fmt: skip
            for each in sequence.runs:
                labels = pack.labels[max(each.start, sequence.start + 1) : each.stop]
                assert ((labels != IGNORE_INDEX) == each.trained).all()
            texts = [each.text or "" for each in sequence.runs]
            assert "[...]" in "".join(texts) or "".join(texts) == found.get("text", "")


def test_memory_does_not_grow_with_the_rows() -> None:
    """Of a row, only some numbers stay; its tokens would take 900 bytes."""

    def peak(count: int) -> int:
        rows = [{"input_ids": list(range(number % 50 + 2))} for number in range(count)]
        tracemalloc.start()
        inspected(rows, max_seq_len=64)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    assert (peak(1_500) - peak(500)) / 1_000 < 120


FITTING = token_rows(log_normal(3000, 60, 0.6))
ADVICE: dict[str, tuple[dict[str, Any], str]] = {
    "Pack by exact_fit": ({"strategy": "next_fit"}, "strategy: exact_fit"),
    "Use fewer lanes": ({"num_lanes": 40}, "num_lanes: 1"),
    "Give every rank and worker a lane": ({"shape": RunShape(ranks=2, workers=2)}, "num_lanes: 4"),
    "Say what to do with samples longer than max_seq_len": (
        {"rows": [*FITTING, *token_rows([900])], "overlong": "error"},
        "# or keep them whole: max_seq_len: 1024",
    ),
    "Raise max_seq_len": ({"rows": [*FITTING, *token_rows([1900] * 9)]}, "max_seq_len: 2048"),
    "Keep long samples in pieces": ({"rows": [*FITTING, *token_rows([90_000] * 9)]}, "overlong: split"),
    "Mend or skip the rows that cannot be read or encoded": (
        {"rows": [*FITTING, {"tokens": "none"}]},
        "skip_bad: True",
    ),
}


def advice(rows: Any = FITTING, **settings: Any) -> dict[str, Any]:
    own = {"max_seq_len": 512, "num_lanes": 1, "shuffle": True, "overlong": "truncate", **settings}
    return {each.title: each for each in inspected(rows, **own).advice}


@pytest.mark.parametrize("title", ADVICE)
def test_a_recommendation_says_why_and_is_yaml_that_a_config_takes(title: str) -> None:
    yaml = pytest.importorskip("yaml")
    settings, line = ADVICE[title]
    found = advice(**settings)
    assert title in found, list(found)
    assert line in found[title].yaml
    assert any(letter.isdigit() for letter in found[title].why)
    lines = yaml.safe_load(found[title].yaml)
    IterablePackedDataset(FITTING, **{"max_seq_len": 512, **lines.pop("data", {})})
    assert set(lines) <= {"packs_per_step", "batch_size", "num_workers"}


def test_nothing_is_recommended_where_nothing_is_to_gain() -> None:
    assert advice() == {}
