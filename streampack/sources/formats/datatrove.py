"""`DatatroveSource`: the ``.ds`` files of datatrove's tokenizer, read without datatrove.

A ``.ds`` file holds token ids, end to end, ``uint16`` or ``uint32``. Beside it lie

- ``.ds.index``: ``uint64``, for each document the number of tokens of the file up to its end;
- ``.ds.loss``, if it was asked for: a byte for each token, 0 where the token is not trained on;
- ``.ds.metadata``, if it was asked for: the tokenizer and the bytes of an id. It is not read, as the sizes of the other
  files say how many bytes an id has.

All numbers are little-endian.
https://github.com/huggingface/datatrove/blob/main/src/datatrove/pipeline/tokens/tokenizer.py
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
from typing_extensions import override

from streampack.sources.formats.documents import DocumentSource, Layout, Mask, Offsets, Read
from streampack.sources.mechanics.parts import Part
from streampack.storage.base import File
from streampack.storage.corpus import Corpus, companion, look_at_each
from streampack.storage.listing import Name, find_files
from streampack.storage.ranges import Fetcher
from streampack.storage.retries import Storage

AGAIN = "copy both again, or tokenize again"


class DatatroveSource(DocumentSource):
    """The documents of datatrove's ``.ds`` files: rows of ``tokens`` and ``labels``, ``[length]``.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from streampack.sources import Reading
    >>> path = Path(tempfile.mkdtemp(), "00000_unshuffled.ds")
    >>> _ = path.write_bytes(np.array([5, 6, 7, 8, 9], "<u2").tobytes())
    >>> _ = path.with_name("00000_unshuffled.ds.index").write_bytes(np.array([3, 5], "<u8").tobytes())
    >>> [row.data["tokens"].tolist() for row in DatatroveSource(path).read(Reading())]
    [[5, 6, 7], [8, 9]]

    The files are read in place, also by several runs. On this machine they are mapped into memory. A document is what
    the index says, with the end-of-sequence token that datatrove added; where datatrove shuffled chunks
    (``shuffle_chunk_size``), a document that crossed a chunk's end was cut there.

    Args:
        paths: ``.ds`` files, folders that hold some, or globs, of this machine, or URLs.
        loss: whether labels are -100 where a ``.ds.loss`` file says so, if there are such files. If False, every token
            is trained on.
        storage: see `JSONLSource`.

    Raises:
        ValueError: if nothing matches or no file can be read: it has no index, or one that does not describe a file of
            this size, or no ``.ds.loss`` file while others have one.
    """

    def __init__(
        self,
        paths: Name | Iterable[Name],
        *,
        loss: bool = True,
        storage: Storage | Mapping[str, Any] | None = None,
    ) -> None:
        corpus = find_files(paths, endings=(".ds",), storage=storage)
        found = look_at_each(corpus, partial(_layout, loss=loss))
        if any(isinstance(each, Layout) and each.mask is not None for each in found):
            found = [_with_mask(file, each) for file, each in zip(corpus.files, found, strict=True)]
        super().__init__(corpus, found)

    @override
    def offsets(self, part: Part, read: Read) -> tuple[Offsets, None]:
        index = self.layouts[part.file].index
        assert index is not None
        assert part.stop is not None
        ends = np.frombuffer(read((index, 8 * max(0, part.start - 1), 8 * part.stop)), "<i8")
        return (ends if part.start else np.insert(ends, 0, 0)), None


def _with_mask(file: File, found: Layout | str) -> Layout | str:
    if isinstance(found, str) or found.mask is not None:
        return found
    return f"there is no {file.name}.loss beside it, as there is beside others: copy it, or set loss=False"


def _layout(corpus: Corpus, file: File, *, loss: bool) -> Layout:
    """Compare the sizes of a file, its index and its loss; raise ValueError if they do not belong together."""
    index = companion(corpus, file, lambda name: f"{name}.index")
    if index is None:
        raise ValueError(
            f"there is no {file.name}.index beside it, which says where documents end; tokenize with save_index=True, "
            "or read the file as FlatTokensSource"
        )
    cut_off = f"one of the two was cut off or replaced: {AGAIN}"
    if index.size % 8 or not index.size:
        raise ValueError(
            f"{index.name} has {index.size:,} bytes, and an index has 8 for each document; {cut_off}"
        )
    raw = Fetcher(corpus.storage).take((index, index.size - 8, index.size))
    tokens = int.from_bytes(raw, "little")
    dtype = {2 * tokens: "<u2", 4 * tokens: "<u4"}.get(file.size)
    if dtype is None:
        raise ValueError(
            f"it has {file.size:,} bytes, and the {tokens:,} tokens of its index take {2 * tokens:,} or "
            f"{4 * tokens:,}; {cut_off}"
        )
    mask = companion(corpus, file, lambda name: f"{name}.loss") if loss else None
    if mask is not None and mask.size != tokens:
        raise ValueError(
            f"{mask.name} has {mask.size:,} bytes, and the file has {tokens:,} tokens; {cut_off}"
        )
    return Layout(dtype, tokens, index.size // 8, index=index, mask=Mask(mask) if mask else None)
