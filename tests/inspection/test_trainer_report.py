"""The page of a training with Trainer: what was logged, the ledger, and the packs that were trained first."""

from __future__ import annotations

import re
from html import unescape
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from streampack import IterablePackedDataset, prepare_trainer_for_packing
from streampack.inspection.report_writer import PACKS
from streampack.inspection.trainer_report import write_trainer_report
from tests.harness import hf_trainers
from tests.harness.html import parsed
from tests.inspection.test_run_page import after, cells


def packs(**changes: Any) -> IterablePackedDataset:
    settings = {"max_seq_len": 64, "shuffle": True, "epochs": None, "num_lanes": 3}
    return IterablePackedDataset(hf_trainers.samples(), **settings | changes)


def drawn(html: str) -> list[tuple[int, list[int]]]:
    """The step of each pack on a page, and the lengths of its sequences."""
    rows = re.findall(r'aria-label="step (\d+): \d+ sequences.*?</div>', html, re.DOTALL)
    bodies = re.findall(r'<div class="pack".*?</div>', html, re.DOTALL)
    assert len(rows) == len(bodies)
    return [
        (int(step), [int(length) for length in re.findall(r"sequence \d+, (\d+) tokens", body)])
        for step, body in zip(rows, bodies, strict=True)
    ]


@pytest.mark.parametrize("changes", [{}, {"balance_window": 4}, {"epochs": 1}], ids=str)
def test_the_page_has_the_log_the_ledger_and_the_first_packs(tmp_path: Path, changes: dict[str, Any]) -> None:
    trainer = hf_trainers.trainer_of(
        tmp_path, max_steps=5, per_device_train_batch_size=1, gradient_accumulation_steps=2
    )
    prepare_trainer_for_packing(trainer, train_dataset=packs(**changes), eval_dataset=packs(epochs=1))
    trainer.train()
    evaluated = trainer.evaluate()["eval_loss"]
    path = write_trainer_report(trainer)
    assert path == tmp_path / "report.html"
    html = path.read_text()
    parsed(html)
    found = cells(unescape(html))
    losses = hf_trainers.losses(trainer)
    assert list(losses) == [1, 2, 3, 4, 5]
    assert after(found, "loss", 2) == [f"{losses[5]:.3f}", f"at step 5; {losses[1]:.3f} at step 1"]
    assert after(found, "validation loss", 2) == [f"{evaluated:.3f}", f"at step 5; {evaluated:.3f} at step 5"]
    # A second stream of the same packs is the oracle: ten packs were trained, two a step.
    stream = packs(**changes).stream()
    first = list(islice(stream, 10))
    assert after(found, "packed", 1) == [f"{sum(sum(pack.seq_lens) for pack in first):,}"]
    # Trainer logs the padding of the run so far; a row of the table is about steps.
    padding = [
        100 - 100 * sum(sum(pack.seq_lens) for pack in first[i : i + 2]) / 128 for i in range(0, 10, 2)
    ]
    row = [padding[0], padding[-1], min(padding), max(padding), sum(padding) / 5]
    shown = [float(each) for each in after(found, "padding, % of a pack", 7)]
    assert [shown[i] for i in (0, 1, 2, 4, 6)] == pytest.approx(row, abs=0.01)
    of_lane_0 = "balance_window" in changes  # of which alone a window is planned
    expected = [
        (1 + slot // 2, list(pack.seq_lens))
        for slot, pack in enumerate(first)
        if not of_lane_0 or pack.lane == 0
    ][:PACKS]
    assert drawn(html)[: len(expected)] == expected
    assert len(drawn(html)) == PACKS


def test_a_trainer_that_trained_no_packs_is_refused(tmp_path: Path) -> None:
    trainer = hf_trainers.trainer_of(tmp_path, train_dataset=packs())
    with pytest.raises(ValueError, match="call prepare_trainer_for_packing"):
        write_trainer_report(trainer)
    prepare_trainer_for_packing(trainer)
    with pytest.raises(ValueError, match="has trained no packs to the end"):
        write_trainer_report(trainer)
