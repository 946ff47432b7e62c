from __future__ import annotations

import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack import Ledger
from streampack.accounting import DROP_REASONS, SourceStats
from streampack.streaming.lane_state import VERSION, Receipt, bytes_of, numbers_of

counts = st.integers(0, 2**62)


@st.composite
def ledgers(draw: st.DrawFn) -> Ledger:
    return Ledger(
        *(draw(counts) for _ in range(6)),
        {reason: draw(counts) for reason in DROP_REASONS},
        {reason: draw(counts) for reason in DROP_REASONS},
    )


@st.composite
def receipts(draw: st.DrawFn) -> Receipt:
    first, span = draw(counts), draw(st.integers(0, 300))
    return Receipt(
        packs=draw(counts),
        done=draw(st.booleans()),
        epoch=draw(counts),
        cursor=tuple(draw(st.lists(counts, max_size=6))),
        first=first,
        offset=draw(counts),
        next_piece=first + span,
        consumed=draw(st.integers(0, 2**span - 1)),
        ledger=draw(ledgers()),
        source_stats=tuple(
            SourceStats(*numbers) for numbers in draw(st.lists(st.tuples(*[counts] * 5), max_size=4))
        ),
    )


TYPICAL = Receipt(
    packs=1234,
    done=False,
    epoch=1,
    cursor=(12, 734_003_200, 1999),
    first=1_250_000,
    offset=0,
    next_piece=1_250_090,
    consumed=(1 << 88) - 5,
    ledger=Ledger(samples=1_250_090, tokens_in=543_789_150, packs=1234, slots=5_054_464, packed=5_054_000),
)


@given(receipts())
def test_round_trip(receipt: Receipt) -> None:
    assert Receipt.from_numbers(receipt.numbers()) == receipt
    data = receipt.to_bytes()
    assert isinstance(data, bytes)
    assert Receipt.from_bytes(data) == receipt
    assert Receipt.from_bytes(data).to_bytes() == data


def test_the_bytes_stay_as_they_are() -> None:
    """States lie on disks: with the same version come the same bytes."""
    assert VERSION == 3
    assert TYPICAL.to_bytes().hex() == (
        "03d2090001030c808080de02cf0fd0a54c005aaaa64cdea0a68302d20980c0b402b0bcb40200000000000000"
        "0000000000fbffffffffffffffffffff46567c7c"
    )
    mixed = TYPICAL._replace(done=True, source_stats=(SourceStats(1, 2, 300, 4, 5),))
    assert mixed.to_bytes().hex() == (
        "03d2090101030c808080de02cf0fd0a54c005aaaa64cdea0a68302d20980c0b402b0bcb40200000000000000"
        "00000000010102ac020405fbffffffffffffffffffff319b9b28"
    )


@settings(max_examples=20)
@given(receipts())
def test_every_truncation_is_seen(receipt: Receipt) -> None:
    data = receipt.to_bytes()
    for length in range(len(data)):
        for part in (data[:length], data[len(data) - length :]):
            with pytest.raises(
                ValueError, match="this is no receipt of a lane, or a damaged one; resume from another"
            ):
                Receipt.from_bytes(part)


@settings(max_examples=20)
@given(receipts())
def test_every_flipped_bit_is_seen(receipt: Receipt) -> None:
    data = receipt.to_bytes()
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match="this is no receipt"):
            Receipt.from_bytes(bytes(flipped))


@given(st.binary(max_size=80))
def test_a_valid_checksum_over_nonsense_is_no_crash(body: bytes) -> None:
    """Only ValueError, or a receipt: nothing else comes out of any bytes."""
    data = bytes([VERSION]) + body
    data += zlib.crc32(data).to_bytes(4, "little")
    try:
        receipt = Receipt.from_bytes(data)
    except ValueError:
        return
    assert receipt.consumed.bit_length() <= receipt.next_piece - receipt.first


@pytest.mark.parametrize("value", [None, 3, "text", b"", b"four", bytearray(TYPICAL.to_bytes()), {}])
def test_what_is_no_receipt(value: object) -> None:
    with pytest.raises(ValueError, match="this is no receipt of a lane"):
        Receipt.from_bytes(value)  # type: ignore[arg-type]


def sealed(body: bytes) -> bytes:
    return body + zlib.crc32(body).to_bytes(4, "little")


def test_another_format_is_named() -> None:
    with pytest.raises(ValueError) as error:
        Receipt.from_bytes(sealed(bytes([VERSION + 1]) + TYPICAL.to_bytes()[1:-4]))
    assert str(error.value) == f"the receipt has format {VERSION + 1}, this streampack reads {VERSION}"


def test_damage_below_a_right_checksum_is_named() -> None:
    body = TYPICAL.to_bytes()[:-4]
    with pytest.raises(ValueError, match="ends in the middle of a number"):
        Receipt.from_bytes(sealed(body[:9]))
    with pytest.raises(ValueError, match="marks 104 pieces of 90; it is damaged"):
        Receipt.from_bytes(sealed(body + b"\xff\xff"[: 104 // 8 - 11]))


def test_size_is_some_tens_of_bytes() -> None:
    """With 1,234 packs, 90 pieces in flight, shuffled files of a gigabyte."""
    assert len(TYPICAL.to_bytes()) <= 72
    assert len(Receipt(0, False, 0, (0,), 0, 0, 0, 0, Ledger()).to_bytes()) <= 30


def test_numbers_do_not_change_with_the_ledger() -> None:
    """They travel while their lane goes on counting; so does a lane that was begun from them."""
    receipt = TYPICAL._replace(ledger=Ledger(samples=1), source_stats=(SourceStats(1, 2),))
    numbers = receipt.numbers()
    data = bytes_of({3: numbers})
    again = Receipt.from_numbers(numbers)
    for one in (receipt, again):
        one.ledger.samples += 7
        one.source_stats[0].samples += 7
    assert Receipt.from_numbers(numbers).ledger.samples == 1
    assert bytes_of({3: numbers}) == data
    assert numbers_of(data) == {3: numbers}


def test_numbers_can_be_shown() -> None:
    """However many pieces wait: of an integer of thousands of bits, Python makes no text."""
    assert repr(TYPICAL._replace(consumed=1 << 20_000, next_piece=TYPICAL.first + 30_000).numbers())
