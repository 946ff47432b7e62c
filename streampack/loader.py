"""`PackedDataLoader`: worker processes, batches, ranks in step, a state as of the last batch handed over."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

from streampack.collate import Batch, collate_packed, null_pack, to_torchtune
from streampack.iterable import IterablePackedDataset
from streampack.lockstep import DATA, FAILED, NOTHING, Answer, Lockstep
from streampack.metrics import Ledger
from streampack.plan import require_positive
from streampack.receipt import Receipt
from streampack.stream import Event, PackStream, ledger_of
from streampack.types import LaneEnd, Pack
from streampack.workers import Worker

AHEAD = 4  # batches for which ranks have agreed before the first of them is handed out


class PackedDataLoader:
    """Batches of packs from an `IterablePackedDataset`, on any number of ranks and worker processes.

    >>> rows = [{"tokens": [i] * 5, "labels": [i] * 5} for i in range(5)]
    >>> loader = PackedDataLoader(IterablePackedDataset(rows, max_seq_len=10), batch_size=2)
    >>> [tuple(batch.tokens.shape) for batch in loader]
    [(2, 10), (2, 10)]

    Every rank hands out the same number of batches, each of ``batch_size`` packs of one epoch. A rank
    whose data ends before the others' fills up with null packs, which train nothing, until all are done;
    an error on one rank is raised on all. The order does not depend on ``num_workers``: each worker makes the
    packs of some lanes, and they are merged as one process would have made them. A worker that dies is made
    again and nothing is lost.

    With a process group, make the loader and iterate it on all ranks. A state says what was handed to the
    trainer; what workers had made beyond that is made again after a resume, on any number of ranks and workers.

    Args:
        dataset: where packs come from; its settings decide all but the batching.
        batch_size: packs in a batch.
        num_workers: processes that read, encode and pack, for each rank. 0 does it in this one.
        prefetch_factor: packs that each worker makes ahead.
        batches_per_step: an epoch is filled up with null packs to a multiple of so many batches, so that
            no optimizer step mixes two epochs.
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
        batches_per_step: int = 1,
        max_worker_restarts: int = 3,
        pin_memory: bool = False,
        timeout: float = 1800.0,
    ) -> None:
        require_positive(batch_size, "batch_size")
        require_positive(prefetch_factor, "prefetch_factor")
        require_positive(batches_per_step, "batches_per_step")
        for value, name in ((num_workers, "num_workers"), (max_worker_restarts, "max_worker_restarts")):
            if value < 0:
                raise ValueError(f"{name}={value} is below 0; give at least 0")
        self.dataset = dataset
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.prefetch_factor = prefetch_factor
        self.batches_per_step = batches_per_step
        self.max_worker_restarts = max_worker_restarts
        self.pin_memory = pin_memory
        self.lockstep = Lockstep(timeout=timedelta(seconds=timeout))
        self.receipts: dict[int, bytes] = {}  # as of the last batch; after a load of all lanes, then of ours
        self._resume: int | None = None  # a state was loaded and not taken up yet: the epoch its run began in

    def __iter__(self) -> Iterator[Batch]:
        """From the loaded state on; without one, from the dataset's epoch on."""
        if self._resume != self.dataset.epoch:  # as in the dataset, `set_epoch` may have put the state aside
            self.receipts = {}
        self._resume = None
        return _Batches(self)

    def state_dict(self) -> dict[str, Any]:
        """After the last batch that was handed over, of all ranks: plain values, fresh at every call.

        A collective: with several ranks, all must call it, after the same number of batches.
        """
        return self.dataset.state_of(self.lockstep.merge(self.receipts))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration goes on after the batch at which ``state`` was taken, on any topology.

        Raises:
            ValueError: if the state is from another corpus, encoder or config, or is no state.
        """
        self.dataset.load_state_dict(state)
        self.receipts = dict(state["lanes"])
        self._resume = self.dataset.epoch

    @property
    def epoch(self) -> int:
        """That this rank's slowest lane is in, from 0, as of the last batch handed over."""
        return min((Receipt.from_bytes(receipt).epoch for receipt in self.receipts.values()), default=0)

    def ledger(self) -> Ledger:
        """Where every token of this rank's lanes went, as of the last batch handed over."""
        return ledger_of(self.receipts)


