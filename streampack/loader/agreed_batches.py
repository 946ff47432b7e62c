"""`AgreedBatches`: the batches that exist on several ranks, which agree about them in rounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from streampack.distributed.rank_sync import Agreement, RankSync
from streampack.loader.merge import RankBatch
from streampack.packing.attention_cost import AttentionCost
from streampack.packing.groups import path_starts
from streampack.types import Pack

ROUND = 8
"""Batches in one agreement of the ranks. It is under way while the batches of the round before are handed out."""


MakePart = Callable[[int], RankBatch]
"""Makes this rank's part of the batch with the number given, counted from the epoch's beginning."""


class AgreedBatches:
    """One rank's parts of the batches that all ranks make, in order, as far as the ranks agree that they exist.

    Ranks have different numbers of packs, and must make the same number of batches. So each rank makes its parts of
    the next batches ahead of time, tells the others how many it could make, and the longest rank decides:

        make_part() -> open_round -> agreeing -> agreed -> take()

    A part is put into ``open_round``. When that has `ROUND` parts, the ranks begin to agree on it (``agreeing``). What
    they agree to exist moves to ``agreed``, and `take` returns it. If fewer batches exist than a round has parts, the
    epoch ends, or a rank failed; the rest of the round is ``left_over``.

    Args:
        rank_sync: the ranks.
        cost: counts the attention cost of each part. The ranks tell one another in the same agreement, and how many
            tokens a part trains.
    """

    def __init__(self, rank_sync: RankSync, *, cost: AttentionCost) -> None:
        self.rank_sync = rank_sync
        self.cost = cost
        self.made = 0  # parts made in this epoch
        self.rounds = 0  # agreements begun in this epoch
        self.open_round: list[RankBatch] = []
        self.agreeing: deque[tuple[list[RankBatch], Agreement]] = deque()
        self.agreed: deque[RankBatch] = deque()
        self.left_over: list[RankBatch] | None = None  # None: the epoch goes on
        self.error: Exception | None = None  # this rank's, from making a part
        self.failing = False  # the ranks have agreed that one of them failed

    def start_epoch(self, made: int = 0) -> None:
        """Begin to count an epoch's batches, of which ``made`` were handed out before."""
        self.made = made
        self.rounds = 0
        self.left_over = None

    def take(self, make_part: MakePart, handed_out: int) -> RankBatch | None:
        """Collective: return this rank's part of the next batch; None when no rank has a pack left in this epoch.

        Args:
            make_part: see `MakePart`. It is passed here and not kept, because a cycle of references would keep the
                workers of an abandoned iteration alive.
            handed_out: batches of this epoch that the trainer was given.

        Raises:
            Exception: on all ranks, if one failed while it made its part.
        """
        if self.rounds and self.left_over is None:
            # Keep two rounds of parts made ahead: make one part in place of the batch handed out last, and a second
            # one until there are two rounds. More at once would delay this batch.
            for _ in range(2):
                if self.made - handed_out < 2 * ROUND:
                    self._make_one(make_part)
        while not self.agreed:
            if self.failing:
                self.rank_sync.raise_on_all(self.error, doing="making packs")
            if self.left_over is not None:
                return None
            while not self.agreeing:
                self._make_one(make_part)
            parts, agreement = self.agreeing.popleft()
            count, self.failing = agreement.wait()
            for part, *noted in zip(
                parts[:count], *(_triples(each) for each in agreement.notes()), strict=False
            ):
                part.costs, trained, tokens = zip(*noted, strict=True)
                part.trained, part.tokens = sum(trained), sum(tokens)
                self.agreed.append(part)
            if count < len(parts):
                self.left_over = parts[count:]
        return self.agreed.popleft()

    def finish_epoch(self) -> list[RankBatch]:
        """Collective: wait for all agreements; return the parts made beyond the last batch, which hold no packs.

        They hold the ends of lanes, whose states count what was dropped since the last pack.
        """
        parts = self.left_over or []
        for later, agreement in self.agreeing:
            agreement.wait()
            parts = parts + later
        parts = parts + self.open_round
        self.agreeing.clear()
        self.open_round = []
        return parts

    def _make_one(self, make_part: MakePart) -> None:
        """Collective when it completes a round: make one more part, and begin to agree on a complete round."""
        part = RankBatch(failed=True)
        if self.error is None:
            try:
                part = make_part(self.made)
            except Exception as error:  # raised on all ranks, once they have agreed on the batches before it
                self.error = error
        self.open_round.append(part)
        self.made += 1  # after an error, too: all ranks must begin the same agreements
        # The first rounds are short (1, 2, 4, ... parts), so that the first batch comes at once.
        if len(self.open_round) == min(2**self.rounds, ROUND):
            exist = [part.exists for part in self.open_round]
            count = exist.index(False) if False in exist else len(exist)
            failed = count < len(exist) and self.open_round[count].failed
            notes: list[int] = []
            for part in self.open_round:
                notes += [sum(map(self._cost_of, part.packs)), *part.count()]
            self.agreeing.append((self.open_round, self.rank_sync.agree(count, failed=failed, notes=notes)))
            self.open_round = []
            self.rounds += 1

    def _cost_of(self, pack: Pack) -> int:
        starts = None if pack.groups is None else path_starts(pack.seq_lens, pack.groups.parents)
        return self.cost.of_pack(pack.seq_lens, starts)


def _triples(notes: list[int]) -> Iterator[tuple[int, int, int]]:
    return zip(notes[::3], notes[1::3], notes[2::3], strict=True)
