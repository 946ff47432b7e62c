"""The planner: it holds the waiting pieces and chooses those of the next pack."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, NamedTuple, Protocol, TypeVar

from streampack.packing.settings import Packing
from streampack.packing.strategies import STRATEGIES


class HasLength(Protocol):
    """What a `Planner` packs: a span of a sample, or a piece with its tokens."""

    @property
    def length(self) -> int:
        """Tokens of the piece, at least 1."""
        ...


PieceT = TypeVar("PieceT", bound=HasLength)
Placed = tuple[PieceT, int, int]
"""Tokens ``[start, stop)`` of a piece, in a pack."""


class Span(NamedTuple):
    """Tokens ``[start, stop)`` of sample number ``index``."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which has no use for a span
    start: int
    stop: int

    @property
    def length(self) -> int:
        """Tokens of the span."""
        return self.stop - self.start


class Planner(Generic[PieceT]):
    """The buffer of waiting pieces, and the next pack out of it.

    All state is in attributes, so an error raised by ``pull`` loses nothing: call `next_pack` again and it goes on.
    Guarantee: at most ``buffer_size`` pieces wait, and every pack takes the oldest; so a piece leaves within
    ``buffer_size`` packs, or begins to, where a piece may be longer than a pack.

    Args:
        packing: the settings; they choose the strategy.
        pull: returns the next piece, or None when there are no more. No piece is longer than ``max_seq_len``
            unless ``split_across_pack`` is set.

    >>> lengths = iter([Span(i, 0, length) for i, length in enumerate([5, 4, 2, 3, 4])])
    >>> planner = Planner(Packing(8), lambda: next(lengths, None))
    >>> [span.index for span, start, stop in planner.next_pack()]
    [0, 3]
    """

    def __init__(self, packing: Packing, pull: Callable[[], PieceT | None]) -> None:
        self.packing = packing
        self.pull = pull
        # Where samples are split, nothing is chosen: the oldest piece is cut at the pack's end.
        self.choose = None if packing.split_across_pack else STRATEGIES[packing.strategy]
        self.waiting: list[PieceT] = []  # in the order in which they were pulled
        self.lengths: list[int] = []  # theirs, in tokens
        self.offset = 0  # tokens of the oldest waiting piece that are packed already (split_across_pack only)
        self.placed: list[Placed[PieceT]] = []  # in the pack in the making
        self.room = packing.max_seq_len  # free tokens of that pack

    @property
    def buffered(self) -> int:
        """Tokens pulled and not yet in a finished pack."""
        return sum(self.lengths) - self.offset + self.packing.max_seq_len - self.room

    def add(self, piece: PieceT) -> None:
        """Put a piece at the end of the buffer."""
        self.waiting.append(piece)
        self.lengths.append(piece.length)

    def restore(self, waiting: Iterable[PieceT], *, offset: int) -> None:
        """Fill an empty buffer with the pieces that waited when a state was taken."""
        for piece in waiting:
            self.add(piece)
        self.offset = offset

    def next_pack(self) -> list[Placed[PieceT]]:
        """Plan one pack; an empty list when there are no more pieces and nothing waits."""
        if self.choose is None:
            self._fill_by_cutting()
        else:
            self._fill_by_choosing()
        placed, self.placed, self.room = self.placed, [], self.packing.max_seq_len
        return placed

    @property
    def _limit(self) -> int:
        """The most sequences that a pack may hold; each has at least one token."""
        return self.packing.max_seqs_per_pack or self.packing.max_seq_len

    def _pull(self) -> bool:
        """Add one more piece to the buffer; False if it is full or there are no more pieces."""
        if len(self.lengths) >= self.packing.buffer_size or (piece := self.pull()) is None:
            return False
        self.add(piece)
        return True

    def _fill_by_cutting(self) -> None:
        """Fill the pack in arrival order, and cut the piece that crosses its end."""
        waiting, lengths, limit = self.waiting, self.lengths, self._limit
        while self.room and len(self.placed) < limit and (lengths or self._pull()):
            start, stop = self.offset, min(lengths[0], self.offset + self.room)
            self.placed.append((waiting[0], start, stop))
            self.room -= stop - start
            self.offset = stop
            if stop == lengths[0]:
                self.offset = 0
                del waiting[0], lengths[0]

    def _fill_by_choosing(self) -> None:
        """Take the oldest piece, then what the strategy chooses."""
        assert self.choose is not None
        if not self.placed and (self.lengths or self._pull()):
            self._take([0])
        # A strategy that takes everything that waits (many short pieces) has not closed the pack: it runs
        # again over a fresh buffer. Otherwise a pack could never hold more than buffer_size + 1 pieces.
        while self.room and (limit := self._limit - len(self.placed)) and (self.lengths or self._pull()):
            taken = self.choose(self.lengths, self.room, self._pull)
            self._take(taken if len(taken) <= limit else self._fewer(taken, limit))
            if self.lengths:
                break

    def _fewer(self, taken: list[int], limit: int) -> list[int]:
        """Replace a choice of more than ``limit`` pieces by the first of them, or by the longest that fit.

        So where ``max_seqs_per_pack`` is reached, a pack of ``exact_fit`` is not filled exactly.
        """
        if self.packing.strategy in ("next_fit", "first_fit"):
            return taken[:limit]
        room = self.room
        longest: list[int] = []
        for i in sorted(range(len(self.lengths)), key=lambda i: -self.lengths[i]):
            if self.lengths[i] <= room and len(longest) < limit:
                longest.append(i)
                room -= self.lengths[i]
        return sorted(longest)

    def _take(self, taken: list[int]) -> None:
        """Move waiting pieces, given by ascending indices, into the pack."""
        for i in taken:
            length = self.lengths[i]
            self.placed.append((self.waiting[i], 0, length))
            self.room -= length
        for i in reversed(taken):
            del self.waiting[i], self.lengths[i]


