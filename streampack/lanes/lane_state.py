"""The state of a lane, from which it resumes: the position of its reader, and what is read and not packed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from streampack.accounting import Ledger, SourceStats
from streampack.types import Cursor, Pack, RowId

Remap = Callable[[RowId], RowId | None]
"""Returns the id that a row has in a corpus that has changed; None if it is gone."""

Snapshot = dict[str, Any]
"""A lane between two packs, as plain values: `Lane.snapshot` makes it, `LaneState.from_dict` parses it."""

PlainAddress = Sequence[int]
"""An `Address` as plain values: ``(*row_id, -total)`` for an unsplit sample, else ``(*row_id, start, stop, total)``."""


class Address(NamedTuple):
    """Where to find buffered pieces: tokens ``[start, stop)`` of the sample that a row became.

    All pieces of the sample have ``total`` tokens. 0 means that the row is to be encoded again with other settings.
    """

    row_id: RowId
    start: int
    stop: int
    total: int

    @property
    def tokens(self) -> int:
        """Number of tokens at this address."""
        return self.stop - self.start

    def plain(self) -> list[int]:
        """Return plain values."""
        unsplit = (
            self.start == 0 and 0 < self.total == self.stop
        )  # a piece that lost its beginning starts later
        return [*self.row_id, -self.total] if unsplit else [*self.row_id, *self[1:]]

    @classmethod
    def parsed(cls, numbers: PlainAddress) -> Address:
        """Invert `plain`."""
        if (last := numbers[-1]) < 0:
            return cls(tuple(numbers[:-1]), 0, -last, -last)
        return cls(tuple(numbers[:-3]), *numbers[-3:])


@dataclass(frozen=True, slots=True)
class ReaderSnapshot:
    """Position of a lane's reader, and what it has read that is not packed.

    >>> found = ReaderSnapshot(epoch=0, cursor=(2, 512, 0), waiting=(Address((0, 7), 0, 5, 5),), offset=2)
    >>> ReaderSnapshot.parsed(found.plain()) == found
    True
    """

    epoch: int
    cursor: Cursor
    waiting: tuple[Address, ...] = ()  # in the order of reading
    offset: int = 0  # how many tokens of the first one are packed; above 0 with split_across_pack only

    @property
    def buffered(self) -> int:
        """Number of tokens that are read and not packed."""
        return sum(address.tokens for address in self.waiting) - self.offset

    def plain(self) -> list[Any]:
        """Return plain values."""
        return [self.epoch, list(self.cursor), [each.plain() for each in self.waiting], self.offset]

    @classmethod
    def parsed(cls, found: Sequence[Any]) -> ReaderSnapshot:
        """Invert `plain`."""
        epoch, cursor, waiting, offset = found
        return cls(epoch, tuple(cursor), tuple(map(Address.parsed, waiting)), offset)


class OpenWindow(NamedTuple):
    """A balance window whose packs are not all emitted; a resume plans its packs again."""

    begin: ReaderSnapshot
    tokens_in: int  # of the ledger at its beginning
    emitted: int = 0  # packs


@dataclass(slots=True)
class LaneState:
    """State of a lane between two packs. It holds no tokens, only where to read them again.

    A resume opens the source at the reader's cursor, and fetches the rows of buffered pieces by their ids. With a
    ``window``, it begins at the beginning of the window, plans its packs again, and skips those that were emitted.

    >>> state = LaneState(ReaderSnapshot(epoch=0, cursor=(2, 512, 0)), ledger=Ledger())
    >>> LaneState.from_dict(state.as_dict()) == state
    True
    """

    reader: ReaderSnapshot  # with a window, after all of its packs
    ledger: Ledger  # of all packs that were emitted, and of all rows that were read
    done: bool = False  # whether the epoch is used up
    packs: int = 0  # emitted in this epoch; with an endless stream, since the beginning
    window: OpenWindow | None = None
    source_stats: tuple[SourceStats, ...] = ()  # one entry for each source of a mixture
    # Bad records of the newest pass over each source; empty if there are none.
    bad_in_pass: tuple[int, ...] = ()
    # Whether the lane continues a run that had other settings, and has made no pack since.
    restart: bool = False

    @property
    def begin(self) -> ReaderSnapshot:
        """Where a resume begins to read."""
        return self.reader if self.window is None else self.window.begin

    @property
    def epoch(self) -> int:
        """The epoch that the lane reads."""
        return self.reader.epoch

    def closed(self) -> LaneState:
        """Return the state after an open balance window; its unemitted packs are dropped.

        That is needed where other packs would be planned: of other files, sources, weights or settings.
        """
        if self.window is None:
            return self
        ledger = deepcopy(self.ledger)
        ledger.drop("removed", ledger.buffered - self.reader.buffered, samples=0)
        return replace(self, ledger=ledger, window=None)

    def restarted(self) -> LaneState:
        """Return the state of a lane that continues after this one with other settings, and counts from zero.

        Buffered rows are encoded again if none of their tokens is packed, with what other settings had cut off. The
        rest of the others is dropped and counted, and so are the packs of an open window.
        """
        reader, waiting = self.reader, self.reader.waiting
        unsplit = [
            each._replace(total=0)
            for i, each in enumerate(waiting)
            if each.total in (0, each.tokens) and (i or not reader.offset)
        ]
        ledger = Ledger(tokens_in=self.ledger.buffered)
        lost = ledger.tokens_in - sum(each.tokens for each in unsplit)
        ledger.drop("removed", lost, samples=len(waiting) - len(unsplit))
        return LaneState(
            ReaderSnapshot(reader.epoch, reader.cursor, tuple(unsplit)),
            ledger,
            done=self.done,
            source_stats=tuple(SourceStats() for _ in self.source_stats),
            restart=True,
        )

    def remapped(self, row_id: Remap, cursor: Callable[[Cursor], Cursor]) -> LaneState:
        """Return the state for a corpus in which rows have other ids, and reading continues at other cursors.

        Buffered pieces of rows that are gone (``row_id`` returns None) are dropped and counted. So is the rest of an
        open window that one of them was planned for.
        """
        if self.window is not None and None in [row_id(each.row_id) for each in self.window.begin.waiting]:
            return self.closed().remapped(row_id, cursor)
        ledger, reader = deepcopy(self.ledger), self.reader
        kept, offset = [], reader.offset
        for i, each in enumerate(reader.waiting):
            if (now := row_id(each.row_id)) is not None:
                kept.append(each._replace(row_id=now))
                continue
            ledger.drop("removed", each.tokens - (0 if i else offset))
            offset = offset if i else 0
        reader = replace(reader, cursor=cursor(reader.cursor), waiting=tuple(kept), offset=offset)
        if (window := self.window) is not None:
            begin = window.begin
            waiting = tuple(each._replace(row_id=row_id(each.row_id) or ()) for each in begin.waiting)
            begin = replace(begin, cursor=cursor(begin.cursor), waiting=waiting)
            window = window._replace(begin=begin)
        return replace(self, reader=reader, ledger=ledger, window=window)

    def as_dict(self) -> Snapshot:
        """Return plain values, which ``torch.load(weights_only=True)`` takes."""
        window = self.window and (*self.window.begin.plain(), *self.window[1:])
        return snapshot_of(
            self.reader.plain(),
            ledger=self.ledger.numbers(),
            done=self.done,
            packs=self.packs,
            source_stats=[stats.numbers() for stats in self.source_stats],
            window=window,
            bad_in_pass=self.bad_in_pass,
            restart=self.restart,
        )

    @classmethod
    def from_dict(cls, found: Snapshot) -> LaneState:
        """Invert `as_dict`."""
        window = found.get("window")
        return cls(
            ReaderSnapshot.parsed(found["reader"]),
            Ledger.from_numbers(found["ledger"]),
            found["done"],
            found["packs"],
            window and OpenWindow(ReaderSnapshot.parsed(window[:4]), *window[4:]),
            tuple(SourceStats(*numbers) for numbers in found["source_stats"]),
            tuple(found.get("bad_in_pass", ())),
            found.get("restart", False),
        )


@dataclass(slots=True)
class LaneEvent:
    """A pack of a lane or the end of its epoch, and the state to resume from after it."""

    lane: int
    epoch: int  # always 0 if epochs follow one another without an end
    pack: Pack | None  # None at the end of the lane's epoch
    state: Snapshot
    example: str = ""  # what is wrong with the first sample that trains nothing, see `Ledger.example`


def snapshot_of(
    reader: Sequence[Any],
    *,
    ledger: list[int],
    done: bool,
    packs: int,
    source_stats: Sequence[Sequence[float]],
    window: Sequence[Any] | None,
    bad_in_pass: Sequence[int],
    restart: bool = False,
) -> Snapshot:
    """Return the plain values of a lane. States are small: values that nearly all lack are absent."""
    found: Snapshot = {
        "reader": reader, "ledger": ledger, "done": done, "packs": packs, "source_stats": source_stats,
    }  # fmt: skip
    if window is not None:
        found["window"] = window
    if any(bad_in_pass):
        found["bad_in_pass"] = list(bad_in_pass)
    if restart:
        found["restart"] = restart
    return found


def saved(found: Snapshot) -> Snapshot:
    """Return what is saved of a snapshot: lists, in which pieces of one sample are one address."""
    made = {**found, "reader": plain_reader(found["reader"])}
    if "window" in found:
        made["window"] = [*plain_reader(found["window"][:4]), *found["window"][4:]]
    return made


def plain_reader(found: Sequence[Any]) -> list[Any]:
    """Return the plain values of a reader as they are saved."""
    epoch, cursor, waiting, offset = found
    return [epoch, list(cursor), joined(waiting), offset]


def joined(waiting: Iterable[PlainAddress]) -> list[list[int]]:
    """Join the addresses of pieces that follow one another in their sample.

    >>> joined([(0, 0, 4, 8), (0, 4, 8, 8), (1, -2)])
    [[0, -8], [1, -2]]
    """
    found: list[Address] = []
    for each in map(Address.parsed, waiting):
        if found and each.start and found[-1].row_id == each.row_id and found[-1].stop == each.start:
            found[-1] = found[-1]._replace(stop=each.stop)
        else:
            found.append(each)
    return [each.plain() for each in found]
