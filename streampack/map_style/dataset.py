"""`PackedDataset`: the map-style drop-in for torchtune's, and the builder that a stock recipe's YAML names."""

from __future__ import annotations

import functools
import logging
import operator
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.utils.data import Dataset

from streampack.accounting import Ledger, trains_nothing
from streampack.instantiate import COMPONENT, build
from streampack.map_style import parity as torchtune_parity
from streampack.packing.assemble import assemble, require_id, trained_if_split, untrained_error, with_eos
from streampack.packing.batch import to_torchtune
from streampack.packing.collator_check import refuse_foreign_collator
from streampack.packing.encoders import check_tokenizer, guard_datasets
from streampack.packing.planner import plan_samples
from streampack.packing.settings import Packing
from streampack.packing.token_rows import read_sample
from streampack.sources.column_tables import by_rows
from streampack.streaming.empty_runs import nothing_to_pack
from streampack.streaming.lane_config import UNTRAINED
from streampack.streaming.untrained import warn_of_untrained
from streampack.types import Fragment, Pack, Sample
from streampack.validation import require, require_positive

log = logging.getLogger(__name__)


class PackedDataset(Dataset[dict[str, Any]]):
    """Packs of a map-style dataset, planned at construction and assembled when asked for.

    Takes what ``torchtune.datasets.PackedDataset`` takes, and ``isinstance`` says that it is one. It reads
    the dataset once for the lengths and keeps only the plan, 32 bytes a sample; ``self[i]`` reads the
    samples of pack i again. So a sample must come out the same each time, and one that crosses n packs is
    read n times: for long documents `IterablePackedDataset`, which reads each once, is faster.

    >>> rows = [{"tokens": [i] * n, "labels": [i] * n} for i, n in enumerate([5, 4, 2, 3, 4])]
    >>> packs = PackedDataset(rows, max_seq_len=8)
    >>> packs
    <PackedDataset: 3 packs of 8 tokens from 5 samples, 25.0% padding, exact_fit>
    >>> packs[0]["tokens"].tolist(), packs[0]["seq_lens"].tolist()
    ([0, 0, 0, 0, 0, 3, 3, 3], [5, 3])

    A pack is the dict that an `IterablePackedDataset` yields; torchtune's ``padded_collate_packed`` and
    `collate_packed` both take it.

    Args:
        ds: a map-style dataset of ``{"tokens", "labels"}`` or ``{"input_ids"}``; or columns of such.
        max_seq_len: tokens in a pack.
        padding_idx: the token that fills a pack's end.
        max_packs: stop at so many packs; what was read and not packed stands in the ledger as buffered.
        split_across_pack: packs are always full, and the sample that crosses a pack's end continues in
            the next. For pretraining.
        strategy: ``"exact_fit"`` (default), ``"best_fit"``, ``"first_fit"``, ``"next_fit"``, ``"wrap"``.
        buffer_size: how many samples the planner chooses from.
        overlong: what becomes of a sample longer than ``max_seq_len``: ``"error"``, ``"drop"``,
            ``"truncate"`` or ``"split"``. Default ``"error"``, with ``split_across_pack`` ``"split"``.
        truncate_side: the side that ``"truncate"`` cuts off.
        max_seqs_per_pack: at most so many sequences in a pack; the rest is padding. For static shapes: `cu_seqlens`
            is as long for every batch. Leave room, or short samples will not fill a pack.
        truncate_eos: a token id that replaces the last token of a sample cut on the right.
        empty: ``"error"`` or ``"drop"``, for samples without a token.
        untrained: what becomes of a sample of which no token is trained: ``"keep"``, ``"drop"`` or ``"error"``.
            Default: it is kept and counted in the ledger, and a warning says how many there are.
        vocab_size: if given, token ids must be below it.
        parity: ``"torchtune"`` makes torchtune's packs instead, token for token, with its labels,
            positions and errors; the settings after ``split_across_pack`` then keep their defaults.

    Raises:
        ValueError: for a bad setting or a bad sample, with its number, at construction; later for a sample
            whose length is another than it was then.
    """

    def __init__(
        self,
        ds: Any,
        *,
        max_seq_len: int,
        padding_idx: int = 0,
        max_packs: int | None = None,
        split_across_pack: bool = False,
        strategy: str = "exact_fit",
        buffer_size: int = 128,
        overlong: str | None = None,
        truncate_side: str = "right",
        max_seqs_per_pack: int | None = None,
        truncate_eos: int | None = None,
        empty: str = "error",
        untrained: str | None = None,
        vocab_size: int | None = None,
        parity: str | None = None,
    ) -> None:
        ds = by_rows(ds)
        if not (hasattr(ds, "__len__") and hasattr(ds, "__getitem__")):
            raise ValueError(
                f"a {type(ds).__name__} has no samples by number (it needs __len__ and __getitem__); "
                "pack a stream with IterablePackedDataset"
            )
        if parity is not None:
            require(parity, "parity", ("torchtune",))
        require(empty, "empty", ("error", "drop"))
        if untrained is not None:
            require(untrained, "untrained", UNTRAINED)
        settings = (
            strategy,
            buffer_size,
            overlong,
            truncate_side,
            max_seqs_per_pack,
            truncate_eos,
            empty,
            untrained,
        )
        if parity and settings != ("exact_fit", 128, None, "right", None, None, "error", None):
            raise ValueError(
                "parity='torchtune' packs as torchtune does, so strategy, buffer_size, overlong, truncate_side, "
                "max_seqs_per_pack, truncate_eos, empty and untrained have no effect; leave them out, or leave parity "
                "out"
            )
        if vocab_size is not None:
            vocab_size = require_positive(vocab_size, "vocab_size")
        padding_idx = require_id(padding_idx, "padding_idx", vocab_size=vocab_size)
        if truncate_eos is not None:
            truncate_eos = require_id(truncate_eos, "truncate_eos", vocab_size=vocab_size)
        if max_packs is not None and (type(max_packs) is not int or max_packs < 0):
            raise ValueError(
                f"max_packs={max_packs!r} is no number of packs; give at least 0, or None for all"
            )
        if len(ds) == 0 and not parity:
            raise ValueError(f"the dataset ({type(ds).__name__}) is empty; it must have at least one sample")
        self.packing = Packing(
            max_seq_len, strategy, buffer_size, split_across_pack, overlong, truncate_side, max_seqs_per_pack
        )
        if not parity:  # which is to make what torchtune makes, whatever that is
            guard_datasets(ds)
        self.ds = ds
        self.max_seq_len = max_seq_len
        self.padding_idx = padding_idx
        self.max_packs = max_packs
        self.split_across_pack = self.packing.split_across_pack
        self.truncate_eos = truncate_eos
        self.empty = empty
        self.untrained = untrained
        self.vocab_size = vocab_size
        self.parity = parity
        self._ledger = Ledger()
        self._plan()

    def _plan(self) -> None:
        """Read the lengths, no further than ``max_packs`` needs, and keep the plan.

        Arrays and not lists: a tenth of the memory, and forked workers share them, because nothing in
        them has a reference count that reading would write to.
        """
        lengths, spans, ends = array("q"), array("q"), array("q", [0])
        for pack in self._planned_packs(lengths):
            for span in pack:
                spans.extend(span)
                self._ledger.packed += span.stop - span.start
            ends.append(len(spans) // 3)
        self._lengths = np.array(lengths, np.int64)  # [samples read]
        self._spans = np.array(spans, np.int64).reshape(-1, 3)  # [sequences, (sample, start, stop)]
        self._ends = np.array(ends, np.int64)  # [packs + 1], the spans of pack i are ends[i] to ends[i + 1]
        if not len(self) and not self.parity and self.max_packs != 0:
            log.warning("%s", nothing_to_pack(self._ledger))
        self._ledger.packs = len(self)
        self._ledger.slots = len(self) * self.max_seq_len
        if self.untrained is None:
            warn_of_untrained(self._ledger, max_seq_len=self.max_seq_len)
        log.info("%r", self)

    def _planned_packs(self, lengths: array[int]) -> Iterable[Any]:
        if self.parity:
            return torchtune_parity.plan(
                (length for _, length in self._read_lengths(lengths)),
                self.max_seq_len,
                split_across_pack=self.split_across_pack,
                max_packs=self.max_packs,
            )
        return islice(plan_samples(self._read_lengths(lengths), self.packing), self.max_packs)

    def _read_lengths(self, lengths: array[int]) -> Iterator[tuple[int, int]]:
        """(number, tokens) of every sample that is to be packed. The others are booked as dropped."""
        for index in _progress(len(self.ds)):
            sample = self._read(index)
            length = sample.tokens.size
            kept, untrained = (length, False) if self.parity else self._kept(index, sample)
            lengths.append(length)
            self._ledger.samples += 1
            self._ledger.untrained += untrained
            self._ledger.tokens_in += length
            if kept < length or (not length and self.empty == "drop"):
                dropped = "untrained" if untrained else "overlong" if length else "empty"
                self._ledger.drop("truncated" if kept else dropped, length - kept)
            if kept or self.parity:
                yield index, length

    def _kept(self, index: int, sample: Sample) -> tuple[int, bool]:
        """How many of a sample's tokens the settings keep, and whether they train nothing."""
        length = sample.tokens.size
        if length == 0 and self.empty == "drop":
            return 0, False
        try:
            bounds = self.packing.pieces_of(length)
            untrained = bool(bounds) and all(
                trains_nothing(sample.cut(start, stop)) for start, stop in bounds
            )
            if untrained and self.untrained == "error":
                raise untrained_error(length, self.packing)
        except ValueError as error:
            raise ValueError(f"sample {index} {error}") from None
        if untrained and self.untrained == "drop":
            return 0, True
        return sum(stop - start for start, stop in bounds), untrained

    def _read(self, index: int) -> Sample:
        return read_sample(self.ds, index, vocab_size=self.vocab_size)

    def _read_again(self, index: int) -> Sample:
        sample, planned = self._read(index), self._lengths[index]
        if sample.tokens.size != planned:
            raise ValueError(
                f"sample {index} has {sample.tokens.size} tokens and had {planned} when the packs were planned; "
                "make the dataset give the same sample each time (no random transforms, no file that changes)"
            )
        packing = self.packing
        cut = packing.overlong == "truncate" and packing.truncate_side == "right"
        if cut and self.truncate_eos is not None and planned > self.max_seq_len:
            return with_eos(sample.cut(0, self.max_seq_len), self.truncate_eos)
        return sample

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitems__(self, indices: Iterable[int]) -> list[dict[str, Any]]:
        # torch's DataLoader asks for a batch here.
        refuse_foreign_collator(sys._getframe(1).f_locals.get("self"), map_style=True)
        return [self[index] for index in indices]

    def __getitem__(self, index: Any) -> dict[str, Any]:
        if isinstance(index, slice):
            raise TypeError(
                "a pack is asked for by its number, not by a slice; for a part use torch.utils.data.Subset"
            )
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"there is no pack {number}: the dataset has {len(self)} packs, counted from 0")
        number %= len(self)
        spans = self._spans[self._ends[number] : self._ends[number + 1]].tolist()
        samples = {sample: self._read_again(sample) for sample in {sample for sample, _, _ in spans}}
        sequences = [samples[sample].cut(start, stop) for sample, start, stop in spans]
        input_pos = None
        if self.parity:
            tokens, labels, input_pos = torchtune_parity.assemble(
                sequences,
                [start for _, start, _ in spans],
                max_seq_len=self.max_seq_len,
                padding_idx=self.padding_idx,
            )
        else:
            tokens, labels = assemble(sequences, max_seq_len=self.max_seq_len, padding_idx=self.padding_idx)
        trained = partial(trained_if_split, packing=self.packing, isolated=not self.parity)
        return to_torchtune(
            Pack(
                tokens,
                labels,
                seq_lens=tuple(stop - start for _, start, stop in spans),
                fragments=tuple(
                    Fragment((sample,), start, stop, trained(samples[sample], start, stop))
                    for sample, start, stop in spans
                ),
                epoch=0,
                number=number,
                lane=0,
                receipt=((), b""),
            ),
            input_pos,
        )

    def ledger(self) -> Ledger:
        """Where every token went that was read for the plan."""
        return self._ledger

    def trace(self, fragment: Fragment) -> dict[str, Any]:
        """From a sequence in a pack back to its sample: the place, the row, and the sequence's tokens.

        >>> packs = PackedDataset([{"tokens": [7, 8], "labels": [7, 8]}], max_seq_len=4)
        >>> packs.trace(packs[0]["fragments"][0])
        {'place': 'sample 0', 'row': {'tokens': [7, 8], 'labels': [7, 8]}, 'tokens': [7, 8]}
        """
        [index] = fragment.row_id
        tokens = self._read(index).tokens[fragment.start : fragment.stop]
        return {"place": f"sample {index}", "row": self.ds[index], "tokens": tokens.tolist()}

    def __repr__(self) -> str:
        name = self.parity or self.packing.strategy
        return (
            f"<{type(self).__name__}: {len(self)} packs of {self.max_seq_len} tokens "
            f"from {self._ledger.samples} samples, {self._ledger.padding:.1%} padding, {name}>"
        )

    # Where an object's type does not fit, `isinstance` asks for its `__class__` (so unittest.mock's specs work). So
    # torchtune's check holds whenever torchtune is there to ask, even if it came after this object, and
    # neither importing this module nor making an object has to wait nine seconds for it.
    @property  # type: ignore[misc]  # object's can be assigned to, and need not be here
    def __class__(self) -> type:
        ours: type = type(self)
        theirs = getattr(sys.modules.get("torchtune.datasets"), "PackedDataset", None)
        return ours if theirs is None else _subclass(ours, theirs)

    def __reduce__(self) -> tuple[Any, ...]:
        # pickle's default looks at __class__, and would look for that subclass by name.
        return object.__new__, (type(self),), self.__dict__


