"""Rows become samples: ready tokens, plain text, and messages through torchtune's transforms.

An encoder is a callable ``row -> Sample`` with a ``fingerprint()``. Any tokenizer of torchtune will do;
its own ``max_seq_len`` is put out of force, because a tokenizer cuts in silence, where no ledger sees it:
what becomes of a long sample is said by ``overlong``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from streampack.assemble import as_sample, missing_column
from streampack.sources.base import digest, plain
from streampack.types import IGNORE_INDEX, Sample

PROBE = "The quick brown fox: 0123456789, naïve 漢字, def f(x): return x\n"


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
        return as_sample(row, tokens=self.tokens, labels=self.labels)

    def fingerprint(self) -> str:
        """The columns' names."""
        return digest("tokens", self.tokens, self.labels)


class TextEncoder:
    """Plain text for pretraining: every token is trained.

    ``tokenizer`` is one of torchtune's, or anything with ``encode(text, add_bos=, add_eos=)``.
    """

    def __init__(
        self, tokenizer: Any, *, column: str = "text", add_bos: bool = True, add_eos: bool = True
    ) -> None:
        self.tokenizer = without_truncation(tokenizer)
        self.column = column
        self.add_bos = add_bos
        self.add_eos = add_eos
        self._processor = sentencepiece_of(self.tokenizer)

    def __call__(self, row: Mapping[str, Any], /) -> Sample:
        """See `Encoder`."""
        if self.column not in row:
            raise missing_column(row, self.column)
        text = row[self.column]
        if not isinstance(text, str):
            raise ValueError(f"column {self.column!r} holds a {type(text).__name__}; it must be text")
        try:
            tokens = self._encode(text)
        except Exception:
            text.encode()  # half a surrogate pair is no text, and a RuntimeError of SentencePiece does not say so
            raise
        if self._processor is not None:
            return Sample(tokens, tokens)
        return as_sample({"tokens": tokens}, labels=None)

    def makes_only(self, vocab_size: int | None) -> bool:
        """Whether it is known that all ids are from 0 and below ``vocab_size``, so that nobody has to look."""
        return self._processor is not None and (
            vocab_size is None or bool(self._processor.vocab_size() <= vocab_size)
        )

    def decode(self, tokens: list[int]) -> str:
        """What the tokens say, as the tokenizer decodes them."""
        return str(self.tokenizer.decode(tokens))

    def _encode(self, text: str) -> Any:
        if self._processor is None:
            return self.tokenizer.encode(text, add_bos=self.add_bos, add_eos=self.add_eos)
        ids = self._processor.encode(text, add_bos=self.add_bos, add_eos=self.add_eos, return_type="numpy")
        return ids.copy()  # into memory that can be written to

    def fingerprint(self) -> str:
        """The settings, and how a sentence comes out."""
        return digest("text", self.column, self.add_bos, self.add_eos, plain(self._encode(PROBE)))


class MessagesEncoder:
    """Chat and instruct rows, as torchtune's ``SFTDataset`` makes them: row -> messages -> tokens and mask.

    ``message_transform`` is one of torchtune's (``InputOutputToMessages``, ``ShareGPTToMessages``,
    ``OpenAIToMessages``, ...) or any callable that returns ``{"messages": [...]}``; ``tokenizer`` one of
    its model tokenizers. Masked tokens get the label ``IGNORE_INDEX``.
    """

    def __init__(self, tokenizer: Any, *, message_transform: Callable[[Mapping[str, Any]], Any]) -> None:
        self.tokenizer = without_truncation(tokenizer)
        self.message_transform = message_transform

    def __call__(self, row: Mapping[str, Any], /) -> Sample:
        """See `Encoder`."""
        try:
            messages = self.message_transform(row)["messages"]
        except KeyError as error:
            # A column, or something within one: the key of a turn, a role.
            raise ValueError(
                f"the message transform found no {error}, in the row or within it; the row's columns are "
                f"{', '.join(map(repr, row)) or 'none'}"
            ) from error
        _validate(messages)
        try:
            encoded = self.tokenizer({"messages": messages})
        except Exception:
            for message in messages:
                message.text_content.encode()  # as above
            raise
        tokens = as_sample(encoded, labels=None).tokens
        if tokens.size != len(encoded["mask"]):
            raise ValueError(f"the tokenizer gave {tokens.size} tokens and a mask of {len(encoded['mask'])}")
        return Sample(tokens, np.where(encoded["mask"], IGNORE_INDEX, tokens))

    def decode(self, tokens: list[int]) -> str:
        """What the tokens say, as the tokenizer decodes them."""
        return str(self.tokenizer.decode(tokens))

    def fingerprint(self) -> str:
        """The transform's name and settings, and how a short conversation comes out of the tokenizer."""
        from torchtune.data import Message

        transform = self.message_transform
        settings = sorted((k, str(v)) for k, v in getattr(transform, "__dict__", {}).items())
        probe = self.tokenizer(
            {"messages": [Message("user", PROBE, masked=True), Message("assistant", PROBE, eot=True)]}
        )
        return digest(
            "messages", qualified_name(transform), settings, plain(probe["tokens"]), plain(probe["mask"])
        )


def qualified_name(thing: Any) -> str:
    """Of a function or class, or of an object's class."""
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{named.__module__}.{named.__qualname__}"


def _validate(messages: Any) -> None:
    from torchtune.data import validate_messages  # nine seconds to import, so not at the top

    validate_messages(messages)


def sentencepiece_of(tokenizer: Any) -> Any:
    """The SentencePiece processor of a tokenizer of torchtune's that does nothing but ask it; None of any other.

    It can give arrays. The lists that torchtune asks for cost it a twentieth of its work, and as much again to make
    arrays of. A subclass may do something else to a text, so only torchtune's own classes are taken for what they are.
    """
    base = getattr(tokenizer, "_spm_model", tokenizer)  # within the tokenizer of a model
    processor = getattr(base, "spm_model", None)
    parts = (tokenizer, base)
    if processor is None or not all(type(part).__module__.startswith("torchtune.") for part in parts):
        return None
    if any("encode" in vars(part) for part in parts):
        return None
    try:
        found = processor.encode(PROBE, add_bos=True, add_eos=False, return_type="numpy")
    except (TypeError, ValueError, RuntimeError):  # an older release cannot, nor a model without a beginning
        return None
    return processor if found.tolist() == tokenizer.encode(PROBE, add_bos=True, add_eos=False) else None


def without_truncation(tokenizer: Any) -> Any:
    """A copy of a torchtune tokenizer that does not cut."""
    if getattr(tokenizer, "max_seq_len", None) is None:
        return tokenizer
    whole = copy.copy(tokenizer)
    whole.max_seq_len = None
    return whole
