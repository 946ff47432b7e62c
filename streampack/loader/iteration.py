"""`Iteration`: the batches of one iteration of a `PackedDataLoader`, which exist or fail on all ranks alike."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator
from dataclasses import replace
from functools import partial
from typing import Any

from streampack.accounting import Ledger, nothing_to_pack
from streampack.distributed.rank_sync import RankSync
from streampack.distributed.ranks import require_loader_made_after_group
from streampack.fingerprint import digest
from streampack.lanes.lane_state import LaneEvent
from streampack.lanes.number_of_lanes import lanes_text
from streampack.loader.batching import FULL, Batching, RankPacks, agreed_shards
from streampack.loader.one_run import divide_across_ranks, require_same_run
from streampack.loader.step_meter import StepMeter
from streampack.loader.workers import start_worker
from streampack.packing.batch import Batch, stack_packs
from streampack.streaming.dataset import IterablePackedDataset
from streampack.streaming.position import CUT_SHORT, Progress
from streampack.streaming.run_state import Phase, RunState, as_dicts, epoch_of
from streampack.types import Pack

log = logging.getLogger(__name__)


class Iteration:
    """Iterator over one rank's batches, from the packs that its workers, or this process, make.

    Constructing it is a collective. After an error or an interrupt an iteration yields nothing more: ``handed`` is what
    it yielded, and another iteration continues from there.
    """

    def __init__(
        self,
        dataset: IterablePackedDataset,
        rank_sync: RankSync,
        batching: Batching,
        *,
        num_workers: int,
        pin_memory: bool,
        meter: StepMeter,
        progress: Progress,
    ) -> None:
        self.dataset, self.rank_sync, self.batching, self.meter = dataset, rank_sync, batching, meter
        self.num_workers, self.pin_memory = num_workers, pin_memory
        self.progress = progress
        # Up to the last batch yielded; replaced when a batch is returned.
        self.begin = self.handed = replace(self.progress.begin, packs_per_step=batching.packs_per_step)
        self.epoch = self.begin.epoch  # of the newest batch
        self.broken = False  # whether the newest next() raised, or is under way

        agreed = False
        try:
            begin, read = self._agree()
            agreed = True
            self._open(begin, read)
        except BaseException as error:
            # Set at once: a second interrupt may come at the next call.
            rank_sync.broken = True
            rank_sync.broken = agreed or not isinstance(error, Exception)
            raise

    def _open(self, begin: RunState, read: IterablePackedDataset) -> None:
        """Open the lanes of this rank, in worker processes or here."""
        rank_sync, num_lanes, epochs = self.rank_sync, self.batching.num_lanes, read.epochs
        rank, size = rank_sync.data_rank, rank_sync.data_world_size
        self.batching.warn(num_workers=self.num_workers, rank=rank_sync.rank)
        if rank_sync.rank == 0:
            self.dataset._log_shared()
            if not begin.lane_states:
                log.info("%s", lanes_text(num_lanes))
        first: int | None = None
        if epochs is not None:
            # The same on all ranks: also on one whose lanes have made no pack of this epoch yet.
            first = max(map(epoch_of, begin.lane_states.values()), default=begin.epoch)
        own = {lane: state for lane, state in begin.lane_states.items() if lane % size == rank}
        self.handed = self.begun = replace(begin, lane_states=own, partial=size > 1)
        workers = self.batching.workers(self.num_workers)
        consumers = size * max(1, workers)
        streams: list[Generator[LaneEvent]] = []
        for consumer in range(rank, min(consumers, num_lanes), size):
            stream = partial(read.events, consumer, consumers, epoch=begin.epoch, first_epoch=first)
            states = {lane: state for lane, state in own.items() if lane % consumers == consumer}
            name = f"worker {consumer} of {consumers}"
            streams.append(start_worker(stream, states, name) if workers else stream(lane_states=states))
        self.packs = RankPacks(streams)
        self.shards = agreed_shards(
            self.packs,
            self.batching,
            rank_sync,
            slot=begin.slot,
            epochs=[0] if epochs is None or first is None else range(first, begin.epoch + epochs),
        )

    def _agree(self) -> tuple[RunState, IterablePackedDataset]:
        """Collective: return where to begin, with the lanes of all ranks, and what to read."""
        dataset, rank_sync = self.dataset, self.rank_sync
        begin, ranks = self.begin, rank_sync.data_world_size
        if not rank_sync.has_data_groups:
            require_loader_made_after_group(made_for_one_rank=rank_sync.group is None)
        require_same_run(dataset, rank_sync, doing="iterate", settings=self._settings)
        if begin.partial:  # then it has the lanes of this rank
            begin = replace(begin, lane_states=rank_sync.merge_lanes(begin.lane_states))
        dataset.settle(lanes_of=ranks, window_of=ranks)
        num_lanes = dataset.lanes_for(ranks)
        divide_across_ranks(dataset.lane_config.source, num_lanes, rank_sync)
        dataset.lane_config.check_shards()
        self.batching = replace(self.batching, num_lanes=num_lanes)
        # One of the ranks with the same batches lists the bad records.
        return begin, dataset._frozen(lists_bad=rank_sync.lists_bad_records())

    def _settings(self) -> dict[str, Any]:
        """Return what must be the same on all ranks, beside the data; raise for settings that cannot be."""
        dataset, rank_sync, mix, begin = self.dataset, self.rank_sync, self.dataset.mix, self.begin
        num_lanes = dataset.lanes_for(rank_sync.data_world_size)
        budget = dataset.lane_config.longest_read
        if not rank_sync.alone and budget >= rank_sync.timeout.total_seconds():
            raise ValueError(
                f"reading may be tried again for {budget:.0f} s and the other ranks wait {rank_sync.timeout} at "
                f"most; lower the max_outage of the source's storage, or raise the loader's timeout"
            )
        return {
            "num_lanes": num_lanes,
            "packs_per_step": self.batching.packs_per_step,
            "batch_size": self.batching.batch_size,
            "data_ranks": rank_sync.data_world_size if rank_sync.has_data_groups else None,
            "balance_window": dataset.balance_window,
            "epochs": dataset.epochs,
            "epoch": begin.epoch,
            "skip_bad": dataset.lane_config.quarantine is not None,
            "weights": None if mix is None else mix.target_fractions,
            "slot": begin.slot,
            "state": None if begin.partial else digest(sorted(as_dicts(begin.lane_states).items())),
        }

    def __iter__(self) -> Iteration:
        return self

    def __next__(self) -> Batch:
        """Collective: return the next batch. An error consumes nothing."""
        if self.broken:
            self.rank_sync.require_whole()
            raise RuntimeError(CUT_SHORT)
        if self.handed.phase is Phase.ENDED:
            raise StopIteration
        self.broken = True
        try:
            begun, batch = time.perf_counter(), None
            slot, lane_states = self.handed.slot, dict(self.handed.lane_states)
            for shard in self.shards:
                # Of the ranks that have read samples that train nothing, the first says so, for all.
                speaks = any(shard.untrained) and shard.untrained.index(True) == self.rank_sync.rank
                for event in shard.events:
                    lane_states[event.lane] = event.state
                    if speaks:
                        self.dataset._look_at(event)
                if any(shard.untrained):
                    self.dataset.position.first_untrained()
                slot, self.epoch = shard.slot, shard.epoch
                if shard.exists:
                    batch = self._collated(shard.packs)
                    break
                if not shard.number:
                    self._require_packs(replace(self.handed, lane_states=lane_states))
            phase = Phase.ENDED if batch is None else Phase.READ
            handed = replace(self.handed, lane_states=lane_states, slot=slot, phase=phase)
            if batch is None:
                if self.rank_sync.rank == 0 and self.handed is self.begun:
                    self.begun.warn_if_left()
            else:
                self.meter.add(
                    shard.trained,
                    shard.filled,
                    FULL * len(batch.tokens) * self.rank_sync.world_size,
                    time.perf_counter() - begun,
                    shard.costs,
                    ends_step=shard.number % self.batching.batches_per_step == 0,
                )
        except BaseException as error:
            # Set at once: a second interrupt may come at the next call.
            self.rank_sync.broken = True
            self.rank_sync.broken = not getattr(error, "raised_on_all_ranks", False)
            self.packs.close()
            raise
        # CPython checks for signals at calls and loops. There are none below, so no Ctrl-C can come between recording
        # a batch and returning it.
        self.handed, self.broken = handed, False
        self.progress.state = handed
        if batch is None:
            raise StopIteration
        return batch

    def _require_packs(self, read: RunState) -> None:
        """Collective, after an epoch without a batch: raise on all ranks if the run has no pack."""
        # Lanes that continue an earlier run may have nothing left of this epoch.
        restart = any(state.get("restart") for state in self.handed.lane_states.values())
        found = self.rank_sync.gather((self.rank_sync.data_rank, read.ledger, restart))
        whole = Ledger.total({rank: ledger for rank, ledger, _ in found}.values())
        if not whole.packs and not any(restart for _, _, restart in found):
            self.rank_sync.raise_on_all(nothing_to_pack(whole))

    def _collated(self, packs: list[Pack]) -> Batch:
        config = self.dataset.lane_config
        if missing := self.batching.packs_per_batch - len(packs):
            packs = packs + [config.null_pack()] * missing
        batch = stack_packs(packs, segments=config.packing.max_segments, padding_idx=config.padding_idx)
        return batch.pin_memory() if self.pin_memory else batch
