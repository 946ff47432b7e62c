"""Mutants of lanes, states, epochs and resumes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from streampack import IterablePackedDataset, Ledger, PackedDataLoader
from streampack.packing.planner import Planner
from streampack.sources import map_style, parts, shuffling
from streampack.sources.base import permutation
from streampack.streaming.lane import Lane
from streampack.streaming.lane_state import LaneState
from streampack.streaming.piece_reader import PieceReader
from tests.mutants.registry import mutant, patch, patch_function


@mutant
def aliased_state() -> None:
    """A state shares its dictionary with the loader, which goes on changing it."""

    def make(good: Any) -> Any:
        def state_dict(self: Any) -> Any:
            live = self.__dict__.setdefault("_live", {})
            live.clear()
            live.update(good(self))
            return live

        return state_dict

    patch(PackedDataLoader, "state_dict", make)


@mutant
def cursor_off_by_one() -> None:
    """Each row of a map-style source has the next row's cursor."""
    patch(map_style._Rows, "cursor", lambda good: lambda self: (self.index + 1,))


@mutant
def cursor_behind_the_row() -> None:
    """Each record of a file has the next one's cursor."""
    for reader in (parts.InOrder, shuffling.WindowReader):
        patch(reader, "cursor", lambda good: lambda self: (*good(self)[:-1], good(self)[-1] + 1))


@mutant
def seed_ignored() -> None:
    """The order of rows does not depend on the seed."""
    patch_function(permutation, lambda good: lambda count, *key: good(count, 0, *key[1:]))


@mutant
def epoch_not_in_key() -> None:
    """Every epoch has the first one's order."""
    patch_function(permutation, lambda good: lambda count, *key: good(count, key[0], 0, *key[2:]))


@mutant
def window_key_without_start() -> None:
    """All windows of a lane have the same permutation."""
    patch_function(permutation, lambda good: lambda count, *key: good(count, *key[:3]))


@mutant
def one_epoch_too_many() -> None:
    """A run has one epoch more than it should."""
    patch(
        IterablePackedDataset,
        "_last_epoch",
        lambda good: lambda self: None if self.epochs is None else self.epoch + self.epochs,
    )


@mutant
def num_lanes_recomputed() -> None:
    """A resume takes the number of lanes from its own ranks and workers, not from the state."""

    def make(good: Any) -> Any:
        def load_state_dict(self: Any, state: Any) -> None:
            ours = self.num_lanes
            good(self, state)
            self.settings.num_lanes = ours

        return load_state_dict

    patch(IterablePackedDataset, "load_state_dict", make)


@mutant
def seed_not_compared() -> None:
    """A state of another seed is taken, and its rows are read in another order from there."""

    def make(good: Any) -> Any:
        def load_state_dict(self: Any, state: Any) -> None:
            good(self, with_identity(state, self.state_dict(), "seed"))

        return load_state_dict

    patch(IterablePackedDataset, "load_state_dict", make)


def with_identity(state: Any, ours: Any, name: str) -> Any:
    """Give a state the entry of its identity that this run has."""
    if (
        not isinstance(state, dict)
        or not isinstance(state.get("identity"), dict)
        or name not in ours["identity"]
    ):
        return state
    return {**state, "identity": {**state["identity"], name: ours["identity"][name]}}


def _restoring(change: Callable[[LaneState], None]) -> None:
    """Plant a change of the state that a lane restores."""

    def make(good: Any) -> Any:
        def restore(self: Any, replay: Any) -> None:
            replay.state = LaneState.from_dict(replay.state.as_dict())
            change(replay.state)
            good(self, replay)

        return restore

    patch(Lane, "_restore", make)


@mutant
def lost_buffer() -> None:
    """A resume does not read the waiting pieces again; the ledger is changed to agree."""

    def change(state: LaneState) -> None:
        state.ledger.tokens_in -= state.ledger.buffered
        state.consumed, state.offset = (1 << state.next_piece - state.first) - 1, 0

    _restoring(change)


@mutant
def bitmap_shifted_by_one() -> None:
    """The bitmap of consumed pieces is shifted by one."""

    def change(state: LaneState) -> None:
        state.consumed >>= 1

    _restoring(change)


@mutant
def offset_not_restored() -> None:
    """A split sample starts again from its beginning; the ledger is changed to agree."""

    def change(state: LaneState) -> None:
        state.ledger.packed -= state.offset
        state.offset = 0

    _restoring(change)


@mutant
def ledger_not_restored() -> None:
    """A resume starts the ledger at 0, apart from what its invariant needs."""

    def change(state: LaneState) -> None:
        state.ledger = Ledger(tokens_in=state.ledger.buffered)

    _restoring(change)


@mutant
def drop_counted_twice() -> None:
    """A resume counts samples dropped before the state a second time."""

    def make(good: Any) -> Any:
        def pieces_of(self: Any, row: Any, *, again: bool) -> Any:
            before = self.next_number
            found = good(self, row, again=False)
            if again:  # counting also numbers a dropped row; undo that, or the resume itself would fail
                self.next_number = before
            return found

        return pieces_of

    patch(PieceReader, "pieces_of", make)


@mutant
def buffer_order_changed() -> None:
    """A resume reverses the order of the waiting pieces behind the oldest."""

    def make(good: Any) -> Any:
        def restore(self: Any, waiting: Any, *, offset: int) -> None:
            first, *others = waiting or [None]
            good(self, [first, *reversed(others)] if waiting else [], offset=offset)

        return restore

    patch(Planner, "restore", make)


@mutant
def padding_is_counted_as_packed() -> None:
    """The ledger counts the first padding token of a pack as packed, and one more as read."""

    def make(good: Any) -> Any:
        def as_dict(self: Any) -> Any:
            return {
                **good(self),
                "packed": self.packed + self.packs,
                "tokens_in": self.tokens_in + self.packs,
            }

        return as_dict

    patch(Ledger, "as_dict", make)


@mutant
def truncated_tokens_not_counted() -> None:
    """Tokens that `overlong="truncate"` cuts off are counted under ``overlong``."""

    def make(good: Any) -> Any:
        def drop(self: Any, reason: str, tokens: int, *, samples: int = 1) -> None:
            good(self, "overlong" if reason == "truncated" else reason, tokens, samples=samples)

        return drop

    patch(Ledger, "drop", make)


@mutant
def trace_of_the_neighbour() -> None:
    """`trace` leads to the row's last token in place of its tokens."""

    def make(good: Any) -> Any:
        def trace(self: Any, fragment: Any) -> Any:
            return good(self, fragment._replace(start=max(0, fragment.stop - 1)))

        return trace

    patch(IterablePackedDataset, "trace", make)


@mutant
def dataset_state_is_one_pack_old() -> None:
    """The state of a dataset that is iterated without a loader lacks the newest pack."""

    def make(good: Any) -> Any:
        def state_dict(self: Any) -> Any:
            found = good(self)
            before, self.__dict__["_one_before"] = self.__dict__.get("_one_before", found), found
            return before

        return state_dict

    patch(IterablePackedDataset, "state_dict", make)


@mutant
def first_label_trained() -> None:
    """The first label of every second sequence of a pack is trained, from the sample before it."""

    def make(good: Any) -> Any:
        def next_pack(self: Any) -> Any:
            pack = good(self)
            if pack is not None:
                starts = np.cumsum([0, *pack.seq_lens])[:-1][1::2]
                pack.labels[starts] = pack.tokens[starts]
            return pack

        return next_pack

    patch(Lane, "next_pack", make)
