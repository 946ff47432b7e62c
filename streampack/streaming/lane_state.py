"""The state of a lane, from which it resumes: where its reader stands, and what waits to be packed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from streampack.accounting import Ledger, SourceStats
from streampack.types import Cursor, Pack, RowId

Moved = Callable[[RowId], RowId | None]
"""The id that a row has in a corpus that has changed; None if it is gone."""


class Address(NamedTuple):
    """Where to find what waits: tokens ``[start, stop)`` of the sample that a row became, one piece of it or several.

    All pieces of the sample have ``total`` tokens. With 0, it is a row that waits to be encoded and cut with other
    settings than those with which it had so many.
    """

    row_id: RowId
    start: int
    stop: int
    total: int

    @property
    def tokens(self) -> int:
        """How many tokens wait there."""
        return self.stop - self.start

    def as_list(self) -> list[int]:
        """Return plain values: of a whole sample, as most are, its row's and how many tokens it has, below 0."""
        whole = self.start == 0 and 0 < self.total == self.stop  # one that lost its beginning starts later
        return [*self.row_id, -self.total] if whole else [*self.row_id, *self[1:]]

    @classmethod
    def from_list(cls, numbers: Sequence[int]) -> Address:
        """Invert `as_list`."""
        if (last := numbers[-1]) < 0:
            return cls(tuple(numbers[:-1]), 0, -last, -last)
        return cls(tuple(numbers[:-3]), *numbers[-3:])


@dataclass(frozen=True, slots=True)
class Stand:
    """Where a lane stands between two packs: where its reader goes on, and what it has read and not packed.

    >>> stand = Stand(epoch=0, cursor=(2, 512, 0), waiting=(Address((0, 7), 0, 5, 5), Address((0, 9), 3, 8, 5)))
    >>> Stand.from_list(stand.as_list()) == stand
    True
    """

    epoch: int
    cursor: Cursor
    waiting: tuple[Address, ...] = ()  # in the order of reading
    offset: int = 0  # how many tokens of the first one are packed; above 0 with split_across_pack only

    @property
    def buffered(self) -> int:
        """Tokens that wait."""
        return sum(address.tokens for address in self.waiting) - self.offset

    def as_list(self) -> list[Any]:
        """Return plain values."""
        addresses = [each.as_list() for each in joined(self.waiting)]
        return [self.epoch, list(self.cursor), addresses, self.offset]

    @classmethod
    def from_list(cls, found: Sequence[Any]) -> Stand:
        """Invert `as_list`."""
        epoch, cursor, waiting, offset = found
        return cls(epoch, tuple(cursor), tuple(map(Address.from_list, waiting)), offset)


class OpenWindow(NamedTuple):
    """A balance window of which packs wait to be handed out: a resume plans its packs again."""

    begin: Stand
    tokens_in: int  # of the ledger at its beginning
    handed_out: int = 0  # packs


