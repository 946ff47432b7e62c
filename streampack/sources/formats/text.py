"""`TextSource`: text files. Each line or each file is a row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from typing_extensions import override

from streampack.sources.formats.lines import BYTE_ORDER_MARK, LONGEST_LINE, LineSource, torn
from streampack.sources.mechanics.other_kinds import by_content
from streampack.sources.mechanics.parts import Damage, Part, Record, assign
from streampack.storage.base import EMPTY, ParallelMap, path_in
from streampack.storage.compression import COMPRESSED, DAMAGED, content
from streampack.storage.listing import Name
from streampack.storage.ranges import Fetcher, RangeStream
from streampack.storage.retries import Storage
from streampack.validation import require

TEXT = tuple(f".txt{packed}" for packed in ("", *COMPRESSED))


class TextSource(LineSource):
    r"""Rows ``{"text": ...}`` of UTF-8 text files: one for each line, or for each file.

    Blank lines are skipped, which datasets' builder "text" keeps. Files are compressed, divided into lanes and resumed
    as those of `JSONLSource`.

    >>> import tempfile, pathlib
    >>> from streampack.sources import Reading
    >>> path = pathlib.Path(tempfile.mkdtemp(), "a.txt")
    >>> _ = path.write_text("Once upon\na time\n")
    >>> [row.data for row in TextSource(path).read(Reading())]
    [{'text': 'Once upon'}, {'text': 'a time'}]
    >>> [row.data for row in TextSource(path, sample_by="document").read(Reading())]
    [{'text': 'Once upon\na time\n'}]

    Args:
        paths: files, folders or globs, see `JSONLSource`. Of a folder, the ``.txt`` files in it.
        sample_by: ``"line"``, or ``"document"`` for a row of each file, which is held in memory.
        manifest: see `JSONLSource`.
        storage: see `JSONLSource`.
        max_line_bytes: bytes of the longest line or document, decompressed. A longer one is a bad record.

    Raises:
        ValueError: as `JSONLSource`; when rows are read, for text that is not UTF-8.
    """

    def __init__(
        self,
        paths: Name | Iterable[Name] | None = None,
        *,
        sample_by: str = "line",
        manifest: Name | None = None,
        storage: Storage | Mapping[str, Any] | None = None,
        max_line_bytes: int = LONGEST_LINE,
    ) -> None:
        require(sample_by, "sample_by", ("line", "document"))
        self.sample_by = sample_by
        super().__init__(
            paths, endings=TEXT, manifest=manifest, storage=storage, max_line_bytes=max_line_bytes
        )

    @override
    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "sample_by": self.sample_by}

    @override
    def cut(self, num_lanes: int, parallel_map: ParallelMap) -> list[list[Part]]:
        if self.sample_by == "line":
            return super().cut(num_lanes, parallel_map)
        return assign([(Part(number), size) for number, size in enumerate(self.files.sizes)], num_lanes)

    @override
    def natural_lanes(self) -> int:
        most = super().natural_lanes()
        return most if self.sample_by == "line" else min(most, len(self.files))

    @override
    def decode(self, part: Part, offset: int, raw: bytes | Damage) -> Mapping[str, Any]:
        if isinstance(raw, Damage):
            raise raw
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8 ({error}); convert the file") from None
        return {"text": text.rstrip("\r\n") if self.sample_by == "line" else text}

    @override
    def like_row(self, number: int, line: bytes | Damage) -> bool:
        return isinstance(line, bytes) and by_content("", line) is None

    @override
    def other_kind(self, path: str, head: bytes) -> str | None:
        return by_content(path, head)

    @override
    def _lines(
        self, part: Part, offset: int, fetcher: Fetcher, *, few: bool = False
    ) -> tuple[RangeStream, Iterator[Record]]:
        if self.sample_by == "line":
            return super()._lines(part, offset, fetcher, few=few)
        file = self.files[part.file]
        stream = RangeStream(fetcher, file, 0, file.size)
        return stream, iter(() if offset else self._document(content(stream, name=path_in(file.path))))

    def _document(self, stream: Any) -> Iterator[Record]:
        try:
            data = stream.read(self.max_line_bytes + 1)
        except DAMAGED as error:
            raise torn(0, error) from None
        if not data:
            raise Damage(EMPTY, offset=0)
        if len(data) > self.max_line_bytes:
            what = f"the file is longer than max_line_bytes={self.max_line_bytes}; cut it, or raise that"
            raise Damage(what, offset=0)
        self.bytes_read += len(data)
        yield 0, data.removeprefix(BYTE_ORDER_MARK), len(data)
