"""The encoder of chat and instruct rows for torchtune's message transforms and model tokenizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from streampack.fingerprint import digest, plain
from streampack.packing.assemble import as_sample
from streampack.packing.encoders.base import PROBE, Encoder, qualified_name
from streampack.packing.encoders.hf_tokenizer import HFTokenizer
from streampack.packing.encoders.tokenizer import check_tokenizer, own_fingerprint
from streampack.packing.encoders.transforms import GuardedTransform
from streampack.types import IGNORE_INDEX, Sample


class MessagesEncoder(Encoder):
    """Chat and instruct rows, encoded as by torchtune's ``SFTDataset``: row -> messages -> tokens and mask.

    Masked tokens get the label ``IGNORE_INDEX``. Rows of which torchtune's transforms would silently
    drop or invent something are refused: nulls, tool calls, images, columns beside the conversation.

    Args:
        tokenizer: one of torchtune's model tokenizers, or a Hugging Face tokenizer with a chat template.
        message_transform: one of torchtune's (``InputOutputToMessages``, ``ShareGPTToMessages``,
            ``OpenAIToMessages``, ...), or any callable that returns ``{"messages": [...]}``.
        ignore: columns and keys of messages to leave out on purpose.

    Raises:
        ValueError: for a tokenizer that takes no messages, or a transform that does not fit.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        message_transform: Callable[[Mapping[str, Any]], Any],
        ignore: Sequence[str] = (),
    ) -> None:
        self.tokenizer = check_tokenizer(tokenizer)
        if not callable(self.tokenizer):
            raise ValueError(
                f"a {type(self.tokenizer).__name__} takes text only, no messages; give one of torchtune's model "
                "tokenizers, or streampack.HFTokenizer, which has the chat template of its model"
            )
        if isinstance(self.tokenizer, HFTokenizer):
            _ = self.tokenizer.chat  # raises if there is no template
        self.message_transform = message_transform
        self.guarded = GuardedTransform(message_transform, ignore=ignore)

    def __call__(self, row: Mapping[str, Any], /) -> Sample:
        """See `Encoder`."""
        from torchtune.data import validate_messages  # takes nine seconds to import

        messages = self.guarded(row)["messages"]
        validate_messages(messages)
        try:
            encoded = self.tokenizer({"messages": messages})
        except Exception:
            for message in messages:
                message.text_content.encode()  # raises for half a surrogate pair, which the error may not mention
            raise
        tokens = as_sample(encoded, labels=None).tokens
        if tokens.size != len(encoded["mask"]):
            raise ValueError(f"the tokenizer gave {tokens.size} tokens and a mask of {len(encoded['mask'])}")
        return Sample(tokens, np.where(encoded["mask"], IGNORE_INDEX, tokens))

    def decode(self, tokens: list[int]) -> str:
        """Decode tokens as the tokenizer does."""
        return str(self.tokenizer.decode(tokens))

    def fingerprint(self) -> str:
        """Return a digest of the transform's name and settings, and of the tokens of a short conversation."""
        from torchtune.data import Message

        transform = self.message_transform
        settings = sorted((k, _setting(v)) for k, v in getattr(transform, "__dict__", {}).items())
        probe = self.tokenizer(
            {"messages": [Message("user", PROBE, masked=True), Message("assistant", PROBE, eot=True)]}
        )
        choices = (self.guarded.ignore, own_fingerprint(self.tokenizer))
        encoded = (plain(probe["tokens"]), plain(probe["mask"]))
        return digest("messages", qualified_name(transform), settings, *encoded, choices)


def _setting(value: Any) -> str:
    """Show a value without memory addresses: an object without a better name by its class."""
    if isinstance(value, Mapping):
        return str(sorted((str(key), _setting(item)) for key, item in value.items()))
    if isinstance(value, list | tuple):
        return str([_setting(item) for item in value])
    if isinstance(value, set | frozenset):
        return str(sorted(map(_setting, value)))
    return qualified_name(value) if " at 0x" in (shown := str(value)) else shown
