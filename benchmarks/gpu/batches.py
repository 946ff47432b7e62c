"""The same samples, batched in each of the ways that the rows compare.

All batches are made of packs: a padded row is a pack of one sample, a flattened mini-batch a pack of all its samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from benchmarks import lengths as corpora
from benchmarks.gpu.settings import Settings
from benchmarks.peers import torchtune_packs
from streampack import IGNORE_INDEX, Batch, IterablePackedDataset, collate_packed

T = TypeVar("T")
Samples = Sequence[dict[str, Any]]
StockBatch = list[dict[str, torch.Tensor]]  # torchtune's packs, before its collate


class Step(NamedTuple):
    """The batches of one optimizer step's forward passes, on the host, and their counts."""

    passes: Sequence[Batch | StockBatch]
    tokens: int  # of samples
    places: int  # tokens and padding
    trained: int  # labels that the loss counts


def samples_of(settings: Settings) -> list[dict[str, Any]]:
    """Draw samples for all timed steps and one more, since the last step may not be full."""
    count = samples_per_step(settings) * (settings.steps + 1)
    values = corpora.lengths(settings.lengths, count=count, seed=settings.seed, longest=settings.max_seq_len)
    return corpora.samples(values, seed=settings.seed)


def samples_per_step(settings: Settings) -> int:
    """Return how many samples hold ``tokens_per_step`` on average."""
    mean = float(corpora.lengths(settings.lengths, longest=settings.max_seq_len).mean())
    return max(1, round(settings.tokens_per_step / mean))


def steps_of(kind: str, samples: Samples, settings: Settings) -> list[Step]:
    """Batch all samples, each once, in one of the ways of `Row.batches`."""
    mini_batches = list(slices(samples, samples_per_step(settings)))
    if kind == "padded":
        return [padded(each, settings.most_places) for each in mini_batches]
    if kind == "flattened":
        return [flattened(each, settings.most_places) for each in mini_batches]
    if kind == "grouped":
        # Sorting all samples groups better than a trainer does, which sorts some fifty batches at a time.
        by_length = sorted(samples, key=lambda sample: len(sample["tokens"]))
        mini_batches = list(slices(by_length, samples_per_step(settings)))
        order = np.random.default_rng(settings.seed).permutation(len(mini_batches))
        return [padded(mini_batches[number], settings.most_places) for number in order]
    if kind == "stock":
        packs: Any = torchtune_packs(corpora.as_lists(samples), max_seq_len=settings.max_seq_len).packs
    else:
        packs = packs_of(samples, settings.max_seq_len, split_across_pack=kind == "wrapped")
    packs_per_step = max(1, settings.tokens_per_step // settings.max_seq_len)
    return [
        stock_step(each) if kind == "stock" else step([collate_packed(each)])
        for each in slices(packs, packs_per_step)
    ]


def padded(mini_batch: Samples, most_places: int) -> Step:
    """Pad a mini-batch to the longest, in the fewest equal passes of at most ``most_places``."""

    def longest(part: Samples) -> int:
        return max(len(sample["tokens"]) for sample in part)

    parts = fewest_parts(mini_batch, lambda part: len(part) * longest(part), most_places)
    alone = [[packs_of([sample], longest(part)) for sample in part] for part in parts]
    return step([collate_packed(list(chain(*packs))) for packs in alone])


def flattened(mini_batch: Samples, most_places: int) -> Step:
    """Flatten a mini-batch to one row of all its samples, or to the fewest rows of at most ``most_places``."""

    def size(part: Samples) -> int:
        return sum(len(sample["tokens"]) for sample in part)

    parts = fewest_parts(mini_batch, size, most_places)
    return step([collate_packed(packs_of(part, size(part), strategy="next_fit")) for part in parts])


def packs_of(samples: Samples, max_seq_len: int, **settings: Any) -> list[Any]:
    """Pack the samples in one lane."""
    return list(IterablePackedDataset(list(samples), max_seq_len=max_seq_len, num_lanes=1, **settings))


def step(passes: Sequence[Batch]) -> Step:
    """Make a step of batches, and count what they hold."""
    lengths = [f.stop - f.start for batch in passes for pack in batch.fragments for f in pack]
    return Step(
        passes,
        tokens=sum(lengths),
        places=sum(batch.tokens.numel() for batch in passes),
        trained=sum(int(batch.num_trained) for batch in passes),
    )


def stock_step(packs: StockBatch) -> Step:
    """Make a step of torchtune's packs; its collate function, run within the step, makes the mask."""
    tokens = sum(int((made["tokens"] != corpora.PADDING).sum()) for made in packs)
    places = sum(len(made["tokens"]) for made in packs)
    trained = sum(int((made["labels"][1:] != IGNORE_INDEX).sum()) for made in packs)
    return Step([list(packs)], tokens, places, trained)


def slices(items: Sequence[T], count: int) -> Iterator[Sequence[T]]:
    """Split into slices of ``count`` items; the last may be shorter."""
    return (items[start : start + count] for start in range(0, len(items), count))


def fewest_parts(samples: Samples, places: Callable[[Samples], int], most: int) -> list[Samples]:
    """Split samples into the fewest even parts of at most ``most`` places each."""
    for count in range(1, len(samples) + 1):
        ends = [len(samples) * i // count for i in range(count + 1)]
        parts = [samples[ends[i] : ends[i + 1]] for i in range(count)]
        if max(map(places, parts)) <= most:
            return parts
    return parts
