"""`FlatTokensSource`: files of token ids and nothing else, in which a token says where a document ends.

The ids are raw, or follow the header of numpy or of llm.c.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from typing_extensions import override

from streampack.sources.examples import EXAMPLES, Example, example
from streampack.sources.formats.documents import DocumentSource, Layout, Stored, mapped
from streampack.sources.mechanics.files import places
from streampack.sources.mechanics.other_kinds import by_content
from streampack.sources.mechanics.parts import Damage, Part, Record
from streampack.storage.base import File, map_in_threads
from streampack.storage.corpus import Corpus, look_at_each
from streampack.storage.listing import Name, find_files
from streampack.storage.ranges import Fetcher, RangeStream, tail_of
from streampack.storage.retries import Storage
from streampack.validation import require_positive

LONGEST_DOCUMENT = 1 << 24  # tokens
LONGEST_FILE = 1 << 62
CHUNK = 1 << 18
"""The tokens of a mapped file, or bytes behind a URL, that are searched for boundaries at a time."""
ONE_DOCUMENT = 1 << 13  # bytes that are first read behind a URL for a single document

HEAD_BYTES = 1024  # that are read of a file when it is looked at; the header of llm.c
NUMPY = b"\x93NUMPY"
LLM_C = {20240520: "uint16", 20240801: "uint32"}
"""Types by the first number of llm.c's header of 256 ``int32``. The third is the number of tokens.
https://github.com/karpathy/llm.c/blob/master/dev/data/data_common.py"""
CERTAIN = (b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\x00", b"PK\x03\x04", b"PAR1", b"ARROW1")
"""First bytes of files of other kinds, too many to be ids by chance."""
DTYPES = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
AGAIN = "it was cut off or replaced: copy it again"


class FlatTokensSource(DocumentSource):
    """The documents of flat files of token ids: rows of ``tokens`` and ``labels``, ``[length]``.

    Such are the files of OLMo and Dolma (``.npy``, which are raw), of nanoGPT (``.bin``, raw), of llm.c and its kin
    (``.bin`` with a header of 1,024 bytes), and what ``numpy.save`` writes of one flat array of ids.

    >>> import tempfile
    >>> from streampack.sources import Reading
    >>> path = tempfile.mkdtemp() + "/train.bin"
    >>> _ = np.array([5, 6, 0, 8, 0, 9], "<u2").tofile(path)
    >>> [row.data["tokens"].tolist() for row in FlatTokensSource(path, eos_token_id=0, dtype="uint16").read(Reading())]
    [[5, 6, 0], [8, 0], [9]]

    The format has no other boundaries than tokens, so a document ends after ``eos_token_id``, or before
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
        max_document_tokens: tokens of the longest document. A longer one is a bad record.
        storage: see `JSONLSource`.

    Raises:
        ValueError: if nothing matches or no file can be read; if there is nothing by which to find documents, or too
            much; for an id that the files' type cannot hold.
    """

    unit = "token"
    near = 1 << 16
    least = 256  # where parts are shorter than most documents, many have none

    def __init__(
        self,
        paths: Name | Iterable[Name],
        *,
        eos_token_id: int | None = None,
        bos_token_id: int | None = None,
        document_length: int | None = None,
        dtype: str | None = None,
        max_document_tokens: int = LONGEST_DOCUMENT,
        storage: Storage | Mapping[str, Any] | None = None,
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
        corpus = find_files(paths, endings=(".npy", ".bin"), storage=storage)
        super().__init__(corpus, look_at_each(corpus, partial(layout_of, dtype=dtype)))
        for name, token in (("eos_token_id", eos_token_id), ("bos_token_id", bos_token_id)):
            for layout in self.layouts if token is not None else ():
                limits = np.iinfo(layout.dtype)
                if layout.units and (type(token) is not int or not limits.min <= token <= limits.max):
                    raise ValueError(
                        f"{name}={token!r} is none of {limits.dtype.name} ({limits.min} to {limits.max}), the type of "
                        "the files' ids; correct one of them"
                    )

    @override
    def identity(self) -> dict[str, Any]:
        return {
            **super().identity(),
            "eos_token_id": self.eos_token_id,
            "bos_token_id": self.bos_token_id,
            "document_length": self.document_length,
            "dtype": self.dtype,
        }

    @property
    @override
    def size(self) -> int | None:
        if self.document_length is None:
            return None
        return sum(-(-count // self.document_length) for count in self.counts)

    @override
    def sample(self, count: int) -> tuple[list[Example], float]:
        """Return documents from all over the files. The scale is one of tokens."""
        found = {row.row_id: row for row in self.examples(count)}
        held = sum(row.data["tokens"].size for row in found.values() if row.data is not None)
        return list(found.values()), self.tokens / max(1, held)

    @override
    def examples(self, count: int = EXAMPLES) -> list[Example]:
        return map_in_threads(lambda place: self._first_from(*place), places(self.counts, count))

    def _first_from(self, number: int, at: int) -> Example:
        """Return the first document that begins at or after a token; if there is none, the first of the file."""
        for start in (at, 0) if at else (0,):
            part = Part(number, start, min(start + self.max_document_tokens, self.counts[number]))
            with suppress(ValueError, FileNotFoundError):  # reported when training reads it
                chunks = self._chunks(part._replace(stop=start + 1), self.fetcher())
                for offset, raw, _ in self._documents(part, chunks):
                    return example((number, offset), partial(self.decode, part, offset, raw))
        return Example((number, at), None)

    @override
    def slice(self, part: Part, fetcher: Fetcher, content: bytes | None = None) -> Iterator[Record]:
        return self._documents(part, self._chunks(part, fetcher))

    def _documents(self, part: Part, chunks: Iterator[Stored]) -> Iterator[Record]:
        """Yield the documents that begin in a part. ``chunks`` are those of `_chunks`."""
        assert part.stop is not None
        if part.start >= part.stop:  # the last document went beyond the part
            return
        # The document that is read, if there is one: where it begins, and its ids in earlier chunks.
        begin: int | None = None
        held: list[Stored] = []
        limit = self.max_document_tokens if self.document_length is None else LONGEST_FILE
        at, before = max(0, part.start - 1), None
        for ids in chunks:
            end, own = at + ids.size, 0  # what is the document's begins at `own` in the chunk
            for start in self._starts(ids, at, before):
                if start < part.start:
                    continue
                if begin is not None:
                    if start - begin > limit:
                        raise self._too_long(begin)
                    yield begin, self._whole(held, ids[own : start - at]), start
                if start >= part.stop:
                    return
                begin, own, held = start, start - at, []
            if begin is not None:
                if end - begin > limit:
                    raise self._too_long(begin)
                held.append(ids[own:])
            elif end >= part.stop:
                return
            at, before = end, ids[-1]
        if begin is not None:
            yield begin, self._whole(held, held.pop()), at

    def _starts(self, ids: Stored, at: int, before: Any) -> Iterable[int]:
        """Return the tokens at which documents begin. ``ids`` are those from ``at`` on, ``before`` the one before."""
        if (length := self.document_length) is not None:
            return range(at + -at % length, at + ids.size, length)
        eos, bos = self.eos_token_id, self.bos_token_id
        if eos is None:
            starts = np.flatnonzero(ids == bos)
        else:
            starts = np.flatnonzero(ids[:-1] == eos) + 1
            starts = np.insert(starts, 0, 0) if before == eos else starts
            starts = starts if bos is None else starts[ids[starts] == bos]
        found: list[int] = (starts + at).tolist()
        return found if at or found[:1] == [0] else [0, *found]

    def _whole(self, held: list[Stored], last: Stored) -> tuple[Stored, None, None]:
        """Join the pieces of a document. What was fetched is copied, so that one that waits holds no others."""
        return last if self.local and not held else np.concatenate([*held, last]), None, None

    def _too_long(self, begin: int) -> Damage:
        """Return the error for a document that is too long. Reading resumes at the next beginning of one."""
        limit = self.max_document_tokens
        rules = (("eos_token_id", self.eos_token_id), ("bos_token_id", self.bos_token_id))
        rule = ", ".join(f"{name}={token}" for name, token in rules if token is not None)
        what = (
            f"the document has more than max_document_tokens={limit:,} by {rule}: correct the id, if it is another "
            "tokenizer's; raise max_document_tokens; or cut the files by document_length"
        )
        return Damage(what, offset=begin, resume=begin + limit)

    def _chunks(self, part: Part, fetcher: Fetcher) -> Iterator[Stored]:
        """Yield the ids of a file, from one before the part on, up to the file's end.

        That one tells whether a document begins with the part, as a line of text does after a line's end.
        """
        file, layout = self.files[part.file], self.layouts[part.file]
        first, dtype = max(0, part.start - 1), np.dtype(layout.dtype)
        if self.local:
            ids = np.frombuffer(mapped(file), dtype, layout.units, layout.first)
            yield from (ids[at : at + CHUNK] for at in range(first, ids.size, CHUNK))
            return
        assert part.stop is not None
        _, begin, stop = layout.block(file, first, part.stop)
        tail = ONE_DOCUMENT if part.stop - first <= 2 else tail_of(begin, stop)
        stream, rest = RangeStream(fetcher, file, begin, stop, tail=tail), b""
        while data := stream.read(CHUNK):
            rest += data
            if count := len(rest) // dtype.itemsize:
                yield np.frombuffer(rest, dtype, count)
                rest = rest[count * dtype.itemsize :]


def layout_of(corpus: Corpus, file: File, *, dtype: str | None) -> Layout:
    """Return where a file's ids are, by its header, or without one as raw ids of type ``dtype``.

    The name does not decide: the ``.npy`` files of OLMo are raw, and those of ``numpy.save`` have a header.
    """
    head = Fetcher(corpus.storage).take((file, 0, min(file.size, HEAD_BYTES)))
    header = _of_numpy(head) if head.startswith(NUMPY) else _of_llm_c(head)
    if header is not None:
        found, first, tokens = header
        if dtype is not None and np.dtype(dtype) != found:
            raise ValueError(f"its header says {found.name}, and dtype is {dtype!r}; leave dtype out")
        if (size := first + tokens * found.itemsize) != file.size:
            raise ValueError(
                f"it has {file.size:,} bytes, and its header describes {size:,} ({tokens:,} of {found.name}); {AGAIN}"
            )
        return Layout(found.str.replace("|", "<"), tokens, tokens, first)
    if dtype is None:
        raise ValueError(
            "it has no header that says how ids are stored; give dtype, such as 'uint16' or 'uint32', as it was written"
        )
    if head.startswith(CERTAIN):
        raise ValueError(f"it holds no ids of {dtype}: {by_content(file.shown, head)}")
    raw = np.dtype(dtype).newbyteorder("<")
    if file.size % raw.itemsize:
        raise ValueError(
            f"it has {file.size:,} bytes, no multiple of the {raw.itemsize} of {dtype}; it was cut off, or is of "
            "another dtype"
        )
    tokens = file.size // raw.itemsize
    return Layout(raw.str.replace("|", "<"), tokens, tokens)


Header = tuple[np.dtype[np.generic], int, int]
"""(type of the ids, byte of the first, number of them)."""


def _of_numpy(head: bytes) -> Header:
    stream = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(stream)
        read = (
            np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        )
        shape, _, dtype = read(stream)
    except ValueError as error:
        raise ValueError(f"its numpy header cannot be read ({error}); write it again by numpy.save") from None
    if len(shape) != 1 or dtype.name not in DTYPES or dtype.newbyteorder("<") != dtype:
        raise ValueError(
            f"it holds an array of {dtype} of shape {shape}; save one flat, little-endian array of ids of one of "
            f"{', '.join(DTYPES)}"
        )
    return dtype, stream.tell(), shape[0]


def _of_llm_c(head: bytes) -> Header | None:
    if len(head) < HEAD_BYTES:
        return None
    magic, _, tokens = np.frombuffer(head, "<i4", 3).tolist()
    return (np.dtype(LLM_C[magic]), HEAD_BYTES, tokens) if magic in LLM_C else None
