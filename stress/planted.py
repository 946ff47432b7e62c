"""Twenty known bugs of streaming loaders, each as a patch of streampack.

As a pytest plugin (``python -m pytest -p stress.planted``) it plants the bug that ``STRESS_BUG`` names. What becomes of
a bug is written to the file that ``STRESS_BUG_TRACE`` names, by every process in which it runs: see `read_trace`.
"""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from streampack import IterablePackedDataset, PackedDataLoader
from streampack.accounting import Ledger
from streampack.distributed.rank_sync import Agreement, RankSync
from streampack.loader import iteration, merge, workers
from streampack.loader.workers import Worker
from streampack.packing import batch
from streampack.packing.planner import Planner
from streampack.sources import map_style, parts, shuffling
from streampack.streaming.dataset import STATE_VERSION
from streampack.streaming.lane import Lane
from streampack.streaming.lane_state import LaneState
from streampack.streaming.piece_reader import PieceReader
from streampack.streaming.replay import Replay
from streampack.types import Pack
from stress.ranks import OwnAgreement

BUGS: dict[str, Callable[[], None]] = {}


def bug(plant: Callable[[], None]) -> Callable[[], None]:
    """Register a patch in `BUGS`, under its name with dashes."""
    BUGS[plant.__name__.replace("_", "-")] = plant
    return plant


def plant(name: str) -> None:
    """Plant a bug; the trace says that it is planted, or why it cannot be."""
    try:
        BUGS[name]()
    except Exception as error:
        _write_trace(f"cannot be planted: {type(error).__name__}: {error}")
        raise
    _write_trace("planted")


def read_trace(path: str | os.PathLike[str]) -> list[str]:
    """Return what processes wrote of a bug, each line once.

    That is ``planted``; ``ran``; ``ran here``, if it ran since `forget_runs`; or what is wrong with the bug.
    """
    lines = Path(path).read_text().splitlines() if Path(path).exists() else []
    return sorted({*lines, *(["ran here"] if Path(f"{path}.here").exists() else [])})


def forget_runs() -> None:
    """Let the trace say ``ran here`` only if the bug runs again, in whatever process."""
    if path := os.environ.get("STRESS_BUG_TRACE"):
        Path(f"{path}.here").unlink(missing_ok=True)


def pytest_runtest_logstart() -> None:
    """Tell for each test whether the bug ran in it; a hook of pytest."""
    forget_runs()


def _write_trace(line: str) -> None:
    if path := os.environ.get("STRESS_BUG_TRACE"):
        with Path(path).open("a") as file:  # one short line for each process: appended whole
            file.write(f"{line}\n")


def _note_run() -> None:
    path = os.environ.get("STRESS_BUG_TRACE")
    if path and not (here := Path(f"{path}.here")).exists():
        here.touch()
        _write_trace("ran")


def _set(owner: Any, name: str, value: Any) -> None:
    """Replace an attribute that exists: a bug planted under a name that nobody uses would never be found."""
    if not hasattr(owner, name):
        raise AttributeError(f"{getattr(owner, '__name__', owner)} has no {name}")
    if isinstance(value, property):
        value = property(_traced(value.fget), value.fset and _traced(value.fset))
    else:
        value = _traced(value)
    setattr(owner, name, value)


def _traced(function: Callable[..., Any] | None) -> Callable[..., Any]:
    """Wrap a bug's function so that the trace tells whether it ran, and whether it broke by itself.

    An error whose innermost frame is the bug's own says that the bug no longer fits the code that it changes. That is
    not what the bug is about, so no check may be said to have seen it.
    """
    assert function is not None

    @functools.wraps(function)
    def traced(*args: Any, **settings: Any) -> Any:
        _note_run()
        try:
            return function(*args, **settings)
        except Exception as error:
            *_, innermost = traceback.walk_tb(error.__traceback__)
            if innermost[0].f_code.co_filename == function.__code__.co_filename:
                _write_trace(f"broke by itself: {type(error).__name__}: {error}".splitlines()[0])
            raise

    return traced


