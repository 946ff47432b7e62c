"""Twenty known bugs of such systems, each as a patch of the library.

As a pytest plugin (``python -m pytest -p stress.planted``) it plants the bug that ``STRESS_BUG`` names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from streampack import IterablePackedDataset, PackedDataLoader
from streampack.accounting import Ledger
from streampack.distributed.rank_sync import Agreement, RankSync
from streampack.loader import iteration, merge, workers
from streampack.loader.workers import Worker
from streampack.packing import batch as collate
from streampack.packing.planner import Planner
from streampack.sources import map_style as mapstyle
from streampack.sources import shuffling as window
from streampack.streaming.dataset import STATE_VERSION
from streampack.streaming.lane import Lane
from streampack.streaming.lane_state import LaneState
from streampack.streaming.piece_reader import PieceReader
from streampack.types import Pack
from stress.ranks import OwnAgreement

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

    def _state_with(
        self: IterablePackedDataset, lanes: Mapping[int, Mapping[str, Any]], *, epoch: int | None = None
    ) -> dict[str, Any]:
        if getattr(self, "_live", None) is None:
            self._live: dict[int, Any] = {}  # type: ignore[misc]
        self._live.clear()
        self._live.update(lanes)
        return {
            "version": STATE_VERSION,
            "identity": dict(self._identity()),
            "epoch": self.epoch,
            "num_lanes": self.num_lanes,
            "lanes": self._live,
        }

    _set(IterablePackedDataset, "_state_with", _state_with)


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

    def merge(self: RankSync, lanes: Mapping[int, Any]) -> dict[int, Any]:
        mine = {lane: state for lane, state in lanes.items() if lane % self.world_size == self.rank}
        first: dict[int, Any] = self.gather(mine)[0]
        return first

    _set(RankSync, "merge", merge)


def _restoring(change: Callable[[LaneState], None]) -> None:
    """Plant a bug in what a lane takes from its state."""
    good = Lane._restore

    def restore(self: Lane, state: LaneState) -> None:
        changed = LaneState.from_dict(state.as_dict())
        change(changed)
        good(self, changed)

    _set(Lane, "_restore", restore)


@bug
def lost_buffer() -> None:
    """What waited when the state was taken is not read again; the ledger is made to agree."""

    def change(state: LaneState) -> None:
        state.ledger.tokens_in -= state.ledger.buffered
        state.consumed, state.offset = (1 << state.next_piece - state.first) - 1, 0

    _restoring(change)


@bug
def stale_lanes_win() -> None:
    """Every rank puts all lanes into the state, those of others as they were when it began."""
    good_load, good_merge = PackedDataLoader.load_state_dict, RankSync.merge

    def load_state_dict(self: PackedDataLoader, state: Mapping[str, Any]) -> None:
        good_load(self, state)
        self.rank_sync.stale = dict(state["lanes"])  # type: ignore[attr-defined]

    def merge(self: RankSync, lanes: Mapping[int, Any]) -> dict[int, Any]:
        if self.alone:
            return good_merge(self, lanes)
        everything = {**getattr(self, "stale", {}), **lanes}
        return {lane: state for theirs in self.gather(everything) for lane, state in theirs.items()}

    _set(PackedDataLoader, "load_state_dict", load_state_dict)
    _set(RankSync, "merge", merge)


@bug
def bitmap_shifted_by_one() -> None:
    """The bits of the consumed pieces are one off."""

    def change(state: LaneState) -> None:
        state.consumed >>= 1

    _restoring(change)


@bug
def offset_not_restored() -> None:
    """A sample that was split begins anew; the ledger is made to agree."""

    def change(state: LaneState) -> None:
        state.ledger.packed -= state.offset
        state.offset = 0

    _restoring(change)


@bug
def drop_counted_twice() -> None:
    """A replay books what it drops once more."""
    good = PieceReader._pieces

    def pieces(self: PieceReader, row: Any, *, replay: bool) -> Any:
        before = self.next_number
        found = good(self, row, replay=False)
        if replay:  # booking numbers a dropped row too; keep the replay itself in step
            self.next_number = before
        return found

    _set(PieceReader, "_pieces", pieces)


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
    _set(merge, "_turn", lambda event: (0, 0))


@bug
def lane_end_filed_too_early() -> None:
    """A lane is booked as ended while its last packs wait to be handed over."""
    good = iteration.Iteration._make

    def make(self: Any) -> Any:
        rank_batch = good(self)
        for event in (*rank_batch.events, *(head for *_, head in self.rank_batches.heads)):
            if event.pack is None:
                self.progress.handed.lane_states[event.lane] = event.state
        return rank_batch

    _set(iteration.Iteration, "_make", make)


@bug
def states_filed_when_made() -> None:
    """A state counts packs that are not handed over yet."""
    good = iteration.Iteration._make

    def make(self: Any) -> Any:
        rank_batch = good(self)
        self.progress.handed.lane_states.update({event.lane: event.state for event in rank_batch.events})
        return rank_batch

    _set(iteration.Iteration, "_make", make)
    _set(iteration.Iteration, "_book", lambda self, rank_batches: None)


@bug
def null_packs_train() -> None:
    """The labels of a null pack count."""
    good = collate.null_pack

    def null_pack(max_seq_len: int, *, padding_idx: int = 0) -> Pack:
        pack = good(max_seq_len, padding_idx=padding_idx)
        pack.labels = pack.tokens.copy()
        return pack

    _set(collate, "null_pack", null_pack)
    _set(iteration, "null_pack", null_pack)


@bug
def one_epoch_too_many() -> None:
    """The last epoch is off by one."""

    def _last_epoch(self: IterablePackedDataset) -> int | None:
        return None if self.epochs is None else self.epoch + self.epochs

    _set(IterablePackedDataset, "_last_epoch", property(_last_epoch))


@bug
def ledger_not_restored() -> None:
    """Counts begin anew at a resume, but for what the invariant of the ledger needs."""

    def change(state: LaneState) -> None:
        state.ledger = Ledger(tokens_in=state.ledger.buffered)

    _restoring(change)


@bug
def buffer_order_changed() -> None:
    """What waits is put back in another order, but for the oldest."""
    good = Planner.restore

    def restore(self: Planner[Any], waiting: Any, *, offset: int) -> None:
        first, *others = waiting or [None]
        good(self, [first, *reversed(others)] if waiting else [], offset=offset)

    _set(Planner, "restore", restore)


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
        self.first_states = dict(self.lane_states)  # type: ignore[attr-defined]

    def following(self: Worker) -> Any:
        event = good_next(self)
        self.lane_states = dict(self.first_states)  # type: ignore[attr-defined]
        return event

    _set(workers.Worker, "__init__", init)
    _set(workers.Worker, "__next__", following)


@bug
def ranks_do_not_agree() -> None:
    """A rank that has no more data stops, whatever the others have."""

    def agree(self: RankSync, count: int, *, failed: bool = False) -> Agreement:
        return OwnAgreement(count, failed=failed)

    _set(RankSync, "agree", agree)


plant_from_environment()
