"""`PackedDataset`, the map-style drop-in for torchtune's."""

from __future__ import annotations

import functools
import logging
import operator
import sys
from array import array
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from streampack.accounting import Ledger, trains_nothing
from streampack.map_style.parity import assemble as parity_assemble
from streampack.map_style.parity import plan as parity_plan
from streampack.map_style.parity import require_defaults
from streampack.map_style.read_sample import read_sample
from streampack.map_style.samplers import range_with_progress
from streampack.packing.assemble import assemble
from streampack.packing.batch import to_torchtune
from streampack.packing.cut_samples import trained_if_split, untrained_error, with_eos_of
from streampack.packing.foreign_loader import refuse_foreign_loader
from streampack.packing.planner import plan_samples
from streampack.packing.settings import Packing
from streampack.sources.as_source import by_rows
from streampack.sources.torchtune_rows import refusing_nulls
from streampack.streaming.lane_config import UNTRAINED
from streampack.streaming.ledger_messages import UntrainedWarning, nothing_to_pack
from streampack.types import Fragment, Pack, Sample
from streampack.validation import naming_nearest, require, require_positive, require_token_id

log = logging.getLogger(__name__)

FLATTEN = "give the Trainer data_collator=FlatteningCollator() and set remove_unused_columns=False in TrainingArguments"


