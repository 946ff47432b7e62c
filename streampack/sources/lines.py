"""Lines of JSON: an iterator over the lines of one part of a file, and a parser for one line."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from streampack.sources.parts import Damage, Part, Record
from streampack.storage.base import EMPTY, File, path_in
from streampack.storage.compression import BUFFER_BYTES, DAMAGED, content
from streampack.storage.ranges import Fetcher, RangeStream, tail_of

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
ROW = re.compile(rb'(?:\s|\xef\xbb\xbf)*\{[ \t]*["}]')
LOOKED_AT = 1 << 16  # bytes at the beginning of a file that may be of another kind
FEWEST_LINES = 3  # at a file's beginning that tell that it is of another kind; fewer may be damaged rows
PLAIN = "make it plain text, or compress that as .gz or .zst"
KINDS = {
    b"\x1f\x8b": ("gzip data", "let its name end in .gz"),
    b"\x28\xb5\x2f\xfd": ("zstd data", "let its name end in .zst"),
    b"BZh": ("bzip2 data", PLAIN),
    b"\xfd7zXZ\x00": ("xz data", PLAIN),
    b"PK\x03\x04": ("a zip archive", PLAIN),
    b"PAR1": ("a Parquet file", "read it with ParquetSource"),
    b"ARROW1": ("an Arrow file", "let datasets read it, with HFSource"),
    b"\x00\x00\x00\x00": ("zeros, as a crash leaves them,", "copy it anew"),
    b"\xff\xfe": ("UTF-16 text", PLAIN),
    b"\xfe\xff": ("UTF-16 text", PLAIN),
}
"""Kinds of files by their first bytes, none of which can begin a JSON object, and what to do with each."""

_scan = json.JSONDecoder().raw_decode


def parsed(line: bytes) -> Any:
    """Return the value of a line of JSON. It must be UTF-8; `json.loads` would spend time on guessing the encoding.

    >>> parsed(b' {"text": "a"} ')
    {'text': 'a'}

    Raises:
        ValueError: if it is no JSON, no UTF-8, or nested too deep.
    """
    # Half a surrogate pair is accepted, as by `json`. A byte order mark at the beginning of a line is ignored: there is
    # one where files were joined.
    text = line.decode("utf-8", "surrogatepass").rstrip(" \t\r\n")
    try:
        value, end = _scan(text, len(text) - len(text.lstrip(" \t\r\n\ufeff")))
    except RecursionError:
        raise ValueError("its objects and arrays are nested too deep") from None
    if end < len(text):
        raise json.JSONDecodeError("Extra data", text, len(text) - len(text[end:].lstrip(" \t\r\n")))
    return value


def like_row(text: bytes) -> bool:
    r"""Return whether the first line of a text, unless blank, begins as a JSON object, and if it is whole ends as one.

    >>> like_row(b'{"a": 1}'), like_row(b'{"a": 1},\n'), like_row(b'["a"]')
    (True, False, False)
    """
    if (found := ROW.match(text)) is None:
        return False
    end = text.find(b"\n", found.end())
    return end < 0 or text[:end].rstrip()[-1:] == b"}"


def no_json_lines(head: bytes, path: str) -> str | None:
    r"""Return why a file with this beginning is no JSON lines: it is of a known kind, or none of its lines is a row.

    >>> no_json_lines(b"text,id\na,1\nb,2\nc", "a.jsonl").partition("; ")[0]
    'none of its first 3 lines is a JSON object'
    """
    if head.isspace():  # rows may begin behind it, unless it is the whole file
        return "it holds blank lines only" if len(head) < LOOKED_AT else None
    for magic, (kind, way_out) in KINDS.items():
        if head.startswith(magic):
            return f"it is {kind} and would be read as plain text; {way_out}"
    lines = [line for line in io.BytesIO(head) if line.endswith(b"\n") and not line.isspace()]
    if len(lines) < FEWEST_LINES or any(map(like_row, lines)):
        return None
    return f"none of its first {len(lines):,} lines is a JSON object{way_out_of(lines[0], path)}"


def way_out_of(line: bytes, path: str) -> str:
    """Return the end of the message for a line that is no JSON: what the file may be, and what reads it then.

    >>> way_out_of(b"{'text': 'a'}", "a.jsonl")
    '; Python wrote it in single quotes: write rows by json.dumps'
    """
    begin = line.removeprefix(BYTE_ORDER_MARK)[:2]
    if begin == b"{'":
        return "; Python wrote it in single quotes: write rows by json.dumps"
    what, builder = ("one JSON document", "json") if begin[:1] in (b"[", b"{") else ("plain text", "text")
    if path.endswith(".csv"):
        what, builder = "a table", "csv"
    return f"; if the file is {what}, let datasets read it: HFSource({builder!r}, data_files={path!r}, split='train')"


@dataclass(slots=True)
class ByteCount:
    """A count of the bytes of lines, decompressed, that were read; shared by the readers of a source."""

    total: int = 0


class Lines:
    """An iterator over the lines of one part that are not blank, each with the offset of its first byte.

    Args:
        file: the file to read.
        part: the part of the file; a line belongs to it if its first byte does.
        offset: the byte at which to begin, of the decompressed content.
        fetcher: reads the file's bytes.
        longest: bytes of the longest line. A longer line is returned as `Damage`, and not held in memory.
        count: is increased by the bytes of each line.
        few: whether only a line or two will be read, so that no more than those should be fetched.
    """

    def __init__(
        self,
        file: File,
        part: Part,
        offset: int,
        fetcher: Fetcher,
        *,
        longest: int,
        count: ByteCount,
        few: bool = False,
    ) -> None:
        self.file = file
        self.stop = part.stop
        self.longest = longest
        self.count = count
        self.offset = offset
        seekable = file.seekable
        if seekable and offset > file.size:
            raise ValueError(
                f"{file.shown} has {file.size} bytes and cannot be read from byte {offset} on; the state "
                "or the file is damaged"
            )
        # Reading begins one byte before `offset`, and goes on to the next line's end. If the byte is a line's end, the
        # line that begins at `offset` is kept; otherwise `offset` is in the middle of a line of the part before.
        begin = max(0, offset - 1) if seekable else 0
        stop = part.stop if seekable and part.stop is not None else file.size
        end = begin + 1 if few else stop
        self.raw = RangeStream(fetcher, file, begin, end, tail=tail_of(begin, end))
        self.stream = content(self.raw, name=path_in(file.path))
        self.readline = self.stream.readline if seekable else partial(self._read, self.stream.readline)
        if offset and seekable:
            self.offset = begin
            self._skip_line()
        # The content before `offset` is decompressed again and thrown away, in pieces that are smaller than the buffer.
        # `readline` asks the decompressor for such pieces, too, so a damaged file fails at the same line both times.
        left = 0 if seekable else offset
        while left and (skipped := self._read(self.stream.read, min(left, BUFFER_BYTES // 4))):
            left -= len(skipped)

    def like_rows(self) -> bool:
        """Return whether the next line is like a row, as far as it was read, or there is none."""
        if self.stop is not None and self.offset >= self.stop:
            return True
        return not (head := self._read(self.stream.peek)) or like_row(head)

    def __iter__(self) -> Lines:
        return self

    def __next__(self) -> Record:
        while self.stop is None or self.offset < self.stop:
            line = self.readline(self.longest + 1)
            if not line:
                break
            offset, self.offset = self.offset, self.offset + len(line)
            self.count.total += len(line)
            if len(line) > self.longest:
                if line[-1:] != b"\n":
                    self._skip_line()
                what = (
                    f"the line is longer than max_line_bytes={self.longest}; write its rows shorter, or raise "
                    "max_line_bytes"
                )
                return offset, Damage(what, offset=offset, resume=self.offset), self.offset
            if offset == 0:
                line = line.removeprefix(BYTE_ORDER_MARK)
            if line and not line.isspace():
                return offset, line, self.offset
        if self.offset == 0:
            raise Damage(EMPTY, offset=0)
        raise StopIteration

    def _skip_line(self) -> None:
        """Read up to the end of the line or of the part, whichever comes first, without holding the line in memory."""
        while (self.stop is None or self.offset < self.stop) and (some := self.readline(BUFFER_BYTES // 4)):
            self.offset += len(some)
            if some.endswith(b"\n"):
                return

    def _read(self, read: Callable[..., bytes], *size: int) -> bytes:
        """Read from a compressed file. Its errors become `Damage`."""
        try:
            return read(*size)
        except DAMAGED as error:
            if self.offset == 0:
                raise Damage(f"it cannot be decompressed: {error}", offset=0) from None
            what = f"the file is damaged after byte {self.offset} of its content: {error}"
            raise Damage(what, offset=self.offset) from None
