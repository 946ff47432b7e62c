"""Samples, a model, settings and trainers for tests of transformers' trainers."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from streampack import IterablePackedDataset, prepare_trainer_for_packing

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

VOCAB, MAX_SEQ_LEN, SAMPLES = 1024, 64, 600
Losses = dict[int, float]


def samples(count: int = SAMPLES, *, seed: int = 0) -> list[dict[str, list[int]]]:
    """Make samples of a unique number, a prompt and an answer, which alone is trained and can be learned."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(count):
        prompt, answer = torch.randint(1, 9, (2,), generator=generator).tolist()
        question = torch.randint(700, 720, (prompt,), generator=generator).tolist()
        tokens = [i + 1, *question, *(750 + (prompt + j) % 7 for j in range(answer))]
        rows.append({"tokens": tokens, "labels": [-100] * (1 + prompt) + tokens[1 + prompt :]})
    return rows


def model(family: str = "llama", **changes: Any) -> Any:
    sizes: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }  # fmt: skip
    if family == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.0}
    special = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    config = transformers.AutoConfig.for_model(family, vocab_size=VOCAB, **special, **(sizes | changes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config)


def settings(folder: Path, kind: Any = None, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": 12, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2, "learning_rate": 5e-3, "logging_steps": 1, "save_strategy": "no",
        "report_to": "none", "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False,
    }  # fmt: skip
    return (kind or transformers.TrainingArguments)(**(given | changes))


def losses(trainer: Any) -> Losses:
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


def assert_same(ours: Losses, theirs: Losses, *, within: float, steps: Iterable[int]) -> None:
    steps = list(steps)
    assert list(ours) == list(theirs) == steps
    worst = max(abs(ours[step] - theirs[step]) for step in steps)
    assert worst <= within, f"{worst} apart: {ours} and {theirs}"


class Killed(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
    """Writes every log entry to a file, and kills the process after a step."""

    def __init__(self, file: Path, *, after: int) -> None:
        self.file = file
        self.after = after

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(state.log_history[-1]) + "\n")

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.after:
            os.kill(os.getpid(), signal.SIGKILL)


def stream(rows: Any = None, **changes: Any) -> IterablePackedDataset:
    given: dict[str, Any] = {"max_seq_len": MAX_SEQ_LEN, "shuffle": True, "epochs": 2, "num_lanes": 4}
    return IterablePackedDataset(samples() if rows is None else rows, **(given | changes))


def trainer_of(folder: Path, *, of: Any = None, **changes: Any) -> Any:
    """Make a Trainer that prints nothing."""
    of = model() if of is None else of
    names = ("train_dataset", "eval_dataset", "data_collator", "compute_metrics")
    given = {name: changes.pop(name) for name in names if name in changes}
    trainer = transformers.Trainer(of, settings(folder, **changes), **given)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def packed(folder: Path, packs: Any = None, **changes: Any) -> Any:
    """Make a Trainer on a stream, which it gets late: its constructor refuses data without a length."""
    trainer = trainer_of(folder, **changes)
    prepare_trainer_for_packing(trainer, train_dataset=stream() if packs is None else packs)
    return trainer


def held_out() -> IterablePackedDataset:
    """Make an odd number of packs, so that one of two ranks has a null pack at the end."""
    return stream(samples(26, seed=1), shuffle=False, epochs=1, num_lanes=2)


def truth(model: Any, rows: list[Any]) -> float:
    """Compute the mean loss over all trained tokens, one sample at a time."""
    total, count = 0.0, 0
    model.eval()
    for row in rows:
        if trained := sum(label != -100 for label in row["labels"][1:]):
            tokens, labels = torch.tensor([row["tokens"]]), torch.tensor([row["labels"]])
            with torch.no_grad():
                total += model(input_ids=tokens, labels=labels, use_cache=False).loss.item() * trained
            count += trained
    return total / count
