"""transformers' Trainer on a stream of packs: against padded batches, on two ranks, killed and resumed."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from streampack import (
    Group,
    IterablePackedDataset,
    PackedDataLoader,
    prepare_trainer_for_packing,
)
from tests.harness import stand_in_device
from tests.harness.hf_trainers import (
    MAX_SEQ_LEN,
    SAMPLES,
    Killed,
    Losses,
    assert_same,
    held_out,
    losses,
    model,
    packed,
    samples,
    settings,
    stream,
    trainer_of,
    truth,
)
from tests.harness.processes import RankError, run_ranks
from tests.oracle.padding import padded

transformers = pytest.importorskip("transformers")


def padded_batches(packs: IterablePackedDataset, rows: list[Any], *, packs_per_step: int) -> list[Any]:
    """Make padded batches of the samples in each of the stream's batches."""
    batches = PackedDataLoader(packs, batch_size=2, packs_per_step=packs_per_step)
    return [
        padded([rows[fragment.row_id[0]] for pack in batch.fragments for fragment in pack])
        for batch in batches
    ]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """The losses of sixteen uninterrupted steps on one rank."""
    trainer = packed(tmp_path_factory.mktemp("straight"), max_steps=16)
    trainer.train()
    return losses(trainer)


def both_curves(folder: Path, make: Callable[[], Any], **changes: Any) -> tuple[Losses, Losses]:
    """Train on packs, and on padded batches of the same samples in a stock Trainer; return the losses of both."""
    rows = samples()
    ours = packed(folder / "packed", stream(rows), of=make(), **changes)
    ours.train()
    theirs = trainer_of(folder / "padded", of=make(), train_dataset=rows, **changes)
    batches = padded_batches(stream(rows), rows, packs_per_step=4)
    assert min(len(batch["input_ids"]) for batch in batches) >= 6  # samples in the two packs of a batch
    theirs.get_train_dataloader = lambda: batches
    theirs.train()
    return losses(ours), losses(theirs)


def test_losses_are_those_of_padded_batches(tmp_path: Path) -> None:
    ours, theirs = both_curves(tmp_path, model, max_steps=15)
    assert ours[15] < 0.8 * ours[1]
    assert_same(ours, theirs, within=1e-4, steps=range(1, 16))


def test_smoothed_losses_are_those_of_padded_batches(tmp_path: Path) -> None:
    plain = packed(tmp_path / "plain", max_steps=3)
    plain.train()
    ours, theirs = both_curves(tmp_path, model, max_steps=3, label_smoothing_factor=0.2)
    assert_same(ours, theirs, within=1e-4, steps=range(1, 4))
    assert abs(ours[1] - losses(plain)[1]) > 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_losses_on_cuda(tmp_path: Path, dtype: torch.dtype) -> None:
    """In 16 bits, by the weights or by autocast: varlen both times. On a CPU, losses are 0.004 apart."""
    curves = both_curves(
        tmp_path, lambda: model(hidden_size=64).to(dtype), use_cpu=False, bf16=True, max_steps=20
    )
    assert_same(*curves, within=5e-2, steps=range(1, 21))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or not find_spec("liger_kernel"), reason="make test-kernels"
)
def test_interpreted_loss_of_liger_is_that_of_the_model(tmp_path: Path) -> None:
    """The kernel makes loss and gradients without the logits; the interpreter cannot run Liger's other kernels."""
    of_loss = {"rope": False, "rms_norm": False, "swiglu": False}
    curves = []
    for liger in (False, True):
        trainer = packed(
            tmp_path / str(liger), max_steps=2, use_liger_kernel=liger, liger_kernel_config=of_loss,
            per_device_train_batch_size=1, per_device_eval_batch_size=4, eval_dataset=held_out(),
        )  # fmt: skip
        trainer.train()
        curves.append(losses(trainer) | {0: trainer.evaluate()["eval_loss"]})
        assert ("liger" in trainer.model.forward.__func__.__module__) == liger
    assert curves[0] == pytest.approx(curves[1], abs=1e-5)


