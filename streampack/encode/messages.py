"""Chat and instruct rows, by torchtune's message transforms and model tokenizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from streampack.assemble import as_sample
from streampack.encode.base import PROBE, qualified_name
from streampack.encode.tokenizer import without_truncation
from streampack.sources.base import digest, plain
from streampack.types import IGNORE_INDEX, Sample


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


def _validate(messages: Any) -> None:
    from torchtune.data import validate_messages  # nine seconds to import, so not at the top

    validate_messages(messages)