@bug
def aliased_state() -> None:
    """A state shares its dictionary with the stream, which goes on changing it."""

    def _state_with(
        self: IterablePackedDataset, lanes: Mapping[int, Mapping[str, Any]], *, epoch: int | None = None
    ) -> dict[str, Any]:
        if getattr(self, "_live", None) is None:
            self._live: dict[int, Any] = {}
        self._live.clear()
        self._live.update(lanes)
        return {
            "version": STATE_VERSION,
            "identity": self._identity.plain(),
            "epoch": self.epoch,
            "num_lanes": self.num_lanes,
            "lanes": self._live,
        }

    _set(IterablePackedDataset, "_state_with", _state_with)


@bug
def cursor_off_by_one() -> None:
    """Each row has the next row's cursor."""

    def cursor(self: Any) -> tuple[int, ...]:
        return (self.index + 1,)

    _set(map_style._Rows, "cursor", property(cursor))

    def following(self: Any) -> tuple[int, ...]:
        return (*self.kept[:-1], self.kept[-1] + 1)

    for reader in (parts.InOrder, shuffling.WindowReader):
        _set(reader, "cursor", property(following, lambda self, place: setattr(self, "kept", place)))


@bug
def state_of_rank_0_only() -> None:
    """A state lacks the lanes of ranks other than 0."""

    def merge_lanes(self: RankSync, lanes: Mapping[int, Any]) -> dict[int, Any]:
        mine = {lane: state for lane, state in lanes.items() if lane % self.world_size == self.rank}
        first: dict[int, Any] = self.gather(mine)[0]
        return first

    _set(RankSync, "merge_lanes", merge_lanes)


def _restoring(change: Callable[[LaneState], None]) -> None:
    """Plant a change of the state that a lane restores."""
    good = Lane._restore

    def restore(self: Lane, replay: Replay) -> None:
        replay.state = LaneState.from_dict(replay.state.as_dict())
        change(replay.state)
        good(self, replay)

    _set(Lane, "_restore", restore)


@bug
def lost_buffer() -> None:
    """A resume does not read the waiting pieces again; the ledger is changed to agree."""

    def change(state: LaneState) -> None:
        state.ledger.tokens_in -= state.ledger.buffered
        state.consumed, state.offset = (1 << state.next_piece - state.first) - 1, 0

    _restoring(change)


@bug
def stale_lanes_win() -> None:
    """Every rank puts all lanes into the state, other ranks' lanes as they were when it started."""
    good_load, good_merge = PackedDataLoader.load_state_dict, RankSync.merge_lanes

    def load_state_dict(self: PackedDataLoader, state: Mapping[str, Any]) -> None:
        good_load(self, state)
        self.rank_sync.stale = dict(state["lanes"])

    def merge_lanes(self: RankSync, lanes: Mapping[int, Any]) -> dict[int, Any]:
        if self.alone:
            return good_merge(self, lanes)
        everything = {**getattr(self, "stale", {}), **lanes}
        return {lane: state for theirs in self.gather(everything) for lane, state in theirs.items()}

    _set(PackedDataLoader, "load_state_dict", load_state_dict)
    _set(RankSync, "merge_lanes", merge_lanes)


@bug
def bitmap_shifted_by_one() -> None:
    """The bitmap of consumed pieces is shifted by one."""

    def change(state: LaneState) -> None:
        state.consumed >>= 1

    _restoring(change)


@bug
def offset_not_restored() -> None:
    """A split sample starts again from its beginning; the ledger is changed to agree."""

    def change(state: LaneState) -> None:
        state.ledger.packed -= state.offset
        state.offset = 0

    _restoring(change)


@bug
def drop_counted_twice() -> None:
    """A resume counts samples dropped before the state a second time."""
    good = PieceReader.pieces_of

    def pieces(self: PieceReader, row: Any, *, again: bool) -> Any:
        before = self.next_number
        found = good(self, row, again=False)
        if again:  # counting also numbers a dropped row; undo that, or the resume itself would fail
            self.next_number = before
        return found

    _set(PieceReader, "pieces_of", pieces)


@bug
def window_key_without_start() -> None:
    """All windows of a lane have the same permutation."""
    good = shuffling.permutation
    _set(shuffling, "permutation", lambda count, *key: good(count, *key[:3]))


