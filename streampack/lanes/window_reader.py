"""`WindowReader`: reads the rows of one source a window at a time, to encode them together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from typing_extensions import override

from streampack.sources.reading import BadRecord, Reader, own_row
from streampack.types import Cursor, Row

MOST_CHARACTERS = 1 << 17
"""A window ends with the row that brings it to this size: a tokenizer takes 0.1 s for it."""


class WindowReader(Reader):
    """Reads up to ``rows`` rows of ``reader`` at a time, and returns them one by one as ``encode`` returned them.

    The cursor is always that of the next row to return, and an error of ``reader`` is raised at its place. So a lane
    sees the same rows, cursors and errors as without windows.

    Args:
        reader: of one source.
        encode: returns the rows of a window, each with what its encoder made of it.
        rows: the most rows in a window.
        characters: returns the size of a row, in characters.
        copies: whether rows are copied, because the source may use their memory again.
    """

    def __init__(
        self,
        reader: Reader,
        encode: Callable[[Sequence[Row]], list[Row]],
        *,
        rows: int,
        characters: Callable[[Row], int],
        copies: bool,
    ) -> None:
        self.reader = reader
        self.encode = encode
        self.rows = rows
        self.characters = characters
        self.copies = copies
        self._cursor = reader.cursor
        self._window: deque[tuple[Row | Exception, Cursor]] = deque()  # each with the cursor after it

    @property
    def cursor(self) -> Cursor:
        """See `Reader`."""
        return self._cursor

    @override
    def __next__(self) -> Row:
        if not self._window:
            self._read_window()
        found, self._cursor = self._window.popleft()
        if isinstance(found, Exception):
            raise found
        return found

    def _read_window(self) -> None:
        found: list[tuple[Row | Exception, Cursor]] = []
        size, ended = 0, False
        while not ended and len(found) < self.rows and size < MOST_CHARACTERS:
            try:
                row = next(self.reader)
            except Exception as error:
                found.append((error, self.reader.cursor))
                ended = not isinstance(error, BadRecord)
                continue
            if self.copies:
                row = row._replace(data=own_row(row.data))
            found.append((row, self.reader.cursor))
            size += self.characters(row)
        rows = [row for row, _ in found if isinstance(row, Row)]
        encoded = iter(self.encode(rows) if rows else ())
        self._window.extend((next(encoded) if isinstance(row, Row) else row, after) for row, after in found)

    @override
    def prepare(self) -> None:
        self.reader.prepare()

    @override
    def lacks(self, until: Cursor) -> bool:
        return self.reader.lacks(until)