def train_until_killed(folder: Path) -> None:
    """As one of two ranks: read every sample once, evaluate, and train until the process is killed."""
    rank = os.environ["RANK"]
    everything = packed(folder, stream(epochs=1), per_device_train_batch_size=1)
    numbers = [
        token
        for batch in everything.get_train_dataloader()
        for token in batch["input_ids"].flatten().tolist()
        if 0 < token <= SAMPLES
    ]
    (folder / f"seen-{rank}").write_text(json.dumps(numbers))
    trainer = packed(
        folder / "run", max_steps=16, gradient_accumulation_steps=1, per_device_eval_batch_size=1,
        save_strategy="steps", save_steps=4, eval_dataset=held_out(),
    )  # fmt: skip
    trainer.add_callback(Killed(folder / f"log-{rank}", after=10))
    trainer.evaluate()  # accelerate would leave out DDP after it
    trainer.train()


def test_two_ranks_killed_and_resumed_on_one(tmp_path: Path, straight: Losses) -> None:
    assert len(list(held_out())) % 2 == 1
    with pytest.raises(RankError) as killed:
        run_ranks(train_until_killed, 2, tmp_path)
    assert str(killed.value).count("ended with exit code -9") == 2, killed.value

    seen = [json.loads((tmp_path / f"seen-{rank}").read_text()) for rank in range(2)]
    assert min(map(len, seen)) > SAMPLES / 3
    assert sorted(seen[0] + seen[1]) == list(range(1, SAMPLES + 1))  # each exactly once

    entries = [json.loads(line) for line in (tmp_path / "log-0").read_text().splitlines()]
    two_ranks = {entry["step"]: entry["loss"] for entry in entries if "loss" in entry}
    before = {step: straight[step] for step in range(1, 11)}
    assert_same(two_ranks, before, within=1e-5, steps=range(1, 11))
    [evaluated] = [entry["eval_loss"] for entry in entries if "eval_loss" in entry]
    assert evaluated == pytest.approx(truth(model(), samples(26, seed=1)), rel=1e-6)

    resumed = packed(tmp_path / "run", max_steps=16, save_strategy="steps", save_steps=16)
    resumed.train(resume_from_checkpoint=True)
    assert_same(losses(resumed), straight | two_ranks, within=1e-5, steps=range(1, 17))
    assert {entry["step"] for entry in resumed.state.log_history if entry["step"] > 8} == set(range(9, 17))
    assert [entry["epoch"] for entry in resumed.state.log_history if "loss" in entry] == [
        step / 16 for step in range(1, 17)
    ]

    finished = packed(tmp_path / "run", max_steps=16)
    assert finished.train(resume_from_checkpoint=True).global_step == 16
    assert losses(finished) == losses(resumed)


def test_a_resume_on_the_same_topology_is_exact_with_dropout(tmp_path: Path) -> None:
    common: dict[str, Any] = {"save_strategy": "steps", "save_steps": 5, "dataloader_num_workers": 2}
    whole = packed(tmp_path, of=model("gpt2"), **common)
    whole.train()
    again = packed(tmp_path, of=model("gpt2"), **common)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert losses(again) == losses(whole)
    assert not multiprocessing.active_children()  # the workers ended with the training
    assert again.state.log_history[-2]["num_tokens"] == whole.state.log_history[-2]["num_tokens"]
    assert all(
        torch.equal(a, b) for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True)
    )


def test_an_incomplete_checkpoint_is_skipped(
    tmp_path: Path, straight: Losses, caplog: pytest.LogCaptureFixture
) -> None:
    packed(tmp_path, max_steps=16, save_strategy="steps", save_steps=4, save_total_limit=2).train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-12", "checkpoint-16"]
    (tmp_path / "checkpoint-16" / "trainer_state.json").write_text("{")
    resumed = packed(tmp_path, max_steps=16, save_strategy="steps", save_steps=4)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == straight
    (tmp_path / "checkpoint-16" / "trainer_state.json").unlink()  # killed while it was written a second time
    again = packed(tmp_path, max_steps=16)
    again.train(resume_from_checkpoint=True)
    assert losses(again) == straight
    assert caplog.text.count("checkpoint-16 was not written to its end") >= 2

    with pytest.raises(ValueError, match="made with seed=0 and this dataset has seed=1"):
        packed(tmp_path, stream(seed=1)).train(resume_from_checkpoint=str(tmp_path / "checkpoint-12"))
    (tmp_path / "checkpoint-12" / "stream.pt").unlink()
    with pytest.raises(ValueError, match="checkpoint-12 has no stream.pt: it was saved without"):
        packed(tmp_path, max_steps=16).train(resume_from_checkpoint=True)
    shutil.rmtree(tmp_path)
    with pytest.raises(ValueError, match="there is no whole checkpoint in .* to resume from; call train"):
        packed(tmp_path, max_steps=16).train(resume_from_checkpoint=True)


