"""Mutants of the loader: batches, workers, ranks, states."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

from streampack import IterablePackedDataset, PackedDataLoader
from streampack.distributed.rank_sync import RankSync
from streampack.loader import batching, one_run, workers
from streampack.packing import assemble, batch
from streampack.sources.mechanics.files import file_sources
from tests.mutants.registry import mutant, replace, replaces


@replaces(RankSync, "merge_lanes")
def state_of_rank_0_only(good, self, lanes):
    """A state lacks the lanes of ranks other than 0."""
    mine = {lane: state for lane, state in lanes.items() if lane % self.world_size == self.rank}
    return self.gather(mine)[0]


@mutant
def stale_lanes_win() -> None:
    """Every rank puts all lanes into the state, other ranks' lanes as they were when it started."""

    def load_state_dict(good: Any, self: Any, state: Any) -> None:
        good(self, state)
        self.rank_sync.stale = dict(state["lanes"])

    def merge_lanes(good: Any, self: Any, lanes: Any) -> Any:
        if self.alone:
            return good(self, lanes)
        everything = {**getattr(self, "stale", {}), **lanes}
        return {lane: state for theirs in self.gather(everything) for lane, state in theirs.items()}

    replace(PackedDataLoader, "load_state_dict", load_state_dict)
    replace(RankSync, "merge_lanes", merge_lanes)


@replaces(batching._order_of)
def merged_in_arrival_order(good, event):
    """Packs are merged in the order of the workers, not of the lanes."""
    return (0, 0)


def _state_of_later_events(self: Any, share: Any, *, ends: bool) -> None:
    """Put the states of a share's events, or of the ends of lanes only, into what was made before and not returned."""
    made = self.__dict__.setdefault("made", [])
    for event in share.events:
        if event.pack is None or not ends:
            for earlier in made:
                if earlier.lane == event.lane:
                    earlier.state = event.state
        made.append(event)


@replaces(batching.RankPacks, "next_shard")
def lane_end_recorded_too_early(good, self, room, epoch):
    """A state says that a lane has ended before its last packs are returned."""
    share = good(self, room, epoch)
    _state_of_later_events(self, share, ends=True)
    return share


@replaces(batching.RankPacks, "next_shard")
def state_ahead_of_packs(good, self, room, epoch):
    """A state counts packs that were made and not returned yet."""
    share = good(self, room, epoch)
    _state_of_later_events(self, share, ends=False)
    return share


@replaces(assemble.null_pack)
def null_packs_train(good, max_seq_len, *, padding_idx=0):
    """Null packs are trained on."""
    pack = good(max_seq_len, padding_idx=padding_idx)
    pack.labels = pack.tokens.copy()
    return pack


@replaces(workers._events)
def worker_restarted_from_the_start(good, open_stream, lane_states, name):
    """A restarted worker continues where it began, not where it stopped."""

    class Kept(dict):
        def __setitem__(self, lane, state):
            pass

    return good(open_stream, Kept(lane_states), name)


@replaces(RankSync, "exchange")
def ranks_do_not_agree(good, self, numbers):
    """A rank without more data stops, whatever the others have."""
    return lambda: [list(numbers)]


@replaces(PackedDataLoader, "__iter__")
def last_batch_dropped(good, self):
    """The last, part-empty batch of a run is left out."""
    batches = good(self)
    held = next(batches, None)
    for following in batches:
        yield held
        held = following
    if held is not None and held.num_seqs >= len(held.fragments):
        yield held


@replaces(batch.stack_packs)
def rows_of_a_batch_swapped(good, packs, **settings):
    """Labels of the first two packs of a batch are exchanged."""
    found = good(packs, **settings)
    if len(packs) > 1:
        found.labels[[0, 1]] = found.labels[[1, 0]]
    return found


@replaces(batch._positions)
def positions_run_on(good, packs):
    """Positions count on from one sequence of a pack to the next."""
    found = good(packs)
    found[:] = range(found.shape[1])
    return found


@mutant
def ledger_of_this_rank_only() -> None:
    """Metrics and ledger of a loader that goes on count this run's part only."""

    def load_state_dict(good: Any, self: Any, state: Any) -> None:
        good(self, copy.deepcopy(state))
        self.__dict__["_before"] = self.ledger()

    def ledger(good: Any, self: Any) -> Any:
        found, before = good(self), self.__dict__.get("_before")
        if before is not None:
            found = found.copy()
            found.packs -= before.packs
        return found

    replace(PackedDataLoader, "load_state_dict", load_state_dict)
    replace(PackedDataLoader, "ledger", ledger)


@replaces(PackedDataLoader, "batches_per_step")
def batches_on_the_wrong_step(good, self):
    """A loader says that a step has one batch more than it makes."""
    return good(self) + 1


@replaces(one_run.divide_across_ranks)
def a_rank_that_has_divided_stays_away(good, source, num_lanes, rank_sync):
    """A rank that has divided the corpus before takes no part in dividing it."""
    if not all(leaf.is_divided(num_lanes) for leaf in file_sources(source).values()):
        good(source, num_lanes, rank_sync)


@mutant
def restarted_with_newer_settings() -> None:
    """A worker that is restarted reads with settings that were loaded after its iteration began."""
    replace(IterablePackedDataset, "_frozen", lambda good, self, **_: self)


@replaces(workers._receive)
def a_death_is_seen_by_its_pipe_only(good, pipe, process, *size_and_limit):
    """A worker that died is waited for as long as another process holds its pipe."""
    return good(pipe, SimpleNamespace(is_alive=lambda: True), *size_and_limit)
