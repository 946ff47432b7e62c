"""Twenty known bugs of such systems, each as a patch of the library.

As a pytest plugin (``python -m pytest -p stress.planted``) it plants the bug that ``STRESS_BUG`` names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from streampack import IterablePackedDataset, PackedDataLoader
from streampack.accounting import Ledger
from streampack.distributed import rank_sync
from streampack.distributed.rank_sync import RankSync
from streampack.loader import data_loader as loader
from streampack.loader import merge as shares
from streampack.loader import workers
from streampack.loader.workers import Worker
from streampack.packing import batch as collate
from streampack.packing.planner import Planner
from streampack.sources import map_style as mapstyle
from streampack.sources import shuffling as window
from streampack.streaming.dataset import STATE_VERSION
from streampack.streaming.lane import Lane
from streampack.streaming.lane_state import Receipt
from streampack.types import LaneEnd, Pack

BUGS: dict[str, Callable[[], None]] = {}


def bug(plant: Callable[[], None]) -> Callable[[], None]:
    """Register a patch in `BUGS`, under its name with dashes."""
    BUGS[plant.__name__.replace("_", "-")] = plant
    return plant


def plant_from_environment() -> None:
    """Plant the bug that ``STRESS_BUG`` names."""
    if name := os.environ.get("STRESS_BUG"):
        BUGS[name]()


def _set(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


@bug
def aliased_state() -> None:
    """A state holds the live dictionary, which changes as the stream goes on."""

    def state_with(self: IterablePackedDataset, lanes: Mapping[int, bytes]) -> dict[str, Any]:
        if getattr(self, "_live", None) is None:
            self._live: dict[int, bytes] = {}  # type: ignore[misc]
        self._live.clear()
        self._live.update(lanes)
        return {
            "version": STATE_VERSION,
            "identity": dict(self.identity()),
            "epoch": self.epoch,
            "num_lanes": self.num_lanes,
            "lanes": self._live,
        }

    _set(IterablePackedDataset, "state_with", state_with)


@bug
def cursor_off_by_one() -> None:
    """The cursor of a row is that of the next."""

    def cursor(self: Any) -> tuple[int, ...]:
        return (self.index + 1,)

    _set(mapstyle._Rows, "cursor", property(cursor))

    def following(self: Any) -> tuple[int, ...]:
        return (*self.kept[:-1], self.kept[-1] + 1)

    # Rows have theirs from the same place.
    _set(window.InOrder, "cursor", property(following, lambda self, place: setattr(self, "kept", place)))


@bug
def state_of_rank_0_only() -> None:
    """The lanes of the other ranks are not in the state."""

    def merge(self: RankSync, receipts: Mapping[int, bytes]) -> dict[int, bytes]:
        mine = {lane: receipt for lane, receipt in receipts.items() if lane % self.world_size == self.rank}
        first: dict[int, bytes] = self.gather(mine)[0]
        return first

    _set(RankSync, "merge", merge)


@bug
def lost_buffer() -> None:
    """What waited when the state was taken is not read again; the ledger is made to agree."""
    good = Receipt.from_bytes.__func__  # type: ignore[attr-defined]

    def from_bytes(cls: type[Receipt], data: bytes) -> Receipt:
        receipt: Receipt = good(cls, data)
        span = receipt.next_piece - receipt.first
        ledger = Ledger.from_numbers(receipt.ledger.numbers())
        ledger.tokens_in -= ledger.buffered
        return receipt._replace(gone=(1 << span) - 1, offset=0, ledger=ledger)

    _set(Receipt, "from_bytes", classmethod(from_bytes))


@bug
def stale_lanes_win() -> None:
    """Every rank puts all lanes into the state, those of others as they were when it began."""
    good_load, good_merge = PackedDataLoader.load_state_dict, RankSync.merge

    def load_state_dict(self: PackedDataLoader, state: Mapping[str, Any]) -> None:
        good_load(self, state)
        self.rank_sync.stale = dict(state["lanes"])  # type: ignore[attr-defined]

    def merge(self: RankSync, receipts: Mapping[int, bytes]) -> dict[int, bytes]:
        if self.alone:
            return good_merge(self, receipts)
        everything = {**getattr(self, "stale", {}), **receipts}
        return {lane: receipt for theirs in self.gather(everything) for lane, receipt in theirs.items()}

    _set(PackedDataLoader, "load_state_dict", load_state_dict)
    _set(RankSync, "merge", merge)


@bug
def bitmap_shifted_by_one() -> None:
    """The pieces that are gone are one off."""
    good = Receipt.from_bytes.__func__  # type: ignore[attr-defined]

    def from_bytes(cls: type[Receipt], data: bytes) -> Receipt:
        receipt: Receipt = good(cls, data)
        return receipt._replace(gone=receipt.gone >> 1)

    _set(Receipt, "from_bytes", classmethod(from_bytes))


@bug
def offset_not_restored() -> None:
    """A sample that was split begins anew; the ledger is made to agree."""
    good = Receipt.from_bytes.__func__  # type: ignore[attr-defined]

    def from_bytes(cls: type[Receipt], data: bytes) -> Receipt:
        receipt: Receipt = good(cls, data)
        ledger = Ledger.from_numbers(receipt.ledger.numbers())
        ledger.packed -= receipt.offset
        return receipt._replace(offset=0, ledger=ledger)

    _set(Receipt, "from_bytes", classmethod(from_bytes))


@bug
def drop_counted_twice() -> None:
    """A replay books what it drops once more."""
    good = Lane._pieces
    _set(Lane, "_pieces", lambda self, row, *, replay: good(self, row, replay=False))
    hold = Lane._restore

    def restore(self: Lane, receipt: Receipt) -> None:
        # Booking moves the piece counter of a dropped row too; keep the replay itself in step.
        def pieces(lane: Lane, row: Any, *, replay: bool) -> Any:
            before = self.planner.next_piece
            found = good(lane, row, replay=False)
            lane.planner.next_piece = before
            return found

        self._pieces = pieces.__get__(self)  # type: ignore[method-assign]
        hold(self, receipt)
        del self._pieces

    _set(Lane, "_restore", restore)


@bug
def window_key_without_start() -> None:
    """All windows of a lane are permuted alike."""
    good = window.permutation
    _set(window, "permutation", lambda count, *key: good(count, *key[:3]))


@bug
def epoch_not_in_key() -> None:
    """Every epoch has the order of the first."""
    good = window.permutation

    def permutation(count: int, seed: int, epoch: int, *key: int) -> Any:
        return good(count, seed, 0, *key)

    _set(window, "permutation", permutation)
    _set(mapstyle, "permutation", permutation)


@bug
def merged_in_arrival_order() -> None:
    """Workers' packs come in the order of the workers, not of the lanes."""
    _set(shares, "_turn", lambda event: (0, 0))


