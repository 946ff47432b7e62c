"""Other ranks than before, and lanes that the ranks do not divide, under Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.hf_trainers import losses, packed, samples, stream
from tests.harness.processes import RankError, run_ranks


def train(folder: Path, resume: Path | None = None, lanes: int = 1, accumulation: int = 2) -> Any:
    packs = stream(samples(60), epochs=1, num_lanes=None if resume else lanes)
    trainer = packed(
        folder,
        packs,
        max_steps=-1,
        num_train_epochs=2,
        save_strategy="steps",
        save_steps=3,
        save_only_model=False,
        gradient_accumulation_steps=accumulation,
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return losses(trainer), trainer.state.max_steps, trainer.state.global_step


@pytest.mark.filterwarnings("ignore:.*evenly:UserWarning")
def test_a_run_of_one_lane_keeps_its_steps_on_two_ranks(tmp_path: Path) -> None:
    expected, *steps = train(tmp_path / "one")
    assert len(expected) > 5
    for found, *counted in run_ranks(train, 2, tmp_path / "two", tmp_path / "one" / "checkpoint-3"):
        assert counted == steps
        assert not found or found == pytest.approx(expected, abs=2e-4)


def test_twice_the_ranks_keep_the_steps_of_epochs_or_are_refused(tmp_path: Path) -> None:
    """A step had twice the packs: the run ended at half of its steps, and the second half of the data was not read."""
    expected, *steps = train(tmp_path / "one", lanes=4)
    resume = tmp_path / "one" / "checkpoint-3"
    with pytest.raises(RankError, match=r"steps of 4 packs, and .* 8; .* gradient_accumulation_steps"):
        run_ranks(train, 2, tmp_path / "two", resume, 4)
    for found, *counted in run_ranks(train, 2, tmp_path / "two", resume, 4, 1):
        assert counted == steps
        assert not found or found == pytest.approx(expected, abs=2e-4)


def train_unevenly(folder: Path) -> None:
    packed(folder, stream(samples(60), epochs=1, num_lanes=3), max_steps=-1, num_train_epochs=1).train()


def test_lanes_that_the_ranks_do_not_divide_are_refused(tmp_path: Path) -> None:
    """A step has more batches than Trainer takes: it ended after a third of the epoch."""
    with pytest.raises(RankError, match=r"num_lanes=3 .* 2 ranks: .* Trainer takes 2"):
        run_ranks(train_unevenly, 2, tmp_path)
