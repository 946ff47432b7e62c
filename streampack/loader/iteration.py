"""`Iteration`: the batches of one iteration of a `PackedDataLoader`, which exist or fail on all ranks alike."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from streampack.accounting import Ledger
from streampack.distributed.corpus import divide_across_ranks
from streampack.distributed.one_run import require_same_run
from streampack.distributed.rank_sync import RankSync
from streampack.fingerprint import digest
from streampack.loader.agreed_batches import AgreedBatches
from streampack.loader.batching import Batching
from streampack.loader.merge import RankBatch, RankBatches
from streampack.loader.step_meter import StepMeter
from streampack.loader.trained_steps import TrainedSteps
from streampack.packing.batch import Batch, null_pack, stack_packs
from streampack.streaming.consumers import require_loader_made_after_group
from streampack.streaming.dataset import IterablePackedDataset
from streampack.streaming.epochs import BEGUN, ENDED
from streampack.streaming.lane_state import LaneState, as_dicts
from streampack.streaming.ledger_messages import nothing_to_pack
from streampack.streaming.loaded_state import LoadedState
from streampack.streaming.read_report import ReadReport
from streampack.streaming.round_robin import total_ledger
from streampack.types import Pack


class HandedOut(NamedTuple):
    """How far one iteration is: up to the last batch that the trainer was given."""

    lane_states: dict[int, LaneState]  # after that batch; a new dict for each batch, never changed
    slot: int = 0  # where the next step begins: packs of this epoch in all steps so far, over all ranks
    epoch: int = 0
    first_slot: int = 0  # where this iteration's first step of this epoch began; 0 unless it resumed
    batches: int = 0  # of this epoch, handed out by this iteration


class Progress:
    """How far an iteration is, for itself and its loader. ``handed`` is replaced as a whole when a batch is returned.

    ``midway`` is set while a ``next()`` runs. If the next call finds it set, an exception has interrupted the last one,
    and only ``handed`` can be relied on.
    """

    def __init__(self, handed: HandedOut, *, before: Progress | None = None) -> None:
        self.handed = handed
        self.midway = False
        self.over = True  # whether the iteration has come to its end; also before one has begun
        # Of this iteration, and of the loader's iterations before it.
        self.meter: StepMeter = StepMeter() if before is None else before.meter
        self.batches: int = 0 if before is None else before.batches  # handed out
        self.read_before = ReadReport() if before is None else before.report._replace(consumed=())
        self.reports: list[ReadReport] = []  # of the rank's workers

    @property
    def report(self) -> ReadReport:
        """Counts of what this rank has read since its loader was made."""
        return ReadReport.total([self.read_before, *self.reports])

    def require_whole(self, rank_sync: RankSync, action: str) -> None:
        """Raise if an interrupted ``next()`` may have left this rank and the others at different collectives."""
        if self.midway and not rank_sync.alone:
            raise RuntimeError(
                f"the loader of rank {rank_sync.rank} cannot be {action}: an exception cut its last next() or "
                "iter() short, and the ranks may wait for different things; end this process, which the other ranks "
                "will notice, and resume from the last checkpoint"
            )


@dataclass(frozen=True)
class Options:
    """A loader's arguments that an iteration needs."""

    batching: Batching
    num_workers: int
    prefetch: int
    max_restarts: int
    pin_memory: bool


