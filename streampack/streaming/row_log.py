"""The log of the rows that a lane has read since its oldest waiting piece: what a resume must read again."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

from streampack.sources.base import KnownWindow
from streampack.types import Window


class LoggedRow(NamedTuple):
    """One row in the log: the numbers of its pieces, and where it came from.

    A row that made no piece has one number all the same. ``pieces`` counts those that were asked for so far. ``source``
    is None for a row of a source that has left the mixture since.
    """

    number: int
    pieces: int
    source: int | None
    epoch: int


@dataclass(slots=True)
class LoggedWindow:
    """A window of a source, and the numbers of the first and the last row that were read from it.

    ``expected`` is set until the first row is read, if a resume knows the window from before.
    """

    source: int
    window: Window
    first: int
    last: int
    expected: bool = False


class RowLog:
    """Which row each piece of a lane belongs to, from piece number ``first`` on.

    Each piece has a digit, and the digits are the bits of one integer, the oldest piece in the lowest bits. With S
    sources (1 without a mixture) a digit is the number of the source for the first piece of a row, S for another piece
    of the same row, and S + 1 for a row of a source that has left the mixture. So the integer is 0 as long as a single
    source's rows make one piece each.

    >>> log = RowLog(sources=1)
    >>> for epoch, another in ((0, False), (0, True), (1, False)):
    ...     log.add(0, None, epoch=epoch, another=another)
    >>> log.digits, [(row.number, row.pieces, row.epoch) for row in log.rows()]
    (4, [(0, 2, 0), (2, 1, 1)])

    Args:
        sources: how many sources there are.
        first: the number of the oldest piece.
        count: how many pieces there are.
        digits: of the pieces.
        epochs: (number of the first piece of an epoch, epoch), in order; of the oldest epoch any piece before ``first``
            will do.
        windows: that the pieces were read from.
    """

    def __init__(
        self,
        *,
        sources: int,
        first: int = 0,
        count: int = 0,
        digits: int = 0,
        epochs: Sequence[tuple[int, int]] = (),
        windows: Sequence[LoggedWindow] = (),
    ) -> None:
        self.sources = sources
        self.bits = digit_bits(sources)
        self.first = first
        self.count = count
        self.digits = digits
        self.epochs = list(epochs)
        self.windows = list(windows)
        # For each source, the window that its newest row is from, and those that a resume will read.
        self._newest: list[LoggedWindow | None] = [None] * sources
        self._expected: list[deque[LoggedWindow]] = [deque() for _ in range(sources)]

    def add(self, source: int | None, window: Window | None, *, epoch: int, another: bool = False) -> None:
        """Add a row's first piece, or ``another`` piece of the newest row."""
        digit = self.sources if another else self.sources + 1 if source is None else source
        if digit:
            self.digits |= digit << self.bits * self.count
        number = self.first + self.count
        self.count += 1
        if not self.epochs or self.epochs[-1][1] != epoch:
            self.epochs.append((number, epoch))
        if window is None or source is None:
            return
        newest, expected = self._newest[source], self._expected[source]
        if newest is None or newest.window is not window:
            if expected and expected[0].window == window:
                newest = expected.popleft()
                newest.window, newest.expected = window, False
                newest.first = min(newest.first, number)  # lower if pieces are numbered anew
            else:
                newest = LoggedWindow(source, window, number, number)
                self.windows.append(newest)
            self._newest[source] = newest
        newest.last = number

    def expect(self, windows: Iterable[LoggedWindow]) -> None:
        """Keep windows that a resume reads again or goes on in, before their first rows are read."""
        for logged in windows:
            expected = replace(logged, expected=True)
            self._expected[logged.source].append(expected)
            self.windows.append(expected)

    def close_windows(self) -> None:
        """Note that an epoch ended: no further row is read from the windows so far."""
        self._newest = [None] * self.sources
        for expected in self._expected:
            while expected:
                expected.popleft().expected = False

    def forget(self, first: int) -> None:
        """Forget the pieces before number ``first``, and the windows that only those were read from."""
        self.digits >>= self.bits * (first - self.first)
        self.count -= first - self.first
        self.first = first
        while len(self.epochs) > 1 and self.epochs[1][0] <= first:
            del self.epochs[0]
        kept = []
        for logged in self.windows:
            newest = logged is self._newest[logged.source]
            if logged.expected or logged.last >= first or (newest and not logged.window.finished):
                kept.append(logged)
            elif newest:
                self._newest[logged.source] = None
        self.windows = kept

    def rows(self) -> Iterator[LoggedRow]:
        """Yield the rows, the oldest first.

        Raises:
            ValueError: if a digit stands for nothing, or the first piece is not the first of its row.
        """
        mask, left, epochs = (1 << self.bits) - 1, self.digits, deque(self.epochs)
        newest: LoggedRow | None = None
        for number in range(self.first, self.first + self.count):
            digit, left = left & mask, left >> self.bits
            if digit == self.sources and newest is not None:
                newest = newest._replace(pieces=newest.pieces + 1)
                continue
            if newest is not None:
                yield newest
            if digit == self.sources or digit > self.sources + 1:
                raise ValueError(f"digit {digit} of piece {number} cannot be")
            while len(epochs) > 1 and epochs[1][0] <= number:
                epochs.popleft()
            newest = LoggedRow(number, 1, None if digit > self.sources else digit, epochs[0][1])
        if newest is not None:
            yield newest

    def numbered_epochs(self, epoch: int) -> tuple[tuple[int, int], ...]:
        """Return the epochs after that of a lane state's cursor, as the state keeps them.

        The first piece may be of such a one: the cursor may stand at the end of the epoch before.
        """
        if self.epochs and self.epochs[-1][1] == epoch:  # nearly always; this is called for every pack
            return ()
        return tuple((number - self.first, later) for number, later in self.epochs if later > epoch)

    def numbered_windows(self) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
        """Return the windows as a lane state keeps them: (source, pieces before its first row, `Window.numbers`)."""
        ordered = sorted(self.windows, key=attrgetter("source")) if self.sources > 1 else self.windows
        return tuple(
            [(each.source, max(0, each.first - self.first), each.window.numbers) for each in ordered]
        )

    def known_windows(self) -> list[deque[KnownWindow]]:
        """Return the windows of each source, in the order in which they were read, with the rows read from each."""
        windows: list[list[LoggedWindow]] = [[] for _ in range(self.sources)]
        for logged in self.windows:
            windows[logged.source].append(logged)
        firsts = [[logged.first for logged in of_source] for of_source in windows]
        counts = [[0] * len(of_source) for of_source in windows]
        for row in self.rows():
            if row.source is not None and firsts[row.source]:
                counts[row.source][bisect_right(firsts[row.source], row.number) - 1] += 1
        return [
            deque(KnownWindow(logged.window.numbers, count) for logged, count in zip(*pair, strict=True))
            for pair in zip(windows, counts, strict=True)
        ]


def digit_bits(sources: int) -> int:
    """Return how many bits a digit of a `RowLog` has."""
    return (sources + 1).bit_length()
