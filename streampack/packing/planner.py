"""The planner: lengths in, packs of pieces out. Pure Python, no arrays."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

from streampack.packing.settings import Packing
from streampack.packing.strategies import STRATEGIES


class Span(NamedTuple):
    """Tokens ``[start, stop)`` of piece (or sample) number ``index``."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody asks of a span
    start: int
    stop: int


_span = partial(tuple.__new__, Span)  # in half the time


class Planner:
    """The buffer of waiting pieces, and the next pack out of it.

    Pieces are numbered in the order in which they are pulled. All state is in attributes, so an error
    raised by ``pull`` loses nothing: call `next_pack` again and it goes on. Guarantee: at most
    ``buffer_size`` pieces wait, and every pack takes the oldest, so a piece leaves within
    ``buffer_size`` packs.

    >>> lengths = iter([5, 4, 2, 3, 4])
    >>> planner = Planner(Packing(8))
    >>> planner.next_pack(lambda: next(lengths, None))
    [Span(index=0, start=0, stop=5), Span(index=3, start=0, stop=3)]
    """

    def __init__(self, packing: Packing) -> None:
        self.packing = packing
        self.choose = STRATEGIES[packing.strategy]
        self.pieces: list[int] = []  # numbers of the waiting pieces, ascending
        self.lengths: list[int] = []  # their lengths in tokens
        self.offset = 0  # tokens of the oldest waiting piece that are packed already (wrap only)
        self.next_piece = 0  # the number that the next piece pulled will get
        self.spans: list[Span] = []  # the pack in the making
        self.room = packing.max_seq_len  # its free tokens

    @property
    def buffered(self) -> int:
        """Tokens pulled and not yet in a finished pack."""
        return sum(self.lengths) - self.offset + self.packing.max_seq_len - self.room

    def hold(self, piece: int, length: int) -> None:
        """Put a piece into the buffer: a pulled one, or one that waited when a receipt was written."""
        self.pieces.append(piece)
        self.lengths.append(length)

    def next_pack(self, pull: Callable[[], int | None]) -> list[Span]:
        """Plan one pack, or return an empty list when ``pull()`` gave None and nothing waits.

        ``pull()`` returns the next piece's length, at least 1, and at most ``max_seq_len`` unless the
        strategy is ``wrap``. ``Span.index`` is the piece's number.
        """
        if self.choose is None:
            self._fill_by_cutting(pull)
        else:
            self._fill_by_choosing(pull)
        spans, self.spans, self.room = self.spans, [], self.packing.max_seq_len
        return spans

    @property
    def _limit(self) -> int:
        """Sequences that a pack takes; a token each at least."""
        return self.packing.max_seqs_per_pack or self.packing.max_seq_len

    def _fill_by_cutting(self, pull: Callable[[], int | None]) -> None:
        pieces, lengths, spans, limit = self.pieces, self.lengths, self.spans, self._limit
        while (room := self.room) and len(spans) < limit:
            if not lengths:
                if (pulled := pull()) is None:
                    return
                self.hold(self.next_piece, pulled)
                self.next_piece += 1
            start, left = self.offset, lengths[0] - self.offset
            if left > room:
                spans.append(_span((pieces[0], start, start + room)))
                self.offset, self.room = start + room, 0
            else:
                spans.append(_span((pieces[0], start, start + left)))
                self.offset, self.room = 0, room - left
                del pieces[0], lengths[0]

    def _fill_by_choosing(self, pull: Callable[[], int | None]) -> None:
        assert self.choose is not None
        most = self.packing.buffer_size

        def pull_into_buffer() -> bool:
            if len(self.lengths) >= most or (length := pull()) is None:
                return False
            self.hold(self.next_piece, length)
            self.next_piece += 1
            return True

        if not self.spans and (self.lengths or pull_into_buffer()):
            self._take([0])
        # A strategy that takes all that waits (many short pieces) has not closed the pack: it is asked
        # again over a fresh buffer. Otherwise a pack could never hold more than buffer_size + 1 pieces.
        while (seats := min(self.room, self._limit - len(self.spans))) and (
            self.lengths or pull_into_buffer()
        ):
            taken = self.choose(self.lengths, self.room, pull_into_buffer)
            self._take(taken if len(taken) <= seats else self._fewer(taken, seats))
            if self.lengths:
                break

    def _fewer(self, taken: list[int], seats: int) -> list[int]:
        """In the place of too many pieces: the first of them, or the longest that fit, which fill the pack best."""
        if self.packing.strategy in ("next_fit", "first_fit"):
            return taken[:seats]
        room = self.room
        longest: list[int] = []
        for i in sorted(range(len(self.lengths)), key=lambda i: -self.lengths[i]):
            if self.lengths[i] <= room and len(longest) < seats:
                longest.append(i)
                room -= self.lengths[i]
        return sorted(longest)

    def _take(self, taken: list[int]) -> None:
        for i in taken:
            self.spans.append(_span((self.pieces[i], 0, self.lengths[i])))
            self.room -= self.lengths[i]
        for i in reversed(taken):
            del self.pieces[i], self.lengths[i]


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
    ``index``. With the default ``exact_fit`` it met the lower bound ``ceil(tokens / max_seq_len)`` on
    all three of the project's benchmark distributions but for at most one pack (``make bench``).

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


def plan_samples(numbered: Iterator[tuple[int, int]], packing: Packing) -> Iterator[list[Span]]:
    """`plan_packs` over ``(sample number, length)``, for a caller that leaves samples out."""
    planner = Planner(packing)
    held: dict[int, Span] = {}  # piece number -> the span of the sample that it is
    pending: list[Span] = []  # pieces of the newest sample that were not pulled yet

    def pull() -> int | None:
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
        span = held[planner.next_piece] = pending.pop(0)
        return span.stop - span.start

    while pack := planner.next_pack(pull):
        spans = []
        for piece, start, stop in pack:
            index, base, end = held[piece]
            spans.append(Span(index, base + start, base + stop))
            if base + stop == end:
                del held[piece]
        yield spans