def killed_in_its_first_save(folder: Path) -> None:
    """Train until the process is killed between the files of its first checkpoint."""
    trainer = packed(folder, max_steps=16, save_strategy="steps", save_steps=2)
    trainer._save_rng_state = lambda output_dir: os.kill(os.getpid(), signal.SIGKILL)
    trainer.train()


def test_a_run_killed_in_its_first_save_begins_at_step_0(
    tmp_path: Path, straight: Losses, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RankError, match="ended with exit code -9"):
        run_ranks(killed_in_its_first_save, 1, tmp_path)
    assert {path.name for path in (tmp_path / "checkpoint-2").iterdir()} > {"stream.pt", "model.safetensors"}
    again = packed(tmp_path, max_steps=16, save_strategy="steps", save_steps=16)
    named = str(tmp_path / "checkpoint-2")
    with pytest.raises(ValueError, match="checkpoint-2 was not written to its end; .*=True resumes from the"):
        again.train(resume_from_checkpoint=named)
    again.train(resume_from_checkpoint=True)
    assert_same(losses(again), straight, within=1e-5, steps=range(1, 17))
    assert f"no checkpoint in {tmp_path} was written to its end; training begins at step 0" in caplog.text
    assert packed(tmp_path, max_steps=16).train(resume_from_checkpoint=True).global_step == 16
    text = packed(tmp_path, max_steps=16, save_strategy="no")  # of a command line
    assert text.train(resume_from_checkpoint="True").global_step == 16
    anew = packed(tmp_path, max_steps=2, save_strategy="no")
    assert anew.train(resume_from_checkpoint="False").global_step == 2


def test_a_model_of_model_init_is_prepared_and_the_last_of_two_preparations_counts(
    tmp_path: Path, straight: Losses
) -> None:
    """A cache that Trainer leaves on changes nothing, and is left on in what is saved."""
    args = settings(tmp_path, max_steps=16, use_cache=True)
    trainer = transformers.Trainer(model_init=lambda: model(), args=args, train_dataset=stream(seed=3))
    trainer.remove_callback(transformers.PrinterCallback)
    prepare_trainer_for_packing(trainer)
    callbacks = len(trainer.callback_handler.callbacks)
    prepare_trainer_for_packing(trainer, train_dataset=stream())
    assert len(trainer.callback_handler.callbacks) == callbacks
    trainer.train()
    assert losses(trainer) == straight
    trainer.save_model()
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["use_cache"] is True
    assert "streampack" not in str(saved)


BAD_DATASETS: list[tuple[dict[str, Any], str]] = [
    ({"train_dataset": samples(3)}, "train_dataset is a list; give an IterablePackedDataset"),
    ({"eval_dataset": stream(epochs=None)}, "eval_dataset has epochs=None and would never end"),
    ({"eval_dataset": {"a": stream(epochs=None)}}, "a has epochs=None and would never end"),
    (
        {"packs": stream(epochs=2)},
        "num_train_epochs=3.0 says how often the data is read, and the packs have epochs=2;",
    ),
    ({"packs": stream(epochs=None)}, "the packs have epochs=None; give Iterable.*epochs=1"),
    (
        {"packs": stream(lambda: iter(samples()), num_lanes=1, epochs=1)},
        r"known at its end only \(.*\); set max_steps in TrainingArguments$",
    ),
]


@pytest.mark.parametrize(("changes", "message"), BAD_DATASETS)
def test_bad_datasets_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    packs = changes.get("packs")
    given = {"max_steps": -1} if packs else {"train_dataset": stream()} | changes
    trainer = trainer_of(tmp_path, **given)
    with pytest.raises(ValueError, match=message):
        prepare_trainer_for_packing(trainer, train_dataset=packs)


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        ("args._n_gpu", 2, "this process has 2 GPUs and DataParallel would cut"),
        (
            "accelerator.state.parallelism_config.tp_size",
            2,
            "tp_size is 2: those ranks must see the same packs",
        ),
        ("accelerator.state.parallelism_config.cp_size", 2, "cp_size is 2"),
        ("model._tp_size", 2, "tp_size is 2: those ranks must see the same packs"),
        ("args.average_tokens_across_devices", False, "average_tokens_across_devices=False weighs"),
        ("args.accelerator_config.split_batches", True, "divide per_device_train_batch_size by the number"),
        ("model_accepts_loss_kwargs", False, "LlamaForCausalLM does not take num_items_in_batch"),
    ],
)
def test_bad_settings_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, value: Any, message: str
) -> None:
    trainer = trainer_of(tmp_path, train_dataset=stream())
    if "average" in where or "split" in where:
        monkeypatch.setattr(type(trainer.args), "world_size", 2)
    target = trainer
    *path, name = where.split(".")
    for part in path:
        if getattr(target, part) is None:
            monkeypatch.setattr(target, part, SimpleNamespace(tp_size=1, cp_size=1, sp_size=1))
        target = getattr(target, part)
    monkeypatch.setattr(target, name, value, raising=False)
    with pytest.raises(ValueError, match=message):
        prepare_trainer_for_packing(trainer)


