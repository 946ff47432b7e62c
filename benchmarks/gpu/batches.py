"""The same samples, batched in every way that the rows compare.

Everything is a pack: a padded row is a pack of one sample, a flattened mini-batch one pack of all its samples.
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
from streampack.packing.assemble import as_sample, assemble
from streampack.packing.batch import Batch, to_torchtune

T = TypeVar("T")
Samples = Sequence[dict[str, Any]]
StockBatch = list[dict[str, torch.Tensor]]  # torchtune's packs, before its collate


class Step(NamedTuple):
    """One optimizer step: the batches of its forward passes, on the host, and what they hold."""

    passes: Sequence[Batch | StockBatch]
    tokens: int  # real ones
    places: int  # with padding
    pairs: int  # (query, key) that causal attention within the sequences needs
    trained: int  # labels that the loss counts


def samples_per_step(settings: Settings) -> int:
    """How many samples hold ``tokens_per_step`` on average."""
    mean = float(corpora.lengths(settings.lengths, longest=settings.max_seq_len).mean())
    return max(1, round(settings.tokens_per_step / mean))


def samples_of(settings: Settings) -> list[dict[str, Any]]:
    """Samples for all timed steps and one more, since the last step of a row may be part-empty."""
    count = samples_per_step(settings) * (settings.steps + 1)
    values = corpora.lengths(settings.lengths, count=count, seed=settings.seed, longest=settings.max_seq_len)
    return corpora.samples(values, seed=settings.seed)


def steps_of(kind: str, samples: Samples, settings: Settings) -> list[Step]:
    """All samples, each once, in the steps that a way of batching makes of them."""
    return list(BATCHES[kind](samples, settings))


def padded(samples: Samples, settings: Settings) -> Iterator[Step]:
    """As many samples a step, in order of arrival, each padded to the longest of its batch."""
    for mini_batch in slices(samples, samples_per_step(settings)):
        yield padded_step(mini_batch, settings)


def grouped(samples: Samples, settings: Settings) -> Iterator[Step]:
    """The same, of samples sorted by length; the batches are shuffled, as the loss needs it.

    Sorting them all groups better than a trainer does, which sorts some fifty batches at a time.
    """
    ordered = sorted(samples, key=lambda sample: len(sample["tokens"]))
    batches = list(slices(ordered, samples_per_step(settings)))
    for index in np.random.default_rng(settings.seed).permutation(len(batches)):
        yield padded_step(batches[index], settings)


def padded_step(mini_batch: Samples, settings: Settings) -> Step:
    """In as few passes, of as many samples each, as keep below ``most_places``."""
    for passes in range(1, len(mini_batch) + 1):
        parts = list(even_parts(mini_batch, passes))
        if all(len(part) * longest(part) <= settings.most_places for part in parts):
            break
    return step([collate_packed([pack([s], longest(part)) for s in part]) for part in parts])


def flattened(samples: Samples, settings: Settings) -> Iterator[Step]:
    """The padded row's mini-batches without their padding: one row of all their samples, of any length."""
    for mini_batch in slices(samples, samples_per_step(settings)):
        for passes in range(1, len(mini_batch) + 1):
            parts = list(even_parts(mini_batch, passes))
            if all(size(part) <= settings.most_places for part in parts):
                break
        yield step([collate_packed([pack(part, size(part))]) for part in parts])


def packed(samples: Samples, settings: Settings) -> Iterator[Step]:
    """Ours: packs from a stream, with the default strategy."""
    packs = IterablePackedDataset(samples, max_seq_len=settings.max_seq_len, num_lanes=1)
    for batch in slices(list(packs), packs_per_step(settings)):
        yield step([collate_packed(batch)])


def wrapped(samples: Samples, settings: Settings) -> Iterator[Step]:
    """All tokens in a row, cut at ``max_seq_len``: what is left when nobody asks where a sample ends."""
    packs = IterablePackedDataset(
        samples, max_seq_len=settings.max_seq_len, num_lanes=1, split_across_pack=True
    )
    for batch in slices(list(packs), packs_per_step(settings)):
        made = step([collate_packed(batch)])
        rows = (sum(f.stop - f.start for f in pack["fragments"]) for pack in batch)
        yield made._replace(pairs=sum(map(causal_pairs, rows)))


def stock(samples: Samples, settings: Settings) -> Iterator[Step]:
    """torchtune's ``PackedDataset``. Its collate makes the mask, on the GPU, so that happens within the step."""
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
    """A step of batches, with its counts."""
    lengths = [f.stop - f.start for batch in passes for pack in batch.fragments for f in pack]
    return Step(
        passes,
        tokens=sum(lengths),
        places=sum(batch.tokens.numel() for batch in passes),
        pairs=sum(map(causal_pairs, lengths)),
        trained=sum(int(batch.num_trained) for batch in passes),
    )


def pack(samples: Samples, max_seq_len: int) -> dict[str, Any]:
    """A pack of just these samples."""
    sequences = [as_sample(sample) for sample in samples]
    arrays = assemble(sequences, max_seq_len=max_seq_len)
    lengths = tuple(sequence.tokens.size for sequence in sequences)
    fragments = tuple(Fragment((), 0, length) for length in lengths)
    return to_torchtune(Pack(*arrays, lengths, fragments, epoch=0, number=0, lane=0))


def causal_pairs(length: int) -> int:
    """How many (query, key) a causal sequence has.

    >>> causal_pairs(3)  # 1 + 2 + 3
    6
    """
    return length * (length + 1) // 2


def packs_per_step(settings: Settings) -> int:
    """Packs of ``max_seq_len`` that hold ``tokens_per_step``."""
    return max(1, settings.tokens_per_step // settings.max_seq_len)


def slices(items: Sequence[T], count: int) -> Iterator[Sequence[T]]:
    """So many at a time; the last may be fewer."""
    return (items[start : start + count] for start in range(0, len(items), count))


def even_parts(items: Sequence[T], count: int) -> Iterator[Sequence[T]]:
    """So many parts, in order, whose sizes differ by one at most.

    >>> list(even_parts("abcdefg", 3))
    ['ab', 'cd', 'efg']
    """
    ends = [len(items) * i // count for i in range(count + 1)]
    return (items[start:stop] for start, stop in pairwise(ends))


def longest(samples: Samples) -> int:
    """The most tokens of a sample."""
    return max(len(sample["tokens"]) for sample in samples)


def size(samples: Samples) -> int:
    """All tokens."""
    return sum(len(sample["tokens"]) for sample in samples)
