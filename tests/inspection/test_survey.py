"""The report's figures are those of a run with the same settings."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from streampack import IterablePackedDataset, Mix, PackedDataLoader
from streampack.inspection import plans
from streampack.inspection.costs import ModelWork
from streampack.inspection.report import Report
from streampack.inspection.shape import RunShape
from streampack.inspection.survey import inspect_dataset
from streampack.loader.batching import Batching
from streampack.packing.attention_cost import AttentionCost
from streampack.training.methods import MethodLoader
from tests.harness.inspection import CORPORA, dataset, log_normal, token_rows
from tests.harness.mixtures import entry
from tests.harness.threads import Topology, run

WAYS: dict[str, dict[str, Any]] = {
    "next_fit": {"strategy": "next_fit"},
    "first_fit": {"strategy": "first_fit"},
    "best_fit": {"strategy": "best_fit"},
    "exact_fit": {"strategy": "exact_fit"},
    "split_across_pack": {"split_across_pack": True},
}


def outcome(report: Report, name: str) -> Any:
    return next(each for each in report.outcomes if each.name == name)


@pytest.mark.parametrize("name", CORPORA)
@pytest.mark.parametrize("steps", [(1, None), (3, 6)])
def test_it_predicts_what_a_run_measures(name: str, steps: tuple[int, int | None], tmp_path: Path) -> None:
    batch_size, packs_per_step = steps
    report = inspect_dataset(
        dataset(name, tmp_path),
        rows=None,
        shape=RunShape(batch_size=batch_size, packs_per_step=packs_per_step),
    )
    loader = PackedDataLoader(dataset(name, tmp_path), batch_size=batch_size, packs_per_step=packs_per_step)
    batches = sum(1 for _ in loader)
    ledger = loader.ledger()
    chosen = report.chosen
    assert (chosen.packs, chosen.steps) == (ledger.packs, batches / loader.batches_per_step)
    assert chosen.padding == pytest.approx(ledger.padding, abs=1e-12)
    assert report.coverage.exact
    dropped = {loss.reason: (loss.tokens, loss.rows) for loss in report.losses}
    kept = {"untrained": (0, ledger.untrained)} if "untrained" not in ledger.dropped else {}
    for reason, rows in ledger.dropped_samples.items():
        assert (
            dropped.get(reason, (0, 0)) == (ledger.dropped[reason], rows)
            or reason in kept
            or (reason == "untrained" and not rows)
        )
    assert report.lengths.tokens == ledger.tokens_in
    assert report.lengths.samples == ledger.samples


@pytest.mark.parametrize("name", CORPORA)
@pytest.mark.parametrize(("way", "multiple"), [*((way, 1) for way in WAYS), ("exact_fit", 16)])
def test_the_packs_of_each_strategy_are_those_of_a_run(
    name: str, way: str, multiple: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only their number: the tokens and the attention cost of every pack."""
    planned = {}
    original = plans.plan_lanes

    def watched(lanes: Any, packing: Any, cost: Any) -> Any:
        planned[packing.filled_by] = plan = original(lanes, packing, cost)
        return plan

    monkeypatch.setattr("streampack.inspection.outcomes.plan_lanes", watched)
    report = inspect_dataset(dataset(name, tmp_path, pad_seqs_to=multiple), rows=None)
    packs = list(dataset(name, tmp_path, **WAYS[way], pad_seqs_to=multiple).stream())
    packs.sort(key=lambda pack: (pack.lane, pack.number))
    plan, cost = planned[way], AttentionCost()
    held = [sum(each.stop - each.start for each in pack.fragments) for pack in packs]
    assert plan.held.tolist() == held
    assert plan.pairs.tolist() == [cost.of(pack.seq_lens) for pack in packs]
    tokens = sum(pack.tokens.size for pack in packs)
    assert outcome(report, way).padding == pytest.approx(1 - sum(held) / tokens, abs=1e-12)
    ends = sum(sum(pack.seq_lens) for pack in packs) - sum(held)
    assert outcome(report, way).sequence_ends == pytest.approx(ends / tokens, abs=1e-12)
    assert (ends > 0) == (multiple > 1)