def test_one_line_says_what_is_in_effect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(tmp_path, gradient_accumulation_steps=3, of=model(torch_dtype="bfloat16"))
    inputs = prepare_trainer_for_packing(trainer, train_dataset=stream(), attention="dense")
    packs = len(list(stream(epochs=1)))
    [line] = capsys.readouterr().out.splitlines()
    found = re.fullmatch(
        r"attention=dense, bfloat16 on cpu; a step is 6 packs of about ([\d.]+) samples: (\d+) samples in up to 384 "
        r"tokens; about ([\d.]+)% padding expected", line,
    )  # fmt: skip
    assert found, line
    assert line.startswith(inputs.summary)
    assert float(found[1]) == pytest.approx(SAMPLES / packs, abs=0.1)
    assert float(found[3]) == pytest.approx(
        100 * (1 - sum(len(row["tokens"]) for row in samples()) / packs / MAX_SEQ_LEN), abs=0.1
    )
    # As a user of an H100 is told who loads fp32 and leaves bf16 off.
    summary = "attention=flex, float32 on cuda; varlen refused: flash attention computes in 16 bits"
    module = "streampack.integrations.hf_trainer.hooks.prepare_model_for_packing"
    monkeypatch.setattr(module, lambda *_, **__: replace(inputs, summary=summary))
    prepare_trainer_for_packing(trainer, attention="dense")
    assert f"{summary}; set bf16=True in TrainingArguments" in capsys.readouterr().out
    with patch.object(type(trainer.args), "process_index", 1):
        prepare_trainer_for_packing(trainer, attention="dense")
    assert not capsys.readouterr().out


def test_answers_that_share_a_prompt_are_refused(tmp_path: Path) -> None:
    pair = Group([5, 6, 7, 8, 9], [-100, -100, 7, 8, 9], lengths=[2, 2, 1], parents=[-1, 0, 0])
    packs = IterablePackedDataset([{"group": pair}] * 4, max_seq_len=16, encoder=lambda row: row["group"])
    with pytest.raises(
        ValueError, match="share a prompt, and cross-entropy would .*; set share_prefix=False"
    ):
        packed(tmp_path, packs, max_steps=1).train()


def test_a_step_that_trains_nothing_is_an_error(tmp_path: Path) -> None:
    cut_off = [{"tokens": [5] * 90, "labels": [-100] * 70 + [5] * 20}] * 40

    def train(logging_steps: int, **changes: Any) -> Any:
        args = {"max_steps": 3, "logging_steps": logging_steps, "gradient_accumulation_steps": 1}
        packs = IterablePackedDataset(cut_off, max_seq_len=64, overlong="truncate", num_lanes=1, **changes)
        trainer = transformers.Trainer(model(), settings(tmp_path, **args), train_dataset=packs)
        prepare_trainer_for_packing(trainer)
        return trainer.train()

    for logging_steps in (1, 100):
        with pytest.raises(
            ValueError, match=r"of \d step\(s\) trained nothing: no label of their tokens is trained"
        ):
            train(logging_steps)
    assert train(1, untrained="keep").training_loss == 0.0


def live_mask_bytes() -> int:
    """Count the bytes of the dense masks that are alive, as sdpa takes them: ``[batch, 1, query, key]``."""
    found = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.dtype == torch.bool]
    found = [each for each in found if each.ndim == 4 and each.shape[-2:] == (MAX_SEQ_LEN, MAX_SEQ_LEN)]
    return sum(
        storage.nbytes() for storage in {each.data_ptr(): each.untyped_storage() for each in found}.values()
    )


