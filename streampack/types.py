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
"""Ids on their way: 32 bits wherever they fit, because a pack is copied and carried several times before it becomes
tensors, which are int64."""

Cursor = tuple[int, ...]
"""Where reading can resume in one lane's epoch of a source; opaque to everything but that source."""

RowId = tuple[int, ...]
"""Which row of the corpus; ``source.locate(row_id)`` prints it, such as file and line."""


class Row(NamedTuple):
    """What a source yields: a row's data, the cursor to resume AT it, and its place in the corpus."""

    data: Mapping[str, Any]
    cursor: Cursor
    row_id: RowId


class Sample(NamedTuple):
    """One tokenized sequence, int32 or int64. Labels are unshifted: ``labels[i]`` is ``tokens[i]`` or ``IGNORE_INDEX``.

    >>> Sample(np.array([1, 5, 2]), np.array([-100, 5, 2])).tokens.size
    3
    """

    tokens: IntArray  # [length]
    labels: IntArray  # [length]

    def cut(self, start: int, stop: int) -> Sample:
        """Return tokens ``[start, stop)``, as a view."""
        if start == 0 and stop == self.tokens.size:
            return self
        tokens = self.tokens[start:stop]
        return Sample(tokens, tokens if self.labels is self.tokens else self.labels[start:stop])


class Fragment(NamedTuple):
    """Provenance of one sequence of a pack: tokens ``[start, stop)`` of the sample that row ``row_id`` became."""

    row_id: RowId
    start: int
    stop: int
    trained: int | None = None  # of a split sample: trained tokens in all its fragments; None if it is whole


@dataclass(slots=True)
class Pack:
    """A row of ``max_seq_len`` tokens made of whole sequences, padded at the end.

    Its positions follow from ``seq_lens``, and are made where it becomes tensors. An array has 32 bits if those of
    all its sequences have.
    """

    tokens: IntArray  # [max_seq_len]
    labels: IntArray  # [max_seq_len], IGNORE_INDEX at the first token of every sequence and in the padding
    seq_lens: tuple[int, ...]  # lengths of the real sequences; their sum is at most max_seq_len
    fragments: tuple[Fragment, ...]  # one per real sequence, in the same order
    epoch: int  # 0 throughout when epochs roll into one another
    number: int  # of this pack in its lane's epoch
    lane: int
