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
from benchmarks.gpu.settings import ROWS, Row, Settings
from benchmarks.model import LLAMA_1B, TINY, utilization
from streampack import prepare_model_for_packing, summed_cross_entropy

# Turns a batch into the model's arguments and the labels.
Feed = Callable[[Any], tuple[Mapping[str, Any], torch.Tensor]]
MODELS = {"1b": LLAMA_1B, "tiny": TINY}


def measure(row: Row, settings: Settings, *, device: str) -> dict[str, Any]:
    """Train on the row's batches: warm up, then time every step but the last, which may not be full.

    A step is timed from batches on the host until the device is idle: transfer, mask, forward, backward, optimizer.
    Making the batches is not timed; benchmarks.density measures that.
    """
    if row.needs and not any(map(find_spec, row.needs)):
        return {"outcome": f"not installed ({' or '.join(row.needs)})"}
    cuda = device != "cpu"
    timed = steps_of(row.batches, samples_of(settings), settings)[:-1]
    model = build_model(settings, device=device)
    feed = feed_of(row, model, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def run(step: Step) -> tuple[float, torch.Tensor]:
        begun = time.perf_counter()
        loss = train(model, optimizer, feed, step)
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begun, loss

    # Also the largest step, so that memory is allocated and varying shapes are compiled for before the timed steps.
    for step in [*timed[: settings.warmup], max(timed, key=lambda step: step.places)]:
        run(step)
    compiled = compile_count()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds, losses = zip(*map(run, timed), strict=True)

    loss = float(torch.stack(losses).sum()) / sum(step.trained for step in timed)
    if not math.isfinite(loss):
        raise ArithmeticError(f"the loss is {loss}")
    tokens = sum(step.tokens for step in timed)
    tenths = statistics.quantiles(seconds, n=10, method="inclusive")
    return {
        "outcome": "measured",
        "steps": len(timed),
        "passes": sum(len(step.passes) for step in timed),
        "tokens": tokens,
        "padding": 1 - tokens / sum(step.places for step in timed),
        "seconds": sum(seconds),
        "step_median": statistics.median(seconds),
        "step_p10_p90": (tenths[0], tenths[-1]),
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "mfu": utilization(
            MODELS[settings.model],
            tokens=tokens,
            pairs=sum(step.pairs for step in timed),
            seconds=sum(seconds),
            device=torch.cuda.get_device_name() if cuda else "cpu",
        ),
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


def feed_of(row: Row, model: nn.Module, *, device: str) -> Feed:
    """Return the function that moves a batch of the row to the device and makes the model's arguments."""
    if row.batches == "stock":
        from torchtune.data import padded_collate_packed
        from torchtune.utils import batch_to_device

        def stock(packs: Any) -> tuple[Mapping[str, Any], torch.Tensor]:
            batch = padded_collate_packed(packs)
            batch_to_device(batch, torch.device(device))
            return batch, batch.pop("labels")

        return stock
    if row.attention is None:  # causal over the whole row: right padding needs no mask
        return lambda batch: ({"tokens": batch.tokens.to(device)}, batch.labels.to(device))
    inputs = prepare_model_for_packing(model, attention=row.attention)

    def ours(batch: Any) -> tuple[Mapping[str, Any], torch.Tensor]:
        placed = batch.to(device)
        return inputs(placed), placed.labels

    return ours


def train(model: nn.Module, optimizer: torch.optim.Optimizer, feed: Feed, step: Step) -> torch.Tensor:
    """Make one optimizer step; return the loss summed over its trained tokens, on the device."""
    total = torch.zeros((), device=next(model.parameters()).device)
    for batch in step.passes:
        inputs, labels = feed(batch)
        loss = summed_cross_entropy(model(**inputs), labels)
        (loss / step.trained).backward()
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total


def compile_count() -> int:
    """Count the graphs that torch.compile has made in this process, those of flex attention included."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def main() -> None:
    """Measure the row that the argument names, and print the outcome, also of an error."""
    # torchao logs a line about CUDA extensions when torchtune imports it.
    logging.getLogger("torchao").setLevel(logging.ERROR)
    job = json.loads(sys.argv[1])
    try:
        outcome = measure(ROWS[job["row"]], Settings(**job["settings"]), device=job["device"])
    except torch.OutOfMemoryError:
        outcome = {"outcome": "out of memory"}
    except Exception as error:
        logging.exception("%s", job["row"])
        outcome = {"outcome": "failed: " + f"{type(error).__name__}: {error}".splitlines()[0]}
    print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main()