@pytest.mark.parametrize("name", CORPORA)
def test_a_sample_comes_near_and_says_how_near(name: str, tmp_path: Path) -> None:
    sampled = inspect_dataset(dataset(name, tmp_path), rows=200)
    whole = inspect_dataset(dataset(name, tmp_path), rows=None)
    assert not sampled.coverage.exact
    assert sampled.coverage.rows_in_all == pytest.approx(whole.coverage.rows, rel=0.15)
    assert sampled.coverage.error > 0
    for each in sampled.outcomes:
        true = outcome(whole, each.name)
        assert abs(each.padding - true.padding) < 4 * each.error + 0.01, each.name
        near = 4 * sampled.coverage.error + 4 * each.error + 0.02
        assert each.packs == pytest.approx(true.packs, rel=near), each.name
        assert each.steps == pytest.approx(true.steps, rel=near), each.name
    true_losses = {loss.reason: loss.fraction for loss in whole.losses}
    for loss in sampled.losses:
        assert abs(loss.fraction - true_losses[loss.reason]) <= 4 * loss.error + 0.005


def test_a_small_corpus_is_read_as_a_whole(tmp_path: Path) -> None:
    assert inspect_dataset(dataset("flan", tmp_path), rows=20_000).coverage.exact


def test_a_corpus_with_few_more_rows_than_asked_for_is_read_whole(tmp_path: Path) -> None:
    rows = inspect_dataset(dataset("flan", tmp_path), rows=None).coverage.rows
    assert inspect_dataset(dataset("flan", tmp_path), rows=round(rows / 1.3)).coverage.exact
    assert not inspect_dataset(dataset("flan", tmp_path), rows=round(rows / 2)).coverage.exact


@pytest.mark.parametrize(
    "method", ["random_padding", "minibatch_packing", "multipack", "exact_fit", "fixed_length_posid"]
)
def test_a_method_is_planned_as_its_loader_plans_it(method: str) -> None:
    rows = token_rows(log_normal(300, 60, 0.8))
    settings: dict[str, Any] = {"max_seq_len": 512, "overlong": "split" if "fixed" in method else "truncate"}
    loader = MethodLoader(
        IterablePackedDataset(rows, **settings), method=method, batch_size=2, packs_per_step=4
    )
    batches = sum(1 for _ in loader)
    ledger = loader.ledger()
    shape = RunShape(batch_size=2, packs_per_step=4, method=method)
    report = inspect_dataset(IterablePackedDataset(rows, **settings), shape=shape, rows=None)
    assert report.chosen.name == method
    assert (report.chosen.packs, report.chosen.steps) == (ledger.packs, batches / loader.batches_per_step)
    assert report.chosen.padding == pytest.approx(ledger.padding, abs=1e-12)


def test_padding_is_what_random_batches_pad() -> None:
    rows = token_rows(log_normal(400, 60, 0.8))
    settings: dict[str, Any] = {"max_seq_len": 4096, "num_lanes": 1}
    loader = MethodLoader(IterablePackedDataset(rows, **settings), method="random_padding", batch_size=8)
    for _ in loader:
        pass
    report = inspect_dataset(IterablePackedDataset(rows, **settings), rows=None)
    padding, alone = outcome(report, "padding"), outcome(report, "mini-batches")
    assert padding.padding == pytest.approx(loader.ledger().padding, abs=1e-12)
    assert (padding.steps, padding.samples_per_step) == (50, 8)
    assert (alone.padding, alone.steps, alone.samples_per_step) == (0, 400, 1)
    assert report.chosen.speedup == pytest.approx(padding.tokens / report.chosen.tokens)


