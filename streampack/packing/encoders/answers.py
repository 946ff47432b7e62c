"""The encoder of a prompt with several answers: preference pairs, and rollouts with their numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from streampack.packing.boundaries import require_no_padding
from streampack.packing.columns import mask_from_column
from streampack.packing.encoders.answer_groups import (
    columns_of,
    common_prefix,
    each_of,
    group_of,
    numbers_of,
    require_trained,
    token_numbers,
)
from streampack.packing.encoders.base import Encoder
from streampack.packing.encoders.completion import (
    Completions,
    Content,
    Messages,
    as_messages,
    joined,
    masked_sample,
    read_content,
)
from streampack.packing.encoders.conversation import UnreadColumns, read_tools, refuse_left_out
from streampack.packing.groups import Group
from streampack.packing.samples import missing_column, sample_from_pair
from streampack.types import INT64, FloatArray, IntArray, Sample

PAIR = ("chosen", "rejected")
LIST = "completions"

PROMPTS = ("question", "instruction", "input", "query", "context", "conversations", "messages")
"""Columns that hold the prompt in many data sets; a row that has one and no prompt is refused."""


class Given(NamedTuple):
    """The answers of a row."""

    names: list[str]  # in errors, such as ``completions[0]``
    values: list[Any]
    columns: tuple[str, ...]
    ending: str = ""  # ``_ids`` or ``_input_ids`` of columns of tokens that TRL or torchtune made


class AnswersEncoder(Encoder):
    """Encoder of a prompt with its answers, which stay in one pack: preference pairs, and rollouts of any number.

    The answers are in columns of their own, ``chosen`` and ``rejected``, or in one column with a list,
    ``completions``. Prompt and answers are texts, messages (OpenAI's, ShareGPT's), which a Hugging Face tokenizer's
    chat template renders, or ids, which are taken as they are: nothing is added, also no EOS. In place of a prompt,
    answers in columns of their own may all begin with it. Pairs of torchtune's ``PreferenceDataset`` and of TRL
    (``chosen_input_ids``, ``chosen_ids``) are read, too. The answers are trained, the prompt is not. Each answer is
    encoded as a whole with its prompt; the tokens that all begin with are kept once.

    >>> class Letters:
    ...     bos_id, eos_id = 1, 2
    ...     def encode(self, text, add_bos=True, add_eos=True):
    ...         return [1] * add_bos + list(text.encode()) + [2] * add_eos
    >>> pair = AnswersEncoder(Letters())({"prompt": "2+2=", "chosen": "4", "rejected": "5"})
    >>> pair.lengths, pair.parents
    ((5, 2, 2), (-1, 0, 0))
    >>> encoder = AnswersEncoder(Letters(), fields=["reward"], token_fields={"old_logps": "logprobs"})
    >>> group = encoder({"prompt": [5, 6], "completions": [[7], [8, 9]], "reward": [0, 1],
    ...                  "logprobs": [[-0.5], [-0.25, -1]]})
    >>> group.tokens.tolist(), group.lengths, group.fields["reward"].tolist()
    ([5, 6, 7, 8, 9], (2, 1, 2), [nan, 0.0, 1.0])
    >>> group.token_fields["old_logps"].tolist()
    [nan, nan, -0.5, -0.25, -1.0]

    Args:
        tokenizer: one of transformers or torchtune; messages need a chat template.
        prompt: the column that holds the prompt.
        answers: the column that holds a list of answers, or a list of columns, one for each answer, such as
            ``[chosen, rejected]``. Default: those two, or ``completions`` in rows that have it and no ``chosen``.
        tools: the column that holds the descriptions of tools, if there are any.
        mask: the column that holds for each answer a list of which of its ids are trained (1) and which are not (0),
            such as what a tool answered.
        add_bos: as for `TextEncoder`.
        add_eos: whether an answer that is text ends with EOS.
        fields: numbers of answers, as a list of columns or as ``{field: column}``: a column with one number for each
            answer, or one for all; or ``{field: [column, ...]}`` with one column for each answer.
        token_fields: numbers of tokens, ``{field: column}``. A column holds for each answer as many numbers as it has
            ids.
        share_prefix: whether the prompt is kept once. Otherwise each answer has its own copy.
        ignore: columns to leave out on purpose, such as ``["tools"]``.

    Raises:
        ValueError: for a tokenizer or fields that do not fit.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        prompt: str = "prompt",
        answers: str | Sequence[str] | None = None,
        tools: str = "tools",
        mask: str | None = None,
        add_bos: bool | None = None,
        add_eos: bool = True,
        fields: Sequence[str] | Mapping[str, Any] | None = None,
        token_fields: Sequence[str] | Mapping[str, Any] | None = None,
        share_prefix: bool = True,
        ignore: Sequence[str] = (),
    ) -> None:
        self.completions = Completions(tokenizer, add_bos=add_bos, add_eos=add_eos)
        self.tokenizer = self.completions.tokenizer
        self.prompt = prompt
        self.answers = answers if answers is None or isinstance(answers, str) else tuple(answers)
        self.tools = tools
        self.mask = mask
        self.fields = columns_of(fields, "fields", several=True)
        self.token_fields = columns_of(token_fields, "token_fields")
        if both := sorted(self.fields.keys() & self.token_fields.keys()):
            raise ValueError(f"{both[0]!r} is in fields and in token_fields; give it two names")
        self.share_prefix = share_prefix
        self.ignore = tuple(ignore)
        numbers = [name for names in (*self.fields.values(), *self.token_fields.values()) for name in names]
        used = (prompt, tools, *numbers, *([mask] if mask else []))
        self.unread = UnreadColumns("AnswersEncoder", used=used, ignore=ignore)

    def __call__(self, row: Mapping[str, Any], /) -> Group:
        """See `Encoder`."""
        given = self._given(row)
        if not given.ending:
            used = (self.prompt, *given.columns, self.tools)
            refuse_left_out(row, used=used, ignore=self.ignore)
            self.unread.name(row, *given.columns)
        # An empty list is what the others are.
        ids = [_is_ids(value) for value in given.values if not _is_ids(value) or len(value)]
        token_fields: dict[str, list[FloatArray]] = {}
        if given.ending or all(ids):
            wholes, token_fields = self._of_ids(row, given)
        elif any(ids):
            raise ValueError(
                f"column {given.columns[0]!r} holds ids and texts or messages; give one kind in a row"
            )
        else:
            wholes = self._of_content(row, given)
        return group_of(
            wholes,
            fields={
                name: numbers_of(row, name, columns, answers=len(wholes))
                for name, columns in self.fields.items()
            },
            token_fields=token_fields,
            share_prefix=self.share_prefix,
        )

    def _given(self, row: Mapping[str, Any]) -> Given:
        """Return the answers of a row."""
        columns = self.answers or (LIST if LIST in row and PAIR[0] not in row else PAIR)
        if isinstance(columns, str):
            for column in (self.prompt, columns):
                if column not in row:
                    raise missing_column(row, column)
            values = row[columns]
            if isinstance(values, str | Mapping) or not hasattr(values, "__len__"):
                raise ValueError(
                    f"column {columns!r} holds a {type(values).__name__}; give a list with one entry for each answer"
                )
            if not len(values):
                raise ValueError(f"column {columns!r} holds no answer; leave the row out (skip_bad: True)")
            return Given([f"{columns}[{i}]" for i in range(len(values))], list(values), (columns,))
        for ending in ("_input_ids", "_ids"):
            names = [f"{column}{ending}" for column in columns]
            if all(name in row for name in names):
                return Given(names, [row[name] for name in names], columns, ending)
        for column in columns:
            if column not in row:
                raise missing_column(row, column)
        return Given(list(columns), [row[column] for column in columns], columns)

    def _of_ids(
        self, row: Mapping[str, Any], given: Given
    ) -> tuple[list[Sample], dict[str, list[FloatArray]]]:
        """Return answers that are ids, and the numbers of their tokens, each with the prompt before it."""
        ids = [_ids(value, name) for value, name in zip(given.values, given.names, strict=True)]
        sizes = [each.size for each in ids]
        labels = [f"{column}_labels" for column in given.columns] if given.ending else []
        for column, size in zip(given.columns if given.ending else (), sizes, strict=False):
            require_no_padding(row, size, f"{column}_attention_mask")
        before = self._prompt_ids(row, given.ending)
        if self.mask is None and labels and all(name in row for name in labels):
            before = None  # each holds its own
            wholes = [
                sample_from_pair(each, row[label], tokens=name, labels=label)
                for each, label, name in zip(ids, labels, given.names, strict=True)
            ]
        elif self.mask is None and before is None:
            wholes = _split_where_unequal(ids)
        else:
            untrained = np.zeros(0 if before is None else before.size, bool)
            wholes = [
                masked_sample(
                    after if before is None else np.concatenate([before, after]),
                    np.concatenate([untrained, mask]),
                )
                for after, mask in zip(ids, self._masks(row, sizes), strict=True)
            ]
        nothing = np.full(0 if before is None else before.size, np.nan, np.float32)
        token_fields = {
            field: [np.concatenate([nothing, each]) for each in token_numbers(row, column, sizes)]
            for field, (column,) in self.token_fields.items()
        }
        trained = [
            require_trained(whole, f"column {name!r}")
            for whole, name in zip(wholes, given.names, strict=True)
        ]
        return trained, token_fields

    def _masks(self, row: Mapping[str, Any], sizes: Sequence[int]) -> list[Any]:
        """Return for each answer which of its ids are trained."""
        if self.mask is None:
            return [np.ones(size, bool) for size in sizes]
        entries = each_of(row, self.mask, len(sizes))
        return [
            mask_from_column(each, f"{self.mask}[{i}]", size)
            for i, (each, size) in enumerate(zip(entries, sizes, strict=True))
        ]

    def _prompt_ids(self, row: Mapping[str, Any], ending: str) -> IntArray | None:
        """Return the ids of the prompt alone, as at inference; None if there is none."""
        column = f"{self.prompt}{ending}"
        if column not in row:
            return None
        value = row[column]
        if ending:
            found = _ids(value, column)
            require_no_padding(row, found.size, f"{self.prompt}_attention_mask")
            return found
        if _is_ids(value):
            found = _ids(value, column)
        else:
            content = read_content(value, column)
            if isinstance(content, str):
                refuse_left_out(row, used=(self.prompt,), ignore=self.ignore)
            tools = read_tools(row, self.tools, ignore=self.ignore)
            found = np.array(self.completions.encode_prompt(content, tools=tools), INT64)
        if not found.size:
            raise ValueError(
                f"column {column!r} holds no token, so nothing predicts the answers' first tokens; give the prompt's "
                "ids, with BOS if the model has one"
            )
        return found

    def _of_content(self, row: Mapping[str, Any], given: Given) -> list[Sample]:
        """Encode answers that are texts or messages."""
        if of_tokens := [*self.token_fields, *([self.mask] if self.mask else [])]:
            raise ValueError(
                f"{of_tokens[0]!r} has a number for each token, and column {given.columns[0]!r} holds no ids, so "
                "nobody knows which tokens those are; give the answers as ids"
            )
        if _is_ids(row.get(self.prompt)):
            raise ValueError(
                f"column {self.prompt!r} holds ids and {given.columns[0]!r} does not; give both as ids, or both as "
                "text or messages"
            )
        answers = [read_content(value, name) for value, name in zip(given.values, given.names, strict=True)]
        prompt = read_content(row[self.prompt], self.prompt) if self.prompt in row else None
        if all(isinstance(content, str) for content in (prompt or "", *answers)):  # nothing renders tools
            refuse_left_out(row, used=(self.prompt, *given.columns), ignore=self.ignore)
        if prompt is None:
            self._require_whole(row, given, answers)
            if all(isinstance(answer, str) for answer in answers):
                return self._of_whole_texts([str(answer) for answer in answers])
        prompt, answers = _divided(prompt, answers)
        tools = read_tools(row, self.tools, ignore=self.ignore)
        if tools is None and isinstance(whole := row.get(self.prompt), Mapping):  # OpenAI's form
            tools = read_tools(whole, "tools", ignore=self.ignore)
        return [
            self._encode(prompt, answer, tools, f"column {name!r}")
            for answer, name in zip(answers, given.names, strict=True)
        ]

    def _encode(self, prompt: Content, answer: Content, tools: Any, name: str) -> Sample:
        """Encode an answer as a whole with its prompt; ``name`` names it in errors."""
        if isinstance(prompt, str) and isinstance(answer, str):
            return require_trained(self.completions.encode_text(prompt, answer), name)
        after = as_messages(answer, "assistant")
        if all(message["role"] != "assistant" for message in after):
            raise ValueError(
                f"{name} holds no message of the assistant, so nothing of it is trained; its roles are "
                f"{', '.join(message['role'] for message in after) or 'none'}"
            )
        messages, trained = joined(as_messages(prompt, "user"), after, name)
        return require_trained(self.completions.encode_messages(messages, trained, tools=tools), name)

    def _of_whole_texts(self, texts: Sequence[str]) -> list[Sample]:
        """Encode texts that begin with their prompt: all that they begin with, less a space before they differ.

        The space is the answers', as in TRL, because most tokenizers join it with the word after it.
        """
        encode, bos, eos = self.tokenizer.encode, self.completions.bos, self.completions.add_eos
        ids = [list(encode(text, add_bos=bos, add_eos=eos)) for text in texts]
        prompt = texts[0][: common_prefix([np.array([*text]) for text in texts])].removesuffix(" ")
        return _split_where_unequal(ids, self.completions.encode_prompt(prompt))

    def _require_whole(self, row: Mapping[str, Any], given: Given, answers: Sequence[Content]) -> None:
        """Raise if a row without a prompt has it in another column, or not at all."""
        if all(isinstance(answer, list) and answer[0]["role"] != "assistant" for answer in answers):
            return
        found = [name for name in PROMPTS if name in row and name not in (*given.columns, *self.ignore)]
        if found:
            raise ValueError(
                f"there is no column {self.prompt!r}, and column {found[0]!r} would be left out; say prompt: "
                f"{found[0]}, or ignore: [{found[0]}]"
            )
        if any(isinstance(answer, list) for answer in answers):
            raise ValueError(
                f"there is no column {self.prompt!r}, and an answer does not begin with a message of the user; "
                "name the column of the prompt (prompt: ...), or begin all answers with it"
            )

    def decode(self, tokens: list[int]) -> str:
        """Decode tokens as the tokenizer does."""
        return str(self.tokenizer.decode(tokens))


