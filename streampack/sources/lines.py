"""JSON lines: the lines of one part of a file, and the value of one line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from streampack.sources.parts import Damage, Part, Record
from streampack.storage.base import File
from streampack.storage.compression import BUFFER_BYTES, DAMAGED, content, kind_of, not_text
from streampack.storage.json_depth import require_shallow
from streampack.storage.ranges import Block, Fetcher, Stretch

HEAD_BYTES = 16  # enough to recognise the kind of a file
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
NESTED = frozenset((list, dict))
_scan = json.JSONDecoder().raw_decode


def parsed(line: bytes) -> Any:
    """Return the value of a line of JSON. `json.loads` first finds out in which of five encodings it is.

    >>> parsed(b' {"text": "a"} ')
    {'text': 'a'}

    Raises:
        ValueError: if it is no JSON, no UTF-8, or nested too deep.
    """
    # Half a surrogate pair is accepted, as `json` does; a byte order mark stands where files were joined.
    text = line.decode("utf-8", "surrogatepass").rstrip(" \t\r\n")
    try:
        value, end = _scan(text, len(text) - len(text.lstrip(" \t\r\n\ufeff")))
    except RecursionError:
        require_shallow(line)
        raise ValueError("it is nested too deep to be parsed here") from None
    if type(value) is not dict or not NESTED.isdisjoint(map(type, value.values())):
        require_shallow(line)  # which takes a tenth of the time that parsing does
    if end < len(text):
        raise json.JSONDecodeError("Extra data", text, len(text) - len(text[end:].lstrip(" \t\r\n")))
    return value


@dataclass(slots=True)
class ByteCount:
    """Bytes of lines that were read, decompressed."""

    total: int = 0


class Lines:
    """An iterator over the lines of one part that are not blank, each with the offset of its first byte.

    Args:
        file: whose lines they are.
        part: the lines whose first byte lies in it.
        offset: where to begin.
        fetcher: for the file's bytes.
        longest: bytes of the longest line; a longer one is `Damage`, and is not held in memory.
        count: adds up the bytes.
        following: blocks to fetch ahead behind the part's own.
        few: only a line or two are wanted.
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
        following: Iterable[Block] = (),
        few: bool = False,
    ) -> None:
        self.file = file
        self.stop = part.stop
        self.longest = longest
        self.count = count
        self.offset = offset
        self.seekable = seekable = file.seekable
        if seekable and offset > file.size:
            raise ValueError(
                f"{file.shown} has {file.size} bytes and cannot be read from byte {offset} on; the state "
                "or the file is damaged"
            )
        # A row that starts exactly at `offset` belongs to the part, one that started before does not.
        begin = max(0, offset - 1) if seekable else 0
        stop = part.stop if seekable and part.stop is not None else file.size
        self.raw = Stretch(fetcher, file, begin, begin + 1 if few else stop, following)
        self.stream = content(self.raw, name=file.shown)
        if begin == 0 and seekable and (kind := kind_of(self.stream.peek(HEAD_BYTES)[:HEAD_BYTES])):
            raise not_text(file.shown, kind)
        if offset and seekable:
            self.offset = begin
            self._pass_line()
        left = 0 if seekable else offset
        # Decompressed again, and thrown away. In pieces that are below the buffer's size the stream below sees the same
        # reads as it does from `readline`: a damaged file shows its damage at the same line.
        while left and (skipped := self._read(self.stream.read, min(left, BUFFER_BYTES // 4))):
            left -= len(skipped)

    def __iter__(self) -> Lines:
        return self

    def __next__(self) -> Record:
        while self.stop is None or self.offset < self.stop:
            line = self._line(self.longest + 1)
            if not line:
                break
            offset, self.offset = self.offset, self.offset + len(line)
            self.count.total += len(line)
            if len(line) > self.longest:
                if line[-1:] != b"\n":
                    self._pass_line()
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
            raise ValueError(f"{self.file.shown} holds no rows; remove it from the corpus")
        raise StopIteration

    def _line(self, most: int) -> bytes:
        return self.stream.readline(most) if self.seekable else self._read(self.stream.readline, most)

    def _pass_line(self) -> None:
        """Go to the end of the line, or of the part, whichever comes first; hold none of it."""
        while (self.stop is None or self.offset < self.stop) and (some := self._line(BUFFER_BYTES // 4)):
            self.offset += len(some)
            if some.endswith(b"\n"):
                return

    def _read(self, read: Callable[..., bytes], *size: int) -> bytes:
        """Read from a compressed file."""
        try:
            return read(*size)
        except DAMAGED as error:
            what = f"the file is damaged after byte {self.offset} of its content: {error}"
            raise Damage(what, offset=self.offset, resume=None) from error
