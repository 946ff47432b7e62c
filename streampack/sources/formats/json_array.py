"""Records of a JSON array, found by their brackets, so that a file is never held in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from streampack.sources.mechanics.parts import Damage, Record

QUOTE, BACKSLASH = b'"\\'
SPECIAL = bytes(int(byte in b'"\\[]{}') for byte in range(256))  # a table of `bytes.translate`
STEPS = np.zeros(256, np.int8)  # by which a byte changes the depth of brackets
STEPS[list(b"[{")], STEPS[list(b"]}")] = 1, -1
BETWEEN = b" \t\r\n,"
"""Bytes allowed between two records. An extra comma loses nothing, so it is no error."""
OBJECTS = "write an array of JSON objects"
READ_BYTES = 1 << 18  # that are looked through at a time


class Brackets:
    """Finds where the records of an array begin and end, in blocks of its bytes that follow each other.

    >>> Brackets().edges(b'{"a": "}"}, {}]')
    [0, 9, 12, 13]

    The first block begins within the array, and outside of its records. Blocks of text are searched by numpy, 1 GB in
    one to two seconds.
    """

    def __init__(self) -> None:
        self.depth = 1  # of brackets; 0 after the end of the array
        self.quoted = False
        self.escaped = False  # whether the next byte is
        self.closed: int | None = None  # the place in the last block where the array ended

    def edges(self, block: bytes) -> list[int]:
        """Return the places in the block of the first and the last byte of each record, by turns."""
        self.closed = None
        if not self.depth:
            return []
        at = np.flatnonzero(np.frombuffer(block.translate(SPECIAL), np.bool_))
        special = np.frombuffer(block, np.uint8)[at]
        quotes = (special == QUOTE) & ~self._escaped(special == BACKSLASH, at, len(block))
        inside = np.logical_xor.accumulate(quotes) ^ self.quoted
        self.quoted = bool(inside[-1]) if inside.size else self.quoted
        brackets = np.flatnonzero(~inside & (STEPS[special] != 0))
        at, steps = at[brackets], STEPS[special[brackets]]
        depths = self.depth + np.cumsum(steps, dtype=np.int64)
        if depths.size:
            self.depth = int(depths[-1])
        if (ends := np.flatnonzero(depths == 0)).size:
            end = int(ends[0])
            self.depth, self.closed = 0, int(at[end])
            at, steps, depths = at[:end], steps[:end], depths[:end]
        # A record opens to depth 2, and closes to depth 1.
        found: list[int] = at[depths + (steps < 0) == 2].tolist()
        return found

    def _escaped(self, slashes: Any, at: Any, size: int) -> Any:
        """Return which of the special bytes, which are ``at`` these places, are escaped by a backslash before them."""
        first, self.escaped = self.escaped, False
        escaped = np.zeros(at.size, np.bool_)
        if not at.size:
            return escaped
        escaped[1:] = slashes[:-1] & (at[1:] == at[:-1] + 1)
        escaped[0] = first and at[0] == 0
        if (
            slashes & escaped
        ).any():  # of backslashes that follow each other, every second one is escaped itself
            numbers = np.arange(at.size)
            begins = np.maximum.accumulate(np.where(escaped, -1, numbers))
            escaped &= (numbers - begins) % 2 == 1
        self.escaped = bool(slashes[-1] and not escaped[-1] and at[-1] == size - 1)
        return escaped


def starts_after(blocks: Iterable[bytes], at: int, places: Sequence[int], *, end: int) -> list[int]:
    """Return for each of some places, which rise, where the next record of an array begins; ``end`` if none does.

    ``blocks`` are the bytes of the array from ``at`` on, after its first bracket.
    """
    brackets, found, within = Brackets(), list[int](), 0
    for block in blocks:
        edges = brackets.edges(block)
        starts = at + np.asarray(edges[within::2], np.int64)
        within = (within + len(edges)) % 2
        upto = np.searchsorted(places, starts[-1], side="right") if starts.size else 0
        found += starts[np.searchsorted(starts, places[len(found) : upto])].tolist()
        at += len(block)
        if len(found) == len(places):
            break
    return found + [end] * (len(places) - len(found))


def array_records(stream: Any, at: int, stop: int | None, *, longest: int) -> Iterator[Record]:
    """Yield the records of an array that begin before byte ``stop``, from a stream that is at byte ``at`` of the file.

    Anything else between them, such as a number, and a record of more than ``longest`` bytes are bad records.

    Raises:
        Damage: if the file ends within the array, or continues after its end.
    """
    brackets, held, base = Brackets(), bytearray(), at  # the bytes held begin at byte `base`
    begin, done = None, at  # where the current record begins, and where the last one ended
    while block := stream.read1(READ_BYTES):
        first, at = at, at + len(block)
        held += block
        for place in brackets.edges(block):
            if begin is None:
                begin = first + place
                yield from _between(held, base, done, begin if stop is None else min(begin, stop))
                if stop is not None and begin >= stop:
                    return
                continue
            end = first + place + 1
            long = base > begin or end - begin > longest  # of what is too long, the beginning is not held
            yield (
                begin,
                _too_long(begin, longest, end) if long else bytes(held[begin - base : end - base]),
                end,
            )
            del held[: end - base]
            base = done = end
            begin = None
        if brackets.closed is not None:
            end = first + brackets.closed
            yield from _between(held, base, done, end)
            if held[end + 1 - base :].strip() or stream.read1(READ_BYTES).strip():
                raise Damage("more follows after the end of its array; write one array", offset=end + 1)
            return
        if begin is None and at - done > longest:
            raise Damage(f"no record begins within {longest:,} bytes; {OBJECTS}", offset=done)
        if len(held) > longest:
            held.clear()
            base = at
    where = done if begin is None else begin
    raise Damage(
        f"its array has no end: the file was cut off, or the record at byte {where:,} lacks a quote or bracket",
        offset=where,
    )


def _between(held: bytearray, base: int, start: int, stop: int) -> Iterator[Record]:
    """Yield a bad record if anything is between two records but a comma."""
    if other := held[max(0, start - base) : stop - base].strip(BETWEEN):
        shown = other[:40].decode(errors="replace")
        yield start, Damage(f"{shown} is no record; {OBJECTS}", offset=start, resume=stop), stop


def _too_long(begin: int, longest: int, end: int) -> Damage:
    what = f"the record is longer than max_line_bytes={longest}; write it shorter, or raise that"
    return Damage(what, offset=begin, resume=end)
