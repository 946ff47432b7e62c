"""The literature's methods of batching in recipes: a loader with the interface of `PackedDataLoader`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, TypeAlias

import numpy as np

from streampack.accounting import Ledger, SourceStats
from streampack.loader.data_loader import PackedDataLoader
from streampack.loader.step_meter import StepMeter
from streampack.map_style.method_loader import method_loader
from streampack.map_style.methods import METHODS
from streampack.map_style.samplers import digest_lengths
from streampack.packing.batch import Batch
from streampack.packing.settings import Packing
from streampack.sources.bad_records import Quarantine
from streampack.sources.corpus_identity import fingerprint_of
from streampack.sources.source import Source
from streampack.streaming.dataset import IterablePackedDataset
from streampack.streaming.piece_reader import Piece, PieceReader
from streampack.training.world import World
from streampack.types import IGNORE_INDEX, Fragment, Sample
from streampack.validation import require

OF_SAMPLES = (
    "corpus", "encoder", "max_seq_len", "overlong", "untrained", "seed"
)  # fmt: skip
"""Entries of a dataset's identity that decide which samples an epoch has; a state is compared by these only."""


class MethodLoader:
    """Batches of one of the `METHODS`, with the interface of a `PackedDataLoader`.

    A method plans an epoch as a whole, so every rank reads and tokenizes the corpus before the first step and keeps
    it in memory: 4 bytes a token, 8 where labels differ from the tokens. The dataset decides what happens to
    overlong and broken samples; its ``strategy``, buffer, lanes and shuffling are replaced by the method.

    An iteration begins after the last batch that was handed out, or at the loaded state.

    The constructor is a collective: it reads the whole corpus on every rank and compares what the ranks have read.

    >>> rows = [{"tokens": [i] * n, "labels": [i] * n} for i, n in enumerate([5, 4, 2, 3])]
    >>> dataset = IterablePackedDataset(rows, max_seq_len=8)
    >>> loader = MethodLoader(dataset, method="random_padding", batch_size=1, packs_per_step=2)
    >>> [tuple(batch.tokens.shape) for batch in loader], loader.batches_per_step
    ([(1, 2), (1, 5), (1, 4), (1, 3)], 2)

    Args:
        dataset: gives source, encoder, ``max_seq_len``, ``epochs`` and ``seed``.
        method: one of `METHODS`.
        batch_size: rows of a batch; for ``minibatch_packing``, samples in its one row.
        packs_per_step: rows of an optimizer step, over all ranks; a multiple of ``batch_size`` times the ranks.
        num_workers: processes that make batches of the samples.
        pin_memory: put batches into page-locked memory, for faster copies to a GPU.
        world: the ranks that divide the batches; None: a single process.

    Raises:
        ValueError: for a setting that does not fit, a row that is no sample, or ranks that read different samples.
    """

    def __init__(
        self,
        dataset: IterablePackedDataset,
        *,
        method: str,
        batch_size: int = 1,
        packs_per_step: int | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        world: World | None = None,
    ) -> None:
        require(method, "method", METHODS)
        world = world or World()
        packing = dataset.lane_config.packing
        if dataset.mix is not None:
            raise ValueError(
                f"method={method!r} plans an epoch of one source as a whole, and a mixture is drawn as it streams; "
                "leave method out"
            )
        if packing.split_across_pack and not METHODS[method].cuts:
            raise ValueError(
                f"method={method!r} cuts no sample at the end of a row; remove split_across_pack, or choose the "
                "method 'fixed_length_posid'"
            )
        if packing.max_seqs_per_pack is not None:
            raise ValueError(
                f"method={method!r} fills rows whatever the number of sequences; remove max_seqs_per_pack, or method"
            )
        if packing.pad_seqs_to > 1:
            raise ValueError(
                f"method={method!r} lays samples end to end, and pad_seqs_to={packing.pad_seqs_to} pads each; remove "
                "pad_seqs_to, or method"
            )
        self.dataset = dataset
        self.method = method
        self.world = world
        with world.raise_on_all():
            self._pieces, self._read = read_pieces(dataset, world=world)
        if world.is_main:
            dataset._untrained.look_at(self._read)
        samples = [piece.sample for piece in self._pieces]
        config = dataset.lane_config
        _require_same_on_all_ranks(samples, config.source, world)
        self.loader = method_loader(
            [sample._asdict() for sample in samples],
            method=method,
            max_seq_len=packing.max_seq_len,
            batch_size=batch_size,
            lengths=[sample.tokens.size for sample in samples],
            packs_per_step=packs_per_step,
            # `read_pieces` has dropped or cut the samples that are too long, unless they are to be split.
            overlong="split" if packing.overlong == "split" else None,
            padding_idx=config.padding_idx,
            seed=config.seed,
            num_workers=num_workers,
            pin_memory=pin_memory,
            num_replicas=world.size,
            rank=world.rank,
        )
        self.sampler: Any = self.loader.sampler
        rows_at_once = batch_size * world.size
        self.packs_per_step = packs_per_step or rows_at_once
        self.batches_per_step = self.packs_per_step // rows_at_once
        self._handed = 0  # batches that each rank has handed out in this epoch
        self._totals = Ledger()  # what all ranks have handed out since the beginning
        self._meter = StepMeter(dataset.lane_config.untrained, warns=world.is_main)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: method {self.method}, of {self.dataset}>"

    def __iter__(self) -> Iterator[Batch]:
        while True:
            # With worker processes the sampler is ahead of the batches that were handed out, so it is set back to them.
            self.sampler.load_state_dict(self.sampler.state_dict(consumed=self._handed))
            for batch in self.loader:
                self._count_batch()
                yield replace(batch, fragments=tuple(map(self._traced, batch.fragments)))
            if self.dataset.epochs is not None and self.epoch + 1 >= self.dataset.epochs:
                return
            self.sampler.set_epoch(self.epoch + 1)
            self._handed = 0

    def _traced(self, fragments: tuple[Fragment, ...]) -> tuple[Fragment, ...]:
        """Return fragments with row ids of the source, as `IterablePackedDataset.trace` needs them.

        The method loader's fragments name a sample by its index.
        """
        found = []
        for each in fragments:
            at = self._pieces[each.row_id[0]].address
            start, stop = at.start + each.start, at.start + each.stop
            found.append(each._replace(row_id=at.row_id, start=start, stop=stop))
        return tuple(found)

    @property
    def epoch(self) -> int:
        """Epoch of the last batch, from 0."""
        epoch: int = self.sampler.epoch
        return epoch

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of this epoch; another may differ by a few."""
        return len(self.sampler) // self.batches_per_step

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch that was handed out: plain values, the same on every rank."""
        return {
            "method": self.method,
            "identity": {
                name: value for name, value in self.dataset._identity.plain().items() if name in OF_SAMPLES
            },
            "sampler": self.sampler.state_dict(consumed=self._handed),
            "ledger": self._totals.numbers(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration begin after the batch at which ``state`` was taken.

        Raises:
            ValueError: for a state of a stream, of another method, corpus or config, or one that stands where this
                number of ranks cannot go on together.
        """
        theirs = state.get("method")
        if theirs != self.method:
            raise ValueError(
                f"the state is of {'a stream' if theirs is None else f'method={theirs!r}'} and this run has "
                f"method={self.method!r}; go on with what the run began with, or start a new run"
            )
        self.dataset._identity.require(state["identity"], names=OF_SAMPLES)
        self.sampler.load_state_dict(state["sampler"])
        self._handed = state["sampler"]["dealt"] // self.world.size
        self._totals = Ledger.from_numbers(state["ledger"])

    def ledger(self) -> Ledger:
        """Return where every token went, as of the last batch: on rank 0 for all ranks, elsewhere an empty ledger.

        ``buffered`` counts the tokens of the epoch that were in no batch yet.
        """
        return self._totals if self.world.is_main else Ledger()

    def require_trained(self) -> None:
        """Raise if a step that was handed out trains nothing, see `PackedDataLoader.require_trained`."""
        self._meter.require_trained()

    def metrics(self) -> dict[str, float]:
        """Return nothing: here the waiting of steps is not measured."""
        return {}

    def source_stats(self) -> dict[str, SourceStats]:
        """Return statistics of a mixture's sources; here there are none."""
        return {}

    def _count_batch(self) -> None:
        """Add one batch of every rank to the totals."""
        if self._handed == 0:
            self._totals = Ledger.total([self._totals, self._read])
        first, rows = self._handed * self.world.size, self.loader.dataset
        trained = tokens = capacity = 0
        for batch in self.sampler.batches[first : first + self.world.size]:
            held = [sum(stop - start for _, start, stop in row) for row in batch if row]
            self._totals.packs += len(held)
            capacity += len(held) * rows.width(batch)  # type: ignore[attr-defined]
            tokens += sum(held)
            for number, start, stop in chain.from_iterable(batch):
                labels = self._pieces[number].sample.labels[start + 1 : stop]
                trained += int(np.count_nonzero(labels != IGNORE_INDEX))
        self._totals.capacity += capacity
        self._totals.packed += tokens
        self._handed += 1
        ends_step = self._handed % self.batches_per_step == 0
        self._meter.add(trained, tokens, capacity, ends_step=ends_step)


Loader: TypeAlias = PackedDataLoader | MethodLoader


def read_pieces(dataset: IterablePackedDataset, *, world: World) -> tuple[list[Piece], Ledger]:
    """Read a dataset's samples once, with a progress bar; return them, and a ledger of what was dropped.

    Samples that are to be split are returned whole. Each rank reads all rows, and rank 0 lists bad records. The limit
    of bad records is that of one lane times the number of lanes that a stream of this dataset
    would have.
    """
    from tqdm import tqdm

    config = dataset.lane_config
    own, quarantine = config.packing, config.quarantine
    # With split_across_pack, samples that are to be split stay whole; the others are cut or dropped here.
    whole = Packing(own.max_seq_len, split_across_pack=own.overlong == "split", overlong=own.overlong)
    if quarantine is not None:
        folder = quarantine.folder if world.is_main else None
        lanes = dataset.lanes_for(1)
        limit = quarantine.limit
        limit = limit if isinstance(limit, float) else min(limit * lanes, sys.maxsize)
        quarantine = Quarantine(folder, limit)
    planned = replace(config, packing=whole, shuffle_window=0, endless=False, quarantine=quarantine)
    reader = PieceReader(planned, lane=0, num_lanes=1)
    reader.open(0)
    pieces = []
    with tqdm(
        desc="Reading", unit=" samples", dynamic_ncols=True, delay=1, disable=not world.is_main
    ) as progress:
        while (piece := reader.next()) is not None:
            pieces.append(piece)
            progress.update()
    return pieces, reader.ledger


def _require_same_on_all_ranks(samples: Sequence[Sample], source: Source, world: World) -> None:
    """Check that all ranks read the same samples: otherwise they would plan different batches and deadlock."""
    lengths = np.array([sample.tokens.size for sample in samples], np.int64)
    first, *others = world.gather(
        f"{len(samples):,} samples of {lengths.sum():,} tokens (lengths {digest_lengths(lengths)}, corpus "
        f"{fingerprint_of(source)})"
    )
    for rank, theirs in enumerate(others, 1):
        if theirs != first:
            raise ValueError(
                f"rank {rank} reads {theirs}, and rank 0 reads {first}; all ranks must read the same: check what is "
                "mounted there, and that the tokenizers are the same"
            )
