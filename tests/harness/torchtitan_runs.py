"""Runs of torchtitan's trainer on its debug model, in processes of their own, and the same training without it."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from streampack import IGNORE_INDEX, IterablePackedDataset, PackedDataLoader, summed_cross_entropy
from streampack.packing.batch import Batch
from tests.harness.torchtitan_cpu import KILL_AT, LOG, pretend

ROOT = Path(__file__).resolve().parents[2]
SEQ_LEN = 256  # two blocks of flex attention, which context parallelism needs
PACKS_PER_STEP = 4
SETTINGS: dict[str, Any] = {"num_lanes": 4, "shuffle": True, "seed": 5, "padding_idx": 0}
FLAGS = (
    "--training.mixed_precision_param=float32", f"--training.seq_len={SEQ_LEN}", "--training.local_batch_size=2",
    f"--training.global_batch_size={PACKS_PER_STEP}", "--checkpoint.enable", "--checkpoint.interval=2",
)  # fmt: skip


def corpus() -> list[dict[str, list[int]]]:
    """Rows of tokens of which some are not trained."""
    draw = random.Random(0)
    rows = []
    for _ in range(300):
        tokens = [draw.randrange(1, 2048) for _ in range(draw.randrange(2, 150))]
        prompt = draw.randrange(len(tokens) - 1)
        rows.append({"tokens": tokens, "labels": [IGNORE_INDEX] * prompt + tokens[prompt:]})
    return rows


def debugmodel() -> Any:
    """torchtitan's config; a tokenizer is in the working directory."""
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    from streampack.integrations.torchtitan import StreampackDataLoader

    config = llama3_debugmodel()
    config.hf_assets_path = "."
    config.dataloader = StreampackDataLoader.Config(source=corpus(), settings=SETTINGS)
    return config


def train(
    folder: Path,
    steps: int,
    *flags: str,
    ranks: int = 1,
    kill_at: int | None = None,
    module: str = "tests.harness.torchtitan_runs",
    to_fail: bool = False,
) -> list[dict[str, Any]]:
    """Run the trainer in ``folder``, until it ends or all ranks die after the step ``kill_at``; what each step logged.

    With ``to_fail``, a run that fails is returned as one entry with its ``error``.
    """
    log = folder / "log.jsonl"
    log.unlink(missing_ok=True)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    shared = os.environ | {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}", "OMP_NUM_THREADS": "1", LOG: str(log), "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), KILL_AT: str(kill_at),
    }  # fmt: skip
    command = [
        sys.executable, "-W", "ignore", "-m", "tests.harness.torchtitan_cpu", "--module", module, "--config",
        "debugmodel", *(FLAGS if module == __name__ else ()), f"--training.steps={steps}", *flags,
    ]  # fmt: skip
    processes = [
        subprocess.Popen(
            command, cwd=folder, env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        errors = [process.communicate(timeout=300)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    if to_fail:
        assert all(codes), "it did not fail"
        return [{"error": errors[0]}]
    assert codes == [0 if kill_at is None else -signal.SIGKILL] * ranks, errors[0]
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def plain_losses(folder: Path, steps: int) -> list[float]:
    """Train the debug model from the checkpoint of step 0 in ``folder``, each sequence by itself, without its trainer.

    Neither packs, masks nor labels of torchtitan are used: only the model, the optimizer and the schedule.
    """
    pretend()
    import torch.distributed.checkpoint as dcp

    config = debugmodel()
    model = config.model_spec.model.build()
    model.init_weights(buffer_device=None)
    weights = model.state_dict()
    dcp.load(weights, checkpoint_id=folder / "outputs" / "checkpoint" / "step-0")
    model.load_state_dict(weights)
    optimizers = config.optimizer.build(model_parts=[model])
    schedule = config.lr_scheduler.build(optimizers=optimizers, training_steps=steps)
    packs = IterablePackedDataset(corpus(), max_seq_len=SEQ_LEN, epochs=None, **SETTINGS)
    batches = iter(PackedDataLoader(packs, batch_size=PACKS_PER_STEP))
    losses = []
    for _ in range(steps):
        batch = next(batches)
        optimizers.zero_grad()
        total = 0.0
        for tokens, labels in _sequences(batch):
            positions = torch.arange(len(tokens))[None]
            masks = model.get_attention_masks(positions=positions)
            logits = model(tokens[None], positions=positions, attention_masks=masks)
            loss = summed_cross_entropy(logits, labels[None]) / batch.num_trained
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), config.training.max_norm)
        optimizers.step()
        schedule.step()
        losses.append(total)
    return losses


def _sequences(batch: Batch) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The tokens and unshifted labels of each sequence, without padding."""
    for tokens, labels, fragments in zip(batch.tokens, batch.labels, batch.fragments, strict=True):
        lengths = [fragment.stop - fragment.start for fragment in fragments]
        whole = sum(lengths)
        yield from zip(tokens[:whole].split(lengths), labels[:whole].split(lengths), strict=True)


if __name__ == "__main__":
    print(json.dumps(plain_losses(Path(sys.argv[1]), int(sys.argv[2]))))
