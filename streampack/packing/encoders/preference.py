"""The encoder of preference pairs: a prompt, a chosen and a rejected answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from streampack.fingerprint import digest, plain
from streampack.packing.boundaries import require_no_padding
from streampack.packing.encoders.answers import (
    AnswerEncoder,
    Content,
    as_messages,
    common_messages,
    read_content,
    repeats,
)
from streampack.packing.encoders.base import PROBE_TEXT, Encoder
from streampack.packing.encoders.chat import masked_sample
from streampack.packing.encoders.conversation import UnreadColumns, parse_json, refuse_left_out
from streampack.packing.encoders.pair_transform import PairTransform
from streampack.packing.encoders.shared_prefix import (
    columns_of,
    common_prefix,
    group_of,
    numbers_of,
    require_trained,
)
from streampack.packing.encoders.tokenizer import own_fingerprint
from streampack.packing.groups import Group
from streampack.packing.samples import missing_column, sample_from_pair
from streampack.types import Sample

PROMPTS = ("question", "instruction", "input", "query", "context", "conversations", "messages")
"""Columns that hold the prompt in many data sets; a row that has one and no prompt is refused."""

WAY_OUT = (
    "encode them by one of torchtune's transforms (message_transform: {_component_: "
    "torchtune.data.ChosenRejectedToMessages})"
)


class PreferenceEncoder(Encoder):
    """Encoder of preference pairs, for DPO and reward models: a prompt and two answers, which stay in one pack.

    Rows have ``chosen`` and ``rejected``, and a ``prompt``, or both answers begin with it. They are texts, or messages
    (OpenAI's, ShareGPT's), which a Hugging Face tokenizer's chat template renders. Rows that are tokens already, of
    torchtune's ``PreferenceDataset`` or of TRL, are taken as they are. The answers are trained, the prompt is not.
    Each answer is encoded as a whole with its prompt; the tokens that both begin with are kept once.

    >>> from streampack.packing.groups import Group
    >>> class Letters:
    ...     bos_id, eos_id = 1, 2
    ...     def encode(self, text, add_bos=True, add_eos=True):
    ...         return [1] * add_bos + list(text.encode()) + [2] * add_eos
    >>> pair = PreferenceEncoder(Letters())({"prompt": "2+2=", "chosen": "4", "rejected": "5"})
    >>> pair.lengths, pair.parents
    ((5, 2, 2), (-1, 0, 0))

    Args:
        tokenizer: one of transformers or torchtune; messages need a chat template, or a ``message_transform``.
        message_transform: one of torchtune's for pairs (``ChosenRejectedToMessages``), or any callable that returns
            ``{"chosen": [...], "rejected": [...]}`` with torchtune's messages. The masks are those of the messages.
        mask_shared: of a ``message_transform``'s messages, whether those that both conversations begin with are not
            trained. torchtune trains earlier answers in both; then what follows them is not shared.
        prompt: the column that holds the prompt.
        chosen: the column that holds the better answer.
        rejected: the column that holds the other one.
        tools: the column that holds the descriptions of tools, if there are any.
        add_bos: as for `TextEncoder`.
        add_eos: whether an answer that is text ends with EOS.
        fields: numbers for the batch, as a list of columns or as ``{field: column}``: a column with two numbers, that
            of the chosen answer first, or with one for both; or ``{field: [column of chosen, column of rejected]}``.
        share_prefix: whether the prompt is kept once. Otherwise each answer has its own copy.
        ignore: columns to leave out on purpose, such as ``["tools"]``.

    Raises:
        ValueError: for a tokenizer, a transform or fields that do not fit.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        message_transform: Callable[[Mapping[str, Any]], Any] | None = None,
        mask_shared: bool = False,
        prompt: str = "prompt",
        chosen: str = "chosen",
        rejected: str = "rejected",
        tools: str = "tools",
        add_bos: bool | None = None,
        add_eos: bool = True,
        fields: Sequence[str] | Mapping[str, Any] | None = None,
        share_prefix: bool = True,
        ignore: Sequence[str] = (),
    ) -> None:
        self.answers = AnswerEncoder(tokenizer, add_bos=add_bos, add_eos=add_eos, way_out=WAY_OUT)
        self.tokenizer = self.answers.tokenizer
        self.transform = None
        self.fields = columns_of(fields, "fields", sequences=2)
        of_fields = [
            name for given in self.fields.values() for name in ([given] if isinstance(given, str) else given)
        ]
        if message_transform is not None:
            self.transform = PairTransform(
                self.tokenizer,
                message_transform,
                mask_shared=mask_shared,
                ignore=ignore,
                fields=of_fields,
            )
        elif mask_shared:
            raise ValueError(
                "mask_shared=True needs a message_transform; without one, what both answers begin with is the prompt, "
                "which is not trained; leave it out"
            )
        self.prompt = prompt
        self.columns = (chosen, rejected)
        self.tools = tools
        self.share_prefix = share_prefix
        self.ignore = tuple(ignore)
        self.unread = UnreadColumns(
            "PreferenceEncoder", used=(prompt, chosen, rejected, tools, *of_fields), ignore=ignore
        )

    def __call__(self, row: Mapping[str, Any], /) -> Group:
        """See `Encoder`."""
        if self.transform is not None:
            wholes = self.transform(row)
        else:
            wholes = self._of_ids(row) or self._of_row(row)
        return group_of(
            wholes,
            fields={name: numbers_of(row, columns, sequences=2) for name, columns in self.fields.items()},
            token_fields={},
            share_prefix=self.share_prefix,
        )

    def _of_row(self, row: Mapping[str, Any]) -> list[Sample]:
        """Encode a row of texts or messages."""
        for column in self.columns:
            if column not in row:
                raise missing_column(row, column)
        answers = [read_content(row[column], column) for column in self.columns]
        prompt = read_content(row[self.prompt], self.prompt) if self.prompt in row else None
        has_messages = any(isinstance(content, list) for content in (prompt, *answers))
        used = (self.prompt, *self.columns, *[self.tools] * has_messages)
        refuse_left_out(row, used=used, ignore=self.ignore)
        self.unread.name(row)
        if prompt is None:
            self._require_whole(row, answers)
        if prompt is None and all(isinstance(answer, str) for answer in answers):
            return self._of_whole_texts([str(answer) for answer in answers])
        prompt, answers = _divided(prompt, answers)
        tools = self._tools_of(row)
        return [
            self.answers.encode(prompt, answer, name=f"column {column!r}", tools=tools)
            for column, answer in zip(self.columns, answers, strict=True)
        ]

    def _of_whole_texts(self, texts: Sequence[str]) -> list[Sample]:
        """Encode texts that begin with their prompt: all that both begin with, less a space before they differ.

        The space is the answers', as in TRL, because most tokenizers join it with the word after it.
        """
        ids = [self.answers.bare(text, add_eos=self.answers.texts.add_eos) for text in texts]
        prompt = texts[0][: common_prefix([np.array([*text]) for text in texts])].removesuffix(" ")
        return _split_where_unequal(ids, self.answers.bare(prompt, add_eos=False))

    def _of_ids(self, row: Mapping[str, Any]) -> list[Sample] | None:
        """Return the sequences of a row of tokens, None for any other row.

        torchtune's ``PreferenceDataset`` gives ``chosen_input_ids`` and ``chosen_labels``, TRL ``prompt_ids`` and
        ``chosen_ids``, formerly ``prompt_input_ids`` and ``chosen_input_ids``.
        """
        for ending in ("_input_ids", "_ids"):
            names = [f"{column}{ending}" for column in self.columns]
            if not all(name in row for name in names):
                continue
            prompt = f"{self.prompt}{ending}"
            ids = [sample_from_pair(row[name], row[name], tokens=name, labels=name).tokens for name in names]
            for column, each in zip(self.columns, ids, strict=True):
                require_no_padding(row, each.size, f"{column}_attention_mask")
            labels = [f"{column}_labels" for column in self.columns]
            if all(name in row for name in labels):
                wholes = [
                    sample_from_pair(row[name], row[label], tokens=name, labels=label)
                    for name, label in zip(names, labels, strict=True)
                ]
            elif prompt in row:
                before = sample_from_pair(row[prompt], row[prompt], tokens=prompt, labels=prompt).tokens
                require_no_padding(row, before.size, f"{self.prompt}_attention_mask")
                joined = [np.concatenate([before, after]) for after in ids]
                wholes = [masked_sample(each, np.arange(each.size) >= before.size) for each in joined]
            else:
                wholes = _split_where_unequal(ids)
            return [
                require_trained(whole, f"column {name!r}") for whole, name in zip(wholes, names, strict=True)
            ]
        return None

    def _require_whole(self, row: Mapping[str, Any], answers: Sequence[Content]) -> None:
        """Raise if a row without a prompt has it in another column, or not at all."""
        if all(isinstance(answer, list) and answer[0]["role"] != "assistant" for answer in answers):
            return
        found = [name for name in PROMPTS if name in row and name not in (*self.columns, *self.ignore)]
        if found:
            raise ValueError(
                f"there is no column {self.prompt!r}, and column {found[0]!r} would be left out; say prompt: "
                f"{found[0]}, or ignore: [{found[0]}]"
            )
        if any(isinstance(answer, list) for answer in answers):
            raise ValueError(
                f"there is no column {self.prompt!r}, and an answer does not begin with a message of the user; "
                "name the column of the prompt (prompt: ...), or begin both answers with it"
            )

    def _tools_of(self, row: Mapping[str, Any]) -> Any:
        if self.tools in self.ignore:
            return None
        found = row.get(self.tools)
        if not found and isinstance(prompt := row.get(self.prompt), Mapping):  # OpenAI's form
            found = prompt.get("tools")
        return parse_json(found or None, f"column {self.tools!r}") or None

    def decode(self, tokens: list[int]) -> str:
        """Decode tokens as the tokenizer does."""
        return str(self.tokenizer.decode(tokens))

    def fingerprint(self) -> str:
        """Return a digest of the columns, the settings, the tokenizer and the transform."""
        texts = self.answers.texts
        probe = plain(self.answers.bare(PROBE_TEXT, add_eos=texts.add_eos))
        transform = None if self.transform is None else self.transform.fingerprint()
        settings = (self.prompt, self.columns, self.tools, texts.add_bos, texts.add_eos)
        given = (sorted(self.fields.items()), self.share_prefix, self.ignore)
        return digest("preference", settings, given, probe, own_fingerprint(self.tokenizer), transform)