@bug
def lane_end_filed_too_early() -> None:
    """A lane is booked as ended while its last packs wait to be handed over."""
    good = loader._Batches._prepare

    def prepare(self: Any) -> None:
        good(self)
        for event in (*_newest(self).ends, *(head for *_, head in self.shares.heads)):
            if isinstance(event, LaneEnd):
                self.loader.receipts[event.lane] = event.receipt

    _set(loader._Batches, "_prepare", prepare)


@bug
def receipts_filed_when_made() -> None:
    """A state knows of packs that are not handed over yet."""
    good = loader._Batches._prepare

    def prepare(self: Any) -> None:
        good(self)
        share = _newest(self)
        self.loader.receipts.update({event.lane: event.receipt for event in (*share.packs, *share.ends)})

    _set(loader._Batches, "_prepare", prepare)
    _set(loader._Batches, "_file", lambda self, shares: None)


def _newest(batches: Any) -> Any:
    return (batches.making or batches.asked[-1][0])[-1]


@bug
def null_packs_train() -> None:
    """The labels of a null pack count."""
    good = collate.null_pack

    def null_pack(max_seq_len: int, *, padding_idx: int = 0) -> Pack:
        pack = good(max_seq_len, padding_idx=padding_idx)
        return pack._replace(labels=pack.tokens.copy())

    _set(collate, "null_pack", null_pack)
    _set(loader, "null_pack", null_pack)


@bug
def one_epoch_too_many() -> None:
    """The last epoch is off by one."""

    def last_epoch(self: IterablePackedDataset) -> int | None:
        return None if self.epochs is None else self.epoch + self.epochs

    _set(IterablePackedDataset, "last_epoch", property(last_epoch))


@bug
def ledger_not_restored() -> None:
    """Counts begin anew at a resume, but for what the law of the ledger needs."""
    good = Receipt.from_bytes.__func__  # type: ignore[attr-defined]

    def from_bytes(cls: type[Receipt], data: bytes) -> Receipt:
        receipt: Receipt = good(cls, data)
        return receipt._replace(ledger=Ledger(tokens_in=receipt.ledger.buffered))

    _set(Lane, "_restore", _restoring(from_bytes, Lane._restore))


def _restoring(from_bytes: Callable[..., Receipt], good: Callable[..., None]) -> Callable[..., None]:
    return lambda self, receipt: good(self, from_bytes(Receipt, receipt.to_bytes()))


@bug
def buffer_order_changed() -> None:
    """What waits is put back in another order, but for the oldest."""
    good = Lane._restore

    def restore(self: Lane, receipt: Receipt) -> None:
        good(self, receipt)
        planner: Planner = self.planner
        planner.pieces[1:] = planner.pieces[:0:-1]
        planner.lengths[1:] = planner.lengths[:0:-1]

    _set(Lane, "_restore", restore)


@bug
def lanes_counted_anew() -> None:
    """A resume takes the number of lanes from its own ranks and workers, not from the state."""
    good = IterablePackedDataset.load_state_dict

    def load_state_dict(self: IterablePackedDataset, state: Mapping[str, Any]) -> None:
        ours = self.num_lanes
        good(self, state)
        self.num_lanes = ours

    _set(IterablePackedDataset, "load_state_dict", load_state_dict)


@bug
def mended_from_the_start() -> None:
    """A worker that died begins again where it began, not where it stopped."""
    good_init, good_next = Worker.__init__, Worker.__next__

    def init(self: Worker, *args: Any, **settings: Any) -> None:
        good_init(self, *args, **settings)
        self.first_receipts = dict(self.receipts)  # type: ignore[attr-defined]

    def following(self: Worker) -> Any:
        event = good_next(self)
        self.receipts = dict(self.first_receipts)  # type: ignore[attr-defined]
        return event

    _set(workers.Worker, "__init__", init)
    _set(workers.Worker, "__next__", following)


@bug
def ranks_do_not_agree() -> None:
    """A rank that has no more data stops, whatever the others have."""

    def agree(self: RankSync, count: int, *, failed: bool = False) -> rank_sync.Agreement:
        return rank_sync._Alone(~count if failed else count)

    _set(RankSync, "agree", agree)


plant_from_environment()
