"""One row: an epoch on the batches of a method, timed, and the loss on held-out samples.

It seeds torch's global generator and measures its process's peak memory, so it needs a process of its own.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import report
from benchmarks.model import Shape
from benchmarks.paper.data import PADDING, Corpus, Samples, corpus_of
from benchmarks.paper.settings import PACKED, Row, Settings, budget_of
from streampack import Batch, method_loader, prepare_model_for_packing, summed_cross_entropy

logging.getLogger("torchao").setLevel(logging.ERROR)  # logs at import that it has no C++ extensions

Feed = Callable[[Batch], Mapping[str, Any]]


def measure(row: Row, settings: Settings) -> dict[str, Any]:
    """Train for an epoch and time it, planning and making of batches included, validation not.

    The time is that for which this process, of one thread, had a core: elapsed time would depend on the machine's
    other users.
    """
    torch.set_num_threads(1)
    corpus = corpus_of(settings)
    tokens = sum(len(sample["tokens"]) for sample in corpus.train)
    batch_size, lr = budget_of(row, settings, mean=tokens / len(corpus.train))
    # A step of another model: a process's first step takes some 20 MiB, and time to read code from disk.
    other, optimizer = build(corpus, settings, lr=lr)
    for batch in loader_of(row.method, corpus.validation[:1], settings, 1):
        train(other, optimizer, feed_of(row.method, other), batch)
    model, optimizer = build(corpus, settings, lr=lr)
    feed = feed_of(row.method, model)

    report.give_memory_back()  # otherwise memory that was freed before would be used again, and not count
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # sets the peak to the memory in use, see proc(5)
    held = report.resident_memory("VmHWM")
    begun = time.process_time()
    steps = rows = places = trained = 0
    total = 0.0
    for batch in loader_of(row.method, corpus.train, settings, batch_size):
        total += train(model, optimizer, feed, batch)
        steps += 1
        rows += sum(map(bool, batch.fragments))
        places += batch.tokens.numel()
        trained += int(batch.num_trained)
    seconds = time.process_time() - begun
    peak = report.resident_memory("VmHWM")

    return {
        "samples": len(corpus.train),
        "rows": rows if row.method in PACKED else len(corpus.train),
        "steps": steps,
        "batch_size": batch_size,
        "lr": lr,
        "tokens": tokens,
        "padding": 1 - tokens / places,
        "seconds": seconds,
        "peak_bytes": None if peak is None or held is None else peak - held,
        "train_loss": total / trained,
        "validation_loss": validate(model, corpus, settings),
        "floor": corpus.floor,
        "load": os.getloadavg()[0],
    }


def build(corpus: Corpus, settings: Settings, *, lr: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build a model with random weights, the same for all methods, and its optimizer."""
    sizes = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 64, "intermediate_dim": 128}
    model = Shape(vocab_size=corpus.vocab_size, **sizes).build(device="cpu", dtype="fp32", seed=settings.seed)
    return model, torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95))


def feed_of(method: str, model: nn.Module) -> Feed:
    """Return the function that makes the model's arguments from the batches of a method.

    A row of one sequence needs only the model's own causal attention, since its padding comes last: padding is then
    not slower than it has to be. ``fixed_length`` has it too: it is packing as it was before position ids.
    """
    if method in {*PACKED, "minibatch_packing"} - {"fixed_length"}:
        return prepare_model_for_packing(model)
    return lambda batch: {"tokens": batch.tokens}


def loader_of(method: str, samples: Samples, settings: Settings, batch_size: int) -> Iterable[Batch]:
    """Return the batches of an epoch; each is a step."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="method='fixed_length' lets")  # it is here for comparison
        return method_loader(
            samples,
            method=method,
            max_seq_len=settings.max_seq_len,
            batch_size=batch_size,
            lengths=[len(sample["tokens"]) for sample in samples],
            padding_idx=PADDING,
            seed=settings.seed,
        )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, feed: Feed, batch: Batch) -> float:
    """Make one optimizer step on the mean loss of its trained tokens; return their sum."""
    loss = summed_cross_entropy(model(**feed(batch)), batch.labels)
    (loss / max(1, int(batch.num_trained))).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


@torch.no_grad()
def validate(model: nn.Module, corpus: Corpus, settings: Settings) -> float:
    """Return the nats a token of the held-out samples, each in a row of its own."""
    model.eval()
    total = trained = 0.0
    batches = loader_of("group_by_length_padding", corpus.validation, settings, 4 * settings.batch_size)
    for batch in batches:
        total += float(summed_cross_entropy(model(tokens=batch.tokens), batch.labels))
        trained += int(batch.num_trained)
    return total / trained
