"""Parquet files that are damaged, at one place."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq


def damage(path: Path, *, group: int, column: int = 0) -> None:
    """Flip bytes in the middle of a column chunk, whose pages have checksums."""
    chunk = pq.read_metadata(path).row_group(group).column(column)
    middle = chunk.data_page_offset + chunk.total_compressed_size // 2
    content = bytearray(path.read_bytes())
    content[middle : middle + 8] = bytes(byte ^ 0xFF for byte in content[middle : middle + 8])
    path.write_bytes(content)


def varint(number: int) -> bytes:
    """Encode an i64 as in Thrift's compact protocol."""
    number, written = number << 1, bytearray()
    while number >= 0x80:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*written, number])


def rewrite(path: Path, before: int, after: int, *, first: bool = False) -> None:
    """Replace a number in the footer by one of the same length, everywhere or only at its first place."""
    assert len(varint(before)) == len(varint(after))
    content = path.read_bytes()
    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    footer = content[start:].replace(varint(before), varint(after), 1 if first else -1)
    assert footer != content[start:]
    path.write_bytes(content[:start] + footer)