def test_rows_that_stop_a_run_are_counted_and_named() -> None:
    rows: list[Any] = token_rows([5, 90, 7, 3, 80])
    rows[3] = {"tokens": [], "labels": []}
    rows += [{"tokens": "no ids"}, {"tokens": "none"}, {"tokens": [1, 2], "labels": [1]}]
    report = inspect_dataset(IterablePackedDataset(rows, max_seq_len=16, num_lanes=1))
    assert {loss.reason: (loss.rows, loss.tokens, loss.stops) for loss in report.losses} == {
        "overlong": (2, 170, True), "empty": (1, 0, True), "bad": (3, 0, True)
    }  # fmt: skip
    [overlong] = [loss for loss in report.losses if loss.reason == "overlong"]
    assert overlong.examples == ["sample 1: 90 tokens", "sample 4: 80 tokens"]
    [bad] = [loss for loss in report.losses if loss.reason == "bad"]
    assert [(each.split(":")[0], each[-9:]) for each in bad.examples] == [
        ("sample 5", " (2 such)"),
        ("sample 7", " (1 such)"),
    ]
    assert report.chosen.packs == 1


def test_longest_rows_and_trained_tokens() -> None:
    report = inspect_dataset(IterablePackedDataset(token_rows([10, 30, 20], prompt=0.5), max_seq_len=64))
    lengths = report.lengths
    assert [(row.tokens, row.trained, row.place) for row in lengths.longest] == [
        (30, 15, "sample 1"), (20, 10, "sample 2"), (10, 5, "sample 0")
    ]  # fmt: skip
    assert (lengths.tokens, lengths.trained, lengths.masked) == (60, 30, 30)
    assert sum(count for *_, count in lengths.histogram) == 3
    assert all(start < stop for start, stop, _ in lengths.histogram)
    assert lengths.quantiles["0.5"] == 20


def mixture(stop: str) -> Mix:
    short, long = (
        token_rows(log_normal(300, 20, 0.4), prompt=0.2),
        token_rows(log_normal(60, 150, 0.4), prompt=0.5),
    )
    return Mix([entry("short", short, 0.7), entry("long", long, 0.3)], stop=stop)


@pytest.mark.parametrize("stop", ["all_exhausted", "first_exhausted"])
@pytest.mark.parametrize("rows", [None, 200])
def test_a_mixture(stop: str, rows: int | None) -> None:
    settings: dict[str, Any] = {"max_seq_len": 256, "overlong": "truncate", "shuffle": True, "num_lanes": 2}
    mixed = IterablePackedDataset(mixture(stop), **settings)
    packs = sum(1 for _ in mixed)
    trained = {name: stats.trained for name, stats in mixed.source_stats().items()}
    report = inspect_dataset(
        IterablePackedDataset(mixture(stop), **settings), rows=rows, shape=RunShape(max_steps=10)
    )
    if rows is None:
        assert (report.chosen.packs, report.chosen.padding) == (packs, pytest.approx(mixed.ledger().padding))
    assert report.chosen.packs == pytest.approx(packs, rel=0.1)
    for share in report.sources:
        assert share.fraction == pytest.approx(trained[share.name] / sum(trained.values()), abs=0.03)
        read = mixed.source_stats()[share.name].samples / (300 if share.name == "short" else 60)
        assert share.passes == pytest.approx(read, rel=0.15)
        assert share.passes_in_run == pytest.approx(share.passes * 10 / report.chosen.packs)


def test_an_endless_mixture_is_read_until_each_source_was_read_once() -> None:
    settings: dict[str, Any] = {"max_seq_len": 256, "overlong": "truncate"}
    endless = IterablePackedDataset(mixture("never"), epochs=None, **settings)
    once = IterablePackedDataset(mixture("all_exhausted"), **settings)
    assert inspect_dataset(endless, rows=None).outcomes == inspect_dataset(once, rows=None).outcomes


def test_a_stream_of_unknown_length() -> None:
    rows = token_rows(log_normal(500, 60, 0.8))
    report = inspect_dataset(IterablePackedDataset(lambda: iter(rows), max_seq_len=2048), rows=100)
    assert (report.coverage.rows, report.coverage.rows_in_all) == (100, None)
    assert any("does not tell its size" in line for line in report.assumed)