class PackedDataset(Dataset[dict[str, Any]]):
    """Packs of a map-style dataset, planned at construction and assembled when asked for.

    Has the arguments of ``torchtune.datasets.PackedDataset`` and is an instance of it. It reads the dataset once for
    the lengths and keeps only the plan, 32 bytes a sample; ``self[i]`` reads the samples of pack i again. So the
    dataset must give the same sample each time, and a sample in n packs is read n times: for long documents
    `IterablePackedDataset`, which reads each once, is faster.

    >>> rows = [{"tokens": [i] * n, "labels": [i] * n} for i, n in enumerate([5, 4, 2, 3, 4])]
    >>> packs = PackedDataset(rows, max_seq_len=8)
    >>> packs
    <PackedDataset: 3 packs of 8 tokens from 5 samples, 25.0% padding, exact_fit>
    >>> packs[0]["tokens"].tolist(), packs[0]["seq_lens"].tolist()
    ([0, 0, 0, 0, 0, 3, 3, 3], [5, 3])

    A pack is the dict that an `IterablePackedDataset` yields; torchtune's ``padded_collate_packed`` and
    `collate_packed` both take it.

    Args:
        ds: a map-style dataset of ``{"tokens", "labels"}`` or ``{"input_ids"}``, or a table of such columns.
        max_seq_len: tokens in a pack.
        padding_idx: the token that fills a pack's end.
        max_packs: stop at this many packs; the ledger counts what was read and not packed as buffered.
        split_across_pack: fill every pack; a sample that crosses a pack's end continues in the next. For
            pretraining; no strategy is used.
        strategy: ``"exact_fit"`` (default), ``"best_fit"``, ``"first_fit"`` or ``"next_fit"``.
        buffer_size: how many samples the planner chooses from.
        overlong: what to do with a sample longer than ``max_seq_len``: ``"error"``, ``"drop"``, ``"truncate"`` (its
            end is cut off), ``"truncate_left"`` (its beginning is) or ``"split"``. Default ``"error"``, with
            ``split_across_pack`` ``"split"``.
        max_seqs_per_pack: at most this many sequences in a pack; the rest is padding. It makes `cu_seqlens` as long for
            every batch, for static shapes. Leave room, or short samples will not fill a pack.
        pad_seqs_to: pad every sequence to a multiple of this many tokens, inside the sequence: 2 x n for context
            parallelism over n ranks.
        eos_id: the token that ends samples. One that ended with it and is cut by ``"truncate"`` ends with it again.
        untrained: what to do with a sample without a trained token: ``"keep"``, ``"drop"`` or ``"error"``.
            By default it is kept and counted in the ledger, and a warning tells how many there are.
        vocab_size: if given, token ids must be below it.
        parity: ``"torchtune"`` makes torchtune's packs instead, token for token, with its labels,
            positions and errors; the settings after ``split_across_pack`` then keep their defaults.

    Raises:
        ValueError: for a bad setting, or a bad sample or one without a token, with its number, at construction;
            later for a sample whose length has changed since.
    """

    @naming_nearest
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
        max_seqs_per_pack: int | None = None,
        pad_seqs_to: int = 1,
        eos_id: int | None = None,
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
        if untrained is not None:
            require(untrained, "untrained", UNTRAINED)
        if parity is not None:
            require(parity, "parity", ("torchtune",))
            settings = strategy, buffer_size, overlong, max_seqs_per_pack, pad_seqs_to
            require_defaults((*settings, eos_id, untrained))
        if vocab_size is not None:
            vocab_size = require_positive(vocab_size, "vocab_size")
        padding_idx = require_token_id(padding_idx, "padding_idx", vocab_size=vocab_size)
        if eos_id is not None:
            eos_id = require_token_id(eos_id, "eos_id", vocab_size=vocab_size)
        if max_packs is not None and (type(max_packs) is not int or max_packs < 0):
            raise ValueError(
                f"max_packs={max_packs!r} is no number of packs; give at least 0, or None for all"
            )
        if len(ds) == 0 and not parity:
            raise ValueError(f"the dataset ({type(ds).__name__}) is empty; it must have at least one sample")
        self.packing = Packing(
            max_seq_len,
            strategy=strategy,
            buffer_size=buffer_size,
            split_across_pack=split_across_pack,
            overlong=overlong,
            max_seqs_per_pack=max_seqs_per_pack,
            pad_seqs_to=pad_seqs_to,
        )
        self.ds = ds if parity else refusing_nulls(ds)
        self.max_seq_len = max_seq_len
        self.padding_idx = padding_idx
        self.max_packs = max_packs
        self.split_across_pack = self.packing.split_across_pack
        self.eos_id = eos_id
        self.untrained = untrained
        self.vocab_size = vocab_size
        self.parity = parity
        self._ledger = Ledger()
        self._plan()

    def _plan(self) -> None:
        """Read the lengths, no further than ``max_packs`` needs, and store the plan in arrays.

        Arrays take a tenth of the memory of lists. Forked workers share their memory with the main process, because
        reading an array changes no reference counts.
        """
        lengths, spans, ends = array("q"), array("q"), array("q", [0])
        samples, split, limit = self._read_lengths(lengths), self.packing.split_across_pack, self.max_packs
        if self.parity:
            numbers = (length for _, length in samples)
            packs = parity_plan(numbers, self.max_seq_len, split_across_pack=split, max_packs=limit)
        else:
            packs = islice(plan_samples(samples, self.packing), limit)
        for pack in packs:
            for span in pack:
                spans.extend(span)
                self._ledger.packed += span.stop - span.start
            ends.append(len(spans) // 3)
        self._lengths = np.array(lengths, np.int64)  # [samples read]
        # [sequences, 3]: sample, start and stop of each sequence. Those of pack i are spans[ends[i] : ends[i + 1]].
        self._spans = np.array(spans, np.int64).reshape(-1, 3)
        self._ends = np.array(ends, np.int64)  # [packs + 1]
        if not len(self) and not self.parity and self.max_packs != 0:
            log.warning("%s", nothing_to_pack(self._ledger))
        self._ledger.packs = len(self)
        self._ledger.capacity = len(self) * self.max_seq_len
        UntrainedWarning(wanted=self.untrained is None, max_seq_len=self.max_seq_len).look_at(self._ledger)
        log.info("%r", self)

    def _read_lengths(self, lengths: array[int]) -> Iterator[tuple[int, int]]:
        """Yield (number, length) of every sample to be packed; append every length to ``lengths``, and count drops."""
        for index in range_with_progress(len(self.ds)):
            sample = read_sample(self.ds, index, vocab_size=self.vocab_size)
            length = sample.tokens.size
            kept, untrained = (length, False) if self.parity else self._count_kept(index, sample)
            lengths.append(length)
            self._ledger.samples += 1
            self._ledger.untrained += untrained
            self._ledger.tokens_in += length
            if kept < length:
                dropped = "untrained" if untrained else "overlong"
                self._ledger.drop("truncated" if kept else dropped, length - kept)
            if kept or self.parity:
                yield index, length

    def _count_kept(self, index: int, sample: Sample) -> tuple[int, bool]:
        """Return how many of a sample's tokens the settings keep, and whether none of them is trained."""
        length = sample.tokens.size
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

    def _read_again(self, index: int) -> Sample:
        """Read a planned sample, and raise if its length has changed. A truncated one gets its EOS."""
        sample, planned = read_sample(self.ds, index, vocab_size=self.vocab_size), self._lengths[index]
        if sample.tokens.size != planned:
            raise ValueError(
                f"sample {index} has {sample.tokens.size} tokens and had {planned} when the packs were planned; "
                "make the dataset give the same sample each time (no random transforms, no file that changes)"
            )
        if self.packing.overlong == "truncate" and planned > self.max_seq_len:
            return with_eos_of(sample, sample.cut(0, self.max_seq_len), {self.eos_id})
        return sample

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: Any) -> dict[str, Any]:
        refuse_foreign_loader(self, way_out=FLATTEN)
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"there is no pack {number}: the dataset has {len(self)} packs, counted from 0")
        number %= len(self)
        spans = self._spans[self._ends[number] : self._ends[number + 1]].tolist()
        samples = {sample: self._read_again(sample) for sample in {sample for sample, _, _ in spans}}
        sequences = [samples[sample].cut(start, stop) for sample, start, stop in spans]
        sizes = {"max_seq_len": self.max_seq_len, "padding_idx": self.padding_idx}
        input_pos = None
        if self.parity:
            starts = [start for _, start, _ in spans]
            tokens, labels, input_pos = parity_assemble(sequences, starts, **sizes)
        else:
            tokens, labels = assemble(sequences, **sizes, pad_seqs_to=self.packing.pad_seqs_to)
        trained = partial(trained_if_split, packing=self.packing, isolated=not self.parity)
        seq_lens = tuple(self.packing.padded(stop - start) for _, start, stop in spans)
        fragments = tuple(
            Fragment((sample,), start, stop, trained(samples[sample], start, stop), length - (stop - start))
            for (sample, start, stop), length in zip(spans, seq_lens, strict=True)
        )
        return to_torchtune(
            Pack(tokens, labels, seq_lens, fragments, epoch=0, number=number, lane=0, input_pos=input_pos)
        )

    def ledger(self) -> Ledger:
        """Return the ledger: where every token went that was read for the plan."""
        return self._ledger

    def trace(self, fragment: Fragment) -> dict[str, Any]:
        """Trace a sequence in a pack back to its sample: the place, the row, and the sequence's tokens.

        >>> packs = PackedDataset([{"tokens": [7, 8], "labels": [7, 8]}], max_seq_len=4)
        >>> packs.trace(packs[0]["fragments"][0])
        {'place': 'sample 0', 'row': {'tokens': [7, 8], 'labels': [7, 8]}, 'tokens': [7, 8]}
        """
        [index] = fragment.row_id
        sample = read_sample(self.ds, index, vocab_size=self.vocab_size)
        tokens = sample.tokens[fragment.start : fragment.stop]
        return {"place": f"sample {index}", "row": self.ds[index], "tokens": tokens.tolist()}

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__}: {len(self)} packs of {self.max_seq_len} tokens "
            f"from {self._ledger.samples} samples, {self._ledger.padding:.1%} padding, "
            f"{self.parity or self.packing.filled_by}>"
        )

    # `isinstance` also looks at an object's `__class__`, which here is a subclass of torchtune's class as soon as the
    # program has imported torchtune. This module does not import it, because that takes nine seconds.
    @property  # type: ignore[misc]  # object's can be assigned to
    def __class__(self) -> type:
        ours: type = type(self)
        theirs = getattr(sys.modules.get("torchtune.datasets"), "PackedDataset", None)
        return ours if theirs is None else _subclass(ours, theirs)

    def __reduce__(self) -> tuple[Any, ...]:
        # By default, pickle would look up the subclass that __class__ returns by its name.
        return object.__new__, (type(self),), self.__dict__


@functools.cache
def _subclass(ours: type, theirs: type) -> type:
    if issubclass(ours, theirs):
        return ours
    names = {"__module__": ours.__module__, "__qualname__": ours.__qualname__, "__doc__": ours.__doc__}
    return type(ours.__name__, (ours, theirs), names)
