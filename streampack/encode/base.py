"""The contract of an encoder, rows that are tokens already, and what all encoders use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from streampack.assemble import as_sample
from streampack.sources.base import digest
from streampack.types import Sample

PROBE = "The quick brown fox: 0123456789, naïve 漢字, def f(x): return x\n"

ENCODERS = {
    "text": "TextEncoder(tokenizer)",
    "messages": "ChatEncoder(tokenizer)",
    "conversations": "ChatEncoder(tokenizer, column='conversations')",
    "completion": "PromptCompletionEncoder(tokenizer)",
    "instruction": "MessagesEncoder(tokenizer, message_transform=AlpacaToMessages())",
    "content": "TextEncoder(tokenizer, column='content')",
}
"""Columns of rows that are no tokens yet, and what would make tokens of them."""


class Encoder(Protocol):
    """What makes a `Sample` of a row."""

    def __call__(self, row: Mapping[str, Any], /) -> Sample:
        """Raise ValueError for a row that makes no sample; the caller adds its place."""

    def fingerprint(self) -> str:
        """A digest of all that decides the tokens; a state made with another one is refused."""


class TokensEncoder:
    """Rows that are tokens already. ``labels=None`` trains on every token.

    >>> TokensEncoder(tokens="input_ids", labels=None)({"input_ids": [4, 5]}).labels.tolist()
    [4, 5]
    """

    def __init__(self, *, tokens: str = "tokens", labels: str | None = "labels") -> None:
        self.tokens = tokens
        self.labels = labels

    def __call__(self, row: Mapping[str, Any], /) -> Sample:
        """See `Encoder`."""
        try:
            return as_sample(row, tokens=self.tokens, labels=self.labels)
        except ValueError as error:
            hint = next((encoder for column, encoder in ENCODERS.items() if column in row), None)
            if self.tokens in row or hint is None:
                raise
            raise ValueError(
                f"{error}; such rows need an encoder: encoder={hint}, or data.encoder in a config"
            ) from None

    def fingerprint(self) -> str:
        """The columns' names."""
        return digest("tokens", self.tokens, self.labels)


def qualified_name(thing: Any) -> str:
    """Of a function or class, or of an object's class."""
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{named.__module__}.{named.__qualname__}"
