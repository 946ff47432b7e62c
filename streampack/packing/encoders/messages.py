"""The encoder of chat and instruct rows by torchtune's message transforms, and checks of what these change silently."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from streampack.fingerprint import digest, plain
from streampack.packing.columns import mask_from_column
from streampack.packing.encoders.base import PROBE_TEXT, Encoder, qualified_name
from streampack.packing.encoders.conversation import (
    REASONING,
    UnreadColumns,
    parse_conversation,
    refuse_flags,
    refuse_left_out,
)
from streampack.packing.encoders.hf_tokenizer import HFTokenizer
from streampack.packing.encoders.tokenizer import check_tokenizer, own_fingerprint
from streampack.packing.samples import missing_column, sample_from_row
from streampack.types import IGNORE_INDEX, Sample

ROLES = ("system", "user", "assistant")
COLUMNS = {
    "OpenAIToMessages": ("messages",),
    "ShareGPTToMessages": ("conversations", "image"),
    "InputOutputToMessages": ("input", "output", "image"),
    "AlpacaToMessages": ("instruction", "input", "output"),
}
"""torchtune's transforms, and the columns that their ``column_map`` can rename."""

PAIRS = {
    "ChosenRejectedToMessages": ("chosen", "rejected"),
    "StackExchangePairedToMessages": ("prompt", "chosen", "rejected"),
}
"""torchtune's transforms to pairs, likewise."""

TRANSFORMS = ("torchtune.data._messages", "torchtune.datasets._stack_exchange_paired")
"""Modules of torchtune's transforms."""

NO_IMAGE = "it has an image, which a pack has no place for; train on it unpacked, or remove the image"


class MessagesEncoder(Encoder):
    """Encoder of chat and instruct rows that works as torchtune's ``SFTDataset``: row -> messages -> tokens and mask.

    Masked tokens get the label ``IGNORE_INDEX``. Where one of torchtune's transforms would silently drop or invent
    a part of a row, the row is refused: nulls, tool calls, images, columns beside the conversation.

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
        tokens = sample_from_row(encoded, labels=None).tokens
        mask = mask_from_column(encoded["mask"], "mask", tokens.size)
        return Sample(tokens, np.where(mask, IGNORE_INDEX, tokens))

    def decode(self, tokens: list[int]) -> str:
        """Decode tokens as the tokenizer does."""
        return str(self.tokenizer.decode(tokens))

    def fingerprint(self) -> str:
        """Return a digest of the transform's name and settings, and of the tokens of a short conversation."""
        probe = self.tokenizer({"messages": probe_messages()})
        choices = (self.guarded.ignore, own_fingerprint(self.tokenizer))
        encoded = (plain(probe["tokens"]), plain(probe["mask"]))
        return digest("messages", *settings_of_transform(self.message_transform), *encoded, choices)


def probe_messages() -> list[Any]:
    """Return the short conversation whose tokens are part of a fingerprint."""
    from torchtune.data import Message

    return [Message("user", PROBE_TEXT, masked=True), Message("assistant", PROBE_TEXT, eot=True)]


def settings_of_transform(transform: Any) -> tuple[Any, ...]:
    """Return the name and the settings of a transform, the same in every process."""
    settings = sorted((key, _setting(value)) for key, value in getattr(transform, "__dict__", {}).items())
    return qualified_name(transform), settings


def _setting(value: Any) -> str:
    """Return a value as text that is the same in every process: for an object whose text has an address, its class."""
    if isinstance(value, Mapping):
        return str(sorted((str(key), _setting(item)) for key, item in value.items()))
    if isinstance(value, list | tuple):
        return str([_setting(item) for item in value])
    if isinstance(value, set | frozenset):
        return str(sorted(map(_setting, value)))
    return qualified_name(value) if " at 0x" in (shown := str(value)) else shown


