"""Encoders of conversations, and of prompts with completions, for Hugging Face tokenizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from streampack.fingerprint import digest, plain
from streampack.packing.encoders.base import PROBE_TEXT, Encoder
from streampack.packing.encoders.conversation import (
    UnreadColumns,
    parse_conversation,
    parse_json,
    refuse_left_out,
)
from streampack.packing.encoders.hf_tokenizer import HFTokenizer
from streampack.packing.encoders.tokenizer import check_ends, check_tokenizer, own_bos, own_fingerprint
from streampack.packing.samples import missing_column, sample_from_pair
from streampack.types import IGNORE_INDEX, Sample
from streampack.validation import require

Messages = list[dict[str, Any]]
"""A conversation in OpenAI's form."""

ANSWERS = ("all", "last")
COLUMNS = ("messages", "conversations")
"""Columns of the messages, as OpenAI and ShareGPT name them."""


class ChatEncoder(Encoder):
    """Encoder of conversations, rendered by a Hugging Face tokenizer's chat template; it trains the answers.

    Rows hold OpenAI's messages or ShareGPT's, as lists or JSON text. The template renders tools and tool calls; a row
    is refused if the template leaves them out. A message with ``weight: 0`` is not trained. The tokens of an answer
    are found by the template's ``{% generation %}`` markers; without markers, by rendering the conversation before the
    answer (see `ChatTemplate`).

    Args:
        tokenizer: a tokenizer of transformers, or an `HFTokenizer`.
        column: the column that holds the messages. Default: ``"messages"``, or ``"conversations"`` in rows without it.
        tools: the column that holds the descriptions of tools, if there are any.
        answers: ``"all"``, or ``"last"`` to train the last answer of each row only.
        ignore: columns to leave out on purpose, such as ``["tools"]``. Otherwise a row is refused if it has a column
            that belongs to the conversation and that the encoder does not use.

    Raises:
        ValueError: for another tokenizer, or one without a chat template.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        column: str | None = None,
        tools: str = "tools",
        answers: str = "all",
        ignore: Sequence[str] = (),
    ) -> None:
        require(answers, "answers", ANSWERS)
        self.tokenizer = _chat_tokenizer(tokenizer)
        self.column = column
        self.tools = tools
        self.answers = answers
        self.ignore = tuple(ignore)
        self.unread = UnreadColumns("ChatEncoder", used=(tools,), ignore=ignore)

    def __call__(self, row: Mapping[str, Any], /) -> Sample:
        """See `Encoder`."""
        column = self.column or next((name for name in COLUMNS if name in row), COLUMNS[0])
        messages = parse_conversation(row, column, option="column")
        refuse_left_out(row, used=(column, self.tools), ignore=self.ignore)
        self.unread.name(row, column)
        tools = None
        if self.tools not in self.ignore:
            tools = parse_json(row.get(self.tools) or None, f"column {self.tools!r}")
        trained = [is_trained(m) for m in messages]
        if self.answers == "last":
            last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
            trained = [flag and i == last for i, flag in enumerate(trained)]
        return masked_sample(*self.tokenizer.chat(messages, trained, tools=tools or None))

    def decode(self, tokens: list[int]) -> str:
        """Decode tokens, special tokens included."""
        return self.tokenizer.decode(tokens)

    def fingerprint(self) -> str:
        """Return a digest of the tokenizer, its template and the settings."""
        return digest(
            "chat", self.tokenizer.fingerprint(), self.column, self.tools, self.answers, self.ignore
        )


class PromptCompletionEncoder(Encoder):
    """Encoder of prompts with completions: it trains the completion, and not the prompt.

    Either both are text, or both are lists of messages. Texts are joined, tokenized and ended with EOS; messages go
    through the chat template of a Hugging Face tokenizer. The prompt's tokens must be the same with and without the
    completion.

    Args:
        tokenizer: one of transformers or torchtune.
        prompt: the column that holds the prompt.
        completion: the column that holds the completion.
        tools: the column that holds the descriptions of tools, if there are any, for messages.
        add_bos: as for `TextEncoder`.
        add_eos: whether a completion that is text ends with EOS.
        ignore: as for `ChatEncoder`.

    Raises:
        ValueError: for a tokenizer that ignores ``add_bos`` or ``add_eos``.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        prompt: str = "prompt",
        completion: str = "completion",
        tools: str = "tools",
        add_bos: bool | None = None,
        add_eos: bool = True,
        ignore: Sequence[str] = (),
    ) -> None:
        self.tokenizer = check_tokenizer(tokenizer)
        check_ends(self.tokenizer, add_bos=add_bos, add_eos=add_eos)
        self.prompt = prompt
        self.completion = completion
        self.tools = tools
        self.ignore = tuple(ignore)
        self.unread = UnreadColumns(
            "PromptCompletionEncoder", used=(prompt, completion, tools), ignore=ignore
        )
        self.add_bos = own_bos(self.tokenizer) if add_bos is None else add_bos
        self.add_eos = add_eos

    def __call__(self, row: Mapping[str, Any], /) -> Sample:
        """See `Encoder`."""
        for option, column in (("prompt", self.prompt), ("completion", self.completion)):
            if column not in row:
                raise missing_column(row, column, option=option)
        self.unread.name(row)
        prompt, completion = row[self.prompt], row[self.completion]
        texts = isinstance(prompt, str) and isinstance(completion, str)
        used = (self.prompt, self.completion) if texts else (self.prompt, self.completion, self.tools)
        refuse_left_out(row, used=used, ignore=self.ignore)
        if texts:
            return self.encode_text(prompt, completion)
        if any(value is None or isinstance(value, str | bytes) for value in (prompt, completion)):
            raise ValueError(
                f"column {self.prompt!r} holds a {type(prompt).__name__} and {self.completion!r} a "
                f"{type(completion).__name__}; both must be text, or both lists of messages"
            )
        messages, trained = joined(
            parse_conversation(row, self.prompt),
            parse_conversation(row, self.completion),
            f"column {self.completion!r}",
        )
        tools = None
        if self.tools not in self.ignore:
            tools = parse_json(row.get(self.tools) or None, f"column {self.tools!r}") or None
        return masked_sample(*_chat_tokenizer(self.tokenizer).chat(messages, trained, tools=tools))

    def encode_text(self, prompt: str, completion: str) -> Sample:
        """Encode a text behind its prompt, of which the completion is trained.

        Raises:
            ValueError: if a token crosses from one into the other.
        """
        encode = self.tokenizer.encode
        head = encode(prompt, add_bos=self.add_bos, add_eos=False)
        ids = encode(prompt + completion, add_bos=self.add_bos, add_eos=self.add_eos)
        if list(ids[: len(head)]) != list(head):
            raise ValueError(
                f"a token crosses from the prompt ({prompt[-16:]!r}) into the completion ({completion[:16]!r}), so no "
                "mask is right; move white space from the prompt's end to the completion's beginning"
            )
        return masked_sample(ids, np.arange(len(ids)) >= len(head))

    def decode(self, tokens: list[int]) -> str:
        """Decode tokens as the tokenizer does."""
        return str(self.tokenizer.decode(tokens))

    def fingerprint(self) -> str:
        """Return a digest of the columns, the settings and the tokenizer."""
        probe = plain(self.tokenizer.encode(PROBE_TEXT, add_bos=self.add_bos, add_eos=self.add_eos))
        settings = (self.prompt, self.completion, self.tools, self.ignore, self.add_bos, self.add_eos)
        return digest("prompt", *settings, probe, own_fingerprint(self.tokenizer))


def _chat_tokenizer(tokenizer: Any) -> HFTokenizer:
    ready = check_tokenizer(tokenizer)
    if not isinstance(ready, HFTokenizer):
        raise ValueError(
            f"a {type(ready).__name__} has no chat template; give a Hugging Face tokenizer (tokenizer: {{_component_: "
            "streampack.HFTokenizer, path: ...}), or use MessagesEncoder with one of torchtune's message transforms"
        )
    _ = ready.chat  # raises if there is no template
    return ready


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