def plan_packs(
    lengths: Iterable[int],
    max_seq_len: int,
    *,
    strategy: str = "exact_fit",
    buffer_size: int = 128,
    split_across_pack: bool = False,
    overlong: str | None = None,
    truncate_side: str = "right",
    max_seqs_per_pack: int | None = None,
) -> Iterator[list[Span]]:
    """Plan the packs of a stream of sample lengths; consumes ``lengths`` as it goes.

    Yields one list per pack, of ``Span(index, start, stop)``: tokens ``[start, stop)`` of sample
    ``index``. With the default ``exact_fit`` it needed at most one pack more than the lower bound
    ``ceil(tokens / max_seq_len)`` on each of the project's three benchmark distributions (``make bench``).

    >>> [[tuple(span) for span in pack] for pack in plan_packs([5, 4, 2, 3, 4], 8)]
    [[(0, 0, 5), (3, 0, 3)], [(1, 0, 4), (4, 0, 4)], [(2, 0, 2)]]
    >>> [[tuple(span) for span in pack] for pack in plan_packs([5, 6], 8, split_across_pack=True)]
    [[(0, 0, 5), (1, 0, 3)], [(1, 3, 6)]]

    Raises:
        ValueError: for a bad setting, a length below 1, or a sample that is too long under
            ``overlong="error"``. Settings are checked at the call, lengths as they are read.
    """
    packing = Packing(
        max_seq_len, strategy, buffer_size, split_across_pack, overlong, truncate_side, max_seqs_per_pack
    )
    return plan_samples(enumerate(lengths), packing)


def plan_samples(numbered: Iterable[tuple[int, int]], packing: Packing) -> Iterator[list[Span]]:
    """Plan packs of ``(sample number, length)`` pairs, for callers that leave samples out."""
    numbered = iter(numbered)
    pending: list[Span] = []  # pieces of the newest sample

    def pull() -> Span | None:
        while not pending:
            index, length = next(numbered, (-1, 0))
            if index < 0:
                return None
            try:
                whole = operator.index(length)  # a numpy integer would overflow in `exact_fit`'s shifts
                pending.extend(Span(index, *bounds) for bounds in packing.pieces_of(whole))
            except TypeError:
                raise ValueError(f"sample {index} has {length!r} tokens; give a whole number") from None
            except ValueError as error:
                raise ValueError(f"sample {index} {error}") from None
        return pending.pop(0)

    planner = Planner(packing, pull)
    while pack := planner.next_pack():
        yield [Span(span.index, span.start + start, span.start + stop) for span, start, stop in pack]
