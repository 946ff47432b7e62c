"""Mutants of lanes, states, epochs and resumes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np

from streampack import IterablePackedDataset, Ledger, PackedDataLoader
from streampack.accounting import trains_nothing
from streampack.packing.planner import Planner
from streampack.sources import map_style, parts
from streampack.sources.base import permutation
from streampack.streaming.lane import Lane
from streampack.streaming.lane_config import LaneConfig
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
    """Each row of a file in a shuffle window has the next one's cursor."""

    def make(good: Any) -> Any:
        def row_of(self: Any, found: Any, cursor: Any, window: Any) -> Any:
            return good(self, found, (*cursor[:-1], cursor[-1] + (cursor[-1] > 0)), window)

        return row_of

    patch(parts.InOrder, "row_of", make)


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
def ends_of_later_pieces_lost() -> None:
    """Each piece of a split sample but the first lacks its last token."""

    def make(good: Any) -> Any:
        def cut(self: Any, *args: Any) -> Any:
            return [
                (at, piece.cut(0, piece.tokens.size - 1) if at else piece) for at, piece in good(self, *args)
            ]

        return cut

    patch(LaneConfig, "cut", make)


@mutant
def ninth_row_twice() -> None:
    """Every ninth row of a map-style source comes twice."""
    calls = count()

    def make(good: Any) -> Any:
        def following(self: Any) -> Any:
            row = good(self)
            self.index -= next(calls) % 9 == 8
            return row

        return following

    patch(map_style._Rows, "__next__", make)


@mutant
def fourth_row_lost() -> None:
    """In place of the fourth row of a shuffled window, the first one comes again."""
    patch_function(
        permutation, lambda good: lambda n, *key: np.where((order := good(n, *key)) == 3, 0, order)
    )


def _changed_packs(change: Callable[[Any], None]) -> None:
    """Change the packs that lanes make."""

    def make(good: Any) -> Any:
        def next_pack(self: Any) -> Any:
            if (pack := good(self)) is not None:
                change(pack)
            return pack

        return next_pack

    patch(Lane, "next_pack", make)


@mutant
def first_labels_trained() -> None:
    """The first label of every second sequence of a pack is trained, from the sample before it."""

    def change(pack: Any) -> None:
        starts = np.cumsum([0, *pack.seq_lens])[:-1][1::2]
        pack.labels[starts] = pack.tokens[starts]

    _changed_packs(change)


@mutant
def padding_trained() -> None:
    """The padding at a pack's end is trained."""

    def change(pack: Any) -> None:
        pack.labels[sum(pack.seq_lens) :] = 0

    _changed_packs(change)


@mutant
def labels_shifted() -> None:
    """Labels lie one token late, as for a loss that does not shift them."""

    def change(pack: Any) -> None:
        pack.labels = np.roll(pack.labels, 1)

    _changed_packs(change)


@mutant
def fragments_of_the_neighbour() -> None:
    """Sequences say that they are of the row beside theirs."""

    def change(pack: Any) -> None:
        pack.fragments = tuple(f._replace(row_id=(*f.row_id[:-1], f.row_id[-1] ^ 1)) for f in pack.fragments)

    _changed_packs(change)


@mutant
def fragments_from_the_start() -> None:
    """A part of a split sample says that it is the sample's first."""

    def change(pack: Any) -> None:
        pack.fragments = tuple(f._replace(start=0, stop=f.stop - f.start) for f in pack.fragments)

    _changed_packs(change)


@mutant
def padding_of_sequences_not_charged() -> None:
    """The planner counts sequences without the padding that ``pad_seqs_to`` adds."""

    def make(good: Any) -> Any:
        def add(self: Any, piece: Any) -> None:
            good(self, piece)
            self.lengths[-1] = piece.length

        return add

    patch(Planner, "add", make)


@mutant
def untrained_taken_for_trained() -> None:
    """No sample counts as untrained."""
    patch_function(trains_nothing, lambda good: lambda sample: False)


@mutant
def newest_waiting_piece_lost() -> None:
    """A resume takes the newest waiting piece for one that is packed; the ledger is made to agree."""

    def make(good: Any) -> Any:
        def restore(self: Any, replay: Any) -> None:
            good(self, replay)
            if len(self.planner.waiting) > 1:
                self.planner.lengths.pop()
                self.ledger.tokens_in -= self.planner.waiting.pop().length

        return restore

    patch(Lane, "_restore", make)
