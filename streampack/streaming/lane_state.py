"""The few numbers from which a lane continues after a given pack; bytes, in a state."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from streampack.accounting import Ledger, SourceStats
from streampack.types import Cursor, ReceiptNumbers

VERSION = 3
LEDGER, TALLY = len(Ledger().numbers()), len(SourceStats().numbers())  # numbers of each
UNTRAINED = Ledger(untrained=1).numbers().index(1)  # which of the ledger's numbers counts untrained samples


class Receipt(NamedTuple):
    """State of a lane between two packs; no tokens, only where to read them again.

    A resume opens the source at ``cursor`` of ``epoch``, the row of the oldest waiting piece, numbers
    pieces from ``first`` on, skips those whose bit in ``consumed`` is set, and is where it was when it reaches
    ``next_piece``.

    >>> receipt = Receipt(3, False, 0, (2, 512, 0), 40, 0, 42, 0b10, Ledger())
    >>> Receipt.from_bytes(receipt.to_bytes()) == receipt == Receipt.from_numbers(receipt.numbers())
    True
    """

    packs: int  # so far in this epoch
    done: bool  # the epoch is used up
    epoch: int
    cursor: Cursor
    first: int  # number of the first piece of the row at cursor
    offset: int  # tokens of the oldest waiting piece that are packed (splitting only)
    next_piece: int  # the number that the next piece pulled will get
    consumed: int  # bit i: piece first + i is packed or dropped
    ledger: Ledger  # as of next_piece
    source_stats: tuple[SourceStats, ...] = ()  # the same of every source of a mixture

    def numbers(self) -> ReceiptNumbers:
        """All of it, flat; what the ledger counts later changes nothing in it."""
        packs, done, epoch, cursor, first, offset, next_piece, consumed, ledger, source_stats = self
        counts = [number for stats in source_stats for number in stats.numbers()] if source_stats else ()
        span = next_piece - first
        numbers = (packs, done, epoch, len(cursor), *cursor, first, offset, span, *ledger.numbers())
        return (*numbers, len(source_stats), *counts), consumed.to_bytes(
            (consumed.bit_length() + 7) // 8, "little"
        )

    @classmethod
    def from_numbers(cls, numbers: ReceiptNumbers) -> Receipt:
        """The inverse of `numbers`."""
        (packs, done, epoch, places, *rest), consumed = numbers
        cursor, (first, offset, span, *counts) = tuple(rest[:places]), rest[places:]
        source_stats = [counts[i : i + TALLY] for i in range(LEDGER + 1, len(counts), TALLY)]
        return cls(
            packs,
            bool(done),
            epoch,
            cursor,
            first,
            offset,
            first + span,
            int.from_bytes(consumed, "little"),
            Ledger.from_numbers(counts[:LEDGER]),
            tuple(SourceStats(*stats) for stats in source_stats),
        )

    def to_bytes(self) -> bytes:
        """Variable-length integers and a checksum."""
        return _encoded(self.numbers())

    @classmethod
    def from_bytes(cls, data: bytes) -> Receipt:
        """The inverse of `to_bytes`.

        Raises:
            ValueError: if the bytes are not a receipt, or not a whole one.
        """
        if (
            not isinstance(data, bytes)
            or len(data) < 5
            or zlib.crc32(data[:-4]) != int.from_bytes(data[-4:], "little")
        ):
            raise ValueError("this is no receipt of a lane, or a damaged one; resume from another checkpoint")
        numbers = _Numbers(data[:-4])
        if (version := numbers.next()) != VERSION:
            raise ValueError(f"the receipt has format {version}, this streampack reads {VERSION}")
        packs, done, epoch = numbers.next(), bool(numbers.next()), numbers.next()
        cursor = tuple(numbers.next() for _ in range(numbers.next()))
        first, offset, span = numbers.next(), numbers.next(), numbers.next()
        ledger = Ledger.from_numbers([numbers.next() for _ in range(LEDGER)])
        source_stats = tuple(
            SourceStats(*(numbers.next() for _ in range(TALLY))) for _ in range(numbers.next())
        )
        consumed = int.from_bytes(numbers.rest(), "little")
        if consumed.bit_length() > span:
            raise ValueError(f"the receipt marks {consumed.bit_length()} pieces of {span}; it is damaged")
        return cls(packs, done, epoch, cursor, first, offset, first + span, consumed, ledger, source_stats)


def untrained_samples(receipt: ReceiptNumbers) -> int:
    """Count the samples so far of which no token is trained; quicker than making a `Receipt`, for every pack."""
    numbers, _ = receipt
    return numbers[4 + numbers[3] + 3 + UNTRAINED]


def bytes_of(receipts: Mapping[int, ReceiptNumbers]) -> dict[int, bytes]:
    """The receipts of some lanes as a state holds them."""
    return {lane: _encoded(receipt) for lane, receipt in receipts.items()}


def numbers_of(receipts: Mapping[int, bytes]) -> dict[int, ReceiptNumbers]:
    """The inverse of `bytes_of`.

    Raises:
        ValueError: as `Receipt.from_bytes`.
    """
    return {lane: Receipt.from_bytes(receipt).numbers() for lane, receipt in receipts.items()}


# Kept, for who takes a state after every pack: all lanes but one stand where they stood.
@lru_cache(maxsize=4096)
def _encoded(receipt: ReceiptNumbers) -> bytes:
    numbers, consumed = receipt
    body = _varints((VERSION, *numbers)) + consumed
    return body + zlib.crc32(body).to_bytes(4, "little")


def _varints(numbers: Iterable[int]) -> bytes:
    """LEB128: seven bits a byte, lowest first, the high bit set on all but the last."""
    out = bytearray()
    for number in numbers:
        while number >= 0x80:
            out.append(number & 0x7F | 0x80)
            number >>= 7
        out.append(number)
    return bytes(out)


class _Numbers:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def next(self) -> int:
        number = shift = 0
        while True:
            if self.at >= len(self.data) or shift > 63:
                raise ValueError("the receipt ends in the middle of a number; it is damaged")
            byte = self.data[self.at]
            self.at += 1
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                return number
            shift += 7

    def rest(self) -> bytes:
        return self.data[self.at :]
