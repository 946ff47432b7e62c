"""The order in which a window of packs is emitted, so that the packs of a step cost about the same attention.

In a synchronous step all ranks wait for the one whose packs cost most. A lane plans ``balance_window`` packs,
sorts them by attention cost, and emits them in a permutation of that order, the same one in all lanes. So the
packs with the same number in their lanes have the same rank among the costs of their windows. Lanes exchange nothing,
and a window holds the packs that the planner would have made one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

from streampack.lanes.lane_config import LaneConfig
from streampack.lanes.piece_reader import Piece
from streampack.packing.groups import Group, attention_cost
from streampack.packing.planner import Placed
from streampack.packing.settings import Packing
from streampack.packing.strategies import PADDED
from streampack.sources.reading import permutation
from streampack.validation import require_positive

DEFAULT_WINDOW = 64
LONG_CONTEXT = 8_192  # tokens; with shorter packs attention is too small a part of a step to matter
MOST_WINDOW = 4096  # packs; each lane holds the pieces of a window
BALANCE_KEY = 0x62616C  # keeps these permutations apart from those of the rows


def default_window(packing: Packing, *, ranks: int) -> int:
    """Return the ``balance_window`` of a run that sets none: 0 for short packs, padded batches or a single rank.

    >>> default_window(Packing(4096), ranks=8), default_window(Packing(32768), ranks=8)
    (0, 64)
    """
    # Padded batches are there to compare with, and have the stream's order.
    if ranks == 1 or packing.max_seq_len < LONG_CONTEXT or packing.strategy == PADDED:
        return 0
    return DEFAULT_WINDOW


def require_window(window: int) -> int:
    """Return ``balance_window`` as an int."""
    window = require_positive(window, "balance_window", least=0)
    if window > MOST_WINDOW:
        raise ValueError(
            f"balance_window={window} is more than {MOST_WINDOW} packs, which a lane would hold in memory; give "
            "fewer, 64 is enough for most runs"
        )
    return window


def emit_order(costs: Sequence[int], *, slot: int, window: int, key: Sequence[int]) -> list[int]:
    """Return the indices of a window's packs in the order of emission.

    Args:
        costs: of the packs, in the order in which they were planned.
        slot: the place of the first of them in its window of ``window`` packs.
        window: packs in a full window. At an epoch's end there may be fewer: then each slot takes the pack whose rank
            comes nearest to that of the slot.
        key: of the permutation; the same in all lanes.

    >>> emit_order([40, 10, 30, 20], slot=0, window=4, key=(0, 0, 0))
    [0, 2, 1, 3]
    """
    expensive_last = sorted(range(len(costs)), key=costs.__getitem__)
    ranks = permutation(window, BALANCE_KEY, *key)[slot : slot + len(costs)]
    return [expensive_last[rank] for rank in ranks.argsort().argsort().tolist()]


def in_order(
    config: LaneConfig, planned: Sequence[list[Placed[Piece]]], *, epoch: int, packs: int
) -> list[list[Placed[Piece]]]:
    """Return packs that were planned after ``packs`` others, in the order of emission."""
    size = config.balance_window
    order = emit_order(
        [_cost(placed, config.packing) for placed in planned],
        slot=packs % size,
        window=size,
        key=(config.seed, 0 if config.endless else epoch, packs // size),
    )
    return [planned[i] for i in order]


def _cost(placed: list[Placed[Piece]], packing: Packing) -> int:
    in_groups = 0
    for piece, _, _ in placed:
        if type(group := piece.sample) is Group:
            in_groups += attention_cost(group.lengths, group.parents)
            in_groups -= attention_cost([group.tokens.size])
    return attention_cost([packing.padded(stop - start) for _, start, stop in placed]) + in_groups
