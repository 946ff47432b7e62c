"""The same samples, batched in each of the ways that the rows compare.

All batches are made of packs: a padded row is a pack of one sample, a flattened mini-batch a pack of all its samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from benchmarks import lengths as corpora
from benchmarks.gpu.settings import Settings
from streampack import IGNORE_INDEX, Fragment, IterablePackedDataset, Pack, collate_packed
from streampack.packing.assemble import assemble
from streampack.packing.batch import Batch, to_torchtune
from streampack.packing.samples import sample_from_columns

T = TypeVar("T")
Samples = Sequence[dict[str, Any]]
StockBatch = list[dict[str, torch.Tensor]]  # torchtune's packs, before its collate


class Step(NamedTuple):
    """The batches of one optimizer step's forward passes, on the host, and their counts."""

    passes: Sequence[Batch | StockBatch]
    tokens: int  # of samples
    places: int  # tokens and padding
    pairs: int  # (query, key) that causal attention within the sequences needs
    trained: int  # labels that the loss counts


def samples_per_step(settings: Settings) -> int:
    """Return how many samples hold ``tokens_per_step`` on average."""
    mean = float(corpora.lengths(settings.lengths, longest=settings.max_seq_len).mean())
    return max(1, round(settings.tokens_per_step / mean))


def samples_of(settings: Settings) -> list[dict[str, Any]]:
    """Draw samples for all timed steps and one more, since the last step may not be full."""
    count = samples_per_step(settings) * (settings.steps + 1)
    values = corpora.lengths(settings.lengths, count=count, seed=settings.seed, longest=settings.max_seq_len)
    return corpora.samples(values, seed=settings.seed)


def steps_of(kind: str, samples: Samples, settings: Settings) -> list[Step]:
    """Batch all samples, each once, in one of the ways of `BATCHES`."""
    return list(BATCHES[kind](samples, settings))


def padded(samples: Samples, settings: Settings) -> Iterator[Step]:
    """Take the samples in their order, a fixed number for each step, padded to the longest."""
    for mini_batch in slices(samples, samples_per_step(settings)):
        yield padded_step(mini_batch, settings)


def grouped(samples: Samples, settings: Settings) -> Iterator[Step]:
    """Do the same with samples sorted by length, and shuffle the batches.

    Sorting all samples groups better than a trainer does, which sorts some fifty batches at a time.
    """
    ordered = sorted(samples, key=lambda sample: len(sample["tokens"]))
    batches = list(slices(ordered, samples_per_step(settings)))
    for index in np.random.default_rng(settings.seed).permutation(len(batches)):
        yield padded_step(batches[index], settings)


def padded_step(mini_batch: Samples, settings: Settings) -> Step:
    """Pad a mini-batch, in the fewest equal passes of at most ``most_places`` each."""
    parts = fewest_parts(mini_batch, lambda part: len(part) * longest(part), settings.most_places)
    return step([collate_packed([pack([s], longest(part)) for s in part]) for part in parts])


def flattened(samples: Samples, settings: Settings) -> Iterator[Step]:
    """Flatten the mini-batches of `padded` to one row of all their samples."""
    for mini_batch in slices(samples, samples_per_step(settings)):
        parts = fewest_parts(mini_batch, size, settings.most_places)
        yield step([collate_packed([pack(part, size(part))]) for part in parts])


def packed(samples: Samples, settings: Settings) -> Iterator[Step]:
    """Stream packs of streampack's default strategy."""
    packs = IterablePackedDataset(samples, max_seq_len=settings.max_seq_len, num_lanes=1)
    for batch in slices(list(packs), packs_per_step(settings)):
        yield step([collate_packed(batch)])


def wrapped(samples: Samples, settings: Settings) -> Iterator[Step]:
    """Concatenate all tokens and cut them at ``max_seq_len``, whatever the samples' boundaries."""
    packs = IterablePackedDataset(
        samples, max_seq_len=settings.max_seq_len, num_lanes=1, split_across_pack=True
    )
    for batch in slices(list(packs), packs_per_step(settings)):
        made = step([collate_packed(batch)])
        rows = (sum(f.stop - f.start for f in pack["fragments"]) for pack in batch)
        yield made._replace(pairs=sum(map(causal_pairs, rows)))


