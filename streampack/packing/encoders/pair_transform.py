"""torchtune's transforms of preference pairs, and checks of what they would change silently."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from streampack.fingerprint import digest, plain
from streampack.packing.columns import mask_from_column
from streampack.packing.encoders.answers import read_content, repeats
from streampack.packing.encoders.chat import masked_sample
from streampack.packing.encoders.conversation import UnreadColumns, parse_conversation, refuse_left_out
from streampack.packing.encoders.hf_tokenizer import HFTokenizer
from streampack.packing.encoders.messages import (
    PAIRS,
    mask_weight_0,
    probe_messages,
    require_text,
    require_text_content,
    settings_of_transform,
    transform_kind,
)
from streampack.packing.encoders.shared_prefix import require_trained
from streampack.packing.samples import missing_column
from streampack.types import Sample

NAMES = ("chosen", "rejected")
PROMPT = "prompt"


class PairTransform:
    """A transform of rows to two conversations, which are tokenized as torchtune's ``PreferenceDataset`` does.

    A row of which torchtune's own transforms would drop or invent a part is refused, as by `MessagesEncoder`.

    Args:
        tokenizer: one with ``tokenize_messages``.
        transform: one of torchtune's, or any callable that returns ``{"chosen": [...], "rejected": [...]}``.
        mask_shared: whether messages that both begin with are not trained.
        ignore: columns and keys of messages to leave out on purpose.
        fields: columns that are read as numbers of the answers.

    Raises:
        ValueError: for a tokenizer that takes no messages, and a transform that makes no pairs.
    """

    def __init__(
        self,
        tokenizer: Any,
        transform: Callable[[Any], Any],
        *,
        mask_shared: bool,
        ignore: Sequence[str],
        fields: Sequence[str] = (),
    ) -> None:
        if not hasattr(tokenizer, "tokenize_messages"):
            raise ValueError(
                f"a {type(tokenizer).__name__} takes text only, no messages; give one of torchtune's model "
                "tokenizers, or streampack.HFTokenizer, which has the chat template of its model"
            )
        if isinstance(tokenizer, HFTokenizer):
            _ = tokenizer.chat  # raises if there is no template
        kind = transform_kind(transform)
        if kind and kind not in PAIRS:
            raise ValueError(
                f"{kind} makes one conversation of a row, not a pair; give ChosenRejectedToMessages, or leave "
                "message_transform out"
            )
        self.tokenizer = tokenizer
        self.transform = transform
        self.mask_shared = mask_shared
        self.ignore = tuple(ignore)
        given = getattr(transform, "_column_map", None) or {}
        known = PAIRS.get(kind, ())
        if known and (unknown := sorted(set(given) - set(known))):
            raise ValueError(
                f"column_map of {kind} has {unknown[0]!r}, which it does not read; its keys are {', '.join(known)}"
            )
        self.columns = {name: given.get(name, name) for name in known}
        checked = [PROMPT] if kind == "ChosenRejectedToMessages" else []
        self.unread = UnreadColumns(kind, used=(*self.columns.values(), *checked, *fields), ignore=ignore)

    def __call__(self, row: Mapping[str, Any]) -> list[Sample]:
        """Return the two sequences of a row.

        Raises:
            ValueError: for a row of which something would be dropped or invented, and an answer without tokens.
        """
        stated: dict[str, list[dict[str, Any]]] = {}  # the messages of the row, as it states their weights
        if self.columns:
            row, stated = self._checked(row)
        try:
            made = self.transform(row)
            pair = [made[name] for name in NAMES]
        except KeyError as error:
            raise ValueError(
                f"the message transform found no {error}, in the row or within it; the row's columns are "
                f"{', '.join(map(repr, row)) or 'none'}"
            ) from error
        for name, messages in zip(NAMES, pair, strict=True):
            mask_weight_0(self.transform, messages, stated.get(name, []))
            for i, message in enumerate(messages):
                require_text_content(message, i)
        if self.mask_shared:
            _mask_shared(*pair)
        return [self._tokenized(messages, name) for name, messages in zip(NAMES, pair, strict=True)]

    def fingerprint(self) -> str:
        """Return a digest of the transform's name and settings, and of the tokens of a short conversation."""
        tokens, mask = self.tokenizer.tokenize_messages(probe_messages())
        settings = settings_of_transform(self.transform)
        return digest(settings, self.mask_shared, self.ignore, plain(tokens), plain(mask))

    def _checked(self, row: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, list[dict[str, Any]]]]:
        """Return a copy of a row whose columns hold what torchtune's transforms read, and its conversations."""
        refuse_left_out(row, used=tuple(self.columns.values()), ignore=self.ignore)
        self.unread.name(row)
        for column in self.columns.values():
            if column not in row:
                raise missing_column(row, column)
            if "prompt" in self.columns and not isinstance(row[column], str):
                raise ValueError(f"column {column!r} holds a {type(row[column]).__name__}; it must be text")
        if "prompt" in self.columns:
            return row, {}
        stated = {name: parse_conversation(row, column) for name, column in self.columns.items()}
        for messages in stated.values():
            require_text(messages, ignore=self.ignore)
        if PROMPT in row and PROMPT not in (*self.columns.values(), *self.ignore):
            _require_prompt(row[PROMPT], stated)
        # torchtune's transform writes into the messages that it is given.
        copies = {column: [dict(each) for each in stated[name]] for name, column in self.columns.items()}
        return {**row, **copies}, stated

    def _tokenized(self, messages: Sequence[Any], name: str) -> Sample:
        try:
            tokens, mask = self.tokenizer.tokenize_messages(messages)
        except Exception:
            for message in messages:
                message.text_content.encode()  # raises for half a surrogate pair, which the error may not mention
            raise
        masked = mask_from_column(mask, "mask", len(tokens))
        return require_trained(masked_sample(tokens, ~masked), f"the {name} answer")


def _require_prompt(given: Any, stated: Mapping[str, list[dict[str, Any]]]) -> None:
    """Raise unless both conversations repeat the prompt, which this transform of torchtune's does not read."""
    if given is None or (hasattr(given, "__len__") and not len(given)):
        return
    content = read_content(given, PROMPT)
    for name, messages in stated.items():
        if not repeats(content, messages):
            raise ValueError(
                f"column {PROMPT!r} is not repeated by column {name!r}, and ChosenRejectedToMessages does not read it, "
                "so the answers would be trained without their prompt; leave message_transform out, which puts the "
                f"prompt before both answers, or say ignore: [{PROMPT}]"
            )


def _mask_shared(chosen: Sequence[Any], rejected: Sequence[Any]) -> None:
    """Mask the messages that both conversations begin with, before the last trained one of either."""
    last = [max((i for i, m in enumerate(each) if not m.masked), default=0) for each in (chosen, rejected)]
    for ours, theirs in zip(chosen[: min(last)], rejected[: min(last)], strict=True):
        if (ours.role, ours.content) != (theirs.role, theirs.content):
            return
        ours.masked = theirs.masked = True
