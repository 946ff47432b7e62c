"""`AgreedBatches`: the batches that exist on several ranks, which agree ahead of time about several at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from streampack.distributed.rank_sync import Exchange, RankSync
from streampack.loader.merge import RankBatch
from streampack.packing.groups import attention_cost
from streampack.types import Pack

ROUND = 8
"""Batches in one exchange between the ranks, and how many are made ahead.

One for each batch was tried. It costs two ranks 0.1 to 0.3 ms of CPU, more than making a pack of rows that are tokens
already, and a thousand ranks 80 ms.
"""

MakePart = Callable[[int], RankBatch]
"""Makes this rank's part of the batch with the number given, counted from the epoch's beginning."""


class AgreedBatches:
    """One rank's parts of the batches that all ranks make, in order.

    Ranks have different numbers of packs, and must make the same number of batches: a batch exists if any rank has
    packs for it. So each rank makes its parts ahead of time, and tells the others about a round of them at once, while
    it hands out those of the round before. When an exchange begins follows from the number of batches taken, so all
    ranks begin the same ones.

    Args:
        rank_sync: the ranks.
    """

    def __init__(self, rank_sync: RankSync) -> None:
        self.rank_sync = rank_sync
        self.error: Exception | None = None  # this rank's, from making a part
        self.failed = False  # the ranks have agreed that one of them failed
        self._start_epoch()

    def _start_epoch(self) -> None:
        self.taken = 0  # batches of this epoch
        self.parts: deque[RankBatch] = deque()  # made, and not taken
        self.untold: list[tuple[int, ...]] = []  # what the other ranks must know of the newest of them
        self.exchanges: deque[Exchange] = deque()  # under way
        self.told: deque[tuple[list[int], ...]] = deque()  # what each rank has told of the oldest parts

    def take(self, make_part: MakePart, number: int) -> RankBatch:
        """Collective: return this rank's part of a batch; after the last one, a part that exists on no rank.

        Args:
            make_part: see `MakePart`. It is passed here and not kept, because a cycle of references would keep the
                workers of an abandoned iteration alive.
            number: of the batch in its epoch: one more than in the call before, or the first of an epoch.

        Raises:
            Exception: on all ranks, if one failed while it made its part.
        """
        size = min(self.taken + 1, ROUND)  # the first rounds are short, so that the first batch comes at once
        while len(self.parts) <= size:
            self._make_one(make_part, number + len(self.parts))
            if len(self.untold) == size:
                self.exchanges.append(self.rank_sync.exchange(self.untold))
                self.untold = []
        if not self.told:
            self.told += zip(*self.exchanges.popleft()(), strict=True)
        part, told = self.parts.popleft(), self.told.popleft()
        exist, failed, part.costs, trained, tokens = zip(*told, strict=True)
        part.exists_on_a_rank, part.trained, part.tokens = any(exist), sum(trained), sum(tokens)
        if any(failed):
            self.failed = True
            self.rank_sync.raise_on_all(self.error, doing="making packs")
        self.taken += 1
        if not part.exists_on_a_rank:
            self._start_epoch()  # later parts hold nothing: the ends of lanes are in the first one without a pack
        return part

    def _make_one(self, make_part: MakePart, number: int) -> None:
        part = RankBatch()
        if self.error is None:
            try:
                part = make_part(number)
            except Exception as error:  # raised on all ranks, when they have taken the batches before it
                self.error = error
        self.parts.append(part)
        cost = sum(map(_cost_of, part.packs))
        self.untold.append((part.exists, self.error is not None, cost, *part.count()))


def _cost_of(pack: Pack) -> int:
    return attention_cost(pack.seq_lens, None if pack.groups is None else pack.groups.parents)