class GuardedTransform:
    """A message transform that checks its rows and messages.

    torchtune's `OpenAIToMessages` gives a message without text the content of the message before it, and drops tool
    calls, unknown parts and weights; its other transforms format ``None`` into prompts and ignore columns that a
    ``column_map`` misspells. Of a user's own transform, only the messages are checked.

    Args:
        transform: one of torchtune's, or any callable that returns ``{"messages": [...]}``.
        ignore: columns and keys of messages to leave out on purpose.

    Raises:
        ValueError: for a transform that makes pairs, or a ``column_map`` with unknown keys.
    """

    def __init__(self, transform: Callable[[Any], Any], *, ignore: Sequence[str] = ()) -> None:
        self.transform = transform
        self.ignore = tuple(ignore)
        self.kind = transform_kind(transform)
        if self.kind in PAIRS:
            raise ValueError(
                f"{self.kind} makes pairs of a chosen and a rejected answer; give it to PreferenceEncoder, or train on "
                "the chosen ones: OpenAIToMessages with column_map: {messages: chosen}"
            )
        given = getattr(transform, "_column_map", getattr(transform, "column_map", None)) or {}
        known = COLUMNS.get(self.kind, ())
        if known and (unknown := sorted(set(given) - set(known))):
            raise ValueError(
                f"column_map of {self.kind} has {unknown[0]!r}, which it does not read; its keys are {', '.join(known)}"
            )
        self.columns = {name: given.get(name, name) for name in known}
        self.column_map = given
        self.unread = UnreadColumns(self.kind, used=self.columns.values(), ignore=self.ignore)

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Transform a row to ``{"messages": [...]}``.

        Raises:
            ValueError: for a row of which something would be dropped or invented.
        """
        messages: list[Any] = []  # of the row, as it states their weights
        if self.kind:
            refuse_left_out(row, used=tuple(self.columns.values()), ignore=self.ignore)
            self.unread.name(row)
            row = self._without_image(row)
        if self.kind == "OpenAIToMessages":
            messages = parse_conversation(row, self.columns["messages"])
            require_text(messages, ignore=self.ignore)
            row = {**row, self.columns["messages"]: messages}
        elif self.kind == "ShareGPTToMessages":
            messages = self._sharegpt_messages(row)
        elif self.kind:
            self._require_text_columns(row)
        try:
            made = self.transform(row)["messages"]
        except KeyError as error:
            # A column, or something within one: the key of a turn, a role.
            raise ValueError(
                f"the message transform found no {error}, in the row or within it; the row's columns are "
                f"{', '.join(map(repr, row)) or 'none'}"
            ) from error
        mask_weight_0(self.transform, made, messages)
        for i, message in enumerate(made):
            require_text_content(message, i)
        return {"messages": made}

    def _sharegpt_messages(self, row: Mapping[str, Any]) -> list[Any]:
        """Return the messages of a ShareGPT row, with ``role`` set; raise unless they are text."""
        column = self.columns["conversations"]
        if column not in row:
            raise missing_column(row, column)
        turns = row[column]
        if isinstance(turns, str) or not hasattr(turns, "__iter__"):
            raise ValueError(f"column {column!r} holds a {type(turns).__name__}; it must be a list of turns")
        for i, turn in enumerate(turns):
            if "value" in turn and not isinstance(turn["value"], str):
                raise ValueError(
                    f"column {column!r}, turn {i} has a value of type {type(turn['value']).__name__}; it must be text"
                )
            refuse_flags(turn, f"column {column!r}, turn {i}")
        return [{**turn, "role": turn.get("from")} for turn in turns]

    def _require_text_columns(self, row: Mapping[str, Any]) -> None:
        """Raise unless the columns of a prompt and its answer are text."""
        for name, column in self.columns.items():
            optional = self.kind == "AlpacaToMessages" and name == "input"
            if name == "image" or (column in row and row[column] is None and optional):
                continue
            if column not in row:
                if optional and name in self.column_map:
                    raise ValueError(
                        f"column {column!r}, which column_map gives for 'input', is missing; the row's columns are "
                        f"{', '.join(map(repr, row)) or 'none'}; where there is no input, it must be empty"
                    )
                continue  # torchtune's transform raises
            if not isinstance(row[column], str):
                raise ValueError(f"column {column!r} holds a {type(row[column]).__name__}; it must be text")

    def _without_image(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the row without a null in an image column, which torchtune would try to open."""
        names = {"image", self.columns.get("image", "image")} & set(row)
        if "image" not in COLUMNS[self.kind] or not names:
            return row
        if any(row[name] is not None for name in names):
            raise ValueError(NO_IMAGE)
        return {name: value for name, value in row.items() if name not in names}


