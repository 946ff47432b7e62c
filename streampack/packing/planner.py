"""Which samples share a pack: lengths in, indices out. Pure Python, no arrays.

A strategy is one small function ``choose(lengths, room, pull) -> taken``. ``lengths`` are the waiting
pieces in arrival order, ``room`` the tokens still free in the pack, and ``pull()`` appends one more
length to ``lengths``, or returns False when the buffer is full or the stream has ended. ``taken`` are
ascending indices into ``lengths``. The `Planner` itself takes the oldest piece first, so that no
strategy can starve one.

A strategy must decide by scanning in arrival order, so that what was pulled early changes nothing:
a planner that was interrupted by an error in ``pull`` goes on to the same pack.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from streampack.validation import require, require_positive

Strategy = Callable[[list[int], int, Callable[[], bool]], list[int]]


class Span(NamedTuple):
    """Tokens ``[start, stop)`` of piece (or sample) number ``index``."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody asks of a span
    start: int
    stop: int


_span = partial(tuple.__new__, Span)  # in half the time


def next_fit(lengths: list[int], room: int, pull: Callable[[], bool]) -> list[int]:
    """Close the pack when the next sample does not fit: torchtune's greedy ``PackedDataset``."""
    count = 0
    while (count < len(lengths) or pull()) and lengths[count] <= room:
        room -= lengths[count]
        count += 1
    return list(range(count))


def first_fit(lengths: list[int], room: int, pull: Callable[[], bool]) -> list[int]:
    """Scan the buffer in arrival order and take whatever fits."""
    taken = []
    i = 0
    while room and (i < len(lengths) or pull()):
        if lengths[i] <= room:
            taken.append(i)
            room -= lengths[i]
        i += 1
    return taken


def best_fit(lengths: list[int], room: int, pull: Callable[[], bool]) -> list[int]:
    """From a full buffer, always the longest that still fits; the earlier of equals."""
    while pull():
        pass
    taken = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if lengths[i] <= room:
            taken.append(i)
            room -= lengths[i]
    return sorted(taken)


def exact_fit(lengths: list[int], room: int, pull: Callable[[], bool]) -> list[int]:
    """The earliest arrivals whose lengths sum exactly to ``room``; if the buffer has none, the fullest sum.

    Subset sum by dynamic programming on one Python integer: bit r of ``reach`` says that some subset of
    the lengths seen so far leaves r tokens of room. Adding a length is one shift and one OR over
    ``room`` bits, about 0.2 us at 4,096. It stops at the first arrival that makes bit 0 reachable, so it
    pulls (and makes samples wait) only while no exact sum exists.
    """
    reach = 1 << room
    before: list[int] = []  # before[i]: reach without length i, to walk back from the sum to its members
    seen = 0
    while not reach & 1 and (seen < len(lengths) or pull()):
        before.append(reach)
        reach |= reach >> lengths[seen]
        seen += 1
    left = (reach & -reach).bit_length() - 1  # the least room that any subset leaves
    taken = []
    for i in range(seen - 1, -1, -1):
        if not before[i] >> left & 1:  # unreachable without length i, so it is in the sum
            taken.append(i)
            left += lengths[i]
    taken.reverse()
    return taken


STRATEGIES: dict[str, Strategy | None] = {
    "next_fit": next_fit,
    "first_fit": first_fit,
    "best_fit": best_fit,
    "exact_fit": exact_fit,
    "wrap": None,  # splits, so it chooses nothing: `Planner` cuts the oldest piece at the pack's end
}
OVERLONG = ("error", "drop", "truncate", "split")


@dataclass(frozen=True, slots=True)
class Packing:
    """The settings that decide which tokens share a pack. Checked once, here, for every way in.

    ``overlong`` says what becomes of a sample longer than ``max_seq_len``: ``"error"``, ``"drop"``,
    ``"truncate"`` (``truncate_side`` names the side that is cut) or ``"split"`` into several pieces. Left
    out, it is ``"error"``, and with ``split_across_pack=True`` it is ``"split"``, because there every
    sample may continue in the next pack. ``max_seqs_per_pack`` limits the sequences in a pack.

    Raises:
        ValueError: for a setting that is out of range or unknown.
    """

    max_seq_len: int
    strategy: str = "exact_fit"
    buffer_size: int = 128
    split_across_pack: bool = False
    overlong: str | None = None
    truncate_side: str = "right"
    max_seqs_per_pack: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_seq_len", require_positive(self.max_seq_len, "max_seq_len"))
        object.__setattr__(self, "buffer_size", require_positive(self.buffer_size, "buffer_size"))
        if self.max_seqs_per_pack is not None:
            limit = require_positive(self.max_seqs_per_pack, "max_seqs_per_pack")
            object.__setattr__(self, "max_seqs_per_pack", limit)
        require(self.strategy, "strategy", STRATEGIES)
        require(self.truncate_side, "truncate_side", ("right", "left"))
        wraps = self.split_across_pack or self.strategy == "wrap"
        object.__setattr__(self, "split_across_pack", wraps)
        object.__setattr__(self, "strategy", "wrap" if wraps else self.strategy)
        if self.overlong is None:
            object.__setattr__(self, "overlong", "split" if wraps else "error")
        require(self.overlong, "overlong", OVERLONG)

    def pieces_of(self, length: int) -> list[tuple[int, int]]:
        """The ``(start, stop)`` pieces that a sample of ``length`` tokens becomes; none if it is dropped.

        Raises:
            ValueError: if the sample is too long under ``overlong="error"``, or empty. The message lacks
                its subject: the caller knows which sample it is, and puts that in front.
        """
        limit = self.max_seq_len
        if length < 1:
            raise ValueError(f"has {length} tokens; remove it, or drop empty samples before packing")
        if length <= limit or (self.split_across_pack and self.overlong == "split"):
            return [(0, length)]
        if self.overlong == "split":
            return [(start, min(start + limit, length)) for start in range(0, length, limit)]
        if self.overlong == "truncate":
            return [(0, limit)] if self.truncate_side == "right" else [(length - limit, length)]
        if self.overlong == "drop":
            return []
        raise ValueError(
            f"has {length} tokens, max_seq_len is {limit}; "
            "set overlong to 'split', 'truncate' or 'drop', or raise max_seq_len"
        )

    def cuts(self, length: int, start: int, stop: int) -> range:
        """Where a sample of ``length`` tokens is cut, given that ``[start, stop)`` is one of its fragments."""
        limit = self.max_seq_len
        if start == 0 and stop == length:
            return range(0)
        if not self.split_across_pack:
            return range(limit, length, limit)
        # At the end of its first pack, then at every pack's end.
        return range(stop if start == 0 else (start - 1) % limit + 1, length, limit)

    @property
    def segments(self) -> int | None:
        """How many a pack can have, its padding among them; None without a limit."""
        return None if self.max_seqs_per_pack is None else self.max_seqs_per_pack + 1

    @property
    def keeps_one_piece_per_sample(self) -> bool:
        """Whether a sample's number of pieces is known (one) without its length."""
        return self.split_across_pack or self.overlong != "split"


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
