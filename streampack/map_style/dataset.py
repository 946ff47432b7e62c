"""`PackedDataset`, the map-style drop-in for torchtune's."""

from __future__ import annotations

import logging
import operator
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.utils.data import Dataset

from streampack.accounting import Ledger, nothing_to_pack, trains_nothing, warn_of_untrained
from streampack.lanes.lane_config import UNTRAINED
from streampack.map_style import parity as torchtune
from streampack.packing.assemble import assemble
from streampack.packing.batch import to_torchtune
from streampack.packing.foreign_loader import refuse_foreign_loader
from streampack.packing.groups import why_untrained
from streampack.packing.planner import plan_samples
from streampack.packing.samples import read_sample, with_eos_of
from streampack.packing.settings import Packing, trained_if_split
from streampack.packing.strategies import PADDED
from streampack.sources.as_source import by_rows
from streampack.sources.torchtune_rows import null_safe
from streampack.types import Fragment, Pack, Sample
from streampack.validation import require, require_positive, require_token_id

log = logging.getLogger(__name__)

FLATTEN = "give the Trainer data_collator=FlatteningCollator() and set remove_unused_columns=False in TrainingArguments"


class PackedDataset(Dataset[dict[str, Any]]):
    """Packs of a map-style dataset, planned at construction and assembled when asked for.

    Has the arguments of ``torchtune.datasets.PackedDataset``. It reads the dataset once for the lengths and keeps only
    the plan, 32 bytes a sample; ``self[i]`` reads the samples of pack i again. So the dataset must give the same sample
    each time, and a sample in n packs is read n times: for long documents `IterablePackedDataset`, which reads each
    once, is faster.

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
        split_across_pack: see `IterablePackedDataset`, as for ``strategy``, ``buffer_size``, ``overlong``,
            ``max_seqs_per_pack``, ``pad_seqs_to``, ``untrained`` and ``vocab_size``.
        eos_id: the token that ends samples. One that ended with it and is cut by ``"truncate"`` ends with it again.
        parity: ``"torchtune"`` makes torchtune's packs instead, token for token, with its labels and positions; see
            `streampack.map_style.parity`.

    Raises:
        ValueError: for a bad setting, or a bad sample or one without a token, with its number, at construction;
            later for a sample whose length has changed since.
    """

    def __init__(
        self,
        ds: Any,
        *,
        max_seq_len: int,
        padding_idx: int = 0,
        max_packs: int | None = None,
        split_across_pack: bool = False,
        strategy: str | None = None,
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
        if len(ds) == 0:
            raise ValueError(f"the dataset ({type(ds).__name__}) is empty; it must have at least one sample")
        if untrained is not None:
            require(untrained, "untrained", UNTRAINED)
        if parity is not None:
            require(parity, "parity", ("torchtune",))
            strategy = torchtune.strategy_of(
                strategy,
                split_across_pack=split_across_pack,
                pad_seqs_to=pad_seqs_to,
                overlong=overlong,
                max_seqs_per_pack=max_seqs_per_pack,
                untrained=untrained,
            )
        if vocab_size is not None:
            vocab_size = require_positive(vocab_size, "vocab_size")
        if eos_id is not None:
            eos_id = require_token_id(eos_id, "eos_id", vocab_size=vocab_size)
        if max_packs is not None:
            require_positive(max_packs, "max_packs", least=0)
        if strategy == PADDED:
            raise ValueError(
                f"strategy={PADDED!r} makes packs of one sample and its length, and a PackedDataset has packs of one "
                "length; train on the dataset as it is, or give it to an IterablePackedDataset"
            )
        self.packing = Packing(
            max_seq_len,
            strategy=strategy,
            buffer_size=buffer_size,
            split_across_pack=split_across_pack,
            overlong=overlong,
            max_seqs_per_pack=max_seqs_per_pack,
            pad_seqs_to=pad_seqs_to,
        )
        self.ds = null_safe(ds)
        self.max_seq_len = max_seq_len
        self.padding_idx = require_token_id(padding_idx, "padding_idx", vocab_size=vocab_size)
        self.eos_id = eos_id
        self.untrained = untrained
        self.vocab_size = vocab_size
        self.parity = parity
        self._ledger = Ledger()
        self._plan(max_packs)

    def _plan(self, max_packs: int | None) -> None:
        """Read the lengths, no further than ``max_packs`` needs, and store the plan in arrays.

        Arrays take a tenth of the memory of lists. Forked workers share their memory with the main process, because
        reading an array changes no reference counts.
        """
        lengths, spans, ends = array("q"), array("q"), array("q", [0])
        for pack in islice(plan_samples(self._kept(lengths), self.packing), max_packs):
            for span in pack:
                spans.extend(span)
                self._ledger.packed += span.stop - span.start
            ends.append(len(spans) // 3)
        self._lengths = np.array(lengths, np.int64)  # [samples read]
        # [sequences, 3]: sample, start and stop of each sequence. Those of pack i are spans[ends[i] : ends[i + 1]].
        self._spans = np.array(spans, np.int64).reshape(-1, 3)
        self._ends = np.array(ends, np.int64)  # [packs + 1]
        if not len(self) and max_packs != 0:
            log.warning("%s", nothing_to_pack(self._ledger))
        self._ledger.packs = len(self)
        self._ledger.capacity = len(self) * self.max_seq_len
        if self.untrained is None and self._ledger.untrained and _is_first_rank():
            warn_of_untrained(self._ledger, max_seq_len=self.max_seq_len)
        log.info("%r", self)

    def _kept(self, lengths: array[int]) -> Iterator[tuple[int, int]]:
        """Yield (number, length) of every sample to be packed; append every length to ``lengths``, and count drops."""
        ledger = self._ledger
        for index in range(len(self.ds)):
            sample = read_sample(self.ds, index, vocab_size=self.vocab_size)
            length = sample.tokens.size
            try:
                bounds = self.packing.pieces_of(length)
                kept = sum(stop - start for start, stop in bounds)
                # With parity, the first label of a sequence is trained, too.
                untrained = (
                    not self.parity
                    and bool(bounds)
                    and all(trains_nothing(sample.cut(start, stop)) for start, stop in bounds)
                )
                if untrained and not ledger.example:
                    why = why_untrained(sample, kept, self.packing)
                    if self.untrained == "error":
                        raise ValueError(f"{why}, or set untrained to 'drop' or 'keep'")
                    ledger.example = f"sample {index} {why}"
            except ValueError as error:
                raise ValueError(f"sample {index} {error}") from None
            lengths.append(length)
            ledger.samples += 1
            ledger.untrained += untrained
            ledger.tokens_in += length
            if untrained and self.untrained == "drop":
                ledger.drop("untrained", length)
                continue
            if kept < length:
                ledger.drop("truncated" if kept else "overlong", length - kept)
            if kept:
                yield index, length

    def _read_again(self, index: int) -> Sample:
        """Read a planned sample; a truncated one gets its EOS."""
        length = int(self._lengths[index])
        sample = read_sample(self.ds, index, vocab_size=self.vocab_size, planned=length)
        if self.packing.overlong == "truncate" and length > self.max_seq_len:
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
            tokens, labels, input_pos = torchtune.assemble(
                sequences, [start for _, start, _ in spans], **sizes
            )
        else:
            tokens, labels = assemble(sequences, **sizes, pad_seqs_to=self.packing.pad_seqs_to)
        fragments = fragments_of(spans, samples, self.packing, isolated=not self.parity)
        seq_lens = tuple(fragment.length for fragment in fragments)
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


def fragments_of(
    spans: Iterable[Sequence[int]], samples: Mapping[int, Sample], packing: Packing, *, isolated: bool
) -> tuple[Fragment, ...]:
    """Return the fragments of sequences, each a sample's number and its first and last token there."""
    return tuple(
        Fragment(
            (index,),
            start,
            stop,
            trained_if_split(samples[index], start, stop, packing=packing, isolated=isolated),
            packing.padded(stop - start) - (stop - start),
        )
        for index, start, stop in spans
    )


def _is_first_rank() -> bool:
    return not (dist.is_available() and dist.is_initialized() and dist.get_rank() > 0)
