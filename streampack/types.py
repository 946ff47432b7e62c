"""The types that every stage shares: rows, samples, packs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

IGNORE_INDEX = -100
"""The label that no loss counts, as in torch's ``cross_entropy`` and torchtune."""

IntArray = npt.NDArray[np.signedinteger[Any]]
"""Token ids or labels before they become tensors: int32, which is copied faster, wherever they fit, else int64."""

Array = npt.NDArray[Any]
"""Numbers of any type, such as pixels."""

FloatArray = npt.NDArray[np.float32]
"""Numbers of segments or tokens, such as advantages."""

INT32, INT64 = np.dtype(np.int32), np.dtype(np.int64)
"""The types of an `IntArray`. numpy takes longer with ``np.int32``, whose dtype it looks up for every new array."""

Cursor = tuple[int, ...]
"""Where reading can resume in a lane's part of a source, in one epoch; only that source can read it."""

RowId = tuple[int, ...]
"""Which row of the corpus; ``source.locate(row_id)`` returns its place as text, such as file and line."""


class Row(NamedTuple):
    """A row of a source: its data and place."""

    data: Mapping[str, Any]
    row_id: RowId
    made: Sample | Exception | None = None  # what its encoder made of it, if it was encoded with other rows


class Sample(NamedTuple):
    """One tokenized sequence, int32 or int64. Labels are unshifted: ``labels[i]`` is ``tokens[i]`` or ``IGNORE_INDEX``.

    >>> Sample(np.array([1, 5, 2]), np.array([-100, 5, 2])).tokens.size
    3
    """

    tokens: IntArray  # [length]
    labels: IntArray  # [length]

    def cut(self, start: int, stop: int) -> Sample:
        """Return tokens ``[start, stop)`` with their labels, as views of this sample's arrays."""
        if start == 0 and stop == self.tokens.size:
            return self
        tokens = self.tokens[start:stop]
        return Sample(tokens, tokens if self.labels is self.tokens else self.labels[start:stop])


class Fragment(NamedTuple):
    """Where one sequence of a pack came from: tokens ``[start, stop)`` of the sample that row ``row_id`` became."""

    row_id: RowId
    start: int
    stop: int
    # Trained tokens of all fragments together, if the sample was split; `label_weights` divides by it.
    trained: int | None = None
    padding: int = 0  # tokens after them in the sequence, for ``pad_seqs_to``

    @property
    def length(self) -> int:
        """Tokens of the sequence in its pack, its padding included: its entry of ``seq_lens``."""
        return self.stop - self.start + self.padding


@dataclass(slots=True)
class PackGroups:
    """What a pack with groups says of its sequences, the segments of the groups.

    ``fields`` and ``token_fields`` are NaN where a sample lacks the field, and at padding.
    """

    parents: tuple[int, ...]  # for each sequence the one of this pack that it continues, or -1
    first_labels: tuple[int, ...]  # labels of the first tokens, which the last token of the parent predicts
    fields: dict[str, FloatArray]  # each [sequences]
    token_fields: dict[str, FloatArray]  # each [max_seq_len]


@dataclass(slots=True)
class Pack:
    """``max_seq_len`` tokens made of sequences that lie end to end, padded at the end."""

    tokens: IntArray  # [max_seq_len]
    labels: IntArray  # [max_seq_len], IGNORE_INDEX at the first token of every sequence and in the padding
    # Lengths of the sequences, the padding at their ends (`pad_seqs_to`) included; their sum is at most max_seq_len.
    seq_lens: tuple[int, ...]
    fragments: tuple[Fragment, ...]  # one per real sequence, in the same order
    # Where it came from; -1 where that is unknown.
    epoch: int = -1  # 0 for every pack of a stream without end, in which epochs run into one another
    number: int = -1  # how many packs its lane made before it in this epoch
    lane: int = -1
    groups: PackGroups | None = None  # None: it holds plain samples only
    input_pos: IntArray | None = None  # [max_seq_len]; None: positions count from 0 in every sequence
    media: tuple[Any, ...] | None = (
        None  # for each sequence its `MediaSample`, or None; None: it holds text only
    )
