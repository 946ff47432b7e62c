"""The planner holds the buffered pieces, and chooses those of the next pack."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, NamedTuple, Protocol, TypeVar

from streampack.packing.settings import Packing
from streampack.packing.strategies import PADDED, STRATEGIES
from streampack.packing.two_budgets import choose_within

MOST_LARGE, PACKS_A_LARGE = 12, 6
"""Limits of the drift. With uniform lengths up to a pack's, the length of a piece and the number of its pack correlate
by 0.09 instead of 0.14 (2,000 pieces), or 0.08 instead of 0.57 (250). On flan, orca and stack (`benchmarks.density`),
the limits cost no packs."""


class HasLength(Protocol):
    """Anything with a length of at least 1, which a `Planner` can pack."""

    @property
    def length(self) -> int: ...  # noqa: D102


PieceT = TypeVar("PieceT", bound=HasLength)
Placed = tuple[PieceT, int, int]
"""``(piece, start, stop)``: tokens ``[start, stop)`` of the piece are in the pack."""


class Span(NamedTuple):
    """Tokens ``[start, stop)`` of sample number ``index``."""

    index: int  # type: ignore[assignment]  # it hides tuple.index, which nobody calls on a span
    start: int
    stop: int

    @property
    def length(self) -> int:
        """Tokens of the span."""
        return self.stop - self.start


class MediaSpan(Span):
    """A `Span` that takes ``media`` of a pack's second budget."""

    media: int


