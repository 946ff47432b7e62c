"""The state of a lane, from which it resumes: a few integers, a plain dict in a checkpoint."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from streampack.accounting import Ledger, SourceStats
from streampack.types import Cursor, Pack

SELDOM = ("anew", "whole", "bad_in_pass")
"""Fields of a lane state that its dict leaves out where they are False or empty."""
DAMAGED = "; the state of this lane is damaged, resume from another checkpoint"


@dataclass(frozen=True, slots=True)
class OpenWindow:
    """Where a lane stood when it planned the packs of its open window, see `pack_windows.PackWindows`.

    A resume plans them again from there, and leaves out those that were handed out.
    """

    packs: int  # made in this epoch before the window
    next_piece: int  # the number of the next piece to be read
    consumed: int  # bit i is set if piece ``first + i`` was consumed

    def as_list(self) -> list[Any]:
        """Return plain values, for `LaneState.as_dict`."""
        return [self.packs, self.next_piece, f"{self.consumed:x}"]


@dataclass(slots=True)
class LaneState:
    """State of a lane between two packs. It holds no tokens, only where to read them again.

    A resume opens the source at ``cursor`` of ``epoch``, which is the row of the oldest waiting piece. It numbers the
    pieces that it reads from ``first`` on, and skips those whose bit in ``consumed`` is set. When it reaches
    ``next_piece``, the lane stands where it stood. ``rows`` and ``windows`` say which rows to read on this way, and
    how many pieces each made, also where files or sources were removed since.

    >>> state = LaneState(
    ...     packs=3, done=False, epoch=0, cursor=(2, 512, 0), first=40, offset=0, next_piece=42, consumed=0b10,
    ...     ledger=Ledger(),
    ... )
    >>> LaneState.from_dict(state.as_dict()) == state
    True
    """

    packs: int  # made in this epoch
    done: bool  # whether the epoch is used up
    epoch: int
    cursor: Cursor
    first: int  # the number of the first piece of the row at ``cursor``
    offset: int  # how many tokens of the oldest waiting piece are packed; above 0 with split_across_pack only
    next_piece: int  # the number that the next piece to be read will get
    # Bit i is set if piece ``first + i`` is packed or dropped, of a piece in several packs if the first one of them is.
    consumed: int
    ledger: Ledger  # of all packs so far
    rows: int = 0  # the digits of a `RowLog` of these pieces
    # The later epochs of these pieces: (number of the first piece after ``first``, epoch).
    epochs: tuple[tuple[int, int], ...] = ()
    # The windows that these pieces were read from, and that are being read: (source, number of the first piece after
    # ``first``, `Window.numbers`).
    windows: tuple[tuple[int, int, tuple[int, ...]], ...] = ()
    front: tuple[int, ...] = ()  # see `Reader.front`; where the lane stands, not at ``cursor``
    source_stats: tuple[SourceStats, ...] = ()  # one entry for each source of a mixture
    reached: int = 0  # a checksum of `Reader.reached` when the state was made; 0 at the end of an epoch
    bad_shards: tuple[int, ...] = ()  # checksums of the names of the bad shards that the lane left out
    # Bad records of the newest pass over each source; empty if there are none.
    bad_in_pass: tuple[int, ...] = ()
    # With ``balance_window``, while a window is open. Then ``cursor``, ``epoch``, ``first`` and ``offset`` are those of
    # its beginning, and all else is as it is now.
    open_window: OpenWindow | None = None
    # Whether the pieces are those of other settings, see `behind`. Then all but the ledger and ``packs`` count those.
    anew: bool = False
    # Whether the last row that was read has no piece that was not asked for. Where samples are never split, none has.
    whole: bool = False

    @property
    def spared(self) -> int:
        """The pieces that a resume need not make again: bit i stands for piece ``first + i``."""
        return self.consumed if self.open_window is None else self.open_window.consumed

    def closed(self) -> LaneState:
        """Return the state without an open window: its packs that were not handed out are planned anew.

        Of a piece that begins in one pack and ends in another, of which one was handed out, the rest is lost.
        """
        if self.open_window is None:
            return self
        oldest = lowest_zero(self.open_window.consumed)
        offset = 0 if self.consumed >> oldest & 1 else self.offset
        return replace(self, offset=offset, open_window=None)

    def behind(self, *, same_tokens: bool = True) -> LaneState:
        """Return the state of a lane that reads on behind this one with other settings, and counts from zero.

        A resume makes new pieces of the rows of which nothing was packed. If the encoder makes the ``same_tokens``, the
        ledger begins with those that wait, by which the resume knows how many are left out.
        """
        ledger = Ledger(tokens_in=self.ledger.buffered if same_tokens else 0)
        stats = tuple(SourceStats() for _ in self.source_stats)
        return replace(self.closed(), packs=0, ledger=ledger, source_stats=stats, bad_in_pass=(), anew=True)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, which ``torch.load(weights_only=True)`` takes; long integers in hexadecimal digits.

        (`torch.load` refuses integers of more than 2,040 bits.)
        """
        found: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        found["cursor"] = [int(number) for number in self.cursor]
        found["consumed"], found["rows"] = f"{self.consumed:x}", f"{self.rows:x}"
        found["epochs"] = [list(pair) for pair in self.epochs]
        found["windows"] = [[source, number, *numbers] for source, number, numbers in self.windows]
        found["front"] = list(self.front)
        found["ledger"] = self.ledger.numbers()
        found["source_stats"] = [stats.numbers() for stats in self.source_stats]
        found["bad_shards"] = list(self.bad_shards)
        found["bad_in_pass"] = list(self.bad_in_pass)
        found["open_window"] = [] if self.open_window is None else self.open_window.as_list()
        for name in SELDOM:
            if not found[name]:  # as in nearly all states, which shall be small
                del found[name]
        return {**found, "checksum": _checksum(found)}

    @classmethod
    def from_dict(cls, found: object) -> LaneState:
        """Make a lane state from the dict that `as_dict` returned.

        Raises:
            ValueError: if it is not the state of a lane, or a damaged one.
        """
        names = {f.name for f in fields(cls)}
        if isinstance(found, Mapping):
            names -= {name for name in SELDOM if name not in found}
        if not isinstance(found, Mapping) or set(found) != names | {"checksum"}:
            raise ValueError(
                f"a lane's state is a dict of {', '.join(sorted(names))}, and here it is not" + DAMAGED
            )
        values: dict[str, Any] = {name: found[name] for name in names}
        for name in ("packs", "epoch", "first", "offset", "next_piece", "reached", "checksum"):
            _require_counts([found[name]], name, 1)
        _require_counts(values["cursor"], "cursor")
        _require_counts(values["bad_shards"], "bad_shards")
        _require_counts(values.get("bad_in_pass", []), "bad_in_pass")
        _require_counts(values["front"], "front")
        _require_counts(values["ledger"], "ledger", len(Ledger().numbers()))
        for name in ("done", "anew", "whole"):
            if type(values.get(name, False)) is not bool:
                raise ValueError(f"{name} is no bool" + DAMAGED)
        for name, size in (("source_stats", len(fields(SourceStats))), ("epochs", 2), ("windows", None)):
            if type(values[name]) is not list:
                raise ValueError(f"{name} is no list" + DAMAGED)
            for numbers in values[name]:
                _require_counts(numbers, name, size)
        consumed, rows = _hexadecimal(values, "consumed"), _hexadecimal(values, "rows")
        if found["checksum"] != _checksum(values):
            raise ValueError("the checksum is wrong" + DAMAGED)
        span = values["next_piece"] - values["first"]
        if consumed.bit_length() > span:
            raise ValueError(f"consumed marks {consumed.bit_length()} pieces of {span}" + DAMAGED)
        values["open_window"] = _open_window(values)
        if any(len(numbers) < 4 for numbers in values["windows"]):
            raise ValueError("a window has too few numbers" + DAMAGED)
        values |= {"cursor": tuple(values["cursor"]), "consumed": consumed, "rows": rows}
        values["windows"] = tuple(
            (source, number, tuple(numbers)) for source, number, *numbers in values["windows"]
        )
        values["epochs"] = tuple((number, epoch) for number, epoch in values["epochs"])
        values["front"] = tuple(values["front"])
        values["ledger"] = Ledger.from_numbers(values["ledger"])
        values["bad_shards"] = tuple(values["bad_shards"])
        values["bad_in_pass"] = tuple(values.get("bad_in_pass", ()))
        values["source_stats"] = tuple(SourceStats(*stats) for stats in values["source_stats"])
        return cls(**values)


