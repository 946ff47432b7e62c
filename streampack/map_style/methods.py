"""The methods of batching that the literature compares, by name: lengths in, rows of samples out.

Eight are from Table 1 of Kundu et al., "Enhancing Training Efficiency Using Packing with Flash Attention" (2024,
arXiv 2407.09105); ``exact_fit`` is this project's own. They differ only in which samples share a row, and which rows
share a batch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple, TypeVar

from streampack.map_style.multipack import plan_steps, resolve_packs_per_step
from streampack.packing.planner import Span, plan_samples
from streampack.packing.settings import Packing
from streampack.sources.reading import permutation
from streampack.validation import require, require_positive

Row = list[Span]
"""Sequences that lie end to end in a row. An empty row is all padding; it fills up batches."""

T = TypeVar("T")


class Shape(NamedTuple):
    """The sizes of batches and steps."""

    max_seq_len: int
    batch_size: int
    num_replicas: int
    packs_per_step: int


class Method(NamedTuple):
    """A method of making batches."""

    plan: Callable[[list[Span], Shape], list[list[Row]]]
    """Make batches of rows from the pieces of samples, which are in a random order."""

    packed: bool = True
    """Whether a batch has ``batch_size`` rows of ``max_seq_len``. If not, its rows are as long as its longest."""

    cuts: bool = False
    """Whether a sample that crosses the end of a row is cut there, and continues in the next."""

    isolated: bool = True
    """Whether the samples of a row do not see one another."""

    def packing(self, *, max_seq_len: int, overlong: str | None) -> Packing:
        """Return the settings that decide how long samples are cut or dropped."""
        return Packing(max_seq_len, split_across_pack=self.cuts, overlong=overlong)


def plan_batches(
    method: str,
    lengths: Iterable[int],
    *,
    max_seq_len: int,
    batch_size: int,
    num_replicas: int = 1,
    packs_per_step: int | None = None,
    overlong: str | None = None,
    seed: int = 0,
    epoch: int = 0,
) -> list[list[Row]]:
    """Plan the batches of an epoch for all ranks: batch i is for rank ``i % num_replicas``.

    ``random_padding``: ``batch_size`` random samples, one in each row.
    ``group_by_length_padding``: the same with samples of similar lengths, as transformers' ``LengthGroupedSampler``.
    ``minibatch_packing``: ``batch_size`` random samples in one row, so that steps are those of padding.
    ``fixed_length``, ``fixed_length_posid``: samples in a random order, cut at the end of each row. With the
    first, samples of a row see one another.
    ``random_packing``: whole samples in a random order, a new row when the next does not fit.
    ``sorted_packing``: the same, from the longest sample to the shortest, over the whole epoch.
    ``multipack``: full rows that cost the ranks of a step the same; see `plan_steps`.
    ``exact_fit``: rows that exact sums fill, in a random order, as an `IterablePackedDataset` makes them.

    >>> plan_batches("minibatch_packing", [5, 4, 2, 3], max_seq_len=8, batch_size=2)
    [[[Span(index=2, start=0, stop=2), Span(index=0, start=0, stop=5)]], ...

    Args:
        method: one of `METHODS`.
        lengths: tokens of each sample.
        max_seq_len: the length of a packed row; for the others, the longest that a sample may be.
        batch_size: rows of a batch; for ``minibatch_packing``, samples.
        num_replicas: ranks.
        packs_per_step: rows of an optimizer step (for ``minibatch_packing``, samples), over all ranks and accumulated
            gradients: a multiple of ``batch_size * num_replicas``, which is the default. Batches of padding fill up
            the epoch's last step. ``multipack`` plans the rows of a step together.
        overlong: what to do with a sample longer than ``max_seq_len``: ``"error"``, ``"drop"``, ``"truncate"``,
            ``"truncate_left"`` or ``"split"``. Default ``"error"``, or ``"split"`` if the method cuts samples.
        seed: seed of the random order, with the epoch.
        epoch: number of the epoch, from 0.

    Raises:
        ValueError: for a bad setting, or a sample that is empty or too long.
    """
    require(method, "method", METHODS)
    chosen = METHODS[method]
    require_positive(batch_size, "batch_size")
    require_positive(num_replicas, "num_replicas")
    packing = chosen.packing(max_seq_len=max_seq_len, overlong=overlong)
    pieces = []
    for index, length in enumerate(lengths):
        try:
            bounds = packing.pieces_of(operator.index(length))
        except TypeError:
            raise ValueError(f"sample {index}: its length {length!r} is not a whole number") from None
        except ValueError as error:
            raise ValueError(f"sample {index} {error}") from None
        pieces += [Span(index, start, stop) for start, stop in bounds]
    if not pieces:
        raise ValueError("there is no sample to make batches of; give at least one that is not dropped")
    per_step = resolve_packs_per_step(packs_per_step, batch_size * num_replicas)
    shape = Shape(packing.max_seq_len, batch_size, num_replicas, per_step)
    batches = chosen.plan([pieces[i] for i in permutation(len(pieces), seed, epoch)], shape)
    filler: list[Row] = [[] for _ in range(batch_size if chosen.packed else 1)]
    return batches + [filler] * (-len(batches) % (per_step // batch_size))


def _random_padding(pieces: list[Span], shape: Shape) -> list[list[Row]]:
    return [[[piece] for piece in group] for group in _groups(pieces, shape.batch_size)]


def _group_by_length_padding(pieces: list[Span], shape: Shape) -> list[list[Row]]:
    """Sort groups of 50 batches by length, the longest first, as transformers does; a quarter of the data if less."""
    size = max(1, min(len(pieces) // (shape.batch_size * 4), 50)) * shape.batch_size
    groups = [sorted(group, key=_length, reverse=True) for group in _groups(pieces, size)]
    longest = max(groups, key=lambda group: _length(group[0]))
    groups[0][0], longest[0] = longest[0], groups[0][0]
    return _random_padding([piece for group in groups for piece in group], shape)


def _minibatch_packing(pieces: list[Span], shape: Shape) -> list[list[Row]]:
    return [[group] for group in _groups(pieces, shape.batch_size)]


def _packed(
    pieces: list[Span], shape: Shape, *, strategy: str = "exact_fit", split_across_pack: bool = False
) -> list[list[Row]]:
    """Pack the pieces in their order as a stream does, and fill up the last batch with empty rows."""
    packing = Packing(shape.max_seq_len, strategy, split_across_pack=split_across_pack)
    packs = plan_samples(enumerate(map(_length, pieces)), packing)
    rows = [
        [Span(pieces[i].index, pieces[i].start + start, pieces[i].start + stop) for i, start, stop in pack]
        for pack in packs
    ]
    return _groups(rows + [[] for _ in range(-len(rows) % shape.batch_size)], shape.batch_size)


def _sorted_packing(pieces: list[Span], shape: Shape) -> list[list[Row]]:
    return _packed(sorted(pieces, key=_length, reverse=True), shape, strategy="next_fit")


def _multipack(pieces: list[Span], shape: Shape) -> list[list[Row]]:
    steps = plan_steps(
        map(_length, pieces),
        max_tokens=shape.max_seq_len,
        packs_per_step=shape.packs_per_step,
        allow_empty=True,
    )
    ranks = shape.num_replicas
    return [
        # Rows are ordered by cost: dealt out in turn, they make batches of even cost.
        [[pieces[number] for number in row] for row in at_once[rank::ranks]]
        for step in steps
        for at_once in _groups(step, shape.batch_size * ranks)
        for rank in range(ranks)
    ]


METHODS = {
    "random_padding": Method(_random_padding, packed=False),
    "group_by_length_padding": Method(_group_by_length_padding, packed=False),
    "minibatch_packing": Method(_minibatch_packing, packed=False),
    "fixed_length": Method(partial(_packed, split_across_pack=True), cuts=True, isolated=False),
    "fixed_length_posid": Method(partial(_packed, split_across_pack=True), cuts=True),
    "multipack": Method(_multipack),
    "sorted_packing": Method(_sorted_packing),
    "random_packing": Method(partial(_packed, strategy="next_fit")),
    "exact_fit": Method(_packed),
}


def _length(piece: Span) -> int:
    return piece.stop - piece.start


def _groups(items: list[T], size: int) -> list[list[T]]:
    return [items[i : i + size] for i in range(0, len(items), size)]
