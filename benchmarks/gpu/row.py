"""Measure one row, or probe every backend, in a process of its own, because it may run out of memory.

``python -m benchmarks.gpu.row '{"device": ..., "row": ..., "settings": ...}'`` prints the outcomes as its last line;
without settings those of the probe, with the device alone what machine this is.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from benchmarks import report
from benchmarks.gpu.batches import Step, samples_of, steps_of
from benchmarks.gpu.settings import BACKENDS, ROWS, Row, Settings
from benchmarks.model import LLAMA_1B, TINY, Shape
from streampack import Batch, find_leaks, prepare_model_for_packing, summed_cross_entropy

# private: which versions of flash-attn suit a GPU; a row tries one of them
from streampack.attention import backends

# Turns a batch into the model's arguments and the labels.
Feed = Callable[[Any], tuple[Mapping[str, Any], torch.Tensor]]
MODELS = {"1b": LLAMA_1B, "tiny": TINY}
PACKAGES = ("torch", "triton", "torchtune", "torchao", "transformers", "flash-attn", "flash-attn-4")


def measure(row: Row, settings: Settings, *, device: str) -> dict[str, Any]:
    """Train on the row's batches: warm up, then time every step but the last, which may not be full.

    A step is timed from pinned batches on the host until the device is idle: transfer, mask, forward, backward,
    optimizer. Making the batches is not timed; benchmarks.density measures that.
    """
    cuda = device != "cpu"
    timed = steps_of(row.batches, samples_of(settings), settings)[:-1]
    if cuda:
        timed = [step._replace(passes=[*map(pinned, step.passes)]) for step in timed]
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
    graphs = count_graphs()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds, losses = zip(*map(run, timed), strict=True)
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else None

    loss = float(torch.stack(losses).sum()) / sum(step.trained for step in timed)
    if not math.isfinite(loss):
        raise ArithmeticError(f"the loss is {loss}")
    tokens = sum(step.tokens for step in timed)
    passes = sum(len(step.passes) for step in timed)
    return {
        "outcome": "measured" if passes == len(timed) else f"{passes} passes for {len(timed)} steps",
        "tokens": tokens,
        "train_seconds": sum(seconds),
        "step_median": statistics.median(seconds),
        "padding": 1 - tokens / sum(step.places for step in timed),
        "peak_gib": peak,
        "waits": count_waits(lambda: train(model, optimizer, feed, timed[0])) if cuda else None,
        "graphs": count_graphs(),
        "graphs_late": count_graphs() - graphs,  # in timed steps
    }


def pinned(batch: Any) -> Any:
    """Return a batch in page-locked memory; torchtune's is a list of packs."""
    return batch.pin_memory() if isinstance(batch, Batch) else batch


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
    # Causal over the whole row, right padding needs no mask.
    inputs = (
        (lambda batch: {"tokens": batch.tokens}) if row.attention is None else prepare(model, row.attention)
    )

    def ours(batch: Any) -> tuple[Mapping[str, Any], torch.Tensor]:
        placed = batch.to(device)
        return inputs(placed), placed.labels

    return ours


def prepare(model: nn.Module, attention: str) -> Any:
    """Prepare a model for one of `BACKENDS`.

    Raises:
        ImportError: for a version of flash-attn that is not installed.
    """
    if attention.startswith("FA"):
        backends._SUITED = dict.fromkeys(range(20), (attention,))
        attention = "flash"
    return prepare_model_for_packing(model, attention=attention)


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


def count_graphs() -> int:
    """Count the graphs that torch.compile has made in this process, those of flex attention included."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def count_waits(run: Callable[[], Any]) -> int:
    """Count the operations at which the host waits for the GPU: numbers that are read back, blocking copies."""
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run()
    torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(each.message) for each in found)


def probe(backend: str, *, device: str) -> str:
    """Return whether samples in packs are what they are alone, by the leak probe of a small model."""
    shape = Shape(
        vocab_size=512, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=256, intermediate_dim=256
    )
    model = shape.build(device=device, dtype="fp32" if device == "cpu" else "bf16", seed=0)
    found = find_leaks(model, inputs=prepare(model, backend))
    return "isolated" if found.ok else f"failed: {found}".replace("\n", " ")


def outcome_of(run: Callable[[], Any]) -> Any:
    """Return what ``run`` returns, or the outcome of its error."""
    try:
        return run()
    except torch.OutOfMemoryError:
        return "out of memory"
    except ImportError:
        return "not installed"
    except Exception as error:
        logging.exception("failed")
        return "failed: " + f"{type(error).__name__}: {error}".splitlines()[0]


def describe(device: str) -> dict[str, str]:
    """Return the device's name and a line about the machine."""
    line = report.machine_line("streampack", *PACKAGES)
    if device == "cpu":
        return {"device": f"{report.cpu_model()}, {report.cpu_count()} cores", "line": line}
    memory = torch.cuda.get_device_properties(device).total_memory / 2**30
    return {
        "device": torch.cuda.get_device_name(),
        "line": f"{memory:.0f} GiB, CUDA {torch.version.cuda} · {line}",
    }


def main() -> None:
    """Print what the argument asks for."""
    # torchao logs a line about CUDA extensions when torchtune imports it.
    logging.getLogger("torchao").setLevel(logging.ERROR)
    job = json.loads(sys.argv[1])
    device = job["device"]
    if "row" not in job:
        print(json.dumps(describe(device)))
        return
    if job["settings"]:
        row = job["row"]
        found = {row: outcome_of(lambda: measure(ROWS[row], Settings(**job["settings"]), device=device))}
    else:
        names = BACKENDS if device != "cpu" else ("dense", "varlen")
        found = {name: outcome_of(lambda name=name: probe(name, device=device)) for name in names}
    lines = [
        {"row": row, **(each if isinstance(each, dict) else {"outcome": each})} for row, each in found.items()
    ]
    print(json.dumps(lines), flush=True)


if __name__ == "__main__":
    main()