class Planner(Generic[PieceT]):
    """Holds the buffer of pieces and plans the next pack from it.

    At most ``buffer_size`` pieces wait, and every pack takes the oldest. So each piece leaves the buffer within
    ``buffer_size`` packs; a piece that is longer than a pack, as ``split_across_pack`` allows, begins to leave it then.

    With ``exact_fit`` short pieces find room sooner than long ones, so the long ones fill the buffer and are trained
    later. To bound this drift, the planner pulls no more pieces while `MOST_LARGE` pieces longer than a quarter of a
    pack wait, or one for every `PACKS_A_LARGE` packs of the epoch if that is more.

    Args:
        packing: the settings; they choose the strategy.
        pull: returns the next piece, or None when there are no more. No piece is longer than ``max_seq_len``
            unless ``split_across_pack`` is set. With ``max_media``, none has a ``media`` above it.

    >>> lengths = iter([Span(i, 0, length) for i, length in enumerate([5, 4, 2, 3, 4])])
    >>> planner = Planner(Packing(8), lambda: next(lengths, None))
    >>> [span.index for span, start, stop in planner.next_pack()]
    [0, 3]
    """

    def __init__(self, packing: Packing, pull: Callable[[], PieceT | None]) -> None:
        self.packing = packing
        self.pull = pull
        # The buffered pieces in the order in which they were pulled, and the tokens that each takes in a pack.
        self.waiting: list[PieceT] = []
        self.lengths: list[int] = []
        self.media: list[int] = []  # with ``max_media``, what each takes of it
        # With split_across_pack, the tokens of the oldest buffered piece that were packed already. Otherwise always 0.
        self.offset = 0
        # Of the newest pack.
        self.placed: list[Placed[PieceT]] = []
        self.room = packing.max_seq_len
        self.media_room = packing.max_media
        self.packs = 0  # planned in this epoch
        self.quarter = packing.max_seq_len // 4
        self.large = 0  # buffered pieces that are longer than a quarter of a pack
        self.most_large = math.inf
        # A sequence for each token is no limit.
        self.max_seqs = packing.max_seqs_per_pack or packing.max_seq_len

    @property
    def buffered(self) -> int:
        """Number of buffered tokens without padding. Ask for it between packs only."""
        return sum([piece.length for piece in self.waiting]) - self.offset

    def next_pack(self) -> list[Placed[PieceT]]:
        """Plan one pack and return its pieces; an empty list when there are no more pieces and none waits."""
        self.placed, self.room = [], self.packing.max_seq_len
        self.media_room = self.packing.max_media
        strategy = self.packing.strategy
        if strategy == "exact_fit" and self.media_room is None:
            self.most_large = max(MOST_LARGE, -(-self.packs // PACKS_A_LARGE))
        self.packs += 1
        if strategy is None:
            self._fill_by_cutting()
            return self.placed
        if self.lengths or self._pull():
            self._take([0])
        if strategy == PADDED:
            return self.placed
        choose = STRATEGIES[strategy]
        # The strategy decided against the pieces that it leaves waiting, so the pack is closed. If it took all of them,
        # it is asked again about those that are pulled next, or no pack would hold more than buffer_size + 1.
        while self.room and (limit := self.max_seqs - len(self.placed)) and (self.lengths or self._pull()):
            if self.media_room is None:
                self._take(choose(self.lengths, self.room, limit, self._pull))
            else:
                room, media = (self.room, self.media_room), self.media
                self._take(choose_within(strategy, self.lengths, media, room, limit, self._pull))
            if self.lengths:
                break
        return self.placed

    def _pull(self) -> bool:
        """Pull one more piece into the buffer; return False if the buffer is full or there are no more pieces."""
        packing = self.packing
        if len(self.lengths) >= packing.buffer_size or self.large >= self.most_large:
            return False
        if (piece := self.pull()) is None:
            return False
        length = piece.length if packing.pad_seqs_to == 1 else packing.padded(piece.length)
        self.waiting.append(piece)
        self.lengths.append(length)
        if length > self.quarter:
            self.large += 1
        if self.media_room is not None:
            self.media.append(getattr(piece, "media", 0))
        return True

    def _fill_by_cutting(self) -> None:
        """Fill the pack in arrival order, and cut the piece that crosses its end.

        The room is always a multiple of ``pad_seqs_to``, so only the last part of a sample is padded.
        """
        waiting, lengths, max_seqs = self.waiting, self.lengths, self.max_seqs
        while self.room and len(self.placed) < max_seqs and (lengths or self._pull()):
            whole = waiting[0].length
            start, stop = self.offset, min(whole, self.offset + self.room)
            self.placed.append((waiting[0], start, stop))
            self.room -= self.packing.padded(stop - start)
            self.offset = stop
            if stop == whole:
                self.offset = 0
                del waiting[0], lengths[0]

    def _take(self, taken: list[int]) -> None:
        """Move the buffered pieces with these ascending indices into the pack."""
        waiting, lengths, room, large = self.waiting, self.lengths, self.room, self.large
        for i in taken:
            piece, length = waiting[i], lengths[i]
            self.placed.append((piece, 0, piece.length))
            room -= length
            if length > self.quarter:
                large -= 1
        for i in reversed(taken):
            del waiting[i], lengths[i]
        self.room, self.large = room, large
        if self.media_room is not None:
            self.media_room -= sum([self.media.pop(i) for i in reversed(taken)])


def plan_packs(
    lengths: Iterable[int],
    max_seq_len: int,
    *,
    strategy: str | None = None,
    buffer_size: int = 128,
    split_across_pack: bool = False,
    overlong: str | None = None,
    max_seqs_per_pack: int | None = None,
    pad_seqs_to: int = 1,
    media: Iterable[int] | None = None,
    max_media: int | None = None,
) -> Iterator[list[Span]]:
    """Plan the packs of a stream of sample lengths, reading ``lengths`` no further than the next pack needs.

    Each pack is a list of ``Span(index, start, stop)``: tokens ``[start, stop)`` of sample ``index``. The settings are
    those of `Packing`. ``media`` says what each sample takes of ``max_media``.

    >>> [[tuple(span) for span in pack] for pack in plan_packs([5, 4, 2, 3, 4], 8)]
    [[(0, 0, 5), (3, 0, 3)], [(1, 0, 4), (4, 0, 4)], [(2, 0, 2)]]
    >>> [[tuple(span) for span in pack] for pack in plan_packs([5, 6], 8, split_across_pack=True)]
    [[(0, 0, 5), (1, 0, 3)], [(1, 3, 6)]]
    >>> [[span.index for span in pack] for pack in plan_packs([4, 4, 4, 4], 8, media=[2, 2, 0, 0], max_media=2)]
    [[0, 2], [1, 3]]

    Raises:
        ValueError: for a bad setting at the call, and for a bad length when it is read.
    """
    packing = Packing(
        max_seq_len,
        strategy=strategy,
        buffer_size=buffer_size,
        split_across_pack=split_across_pack,
        overlong=overlong,
        max_seqs_per_pack=max_seqs_per_pack,
        pad_seqs_to=pad_seqs_to,
        max_media=max_media,
    )
    if media is None:
        return plan_samples(enumerate(lengths), packing)
    pairs = zip(lengths, media, strict=True)
    return plan_samples(((number, *pair) for number, pair in enumerate(pairs)), packing)


Numbered = tuple[int, int] | tuple[int, int, int]
"""A sample's number and length, and what it takes of ``max_media``."""


def plan_samples(numbered: Iterable[Numbered], packing: Packing) -> Iterator[list[Span]]:
    """Plan packs of samples, as `plan_packs`; numbers may be missing."""
    spans = spans_of(numbered, packing)
    planner: Planner[Span] = Planner(packing, lambda: next(spans, None))
    while pack := planner.next_pack():
        yield [Span(span.index, span.start + start, span.start + stop) for span, start, stop in pack]


def spans_of(numbered: Iterable[Numbered], packing: Packing) -> Iterator[Span]:
    """Yield the pieces that samples become."""
    for sample in numbered:
        index, length = sample[0], sample[1]
        try:
            whole = operator.index(length)  # a numpy integer would overflow when `exact_fit` shifts by it
            bounds = packing.pieces_of(whole)
        except TypeError:
            raise ValueError(f"sample {index} has {length!r} tokens; give a whole number") from None
        except ValueError as error:
            raise ValueError(f"sample {index} {error}") from None
        if len(sample) > 2 and sample[2]:
            yield from _uncut(index, whole, operator.index(sample[2]), packing)
            continue
        for start, stop in bounds:
            yield Span(index, start, stop)


def _uncut(index: int, length: int, media: int, packing: Packing) -> Iterator[Span]:
    """Yield the span of a sample with media; none if it is dropped."""
    if 0 < length <= packing.max_seq_len and 0 < media <= (packing.max_media or media):
        span = MediaSpan(index, 0, length)
        span.media = media
        yield span
    elif packing.overlong != "drop" or media < 0:
        raise ValueError(
            f"sample {index} has {length} tokens and takes {media} of max_media={packing.max_media}, and a sample with "
            "media is never cut; leave it out, or set overlong to 'drop'"
        )
