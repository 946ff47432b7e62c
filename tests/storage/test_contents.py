"""What files hold: compressed by any writer, cut off or damaged, too large, and JSON that is nested too deep."""

from __future__ import annotations

import gzip
import io
import json
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from streampack import JSONLSource
from streampack.sources import Reading
from streampack.sources.lines import parsed
from streampack.storage.compression import DAMAGED, content
from streampack.storage.json_depth import DEEPEST, require_shallow, shallow_json

TEXT = b"".join(b'{"i": %d, "text": "%s"}\n' % (i, b"ab" * (i * 37 % 90)) for i in range(4000))


class Slow(io.RawIOBase):
    """A stream that returns a few bytes at a time, like a `RangeStream` of small blocks."""

    def __init__(self, data: bytes, most: int) -> None:
        self.inner, self.most = io.BytesIO(data), most

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
        data = self.inner.read(min(len(buffer), self.most))
        buffer[: len(data)] = data
        return len(data)


def read(data: bytes, name: str = "a.zst", *, most: int = 1 << 16) -> bytes:
    return content(Slow(data, most), name=name).read()


def skippable(data: bytes) -> bytes:
    return b"\x53\x2a\x4d\x18" + len(data).to_bytes(4, "little") + data


WRITERS: dict[str, Callable[[bytes], bytes]] = {
    "as a rule": zstandard.compress,
    "with a checksum": lambda data: zstandard.ZstdCompressor(write_checksum=True).compress(data),
    "without the size": lambda data: zstandard.ZstdCompressor(write_content_size=False).compress(data),
    "as a stream": lambda data: (
        (one := zstandard.ZstdCompressor().compressobj()).compress(data) + one.flush()
    ),
    "in frames": lambda data: b"".join(
        zstandard.compress(data[i : i + 3001]) for i in range(0, len(data), 3001)
    ),
    "with an empty frame": lambda data: zstandard.compress(b"") + zstandard.compress(data),
    "with frames to skip": lambda data: skippable(b"x" * 70_000) + zstandard.compress(data) + skippable(b""),
    "in a large window": lambda data: zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters(window_log=27, write_content_size=0)
    ).compress(data),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("most", [1, 1 << 16])
def test_files_of_any_writer_are_read(writer: str, most: int) -> None:
    for data in (b"", b"a", b"\0" * 300_000, TEXT):
        packed = WRITERS[writer](data)
        if most > 1 or len(packed) < 3000:
            assert read(packed, most=most) == data


@given(st.lists(st.tuples(st.sampled_from(sorted(WRITERS)), st.binary(max_size=400), st.integers(1, 500))))
def test_files_of_several_frames(members: list[tuple[str, bytes, int]]) -> None:
    data = b"".join(part * times for _, part, times in members)
    packed = b"".join(WRITERS[writer](part * times) for writer, part, times in members)
    assert read(packed) == data


@pytest.mark.parametrize("writer", ["with a checksum", "with frames to skip"])
def test_a_file_cut_off_anywhere_is_an_error(writer: str) -> None:
    packed = WRITERS[writer](TEXT)
    whole = len(packed) - (8 if writer == "with frames to skip" else 0)
    for stop in {*range(1, 40), *range(whole - 40, whole), *range(0, whole, 97)} - {0}:
        with pytest.raises(DAMAGED, match="it ends in the middle"):
            read(packed[:stop])


def test_a_changed_byte_is_an_error() -> None:
    packed = WRITERS["with a checksum"](TEXT)
    for at in range(0, len(packed), 7):
        damaged = bytearray(packed)
        damaged[at] ^= 0x55
        with pytest.raises(DAMAGED):
            read(bytes(damaged))
    with pytest.raises(DAMAGED, match="no zstd frame where one should begin"):
        read(packed + b"trailing")


@pytest.mark.parametrize("name", ["a.zst", "a.gz"])
def test_memory_does_not_grow_with_the_content(name: str) -> None:
    """64 MiB of content in some KB."""
    if name == "a.zst":
        one = zstandard.ZstdCompressor(level=19).compressobj()
        packed = b"".join([*(one.compress(bytes(1 << 20)) for _ in range(64)), one.flush()])
    else:
        packed = gzip.compress(bytes(64 << 20), mtime=0)
    assert len(packed) < 70_000
    stream = content(Slow(packed, 1 << 16), name=name)
    tracemalloc.start()
    try:
        read = 0
        while some := stream.read(1 << 18):
            read += len(some)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert read == 64 << 20
    assert peak < 4 << 20, f"{peak / 2**20:.0f} MiB"


def test_a_window_that_takes_too_much_memory_is_refused() -> None:
    huge = b"\x28\xb5\x2f\xfd\x00" + bytes([21 << 3]) + b"\x01\x00\x00"  # 2 GiB, an empty block
    with pytest.raises(DAMAGED, match="(?i)memory|window"):
        read(huge)


def nested(depth: int, *, mixed: bool = False) -> bytes:
    """Return a row of that many nested objects and arrays, itself included."""
    inner = depth - 1
    begin, end = (b'{"a":' * inner, b"}" * inner) if mixed else (b"[" * inner, b"]" * inner)
    return b'{"text": ' + begin + b"1" + end + b"}"


def from_below(frames: int, ask: Any) -> Any:
    return ask() if not frames else from_below(frames - 1, ask)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("frames", [0, 300])
@pytest.mark.parametrize("parse", [parsed, shallow_json])
def test_the_limit_is_the_same_everywhere(parse: Any, frames: int, mixed: bool) -> None:
    assert from_below(frames, lambda: parse(nested(DEEPEST, mixed=mixed)))["text"]
    for depth in (DEEPEST + 1, 900, 2000, 100_000):
        with pytest.raises(
            ValueError, match=f"{depth} objects and arrays lie inside one another, and 500 may"
        ):
            from_below(frames, lambda: parse(nested(depth, mixed=mixed)))  # noqa: B023


def test_brackets_in_strings_do_not_count() -> None:
    row = {"text": '[{"\\' * 2000, '"[[[["' * 300: ["\\", "[" * 700, {}] * 300}
    assert parsed(json.dumps(row).encode()) == row
    require_shallow(json.dumps([[]] * 5000).encode())


def test_a_line_that_exhausts_the_stack_is_a_bad_row() -> None:
    with pytest.raises(ValueError, match="nested too deep to be parsed here"):
        from_below(sys.getrecursionlimit() - 300, lambda: parsed(nested(400)))


def test_a_nested_row_is_a_bad_record_with_its_place(tmp_path: Any) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"i": 0}\n' + nested(990) + b'\n{"i": 2}\n')
    reader = JSONLSource(path).read(Reading())
    assert next(reader).data == {"i": 0}
    with pytest.raises(ValueError, match=r"a\.jsonl:2: not a line of JSON \(990 objects and arrays lie"):
        next(reader)
    reader.skip()
    assert next(reader).data == {"i": 2}
