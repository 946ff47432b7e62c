"""The encoder of conversations, and of prompts with completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from streampack.fingerprint import digest, plain
from streampack.packing.encoders.base import PROBE_TEXT, Encoder
from streampack.packing.encoders.completion import Completions, Content, as_messages, joined, read_content
from streampack.packing.encoders.conversation import (
    UnreadColumns,
    parse_conversation,
    read_tools,
    refuse_left_out,
)
from streampack.packing.encoders.tokenizer import own_fingerprint
from streampack.packing.samples import missing_column
from streampack.types import Sample
from streampack.validation import require

ANSWERS = ("all", "last")
COLUMNS = ("messages", "conversations")
"""Columns of the messages, as OpenAI and ShareGPT name them."""


class ChatEncoder(Encoder):
    """Encoder of conversations, and of prompts with completions; it trains the answers.

    Conversations are OpenAI's messages or ShareGPT's, as lists or JSON text; a prompt and its completion are texts or
    messages. Messages are rendered by a Hugging Face tokenizer's chat template, tools and tool calls too; a row is
    refused if the template leaves them out. A message with ``weight: 0`` is not trained. The tokens of an answer
    are found by the template's ``{% generation %}`` markers; without markers, by rendering the conversation before the
    answer (see `ChatTemplate`). Texts are joined, tokenized and ended with EOS. The prompt's tokens must be the same
    with and without the answer.

    Args:
        tokenizer: one of transformers, or of torchtune for texts; messages need a chat template.
        column: the column that holds the messages. Default: ``"messages"``, or ``"conversations"``, where a row has
            them.
        prompt: the column that holds the prompt. Default: ``"prompt"``, in rows without messages.
        completion: the column that holds the completion. Default: ``"completion"``.
        tools: the column that holds the descriptions of tools, if there are any, for messages.
        answers: ``"all"``, or ``"last"`` to train the last answer of each row only.
        add_bos: as for `TextEncoder`, for texts; a chat template writes its own.
        add_eos: whether a completion that is text ends with EOS.
        ignore: columns to leave out on purpose, such as ``["tools"]``. Otherwise a row is refused if it has a column
            that belongs to the conversation and that the encoder does not use.

    Raises:
        ValueError: for a tokenizer that does not fit, and columns of both forms.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        column: str | None = None,
        prompt: str | None = None,
        completion: str | None = None,
        tools: str = "tools",
        answers: str = "all",
        add_bos: bool | None = None,
        add_eos: bool = True,
        ignore: Sequence[str] = (),
    ) -> None:
        require(answers, "answers", ANSWERS)
        self.completions = Completions(tokenizer, add_bos=add_bos, add_eos=add_eos)
        self.tokenizer = self.completions.tokenizer
        self.column = column
        self.named = prompt is not None or completion is not None
        if column is not None:
            if self.named:
                raise ValueError(
                    f"column={column!r} names one column of messages, prompt and completion name two; give either"
                )
            _ = self.completions.chat  # all that comes is messages
        self.prompt = "prompt" if prompt is None else prompt
        self.completion = "completion" if completion is None else completion
        self.tools = tools
        self.answers = answers
        self.ignore = tuple(ignore)
        self.unread = UnreadColumns("ChatEncoder", used=(tools,), ignore=ignore)

    def __call__(self, row: Mapping[str, Any], /) -> Sample:
        """See `Encoder`."""
        if self._is_conversation(row):
            column = self.column or next((name for name in COLUMNS if name in row), COLUMNS[0])
            columns = [column]
            prompt: Content = []
            answer: Content = parse_conversation(row, column, option="column")
        else:
            columns = [self.prompt, self.completion]
            for option, column in zip(("prompt", "completion"), columns, strict=True):
                if column not in row:
                    raise missing_column(row, column, option=option)
            prompt, answer = (read_content(row[column], column) for column in columns)
        self.unread.name(row, *columns)
        if isinstance(prompt, str) and isinstance(answer, str):
            refuse_left_out(row, used=columns, ignore=self.ignore)
            return self.completions.encode_text(prompt, answer)
        refuse_left_out(row, used=[*columns, self.tools], ignore=self.ignore)
        messages, trained = joined(
            as_messages(prompt, "user"), as_messages(answer, "assistant"), f"column {columns[-1]!r}"
        )
        if self.answers == "last":
            last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
            trained = [flag and i == last for i, flag in enumerate(trained)]
        tools = read_tools(row, self.tools, ignore=self.ignore)
        return self.completions.encode_messages(messages, trained, tools=tools)

    def _is_conversation(self, row: Mapping[str, Any]) -> bool:
        if self.column is not None or self.named:
            return not self.named
        return any(name in row for name in COLUMNS) or not (self.prompt in row or self.completion in row)

    def decode(self, tokens: list[int]) -> str:
        """Decode tokens, special tokens included."""
        return str(self.tokenizer.decode(tokens))

    def fingerprint(self) -> str:
        """Return a digest of the tokenizer, its template and the settings."""
        ends = (self.completions.add_bos, self.completions.add_eos)
        settings = (
            self.column,
            self.prompt,
            self.completion,
            self.named,
            self.tools,
            self.answers,
            self.ignore,
        )
        probe = plain(self.tokenizer.encode(PROBE_TEXT, add_bos=True, add_eos=False))
        return digest("chat", *settings, *ends, probe, own_fingerprint(self.tokenizer))