@dataclass(slots=True)
class LaneEvent:
    """A pack of a lane or the end of its epoch, and the state to resume from after it."""

    lane: int
    epoch: int  # always 0 if epochs follow one another without an end
    pack: Pack | None  # None at the end of the lane's epoch
    state: LaneState


def as_dicts(states: Mapping[int, LaneState]) -> dict[int, dict[str, Any]]:
    """Return the states of some lanes as a checkpoint holds them."""
    return {lane: state.as_dict() for lane, state in states.items()}


def lowest_zero(bits: int) -> int:
    """Return the place of the lowest bit that is not set.

    >>> lowest_zero(0b1011)
    2
    """
    # Adding 1 sets that bit and clears those below it.
    return (~bits & bits + 1).bit_length() - 1


def _open_window(values: Mapping[str, Any]) -> OpenWindow | None:
    """Check the open window in a lane's state, which may hold anything."""
    found = values["open_window"]
    if found == [] and type(found) is list:
        return None
    if type(found) is not list or len(found) != 3:
        raise ValueError("open_window has not three numbers" + DAMAGED)
    _require_counts(found[:2], "open_window")
    window = OpenWindow(found[0], found[1], _hexadecimal({"open_window": found[2]}, "open_window"))
    first, next_piece = values["first"], values["next_piece"]
    if not (window.packs < values["packs"] and first <= window.next_piece <= next_piece):
        raise ValueError("open_window does not lie before the state" + DAMAGED)
    if window.consumed.bit_length() > window.next_piece - first:
        raise ValueError("open_window marks pieces that were not read" + DAMAGED)
    return window


def _require_counts(found: Any, name: str, size: int | None = None) -> None:
    right_size = isinstance(found, list) and (size is None or len(found) == size)
    if not (right_size and all(type(number) is int and 0 <= number < 2**63 for number in found)):
        raise ValueError(f"{name} holds something else than counts below 2**63" + DAMAGED)


def _hexadecimal(values: Mapping[str, Any], name: str) -> int:
    try:
        number = int(values[name], 16)
    except (TypeError, ValueError):
        raise ValueError(f"{name} is no hexadecimal number" + DAMAGED) from None
    if number < 0:
        raise ValueError(f"{name} is below 0" + DAMAGED)
    return number


def _checksum(values: Mapping[str, Any]) -> int:
    return zlib.crc32(repr(sorted(values.items())).encode(errors="replace"))
