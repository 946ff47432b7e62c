"""`PackedDataLoader`: worker processes, batches, ranks in step, a state as of the last batch handed over."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

from streampack.accounting import Ledger, SourceStats
from streampack.distributed.corpus import gather_division, gather_fingerprint
from streampack.distributed.one_run import require_one_run
from streampack.distributed.rank_sync import Agreement, RankSync
from streampack.fingerprint import digest, plain
from streampack.loader.merge import Share, Shares
from streampack.packing.batch import Batch, null_pack, stack_packs
from streampack.streaming.consumers import require_group_of_now
from streampack.streaming.dataset import IterablePackedDataset
from streampack.streaming.empty_runs import nothing_to_pack
from streampack.streaming.epochs import BEGUN, ENDED
from streampack.streaming.lane_state import LaneState, as_dicts
from streampack.streaming.loaded_state import LoadedState
from streampack.streaming.round_robin import total_ledger
from streampack.types import Pack
from streampack.validation import require_positive, warn_user

log = logging.getLogger(__name__)

ROUND = 8
"""Batches on which ranks agree at once. The agreement on a round is under way while the one before is handed out."""


class PackedDataLoader:
    """Batches of packs from an `IterablePackedDataset`, on any number of ranks and worker processes.

    >>> rows = [{"tokens": [i] * 5, "labels": [i] * 5} for i in range(5)]
    >>> loader = PackedDataLoader(IterablePackedDataset(rows, max_seq_len=10), batch_size=2)
    >>> [tuple(batch.tokens.shape) for batch in loader]
    [(2, 10), (2, 10)]

    Every rank hands out the same number of batches, all of the same size, each of packs of one epoch. A rank
    whose data ends before the others' fills up with null packs, which train nothing, until all are done;
    an error on one rank is raised on all. An optimizer step takes ``packs_per_step`` packs over all ranks,
    the next ones of the stream: on every topology the same. Where they cannot be shared out evenly, null
    packs fill up as well. The order does not depend on ``num_workers``: each worker makes the
    packs of some lanes, and they are merged as one process would have made them. A worker that dies is made
    again and nothing is lost.

    Iterating again is the next epoch; after a resume, ``for epoch in range(loader.epoch, epochs)`` goes on where it
    stood. ``dataset.set_epoch`` chooses another one.

    With a process group, make the loader and iterate it on all ranks. A state says what was handed to the
    trainer; what workers had made beyond that is made again after a resume, on any number of ranks and workers.

    Args:
        dataset: where packs come from; its settings decide all but the batching.
        batch_size: packs in a batch, at most: fewer where a step's share of one rank is less, or comes out even so.
        num_workers: processes that read, encode and pack, for each rank. 0 does it in this one. The one with the
            most of the rank's lanes sets the pace.
        prefetch_factor: packs that each worker makes ahead, about.
        packs_per_step: packs in an optimizer step, over all ranks; default: one batch of each rank. A step is
            `batches_per_step` batches on every rank, and none mixes two epochs.
        max_worker_restarts: deaths of each worker process to mend before giving up.
        pin_memory: put batches into page-locked memory, for faster copies to a GPU.
        timeout: seconds that ranks wait for one another before they give up.
    """

    def __init__(
        self,
        dataset: IterablePackedDataset,
        *,
        batch_size: int = 1,
        num_workers: int = 0,
        prefetch_factor: int = 8,
        packs_per_step: int | None = None,
        max_worker_restarts: int = 3,
        pin_memory: bool = False,
        timeout: float = 1800.0,
    ) -> None:
        require_positive(batch_size, "batch_size")
        require_positive(prefetch_factor, "prefetch_factor")
        if packs_per_step is not None:
            require_positive(packs_per_step, "packs_per_step")
        for value, name in ((num_workers, "num_workers"), (max_worker_restarts, "max_worker_restarts")):
            if value < 0:
                raise ValueError(f"{name}={value} is below 0; give at least 0")
        self.dataset = dataset
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.prefetch_factor = prefetch_factor
        self.max_worker_restarts = max_worker_restarts
        self.pin_memory = pin_memory
        self.rank_sync = RankSync(timeout=timedelta(seconds=timeout))
        self._packs_per_step = packs_per_step
        self._progress = Progress(Handed({}))  # of the newest iteration
        self._begin: LoadedState | None = None  # where the newest iteration began
        self._identified = False  # the ranks have shared out what the corpus's fingerprint reads

    def __repr__(self) -> str:
        step = "" if self._packs_per_step is None else f", {self._packs_per_step} packs a step"
        workers = f"{self.num_workers} worker(s)"
        return f"<{type(self).__name__}: batches of {self.batch_size}{step}, {workers}, of {self.dataset}>"

    def __iter__(self) -> Iterator[Batch]:
        """Iterate from the loaded state on; without one, from the epoch behind the newest iteration."""
        dataset = self.dataset
        self._require_whole("iterated anew")
        self._begin = begin = dataset.resume.begin(by_loader=True)
        dataset.epoch = begin.epoch
        self._progress = Progress(Handed(dict(begin.lane_states), begin.slot))
        self._progress.midway = True  # ranks agree on several things now
        try:
            batches = _Batches(self, begin)
        except Exception:
            self._progress.midway = False
            raise
        self._progress = batches.progress
        dataset.epochs_begun.begin(begin.epoch + (dataset.epochs or 1))
        return batches

    @property
    def lane_states(self) -> dict[int, LaneState]:
        """As of the last batch handed over: of all lanes after a load, then of this rank's."""
        return self._handed.lane_states

    @property
    def slot(self) -> int:
        """Of the epoch's slots, one for each pack of a step, those of the steps handed over."""
        return self._handed.slot

    @property
    def _handed(self) -> Handed:
        """What the newest iteration handed over, or a state says that was loaded since."""
        loaded = self._loaded
        return self._progress.handed if loaded is None else Handed(dict(loaded.lane_states), loaded.slot)

    @property
    def _loaded(self) -> LoadedState | None:
        """The state from which this loader's next iteration will begin, and none has."""
        pending = self.dataset.resume.pending
        return None if pending is self._begin else pending

    def state_dict(self) -> dict[str, Any]:
        """After the last batch that was handed over, of all ranks: plain values, fresh at every call.

        A collective: with several ranks, all must call it, after the same number of batches.
        """
        return self.state_of(self.lane_states, self.slot)

    def state_of(self, lane_states: Mapping[int, LaneState], slot: int) -> dict[str, Any]:
        """Collective: return the state that holds these states of this rank's lanes, and those that the others give."""
        self._require_whole("asked for a state")
        begin = self._loaded or self._begin  # not the dataset's, which another loader may read meanwhile
        epoch = self.dataset.epoch if begin is None else begin.epoch
        self._identify("save", lambda: {"slot": slot, "epoch": epoch})
        return {
            **self.dataset.state_with(self.rank_sync.merge(as_dicts(lane_states)), epoch=epoch),
            "slot": slot,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration goes on after the batch at which ``state`` was taken, on any topology. A collective.

        Raises:
            ValueError: if the state is from another corpus, encoder or config, or is no state.
        """
        self._identify("load", lambda: {"state": digest(plain(state))})
        self.dataset.load_state_dict(state)
        self._progress, self._begin = Progress(Handed({})), None

    def _require_whole(self, what: str) -> None:
        """Refuse where an interrupted ``next()`` may have left this rank and the others at different agreements."""
        if self._progress.midway and not self.rank_sync.alone:
            raise RuntimeError(
                f"the loader of rank {self.rank_sync.rank} cannot be {what}: an exception cut its last next() or "
                "iter() short, and the ranks may wait for different things; end this process, which the other ranks "
                "will notice, and resume from the last checkpoint"
            )

    def _identify(self, doing: str, settings: Callable[[], dict[str, Any]]) -> None:
        """Compare what the ranks were given; each reads its share of what the corpus's fingerprint needs, once."""
        require_one_run(self.dataset, self.rank_sync, doing=f"{doing} a state", settings=settings)
        if not self._identified:
            gather_fingerprint(self.dataset.lane_config.source, self.rank_sync)
            self._identified = True

    @property
    def packs_per_step(self) -> int:
        """Packs in an optimizer step, over all ranks."""
        return self._packs_per_step or self.rank_sync.world_size * self.batch_size

    @property
    def batches_per_step(self) -> int:
        """Batches that every rank contributes to an optimizer step: what gradients accumulate over."""
        return -(-self._share // self.batch_size)

    @property
    def packs_per_batch(self) -> int:
        """Packs in a batch: the share of a step that each rank has, in batches as even as can be."""
        return -(-self._share // self.batches_per_step)

    @property
    def _share(self) -> int:
        """Packs of a step that a rank has, at most."""
        return -(-self.packs_per_step // self.rank_sync.world_size)

    @property
    def epoch(self) -> int:
        """Epoch, from 0, that this rank's slowest lane is in, as of the last batch handed over."""
        epochs = (state.epoch for state in self.lane_states.values())
        return min(epochs, default=self.dataset.epoch)

    def ledger(self) -> Ledger:
        """Where every token of this rank's lanes went, as of the last batch handed over."""
        return total_ledger(self.lane_states)

    def source_stats(self) -> dict[str, SourceStats]:
        """What each source of a mixture gave in this rank's lanes, as of the last batch handed over."""
        return self.dataset.source_stats_of(self.lane_states)


class Handed(NamedTuple):
    """What the trainer was handed by one iteration, up to its last batch."""

    lane_states: dict[int, LaneState]  # never changed: a batch makes a new one
    slot: int = 0  # of the epoch, after the steps handed over
    epoch: int = 0
    begun: int = 0  # the slot at which this iteration began to make steps of that epoch
    batches: int = 0  # of that epoch, in this iteration


class Progress:
    """Where an iteration stands, for itself and its loader. ``handed`` is replaced as a whole, as a batch is returned.

    ``midway`` is set during a ``next()``: found set at the beginning of the next one, an exception struck in between,
    and nothing but ``handed`` can be relied on.
    """

    def __init__(self, handed: Handed) -> None:
        self.handed = handed
        self.midway = False


class _Batches:
    """One iteration: makes this rank's share of every batch, and agrees with the others which batches there are."""

    def __init__(self, loader: PackedDataLoader, begin: LoadedState) -> None:
        self.loader = loader
        self.begin = begin
        self.rank_sync = rank_sync = loader.rank_sync
        require_group_of_now(alone=rank_sync.alone)
        dataset, lane_states = loader.dataset, loader.lane_states
        require_one_run(dataset, rank_sync, doing="iterate", settings=partial(self._settings, loader))
        consumers = rank_sync.world_size * max(1, loader.num_workers)
        dataset.num_lanes = num_lanes = dataset.lanes_for(consumers)
        self.workers = workers = min(loader.num_workers, -(-num_lanes // rank_sync.world_size))
        if workers < loader.num_workers and rank_sync.rank == 0:
            log.warning(
                "num_workers=%d: %d of them has work, for there %s; a new run may set num_lanes",
                loader.num_workers, workers, "is 1 lane" if num_lanes == 1 else f"are {num_lanes} lanes",
            )  # fmt: skip
        # Workers do not matter: what they make is merged in the order of the slots.
        if num_lanes < rank_sync.world_size:
            warn_user(
                f"{num_lanes} lanes are too few for {rank_sync.world_size} ranks: {rank_sync.world_size - num_lanes} "
                "of them hand out null packs only, and a step trains fewer packs than it did; use fewer ranks, or "
                "start a new run with more num_lanes",
            )
        elif num_lanes % rank_sync.world_size:
            warn_user(
                f"{num_lanes} lanes do not divide evenly among {rank_sync.world_size} ranks: every sample still comes "
                "exactly once, but steps hold other packs than on another number of ranks, and at an epoch's end the "
                "ranks with fewer lanes hand out null packs; use a number of ranks that divides the lanes, or in a new "
                "run a num_lanes that the ranks divide",
            )
        step = loader.packs_per_step
        whole = loader.batches_per_step * rank_sync.world_size * loader.packs_per_batch
        if whole != step and rank_sync.rank == 0:
            log.warning(
                "packs_per_step=%d cannot be shared out evenly over %d rank(s) in batches of %d: every step holds %d "
                "null packs, which cost time and train nothing; a multiple of %d holds none",
                step, rank_sync.world_size, loader.batch_size, whole - step, rank_sync.world_size * loader.batch_size,
            )  # fmt: skip
        gather_division(dataset.lane_config.source, num_lanes, rank_sync)
        # All ranks begin in the same epoch, also one whose lanes have made no pack in it yet.
        self.last_epoch = dataset.last_epoch
        epoch = 0
        if self.last_epoch is not None:
            epochs = (state.epoch for state in lane_states.values())
            epoch = max(epochs, default=dataset.epoch)
        own = {lane: of for lane, of in lane_states.items() if lane % rank_sync.world_size == rank_sync.rank}
        # Ours, should the loader be iterated once more meanwhile: its state is of the newest iteration.
        self.progress = Progress(Handed(own, loader.slot, epoch, loader.slot))
        self._begin()

    def _begin(self) -> None:
        """Go on after the last batch that was handed over."""
        loader, handed = self.loader, self.progress.handed
        self.epoch, self.slot, self.batches = handed.epoch, handed.begun, handed.batches
        self.shares = Shares(
            loader.dataset,
            lane_states=handed.lane_states,
            epoch=None if self.last_epoch is None else self.epoch,
            rank=self.rank_sync.rank,
            world_size=self.rank_sync.world_size,
            workers=self.workers,
            prefetch=loader.prefetch_factor,
            max_restarts=loader.max_worker_restarts,
        )
        self.filed: dict[int, LaneState] = {}  # with the batch in the making
        self.prepared = self.batches  # shares made in this epoch
        self.making: list[Share] = []  # of the round that is not asked about yet
        self.asked: deque[tuple[list[Share], Agreement]] = deque()  # rounds, and what all ranks say of them
        self.rounds = 0  # asked about
        self.round: deque[Share] = deque()  # agreed on, to be handed out
        self.rest: list[Share] | None = None  # of the round, where it was cut short: by the epoch's end, ...
        self.failing = False  # ... or by an error on some rank
        self.failed: Exception | None = None  # our own
        self.over = False

    def __iter__(self) -> _Batches:
        return self

    @staticmethod
    def _settings(loader: PackedDataLoader) -> dict[str, Any]:
        """What must be the same on all ranks, beside the data."""
        dataset, rank_sync, mix = loader.dataset, loader.rank_sync, loader.dataset.mix
        dataset.lanes_for(rank_sync.world_size * max(1, loader.num_workers))  # raises where that cannot be
        budget = dataset.lane_config.source.retry_budget
        if not rank_sync.alone and budget >= rank_sync.timeout.total_seconds():
            raise ValueError(
                f"reading may be tried again for {budget:.0f} s and the other ranks wait {rank_sync.timeout} at "
                "most; lower the source's retries or raise the loader's timeout"
            )
        return {
            "packs_per_step": loader.packs_per_step,
            "packs_per_batch": loader.packs_per_batch,
            "epochs": dataset.epochs,
            "epoch": dataset.epoch,
            "on_bad_record": "error" if dataset.lane_config.quarantine is None else "skip",
            "weights": None if mix is None else mix.target_fractions,
            "slot": loader.slot,
            "state": digest(sorted(as_dicts(loader.lane_states).items())),
        }

    def __next__(self) -> Batch:
        """The next batch.

        Raises:
            Exception: whatever went wrong. Nothing is consumed: alone, asked again, this rank goes on after the last
                batch handed over, and makes again what it had prepared beyond it.
            RuntimeError: where the call before this one was interrupted, with several ranks.
        """
        progress = self.progress
        if progress.midway:
            self.loader._require_whole("asked for a batch")
            self.shares.close()
            self._begin()
        progress.midway = True
        self.filed = {}
        batch = self._next()
        slot = self.slot + self.batches // self.loader.batches_per_step * self.loader.packs_per_step
        lane_states = progress.handed.lane_states.copy()
        lane_states.update(self.filed)
        handed = Handed(lane_states, slot, self.epoch, self.slot, self.batches)
        # From here on there is no call and no loop, where Python raises interrupts: the batch is booked and returned.
        progress.handed = handed
        progress.midway = False
        self.begin.phase = ENDED if batch is None else BEGUN
        if batch is None:
            raise StopIteration
        return batch

    def _next(self) -> Batch | None:
        """Make the next batch; None at the end."""
        per_step = self.loader.batches_per_step
        while not self.over:
            share = self._take()
            if share is not None or self.batches % per_step:
                batch = self._collate(share.packs if share else [])
                self._file([share] if share else [])
                self.batches += 1
                return batch
            if not self.batches:
                self._require_packs()
            if self.last_epoch is None or self.epoch >= self.last_epoch:
                self.over = True
            else:
                self._turn_over()
        return None

    def _take(self) -> Share | None:
        """Our share of the next batch; None when no rank has anything left in this epoch."""
        if self.rounds and self.rest is None and not self.rank_sync.alone:
            for _ in range(2):  # one for the one that is handed over, one to gain a lead
                if self.prepared - self.batches < 2 * ROUND:
                    self._prepare()
        while not self.round:
            if self.failing:
                self._fail()
            if self.rest is not None:
                self._settle(self.rest)
                return None
            while not self.asked:
                self._prepare()
            shares, answer = self.asked.popleft()
            try:
                count, self.failing = answer.wait()
            except Exception:  # a rank is gone: no more batches, so no more packs
                self.shares.close()
                raise
            self.round.extend(shares[:count])
            if count < len(shares):
                self.rest = shares[count:]
        return self.round.popleft()

    def _prepare(self) -> None:
        """Make our share of one more batch; when a round is complete, tell the others how much of it there is."""
        share = Share(error=self.failed)
        if self.failed is None:
            try:
                share = self.shares.make(self._room())
            except Exception as error:
                self.failed = share.error = error
        self.making.append(share)
        self.prepared += 1
        # The first rounds are short, so that the first batch comes at once.
        if len(self.making) == (1 if self.rank_sync.alone else min(2**self.rounds, ROUND)):
            count = next((i for i, share in enumerate(self.making) if not share.counts), len(self.making))
            failed = count < len(self.making) and self.making[count].error is not None
            self.asked.append((self.making, self.rank_sync.agree(count, failed=failed)))
            self.making = []
            self.rounds += 1

    def _room(self) -> int:
        """Packs of ours in the batch that is prepared: of its step's slots, those of this rank that are left."""
        rank, world_size, size = self.rank_sync.rank, self.rank_sync.world_size, self.loader.packs_per_step
        step, batch = divmod(self.prepared, self.loader.batches_per_step)
        begin = self.slot + step * size
        ours = (rank - begin) // world_size - (rank - begin - size) // world_size
        return max(0, min(self.loader.packs_per_batch, ours - batch * self.loader.packs_per_batch))

    def _settle(self, shares: list[Share]) -> None:
        """The epoch is over on every rank: what was prepared beyond its last batch holds ends of lanes at most."""
        for later, answer in self.asked:
            answer.wait()
            shares = shares + later
        self._file(shares + self.making)
        self.asked.clear()
        self.making = []

    def _require_packs(self) -> None:
        """Raise on all ranks if the run has no pack. A collective, where all ranks have seen an epoch without one."""
        lane_states = {**self.progress.handed.lane_states, **self.filed}
        whole = Ledger.total(self.rank_sync.gather(total_ledger(lane_states)))
        if not whole.packs:
            raise nothing_to_pack(whole)

    def _turn_over(self) -> None:
        """To the next epoch."""
        self.epoch = self.shares.epoch = self.epoch + 1
        self.prepared = self.batches = self.slot = 0
        self.rest = None

    def _file(self, shares: list[Share]) -> None:
        """With the next batch that is handed over, the state says that these were."""
        for share in shares:
            for event in share.events:
                self.filed[event.lane] = event.state
                self.loader.dataset.untrained.look_at(event.state.ledger)

    def _fail(self) -> None:
        """Raise a rank's error on all ranks, for good; alone, asked again, this rank tries again."""
        error = self.failed
        try:
            if self.rank_sync.alone:
                assert error is not None
                raise error
            self.shares.close()
            try:
                self.rank_sync.raise_on_all(error, doing="making packs")
            except Exception:
                self.progress.midway = False  # all ranks are here
                raise
        finally:
            del error  # the traceback holds this frame: a cycle would keep the workers alive

    def _collate(self, packs: list[Pack]) -> Batch:
        config = self.loader.dataset.lane_config
        if missing := self.loader.packs_per_batch - len(packs):
            packs = packs + [null_pack(config.packing.max_seq_len, padding_idx=config.padding_idx)] * missing
        batch = stack_packs(packs, segments=config.packing.segments)
        return batch.pin_memory() if self.loader.pin_memory else batch
