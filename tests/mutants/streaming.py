"""Mutants of lanes, states, epochs and resumes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from itertools import count
from typing import Any

import numpy as np

from streampack import IterablePackedDataset, Ledger, PackedDataLoader
from streampack.accounting import trains_nothing
from streampack.lanes.lane import Lane
from streampack.lanes.lane_config import LaneConfig
from streampack.lanes.lane_state import LaneState
from streampack.lanes.round_robin import round_robin
from streampack.packing.planner import Planner
from streampack.sources import memory
from streampack.sources.mechanics.parts_reader import PartsReader
from streampack.sources.reading import permutation
from streampack.streaming.position import Position
from streampack.streaming.run_identity import RunIdentity
from streampack.streaming.run_state import Phase, RunState, checked_state, state_of
from tests.mutants.registry import replaces


@replaces(PackedDataLoader, "state_dict")
def aliased_state(good, self):
    """A state shares its dictionary with the loader, which goes on changing it."""
    live = self.__dict__.setdefault("_live", {})
    live.clear()
    live.update(good(self))
    return live


@replaces(memory._Rows, "cursor")
def cursor_off_by_one(good, self):
    """Each row of a map-style source has the next row's cursor."""
    return (self.index + 1,)


@replaces(PartsReader, "__next__")
def cursor_behind_the_row(good, self):
    """Within a shuffle window, the cursor is behind the next row, not before it."""
    row = good(self)
    part, offset, at, *counts = self.cursor
    self.cursor = (part, offset, at + (at > 0), *counts)
    return row


@replaces(permutation)
def seed_ignored(good, count, *key):
    """The order of rows does not depend on the seed."""
    return good(count, 0, *key[1:])


@replaces(permutation)
def epoch_not_in_key(good, count, *key):
    """Every epoch has the first one's order."""
    return good(count, key[0], 0, *key[2:])


@replaces(permutation)
def window_key_without_start(good, count, *key):
    """All windows of a lane have the same permutation."""
    return good(count, *key[:3])


@replaces(round_robin)
def one_epoch_too_many(good, lanes, *, last_epoch, alone):
    """A run has one epoch more than it should."""
    return good(lanes, last_epoch=None if last_epoch is None else last_epoch + 1, alone=alone)


@replaces(IterablePackedDataset, "load_state_dict")
def num_lanes_recomputed(good, self, state):
    """A resume takes the number of lanes from its own ranks and workers, not from the state."""
    ours = self.num_lanes
    good(self, state)
    self.num_lanes = ours


@replaces(RunIdentity, "require")
def seed_not_compared(good, self, theirs, **others):
    """A state of another seed is taken, and its rows are read in another order from there."""
    good(self, {**theirs, "seed": self.parts["seed"]}, **others)


@replaces(checked_state)
def lanes_of_a_state_not_compared(good, state):
    """A state is taken whichever lanes it lacks, and they begin again."""
    if isinstance(state, dict) and state.get("lanes"):
        head = {name: value for name, value in state.items() if name not in ("lanes", "checksum")}
        state = state_of(head, state["lanes"])
    return good(state)


def loading(change: Callable[[LaneState], None]) -> Any:
    """Let runs resume from states that this function has changed."""

    @wraps(change)
    def from_dict(good: Any, cls: Any, found: Any) -> LaneState:
        state: LaneState = good(cls, found)
        change(state)
        return state

    return replaces(LaneState, "from_dict")(from_dict)


@loading
def lost_buffer(state):
    """A resume does not read the waiting pieces again; the ledger is changed to agree."""
    state.ledger.tokens_in -= state.reader.buffered
    state.reader = replace(state.reader, waiting=(), offset=0)


@loading
def window_handed_out_again(state):
    """A resume hands out the packs of an open window from its beginning."""
    if state.window is not None:
        state.packs -= state.window.emitted
        state.window = state.window._replace(emitted=0)


@loading
def offset_not_restored(state):
    """A split sample starts again from its beginning; the ledger is changed to agree."""
    state.ledger.packed -= state.reader.offset
    state.reader = replace(state.reader, offset=0)


@loading
def ledger_not_restored(state):
    """A resume starts the ledger at 0, apart from what its invariant needs."""
    state.ledger = Ledger(tokens_in=state.ledger.buffered)


@loading
def drop_counted_twice(state):
    """A resume counts what was dropped before the state a second time."""
    dropped = state.ledger.dropped
    state.ledger.tokens_in += sum(dropped.values())
    for reason, tokens in dropped.items():
        state.ledger.drop(reason, tokens, samples=state.ledger.dropped_samples[reason])


