"""Epochs under transformers' Trainer: their steps, callbacks at their ends, and data that ends early."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from streampack import IterablePackedDataset, PackedDataLoader
from streampack.integrations.hf_trainer.epochs import plan_epochs
from tests.harness.hf_trainers import held_out, losses, packed, samples, stream
from tests.harness.processes import run_ranks

transformers = pytest.importorskip("transformers")


def steps_of(packs: IterablePackedDataset) -> int:
    """Count steps of two batches of two packs."""
    return len(list(PackedDataLoader(packs, batch_size=2, packs_per_step=4))) // 2


def entries(trainer: Any, name: str) -> dict[int, Any]:
    return {entry["step"]: entry[name] for entry in trainer.state.log_history if name in entry}


class Epochs(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
    """Records the steps at which epochs begin and end."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen.append(("begin", state.global_step))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen.append(("end", state.global_step))


PER_EPOCH = {"max_steps": -1, "save_strategy": "epoch", "eval_strategy": "epoch", "logging_strategy": "epoch"}


def test_epochs_of_map_style_data_are_counted(tmp_path: Path) -> None:
    rows = samples(150)
    ends = [steps_of(stream(rows, epochs=epochs)) for epochs in (1, 2, 3)]
    trainer = packed(tmp_path, stream(rows, epochs=1), eval_dataset=held_out(), **PER_EPOCH)
    trainer.add_callback(noted := Epochs())
    assert trainer.train().global_step == trainer.state.max_steps == ends[2]
    assert entries(trainer, "eval_loss").keys() == entries(trainer, "loss").keys() == set(ends)
    assert [trainer.state.log_history[i]["epoch"] for i in range(0, 6, 2)] == [1, 2, 3]
    assert noted.seen == [
        ("begin", 0), ("end", ends[0]), ("begin", ends[0]), ("end", ends[1]), ("begin", ends[1]), ("end", ends[2])
    ]  # fmt: skip
    # Of the last step; then 0.
    assert entries(trainer, "learning_rate")[ends[2]] == pytest.approx(5e-3 / ends[2])
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {f"checkpoint-{end}" for end in ends}
    assert entries(trainer, "num_tokens")[ends[0]] == sum(len(row["tokens"]) for row in rows)
    assert (trainer.args.max_steps, trainer.train_dataset.epochs) == (-1, 1)

    again = packed(tmp_path, stream(rows, epochs=1), eval_dataset=held_out(), **PER_EPOCH)
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{ends[0]}"))
    assert losses(again) == losses(trainer)
    assert entries(again, "eval_loss") == entries(trainer, "eval_loss")
    assert [entry["epoch"] for entry in again.state.log_history if "loss" in entry] == [1, 2, 3]


def test_a_fraction_of_an_epoch_is_trained(tmp_path: Path) -> None:
    rows = samples(150)
    first = steps_of(stream(rows, epochs=1))
    second = steps_of(stream(rows, epochs=2)) - first
    trainer = packed(tmp_path, stream(rows, epochs=2), max_steps=-1, num_train_epochs=1.5, save_steps=3)
    assert trainer.train().global_step == first + math.ceil(second / 2)
    assert trainer.state.log_history[-2]["epoch"] == pytest.approx(1.5, abs=0.5 / second + 1e-9)


def test_epochs_of_a_stream_are_estimated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = samples(300)
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    expected = steps_of(stream(str(file), epochs=2))
    common: dict[str, Any] = {
        "max_steps": -1,
        "num_train_epochs": 2,
        "save_strategy": "steps",
        "save_steps": 500,
    }
    real = IterablePackedDataset.estimate

    def estimate_times(factor: float) -> None:
        def estimate(packs: IterablePackedDataset, **changes: Any) -> Any:
            found = real(packs, **changes)
            return found._replace(packs=found.packs * factor)

        monkeypatch.setattr(IterablePackedDataset, "estimate", estimate)

    estimate_times(1.3)
    trainer = packed(tmp_path / "run", stream(str(file), epochs=1), **common)
    assert trainer.train().global_step == expected < trainer.state.max_steps <= expected * 1.4
    assert "an epoch is at most" in caplog.text
    assert "estimated from 300 samples; training ends with the data, or there" in caplog.text
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == [f"checkpoint-{expected}"]
    assert [entry["epoch"] for entry in trainer.state.log_history[-2:]] == [
        2.0,
        2.0,
    ]  # the last step and the summary
    assert f"all 2 epochs were read after step {expected}" in caplog.text
    assert "epochs=None" not in caplog.text, "which this way of counting refuses"

    estimate_times(0.5)
    short = packed(tmp_path / "short", stream(str(file), epochs=1), **common)
    assert short.train().global_step < expected
    assert f"max_steps={short.state.max_steps} was estimated, and the data goes on behind it" in caplog.text


def test_data_that_ends_early_is_logged_and_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The last steps before the end of the data are logged and saved."""
    rows = samples(100)
    steps = steps_of(stream(rows, epochs=1))
    assert steps % 4
    changes: dict[str, Any] = {
        "max_steps": 1000, "save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4,
        "logging_steps": 4, "eval_dataset": held_out(),
    }  # fmt: skip
    ends = {*range(4, steps, 4), steps}
    for checkpoint in (None, str(tmp_path / "checkpoint-4")):
        caplog.clear()
        trainer = packed(tmp_path, stream(rows, epochs=1), **changes)
        trainer.train(resume_from_checkpoint=checkpoint)
        assert entries(trainer, "loss").keys() == entries(trainer, "eval_loss").keys() == ends
        assert {int(path.name.split("-")[1]) for path in tmp_path.glob("checkpoint-*")} == ends
        assert caplog.text.count(f"the data ended after step {steps} of max_steps=1000") == 1
        assert trainer.state.global_step == steps

    over = packed(tmp_path, stream(rows, epochs=1), **changes)
    assert over.train(resume_from_checkpoint=True).global_step == steps  # no data is left


def planned_and_made() -> list[tuple[int, ...]]:
    """As one of two ranks: return an epoch's steps as planned and as made by the loader."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    found = []
    for lanes, batch_size, per_step in ((4, 2, 4), (3, 1, 4), (3, 2, 6), (2, 1, 2)):
        packs = stream(samples(60), epochs=1, num_lanes=lanes)
        loader = PackedDataLoader(packs, batch_size=batch_size, packs_per_step=per_step)
        plan = plan_epochs(loader, 1)
        found.append((plan.total, len(list(loader)) // loader.batches_per_step))
    dist.destroy_process_group()
    return found


@pytest.mark.filterwarnings("ignore:2 ranks do not divide 3 lanes evenly")
def test_steps_of_two_ranks_are_counted() -> None:
    for found in run_ranks(planned_and_made, 2):
        assert len(found) == 4
        assert all(planned == made > 1 for planned, made in found), found
