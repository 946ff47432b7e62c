"""What a Trainer logs of waiting for data and of the ranks' shares of a step, against the packs' own costs."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from streampack import PackedDataLoader
from streampack.packing.attention_cost import AttentionCost
from tests.harness.hf_trainers import held_out, packed, samples, stream
from tests.harness.processes import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


def costs_and_logs(folder: Path) -> tuple[list[int], list[dict[str, Any]], float]:
    """As a rank: return the attention costs of its parts of the steps, what its Trainer logged, and its waiting."""
    rows = samples(200)
    trainer = packed(
        folder, stream(rows), max_steps=-1, num_train_epochs=2, logging_strategy="epoch", eval_strategy="steps",
        eval_steps=3, eval_dataset=held_out(), per_device_eval_batch_size=1, dataloader_num_workers=1,
    )  # fmt: skip
    loader = PackedDataLoader(stream(rows), batch_size=2, packs_per_step=8)
    costs = [
        sum(AttentionCost().of(f.stop - f.start for f in pack) for pack in batch.fragments)
        for batch in loader
    ]
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    steps = [sum(costs[first : first + 2]) for first in range(0, len(costs), 2)]
    return steps, logs, trainer.train.__self__.steps.loader.metrics()["data_wait_mean"]


def test_two_ranks_log_how_even_their_steps_are(tmp_path: Path) -> None:
    """Neither an evaluation nor an epoch's end, at which the callback is called twice, is a log."""
    ranks = run_ranks(costs_and_logs, 2, tmp_path)
    ratios = [max(pair) / fmean(pair) for pair in zip(*(costs for costs, _, _ in ranks), strict=True)]
    assert fmean(ratios) > 1.01
    logs, others = ranks[0][1], ranks[1][1]
    done = 0
    for entry, other in zip(logs, others, strict=True):
        # The mean over the steps since the last log, and over all.
        assert entry["cost_imbalance"] == pytest.approx(fmean(ratios[done : entry["step"]]), abs=1e-9)
        assert entry["cost_imbalance_mean"] == pytest.approx(fmean(ratios[: entry["step"]]), abs=1e-9)
        for name in ("data_wait", "data_wait_mean"):
            assert entry[name] == other[name] > 0
        done = entry["step"]
    assert len(logs) == 2
    assert done == len(ratios)
    assert logs[-1]["data_wait_mean"] == max(waited for _, _, waited in ranks)


def test_one_rank_logs_its_waiting(tmp_path: Path) -> None:
    trainer = packed(tmp_path, stream(samples(100), epochs=None), max_steps=4)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    waits = [entry["data_wait"] for entry in logs]
    assert min(waits) > 0
    assert [entry["data_wait_mean"] for entry in logs] == pytest.approx(
        [fmean(waits[: step + 1]) for step in range(4)]
    )
    assert not any("cost_imbalance" in entry for entry in logs)
    trainer.train()  # a second training counts from zero
    again = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert again["data_wait"] == again["data_wait_mean"]