def require_text(messages: Sequence[Mapping[str, Any]], *, ignore: Sequence[str]) -> None:
    """Raise unless OpenAI's messages are of what torchtune's transform reads: text, in roles that it knows."""
    for i, message in enumerate(messages):
        if "tool_calls" in message or message["role"] in ("tool", "ipython"):
            raise ValueError(
                f"message {i} ({message['role']}) has tool calls or a tool's answer, which torchtune's transform "
                "drops; render them by the model's chat template, with streampack.HFTokenizer (ChatEncoder, or "
                "PreferenceEncoder without a message_transform)"
            )
        if message["role"] not in ROLES:
            raise ValueError(
                f"message {i} has the role {message['role']!r}, which torchtune does not know; its roles are "
                f"{', '.join(ROLES)}"
            )
        for key in REASONING:
            if message.get(key) and key not in ignore:
                raise ValueError(
                    f"message {i} ({message['role']}) has {key!r}, which torchtune's transform drops; say "
                    f"ignore: [{key}], or use streampack.ChatEncoder"
                )


def mask_weight_0(transform: Any, made: Sequence[Any], given: Sequence[Mapping[str, Any]]) -> None:
    """Mask each message ``made`` by the transform whose message in the row, among those ``given``, has weight 0."""
    replaced = getattr(transform, "new_system_prompt", None) is not None
    kept = [message for message in given if not (message["role"] == "system" and replaced)]
    if not kept:
        return
    for i, (message, turn) in enumerate(zip(made[-len(kept) :], kept, strict=True)):
        if turn.get("weight", 1) not in (None, 0, 1):
            raise ValueError(f"message {i} has weight={turn['weight']!r}; it must be 0 (not trained) or 1")
        if turn.get("weight") == 0:
            message.masked = True


def guard_datasets(data: Any) -> None:
    """Put a `GuardedTransform` around each transform of torchtune's datasets, however deep they lie in ``data``.

    torchtune's builders (``chat_dataset``, ``alpaca_dataset``) create their transforms themselves, so their rows never
    pass a `MessagesEncoder`. The datasets are changed in place.
    """
    if isinstance(data, str | bytes | Mapping | None):
        return
    inner = getattr(data, "_prepare_sample", None)
    transform = getattr(inner, "_message_transform", None)
    if inner is not None and transform is not None and transform_kind(transform) in COLUMNS:
        inner._message_transform = GuardedTransform(transform)
    for name in ("dataset", "source"):  # a map-style source, a subset, a hold-out
        if (within := getattr(data, name, None)) is not None:
            guard_datasets(within)
    for within in getattr(data, "_datasets", ()):  # torchtune's ConcatDataset
        guard_datasets(within)
    for entry in getattr(data, "entries", ()):  # a mixture
        guard_datasets(entry.source)


def transform_kind(transform: Any) -> str:
    """Return the name of torchtune's class whose ``__call__`` a transform uses; empty for any other."""
    for base in type(transform).__mro__:
        if "__call__" in vars(base):
            return base.__name__ if base.__module__ in TRANSFORMS else ""
    return ""


def require_text_content(message: Any, i: int) -> None:
    """Raise unless all content of message ``i`` is text."""
    for part in message.content:
        if part["type"] != "text":
            raise ValueError(f"message {i} ({message.role}): {NO_IMAGE}")
        if not isinstance(part["content"], str):
            raise ValueError(
                f"message {i} ({message.role}) has content of type {type(part['content']).__name__}; it must be text"
            )