def _is_ids(value: Any) -> bool:
    """Return whether a value is a list of ids, and not text or messages; an empty one is."""
    if value is None or isinstance(value, str | Mapping) or not hasattr(value, "__len__"):
        return False
    return not len(value) or not isinstance(value[0], str | Mapping)


def _ids(value: Any, column: str) -> IntArray:
    return sample_from_pair(value, value, tokens=column, labels=column).tokens


def _repeats(prompt: str, messages: Messages) -> bool:
    """Return whether a conversation holds a prompt that is text, as any message of the user, and begins before it."""
    return messages[0]["role"] != "assistant" and any(
        message["role"] == "user" and message["content"] == prompt for message in messages
    )


def _divided(prompt: Content | None, answers: Sequence[Content]) -> tuple[Content, list[Content]]:
    """Return the prompt, and the answers without it; where there is none, all are messages that begin with it."""
    if isinstance(prompt, str) and all(isinstance(answer, str) for answer in answers):
        return prompt, list(answers)
    conversations = [as_messages(answer, "assistant") for answer in answers]
    if isinstance(prompt, list):
        shared = len(prompt)
        if any(messages[:shared] != prompt for messages in conversations):
            return prompt, [*conversations]
    elif isinstance(prompt, str) and not all(_repeats(prompt, messages) for messages in conversations):
        return prompt, [*conversations]
    else:  # whole conversations
        shared = _common_messages(conversations)
    return conversations[0][:shared], [messages[shared:] for messages in conversations]


def _common_messages(conversations: Sequence[Messages]) -> int:
    """Return how many messages all conversations begin with, before the last answer of any of them."""
    limit = min(
        max((i for i, message in enumerate(each) if message["role"] == "assistant"), default=len(each))
        for each in conversations
    )
    first, *others = conversations
    return next((i for i in range(limit) if any(other[i] != first[i] for other in others)), limit)


def _split_where_unequal(ids: Sequence[Any], prompt: Sequence[int] | None = None) -> list[Sample]:
    """Return sequences of which all is trained but what all, and the prompt if there is one, begin with.

    Raises:
        ValueError: for equal sequences.
    """
    shared = common_prefix(ids)
    if all(len(each) == shared for each in ids):
        raise ValueError(
            "the answers are equal, so there is no telling where their prompt ends; leave the row out "
            "(skip_bad: True), or give the prompt a column"
        )
    if prompt is not None:
        shared = common_prefix([*ids, prompt])
    shared = min(shared, *(len(each) - 1 for each in ids))
    return [masked_sample(each, np.arange(len(each)) >= shared) for each in ids]
