from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from streampack_recipes.full_finetune import train

from streampack import IGNORE_INDEX, IterablePackedDataset, Mix, PackedDataLoader
from streampack.distributed.world import World
from streampack.losses import LOSS_NORMS, label_weights, token_losses
from streampack.training.meters import (
    SourceMeter,
    StepMeter,
    memory_metrics,
    source_ids,
    stream_metrics,
    stream_totals,
)
from streampack.training.validate import validate
from tests.harness.tiny import losses, mixed_config

CPU = torch.device("cpu")
VOCABULARY = 12


ROWS = [{"tokens": [1, 2, 3], "labels": [-100, 2, 3]} for _ in range(3)]


def batches():
    return PackedDataLoader(IterablePackedDataset(ROWS, max_seq_len=4, num_lanes=1), batch_size=2)


@pytest.mark.parametrize(("loss_norm", "weight"), [("token", 6), ("sample", 3)])
def test_metrics_of_a_step_cover_its_batches(loss_norm, weight):
    meter = StepMeter(World(), CPU)
    meter.start()
    for batch in batches():
        meter.add(batch, torch.tensor(6.0), label_weights(batch, loss_norm=loss_norm))
    assert meter.batches == 2
    assert float(meter.reduce()) == pytest.approx(1 / weight)
    meter.stop()
    assert meter.tokens == 9
    metrics = meter.metrics()
    assert metrics["loss"] == pytest.approx(12.0 / weight)
    assert metrics["trained_tokens"] == 6
    assert metrics["samples_per_step"] == 3
    assert metrics["padding"] == 1 - 9 / 16


def test_metrics_are_the_last_loss_and_means_since_the_last_call(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    meter = StepMeter(World(), CPU)
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
    assert meter.tokens == 18


def test_a_step_without_trained_tokens_has_loss_0_and_no_gradients():
    meter = StepMeter(World(), CPU)
    meter.start()
    assert float(meter.reduce()) == 0
    meter.stop()
    assert meter.metrics()["loss"] == 0


def test_stream_totals_have_ledger_and_epoch():
    loader = batches()
    for _ in loader:
        pass
    ledger, epoch = stream_totals(loader, World())
    assert (ledger.samples, ledger.packed, epoch) == (3, 9, 0)


def test_operators_metrics_of_all_ranks_are_added_up_or_the_longest(monkeypatch):
    loader = batches()
    for _ in loader:
        pass
    own = loader.metrics()
    other = {**own, "read_bytes": own["read_bytes"] + 5, "data_wait_seconds": 1e6, "consumed": 0.5}
    other |= {"data_wait": 7.0, "cost_imbalance": 1.5}

    class TwoRanks(World):
        def gather(self, value):
            ledger, epoch, metrics = value
            return [(ledger, epoch, {**metrics, "consumed": 1.0}), (ledger, epoch, other)]

    found = stream_metrics(loader, TwoRanks())
    assert found["read_bytes"] == 2 * own["read_bytes"] + 5
    assert found["read_rows"] == found["ledger_samples"] == 6
    assert found["data_wait_seconds"] == 1e6
    assert (found["data_wait"], found["cost_imbalance"]) == (7.0, 1.5)
    assert found["consumed"] == 0.75


def test_memory_metrics_are_empty_on_a_cpu():
    assert memory_metrics(World(), CPU) == {}


# By source of a mixture.


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
    return Mix([entries[0], {"name": "in", "weight": 1, "source": Mix(entries[1:])}])


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
        ids = source_ids(batch, mix())
        real = batch.tokens > 0
        assert torch.equal(ids[real], (batch.tokens[real] - 1) // 3)
        assert pad_seqs_to > 1 or not ids[~real].any()
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
    for i, name in enumerate(("a", "in/b", "in/c")):
        assert metrics[f"source_{name}_loss"] == pytest.approx(float(wanted[i] / counts[i]))
        assert metrics[f"source_{name}_trained"] == trained[i]
        assert metrics[f"source_{name}_fraction"] == pytest.approx(float(trained[i] / trained.sum()))
        assert metrics[f"source_{name}_packed"] == metrics[f"source_{name}_tokens_in"]
        assert metrics[f"source_{name}_epochs"] >= 1
    assert len(metrics) == 18
    assert not [name for name in meter.metrics() if name.endswith("loss")], "nothing since the last report"


def test_a_plain_source_has_no_metrics() -> None:
    batches = loader([{"tokens": [1, 2, 3], "labels": [1, 2, 3]}] * 9)
    meter = SourceMeter(batches, World(), CPU)
    for batch in batches:
        meter.add(batch, torch.zeros(3, 8), torch.ones(3, 8))
    assert meter.metrics() == {}


def test_a_recipe_logs_every_source(tmp_path: Path) -> None:
    config = mixed_config(tmp_path)
    assert validate(config) == []
    train(config)
    text = (tmp_path / "out" / "logs" / "log.txt").read_text()
    assert set(re.findall(r"source_(\w+)_loss", text)) == {"counting", "words"}
    steps = losses(tmp_path)
    each = {name: losses(tmp_path, f"source_{name}_loss") for name in ("counting", "words")}
    shares = {name: losses(tmp_path, f"source_{name}_trained") for name in each}
    before = {"counting": 0.0, "words": 0.0}
    # The loss is the mean of the sources' losses, weighted by what each trained in this step.
    for step, loss in steps.items():
        now = {name: float(shares[name][step]) for name in each}
        gained = {name: now[name] - before[name] for name in each}
        total = sum(gained[name] * float(each[name].get(step, 0)) for name in each)
        assert total / sum(gained.values()) == pytest.approx(float(loss), rel=1e-3)
        before = now
    fraction = float(losses(tmp_path, "source_counting_fraction")[max(steps)])
    assert fraction == pytest.approx(0.75, abs=0.05)
    for name in (
        "data_wait_seconds",
        "data_wait",
        "read_bytes",
        "source_words_consumed",
        "source_words_recent_fraction",
    ):
        assert losses(tmp_path, name), f"{name} is logged"
