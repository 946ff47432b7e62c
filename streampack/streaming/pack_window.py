"""Windows of planned packs in one lane: planned ahead, and handed out by cost."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from streampack.packing.groups import Group, attention_cost
from streampack.packing.planner import Placed, Planner
from streampack.packing.settings import Packing
from streampack.streaming.balance import hand_out_order
from streampack.streaming.lane_config import LaneConfig
from streampack.streaming.lane_state import Stand
from streampack.streaming.piece_reader import Piece


class PackWindow:
    """The planned packs of a lane that it has not handed out yet.

    Args:
        packs: in the order in which they are handed out.
        begin: where the lane stood before they were planned: a resume plans them again from there.
        end: where it stands behind them.
        read_before: the ledger's ``tokens_in`` at the beginning, which a resume compares.
        weights: of a mixture's sources, by which its rows were drawn.
    """

    def __init__(
        self,
        packs: Sequence[list[Placed[Piece]]],
        *,
        begin: Stand,
        end: Stand,
        read_before: int,
        weights: tuple[int, ...],
    ) -> None:
        self.packs = deque(packs)
        self.handed_out = 0
        self.begin = begin
        self.end = end
        self.read_before = read_before
        self.weights = weights
        self.tokens = sum(map(_tokens, packs))

    def take(self) -> list[Placed[Piece]]:
        """Return the pieces of the next pack; none if there is no pack."""
        if not self.packs:
            return []
        placed = self.packs.popleft()
        self.handed_out += 1
        self.tokens -= _tokens(placed)
        return placed


def plan_window(
    config: LaneConfig, planner: Planner[Piece], *, epoch: int, packs: int
) -> list[list[Placed[Piece]]]:
    """Plan the packs of a window that begins behind so many ``packs``, in the order in which they are handed out.

    Windows begin at multiples of ``balance_window`` packs in an epoch, the same ones in all lanes.
    """
    size = config.balance_window
    planned: list[list[Placed[Piece]]] = []
    while len(planned) < size - packs % size and (placed := planner.next_pack()):
        planned.append(placed)
    order = hand_out_order(
        [_cost(placed, config.packing) for placed in planned],
        slot=packs % size,
        window=size,
        key=(config.seed, 0 if config.endless else epoch, packs // size),
    )
    return [planned[i] for i in order]


def _tokens(placed: list[Placed[Piece]]) -> int:
    return sum(stop - start for _, start, stop in placed)


def _cost(placed: list[Placed[Piece]], packing: Packing) -> int:
    in_groups = 0
    for piece, _, _ in placed:
        if type(group := piece.sample) is Group:
            in_groups += attention_cost(group.lengths, group.parents)
            in_groups -= attention_cost([group.tokens.size])
    return attention_cost([packing.padded(stop - start) for _, start, stop in placed]) + in_groups