def _divided(prompt: Content | None, answers: Sequence[Content]) -> tuple[Content, list[Content]]:
    """Return the prompt, and the answers without it, of which one at least is messages, or the prompt a text."""
    if isinstance(prompt, str) and all(isinstance(answer, str) for answer in answers):
        return prompt, list(answers)
    conversations = [as_messages(answer, "assistant") for answer in answers]
    if isinstance(prompt, list):
        shared = len(prompt)
        if any(messages[:shared] != prompt for messages in conversations):
            return prompt, [*conversations]
    elif isinstance(prompt, str) and not all(repeats(prompt, messages) for messages in conversations):
        return prompt, [*conversations]
    else:  # whole conversations, which hold a prompt that is text, too
        shared = common_messages(conversations)
    return conversations[0][:shared], [messages[shared:] for messages in conversations]


def _split_where_unequal(ids: Sequence[Any], prompt: Sequence[int] | None = None) -> list[Sample]:
    """Return sequences of which all is trained but what both, and the prompt if there is one, begin with.

    Raises:
        ValueError: for equal sequences.
    """
    shared = common_prefix(ids)
    if all(len(each) == shared for each in ids):
        raise ValueError(
            "chosen and rejected are equal, so there is no telling where their prompt ends; leave the row out "
            "(on_bad_record: skip), or give the prompt a column"
        )
    if prompt is not None:
        shared = common_prefix([*ids, prompt])
    shared = min(shared, *(len(each) - 1 for each in ids))
    return [masked_sample(each, np.arange(len(each)) >= shared) for each in ids]
