"""Measure one row. It has a process of its own, for its compiled graphs and memory, and because it may run out of it.

``python -m benchmarks.gpu.row '{"row": ..., "device": ..., "settings": ...}'`` prints the outcome as its last line.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.batches import Step, samples_of, steps_of
from benchmarks.gpu.model import MODELS, utilization
from benchmarks.gpu.settings import ROWS, Settings

# Turns a batch into the model's arguments and the labels.
Feed = Callable[[Any], tuple[Mapping[str, Any], torch.Tensor]]


def measure(name: str, settings: Settings, *, device: str) -> dict[str, Any]:
    """Train on the row's batches: warm up, then time every step but the last, which may not be full.

    A step is timed from batches on the host until the device is idle: transfer, mask, forward, backward, optimizer.
    Making the batches is not timed; benchmarks.density measures that.
    """
    row = ROWS[name]
    if row.needs and not any(map(find_spec, row.needs)):
        return {"outcome": f"not installed ({' or '.join(row.needs)})"}
    steps = steps_of(row.batches, samples_of(settings), settings)
    timed = steps[:-1]
    model = build_model(settings, device=device)
    feed = feed_of(name, model, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    # Also the largest step, so that memory is allocated and varying shapes are compiled for before the timed steps.
    for step in [*timed[: settings.warmup], max(timed, key=lambda step: step.places)]:
        train(model, optimizer, feed, step)
    synchronize(device)
    compiled = compile_count()
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()

    seconds, losses = [], []
    for step in timed:
        begun = time.perf_counter()
        losses.append(train(model, optimizer, feed, step))
        synchronize(device)
        seconds.append(time.perf_counter() - begun)

    tokens = sum(step.tokens for step in timed)
    loss = float(torch.stack(losses).sum()) / sum(step.trained for step in timed)
    if not math.isfinite(loss):
        raise ArithmeticError(f"the loss is {loss}")
    mfu = None
    if device != "cpu" and settings.dtype == "bf16":
        mfu = utilization(
            MODELS[settings.model],
            tokens=tokens,
            pairs=sum(step.pairs for step in timed),
            seconds=sum(seconds),
            device=torch.cuda.get_device_name(),
        )
    return {
        "outcome": "measured",
        "steps": len(timed),
        "passes": sum(len(step.passes) for step in timed),
        "tokens": tokens,
        "padding": 1 - tokens / sum(step.places for step in timed),
        "seconds": sum(seconds),
        "step_median": statistics.median(seconds),
        "step_p10_p90": spread(seconds),
        "peak_bytes": None if device == "cpu" else torch.cuda.max_memory_allocated(),
        "mfu": mfu,
        "compiled": compile_count(),
        "compiled_late": compile_count() - compiled,  # in timed steps
        "loss": loss,
    }


def build_model(settings: Settings, *, device: str) -> nn.Module:
    """Build the model as the recipes do: layers compiled, then with activation checkpointing."""
    from torchtune import modules, training

    model = MODELS[settings.model].build(device=device, dtype=settings.dtype, seed=settings.seed)
    if settings.compile:
        training.compile_model(model, verbose=False)
    if settings.activation_checkpointing:
        training.set_activation_checkpointing(model, auto_wrap_policy={modules.TransformerSelfAttentionLayer})
    return model


def feed_of(name: str, model: nn.Module, *, device: str) -> Feed:
    """Return the function that moves a batch of the row to the device and makes the model's arguments."""
    row = ROWS[name]
    if row.batches == "stock":
        from torchtune.data import padded_collate_packed
        from torchtune.utils import batch_to_device

        def stock(packs: Any) -> tuple[Mapping[str, Any], torch.Tensor]:
            batch = padded_collate_packed(packs)
            batch_to_device(batch, torch.device(device))
            return batch, batch.pop("labels")

        return stock

    if row.attention is None:  # causal over the whole row: right padding needs no mask

        def plain(batch: Any) -> tuple[Mapping[str, Any], torch.Tensor]:
            return {"tokens": batch.tokens.to(device)}, batch.labels.to(device)

        return plain

    from streampack import prepare_model_for_packing

    inputs = prepare_model_for_packing(model, attention=row.attention)

    def ours(batch: Any) -> tuple[Mapping[str, Any], torch.Tensor]:
        batch = batch.to(device)
        return inputs(batch), batch.labels

    return ours


def train(model: nn.Module, optimizer: torch.optim.Optimizer, feed: Feed, step: Step) -> torch.Tensor:
    """Make one optimizer step; return the loss summed over its trained tokens, on the device."""
    from streampack.losses import summed_cross_entropy

    total = torch.zeros((), device=next(model.parameters()).device)
    for batch in step.passes:
        inputs, labels = feed(batch)
        loss = summed_cross_entropy(model(**inputs), labels)
        (loss / step.trained).backward()
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total


def synchronize(device: str) -> None:
    """Wait until the device is idle."""
    if device != "cpu":
        torch.cuda.synchronize()


def compile_count() -> int:
    """Count the graphs that torch.compile has made in this process, those of flex attention included."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def spread(seconds: list[float]) -> tuple[float, float]:
    """Return the 10th and the 90th percentile."""
    tenths = statistics.quantiles(seconds, n=10, method="inclusive")
    return tenths[0], tenths[-1]


def main() -> None:
    """Measure the row that the argument names, and print the outcome, also of an error."""
    # torchao logs a line about CUDA extensions when torchtune imports it.
    logging.getLogger("torchao").setLevel(logging.ERROR)
    job = json.loads(sys.argv[1])
    try:
        outcome = measure(job["row"], Settings(**job["settings"]), device=job["device"])
    except torch.OutOfMemoryError:
        outcome = {"outcome": "out of memory"}
    except Exception as error:
        logging.exception("%s", job["row"])
        outcome = {"outcome": "failed: " + f"{type(error).__name__}: {error}".splitlines()[0]}
    print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main()
