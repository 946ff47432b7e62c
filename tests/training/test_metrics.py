"""What a run reports: metrics of its steps and sources, its log and record, its progress and summary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from streampack import IGNORE_INDEX, IterablePackedDataset, Mix, PackedDataLoader
from streampack.losses import LOSS_NORMS, label_weights, token_losses
from streampack.packing.groups import Group
from streampack.training.checks import read_config
from streampack.training.meters import CountMeter, SourceMeter, run_ledger, stream_metrics

# private: the record of the metrics is written by recipes and read by the report; its file is what a run keeps.
from streampack.training.progress import METRICS_FILE, MetricLogger, keep_until, read_metrics, write_metrics
from streampack.training.world import World
from tests.harness.tiny import tiny_config

CPU = torch.device("cpu")


VOCABULARY = 12


ROWS = [{"tokens": [1, 2, 3], "labels": [-100, 2, 3]} for _ in range(3)]


def batches():
    return PackedDataLoader(IterablePackedDataset(ROWS, max_seq_len=4, num_lanes=1), batch_size=2)


@pytest.mark.parametrize(("loss_norm", "weight"), [("token", 6), ("sample", 3)])
def test_metrics_of_a_step_cover_its_batches(loss_norm, weight):
    meter = CountMeter(World(), CPU)
    meter.start()
    for batch in batches():
        meter.add(batch, torch.tensor(6.0), label_weights(batch, loss_norm=loss_norm))
    assert float(meter.reduce()) == pytest.approx(1 / weight)
    meter.stop()
    assert meter.count("tokens") == 9
    metrics = meter.metrics()
    assert metrics["loss"] == pytest.approx(12.0 / weight)
    assert metrics["trained_tokens"] == 6
    assert metrics["samples_per_step"] == 3
    assert metrics["padding"] == 1 - 9 / 16


def test_a_group_is_one_sample_of_a_step_and_so_is_a_sample_in_parts():
    pair = Group([1, 2, 3, 4], [-100, 2, 3, 4], lengths=[2, 2])
    packs = [
        IterablePackedDataset([0, 1, 2], encoder=lambda _: pair, max_seq_len=8, num_lanes=1),
        IterablePackedDataset(ROWS, max_seq_len=4, num_lanes=1, split_across_pack=True),
    ]
    for data in packs:
        meter = CountMeter(World(), CPU)
        meter.start()
        for batch in PackedDataLoader(data, batch_size=1):
            meter.add(batch, torch.tensor(6.0), label_weights(batch, loss_norm="token"))
        meter.reduce()
        meter.stop()
        assert meter.metrics()["samples_per_step"] == 3


def test_metrics_are_the_last_loss_and_means_since_the_last_call(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    meter = CountMeter(World(), CPU)
    [batch, _] = batches()
    for loss in 4.0, 8.0, 2.0:
        meter.start()
        meter.add(batch, torch.tensor(loss), label_weights(batch, loss_norm="token"))
        meter.reduce()
        meter.stop()
        next(clock)  # a validation, say: not counted
        if loss == 8.0:
            first = meter.metrics()
    assert (first["loss"], first["samples_per_step"], first["trained_tokens"]) == (2.0, 2, 4)
    assert first["tokens_per_second"] == 12 / 3  # two steps of a second, and one to read the numbers
    second = meter.metrics()
    assert (second["loss"], second["samples_per_step"]) == (0.5, 2)
    assert second["tokens_per_second"] == 6 / 2
    assert meter.count("tokens") == 18


def test_operators_metrics_of_all_ranks_are_added_up_or_the_longest() -> None:
    loader = batches()
    for _ in loader:
        pass
    ledger = run_ledger(loader, World())
    assert (ledger.samples, ledger.packed) == (3, 9)
    own = loader.metrics()
    other = {**own, "data_wait": 7.0, "cost_imbalance": 1.5}

    class TwoRanks(World):
        def gather(self, value: Any) -> Any:
            return [value, (ledger, 0, other)]

    found = stream_metrics(loader, TwoRanks())
    assert found["ledger_samples"] == 6
    assert (found["data_wait"], found["cost_imbalance"]) == (7.0, 1.5)


def mix() -> Mix:
    """A mixture with tokens 1 to 3 from source a, 4 to 6 from b, 7 to 9 from c."""
    entries: list[dict[str, Any]] = []
    for i, name in enumerate("abc"):
        rows = [
            {
                "tokens": [3 * i + 1 + k % 3 for k in range(n)],
                "labels": [IGNORE_INDEX, *([3 * i + 2] * (n - 1))],
            }
            for n in range(1, 12)
        ]
        entries.append({"name": name, "source": rows, "weight": i + 1})
    return Mix(entries)


def loader(source: Any, **settings: Any) -> PackedDataLoader:
    settings = {"max_seq_len": 8, "overlong": "split", "num_lanes": 2, "shuffle": True, **settings}
    data = IterablePackedDataset(source, **settings)
    return PackedDataLoader(data, batch_size=3)


@pytest.mark.parametrize("pad_seqs_to", [1, 4])
@pytest.mark.parametrize("loss_norm", LOSS_NORMS)
def test_losses_by_source_add_up_to_the_loss(loss_norm: str, pad_seqs_to: int) -> None:
    batches = loader(mix(), pad_seqs_to=pad_seqs_to)
    meter = SourceMeter(batches, World(), CPU)
    generator = torch.Generator().manual_seed(0)
    wanted, counts, trained = torch.zeros(3).double(), torch.zeros(3).double(), torch.zeros(3).double()
    for batch in batches:
        weights = label_weights(batch, loss_norm=loss_norm)
        logits = torch.randn(*batch.tokens.shape, VOCABULARY, generator=generator, requires_grad=True)
        each = token_losses(logits, batch.labels, weights=weights)
        meter.add(batch, each, weights)
        for pack, row in enumerate(batch.labels.tolist()):
            for i, label in enumerate(row[1:]):
                if label != IGNORE_INDEX:
                    source, weight = (label - 1) // 3, float(weights[pack, i + 1])
                    loss = torch.nn.functional.cross_entropy(logits[pack, i], torch.tensor(label))
                    wanted[source] += weight * loss.item()
                    counts[source] += weight
                    trained[source] += 1
    metrics = meter.metrics()
    for i, name in enumerate("abc"):
        assert metrics[f"source_{name}_loss"] == pytest.approx(float(wanted[i] / counts[i]))
        assert metrics[f"source_{name}_trained"] == trained[i]
        assert metrics[f"source_{name}_fraction"] == pytest.approx(float(trained[i] / trained.sum()))
        assert metrics[f"source_{name}_packed"] == metrics[f"source_{name}_tokens_in"]
        assert metrics[f"source_{name}_epochs"] >= 1
    assert len(metrics) == 18
    assert not [name for name in meter.metrics() if name.endswith("loss")], "nothing since the last report"


# The log, and what is printed.


def test_only_rank_0_logs(tmp_path):
    config = read_config(tiny_config(tmp_path))
    (tmp_path / "out").mkdir()
    silent = MetricLogger(config, written={}, world=World(rank=1, size=2), resumed=None)
    silent.log({"loss": 1.0}, step=3)
    silent.close()
    assert list((tmp_path / "out").iterdir()) == []
    logger = MetricLogger(
        config, written=OmegaConf.create({"output_dir": str(tmp_path)}), world=World(), resumed=None
    )
    logger.log({"loss": 1.5}, step=3)
    logger.close()
    assert "Step 3 | loss:1.5" in (tmp_path / "out" / "logs" / "log.txt").read_text()
    assert read_metrics(tmp_path / "out" / METRICS_FILE) == {3: {"loss": 1.5}}


# The record: read as it was written, through resumes and kills.


def test_a_line_cut_off_by_a_kill_is_dropped_and_a_resume_continues(tmp_path: Path) -> None:
    path = tmp_path / METRICS_FILE
    assert read_metrics(path) == {}
    write_metrics(path, {"loss": 4.0}, step=1)
    write_metrics(path, {"loss": 3.0}, step=2)
    write_metrics(path, {"validation_loss": 4.5}, step=2)
    with path.open("a") as file:
        file.write('{"step":3,"lo')
    before = {1: {"loss": 4.0}, 2: {"loss": 3.0, "validation_loss": 4.5}}
    assert read_metrics(path) == before
    keep_until(path, 2)
    write_metrics(path, {"loss": 2.0}, step=3)
    assert read_metrics(path) == before | {3: {"loss": 2.0}}
    keep_until(path, None)
    write_metrics(path, {"loss": 5.0}, step=1)  # a new run, of one that left no checkpoint
    assert read_metrics(path) == {1: {"loss": 5.0}}
    assert list(tmp_path.iterdir()) == [path]


@settings(max_examples=50, deadline=None)
@given(
    starts=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30), st.integers(1, 4)), max_size=5),
)
def test_of_a_step_that_was_trained_twice_the_last_counts(
    tmp_path_factory: pytest.TempPathFactory, starts: list[tuple[int, int, int]]
) -> None:
    """Each start resumes from a step at or before where the last one ended, and logs every n-th step."""
    path = tmp_path_factory.mktemp("record") / METRICS_FILE
    expected: dict[int, dict[str, float]] = {}
    end = 0
    for start, (before, steps, every) in enumerate(starts):
        resumed = max(0, end - before) if start else None
        keep_until(path, resumed)
        begin = resumed or 0
        expected = {step: values for step, values in expected.items() if step <= begin}
        for step in range(begin + 1, begin + steps + 1):
            if step % every == 0:
                write_metrics(path, {"start": float(start)}, step=step)
                expected[step] = {"start": float(start)}
        end = begin + steps
    assert read_metrics(path) == expected
