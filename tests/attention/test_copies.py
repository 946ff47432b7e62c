"""Copies between the host and a device in steps of training, in evaluation and in scoring, on a stand-in device."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from streampack import (
    Batch,
    FlatteningCollator,
    IterablePackedDataset,
    collate_packed,
    prepare_model_for_packing,
    score,
)
from streampack.attention import varlen
from streampack.losses import summed_cross_entropy
from streampack.training import run
from streampack.training.evaluation import HeldOut, evaluate
from streampack.training.meters import CountMeter
from streampack.training.progress import read_metrics
from streampack.training.run import Run
from streampack.training.world import World
from tests.harness import hf_models, stand_in_device
from tests.harness.preferences import dpo_config
from tests.harness.processes import run_ranks
from tests.harness.recipes_on import RECIPES, place_recipes_on
from tests.harness.stand_in_device import Copy
from tests.harness.tiny import lora_config, mixed_config, tiny_config

CPU = torch.device("cpu")
SETTINGS: dict[str, Any] = {
    "run_val_every_n_steps": None, "save_every_n_steps": None, "max_steps": 3, "verify_isolation": False,
    "clip_grad_norm": 1.0, "seed": 5, "dtype": "fp32",
}  # fmt: skip
CHANGES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "full": (mixed_config, {"loss_norm": "sample", "log_rows": True, "attention": "dense"}),
    "lora": (lora_config, {"attention": "varlen"}),
    "dpo": (dpo_config, {"attention": "varlen"}),
    "pretrain": (
        tiny_config,
        {"z_loss": 1e-4, "document_masking": False, "data.split_across_pack": True, "attention": "dense"},
    ),
}
# Copies to the device: of a micro-batch, and of these those in page-locked memory, which grow with its tokens. A step
# has one more, of its counts.
COPIES = {"full": (9, 4), "lora": (4, 4), "dpo": (9, 6), "pretrain": (5, 4)}
# Reads of a logged step: its sums, those since the last log, the norm of gradients; and by source, by row, of pairs.
READS = {"full": 3 + 1 + 6, "lora": 3, "dpo": 3 + 1, "pretrain": 3}


def train(name: str, folder: Path, there: bool) -> list[Any]:
    """Train three steps by a recipe and log the last; return the copies, with marks where steps begin."""
    make, changes = CHANGES[name]
    config = make(folder, **SETTINGS | changes)
    config.log_every_n_steps = 3
    with pytest.MonkeyPatch.context() as patch, stand_in_device.noted() as copies:
        patch.setattr(Run, "end", lambda run, _: copies.append("end"))
        if there:
            device = stand_in_device.set_up()
            place_recipes_on(device, patch, place=stand_in_device.moved)
            patch.setattr(varlen, "_attend_sequences", stand_in_device.kernel)
            build, start, log = run.build_loader, CountMeter.start, CountMeter.metrics
            cuda = torch.device("cuda")  # for which batches are pinned
            patch.setattr(run, "build_loader", lambda *args, **more: build(*args, **more | {"device": cuda}))
            patch.setattr(CountMeter, "start", lambda meter: (copies.append("step"), start(meter)))
            patch.setattr(CountMeter, "metrics", lambda meter: (copies.append("log"), log(meter))[1])
        RECIPES[name].train(config)
    return copies


@pytest.mark.parametrize("name", CHANGES)
def test_a_step_waits_for_no_copy(name: str, tmp_path: Path) -> None:
    """And it has the losses that it has on the CPU."""
    for place in ("cpu", "there"):
        (tmp_path / place).mkdir()
    train(name, tmp_path / "cpu", False)
    [copies] = run_ranks(train, 1, name, tmp_path / "there", True)

    ours, wanted = (read_metrics(tmp_path / place / "out" / "metrics.jsonl")[3] for place in ("there", "cpu"))
    names = [each for each in wanted if "loss" in each or each.startswith(("rewards/", "grad_norm"))]
    assert {each: ours[each] for each in names} == pytest.approx(
        {each: wanted[each] for each in names}, rel=1e-4
    )

    marks = [i for i, each in enumerate(copies) if isinstance(each, str)]
    parts = [(copies[first], copies[first + 1 : last]) for first, last in pairwise(marks)]
    steps = [part for mark, part in parts if mark == "step" and part][-3:]
    assert len(steps) == 3
    for step in steps:
        assert {(copy.kind, copy.blocking) for copy in step} == {("to device", False)}, step
        most, pinned = COPIES[name]
        assert (len(step), sum(copy.pinned for copy in step)) == (2 * most + 1, 2 * pinned), step
    [logged] = [part for mark, part in parts if mark == "log"]
    assert len(logged) == READS[name], logged


def batch() -> Batch:
    rows = [{"tokens": [i] * n, "labels": [i] * n} for i, n in enumerate([9, 14, 20, 5, 11, 3], 1)]
    return collate_packed(list(IterablePackedDataset(rows, max_seq_len=32, num_lanes=1)))


def flat() -> dict[str, Any]:
    rows = [{"tokens": [i] * n, "labels": [i] * n} for i, n in enumerate([7, 3, 4], 1)]
    return FlatteningCollator()(rows)


def step_of(family: str, attention: str, make: Callable[[], Any]) -> list[Copy]:
    """Train a step of a transformers model on the device; return the copies of the step."""
    given, device = make(), stand_in_device.set_up()
    model: Any = hf_models.build(family)
    inputs = prepare_model_for_packing(model, attention=attention)
    assert inputs(batch())  # an unknown model is tried
    stand_in_device.moved(model).train()
    with stand_in_device.noted() as copies, pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen, "_attend_sequences", stand_in_device.kernel)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if isinstance(given, Batch):
            given = given.to(device)
        else:
            given = {name: value.to(device, non_blocking=True) for name, value in given.items()}
        output = model(**inputs(given))
        loss = output.loss if "loss" in output else summed_cross_entropy(output.logits, given.labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return copies


@pytest.mark.parametrize(
    ("family", "attention", "make", "most"),
    [
        ("llama", "varlen", batch, 4),
        ("mistral", "dense", batch, 4),
        ("lfm2", "varlen", batch, 10),  # the tokens of the sequences of each size
        ("llama4_text", "dense", flat, 3),
    ],
)
def test_a_step_of_a_transformers_model(family: str, attention: str, make: Any, most: int) -> None:
    [copies] = run_ranks(step_of, 1, family, attention, make)
    assert {(copy.kind, copy.blocking) for copy in copies} == {("to device", False)}
    assert len(copies) == most


def evaluated() -> list[Copy]:
    model: Any = hf_models.build("llama")
    inputs = prepare_model_for_packing(model, attention="dense")
    device = stand_in_device.set_up()
    stand_in_device.moved(model)
    held_out = {"": HeldOut([batch().pin_memory()] * 3)}

    class Logits(torch.nn.Module):
        def forward(self, **given: Any) -> torch.Tensor:
            logits: torch.Tensor = model(**given).logits
            return logits

    with stand_in_device.noted() as copies:
        evaluate(Logits(), held_out, inputs=inputs, loss_norm="token", device=device, world=World())
    return copies


def test_an_evaluation_reads_once() -> None:
    [copies] = run_ranks(evaluated, 1)
    assert [copy.kind for copy in copies] == ["to device"] * 12 + ["to host"]
    assert all(copy.pinned and not copy.blocking for copy in copies[:-1])


def scored(answers: list[Any]) -> tuple[list[Any], list[float]]:
    model: Any = hf_models.build("llama")
    inputs = prepare_model_for_packing(model, attention="dense")
    stand_in_device.set_up()
    stand_in_device.moved(model)
    with stand_in_device.noted() as copies, pytest.MonkeyPatch.context() as patch:
        patch.setattr(stand_in_device.Event, "synchronize", lambda _: copies.append("wait"))
        scores = score(model, answers, max_seq_len=32, inputs=inputs, progress=False)
        return copies, [each.logp for each in scores]


def test_scoring_starts_the_next_pack_before_it_waits_for_one() -> None:
    draw = np.random.default_rng(0)
    answers = [(draw.integers(3, 60, 20).tolist(), [5, 6, 7]) for _ in range(4)]  # one a pack
    [(copies, found)] = run_ranks(scored, 1, answers)
    wanted = [each.logp for each in score(hf_models.build("llama"), answers, max_seq_len=32, progress=False)]
    assert found == pytest.approx(wanted, rel=1e-4)
    assert not any(copy.blocking for copy in copies if copy != "wait")
    kinds = [copy if copy == "wait" else copy.kind for copy in copies]
    waits = [i for i, kind in enumerate(kinds) if kind == "wait"]
    assert [kinds[:i].count("to host") for i in waits] == [4, 6, 8, 8], "of two results a pack"
