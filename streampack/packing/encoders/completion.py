"""Encoding of an answer behind its prompt: texts, and messages by a chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from streampack.packing.encoders.conversation import parse_conversation
from streampack.packing.encoders.hf_tokenizer import HFTokenizer
from streampack.packing.encoders.tokenizer import check_ends, check_tokenizer, own_bos
from streampack.packing.samples import sample_from_pair
from streampack.types import IGNORE_INDEX, Sample

Messages = list[dict[str, Any]]
"""A conversation in OpenAI's form."""

Content = str | Messages
"""A text, or messages."""


class Completions:
    """Tokenizes answers behind their prompts, and masks the prompts.

    What only texts or only messages need of a tokenizer is checked when the first of them comes.

    Args:
        tokenizer: one of transformers or torchtune; messages need a chat template.
        add_bos: as for `TextEncoder`.
        add_eos: whether an answer that is text ends with EOS.
    """

    def __init__(self, tokenizer: Any, *, add_bos: bool | None, add_eos: bool) -> None:
        self.tokenizer = check_tokenizer(tokenizer)
        self.add_bos = add_bos
        self.add_eos = add_eos
        if not (isinstance(self.tokenizer, HFTokenizer) and self.tokenizer.has_template):
            _ = self.bos  # all that comes is text

    @cached_property
    def bos(self) -> bool | None:
        """``add_bos`` of texts.

        Raises:
            ValueError: for a tokenizer that ignores ``add_bos`` or ``add_eos``, or has no such token.
        """
        check_ends(self.tokenizer, add_bos=self.add_bos, add_eos=self.add_eos)
        return own_bos(self.tokenizer) if self.add_bos is None else self.add_bos

    @property
    def chat(self) -> HFTokenizer:
        """The tokenizer, which has a chat template.

        Raises:
            ValueError: if it has none.
        """
        if not isinstance(self.tokenizer, HFTokenizer):
            raise ValueError(
                f"messages need a chat template, and a {type(self.tokenizer).__name__} has no chat template; give a "
                "Hugging Face tokenizer (tokenizer: {_component_: streampack.HFTokenizer, path: ...}), rows of text "
                "or ids, or MessagesEncoder with one of torchtune's message transforms"
            )
        _ = self.tokenizer.chat  # raises if there is no template
        return self.tokenizer

    def encode_messages(self, messages: Messages, trained: list[bool], *, tools: Any) -> Sample:
        """Encode a conversation, of which some messages are trained."""
        return masked_sample(*self.chat.chat(messages, trained, tools=tools))

    def encode_text(self, prompt: str, answer: str) -> Sample:
        """Encode a text behind its prompt, of which the answer is trained.

        Raises:
            ValueError: if a token crosses from one into the other.
        """
        head = self.encode_prompt(prompt)
        ids = self.tokenizer.encode(prompt + answer, add_bos=self.bos, add_eos=self.add_eos)
        if list(ids[: len(head)]) != head:
            raise ValueError(
                f"a token crosses from the prompt ({prompt[-16:]!r}) into the completion ({answer[:16]!r}), so no "
                "mask is right; move white space from the prompt's end to the completion's beginning"
            )
        return masked_sample(ids, np.arange(len(ids)) >= len(head))

    def encode_prompt(self, prompt: Content, *, tools: Any = None) -> list[int]:
        """Return the ids of a prompt alone, as at inference."""
        if isinstance(prompt, str):
            return list(self.tokenizer.encode(prompt, add_bos=self.bos, add_eos=False))
        return self.chat.chat.prompt(prompt, tools=tools)


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
        raise ValueError(f"column {column!r} is null; mend the row, or leave it out (skip_bad: True)")
    elif not isinstance(value, list | tuple | np.ndarray):
        raise ValueError(f"column {column!r} holds a {type(value).__name__}; give text, or messages")
    return parse_conversation({column: value}, column)


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


def as_messages(content: Content, role: str) -> Messages:
    """Return content as messages; a text becomes one message of this role."""
    return [{"role": role, "content": content}] if isinstance(content, str) else content


def is_trained(message: Mapping[str, Any]) -> bool:
    """Return whether a message is an answer, and its weight is not 0."""
    return bool(message["role"] == "assistant" and message.get("weight", 1) == 1)


def joined(before: Messages, after: Messages, name: str) -> tuple[Messages, list[bool]]:
    """Return a prompt and an answer as one conversation, and which messages are trained; ``name`` names the answer.

    Raises:
        ValueError: for an answer that begins as a prompt does.
    """
    if before and before[-1]["role"] == "user" and after[0]["role"] in ("user", "system"):
        raise ValueError(
            f"{name} begins with a message of the {after[0]['role']} and does not repeat the prompt, which ends with "
            "one of the user; give the prompt once, or repeat all of it"
        )
    return [*before, *after], [False] * len(before) + [is_trained(message) for message in after]


def masked_sample(ids: Any, trained: Any) -> Sample:
    """Make a sample of ids, and a mask of those that are trained."""
    tokens = sample_from_pair(ids, ids).tokens
    return Sample(tokens, np.where(trained, tokens, IGNORE_INDEX))