@dataclass(slots=True)
class LaneState:
    """State of a lane between two packs. It holds no tokens, only where to read them again.

    A resume opens the source at the cursor of ``stand``, and reads again the rows of what waits, by their ids. With a
    ``window``, it begins there, plans the packs of the window again, and leaves out those that were handed out.

    >>> state = LaneState(Stand(epoch=0, cursor=(2, 512, 0)), ledger=Ledger())
    >>> LaneState.from_dict(state.as_dict()) == state
    True
    """

    stand: Stand  # with a window, behind all of its packs
    ledger: Ledger  # of all packs that were handed out, and of all rows that were read
    done: bool = False  # whether the epoch is used up
    packs: int = 0  # handed out in this epoch; with an endless stream, since the beginning
    window: OpenWindow | None = None
    source_stats: tuple[SourceStats, ...] = ()  # one entry for each source of a mixture
    # Bad records of the newest pass over each source; empty if there are none.
    bad_in_pass: tuple[int, ...] = ()
    # Whether the lane reads on behind a run with other settings, and has made no pack since.
    anew: bool = False

    @property
    def begin(self) -> Stand:
        """Where a resume begins to read."""
        return self.stand if self.window is None else self.window.begin

    @property
    def epoch(self) -> int:
        """The epoch that the lane reads."""
        return self.stand.epoch

    def closed(self) -> LaneState:
        """Return the state behind an open window, of which the packs that were not handed out are dropped.

        That is where other packs would be planned: of other files, sources, weights or settings.
        """
        if self.window is None:
            return self
        ledger = self.ledger.copy()
        ledger.drop("removed", ledger.buffered - self.stand.buffered, samples=0)
        return replace(self, ledger=ledger, window=None)

    def behind(self) -> LaneState:
        """Return the state of a lane that reads on behind this one with other settings, and counts from zero.

        Of what waits, the rows of which nothing was packed are encoded anew, also what other settings had cut off; the
        rest of the others is left out and counted, and so are the packs of an open window.
        """
        stand, waiting = self.stand, joined(self.stand.waiting)
        whole = [
            each._replace(total=0)
            for i, each in enumerate(waiting)
            if each.total in (0, each.tokens) and (i or not stand.offset)
        ]
        ledger = Ledger(tokens_in=self.ledger.buffered)
        lost = ledger.tokens_in - sum(each.tokens for each in whole)
        ledger.drop("removed", lost, samples=len(waiting) - len(whole))
        return LaneState(
            Stand(stand.epoch, stand.cursor, tuple(whole)),
            ledger,
            done=self.done,
            source_stats=tuple(SourceStats() for _ in self.source_stats),
            anew=True,
        )

    def moved(self, row_id: Moved, cursor: Callable[[Cursor], Cursor]) -> LaneState:
        """Return the state for a corpus in which rows have other ids, and reading goes on at other cursors.

        What waited of rows that are gone (``row_id`` returns None) is dropped and counted. So is what is left
        of an open window that one of them was planned for.
        """
        if self.window is not None and None in [row_id(each.row_id) for each in self.window.begin.waiting]:
            return self.closed().moved(row_id, cursor)
        ledger, stand = self.ledger.copy(), self.stand
        kept, offset = [], stand.offset
        for i, each in enumerate(joined(stand.waiting)):
            if (now := row_id(each.row_id)) is not None:
                kept.append(each._replace(row_id=now))
                continue
            ledger.drop("removed", each.tokens - (0 if i else offset))
            offset = offset if i else 0
        stand = replace(stand, cursor=cursor(stand.cursor), waiting=tuple(kept), offset=offset)
        if (window := self.window) is not None:
            begin = window.begin
            waiting = tuple(each._replace(row_id=row_id(each.row_id) or ()) for each in begin.waiting)
            begin = replace(begin, cursor=cursor(begin.cursor), waiting=waiting)
            window = window._replace(begin=begin)
        return replace(self, stand=stand, ledger=ledger, window=window)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, which ``torch.load(weights_only=True)`` takes."""
        often = {
            "stand": self.stand.as_list(),
            "ledger": self.ledger.numbers(),
            "done": self.done,
            "packs": self.packs,
            "source_stats": [stats.numbers() for stats in self.source_stats],
        }
        seldom = {
            "window": self.window and [*self.window.begin.as_list(), *self.window[1:]],
            "bad_in_pass": list(self.bad_in_pass),
            "anew": self.anew,
        }
        # Nearly all states have none of these, and they shall be small.
        return often | {name: value for name, value in seldom.items() if value}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> LaneState:
        """Invert `as_dict`."""
        window = found.get("window")
        return cls(
            Stand.from_list(found["stand"]),
            Ledger.from_numbers(found["ledger"]),
            found["done"],
            found["packs"],
            window and OpenWindow(Stand.from_list(window[:4]), *window[4:]),
            tuple(SourceStats(*numbers) for numbers in found["source_stats"]),
            tuple(found.get("bad_in_pass", ())),
            found.get("anew", False),
        )


@dataclass(slots=True)
class LaneEvent:
    """A pack of a lane or the end of its epoch, and the state to resume from after it."""

    lane: int
    epoch: int  # always 0 if epochs follow one another without an end
    pack: Pack | None  # None at the end of the lane's epoch
    state: LaneState


def joined(waiting: Iterable[Address]) -> list[Address]:
    """Join the addresses of pieces that follow one another in their row.

    >>> joined([Address((0,), 0, 4, 8), Address((0,), 4, 8, 8), Address((1,), 0, 2, 2)])
    [Address(row_id=(0,), start=0, stop=8, total=8), Address(row_id=(1,), start=0, stop=2, total=2)]
    """
    found: list[Address] = []
    for each in waiting:
        if found and each.start and found[-1].row_id == each.row_id and found[-1].stop == each.start:
            found[-1] = found[-1]._replace(stop=each.stop)
        else:
            found.append(each)
    return found
