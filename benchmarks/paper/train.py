"""One row: an epoch on the batches of a method, timed, and the loss on held-out samples.

It seeds torch's global generator and measures its process's peak memory, so it needs a process of its own.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import report
from benchmarks.model import Shape
from benchmarks.paper.data import PADDING, Corpus, Samples, corpus_of
from benchmarks.paper.settings import PACKED, Budget, Row, Settings
from streampack import Batch, method_loader, prepare_model_for_packing, summed_cross_entropy

logging.getLogger("torchao").setLevel(logging.ERROR)  # logs at import that it has no C++ extensions

Feed = Callable[[Batch], Mapping[str, Any]]
MODELS = {
    "tiny": partial(Shape, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=64, intermediate_dim=128),
    "100m": partial(Shape, num_layers=12, num_heads=12, num_kv_heads=4, embed_dim=768, intermediate_dim=2048),
}


def measure(row: Row, settings: Settings, *, device: str) -> dict[str, Any]:
    """Train for an epoch and time it, planning and making of batches included, validation not.

    On a CPU the time is that for which this process, of one thread, had a core: elapsed time would depend on the
    machine's other users.
    """
    if device == "cpu":
        torch.set_num_threads(1)
    corpus = corpus_of(settings)
    tokens = sum(len(sample["tokens"]) for sample in corpus.train)
    budget = Budget.of(row, settings, mean=tokens / len(corpus.train))
    # A step of another model: a process's first step takes some 20 MiB, and time to read code from disk.
    first = loader_of(row.method, corpus.validation[:1], settings, Budget(1, 1, settings.lr))
    other, optimizer = build(corpus, settings, lr=budget.lr, device=device)
    train(other, optimizer, feed_of(row.method, other), list(first), device=device)
    model, optimizer = build(corpus, settings, lr=budget.lr, device=device)
    feed = feed_of(row.method, model)

    held = reset_peak(device)
    begun = now(device)
    batches = iter(loader_of(row.method, corpus.train, settings, budget))
    steps = rows = places = trained = 0
    total = torch.zeros((), dtype=torch.float64, device=device)
    while step := list(islice(batches, budget.accumulate)):
        total += train(model, optimizer, feed, step, device=device)
        steps += 1
        rows += sum(sum(map(bool, batch.fragments)) for batch in step)
        places += sum(batch.tokens.numel() for batch in step)
        trained += sum(int(batch.num_trained) for batch in step)
    seconds = now(device) - begun
    peak = read_peak(device)

    return {
        "outcome": "measured",
        "samples": len(corpus.train),
        "rows": rows if row.method in PACKED else len(corpus.train),
        "steps": steps,
        "batch_size": budget.batch_size,
        "accumulate": budget.accumulate,
        "lr": budget.lr,
        "tokens": tokens,
        "padding": 1 - tokens / places,
        "seconds": seconds,
        "peak_bytes": None if peak is None or held is None else peak - held,
        "train_loss": float(total) / trained,
        "validation_loss": validate(model, corpus, settings, device=device),
        "floor": corpus.floor,
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def outcome_of(row: Row, settings: Settings, device: str) -> dict[str, Any]:
    """Measure a row; return its figures, or why there are none."""
    try:
        return measure(row, settings, device=device)
    except torch.OutOfMemoryError:
        return {"outcome": "out of memory"}
    except Exception as error:
        return {"outcome": f"failed: {type(error).__name__}: {error}".splitlines()[0]}


def build(
    corpus: Corpus, settings: Settings, *, lr: float, device: str
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build a model with random weights, the same for all methods, and its optimizer."""
    shape = MODELS[settings.model](vocab_size=corpus.vocab_size)
    model = shape.build(device=device, dtype=settings.dtype, seed=settings.seed)
    return model, torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95))


def feed_of(method: str, model: nn.Module) -> Feed:
    """Return the function that makes the model's arguments from the batches of a method.

    A row of one sequence needs only the model's own causal attention, since its padding comes last: padding is then
    not slower than it has to be. ``fixed_length`` has it too: it is packing as it was before position ids.
    """
    if method in {*PACKED, "minibatch_packing"} - {"fixed_length"}:
        return prepare_model_for_packing(model)
    return lambda batch: {"tokens": batch.tokens}


def loader_of(method: str, samples: Samples, settings: Settings, budget: Budget) -> Iterable[Batch]:
    """Return the batches of an epoch."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="method='fixed_length' lets")  # it is here for comparison
        return method_loader(
            samples,
            method=method,
            max_seq_len=settings.max_seq_len,
            batch_size=budget.batch_size,
            lengths=[len(sample["tokens"]) for sample in samples],
            packs_per_step=budget.batch_size * budget.accumulate,
            padding_idx=PADDING,
            seed=settings.seed,
        )


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, feed: Feed, batches: list[Batch], *, device: str
) -> torch.Tensor:
    """Make one optimizer step on the mean loss of its trained tokens; return their sum, on the device."""
    trained = max(1, sum(int(batch.num_trained) for batch in batches))
    total = torch.zeros((), device=device)
    for batch in batches:
        placed = batch.to(device)
        loss = summed_cross_entropy(model(**feed(placed)), placed.labels)
        (loss / trained).backward()
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total


@torch.no_grad()
def validate(model: nn.Module, corpus: Corpus, settings: Settings, *, device: str) -> float:
    """Return the nats a token of the held-out samples, each in a row of its own."""
    model.eval()
    budget = Budget(4 * settings.batch_size, 1, settings.lr)
    total = trained = 0.0
    for batch in loader_of("group_by_length_padding", corpus.validation, settings, budget):
        placed = batch.to(device)
        total += float(summed_cross_entropy(model(tokens=placed.tokens), placed.labels))
        trained += int(batch.num_trained)
    return total / trained


def now(device: str) -> float:
    """Return seconds: elapsed ones once the device is idle, or those of this process on a CPU."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def reset_peak(device: str) -> int | None:
    """Reset the peak of memory; return the bytes in use that do not belong to the training."""
    report.give_memory_back()  # otherwise memory that was freed before would be used again, and not count
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        return 0  # weights, gradients and optimizer state belong to the training
    try:
        Path("/proc/self/clear_refs").write_text("5")  # sets the peak to the memory in use, see proc(5)
    except OSError:
        return None
    return read_peak(device)


def read_peak(device: str) -> int | None:
    """Return the peak bytes of torch on the device, or of this process; None where the system does not tell."""
    return report.resident_memory("VmHWM") if device == "cpu" else torch.cuda.max_memory_allocated()