def test_masks_are_made_one_micro_batch_at_a_time(tmp_path: Path) -> None:
    """Trainer collects the batches of a step before it begins: with their masks, 16 of 8,192 tokens take 1 GiB."""
    trainer = trainer_of(tmp_path, max_steps=2, gradient_accumulation_steps=8, eval_dataset=held_out())
    prepare_trainer_for_packing(trainer, train_dataset=stream(), attention="dense", verify_isolation=False)
    seen: list[int] = []
    trainer.model.register_forward_pre_hook(lambda *_: seen.append(live_mask_bytes()))
    trainer.train()
    assert seen == [2 * MAX_SEQ_LEN**2] * 16
    seen.clear()
    trainer.evaluate()
    assert seen == [8 * MAX_SEQ_LEN**2]


def copies_of_a_step(folder: Path) -> dict[str, list[stand_in_device.Copy]]:
    """The copies that one step makes: until its forward pass, in it, and after it."""
    device = stand_in_device.set_up()
    trainer = trainer_of(folder)
    trainer.args.dataloader_pin_memory = True  # which Trainer switches off on a CPU
    stand_in_device.moved(trainer.model)
    backward, found = trainer.accelerator.backward, {}
    with patch.object(type(trainer.args), "device", device), stand_in_device.noted() as copies:
        prepare_trainer_for_packing(trainer, train_dataset=stream(), attention="dense")
        trainer.state.max_steps = 12

        def counted(loss: Any) -> None:
            found.setdefault("forward", []).extend(copies)
            copies.clear()
            backward(loss)

        trainer.accelerator.backward = counted
        copies.clear()
        batches, count = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 2, device)
        found["before"] = [*copies]
        copies.clear()
        for inputs in batches:
            trainer.training_step(trainer.model, inputs, count)
        found["after"] = [*copies]
    return found


def test_the_next_batch_is_queued_before_a_steps_backward_and_no_copy_waits(tmp_path: Path) -> None:
    """Tokens, labels, positions and lengths of two batches before the step, and those of the next before backward."""
    [found] = run_ranks(copies_of_a_step, 1, tmp_path)
    assert [len(found[name]) for name in ("before", "forward", "after")] == [8, 4, 0]
    assert {(copy.kind, copy.blocking, copy.pinned) for name in found for copy in found[name]} == {
        ("to device", False, True)
    }
    assert sum(copy.size for copy in found["before"]) <= 25 * 4 * MAX_SEQ_LEN


# Before the first step, samples of a pack must not see one another.


@contextmanager
def leaking_in_training() -> Iterator[None]:
    """Let llamas ignore boundaries in training mode; they are a proven family, so preparing does not try them."""
    kind = transformers.LlamaForCausalLM
    own = kind.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.training:
            for name in ("position_ids", "attention_mask", "cu_seq_lens_q"):
                kwargs.pop(name, None)
        return own(self, *args, **kwargs)

    with patch.object(kind, "forward", forward):
        yield


def prepared(folder: Path, **changes: Any) -> Any:
    settings = {name: changes.pop(name) for name in ("verify_isolation",) if name in changes}
    trainer = trainer_of(folder, **{"max_steps": 2, **changes})
    prepare_trainer_for_packing(trainer, train_dataset=stream(), **settings)
    return trainer


def test_a_leak_in_training_mode_stops_the_training(tmp_path: Path) -> None:
    with leaking_in_training():
        trainer = prepared(tmp_path)
        with pytest.raises(ValueError) as caught:
            trainer.train()
        message = str(caught.value)
        assert "in training mode, sample 3 has gradients at other tokens, " in message
        assert message.endswith(
            "the training was stopped before its first step; "
            "prepare_trainer_for_packing(..., verify_isolation=False) lets it train like this"
        )
        assert trainer.state.global_step == 0
        prepared(tmp_path, verify_isolation=False).train()


def test_the_check_changes_no_step(tmp_path: Path) -> None:
    """Weights and dropout are the same with the check and without."""
    curves = []
    for verified in (True, False):
        of = model("gpt2", resid_pdrop=0.2)
        trainer = prepared(tmp_path / str(verified), of=of, verify_isolation=verified, max_steps=4)
        trainer.train()
        curves.append((losses(trainer), trainer.model.state_dict()))
    (ours, weights), (theirs, plain) = curves
    assert ours == theirs
    assert all(torch.equal(weights[name], plain[name]) for name in plain)
