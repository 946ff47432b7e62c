"""`Iteration`: the batches of one iteration of a `PackedDataLoader`, which exist or fail on all ranks alike."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

from streampack.accounting import Ledger
from streampack.distributed.corpus import gather_division
from streampack.distributed.one_run import require_one_run
from streampack.distributed.rank_sync import Agreement, RankSync
from streampack.fingerprint import digest
from streampack.loader.batching import Batching
from streampack.loader.merge import RankBatch, RankBatches
from streampack.packing.batch import Batch, null_pack, stack_packs
from streampack.streaming.consumers import require_group_of_now
from streampack.streaming.dataset import IterablePackedDataset
from streampack.streaming.epochs import BEGUN, ENDED
from streampack.streaming.lane_state import LaneState, as_dicts
from streampack.streaming.ledger_messages import nothing_to_pack
from streampack.streaming.loaded_state import LoadedState
from streampack.streaming.round_robin import total_ledger
from streampack.types import Pack

ROUND = 8
"""Batches in one agreement of the ranks. It is under way while the batches of the round before are handed out."""


class HandedOut(NamedTuple):
    """How far one iteration is: up to its last batch that the trainer was given."""

    lane_states: dict[int, LaneState]  # never changed: a batch makes a new one
    slot: int = 0  # of the epoch, after the steps handed out
    epoch: int = 0
    first_slot: int = 0  # at which this iteration began to make steps of that epoch
    batches: int = 0  # of that epoch, in this iteration


class Progress:
    """How far an iteration is, for itself and its loader. ``handed`` is replaced as a whole, as a batch is returned.

    ``midway`` is set during a ``next()``. If the next one finds it set, an exception has interrupted the last, and only
    ``handed`` can be relied on.
    """

    def __init__(self, handed: HandedOut) -> None:
        self.handed = handed
        self.midway = False

    def require_whole(self, rank_sync: RankSync, what: str) -> None:
        """Raise if an interrupted ``next()`` may have left this rank and the others at different collectives."""
        if self.midway and not rank_sync.alone:
            raise RuntimeError(
                f"the loader of rank {rank_sync.rank} cannot be {what}: an exception cut its last next() or "
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
    """Iterator over batches: makes this rank's part of each, and agrees with the other ranks which batches exist.

    A single rank agrees with nobody, and makes each batch when it is asked for.

    Args:
        dataset: what is iterated.
        rank_sync: the ranks.
        options: the loader's.
        begin: the state that the iteration starts from.
        start: how far the loader is, in all lanes.
    """

    def __init__(
        self,
        dataset: IterablePackedDataset,
        rank_sync: RankSync,
        options: Options,
        *,
        begin: LoadedState,
        start: HandedOut,
    ) -> None:
        self.dataset, self.rank_sync, self.options = dataset, rank_sync, options
        self.batching, self.begin = options.batching, begin
        if not rank_sync.grouped:
            require_group_of_now(alone=rank_sync.alone)
        require_one_run(dataset, rank_sync, doing="iterate", settings=lambda: self._settings(start))
        rank, size = rank_sync.data_rank, rank_sync.data_world_size
        dataset.num_lanes = num_lanes = dataset._lanes_for(size * max(1, options.num_workers))
        self.workers = min(options.num_workers, -(-num_lanes // size))
        self.batching.warn(num_lanes=num_lanes, num_workers=options.num_workers, rank=rank_sync.rank)
        gather_division(dataset.lane_config.source, num_lanes, rank_sync)
        self.read = dataset if rank_sync.reads_first() else dataset._unlisted()
        # All ranks begin in the same epoch, also one whose lanes have made no pack in it yet.
        self.last_epoch = dataset._last_epoch
        epoch = 0
        if self.last_epoch is not None:
            epochs = (state.epoch for state in start.lane_states.values())
            epoch = max(epochs, default=dataset.epoch)
        own = {lane: state for lane, state in start.lane_states.items() if lane % size == rank}
        # A Progress of its own: the loader's may belong to a newer iteration.
        self.progress = Progress(HandedOut(own, start.slot, epoch, start.slot))
        self._restart()

    def _settings(self, start: HandedOut) -> dict[str, Any]:
        """Return what must be the same on all ranks, beside the data; raise for settings that cannot be."""
        dataset, rank_sync, mix = self.dataset, self.rank_sync, self.dataset.mix
        dataset._lanes_for(rank_sync.data_world_size * max(1, self.options.num_workers))
        budget = dataset.lane_config.source.retry_budget
        if not rank_sync.alone and budget >= rank_sync.timeout.total_seconds():
            raise ValueError(
                f"reading may be tried again for {budget:.0f} s and the other ranks wait {rank_sync.timeout} at "
                "most; lower the source's retries or raise the loader's timeout"
            )
        return {
            "packs_per_step": self.batching.packs_per_step,
            "packs_per_batch": self.batching.packs_per_batch,
            "data_world_size": rank_sync.data_world_size if rank_sync.grouped else None,
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
        self.booked: dict[int, LaneState] = {}  # lane states that the next batch brings
        self.made = self.batches  # rank batches of this epoch
        self.open_round: list[RankBatch] = []  # not agreed on yet
        self.agreeing: deque[tuple[list[RankBatch], Agreement]] = deque()  # rounds that are being agreed on
        self.rounds = 0  # sent to the other ranks
        self.agreed: deque[RankBatch] = deque()  # to be handed out
        self.left_over: list[RankBatch] | None = (
            None  # of a round that the epoch's end, or an error, cut short
        )
        self.failing = False  # an error on some rank comes next
        self.error: Exception | None = None  # this rank's
        self.over = False

    def __iter__(self) -> Iteration:
        return self

    def __next__(self) -> Batch:
        """Return the next batch.

        Raises:
            Exception: whatever failed. Nothing is consumed: the next call of a single rank starts again after the last
                batch handed out, and makes anew what it had made beyond it.
            RuntimeError: if the previous call was interrupted and there are several ranks.
        """
        progress = self.progress
        if progress.midway:
            progress.require_whole(self.rank_sync, "asked for a batch")
            self.rank_batches.close()
            self._restart()
        progress.midway = True
        self.booked = {}
        batch = self._next()
        slot = self.first_slot + self.batches // self.batching.batches_per_step * self.batching.packs_per_step
        lane_states = progress.handed.lane_states.copy()
        lane_states.update(self.booked)
        handed = HandedOut(lane_states, slot, self.epoch, self.first_slot, self.batches)
        # CPython checks for signals at calls and loops. There are none below, so no Ctrl-C can come between booking a
        # batch and returning it.
        progress.handed = handed
        progress.midway = False
        self.begin.phase = ENDED if batch is None else BEGUN
        if batch is None:
            raise StopIteration
        return batch

    def _next(self) -> Batch | None:
        """Make the next batch; None at the end."""
        while not self.over:
            rank_batch = self._take_alone() if self.rank_sync.alone else self._take()
            # A step that has begun is filled up with null batches.
            if rank_batch is not None or self.batches % self.batching.batches_per_step:
                batch = self._collate(rank_batch.packs if rank_batch else [])
                self._book([rank_batch] if rank_batch else [])
                self.batches += 1
                return batch
            if not self.batches:
                self._require_packs()
            if self.last_epoch is None or self.epoch >= self.last_epoch:
                self.over = True
            else:
                self.epoch = self.rank_batches.epoch = self.epoch + 1
                self.made = self.batches = self.first_slot = 0
                self.left_over = None
        return None

    def _make(self) -> RankBatch:
        """Make this rank's part of one more batch."""
        return self.rank_batches.make(
            self.batching.room(self.made, slot=self.first_slot, rank=self.rank_sync.data_rank)
        )

    def _take_alone(self) -> RankBatch | None:
        """Return a single rank's next batch; None at the epoch's end."""
        rank_batch = self._make()
        self.made += 1
        if rank_batch.exists:
            return rank_batch
        self._book([rank_batch])
        return None

    # Several ranks.

    def _take(self) -> RankBatch | None:
        """Return this rank's part of the next batch; None when no rank has anything left in this epoch."""
        if self.rounds and self.left_over is None:
            for _ in range(2):  # replace the batch handed out, and one more until two rounds are ready
                if self.made - self.batches < 2 * ROUND:
                    self._prepare()
        while not self.agreed:
            if self.failing:
                self._fail()
            if self.left_over is not None:
                self._settle(self.left_over)
                return None
            while not self.agreeing:
                self._prepare()
            rank_batches, agreement = self.agreeing.popleft()
            try:
                count, self.failing = agreement.wait()
            except Exception:  # a rank is gone: no more batches, so no more packs
                self.rank_batches.close()
                raise
            self.agreed.extend(rank_batches[:count])
            if count < len(rank_batches):
                self.left_over = rank_batches[count:]
        return self.agreed.popleft()

    def _prepare(self) -> None:
        """Collective, after every round: make one more rank batch, and start the agreement on a complete round."""
        rank_batch = RankBatch(failed=True)
        if self.error is None:
            try:
                rank_batch = self._make()
            except Exception as error:
                self.error = error
        self.open_round.append(rank_batch)
        self.made += 1  # after an error, too: all ranks count alike
        # The first rounds are short, so that the first batch comes at once.
        if len(self.open_round) == min(2**self.rounds, ROUND):
            count = next((i for i, one in enumerate(self.open_round) if not one.exists), len(self.open_round))
            failed = count < len(self.open_round) and self.open_round[count].failed
            self.agreeing.append((self.open_round, self.rank_sync.agree(count, failed=failed)))
            self.open_round = []
            self.rounds += 1

    def _settle(self, rank_batches: list[RankBatch]) -> None:
        """Book what was made beyond the epoch's last batch, ends of lanes at most; wait for all agreements."""
        for later, agreement in self.agreeing:
            agreement.wait()
            rank_batches = rank_batches + later
        self._book(rank_batches + self.open_round)
        self.agreeing.clear()
        self.open_round = []

    def _fail(self) -> None:
        """Collective: raise a rank's error on all ranks, for good."""
        self.rank_batches.close()
        try:
            self.rank_sync.raise_on_all(self.error, doing="making packs")
        except Exception:
            self.progress.midway = False  # all ranks are here
            raise

    def _require_packs(self) -> None:
        """Collective, after an epoch without a batch: raise on all ranks if the run has no pack."""
        lane_states = {**self.progress.handed.lane_states, **self.booked}
        ledgers = self.rank_sync.gather((self.rank_sync.data_rank, total_ledger(lane_states)))
        whole = Ledger.total(dict(ledgers).values())
        if not whole.packs:
            raise nothing_to_pack(whole)

    def _book(self, rank_batches: list[RankBatch]) -> None:
        """Put the lane states after these rank batches into the state of the next batch."""
        for rank_batch in rank_batches:
            for event in rank_batch.events:
                self.booked[event.lane] = event.state
                self.dataset._untrained.look_at(event.state.ledger)

    def _collate(self, packs: list[Pack]) -> Batch:
        config = self.dataset.lane_config
        if missing := self.batching.packs_per_batch - len(packs):
            packs = packs + [null_pack(config.packing.max_seq_len, padding_idx=config.padding_idx)] * missing
        batch = stack_packs(packs, segments=config.packing.segments)
        return batch.pin_memory() if self.options.pin_memory else batch
