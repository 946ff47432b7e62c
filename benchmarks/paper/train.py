"""One row: an epoch on the batches of a method, on the clock, and the loss on samples it has not seen.

It seeds torch's global generator and reads the peak of its process' memory, so it wants a process of its own.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from benchmarks.gpu.model import Shape
from benchmarks.paper.data import PADDING, Corpus, Samples, corpus_of
from benchmarks.paper.settings import Budget, Row, Settings
from streampack import prepare_model_for_packing
from streampack.losses import summed_cross_entropy
from streampack.map_style.method_loader import method_loader
from streampack.map_style.methods import METHODS
from streampack.packing.batch import Batch

logging.getLogger("torchao").setLevel(logging.ERROR)  # says at import that it has no C++ extensions

T = TypeVar("T")
Feed = Callable[[Batch], Mapping[str, Any]]

MODELS = {
    "tiny": partial(Shape, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=64, intermediate_dim=128),
    "100m": partial(Shape, num_layers=12, num_heads=12, num_kv_heads=4, embed_dim=768, intermediate_dim=2048),
}


def measure(row: Row, settings: Settings, *, device: str) -> dict[str, Any]:
    """Train for an epoch. The clock has the planning and making of batches in it, and not the validation.

    On a CPU it counts the seconds that this process, of one thread, had a core: on a machine that others use too,
    those are the figure of the method, and the wall's are the figure of the others.
    """
    if device == "cpu":
        torch.set_num_threads(1)
    corpus = corpus_of(settings)
    tokens = sum(len(sample["tokens"]) for sample in corpus.train)
    budget = Budget.of(row, settings, mean=tokens / len(corpus.train))
    warm_up(row.method, corpus, settings, device=device)
    model, optimizer = build(corpus, settings, lr=budget.lr, device=device)
    feed = feed_of(row.method, model)

    held = reset_peak(device)
    begun = now(device)
    loader = loader_of(row.method, corpus.train, settings, budget)
    steps = rows = places = trained = 0
    total = torch.zeros((), dtype=torch.float64, device=device)
    for batches in batched(loader, budget.accumulate):
        total += train(model, optimizer, feed, batches, device=device)
        steps += 1
        rows += sum(sum(map(bool, batch.fragments)) for batch in batches)
        places += sum(batch.tokens.numel() for batch in batches)
        trained += sum(int(batch.num_trained) for batch in batches)
    seconds = now(device) - begun
    peak = read_peak(device)

    return {
        "outcome": "measured",
        "samples": len(corpus.train),
        "rows": rows if METHODS[row.method].packed else len(corpus.train),
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


def build(
    corpus: Corpus, settings: Settings, *, lr: float, device: str
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Random weights, the same for all methods, and their optimizer."""
    shape = MODELS[settings.model](vocab_size=corpus.vocab_size)
    model = shape.build(device=device, dtype=settings.dtype, seed=settings.seed)
    return model, torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95))


def warm_up(method: str, corpus: Corpus, settings: Settings, *, device: str) -> None:
    """A step of a model that is thrown away: a first one takes some 20 MiB, and the time to read code from disk."""
    budget = Budget(1, 1, settings.lr)
    model, optimizer = build(corpus, settings, lr=budget.lr, device=device)
    batches = list(loader_of(method, corpus.validation[:1], settings, budget))
    train(model, optimizer, feed_of(method, model), batches, device=device)


def feed_of(method: str, model: nn.Module) -> Feed:
    """How the model takes the batches of a method.

    Where a row is one sequence, it needs no more than the model's own causal attention: padding stands after what is
    real. So padding is not made slower than it is; and ``fixed_length`` is packing as it was before position ids.
    """
    if METHODS[method].isolated and (METHODS[method].packed or method == "minibatch_packing"):
        return prepare_model_for_packing(model)
    return lambda batch: {"tokens": batch.tokens}


def loader_of(
    method: str, samples: Samples, settings: Settings, budget: Budget
) -> torch.utils.data.DataLoader[Batch]:
    """The batches of an epoch."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="method='fixed_length' lets"
        )  # it is here to be compared with
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
    """One optimizer step on the mean loss of its trained tokens. Returns their sum, still on the device."""
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
    """Nats a token of the held-out samples, each by itself, whatever the model was trained on."""
    model.eval()
    budget = Budget(4 * settings.batch_size, 1, settings.lr)
    total = trained = 0.0
    for batch in loader_of("group_by_length_padding", corpus.validation, settings, budget):
        placed = batch.to(device)
        total += float(summed_cross_entropy(model(tokens=placed.tokens), placed.labels))
        trained += int(batch.num_trained)
    return total / trained


def batched(items: Iterator[T] | torch.utils.data.DataLoader[T], count: int) -> Iterator[list[T]]:
    """So many at a time; the last may be fewer."""
    rest = iter(items)
    while some := list(islice(rest, count)):
        yield some


def now(device: str) -> float:
    """Seconds: the wall's once the device has done all it was given, or those of this process on a CPU."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def reset_peak(device: str) -> int | None:
    """Forget the peak of memory so far. Returns what is held now and is not the training's, in bytes."""
    gc.collect()
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        return 0  # weights, gradients and the optimizer's state are what training takes
    with suppress(OSError, AttributeError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)  # or what was freed before would be taken again, and not be seen
    try:
        Path("/proc/self/clear_refs").write_text("5")  # sets the peak to what is held, see proc(5)
    except OSError:
        return None
    return read_peak(device)


def read_peak(device: str) -> int | None:
    """Bytes: what torch had at most on the device, or what this process did; None where the system does not tell."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated()
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else None
