"""`FlatTokensSource`: files of token ids and nothing else, in which a token says where a document ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from streampack.sources.examples import EXAMPLES, Example, example
from streampack.sources.files import FileSource, divide, places
from streampack.sources.flat_files import DTYPES, Layout, layout_of, require_id
from streampack.sources.parts import Damage, Part, Record
from streampack.sources.stored_tokens import TOKENS_PER_LANE, Stored, bound_of, mapped, row_of
from streampack.storage.base import ParallelMap, map_in_threads
from streampack.storage.listing import Name, Once, alone, find_files, require_some
from streampack.storage.look_ups import look_at_each
from streampack.storage.ranges import Block, Fetcher, RangeStream, blocks, tail_of
from streampack.validation import require_positive

LONGEST_DOCUMENT = 1 << 24  # tokens
LEAST_PART = 256  # tokens; where parts are shorter than most documents, many have none
CHUNK = 1 << 18
"""The tokens of a mapped file, or bytes behind a URL, that are searched for boundaries at a time."""
ONE_DOCUMENT = 1 << 13  # bytes that are first read behind a URL for a single document


class FlatTokensSource(FileSource):
    """The documents of flat files of token ids: rows of ``tokens`` and ``labels``, ``[length]``.

    Such are the files of OLMo and Dolma (``.npy``, which are raw), of nanoGPT (``.bin``, raw), of llm.c and its kin
    (``.bin`` with a header of 1,024 bytes), and what ``numpy.save`` writes of one flat array of ids.

    >>> import tempfile
    >>> from streampack.sources import Reading
    >>> path = tempfile.mkdtemp() + "/train.bin"
    >>> _ = np.array([5, 6, 0, 8, 0, 9], "<u2").tofile(path)
    >>> [row.data["tokens"].tolist() for row in FlatTokensSource(path, eos_token_id=0, dtype="uint16").read(Reading())]
    [[5, 6, 0], [8, 0], [9]]

    The format has no other boundaries than tokens, so a document ends behind ``eos_token_id``, or before
    ``bos_token_id``. If both are given, it ends where the one is followed by the other, as in OLMo-core: a document may
    then hold either alone. Nothing is searched before it is read: files are cut into lanes at any token, and a document
    belongs to the part in which its first token lies.

    Where there are no such tokens, ``document_length`` cuts each file into documents of that many tokens.

    The files are read in place; on this machine they are mapped into memory. Every token is trained on.

    Args:
        paths: files, folders or globs of this machine, or URLs. Of a folder, the ``.npy`` and ``.bin`` files in it.
        eos_token_id: the token that ends each document, and belongs to it.
        bos_token_id: the token that begins each document, as in files of llm.c.
        document_length: instead of both, the number of tokens of a document; the last of a file may be shorter.
        dtype: the type of the ids, such as ``uint16``. Files with a header say it themselves; raw files do not.
        max_document_tokens: tokens of the longest document. A longer one is a bad record, of which no more than that is
            held in memory.
        storage_options: see `JSONLSource`, as for the arguments below.
        retries: how often a failed read is tried again.
        timeout: seconds that one request may take.
        once: how ranks share the listing of files behind URLs and the reading of their headers.

    Raises:
        ValueError: if nothing matches or no file can be read; if there is nothing by which to find documents, or too
            much; for an id that the files' type cannot hold.
    """

    unit = "token"
    near = 1 << 16

    def __init__(
        self,
        paths: Name | Iterable[Name],
        *,
        eos_token_id: int | None = None,
        bos_token_id: int | None = None,
        document_length: int | None = None,
        dtype: str | None = None,
        max_document_tokens: int = LONGEST_DOCUMENT,
        storage_options: Mapping[str, Any] | None = None,
        retries: int = 5,
        timeout: float = 30.0,
        once: Once = alone,
    ) -> None:
        by_token = eos_token_id is not None or bos_token_id is not None
        if by_token == (document_length is not None):
            raise ValueError(
                "say where documents end: eos_token_id, bos_token_id or both; or else document_length, for pieces of "
                "one length"
            )
        if document_length is not None:
            require_positive(document_length, "document_length")
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(f"dtype={dtype!r} is no type of ids; it can be {', '.join(DTYPES)}")
        self.eos_token_id = eos_token_id
        self.bos_token_id = bos_token_id
        self.document_length = document_length
        self.dtype = dtype
        self.max_document_tokens = require_positive(max_document_tokens, "max_document_tokens")
        corpus = find_files(
            paths, manifest=None, endings=(".npy", ".bin"), storage_options=storage_options, retries=retries,
            timeout=timeout, once=once,
        )  # fmt: skip
        found = look_at_each(corpus, partial(layout_of, dtype=dtype), once=once)
        problems = {
            file.path: each for file, each in zip(corpus.files, found, strict=True) if isinstance(each, str)
        }
        super().__init__(require_some(replace(corpus, problems=problems)))
        # A file that cannot be read has no tokens.
        self.layouts = [Layout("<u2", 0, 0) if isinstance(each, str) else each for each in found]
        self.counts = [layout.tokens for layout in self.layouts]
        dtypes = [np.dtype(each.dtype) for each in found if not isinstance(each, str)]
        require_id(eos_token_id, "eos_token_id", dtypes)
        require_id(bos_token_id, "bos_token_id", dtypes)
        if type(self) is FlatTokensSource:  # A user's subclass may change the ids.
            self.ids_below = bound_of(dtypes)

    def identity(self) -> dict[str, Any]:
        """See `Source.identity`."""
        return {
            **super().identity(),
            "eos_token_id": self.eos_token_id,
            "bos_token_id": self.bos_token_id,
            "document_length": self.document_length,
            "dtype": self.dtype,
        }

    def cut(self, num_lanes: int, parallel_map: ParallelMap) -> list[list[Part]]:
        """See `FileSource.cut`. A file that cannot be read is a part, too, so that a lane lists it."""
        sizes = [file.size for file in self.files]
        return divide(self.counts, num_lanes, sizes=sizes, whole=set(self.bad), least=LEAST_PART)

    def records(
        self, part: Part, offset: int, fetcher: Fetcher, later: Iterable[Iterable[Block | None]] = ()
    ) -> Iterator[Record]:
        """See `FileSource.records`."""
        if not 0 <= offset <= self.counts[part.file]:
            file = self.files[part.file]
            raise ValueError(f"{file.shown} has no token {offset}; the state or the file is damaged")
        return self._documents(part, offset, self._chunks(part, offset, fetcher, later))

    def ahead(self, part: Part, offset: int, fetcher: Fetcher) -> Iterable[Block | None]:
        """See `FileSource.ahead`."""
        begin, stop, tail = self._stretch(part, offset)
        return blocks(fetcher.block, self.files[part.file], begin, stop, tail=tail)

    def decode(self, part: Part, offset: int, raw: Stored) -> Mapping[str, Any]:
        """See `FileSource.decode`."""
        return row_of(raw, None)

    def stored_bytes(self, raw: Stored) -> int:
        """See `FileSource.stored_bytes`."""
        return raw.nbytes

    def natural_lanes(self) -> int:
        """Return one lane per 262,144 tokens."""
        return max(1, sum(self.counts) // TOKENS_PER_LANE)

    @property
    def size(self) -> int | None:
        """See `Source.size`: it is known for documents of one length."""
        if self.document_length is None:
            return None
        return sum(-(-count // self.document_length) for count in self.counts)

    def sample(self, count: int) -> tuple[list[Example], float]:
        """See `Source.sample`: documents from all over the files. The scale is one of tokens."""
        found = {row.row_id: row for row in self.examples(count)}
        held = sum(row.data["tokens"].size for row in found.values() if row.data is not None)
        return list(found.values()), sum(self.counts) / max(1, held)

    def examples(self, count: int = EXAMPLES) -> list[Example]:
        """See `Source.examples`: documents from all over the files."""
        return map_in_threads(lambda place: self._first_from(*place), places(self.counts, count))

    def _first_from(self, number: int, at: int) -> Example:
        """Return the first document that begins at or after a token; if there is none, the first of the file."""
        for start in (at, 0) if at else (0,):
            part = Part(number, start, min(start + self.max_document_tokens, self.counts[number]))
            with suppress(ValueError, FileNotFoundError):  # reported when training reads it
                chunks = self._chunks(part, start, self.fetcher(), few=True)
                for offset, raw, _ in self._documents(part, start, chunks):
                    return example((number, offset), partial(self.decode, part, offset, raw))
        return Example((number, at), None)

    def _documents(self, part: Part, offset: int, chunks: Iterator[Stored]) -> Iterator[Record]:
        """Yield the documents of a part that begin at token ``offset`` or later.

        ``chunks`` are the file's tokens from one before ``offset`` on, to the file's end: by that token it is known
        whether a document begins at ``offset``, as a line of text does behind a line's end.
        """
        tokens = self.counts[part.file]
        stop = tokens if part.stop is None else part.stop
        limit = self.max_document_tokens if self.document_length is None else self.document_length
        at, before = max(0, offset - 1), None
        # Where the document that is read begins, if one does, and its tokens in earlier chunks.
        begin = 0 if offset == 0 else None
        pieces: list[Stored] = []
        while offset < stop and (chunk := next(chunks, None)) is not None:
            used = 0
            for start in self._starts(at, before, chunk):
                if start < offset or start == begin:
                    continue
                if begin is not None:
                    yield begin, self._joined([*pieces, chunk[used : start - at]], begin, limit), start
                if start >= stop:
                    return
                begin, pieces, used = start, [], start - at
            at, before = at + chunk.size, int(chunk[-1])
            if begin is not None:
                pieces.append(chunk[used:])
                if at - begin > limit:
                    self._joined(pieces, begin, limit)  # raises
            elif at >= stop:
                return
        if begin is not None and pieces:
            yield begin, self._joined(pieces, begin, limit), tokens

    def _starts(self, at: int, before: int | None, chunk: Stored) -> list[int]:
        """Return the tokens of a chunk at which documents begin. ``before`` is the one before the chunk, if any."""
        if (length := self.document_length) is not None:
            return list(range(-(-at // length) * length, at + chunk.size, length))
        eos, bos = self.eos_token_id, self.bos_token_id
        if eos is None:
            starts = np.flatnonzero(chunk == bos)
        else:
            starts = np.flatnonzero(chunk[:-1] == eos) + 1
            if before == eos:
                starts = np.concatenate([[0], starts])
            if bos is not None:
                starts = starts[chunk[starts] == bos]
        found: list[int] = (starts + at).tolist()
        return found

    def _joined(self, pieces: list[Stored], begin: int, limit: int) -> Stored:
        """Return a document in one array: a view of a mapped file, if it lies in one chunk.

        Raises:
            Damage: if it is longer than ``limit``.
        """
        if sum(piece.size for piece in pieces) > limit:
            rule = ", ".join(
                f"{name}={token}"
                for name, token in (("eos_token_id", self.eos_token_id), ("bos_token_id", self.bos_token_id))
                if token is not None
            )
            what = (
                f"the document has more than max_document_tokens={limit:,} by {rule}: correct the id, if it is another "
                "tokenizer's; raise max_document_tokens; or cut the files by document_length"
            )
            # In the middle of a document, reading goes on at the next one's beginning.
            raise Damage(what, offset=begin, resume=begin + limit)
        if len(pieces) == 1:
            # Behind a URL it is copied, so that a document that waits holds no others.
            return pieces[0] if self.local else pieces[0].copy()
        return np.concatenate(pieces)

    def _chunks(
        self,
        part: Part,
        offset: int,
        fetcher: Fetcher,
        later: Iterable[Iterable[Block | None]] = (),
        *,
        few: bool = False,
    ) -> Iterator[Stored]:
        """Yield the tokens of a file, in turn, from one before ``offset`` on. ``few`` says that little will be read."""
        file, layout = self.files[part.file], self.layouts[part.file]
        dtype = np.dtype(layout.dtype)
        if self.local:
            ids = mapped(file, dtype, first=layout.first, count=layout.tokens)
            for at in range(max(0, offset - 1), layout.tokens, CHUNK):
                yield ids[at : at + CHUNK]
            return
        begin, stop, tail = self._stretch(part._replace(stop=offset + 1) if few else part, offset)
        stream, rest = RangeStream(fetcher, file, begin, stop, later, tail=tail), b""
        while data := stream.read(CHUNK):
            data = rest + data
            count = len(data) // dtype.itemsize
            rest = data[count * dtype.itemsize :]
            if count:
                yield np.frombuffer(data, dtype, count)

    def _stretch(self, part: Part, offset: int) -> tuple[int, int, int]:
        """Return the bytes ``[begin, stop)`` to read for a part from ``offset`` on, and how many behind them."""
        layout = self.layouts[part.file]
        width = np.dtype(layout.dtype).itemsize
        last = layout.tokens if part.stop is None else part.stop
        first = max(0, min(offset - 1, last))
        begin, stop = (layout.first + width * token for token in (first, last))
        return begin, stop, ONE_DOCUMENT if last - first <= 2 else tail_of(begin, stop)
