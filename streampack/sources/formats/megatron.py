"""`MegatronSource`: the ``.bin`` and ``.idx`` files of Megatron-LM, read without Megatron.

The ``.bin`` file holds token ids, end to end. An index, all numbers little-endian:

| bytes | what |
|---|---|
| 9 | ``MMIDIDX`` and two zeros |
| 8 | the version, 1 |
| 1 | the code of the ids' type, see `DTYPES` |
| 8 | the number of sequences, n |
| 8 | the length of the document index: one more than there are documents |
| n x 4 | ``int32``: the tokens of each sequence |
| n x 8 | ``int64``: the byte of the ``.bin`` file where each sequence begins |
| (documents + 1) x 8 | ``int64``: the number of each document's first sequence; n last |
| n | only in files for multimodal models: the mode of each sequence |

A document has one sequence, unless the corpus was split into sentences.
https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/datasets/indexed_dataset.py
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from streampack.sources.formats.documents import DocumentSource, Layout, Offsets, Read
from streampack.sources.mechanics.parts import Damage, Part
from streampack.storage.base import File, with_path
from streampack.storage.corpus import Corpus, companion, look_at_each
from streampack.storage.listing import MAGIC, Name, find_files
from streampack.storage.ranges import Fetcher
from streampack.storage.retries import Storage

HEADER = struct.Struct("<9sQBQQ")
BEGINNING = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Types by their codes. Megatron also has floating point types, 6 and 7, which hold no token ids."""
AGAIN = "write both files again, or copy them"


class MegatronSource(DocumentSource):
    r"""The documents of Megatron-LM's ``.bin`` and ``.idx`` files: rows of ``tokens`` and ``labels``, ``[length]``.

    >>> import tempfile
    >>> from streampack.sources import Reading
    >>> prefix = tempfile.mkdtemp() + "/text_document"
    >>> with open(prefix + ".bin", "wb") as file:
    ...     _ = file.write(np.array([5, 6, 7, 8, 9], "<i4").tobytes())
    >>> with open(prefix + ".idx", "wb") as file:
    ...     _ = file.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, 2, 3))
    ...     _ = file.write(struct.pack("<2i", 3, 2) + struct.pack("<2q", 0, 12) + struct.pack("<3q", 0, 1, 2))
    >>> [row.data["tokens"].tolist() for row in MegatronSource(prefix).read(Reading())]
    [[5, 6, 7], [8, 9]]

    The files are read in place, also by several runs. On this machine they are mapped into memory, and ids of 4 and 8
    bytes are not copied before they are packed. Every token is trained on. Documents are as Megatron's preprocessing
    wrote them, with an end-of-document token if it was run with ``--append-eod``.

    Args:
        paths: prefixes of pairs of files as Megatron takes them, or the names of ``.bin`` files, folders that hold
            some, or globs; of this machine, or URLs. An index is beside its file.
        storage: see `JSONLSource`.

    Raises:
        ValueError: if nothing matches or no file can be read: its index is missing, has another format or version, has
            the modes of a multimodal corpus, or does not describe a file of this size.
    """

    def __init__(
        self,
        paths: Name | Iterable[Name],
        *,
        storage: Storage | Mapping[str, Any] | None = None,
    ) -> None:
        given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
        files = [_data_file(os.fspath(path)) for path in given]
        corpus = find_files(files, endings=(".bin",), storage=storage)
        super().__init__(corpus, look_at_each(corpus, _layout))

    @override
    def offsets(self, part: Part, read: Read) -> tuple[Offsets, None]:
        layout = self.layouts[part.file]
        index, width = layout.index, layout.width
        assert index is not None
        assert part.stop is not None
        documents_at = index.size - 8 * (layout.count + 1)
        sequences = (documents_at - HEADER.size) // 12
        raw = read((index, documents_at + 8 * part.start, documents_at + 8 * (part.stop + 1)))
        documents = np.frombuffer(raw, "<i8")
        if documents[0] >= 0 and documents[-1] <= sequences and (documents[:-1] <= documents[1:]).all():
            # Megatron writes sequences end to end, so each document ends where the next one's first sequence begins.
            first, last = (min(int(documents[end]), sequences - 1) for end in (0, -1))
            pointers_at = documents_at - 8 * sequences
            pointers = np.frombuffer(
                read((index, pointers_at + 8 * first, pointers_at + 8 * (last + 1))), "<i8"
            )
            if not (pointers % width).any():
                offsets: Offsets = np.append(pointers // width, layout.units)[documents - first]
                return offsets, None
        raise Damage(f"the index of its documents is damaged; {AGAIN}", offset=part.start)


def _data_file(path: str) -> str:
    """Return the name of a prefix's file of tokens; other paths unchanged.

    >>> _data_file("corpus/text_document"), _data_file("a.idx"), _data_file("*.bin"), _data_file("s3://b/a")
    ('corpus/text_document.bin', 'a.bin', '*.bin', 's3://b/a.bin')
    """
    if "://" in path:
        return with_path(path, _data_file)
    if path.endswith(".bin") or any(character in path for character in MAGIC):
        return path
    if Path(path).expanduser().is_dir():
        return path
    return f"{path.removesuffix('.idx')}.bin"


def _layout(corpus: Corpus, file: File) -> Layout:
    """Compare the header of a file's index with the sizes of both files; raise ValueError if they do not fit."""
    index = companion(corpus, file, lambda name: name.removesuffix(".bin") + ".idx")
    if index is None:
        raise ValueError(
            f"there is no {file.name.removesuffix('.bin')}.idx beside it; name pairs of Megatron's files, or read a "
            "file without an index as FlatTokensSource"
        )
    fetcher = Fetcher(corpus.storage)

    def read(form: str, at: int) -> tuple[Any, ...]:
        return struct.unpack(form, fetcher.take((index, at, at + struct.calcsize(form))))

    header = fetcher.take((index, 0, min(index.size, HEADER.size))).ljust(HEADER.size, b"\0")
    beginning, version, code, sequences, entries = HEADER.unpack(header)
    if (beginning, version) != (BEGINNING, VERSION) or code not in DTYPES:
        raise ValueError(
            f"{index.name} is no index of Megatron-LM, version {VERSION}, of ids of type "
            f"{', '.join(map(str, DTYPES))}: it begins with {header[:18]!r}; {AGAIN}"
        )
    documents_at = HEADER.size + 12 * sequences
    size = documents_at + 8 * entries
    if index.size != size or not sequences or entries < 2:
        raise ValueError(
            f"{index.name} has {index.size:,} bytes, and {sequences:,} sequences and {entries - 1:,} documents take "
            f"{size:,}; it was cut off or replaced, or has the modes of a multimodal corpus, which is not read: {AGAIN}"
        )
    [length] = read("<i", HEADER.size + 4 * (sequences - 1))
    pointer, first = read("<qq", documents_at - 8)
    [last] = read("<q", size - 8)
    width = np.dtype(DTYPES[code]).itemsize
    end = pointer + width * length
    if (first, last, end) != (0, sequences, file.size):
        raise ValueError(
            f"it has {file.size:,} bytes, and its index describes {end:,}, in documents of the sequences {first} to "
            f"{last} of {sequences}; one of the two was cut off or replaced: {AGAIN}"
        )
    return Layout(DTYPES[code], end // width, entries - 1, index=index)