@bug
def epoch_not_in_key() -> None:
    """Every epoch has the first one's order."""
    good = shuffling.permutation

    def permutation(count: int, seed: int, epoch: int, *key: int) -> Any:
        return good(count, seed, 0, *key)

    _set(shuffling, "permutation", permutation)
    _set(map_style, "permutation", permutation)


@bug
def merged_in_arrival_order() -> None:
    """Packs are merged in the order of the workers, not of the lanes."""
    _set(merge, "_order_of", lambda event: (0, 0))


@bug
def lane_end_recorded_too_early() -> None:
    """A state says that a lane has ended before its last packs are returned."""
    good = iteration.Iteration._make

    def make(self: Any, number: int) -> Any:
        rank_batch = good(self, number)
        for event in (*rank_batch.events, *(head for *_, head in self.rank_batches.heads)):
            if event.pack is None:
                self.progress.handed.lane_states[event.lane] = event.state
        return rank_batch

    _set(iteration.Iteration, "_make", make)


@bug
def state_ahead_of_packs() -> None:
    """A state counts packs that were made and not returned yet."""
    good = iteration.Iteration._make

    def make(self: Any, number: int) -> Any:
        rank_batch = good(self, number)
        self.progress.handed.lane_states.update({event.lane: event.state for event in rank_batch.events})
        return rank_batch

    _set(iteration.Iteration, "_make", make)
    _set(iteration.Iteration, "_book", lambda self, rank_batches: None)


@bug
def null_packs_train() -> None:
    """Null packs are trained on."""
    good = batch.null_pack

    def null_pack(max_seq_len: int, *, padding_idx: int = 0) -> Pack:
        pack = good(max_seq_len, padding_idx=padding_idx)
        pack.labels = pack.tokens.copy()
        return pack

    _set(batch, "null_pack", null_pack)
    _set(iteration, "null_pack", null_pack)


@bug
def one_epoch_too_many() -> None:
    """A run has one epoch more than it should."""

    def _last_epoch(self: IterablePackedDataset) -> int | None:
        return None if self.epochs is None else self.epoch + self.epochs

    _set(IterablePackedDataset, "_last_epoch", property(_last_epoch))


@bug
def ledger_not_restored() -> None:
    """A resume starts the ledger at 0, apart from what its invariant needs."""

    def change(state: LaneState) -> None:
        state.ledger = Ledger(tokens_in=state.ledger.buffered)

    _restoring(change)


@bug
def buffer_order_changed() -> None:
    """A resume reverses the order of the waiting pieces behind the oldest."""
    good = Planner.restore

    def restore(self: Planner[Any], waiting: Any, *, offset: int) -> None:
        first, *others = waiting or [None]
        good(self, [first, *reversed(others)] if waiting else [], offset=offset)

    _set(Planner, "restore", restore)


@bug
def num_lanes_recomputed() -> None:
    """A resume takes the number of lanes from its own ranks and workers, not from the state."""
    good = IterablePackedDataset.load_state_dict

    def load_state_dict(self: IterablePackedDataset, state: Mapping[str, Any]) -> None:
        ours = self.num_lanes
        good(self, state)
        self.settings.num_lanes = ours

    _set(IterablePackedDataset, "load_state_dict", load_state_dict)


@bug
def worker_restarted_from_the_start() -> None:
    """A restarted worker continues where it began, not where it stopped."""
    good_init, good_next = Worker.__init__, Worker.__next__

    def init(self: Worker, *args: Any, **settings: Any) -> None:
        good_init(self, *args, **settings)
        self.first_states = dict(self.lane_states)

    def next_event(self: Worker) -> Any:
        event = good_next(self)
        self.lane_states = dict(self.first_states)
        return event

    _set(workers.Worker, "__init__", init)
    _set(workers.Worker, "__next__", next_event)


@bug
def ranks_do_not_agree() -> None:
    """A rank without more data stops, whatever the others have."""

    def agree(self: RankSync, count: int, *, failed: bool = False, notes: Sequence[int] = ()) -> Agreement:
        return OwnAgreement(count, failed=failed, notes=notes)

    _set(RankSync, "agree", agree)


if _name := os.environ.get("STRESS_BUG"):
    plant(_name)
