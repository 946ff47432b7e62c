"""Mutants of the loader: batches, workers, ranks, states."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from streampack import PackedDataLoader
from streampack.distributed.rank_sync import Agreement, RankSync, combine_counts
from streampack.loader import iteration, merge
from streampack.loader.workers import Worker
from streampack.packing import batch
from tests.mutants.registry import mutant, patch, patch_function


@mutant
def state_of_rank_0_only() -> None:
    """A state lacks the lanes of ranks other than 0."""

    def make(good: Any) -> Any:
        def merge_lanes(self: Any, lanes: Any) -> Any:
            mine = {lane: state for lane, state in lanes.items() if lane % self.world_size == self.rank}
            return self.gather(mine)[0]

        return merge_lanes

    patch(RankSync, "merge_lanes", make)


@mutant
def stale_lanes_win() -> None:
    """Every rank puts all lanes into the state, other ranks' lanes as they were when it started."""

    def make_load(good: Any) -> Any:
        def load_state_dict(self: Any, state: Any) -> None:
            good(self, state)
            self.rank_sync.stale = dict(state["lanes"])

        return load_state_dict

    def make_merge(good: Any) -> Any:
        def merge_lanes(self: Any, lanes: Any) -> Any:
            if self.alone:
                return good(self, lanes)
            everything = {**getattr(self, "stale", {}), **lanes}
            return {lane: state for theirs in self.gather(everything) for lane, state in theirs.items()}

        return merge_lanes

    patch(PackedDataLoader, "load_state_dict", make_load)
    patch(RankSync, "merge_lanes", make_merge)


@mutant
def merged_in_arrival_order() -> None:
    """Packs are merged in the order of the workers, not of the lanes."""
    patch_function(merge._order_of, lambda good: lambda event: (0, 0))


@mutant
def lane_end_recorded_too_early() -> None:
    """A state says that a lane has ended before its last packs are returned."""

    def make(good: Any) -> Any:
        def _make(self: Any, number: int) -> Any:
            rank_batch = good(self, number)
            for event in (*rank_batch.events, *(head for *_, head in self.rank_batches.heads)):
                if event.pack is None:
                    self.progress.handed.lane_states[event.lane] = event.state
            return rank_batch

        return _make

    patch(iteration.Iteration, "_make", make)


@mutant
def state_ahead_of_packs() -> None:
    """A state counts packs that were made and not returned yet."""

    def make(good: Any) -> Any:
        def _make(self: Any, number: int) -> Any:
            rank_batch = good(self, number)
            self.progress.handed.lane_states.update({event.lane: event.state for event in rank_batch.events})
            return rank_batch

        return _make

    patch(iteration.Iteration, "_make", make)
    patch(iteration.Iteration, "_book", lambda good: lambda self, rank_batches: None)


@mutant
def null_packs_train() -> None:
    """Null packs are trained on."""

    def make(good: Any) -> Any:
        def null_pack(max_seq_len: int, *, padding_idx: int = 0) -> Any:
            pack = good(max_seq_len, padding_idx=padding_idx)
            pack.labels = pack.tokens.copy()
            return pack

        return null_pack

    patch_function(batch.null_pack, make)


@mutant
def worker_restarted_from_the_start() -> None:
    """A restarted worker continues where it began, not where it stopped."""

    def make_init(good: Any) -> Any:
        def init(self: Any, *args: Any, **settings: Any) -> None:
            good(self, *args, **settings)
            self.first_states = dict(self.lane_states)

        return init

    def make_next(good: Any) -> Any:
        def next_event(self: Any) -> Any:
            event = good(self)
            self.lane_states = dict(self.first_states)
            return event

        return next_event

    patch(Worker, "__init__", make_init)
    patch(Worker, "__next__", make_next)


class _OwnAgreement(Agreement):
    """What a rank knows without the others."""

    def __init__(self, count: int, *, failed: bool = False, notes: Sequence[int] = ()) -> None:
        self.number = ~count if failed else count
        self.noted = list(notes)

    def wait(self) -> tuple[int, bool]:
        return combine_counts([self.number])

    def notes(self) -> list[list[int]]:
        return [self.noted]


@mutant
def ranks_do_not_agree() -> None:
    """A rank without more data stops, whatever the others have."""

    def make(good: Any) -> Any:
        def agree(self: Any, count: int, *, failed: bool = False, notes: Sequence[int] = ()) -> Agreement:
            return _OwnAgreement(count, failed=failed, notes=notes)

        return agree

    patch(RankSync, "agree", make)


@mutant
def last_batch_dropped() -> None:
    """The last, part-empty batch of a run is left out."""

    def make(good: Any) -> Any:
        def iterate(self: Any) -> Any:
            batches = good(self)
            held = next(batches, None)
            for following in batches:
                yield held
                held = following
            if held is not None and held.num_seqs >= len(held.fragments):
                yield held

        return iterate

    patch(PackedDataLoader, "__iter__", make)


@mutant
def rows_of_a_batch_swapped() -> None:
    """Labels of the first two packs of a batch are exchanged."""

    def make(good: Any) -> Any:
        def stack_packs(packs: Any, **settings: Any) -> Any:
            found = good(packs, **settings)
            if len(packs) > 1:
                found.labels[[0, 1]] = found.labels[[1, 0]]
            return found

        return stack_packs

    patch_function(batch.stack_packs, make)


@mutant
def positions_run_on() -> None:
    """Positions count on from one sequence of a pack to the next."""

    def make(good: Any) -> Any:
        def _positions(packs: Any) -> Any:
            found = good(packs)
            found[:] = range(found.shape[1])
            return found

        return _positions

    patch_function(batch._positions, make)


@mutant
def ledger_of_this_rank_only() -> None:
    """Metrics and ledger of a loader that goes on count this run's part only."""

    def make(good: Any) -> Any:
        def load_state_dict(self: Any, state: Any) -> None:
            state = copy.deepcopy(state)
            good(self, state)
            self.__dict__["_before"] = self.ledger()

        return load_state_dict

    def make_ledger(good: Any) -> Any:
        def ledger(self: Any) -> Any:
            found, before = good(self), self.__dict__.get("_before")
            if before is not None:
                found = found.copy()
                found.packs -= before.packs
            return found

        return ledger

    patch(PackedDataLoader, "load_state_dict", make)
    patch(PackedDataLoader, "ledger", make_ledger)


@mutant
def batches_on_the_wrong_step() -> None:
    """A loader says that a step has one batch more than it makes."""
    patch(PackedDataLoader, "batches_per_step", lambda good: lambda self: good(self) + 1)
