"""Windows of planned packs in one lane: planned ahead, handed out by cost, and planned again at a resume."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from streampack.accounting import Ledger, SourceStats
from streampack.packing.attention_cost import AttentionCost
from streampack.packing.groups import Group, path_starts
from streampack.packing.planner import Placed, Planner
from streampack.packing.settings import Packing
from streampack.streaming.balance import hand_out_order
from streampack.streaming.lane_config import LaneConfig
from streampack.streaming.lane_state import LaneState, OpenWindow
from streampack.streaming.piece_reader import Piece, PieceReader


@dataclass(slots=True)
class PlannedPack:
    """A pack that waits to be handed out."""

    placed: list[Placed[Piece]]
    tokens: int  # padding left out
    cost: int
    bits: int  # of its pieces, in `LaneState.consumed`

    @classmethod
    def of(
        cls, placed: list[Placed[Piece]], first: int, cost: AttentionCost, packing: Packing
    ) -> PlannedPack:
        """Make one of a planned pack, for a state whose first piece has the number ``first``."""
        bits, tokens, seq_lens, in_groups = 0, 0, [], 0
        for piece, start, stop in placed:
            bits |= 1 << piece.number - first
            tokens += stop - start
            seq_lens.append(packing.padded(stop - start))
            if type(group := piece.sample) is Group:
                in_groups += cost.of_pack(group.lengths, path_starts(group.lengths, group.parents))
                in_groups -= cost.of([group.tokens.size])
        return cls(placed, tokens, cost.of(seq_lens) + in_groups, bits)


class PackWindow:
    """The planned packs of a lane that it has not handed out yet.

    Args:
        planned: the state of the lane when all packs are planned and none is handed out.
        packs: in the order in which they are handed out.
    """

    def __init__(self, planned: LaneState, packs: Sequence[PlannedPack]) -> None:
        self.planned = planned
        self.packs = deque(packs)
        self.consumed = planned.consumed
        self.tokens = sum(pack.tokens for pack in packs)

    def take(self) -> list[Placed[Piece]]:
        """Return the pieces of the next pack."""
        pack = self.packs.popleft()
        self.consumed |= pack.bits
        self.tokens -= pack.tokens
        return pack.placed

    def state(self, *, packs: int, ledger: Ledger, source_stats: Sequence[SourceStats]) -> LaneState:
        """Return the state of the lane, which has counted these packs and tokens."""
        return replace(
            self.planned,
            packs=packs,
            consumed=self.consumed,
            ledger=ledger.copy(),
            source_stats=tuple(stats.copy() for stats in source_stats),
        )


class PackWindows:
    """Plan the packs of a lane in windows of ``balance_window``, and hand them out in the order of `hand_out_order`.

    Args:
        config: of the lane.
        planner: plans the packs.
        reader: the planner's pieces come from it.
    """

    def __init__(self, config: LaneConfig, planner: Planner[Piece], reader: PieceReader) -> None:
        self.config = config
        self.planner = planner
        self.reader = reader
        self.open: PackWindow | None = None  # packs that were planned and not handed out
        # Of a window whose planning an error interrupted: the state at its beginning, and the packs so far, in the
        # order in which they were planned.
        self.begun: LaneState | None = None
        self.planned: list[list[Placed[Piece]]] = []

    @property
    def tokens(self) -> int:
        """Tokens of the packs that wait to be handed out."""
        return self.open.tokens if self.open else 0

    def next_pack(self, state: Callable[[], LaneState]) -> list[Placed[Piece]]:
        """Return the next pack of the open window, and plan a window if none is open; empty at the epoch's end.

        Args:
            state: returns the lane's state, with which a window begins.
        """
        if self.open is None:
            self.begun = self.begun or state()
            packs = self._plan(self.begun)
            self.open = PackWindow(self._state_planned(self.begun, packs), packs)
            self.begun = None
        placed = self.open.take() if self.open.packs else []
        if not self.open.packs:
            self.open = None
        return placed

    def plan_again(self, state: LaneState, window: OpenWindow, later: deque[Piece]) -> None:
        """Plan a state's open window again, of the pieces that waited at its beginning and those read ``later``.

        Raises:
            ValueError: if the packs that were handed out are not those of the state.
        """
        begun = replace(
            state,
            packs=window.packs,
            next_piece=window.next_piece,
            consumed=window.consumed,
            open_window=None,
        )
        pull = self.planner.pull
        self.planner.pull = lambda: later.popleft() if later else pull()
        packs = self._plan(begun)
        self.planner.pull = pull
        consumed = consumed_pieces(self.planner, self.reader, first=state.first, planned=packs)
        self.open = PackWindow(replace(state, consumed=consumed), packs)
        handed_out = state.packs - window.packs
        for _ in range(min(handed_out, len(packs))):
            self.open.take()
        if later or not self.open.packs or self.open.consumed != state.consumed:
            raise ValueError(
                f"lane {self.reader.lane}: the {handed_out} packs that were handed out of {len(packs)} are not those "
                "of the state; the data or the encoder changed since it was written"
            )

    def _plan(self, begun: LaneState) -> list[PlannedPack]:
        """Plan the packs of a window that begins at a state, in the order in which they are handed out."""
        config, size = self.config, self.config.balance_window
        # An error leaves the packs that are planned already in `planned`, and the next call plans the others.
        while len(self.planned) < size - begun.packs % size and (placed := self.planner.next_pack()):
            self.planned.append(placed)
        packs = [
            PlannedPack.of(placed, begun.first, config.balance_cost, config.packing)
            for placed in self.planned
        ]
        self.planned = []
        epoch = 0 if config.endless else self.reader.epoch
        order = hand_out_order(
            [pack.cost for pack in packs],
            slot=begun.packs % size,
            window=size,
            key=(config.seed, epoch, begun.packs // size),
        )
        return [packs[i] for i in order]

    def _state_planned(self, begun: LaneState, packs: list[PlannedPack]) -> LaneState:
        """Return the state when the packs of a window that begins at a state are planned and none is handed out."""
        reader = self.reader
        return replace(
            begun,
            next_piece=reader.next_number,
            consumed=consumed_pieces(self.planner, reader, first=begun.first, planned=packs),
            rows=reader.log.digits,
            epochs=reader.log.numbered_epochs(begun.epoch),
            windows=reader.log.numbered_windows(),
            front=reader.reader.front,
            reached=reader.reached,
            bad_shards=tuple(reader.bad_shards),
            bad_in_pass=reader.bad_of_state,
            whole=reader.newest_is_whole,
            open_window=OpenWindow(begun.packs, begun.next_piece, begun.consumed),
        )


def consumed_pieces(
    planner: Planner[Piece], reader: PieceReader, *, first: int, planned: Iterable[PlannedPack] = ()
) -> int:
    """Return the pieces that neither wait nor are planned: bit i stands for piece ``first + i``."""
    waiting = 0
    for piece in planner.waiting:
        waiting |= 1 << piece.number - first
    for pack in planned:
        waiting |= pack.bits
    return (1 << reader.next_number - first) - 1 ^ waiting
