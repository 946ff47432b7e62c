"""Steps under transformers' Trainer: of epochs, of data that ends early, of other ranks, and how even they are."""

from __future__ import annotations

import json
import math
import multiprocessing
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from streampack import IterablePackedDataset, PackedDataLoader
from tests.harness.hf_trainers import assert_same, held_out, losses, packed, samples, stream
from tests.harness.processes import RankError, run_ranks

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
    rows = samples(100)
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    expected = steps_of(stream(str(file), epochs=2))
    common = {"max_steps": -1, "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 500}
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
    assert "estimated from 100 samples; training ends with the data, or there" in caplog.text
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == [f"checkpoint-{expected}"]
    assert [entry["epoch"] for entry in trainer.state.log_history[-2:]] == [2, 2], (
        "the last step, the summary"
    )
    assert f"the data ended after step {expected} of max_steps={trainer.state.max_steps}" in caplog.text

    estimate_times(0.5)
    short = packed(tmp_path / "short", stream(str(file), epochs=1), **common)
    assert short.train().global_step < expected
    assert f"max_steps={short.state.max_steps} was estimated and leaves data untrained" in caplog.text


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

    full, overlong = ({"tokens": [5] * length, "labels": [5] * length} for length in (64, 90))
    packs = stream([full] * 8 + [overlong], shuffle=False, epochs=1, num_lanes=1, overlong="drop")
    (trainer := packed(tmp_path, packs, max_steps=9)).train()
    assert trainer.train.__self__.ledger.dropped["overlong"] == 90, "behind the last pack"


def test_samples_too_long_for_a_pack_are_told_before_the_first_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = samples(60)
    rows[50] = {"tokens": [5] * 90, "labels": [5] * 90}
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stops = r"1 of 60 samples looked at are too long for max_seq_len=64, .*% of the tokens, and the run would stop at"
    with pytest.raises(ValueError, match=stops):
        packed(tmp_path, stream(str(file), epochs=1), max_steps=-1)
    endless = packed(tmp_path, stream(str(file), epochs=None, num_lanes=1), max_steps=1)
    with pytest.raises(ValueError, match="rows.jsonl:51 has 90 tokens, max_seq_len is 64"):
        endless.train()
    assert re.search(stops, caplog.text)
    caplog.clear()
    packed(tmp_path, stream(rows, epochs=None, overlong="drop"), max_steps=1).train()
    assert "1 of 60 samples looked at are too long for max_seq_len=64: overlong=drop loses " in caplog.text
    caplog.clear()
    packed(tmp_path, stream(rows, epochs=None, overlong="split"), max_steps=1).train()
    assert "too long" not in caplog.text


class Look(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
    """Looks at a pack of the training data; interrupts the training in the middle of step 6."""

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        next(iter(given["train_dataloader"].loader.dataset))

    def on_substep_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == 5:
            raise KeyboardInterrupt


def test_checkpoints_are_of_the_training_whoever_else_reads_its_data(tmp_path: Path) -> None:
    """They said that the run was where an evaluation of the same packs, or a look, had come to: a resume lost data."""
    saved = {"max_steps": 8, "save_strategy": "steps", "save_steps": 2}
    straight = packed(tmp_path / "straight", stream(samples(100)), **saved)
    straight.train()
    assert straight.train.__self__.steps.state_dict()["slot"] == 3 * 4, "5 steps are an epoch"
    for changes in ({"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}, {}):
        packs = stream(samples(100))
        trainer = packed(tmp_path / f"{len(changes)}", packs, eval_dataset=packs, **saved, **changes)
        trainer.add_callback(Look())
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        trainer._save_checkpoint(trainer.model, None)
        for step in (2, 5):
            again = packed(tmp_path / "again", packs, eval_dataset=packs, **saved, **changes)
            again.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-{step}")
            assert losses(again) == losses(straight)


# Other ranks than before, and lanes that the ranks do not divide.


def train(folder: Path, resume: Path | None = None, lanes: int = 1, accumulation: int = 2) -> Any:
    packs = stream(samples(60), epochs=1, num_lanes=None if resume else lanes)
    trainer = packed(
        folder, packs, max_steps=-1, num_train_epochs=2, save_strategy="steps", save_steps=3, save_only_model=False,
        gradient_accumulation_steps=accumulation,
    )  # fmt: skip
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


# What is logged of waiting for data and of the ranks' shares of a step, against the packs' own costs.


def costs_and_logs(folder: Path) -> tuple[list[int], list[dict[str, Any]], float]:
    """As a rank: return the attention costs of its parts of the steps, what its Trainer logged, and its waiting."""
    rows = samples(200)
    trainer = packed(
        folder, stream(rows), max_steps=-1, num_train_epochs=2, logging_strategy="epoch", eval_strategy="steps",
        eval_steps=3, eval_dataset=held_out(), per_device_eval_batch_size=1, dataloader_num_workers=1,
    )  # fmt: skip
    loader = PackedDataLoader(stream(rows), batch_size=2, packs_per_step=8)
    lengths = [[f.stop - f.start for pack in batch.fragments for f in pack] for batch in loader]
    costs = [sum(length * (length + 1) // 2 for length in batch) for batch in lengths]
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


def test_a_batch_size_that_trainer_finds_trains_the_same_packs(tmp_path: Path) -> None:
    """After a batch that did not fit, the run begins again with the first pack; a resume keeps the size."""
    small = packed(tmp_path / "small", per_device_train_batch_size=1, max_steps=4)
    small.train()

    changes: dict[str, Any] = {
        "auto_find_batch_size": True,
        "dataloader_num_workers": 2,
        "save_strategy": "steps",
    }
    found = packed(tmp_path / "found", max_steps=4, save_steps=2, **changes)
    sizes = []
    forward = type(found.model).forward

    def of_one_pack(model: Any, **inputs: Any) -> Any:
        sizes.append(len(inputs["input_ids"]))
        if sizes[-1] == 2 and "labels" in inputs:  # the leak probe has none
            raise RuntimeError("CUDA out of memory.")
        return forward(model, **inputs)

    found.model.forward = of_one_pack.__get__(found.model)
    found.train()
    assert 2 in sizes
    assert_same(losses(found), losses(small), within=1e-5, steps=range(1, 5))
    assert not multiprocessing.active_children()

    resumed = packed(tmp_path / "found", max_steps=4, **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "found/checkpoint-2"))
    assert_same(losses(resumed), losses(found), within=1e-5, steps=range(1, 5))