def stock(samples: Samples, settings: Settings) -> Iterator[Step]:
    """Pack by torchtune's ``PackedDataset``; its collate function, run within the step, makes the mask."""
    from torchtune.datasets import PackedDataset

    packs = PackedDataset(
        corpora.as_lists(samples), max_seq_len=settings.max_seq_len, padding_idx=corpora.PADDING
    )
    for batch in slices(packs.packs, packs_per_step(settings)):
        tokens = pairs = 0
        for made in batch:
            real = int((made["tokens"] != corpora.PADDING).sum())
            lengths = made["seq_lens"].tolist()
            if real < len(made["tokens"]):
                lengths.pop()  # the padding's
            assert sum(lengths) == real
            tokens += real
            pairs += sum(map(causal_pairs, lengths))
        trained = sum(int((made["labels"][1:] != IGNORE_INDEX).sum()) for made in batch)
        yield Step([list(batch)], tokens, len(batch) * settings.max_seq_len, pairs, trained)


BATCHES: dict[str, Callable[[Samples, Settings], Iterable[Step]]] = {
    "padded": padded,
    "grouped": grouped,
    "flattened": flattened,
    "packed": packed,
    "wrapped": wrapped,
    "stock": stock,
}


def step(passes: Sequence[Batch]) -> Step:
    """Make a step of batches, and count what they hold."""
    lengths = [f.stop - f.start for batch in passes for pack in batch.fragments for f in pack]
    return Step(
        passes,
        tokens=sum(lengths),
        places=sum(batch.tokens.numel() for batch in passes),
        pairs=sum(map(causal_pairs, lengths)),
        trained=sum(int(batch.num_trained) for batch in passes),
    )


def pack(samples: Samples, max_seq_len: int) -> dict[str, Any]:
    """Assemble a pack of exactly these samples."""
    sequences = [sample_from_columns(sample) for sample in samples]
    arrays = assemble(sequences, max_seq_len=max_seq_len)
    lengths = tuple(sequence.tokens.size for sequence in sequences)
    fragments = tuple(Fragment((), 0, length) for length in lengths)
    return to_torchtune(Pack(*arrays, lengths, fragments, epoch=0, number=0, lane=0))


def causal_pairs(length: int) -> int:
    """Count the (query, key) pairs of a causal sequence.

    >>> causal_pairs(3)  # 1 + 2 + 3
    6
    """
    return length * (length + 1) // 2


def packs_per_step(settings: Settings) -> int:
    """Return how many packs of ``max_seq_len`` hold ``tokens_per_step``."""
    return max(1, settings.tokens_per_step // settings.max_seq_len)


def slices(items: Sequence[T], count: int) -> Iterator[Sequence[T]]:
    """Split into slices of ``count`` items; the last may be shorter."""
    return (items[start : start + count] for start in range(0, len(items), count))


def fewest_parts(samples: Samples, places: Callable[[Samples], int], most: int) -> list[Samples]:
    """Split samples into the fewest even parts of at most ``most`` places each."""
    splits = (list(even_parts(samples, count)) for count in range(1, len(samples) + 1))
    return next(parts for parts in splits if max(map(places, parts)) <= most or len(parts) == len(samples))


def even_parts(items: Sequence[T], count: int) -> Iterator[Sequence[T]]:
    """Split into ``count`` parts whose sizes differ by one at most.

    >>> list(even_parts("abcdefg", 3))
    ['ab', 'cd', 'efg']
    """
    ends = [len(items) * i // count for i in range(count + 1)]
    return (items[start:stop] for start, stop in pairwise(ends))


def longest(samples: Samples) -> int:
    """Return the tokens of the longest sample."""
    return max(len(sample["tokens"]) for sample in samples)


def size(samples: Samples) -> int:
    """Return the tokens of all samples."""
    return sum(len(sample["tokens"]) for sample in samples)