def test_several_ranks_have_more_lanes_and_balance() -> None:
    rows = token_rows(log_normal(2000, 120, 1.2))
    settings: dict[str, Any] = {"max_seq_len": 1024, "overlong": "truncate"}
    model = ModelWork(per_token=1e3, per_pair=1.0, parameters=167, name="tiny")
    report = inspect_dataset(
        IterablePackedDataset(rows, **settings),
        rows=None,
        shape=RunShape(ranks=(3, 4), workers=3, model=model),
    )
    assert report.settings.lanes % 9 == 0
    for each in report.attention.imbalance:
        assert each.packs_per_step == each.ranks
        assert each.planned > each.balanced > 1
        assert each.planned_work is not None
        assert each.planned > each.planned_work > 1
    assert 0 < (report.attention.share_of_work or 0) < 1
    assert (report.chosen.flops_speedup or 0) > report.chosen.speedup, "padding attends to padding, too"


def test_nothing_to_pack() -> None:
    with pytest.raises(
        ValueError, match=r"none of the 2 rows looked at can be packed \(2 overlong\): sample 0: 90"
    ):
        inspect_dataset(IterablePackedDataset(token_rows([90, 80]), max_seq_len=16))


def test_the_json_holds_the_report(tmp_path: Path) -> None:
    report = inspect_dataset(dataset("chat", tmp_path), rows=None)
    plain = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert plain["version"] == 1
    assert plain["settings"]["max_seq_len"] == 512
    assert [each["name"] for each in plain["outcomes"]][:5] == list(WAYS)
    assert plain["lengths"]["masked"] + plain["lengths"]["trained"] == plain["lengths"]["tokens"]
    for view in plain["packs"]:
        assert view["cu_seqlens"][-1] == 512
        assert sum(stop + 1 for _, stop in view["positions"]) == 512


def test_memory_does_not_grow_with_the_rows() -> None:
    """Of a row, only its length stays: 8 bytes."""
    import tracemalloc

    from streampack.inspection.epoch import read_epoch
    from streampack.inspection.reading import tolerant

    def peak(count: int) -> int:
        class Rows:
            def __len__(self) -> int:
                return count

            def __getitem__(self, index: int) -> dict[str, list[int]]:
                return {"input_ids": list(range(index % 50 + 2))}

        config = tolerant(IterablePackedDataset(Rows(), max_seq_len=64).lane_config)
        tracemalloc.start()
        read_epoch(config, num_lanes=1, rows=None, progress=lambda rows: None)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    few, many = peak(2_000), peak(12_000)
    assert (many - few) / 10_000 < 24


@pytest.mark.parametrize(
    ("ranks", "packs_per_step", "batch_size"), [(1, 3, 2), (2, 2, 1), (2, 6, 2), (4, 8, 1), (2, 3, 1)]
)
def test_ranks_and_batches_decide_the_steps(ranks: int, packs_per_step: int, batch_size: int) -> None:
    rows = token_rows(log_normal(120, 60, 0.8))
    make = lambda: IterablePackedDataset(rows, max_seq_len=512, num_lanes=4)  # noqa: E731
    ran = run(make, Topology(ranks=ranks, batch_size=batch_size), packs_per_step=packs_per_step)
    batching = Batching(batch_size, packs_per_step, ranks, 4)
    shape = RunShape(ranks=(ranks,), batch_size=batch_size, packs_per_step=packs_per_step)
    report = inspect_dataset(make(), rows=None, shape=shape)
    assert report.chosen.steps == len(ran.batches[0]) / batching.batches_per_step


def test_a_number_of_rows_that_cannot_be_told_is_finite(tmp_path: Path) -> None:
    report = inspect_dataset(dataset("web", tmp_path), rows=150)
    assert all(math.isfinite(each.padding) and math.isfinite(each.steps) for each in report.outcomes)
