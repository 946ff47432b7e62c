"""`PackedDataLoader`: worker processes, batches, and a state as of the last batch handed over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from streampack.collate import Batch, collate_packed, null_pack, to_torchtune
from streampack.iterable import IterablePackedDataset, PackStream, ledger_of
from streampack.metrics import Ledger
from streampack.plan import require_positive
from streampack.receipt import Receipt
from streampack.types import Pack


class PackedDataLoader:
    """Batches of packs from an `IterablePackedDataset`, made in worker processes if you want.

    >>> rows = [{"tokens": [i] * 5, "labels": [i] * 5} for i in range(5)]
    >>> loader = PackedDataLoader(IterablePackedDataset(rows, max_seq_len=10), batch_size=2)
    >>> [tuple(batch.tokens.shape) for batch in loader]
    [(2, 10), (2, 10)]

    Every batch has ``batch_size`` packs of one epoch: an epoch's last batch is filled up with null packs,
    which train nothing. The order does not depend on ``num_workers``: each worker makes the packs of some
    lanes, and they are merged as one process would have made them. A state says what was handed to the
    trainer; what workers had made beyond that is made again after a resume.

    Args:
        dataset: where packs come from; its settings decide all but the batching.
        batch_size: packs in a batch.
        num_workers: processes that read, encode and pack. 0 does it in this one.
        prefetch_factor: packs that each worker makes ahead.
        batches_per_step: an epoch is filled up with null packs to a multiple of so many batches, so that
            no optimizer step mixes two epochs.
    """

    def __init__(
        self,
        dataset: IterablePackedDataset,
        *,
        batch_size: int = 1,
        num_workers: int = 0,
        prefetch_factor: int = 8,
        batches_per_step: int = 1,
    ) -> None:
        require_positive(batch_size, "batch_size")
        require_positive(prefetch_factor, "prefetch_factor")
        require_positive(batches_per_step, "batches_per_step")
        if num_workers < 0:
            raise ValueError(f"num_workers={num_workers} is below 0; give 0 to read in this process")
        self.dataset = dataset
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.prefetch_factor = prefetch_factor
        self.batches_per_step = batches_per_step
        self.receipts: dict[int, bytes] = {}  # of the last pack of each lane that was handed over

    def __iter__(self) -> Iterator[Batch]:
        if self.num_workers == 0:
            return _Batches(self, [self.dataset.stream()])
        streams: list[Iterator[Pack]] = []
        for worker in range(self.num_workers):
            share = _Share(self.dataset, worker, self.num_workers)
            processes = DataLoader(
                share,
                batch_size=None,
                num_workers=1,
                prefetch_factor=self.prefetch_factor,
                collate_fn=_as_it_is,
            )
            streams.append(iter(processes))
        return _Batches(self, streams)

    def state_dict(self) -> dict[str, Any]:
        """After the last batch that was handed over; plain values, fresh at every call."""
        return self.dataset.state_of(self.receipts)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration goes on after the batch at which ``state`` was taken, with any ``num_workers``."""
        self.dataset.load_state_dict(state)
        self.receipts = dict(state["lanes"])

    @property
    def epoch(self) -> int:
        """That the slowest lane is in, from 0, as of the last batch handed over."""
        return min((Receipt.from_bytes(receipt).epoch for receipt in self.receipts.values()), default=0)

    def ledger(self) -> Ledger:
        """Where every token went, as of the last batch handed over."""
        return ledger_of(self.receipts)


class _Share(IterableDataset[Pack]):
    """What one worker process iterates: the packs of its lanes, as numpy arrays (no shared memory)."""

    def __init__(self, dataset: IterablePackedDataset, worker: int, num_workers: int) -> None:
        dataset.num_lanes = dataset.lanes_for(num_workers)
        dataset.identity()  # once here rather than in every worker
        self.dataset = dataset
        self.worker = worker
        self.num_workers = num_workers

    def __iter__(self) -> PackStream:
        return self.dataset.stream(self.worker, self.num_workers)


def _as_it_is(pack: Any) -> Any:
    return pack  # torch's default would make tensors of the arrays


class _Batches:
    """Merges the workers' packs by (epoch, number in the lane, lane): the order in which one process makes them."""

    def __init__(self, loader: PackedDataLoader, streams: list[Iterator[Pack]]) -> None:
        self.loader = loader
        self.streams = streams
        self.heads: list[Pack | None] = [None] * len(streams)  # the next pack of each, once it is asked for
        self.ended = [False] * len(streams)
        self.packs: list[Pack] = []  # the batch in the making
        self.epoch = -1
        self.batches = 0  # handed over in this epoch

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> Batch:
        size = self.loader.batch_size
        while len(self.packs) < size:
            pack = self._peek()
            if pack is None or pack.epoch != self.epoch:
                if self.packs or self.batches % self.loader.batches_per_step:
                    break  # the epoch is over and its last step is not complete
                if pack is None:
                    raise StopIteration
                self.epoch, self.batches = pack.epoch, 0
            self.packs.append(pack)
            self.heads = [None if head is pack else head for head in self.heads]
        self.batches += 1
        packs, self.packs = self.packs, []
        self.loader.receipts.update({pack.lane: pack.receipt for pack in packs})
        config = self.loader.dataset.lane_config
        filler = null_pack(config.packing.max_seq_len, padding_idx=config.padding_idx)
        packs += [filler] * (size - len(packs))
        return collate_packed([to_torchtune(pack) for pack in packs])

    def _peek(self) -> Pack | None:
        for i, stream in enumerate(self.streams):
            if self.heads[i] is None and not self.ended[i]:
                self.heads[i] = next(stream, None)
                self.ended[i] = self.heads[i] is None
        waiting = [head for head in self.heads if head is not None]
        return min(waiting, key=lambda pack: (pack.epoch, pack.number, pack.lane), default=None)
