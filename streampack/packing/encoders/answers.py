"""Encoding of answers, each as a whole behind its prompt: texts, and messages by a chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from streampack.packing.encoders.chat import Messages, PromptCompletionEncoder, joined, masked_sample
from streampack.packing.encoders.conversation import parse_conversation
from streampack.packing.encoders.hf_tokenizer import HFTokenizer
from streampack.packing.encoders.shared_prefix import require_trained
from streampack.types import Sample

Content = str | Messages
"""A text, or messages in OpenAI's form."""


class AnswerEncoder:
    """Encoder of an answer behind its prompt, both texts or both messages; it trains the answer.

    The tokens are those that `PromptCompletionEncoder` makes.

    Args:
        tokenizer: one of transformers or torchtune.
        add_bos: as for `TextEncoder`.
        add_eos: whether a text ends with EOS.
        way_out: what to give instead of messages, for a tokenizer without a chat template.
    """

    def __init__(self, tokenizer: Any, *, add_bos: bool | None, add_eos: bool, way_out: str) -> None:
        self.texts = PromptCompletionEncoder(tokenizer, add_bos=add_bos, add_eos=add_eos)
        self.tokenizer = self.texts.tokenizer
        self.way_out = way_out

    def encode(self, prompt: Content, answer: Content, *, name: str, tools: Any = None) -> Sample:
        """Return the tokens of prompt and answer; ``name`` names the answer in errors.

        Raises:
            ValueError: for tokens that cannot be told apart, and for an answer without any.
        """
        if isinstance(prompt, str) and isinstance(answer, str):
            return require_trained(self.texts.encode_text(prompt, answer), name)
        before, after = as_messages(prompt, "user"), as_messages(answer, "assistant")
        if all(message["role"] != "assistant" for message in after):
            raise ValueError(
                f"{name} holds no message of the assistant, so nothing of it is trained; its roles are "
                f"{', '.join(message['role'] for message in after) or 'none'}"
            )
        messages, trained = joined(before, after, name)
        return require_trained(masked_sample(*self.chat.chat(messages, trained, tools=tools)), name)

    @property
    def chat(self) -> HFTokenizer:
        """The tokenizer, which has a chat template.

        Raises:
            ValueError: if it has none.
        """
        if not isinstance(self.tokenizer, HFTokenizer):
            raise ValueError(
                f"the row holds messages, and a {type(self.tokenizer).__name__} has no chat template; give a Hugging "
                "Face tokenizer (tokenizer: {_component_: streampack.HFTokenizer, path: ...}), or "
                + self.way_out
            )
        return self.tokenizer

    def bare(self, text: str, *, add_eos: bool) -> list[int]:
        """Return the ids of a text that is no part of another."""
        return list(self.tokenizer.encode(text, add_bos=self.texts.add_bos, add_eos=add_eos))


def read_content(value: Any, column: str) -> Content:
    """Return what a column holds: a text, or messages in OpenAI's form.

    Messages may be one (a dict with a role), a list of them in OpenAI's form or ShareGPT's, JSON text of such a list,
    or OpenAI's ``{"messages": [...]}``.

    >>> read_content({"from": "gpt", "value": "Yes."}, "chosen")
    [{'role': 'assistant', 'content': 'Yes.'}]

    Raises:
        ValueError: for null and for anything else.
    """
    if isinstance(value, str):
        found = _json_messages(value)
        if found is None:
            return value
        value = found
    elif isinstance(value, Mapping):
        value = value.get("messages", [value])
    elif value is None:
        raise ValueError(f"column {column!r} is null; mend the row, or leave it out (on_bad_record: skip)")
    elif not isinstance(value, list | tuple | np.ndarray):
        raise ValueError(f"column {column!r} holds a {type(value).__name__}; give text, or messages")
    return parse_conversation({column: value}, column)


def as_messages(content: Content, role: str) -> Messages:
    """Return content as messages; a text becomes one message of this role."""
    return [{"role": role, "content": content}] if isinstance(content, str) else content


def repeats(prompt: Content, messages: Messages) -> bool:
    """Return whether a conversation begins with a prompt; one that is text may be any message of the user."""
    said = [(message["role"], message["content"]) for message in messages]
    if isinstance(prompt, str):
        return ("user", prompt) in said
    return said[: len(prompt)] == [(message["role"], message["content"]) for message in prompt]


def common_messages(conversations: Sequence[Messages]) -> int:
    """Return how many messages all conversations begin with, before the last answer of any of them."""
    limit = min(_last_answer(messages) for messages in conversations)
    first, *others = conversations
    return next((i for i in range(limit) if any(other[i] != first[i] for other in others)), limit)


def _last_answer(messages: Messages) -> int:
    return max(
        (i for i, message in enumerate(messages) if message["role"] == "assistant"), default=len(messages)
    )


def _json_messages(text: str) -> Any:
    """Return the messages of JSON text, None for any other text."""
    if not text.lstrip().startswith("[{"):
        return None
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return None
    first = found[0]
    return found if isinstance(first, dict) and first.keys() & {"role", "from"} else None
