"""`Encoder`: the base class of encoders; encoders of rows that are tokens already, and of plain text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from streampack.packing.encoders.checks import check_ends, check_tokenizer
from streampack.packing.encoders.conversation import json_messages, parts_of, read_part, refuse_marks
from streampack.packing.encoders.steps import Steps, Text, attempt, run, run_together
from streampack.packing.encoders.tokenizer import HFTokenizer, tokenize
from streampack.packing.samples import columns_of, missing_column, sample_from_pair, sample_from_row
from streampack.sources.mechanics.arrow_rows import ArrowBatch, CheckedIds
from streampack.types import Sample
from streampack.validation import require_token_id

BATCH_ROWS = 64
"""Rows of 2,000 characters to tokenize at once: 16 and 256 take 10 to 50 % more time, one by one 80 %."""


class Encoder(ABC):
    """Base class of encoders, which are called with a row and return a `Sample`. Plain functions are encoders, too.

    A sample that ended with the ``eos_id`` of its encoder, or of the encoder's ``tokenizer``, and is cut by
    ``overlong="truncate"`` ends with it again.

    Attributes:
        batch_rows: the number of rows to pass to `encode_many`; 1 if batches are no faster than single rows.
    """

    batch_rows: int = 1

    @abstractmethod
    def __call__(self, row: Mapping[str, Any], /) -> Sample:
        """Encode a row. Raise ValueError for one that makes no sample; the caller adds its place."""

    def encode_many(self, rows: Sequence[Mapping[str, Any]], /) -> list[Sample | Exception]:
        """Encode rows as one by one. A row that makes no sample has the exception that a call with it raises.

        Samples must not share memory; those of calls are copied, which may use theirs again.
        """

        def copied(row: Mapping[str, Any]) -> Sample:
            return sample_from_row(self(row))

        return [attempt(copied, row) for row in rows]

    def characters(self, row: Mapping[str, Any], /) -> int:
        """Return how many characters of a row are encoded, or fewer; 0 where that is not known before."""
        return 0

    def ids_below(self, stored: int | None) -> int | None:
        """Return a number that every token id is below, whatever the rows; None if there is no such guarantee.

        With it, samples need not be checked.

        Args:
            stored: the number that every id in the rows is below, if the source guarantees one.
        """
        return None


class TextsEncoder(Encoder):
    """Base class of our encoders with a tokenizer, which ask for the tokens of a row's texts in `steps`."""

    tokenizer: Any

    @abstractmethod
    def steps(self, row: Mapping[str, Any]) -> Steps[Sample]:
        """Encode a row."""

    def __call__(self, row: Mapping[str, Any], /) -> Sample:
        """See `Encoder`."""
        return run(self.steps(row), partial(tokenize, self.tokenizer))

    def encode_many(self, rows: Sequence[Mapping[str, Any]], /) -> list[Sample | Exception]:
        """See `Encoder`. The texts of all rows are tokenized together."""
        if self.batch_rows == 1:
            return super().encode_many(rows)
        return run_together([self.steps(row) for row in rows], partial(tokenize, self.tokenizer))

    @property
    def batch_rows(self) -> int:  # type: ignore[override]
        """See `Encoder`."""
        own = type(self).__call__ is TextsEncoder.__call__  # a subclass may make other samples
        return (
            BATCH_ROWS if own and isinstance(self.tokenizer, HFTokenizer) and self.tokenizer.in_batches else 1
        )

    def decode(self, tokens: list[int]) -> str:
        """Decode tokens, special tokens included."""
        return str(self.tokenizer.decode(tokens))


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
        return sample_from_row(row, tokens=self.tokens, labels=self.labels)

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


class TextEncoder(TextsEncoder):
    """Encoder of plain text, for pretraining: every token is trained.

    Args:
        tokenizer: one of torchtune's, a Hugging Face tokenizer, or anything with ``encode(text, add_bos=, add_eos=)``.
        column: the column that holds the text.
        add_bos: whether each text begins with BOS. None leaves it to the tokenizer.
        add_eos: whether each text ends with EOS. A text that has its own BOS or EOS gets no second one.

    Raises:
        ValueError: for a tokenizer that ignores ``add_bos`` or ``add_eos``, or has no such token.
    """

    def __init__(
        self, tokenizer: Any, *, column: str = "text", add_bos: bool | None = None, add_eos: bool = True
    ) -> None:
        self.tokenizer = check_tokenizer(tokenizer)
        self.add_bos = check_ends(self.tokenizer, add_bos=add_bos, add_eos=add_eos)
        self.add_eos = add_eos
        self.column = column

    def steps(self, row: Mapping[str, Any]) -> Steps[Sample]:
        """See `TextsEncoder`."""
        if self.column not in row:
            raise missing_column(row, self.column, option="column")
        text = row[self.column]
        if not isinstance(text, str):
            raise ValueError(
                f"column {self.column!r} holds {'no text (null)' if text is None else f'a {type(text).__name__}'}; "
                "mend the row, or set skip_bad=True, which counts and lists such rows"
            )
        refuse_marks(text, row)
        [(tokens, _)] = yield [Text(text, self.add_bos, self.add_eos)]
        return sample_from_pair(tokens, tokens)

    def characters(self, row: Mapping[str, Any], /) -> int:
        """See `Encoder`."""
        text = row.get(self.column)
        return len(text) if isinstance(text, str) else 0


def characters_in(value: Any) -> int:
    """Return how many characters the contents of a text or of messages have, at least; 0 for anything else.

    The reasoning of a message does not count: templates drop it from earlier answers.

    >>> characters_in("Hello"), characters_in([{"from": "gpt", "value": "<think>Hm</think>Hello"}]), characters_in([5])
    (5, 5, 0)
    """
    found = json_messages(value) if isinstance(value, str) else value
    if found is None:
        return len(value or "")
    messages = [found] if isinstance(found, Mapping) else found
    if not isinstance(messages, list | tuple | np.ndarray):
        return 0
    characters = 0
    for message in messages:
        if not isinstance(message, Mapping):  # ids; there may be many
            break
        for part in parts_of(message) or parts_of({"content": message.get("value")}):
            kind, text = read_part(part)
            if kind == "text" and isinstance(text, str):
                characters += len(text.rpartition("</think>")[2].strip())
    return characters