@loading
def buffer_order_changed(state):
    """A resume reverses the order of the waiting pieces behind the oldest."""
    waiting = state.reader.waiting
    state.reader = replace(state.reader, waiting=(*waiting[:1], *reversed(waiting[1:])))


@replaces(Ledger, "as_dict")
def padding_is_counted_as_packed(good, self):
    """The ledger counts the first padding token of a pack as packed, and one more as read."""
    return {
        **good(self),
        "packed": self.packed + self.packs,
        "tokens_in": self.tokens_in + self.packs,
    }


@replaces(Ledger, "drop")
def truncated_tokens_not_counted(good, self, reason, tokens, *, samples=1):
    """Tokens that `overlong="truncate"` cuts off are counted under ``overlong``."""
    good(self, "overlong" if reason == "truncated" else reason, tokens, samples=samples)


@replaces(IterablePackedDataset, "trace")
def trace_of_the_neighbour(good, self, fragment):
    """`trace` leads to the row's last token in place of its tokens."""
    return good(self, fragment._replace(start=max(0, fragment.stop - 1)))


@replaces(IterablePackedDataset, "state_dict")
def dataset_state_is_one_pack_old(good, self):
    """The state of a dataset that is iterated without a loader lacks the newest pack."""
    found = good(self)
    before, self.__dict__["_one_before"] = self.__dict__.get("_one_before", found), found
    return before


@replaces(LaneConfig, "cut")
def ends_of_later_pieces_lost(good, self, *args):
    """Each piece of a split sample but the first lacks its last token."""
    return [(at, piece.cut(0, piece.tokens.size - 1) if at else piece) for at, piece in good(self, *args)]


@replaces(memory._Rows, "__next__")
def ninth_row_twice(good, self, calls=count()):  # noqa: B008  # of the process, whichever source it reads
    """Every ninth row of a map-style source comes twice."""
    row = good(self)
    self.index -= next(calls) % 9 == 8
    return row


@replaces(permutation)
def fourth_row_lost(good, n, *key):
    """In place of the fourth row of a shuffled window, the first one comes again."""
    return np.where((order := good(n, *key)) == 3, 0, order)


def changing_packs(change: Callable[[Any], None]) -> Any:
    """Change the packs that lanes make."""

    @wraps(change)
    def next_event(good: Any, self: Any) -> Any:
        if (pack := (event := good(self)).pack) is not None:
            change(pack)
        return event

    return replaces(Lane, "next_event")(next_event)


@changing_packs
def first_labels_trained(pack):
    """The first label of every second sequence of a pack is trained, from the sample before it."""
    starts = np.cumsum([0, *pack.seq_lens])[:-1][1::2]
    pack.labels[starts] = pack.tokens[starts]


@changing_packs
def padding_trained(pack):
    """The padding at a pack's end is trained."""
    pack.labels[sum(pack.seq_lens) :] = 0


@changing_packs
def labels_shifted(pack):
    """Labels lie one token late, as for a loss that does not shift them."""
    pack.labels = np.roll(pack.labels, 1)


@changing_packs
def fragments_of_the_neighbour(pack):
    """Sequences say that they are of the row beside theirs."""
    pack.fragments = tuple(f._replace(row_id=(*f.row_id[:-1], f.row_id[-1] ^ 1)) for f in pack.fragments)


@changing_packs
def fragments_from_the_start(pack):
    """A part of a split sample says that it is the sample's first."""
    pack.fragments = tuple(f._replace(start=0, stop=f.stop - f.start) for f in pack.fragments)


@replaces(Planner, "_pull")
def padding_of_sequences_not_charged(good, self):
    """The planner counts sequences without the padding that ``pad_seqs_to`` adds."""
    pulled = good(self)
    if pulled:
        self.lengths[-1] = self.waiting[-1].length
    return pulled


@replaces(trains_nothing)
def untrained_taken_for_trained(good, sample):
    """No sample counts as untrained."""
    return False


@loading
def newest_waiting_piece_lost(state):
    """A resume takes the newest waiting piece for one that is packed; the ledger is made to agree."""
    if len(waiting := state.reader.waiting) > 1:
        state.ledger.tokens_in -= waiting[-1].tokens
        state.reader = replace(state.reader, waiting=waiting[:-1])


@replaces(Position, "following")
def each_iteration_begins_its_epoch(good, self):
    """Iterating again begins the epoch anew, in place of going on behind what was handed out."""
    found = good(self)
    return RunState(epoch=found.epoch) if found.phase is Phase.READ else found
