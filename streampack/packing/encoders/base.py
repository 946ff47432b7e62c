"""`Encoder`: the base class of encoders, and the encoder of rows that are tokens already."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from streampack.packing.samples import columns_of, sample_from_row
from streampack.sources.arrow_rows import ArrowBatch, CheckedIds
from streampack.types import Sample
from streampack.validation import require_token_id

SUGGESTED_ENCODERS = {
    "completions": "AnswersEncoder(tokenizer)",
    "text": "TextEncoder(tokenizer)",
    "messages": "ChatEncoder(tokenizer)",
    "conversations": "ChatEncoder(tokenizer)",
    "completion": "ChatEncoder(tokenizer)",
    "instruction": "MessagesEncoder(tokenizer, message_transform=AlpacaToMessages())",
    "content": "TextEncoder(tokenizer, column='content')",
}
"""Columns of rows without tokens, and the encoder that an error message suggests for them."""


class Encoder(ABC):
    """Base class of encoders, which are called with a row and return a `Sample`. Plain functions are encoders, too.

    A sample that ended with the ``eos_id`` of its encoder, or of the encoder's ``tokenizer``, and is cut by
    ``overlong="truncate"`` ends with it again.
    """

    @abstractmethod
    def __call__(self, row: Mapping[str, Any], /) -> Sample:
        """Encode a row. Raise ValueError for one that makes no sample; the caller adds its place."""

    def ids_below(self, stored: int | None) -> int | None:
        """Return a number that every token id is below, whatever the rows; None if there is no such guarantee.

        With it, samples need not be checked.

        Args:
            stored: the number that every id in the rows is below, if the source guarantees one.
        """
        return None


class TokensEncoder(Encoder):
    """Encoder of rows that are tokens already. ``labels=None`` trains on every token.

    >>> TokensEncoder()({"input_ids": [4, 5]}).labels.tolist()
    [4, 5]

    Args:
        tokens: the column of the ids. Default: ``tokens``, as torchtune names them, or ``input_ids``, as Hugging Face
            does; a bare list of ids will do as well. Rows with ``input_ids`` may lack labels, see `sample_from_row`.
        labels: the column of the labels.
        eos_id: the token that ends texts. A sample that ended with it and is cut by ``overlong="truncate"`` ends with
            it again.
    """

    def __init__(
        self, *, tokens: str | None = None, labels: str | None = "labels", eos_id: int | None = None
    ) -> None:
        self.tokens = tokens
        self.labels = labels
        self.eos_id = None if eos_id is None else require_token_id(eos_id, "eos_id", vocab_size=None)

    def __call__(self, row: Mapping[str, Any], /) -> Sample:
        """See `Encoder`."""
        try:
            return sample_from_row(row, tokens=self.tokens, labels=self.labels)
        except ValueError as error:
            there = row if isinstance(row, Mapping) else ()
            if not there or not {"tokens", "input_ids", self.tokens}.isdisjoint(there):
                raise
            fitting = (encoder for column, encoder in SUGGESTED_ENCODERS.items() if column in there)
            hint = next(fitting, "TokensEncoder(tokens=COLUMN, labels=COLUMN or None)")
            raise ValueError(
                f"{error}; such rows need an encoder: encoder={hint}, or data.encoder in a config"
            ) from None

    def ids_below(self, stored: int | None) -> int | None:
        """See `Encoder`."""
        as_stored = self.tokens in ("tokens", None) and self.labels in ("labels", None)
        return stored if as_stored and type(self) is TokensEncoder else None  # a subclass may make other ids

    def checked_in(self, batch: ArrowBatch) -> CheckedIds | None:
        """Return what this encoder makes of the rows of a batch, checked all at once; None if it must see each row.

        This takes a quarter of the time that rows take. A batch that may be mapped from a file is not looked through
        before a part of its rows was read.
        """
        if batch.unread:
            return None
        key = self.tokens, self.labels
        if key not in batch.checked:
            batch.checked[key] = self._look_through(batch)
        return batch.checked[key]

    def _look_through(self, batch: ArrowBatch) -> CheckedIds | None:
        try:
            columns = columns_of(tuple(batch.names), self.tokens, self.labels)
        except ValueError:  # of every row, which raises it with its place
            return None
        ids = batch.ids.get(columns.tokens)
        if ids is None or columns.masks:
            return None
        for column in columns.boundaries:
            # A mask of ones is what tokenizers give with every row: nothing is hidden.
            mask = batch.ids.get(column) if column == "attention_mask" else None
            if mask is None or mask.limits(narrow=batch.whole) != (1, 1):
                return None
            if not np.array_equal(ids.starts, mask.starts):
                return None
        return CheckedIds.of(batch, columns.tokens, columns.labels)


def qualified_name(thing: Any) -> str:
    """Return the dotted name of a function or class, or of an object's class."""
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{named.__module__}.{named.__qualname__}"
