"""The encoder of rows by torchtune's message transforms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from streampack.packing.columns import mask_from_column, shown
from streampack.packing.encoders.answers import PAIR, group_of
from streampack.packing.encoders.base import TextsEncoder, characters_in
from streampack.packing.encoders.chat import masked_sample
from streampack.packing.encoders.checks import check_tokenizer
from streampack.packing.encoders.conversation import (
    REASONING,
    ReadColumns,
    flags_against,
    parse_conversation,
    parse_json,
    unread_flags,
)
from streampack.packing.encoders.fields import columns_of, numbers_of
from streampack.packing.encoders.steps import Steps
from streampack.packing.encoders.tokenizer import HFTokenizer, require_unicode
from streampack.packing.samples import missing_column
from streampack.sources.torchtune_rows import columns_read, require_content
from streampack.types import Sample

CONVERSATIONS = ("messages", "conversations", *PAIR)
"""Names in the ``column_map`` of torchtune's transforms that are of columns of messages."""

DROPPED = {"tool_calls", *REASONING}
"""Keys of messages that change what is trained, and that torchtune's transforms drop."""


class MessagesEncoder(TextsEncoder):
    """Encoder that works as torchtune's ``SFTDataset`` and ``PreferenceDataset``: row -> messages -> tokens and mask.

    The transform's masks are taken as they are. A row for one of torchtune's transforms is refused if it has null
    content, which they change, or tool calls, columns or keys of messages, which they drop.

    Args:
        tokenizer: one of torchtune's model tokenizers, or a Hugging Face tokenizer with a chat template.
        message_transform: one of torchtune's (``InputOutputToMessages``, ``ShareGPTToMessages``,
            ``OpenAIToMessages``, ``ChosenRejectedToMessages``, ...), or any callable that returns
            ``{"messages": [...]}``, or of a pair ``{"chosen": [...], "rejected": [...]}``.
        fields: numbers of a pair's answers, as for `AnswersEncoder`.
        share_prefix: whether what both conversations of a pair begin with is kept once.
        ignore: columns and keys of messages to ignore on purpose.

    Raises:
        ValueError: for a tokenizer that takes no messages.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        message_transform: Callable[[Mapping[str, Any]], Any],
        fields: Sequence[str] | Mapping[str, Any] | None = None,
        share_prefix: bool = True,
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
        self.fields = columns_of(fields, "fields")
        self.share_prefix = share_prefix
        self.ignore = frozenset(ignore)
        self.read = columns_read(message_transform)
        self.makes_groups = PAIR[0] in self.read
        numbers = [name for names in self.fields.values() for name in names]
        self.columns = ReadColumns(
            type(message_transform).__name__, used=(*self.read.values(), *numbers), ignore=ignore
        )

    def steps(self, row: Mapping[str, Any]) -> Steps[Sample]:
        """See `TextsEncoder`."""
        made = self.message_transform(self._checked(row) if self.read else row)
        if "messages" in made:
            return (yield from self._sample(made["messages"]))
        wholes = {}
        for name in PAIR:
            wholes[f"the {name} answer"] = yield from self._sample(made[name])
        return group_of(
            wholes,
            fields=numbers_of(row, self.fields, len(PAIR)),
            share_prefix=self.share_prefix,
        )

    def characters(self, row: Mapping[str, Any], /) -> int:
        """See `Encoder`."""
        texts = [characters_in(row.get(column)) for name, column in self.read.items() if name != "image"]
        return max(texts) if self.makes_groups else sum(texts)

    def _checked(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row that torchtune's transform reads completely, and to which it adds nothing."""
        self.columns.check(row)
        given = dict(row)
        for name, column in self.read.items():
            if column not in row and not (name == "image" or name == column == "input"):
                raise missing_column(row, column)
            if name in CONVERSATIONS:
                messages = parse_conversation(row[column], column)
                for i, message in enumerate(messages):
                    lost = DROPPED & message.keys() | flags_against(message) | unread_flags(message)
                    for key in sorted(lost - self.ignore):
                        raise ValueError(
                            f"column {column!r}, message {i} has {key}={shown(message[key])}, which torchtune's "
                            f"transform drops; say ignore: [{key}], or use ChatEncoder or AnswersEncoder, which "
                            "render it"
                        )
                # torchtune's transforms change the messages that they receive
                sharegpt = name == "conversations"
                given[column] = parse_json(row[column], column) if sharegpt else [*map(dict, messages)]
        require_content(given, self.read)
        return given

    def _sample(self, messages: Sequence[Any]) -> Steps[Sample]:
        """Tokenize messages, all text."""
        from torchtune.data import validate_messages  # takes nine seconds to import

        validate_messages(messages)
        for i, message in enumerate(messages):
            if any(part["type"] != "text" for part in message.content):
                raise ValueError(f"message {i} ({message.role}) has an image; only text can be packed")
            require_unicode(message.text_content)
        if isinstance(self.tokenizer, HFTokenizer):
            tokens, mask = yield from self.tokenizer.steps(messages)
        else:
            encoded = self.tokenizer({"messages": messages})
            tokens, mask = encoded["tokens"], encoded["mask"]
        return masked_sample(tokens, ~mask_from_column(mask, "mask", len(tokens)))
