"""The encoder of conversations, and of prompts with completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from streampack.packing.encoders.base import TextsEncoder, characters_in
from streampack.packing.encoders.checks import check_ends, check_tokenizer
from streampack.packing.encoders.conversation import (
    REASONING,
    Content,
    Messages,
    ReadColumns,
    flags_against,
    parse_conversation,
    read_content,
    read_tools,
    unread_flags,
)
from streampack.packing.encoders.steps import Steps, Text
from streampack.packing.encoders.template import ChatTemplate
from streampack.packing.encoders.tokenizer import HFTokenizer, eos_of
from streampack.packing.samples import missing_column, sample_from_pair
from streampack.packing.shapes import mapping_of, renamed
from streampack.types import IGNORE_INDEX, Sample
from streampack.validation import require

ANSWERS = ("all", "last")
COLUMNS = ("messages", "conversations")
"""Columns of the messages, as OpenAI and ShareGPT name them."""
PAIR, TOOLS = ("prompt", "completion"), "tools"


class ChatEncoder(TextsEncoder):
    """Encoder of conversations, and of prompts with completions; it trains the answers.

    Conversations are OpenAI's messages or ShareGPT's, as lists or JSON text; a prompt and its completion are texts or
    messages. Messages are rendered by a Hugging Face tokenizer's chat template, tools and tool calls too. A row is
    refused if the template drops a part of it; `ChatTemplate` says which tokens are an answer's. A message is not
    trained if its flag says so: ``weight``, ``train``, ``training``, ``train_on_turn``, ``loss``, ``loss_weight`` or
    ``loss_mask`` is 0, or ``masked`` is 1; a row with such a column is refused. Texts are joined, tokenized and ended
    with EOS; the prompt's tokens must be the same with and without the answer.

    Args:
        tokenizer: one of transformers, or of torchtune for texts; messages need a chat template.
        columns: your columns by name, and ours that they stand for: ``messages``, ``conversations``, ``prompt``,
            ``completion``, ``tools``. Text, as for `ShapeEncoder`. A prompt is read in rows without messages, or if it
            or a completion is named here.
        roles: roles of your messages, and those that they stand for, as for `ShapeEncoder`; a role that is neither
            mapped nor known is then refused. Default: any role is left to the chat template, but for misspelt ones.
        answers: ``"all"``, or ``"last"`` to train the last answer of each row only.
        add_bos: as for `TextEncoder`, for texts; a chat template writes its own.
        add_eos: whether a completion that is text ends with EOS.
        ignore: columns, and flags of messages, to ignore on purpose, such as ``["tools"]``. Otherwise a row is
            refused if it has a column that belongs to the conversation and that the encoder does not use.

    Raises:
        ValueError: for a tokenizer or columns that do not fit.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        columns: Mapping[str, str] | str | None = None,
        roles: Mapping[str, str] | None = None,
        answers: str = "all",
        add_bos: bool | None = None,
        add_eos: bool = True,
        ignore: Sequence[str] = (),
    ) -> None:
        require(answers, "answers", ANSWERS)
        self.tokenizer = check_tokenizer(tokenizer)
        self.add_bos = add_bos
        self.add_eos = add_eos
        self.names = mapping_of(columns, "columns", (*COLUMNS, *PAIR, TOOLS))
        if not (isinstance(self.tokenizer, HFTokenizer) and self.tokenizer.has_template):
            _ = self.bos  # all that comes is texts
        self.roles = roles
        self.answers = answers
        self.ignore = tuple(ignore)
        self.columns = ReadColumns("ChatEncoder", ignore=ignore)

    def steps(self, row: Mapping[str, Any]) -> Steps[Sample]:
        """See `TextsEncoder`."""
        prompt, answer, tools, column = self.contents(row)
        return (yield from self.encode(prompt, answer, tools=tools, name=f"column {column!r}"))

    def contents(self, row: Mapping[str, Any]) -> tuple[Content, Content, Any, str]:
        """Return a row's prompt, which may be no message, its answer, tools, and the answer's column, all checked."""
        row = self.renamed(row)
        read = self._columns_of(row)
        for name in read:
            if name not in row:
                raise missing_column(row, name, option="columns")
        prompt: Content = []
        answer: Content
        if len(read) == 1:
            answer = parse_conversation(row[read[0]], read[0], roles=self.roles)
        else:
            prompt, answer = (read_content(row[name], name, roles=self.roles) for name in read)
        if isinstance(prompt, str) and isinstance(answer, str):  # nothing renders tools
            self.columns.check(row, *read)
            return prompt, answer, None, read[-1]
        self.columns.check(row, *read, TOOLS)
        return prompt, answer, read_tools(row, TOOLS, ignore=self.ignore), read[-1]

    def renamed(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a row under our names of columns."""
        return renamed(row, self.names) if self.names else row

    def characters(self, row: Mapping[str, Any], /) -> int:
        """See `Encoder`."""
        row = self.renamed(row)
        return sum(characters_in(row.get(name)) for name in self._columns_of(row))

    def _columns_of(self, row: Mapping[str, Any]) -> Sequence[str]:
        """Return the columns to read: one of messages, or a prompt and a completion."""
        found = [name for name in COLUMNS if name in row]
        if {*PAIR}.intersection(self.names.values()) or (not found and any(name in row for name in PAIR)):
            return PAIR
        return (found or COLUMNS)[:1]

    @cached_property
    def bos(self) -> bool | None:
        """``add_bos`` of texts; the tokenizer is checked when the first of them comes."""
        return check_ends(self.tokenizer, add_bos=self.add_bos, add_eos=self.add_eos)

    @cached_property
    def template(self) -> ChatTemplate:
        """The tokenizer's chat template."""
        if not isinstance(self.tokenizer, HFTokenizer):
            raise ValueError(
                f"messages need a chat template, and a {type(self.tokenizer).__name__} has no chat template; give a "
                "Hugging Face tokenizer (tokenizer: {_component_: streampack.HFTokenizer, path: ...}), rows of text "
                "or ids, or MessagesEncoder with one of torchtune's message transforms"
            )
        return self.tokenizer.chat

    def encode(self, prompt: Content, answer: Content, *, tools: Any, name: str) -> Steps[Sample]:
        """Encode an answer after its prompt, which may be no message; ``name`` names the answer in errors."""
        if isinstance(prompt, str) and isinstance(answer, str):
            return (yield from self.encode_text(prompt, answer))
        before, after = as_messages(prompt, "user"), as_messages(answer, "assistant")
        if before and before[-1]["role"] == "user" and after[0]["role"] in ("user", "system"):
            raise ValueError(
                f"{name} begins with a message of the {after[0]['role']}, after a prompt that ends with one of the "
                "user; give the prompt once, or, for AnswersEncoder, all of it in each answer"
            )
        messages = [*before, *after]
        for i, message in enumerate(messages):
            for key in sorted(unread_flags(message).difference(self.ignore)):
                if not any(key in text for text, _ in self.template.templates):
                    raise ValueError(
                        f"{name}, message {i} ({message['role']}) has a key {key!r}, which is not read; say whether it "
                        f"is trained by weight, 0 or 1, or say ignore: [{key}]"
                    )
            if self.roles is not None and is_trained(message) and i >= len(before):
                require_answer(message, f"{name}, message {i}")
        trained = [i >= len(before) and is_trained(message) for i, message in enumerate(messages)]
        if self.answers == "last":
            last = max(
                (i for i, message in enumerate(messages) if message["role"] == "assistant"), default=-1
            )
            trained = [flag and i == last for i, flag in enumerate(trained)]
        return masked_sample(*(yield from self.template.steps(messages, trained, tools=tools)))

    def encode_text(self, prompt: str, answer: str) -> Steps[Sample]:
        """Encode a text after its prompt; raise if a token crosses from one into the other."""
        (head, _), (ids, _) = yield [
            Text(prompt, self.bos), Text(prompt + answer, self.bos, self.add_eos)
        ]  # fmt: skip
        # With an empty answer, that one EOS is the prompt's.
        if self.add_eos and ids == head and (eos := eos_of(self.tokenizer)) is not None:
            ids.append(eos)
        if ids[: len(head)] != head:
            raise ValueError(
                f"a token crosses from the prompt ({prompt[-16:]!r}) into the completion ({answer[:16]!r}), so no "
                "mask is right; move white space from the prompt's end to the completion's beginning"
            )
        return masked_sample(ids, np.arange(len(ids)) >= len(head))

    def encode_prompt(self, prompt: Content, *, tools: Any = None) -> Steps[list[int]]:
        """Return the ids of a prompt alone, as at inference."""
        if not isinstance(prompt, str):
            return (yield from self.template.prompt(prompt, tools=tools))
        [(ids, _)] = yield [Text(prompt, self.bos)]
        return ids


def as_messages(content: Content, role: str) -> Messages:
    """Return content as messages; a text becomes one message of this role."""
    return [{"role": role, "content": content}] if isinstance(content, str) else content


def is_trained(message: Mapping[str, Any]) -> bool:
    """Return whether a message is an answer, and no flag says that it is not trained."""
    return bool(message["role"] == "assistant" and not flags_against(message))


def require_answer(message: Mapping[str, Any], place: str) -> None:
    """Raise if an answer is empty, so that the model would learn to say nothing."""
    if not (message["content"] or any(message.get(key) for key in ("tool_calls", *REASONING))):
        raise ValueError(f"{place} is an answer without text; mend the row, or leave it out (skip_bad: True)")


def masked_sample(ids: Any, trained: Any) -> Sample:
    """Make a sample of ids, and a mask of those that are trained."""
    tokens = sample_from_pair(ids, ids).tokens
    return Sample(tokens, np.where(trained, tokens, IGNORE_INDEX))