@functools.cache
def _subclass(ours: type, theirs: type) -> type:
    if issubclass(ours, theirs):
        return ours
    names = {"__module__": ours.__module__, "__qualname__": ours.__qualname__, "__doc__": ours.__doc__}
    return type(ours.__name__, (ours, theirs), names)


def _progress(count: int) -> Iterable[int]:
    """``range(count)``, with a progress bar on rank 0 if it takes more than a second and tqdm is there."""
    try:
        from tqdm import tqdm
    except ImportError:
        return range(count)
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    bar: Iterable[int] = tqdm(
        range(count), desc="Planning packs", unit=" samples", dynamic_ncols=True, delay=1, disable=rank != 0
    )
    return bar


def packed_dataset(
    tokenizer: Any,
    *,
    dataset: Mapping[str, Any],
    packed: bool = False,
    max_seq_len: int | None = None,
    padding_idx: int | None = None,
    max_packs: int | None = None,
    split_across_pack: bool = False,
    strategy: str = "exact_fit",
    buffer_size: int = 128,
    overlong: str | None = None,
    truncate_side: str = "right",
    max_seqs_per_pack: int | None = None,
    truncate_eos: int | None = None,
    empty: str = "error",
    untrained: str | None = None,
    vocab_size: int | None = None,
    parity: str | None = None,
) -> PackedDataset:
    """A `PackedDataset` for the YAML of a stock torchtune recipe.

    ::

        dataset:
          _component_: streampack.packed_dataset
          packed: True
          dataset:
            _component_: torchtune.datasets.alpaca_dataset

    ``packed: True`` must stand here, because the recipe looks for it here. The recipe passes ``tokenizer``,
    whose ``max_seq_len`` and ``pad_id`` are the defaults. The inner node is built with a copy of it that
    does not cut, so that ``overlong`` decides what becomes of a long sample. It may name what any config of ours may,
    see `streampack.instantiate`.

    With ``parity="torchtune"`` the packs are those of the inner builder's own ``packed: True``: the tokenizer
    cuts, and the padding is 0, whatever the ``pad_id``. (``text_completion_dataset`` then splits by default:
    write ``split_across_pack: True`` here.)

    The other arguments are those of `PackedDataset`.

    Raises:
        ValueError: for a node with which a stock recipe would train wrongly, and all that `PackedDataset` refuses.
    """
    if packed is not True:
        raise ValueError(
            f"packed={packed!r}: write `packed: True` beside `_component_: streampack.packed_dataset`. The recipe "
            "chooses its collate function by it; without it the positions and the boundaries between samples "
            "would be dropped in silence, and samples would see one another"
        )
    if not isinstance(dataset, Mapping) or COMPONENT not in dataset:
        raise ValueError(
            f"dataset={dataset!r} must be a node with a {COMPONENT}, such as "
            "{_component_: torchtune.datasets.alpaca_dataset}; PackedDataset(ds, max_seq_len=...) takes a built one"
        )
    for name in ("packed", "split_across_pack", "max_packs"):
        if dataset.get(name):
            raise ValueError(
                f"{name}={dataset[name]!r} in the inner dataset node: packing is the outer node's, where it "
                f"takes {name} too; remove it from the inner one"
            )
    if max_seq_len is None:
        max_seq_len = getattr(tokenizer, "max_seq_len", None)
    if max_seq_len is None:
        raise ValueError(
            "max_seq_len is None here and in the tokenizer; set max_seq_len, the tokens of a pack, in this node"
        )
    if padding_idx is None:
        padding_idx = 0 if parity else getattr(tokenizer, "pad_id", None)
    if padding_idx is None:
        raise ValueError(
            f"the tokenizer ({type(tokenizer).__name__}) has no pad_id; set padding_idx in this node"
        )
    return PackedDataset(
        build(dataset, tokenizer if parity else check_tokenizer(tokenizer)),
        max_seq_len=max_seq_len,
        padding_idx=padding_idx,
        max_packs=max_packs,
        split_across_pack=split_across_pack,
        strategy=strategy,
        buffer_size=buffer_size,
        overlong=overlong,
        truncate_side=truncate_side,
        max_seqs_per_pack=max_seqs_per_pack,
        truncate_eos=truncate_eos,
        empty=empty,
        untrained=untrained,
        vocab_size=vocab_size,
        parity=parity,
    )