class Iteration:
    """Iterator over one rank's batches, from the packs that its workers, or this process, make.

    A single rank makes each batch when it is asked for. Several ranks agree ahead of time which batches exist
    (`AgreedBatches`).

    Constructing it is a collective. It settles the dataset's number of lanes.

    Args:
        dataset: what is iterated.
        rank_sync: the ranks.
        options: the loader's.
        loaded: the state that the iteration resumes from, or the beginning of an epoch; its ``phase`` is kept up to
            date.
        start: how far the loader is, in the lanes of all ranks.
        before: the progress of the loader's iterations before this one, whose counts go on.
        trained: is told what each step trains.
    """

    def __init__(
        self,
        dataset: IterablePackedDataset,
        rank_sync: RankSync,
        options: Options,
        *,
        loaded: LoadedState,
        start: HandedOut,
        before: Progress | None = None,
        trained: TrainedSteps,
    ) -> None:
        self.dataset, self.rank_sync, self.options = dataset, rank_sync, options
        self.trained = trained
        self.batching, self.loaded = options.batching, loaded
        if not rank_sync.has_data_groups:
            require_loader_made_after_group(made_for_one_rank=rank_sync.group is None)
        require_same_run(dataset, rank_sync, doing="iterate", settings=lambda: self._settings(start))
        rank, size = rank_sync.data_rank, rank_sync.data_world_size
        num_lanes = dataset.fix_lanes(size * max(1, options.num_workers))
        dataset.settings.choose_window(dataset.lane_config.packing, size)
        self.workers = min(options.num_workers, -(-num_lanes // size))
        self.batching = replace(options.batching, num_lanes=num_lanes)
        self.batching.warn(num_workers=options.num_workers, rank=rank_sync.rank)
        divide_across_ranks(dataset.lane_config.source, num_lanes, rank_sync)
        dataset.lane_config.check_shards()
        if rank_sync.rank == 0:
            dataset._log_shared()
        # Of the ranks that are given the same batches, one lists the bad records.
        self.read = dataset if rank_sync.lists_bad_records() else dataset._unlisted()
        self.last_epoch = dataset._last_epoch
        self.following = dataset.epoch + (dataset.epochs or 1)  # the epoch of the next iteration
        self.version = dataset._epochs_begun.version
        epoch = 0
        if self.last_epoch is not None:
            # The same on all ranks: also on one whose lanes have made no pack of this epoch yet.
            epochs = (state.epoch for state in start.lane_states.values())
            epoch = max(epochs, default=dataset.epoch)
        own = {lane: state for lane, state in start.lane_states.items() if lane % size == rank}
        # The loader's Progress cannot be shared: it may belong to a newer iteration by the time this one is used.
        self.progress = Progress(HandedOut(own, start.slot, epoch, start.slot), before=before)
        self._restart()

    def _settings(self, start: HandedOut) -> dict[str, Any]:
        """Return what must be the same on all ranks, beside the data; raise for settings that cannot be."""
        dataset, rank_sync, mix = self.dataset, self.rank_sync, self.dataset.mix
        num_lanes = dataset.lanes_for(rank_sync.data_world_size * max(1, self.options.num_workers))
        budget = dataset.lane_config.longest_read
        what = "max_outage" if dataset.lane_config.use.limit else "the source's retries"
        if not rank_sync.alone and budget >= rank_sync.timeout.total_seconds():
            raise ValueError(
                f"reading may be tried again for {budget:.0f} s and the other ranks wait {rank_sync.timeout} at "
                f"most; lower {what} or raise the loader's timeout"
            )
        return {
            "num_lanes": num_lanes,
            "packs_per_step": self.batching.packs_per_step,
            "packs_per_batch": self.batching.packs_per_batch,
            "data_ranks": rank_sync.data_world_size if rank_sync.has_data_groups else None,
            "balance_window": dataset.balance_window,
            "epochs": dataset.epochs,
            "epoch": dataset.epoch,
            "on_bad_record": "error" if dataset.lane_config.quarantine is None else "skip",
            "weights": None if mix is None else mix.target_fractions,
            "slot": start.slot,
            "state": digest(sorted(as_dicts(start.lane_states).items())),
        }

    def _restart(self) -> None:
        """Start, or start again, after the last batch that was handed out."""
        handed = self.progress.handed
        self.epoch, self.first_slot, self.batches = handed.epoch, handed.first_slot, handed.batches
        self.rank_batches = RankBatches(
            self.read,
            lane_states=handed.lane_states,
            epoch=None if self.last_epoch is None else self.epoch,
            rank=self.rank_sync.data_rank,
            world_size=self.rank_sync.data_world_size,
            workers=self.workers,
            prefetch=self.options.prefetch,
            max_restarts=self.options.max_restarts,
        )
        self.agreed_batches = AgreedBatches(self.rank_sync, cost=self.dataset.lane_config.balance_cost)
        self.new_states: dict[int, LaneState] = {}  # lane states that the batch in the making brings
        self.part = RankBatch()  # the part of this rank
        self.over = False

    def __iter__(self) -> Iteration:
        return self

    def __next__(self) -> Batch:
        """Collective: return the next batch.

        Raises:
            Exception: whatever failed. Nothing is consumed: the next call of a single rank starts again after the last
                batch handed out, and makes what it had made beyond that anew.
            RuntimeError: if the previous call was interrupted and there are several ranks.
        """
        progress = self.progress
        if progress.midway:
            progress.require_whole(self.rank_sync, "asked for a batch")
            self.rank_batches.close()
            progress.read_before, progress.reports = progress.report._replace(consumed=()), []
            self._restart()
        progress.midway = True
        self.new_states = {}
        begun = time.perf_counter()
        batch = self._next()
        if batch is not None:
            ends_step = self.batches % self.batching.batches_per_step == 0
            progress.meter.add(self.part.costs, waited=time.perf_counter() - begun, ends_step=ends_step)
            size = batch.tokens.numel() * self.rank_sync.world_size
            self.trained.add(self.part.trained, self.part.tokens, size, ends_step=ends_step)
            progress.batches += 1
        elif self.rank_sync.rank == 0:
            self.loaded.warn_if_empty()
        progress.reports = self.rank_batches.reports()
        slot = self.first_slot + self.batches // self.batching.batches_per_step * self.batching.packs_per_step
        lane_states = progress.handed.lane_states.copy()
        lane_states.update(self.new_states)
        handed = HandedOut(lane_states, slot, self.epoch, self.first_slot, self.batches)
        # CPython checks for signals at calls and loops. There are none below, so no Ctrl-C can come between recording
        # a batch and returning it.
        progress.handed = handed
        progress.midway = False
        progress.over = batch is None
        self.loaded.phase = ENDED if batch is None else BEGUN
        if batch is None:
            self.dataset._epochs_begun.end(self.following, version=self.version)
            raise StopIteration
        return batch

    def _next(self) -> Batch | None:
        """Make the next batch; None at the end."""
        while not self.over:
            rank_batch = self._take_alone() if self.rank_sync.alone else self._take_agreed()
            # Null batches complete a step that has begun.
            if rank_batch is not None or self.batches % self.batching.batches_per_step:
                self.part = rank_batch or RankBatch()
                batch = self._collate(self.part.packs)
                self._book([self.part])
                self.batches += 1
                return batch
            if not self.batches:
                self._require_packs()
            if self.last_epoch is None or self.epoch >= self.last_epoch:
                self.over = True
            else:
                self.epoch = self.rank_batches.epoch = self.epoch + 1
                self.batches = self.first_slot = 0
        return None

    def _make(self, number: int) -> RankBatch:
        """Make this rank's part of batch ``number`` of the epoch."""
        return self.rank_batches.next_batch(
            self.batching.room(number, slot=self.first_slot, rank=self.rank_sync.data_rank)
        )

    def _take_alone(self) -> RankBatch | None:
        """Return a single rank's next batch; None at the epoch's end."""
        rank_batch = self._make(self.batches)
        if rank_batch.exists:
            rank_batch.trained, rank_batch.tokens = rank_batch.count()
            return rank_batch
        self._book([rank_batch])
        return None

    def _take_agreed(self) -> RankBatch | None:
        """Collective: return this rank's part of the next batch; None at the epoch's end on all ranks."""
        try:
            rank_batch = self.agreed_batches.take(self._make, self.batches)
        except Exception:
            self.rank_batches.close()
            if self.agreed_batches.failed:  # all ranks raise here, so none waits for another
                self.progress.midway = False
            raise
        if rank_batch.exists_on_a_rank:
            return rank_batch
        self._book([rank_batch])
        return None

    def _require_packs(self) -> None:
        """Collective, after an epoch without a batch: raise on all ranks if the run has no pack."""
        lane_states = {**self.progress.handed.lane_states, **self.new_states}
        # Lanes that read on behind an earlier run may have nothing left of this epoch.
        anew = any(state.anew for state in self.progress.handed.lane_states.values())
        found = self.rank_sync.gather((self.rank_sync.data_rank, total_ledger(lane_states), anew))
        whole = Ledger.total({rank: ledger for rank, ledger, _ in found}.values())
        if not whole.packs and not any(anew for _, _, anew in found):
            raise nothing_to_pack(whole)

    def _book(self, rank_batches: list[RankBatch]) -> None:
        """Let the next batch bring the lane states after these rank batches."""
        for rank_batch in rank_batches:
            for event in rank_batch.events:
                self.new_states[event.lane] = event.state
                self.dataset._untrained.look_at(event.state.ledger)

    def _collate(self, packs: list[Pack]) -> Batch:
        """Stack packs to a batch, filled up with null packs."""
        config = self.dataset.lane_config
        if missing := self.batching.packs_per_batch - len(packs):
            packs = packs + [null_pack(config.packing.max_seq_len, padding_idx=config.padding_idx)] * missing
        batch = stack_packs(packs, segments=config.packing.max_segments)
        return batch.pin_memory() if self.options.pin_memory else batch