@dataclass
class _Share:
    """One rank's part of one batch, on its way from the workers to the trainer."""

    packs: list[Pack] = field(default_factory=list)
    ends: list[LaneEnd] = field(default_factory=list)  # of lanes that ran dry before or among the packs
    error: Exception | None = None


class _Batches:
    """Merges the workers' events by (epoch, number in the lane, lane): the order in which one process makes them."""

    def __init__(self, loader: PackedDataLoader) -> None:
        self.loader = loader
        self.lockstep = loader.lockstep
        dataset, receipts = loader.dataset, loader.receipts
        workers = max(1, loader.num_workers)
        world_size, rank = self.lockstep.world_size, self.lockstep.rank
        consumers = world_size * workers
        dataset.num_lanes = num_lanes = dataset.lanes_for(consumers)
        if num_lanes % consumers:
            warnings.warn(
                f"{num_lanes} lanes do not divide evenly among {consumers} consumers (ranks x workers): every sample "
                "still comes exactly once, but steps hold other packs than on another topology",
                stacklevel=3,
            )
        budget = getattr(dataset.lane_config.source, "retry_budget", 0.0)
        if not self.lockstep.alone and budget >= self.lockstep.timeout.total_seconds():
            raise ValueError(
                f"reading may be tried again for {budget:.0f} s and the other ranks wait {self.lockstep.timeout} at "
                "most; lower the source's retries or raise the loader's timeout"
            )
        # All ranks begin in the same epoch, also one whose lanes have made no pack in it yet.
        self.epoch = max(
            (Receipt.from_bytes(receipt).epoch for receipt in receipts.values()), default=dataset.epoch
        )
        self.last_epoch = dataset.last_epoch
        if self.last_epoch is None:
            self.epoch = 0
        first_epoch = None if self.last_epoch is None else self.epoch
        # Ours, should the loader be iterated once more meanwhile: its state is of the newest iteration.
        self.receipts = loader.receipts = {
            lane: receipt for lane, receipt in receipts.items() if lane % world_size == rank
        }
        self.streams: list[Worker | _Here] = []
        for worker in range(workers):
            consumer = rank + world_size * worker
            share = {lane: r for lane, r in receipts.items() if lane % consumers == consumer}
            if loader.num_workers:
                self.streams.append(
                    Worker(
                        dataset,
                        consumer=consumer,
                        consumers=consumers,
                        receipts=share,
                        first_epoch=first_epoch,
                        prefetch=loader.prefetch_factor,
                        max_restarts=loader.max_worker_restarts,
                    )
                )
            else:
                self.streams.append(
                    _Here(
                        partial(dataset.stream, consumer, consumers, receipts=share, first_epoch=first_epoch)
                    )
                )
        self.heads: list[Event | None] = [None] * workers  # the next event of each, once it is asked for
        self.ended = [False] * workers
        self.share = _Share()  # in the making; an error in the middle leaves it as it is
        self.agreed: deque[tuple[_Share, Answer]] = deque()  # shares made, and what all ranks say of them
        self.batches = 0  # handed over in this epoch
        self.failed: Exception | None = None
        self.over = False

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> Batch:
        while not self.over:
            ahead = 0 if self.lockstep.alone else AHEAD
            while len(self.agreed) <= ahead:
                self._prepare()
            share, answer = self.agreed.popleft()
            try:
                word = answer.wait()
            except Exception:  # a rank is gone: no more batches, so no more packs
                for stream in self.streams:
                    stream.close()
                raise
            if word == FAILED:
                self._fail(share)
            self._file(share)
            if word == DATA:
                self.batches += 1
                return self._collate(share.packs)
            # The epoch is over on every rank, so whatever else was agreed on is nothing too.
            for later, answer in self.agreed:
                answer.wait()
                self._file(later)
            self.agreed.clear()
            if self.batches % self.loader.batches_per_step:
                self.batches += 1
                return self._collate([])
            if self.last_epoch is None or self.epoch >= self.last_epoch:
                self.over = True
                raise StopIteration
            self.epoch, self.batches = self.epoch + 1, 0
        raise StopIteration

    def _prepare(self) -> None:
        """Make this rank's share of one more batch, and tell the others whether there is any."""
        try:
            # After an error it only repeats the word: each rank must have asked as many questions as the others.
            while (
                self.failed is None
                and len(self.share.packs) < self.loader.batch_size
                and (event := self._take()) is not None
            ):
                (self.share.packs if isinstance(event, Pack) else self.share.ends).append(event)  # type: ignore[arg-type]
        except Exception as error:
            self.failed = error
        if self.failed is not None:
            self.agreed.append((_Share(error=self.failed), self.lockstep.say(FAILED)))
            return
        share, self.share = self.share, _Share()
        self.agreed.append((share, self.lockstep.say(DATA if share.packs else NOTHING)))

    def _take(self) -> Event | None:
        """The next event of this epoch, in the order of one process; None if this rank has no more."""
        for i, stream in enumerate(self.streams):
            if self.heads[i] is None and not self.ended[i]:
                self.heads[i] = next(stream, None)
                self.ended[i] = self.heads[i] is None
        waiting = [head for head in self.heads if head is not None and head.epoch == self.epoch]
        first = min(waiting, key=_turn, default=None)
        self.heads = [None if head is first else head for head in self.heads]
        return first

    def _file(self, share: _Share) -> None:
        """From now on, the state says that these were handed over."""
        events: list[Event] = [*share.packs, *share.ends]
        self.receipts.update({event.lane: event.receipt for event in events})

    def _fail(self, share: _Share) -> None:
        """Raise a rank's error on all ranks, for good; alone, asked again, this rank tries again."""
        error, share.error = share.error, None
        try:
            if self.lockstep.alone:
                self.failed = None
                assert error is not None
                raise error
            for stream in self.streams:
                stream.close()  # an error's traceback may keep it alive
            self.streams.clear()
            said = self.lockstep.gather(error and f"{type(error).__name__}: {error}")
            if error is not None:
                raise error
            rank, message = next((rank, text) for rank, text in enumerate(said) if text)
            raise RuntimeError(f"rank {rank} failed while making packs: {message}")
        finally:
            del error  # the traceback holds this frame: a cycle would keep the workers alive

    def _collate(self, packs: list[Pack]) -> Batch:
        config = self.loader.dataset.lane_config
        filler = null_pack(config.packing.max_seq_len, padding_idx=config.padding_idx)
        packs = packs + [filler] * (self.loader.batch_size - len(packs))
        batch = collate_packed([to_torchtune(pack) for pack in packs])
        return batch.pin_memory() if self.loader.pin_memory else batch


class _Here:
    """The events of this process, as `Worker` gives those of another: it begins, and fails, when it is asked."""

    def __init__(self, begin: Callable[[], PackStream]) -> None:
        self.begin = begin
        self.stream: PackStream | None = None

    def __iter__(self) -> _Here:
        return self

    def close(self) -> None:
        """Let go of the lanes and their files."""
        self.stream = None

    def __next__(self) -> Event:
        if self.stream is None:
            self.stream = self.begin()
        return self.stream.next_event()


def _turn(event: Event) -> tuple[float, int]:
    # A lane's end comes after all its packs, and may come as soon as it is known.
    return (event.number if isinstance(event, Pack) else -1, event.lane)
