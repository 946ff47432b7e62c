"""`Iteration`: the batches of one iteration of a `PackedDataLoader`, which exist or fail on all ranks alike."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

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
from streampack.streaming.lane_state import LaneState, as_dicts
from streampack.streaming.ledger_messages import nothing_to_pack
from streampack.streaming.loaded_state import RunState
from streampack.streaming.round_robin import ANEW, total_ledger
from streampack.types import Pack


@dataclass(frozen=True)
class Options:
    """A loader's arguments that an iteration needs."""

    batching: Batching
    num_workers: int
    pin_memory: bool


class Iteration:
    """Iterator over one rank's batches, from the packs that its workers, or this process, make.

    A single rank makes each batch when it is asked for. Several ranks agree ahead of time which batches exist
    (`AgreedBatches`).

    Constructing it is no collective; `start` is, and must be called first.

    After an error or an interrupt an iteration gives nothing more: ``handed`` is what it gave, and another iteration
    goes on from there.

    Args:
        dataset: what is iterated.
        rank_sync: the ranks.
        options: the loader's.
        begin: where it begins.
        meter: is told how long each step waited, and what it cost on each rank.
        trained: is told what each step trains.
    """

    def __init__(
        self,
        dataset: IterablePackedDataset,
        rank_sync: RankSync,
        options: Options,
        *,
        begin: RunState,
        meter: StepMeter,
        trained: TrainedSteps,
    ) -> None:
        self.dataset, self.rank_sync, self.options = dataset, rank_sync, options
        self.meter, self.trained = meter, trained
        self.begin = begin
        self.handed = begin  # up to the last batch handed out; replaced as a whole when a batch is returned
        self.given = False  # whether it has handed out a batch
        self.broken = False  # whether the newest next() raised, or is under way
        # Whether that exception was raised on all ranks, so that none waits for another.
        self.raised_on_all = False
        self.over = False  # whether it has come to its end
        self.commands = dataset.readers.commands
        self.last_epoch = None if dataset.epochs is None else begin.epoch + dataset.epochs - 1
        self.following = begin.epoch + (dataset.epochs or 1)  # the epoch of the next iteration

    def start(self) -> None:
        """Collective: check that all ranks have the same run, settle its number of lanes, and start the workers."""
        self.broken = True
        try:
            begin = self._agree()
        except Exception:
            self.raised_on_all = True
            raise
        self._open(begin)
        self.broken = False

    def _agree(self) -> RunState:
        """Collective: return where to begin, with the lanes of all ranks. An Exception is raised on all of them."""
        dataset, rank_sync, options = self.dataset, self.rank_sync, self.options
        begin = self.begin
        if not rank_sync.has_data_groups:
            require_loader_made_after_group(made_for_one_rank=rank_sync.group is None)
        require_same_run(dataset, rank_sync, doing="iterate", settings=lambda: self._settings(begin))
        if begin.left:  # then it has the lanes of this rank
            begin = replace(begin, lane_states=rank_sync.merge_lanes(begin.lane_states))
        num_lanes = dataset.fix_lanes(rank_sync.data_world_size * max(1, options.num_workers))
        dataset.settings.choose_window(dataset.lane_config.packing, rank_sync.data_world_size)
        divide_across_ranks(dataset.lane_config.source, num_lanes, rank_sync)
        dataset.lane_config.check_shards()
        # Of the ranks that are given the same batches, one lists the bad records.
        self.read = dataset if rank_sync.lists_bad_records() else dataset._unlisted()
        self.batching = replace(options.batching, num_lanes=num_lanes)
        return begin

    def _open(self, begin: RunState) -> None:
        rank_sync, options, num_lanes = self.rank_sync, self.options, self.batching.num_lanes
        rank, size = rank_sync.data_rank, rank_sync.data_world_size
        self.batching.warn(num_workers=options.num_workers, rank=rank_sync.rank)
        if rank_sync.rank == 0:
            self.dataset._log_shared()
        self.epoch = 0
        if self.last_epoch is not None:
            # The same on all ranks: also on one whose lanes have made no pack of this epoch yet.
            self.epoch = max((state.epoch for state in begin.lane_states.values()), default=begin.epoch)
        own = {lane: state for lane, state in begin.lane_states.items() if lane % size == rank}
        self.handed = replace(begin, lane_states=own, left=True)
        self.rank_batches = RankBatches(
            self.read,
            begin=self.handed,
            epoch=None if self.last_epoch is None else self.epoch,
            rank=rank,
            world_size=size,
            workers=min(options.num_workers, -(-num_lanes // size)),
        )
        self.agreed_batches = AgreedBatches(rank_sync)
        self.first_slot = begin.slot  # where this iteration's first step of this epoch begins
        self.batches = 0  # of this epoch, made by this iteration
        self.new_states: dict[int, LaneState] = {}  # lane states that the batch in the making brings
        self.part = RankBatch()  # the part of this rank

    def _settings(self, begin: RunState) -> dict[str, Any]:
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
            "packs_per_step": self.options.batching.packs_per_step,
            "packs_per_batch": self.options.batching.packs_per_batch,
            "data_ranks": rank_sync.data_world_size if rank_sync.has_data_groups else None,
            "balance_window": dataset.balance_window,
            "epochs": dataset.epochs,
            "epoch": begin.epoch,
            "skip_bad": dataset.lane_config.quarantine is not None,
            "weights": None if mix is None else mix.target_fractions,
            "slot": begin.slot,
            "state": None if begin.left else digest(sorted(as_dicts(begin.lane_states).items())),
        }

    def __iter__(self) -> Iteration:
        return self

    def __next__(self) -> Batch:
        """Collective: return the next batch.

        Raises:
            Exception: whatever failed. Nothing is consumed: iterating the loader anew goes on behind the last batch
                handed out.
            RuntimeError: if an earlier call raised.
        """
        self.require_whole("asked for a batch")
        if self.broken:
            raise RuntimeError(ANEW)
        if self.over:
            raise StopIteration
        self.broken = True
        try:
            self.new_states = {}
            batch = self._timed()
            lane_states = {**self.handed.lane_states, **self.new_states}
            steps = self.batches // self.batching.batches_per_step
            slot = self.first_slot + steps * self.batching.packs_per_step
            handed = replace(self.handed, lane_states=lane_states, slot=slot)
            readers = self.dataset.readers
            if batch is None:
                readers.ended_loader(self.commands, following=self.following)
            else:
                readers.given_by_loader(self.commands)
        except BaseException as error:
            self.raised_on_all |= isinstance(error, Exception) and self.agreed_batches.failed
            self.rank_batches.close()
            raise
        # CPython checks for signals at calls and loops. There are none below, so no Ctrl-C can come between recording
        # a batch and returning it.
        self.handed = handed
        self.broken = False
        if batch is None:
            self.over = True
            raise StopIteration
        self.given = True
        return batch

    def _timed(self) -> Batch | None:
        """Make the next batch, and tell the meters of it; None at the end."""
        begun = time.perf_counter()
        batch = self._next()
        if batch is not None:
            ends_step = self.batches % self.batching.batches_per_step == 0
            self.meter.add(self.part.costs, waited=time.perf_counter() - begun, ends_step=ends_step)
            size = batch.tokens.numel() * self.rank_sync.world_size
            self.trained.add(self.part.trained, self.part.tokens, size, ends_step=ends_step)
        elif self.rank_sync.rank == 0 and not self.given:
            self.begin.warn_if_left()
        return batch

    def require_whole(self, action: str) -> None:
        """Raise if an interrupted ``next()`` may have left this rank and the others at different collectives."""
        if self.broken and not self.raised_on_all and not self.rank_sync.alone:
            raise RuntimeError(
                f"the loader of rank {self.rank_sync.rank} cannot be {action}: an exception cut its last next() "
                "short, and the ranks may wait for different things; end this process, which the other ranks "
                "will notice, and resume from the last checkpoint"
            )

    def _next(self) -> Batch | None:
        """Make the next batch; None at the end."""
        while True:
            rank_batch = self._take_alone() if self.rank_sync.alone else self._take_agreed()
            # Null batches complete a step that has begun.
            if rank_batch is not None or self.batches % self.batching.batches_per_step:
                self.part = rank_batch or RankBatch()
                batch = self._collate(self.part.packs)
                self._book(self.part)
                self.batches += 1
                return batch
            if not self.batches:
                self._require_packs()
            if self.last_epoch is None or self.epoch >= self.last_epoch:
                return None
            self.epoch = self.rank_batches.epoch = self.epoch + 1
            self.batches = self.first_slot = 0

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
        self._book(rank_batch)
        return None

    def _take_agreed(self) -> RankBatch | None:
        """Collective: return this rank's part of the next batch; None at the epoch's end on all ranks."""
        rank_batch = self.agreed_batches.take(self._make, self.batches)
        if rank_batch.exists_on_a_rank:
            return rank_batch
        self._book(rank_batch)
        return None

    def _require_packs(self) -> None:
        """Collective, after an epoch without a batch: raise on all ranks if the run has no pack."""
        lane_states = {**self.handed.lane_states, **self.new_states}
        # Lanes that read on behind an earlier run may have nothing left of this epoch.
        anew = any(state.anew for state in self.handed.lane_states.values())
        found = self.rank_sync.gather((self.rank_sync.data_rank, total_ledger(lane_states), anew))
        whole = Ledger.total({rank: ledger for rank, ledger, _ in found}.values())
        if not whole.packs and not any(anew for _, _, anew in found):
            self.raised_on_all = True
            raise nothing_to_pack(whole)

    def _book(self, rank_batch: RankBatch) -> None:
        """Let the next batch bring the lane states after this rank batch."""
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
