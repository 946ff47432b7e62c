"""The encoder of a prompt with several answers: preference pairs, and rollouts with their numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from streampack.packing.columns import mask_from_column, require_no_padding
from streampack.packing.encoders.answer_groups import (
    Columns,
    columns_of,
    common_prefix,
    entries_of,
    group_of,
    numbers_of,
    token_numbers_of,
)
from streampack.packing.encoders.base import Encoder
from streampack.packing.encoders.chat import ChatEncoder, as_messages, masked_sample
from streampack.packing.encoders.conversation import (
    Content,
    ReadColumns,
    is_empty,
    read_content,
    read_tools,
)
from streampack.packing.groups import Group
from streampack.packing.samples import missing_column, sample_from_pair
from streampack.types import INT32, IntArray, Sample

PAIR = ("chosen", "rejected")
LIST = "completions"

PROMPTS = ("question", "instruction", "input", "query", "context", "conversations", "messages")
"""Columns that hold the prompt in many data sets; a row that has one and no prompt is refused."""


class AnswersEncoder(Encoder):
    """Encoder of a prompt with its answers, which stay in one pack: preference pairs, and rollouts of any number.

    The answers are in columns of their own, ``chosen`` and ``rejected``, or in one column with a list,
    ``completions``. Prompt and answers are texts, messages (OpenAI's, ShareGPT's), which a Hugging Face tokenizer's
    chat template renders, or ids, which are taken as they are: nothing is added, also no EOS. In place of a prompt,
    answers in columns of their own may all begin with it. Pairs of torchtune's ``PreferenceDataset`` and of TRL
    (``chosen_input_ids``, ``chosen_ids``) are read, too. Each answer is encoded as a whole with its prompt, as by
    `ChatEncoder`; the tokens that all begin with are kept once.

    >>> class Letters:
    ...     bos_id, eos_id = 1, 2
    ...     def encode(self, text, add_bos=True, add_eos=True):
    ...         return [1] * add_bos + list(text.encode()) + [2] * add_eos
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
        self.chat = ChatEncoder(tokenizer, add_bos=add_bos, add_eos=add_eos)
        self.tokenizer = self.chat.tokenizer
        self.prompt = prompt
        self.answers = answers if answers is None or isinstance(answers, str) else tuple(answers)
        self.tools = tools
        self.mask = mask
        self.fields = columns_of(fields, "fields")
        self.token_fields = columns_of(token_fields, "token_fields")
        if both := sorted(self.fields.keys() & self.token_fields.keys()):
            raise ValueError(f"{both[0]!r} is in fields and in token_fields; give it two names")
        self.share_prefix = share_prefix
        self.ignore = tuple(ignore)
        numbers = [name for names in (*self.fields.values(), *self.token_fields.values()) for name in names]
        self.columns = ReadColumns(
            "AnswersEncoder", used=(prompt, *numbers, *([mask] if mask else [])), ignore=ignore
        )

    def __call__(self, row: Mapping[str, Any], /) -> Group:
        """See `Encoder`."""
        values, columns, ending = self._given(row)
        answers = {
            name: _read(value, name, is_ids=bool(ending), ignore=self.ignore)
            for name, value in values.items()
        }
        prompt = None
        if (name := f"{self.prompt}{ending}") in row:
            # Tools beside a prompt's messages are rendered where the row has no column of them.
            rendered = ("tools",) if is_empty(row.get(self.tools)) else ()
            prompt = _read(row[name], name, is_ids=bool(ending), ignore=(*rendered, *self.ignore))
        kinds = {type(each) for each in (prompt, *answers.values())}
        if not ending:  # such rows keep the columns that they were made of
            self.columns.check(row, *columns, *([] if str in kinds and list not in kinds else [self.tools]))
        tools = None
        if list in kinds:
            tools = read_tools(row, self.tools, ignore=self.ignore)
            if tools is None and isinstance(whole := row.get(self.prompt), Mapping):  # OpenAI's form
                tools = read_tools(whole, "tools", ignore=self.ignore)
        ids = {name: answer for name, answer in answers.items() if isinstance(answer, np.ndarray)}
        token_fields = {}
        if len(ids) == len(answers):
            if isinstance(prompt, str | list):
                prompt = _ids(self.chat.encode_prompt(prompt, tools=tools), self.prompt)
            wholes = self._of_ids(row, prompt, ids, columns if ending else ())
            token_fields = token_numbers_of(row, self.token_fields, [each.size for each in ids.values()])
        elif ids or isinstance(prompt, np.ndarray):
            raise ValueError(
                f"columns {self.prompt!r} and {columns[0]!r} hold ids and texts or messages; give all answers as ids, "
                "or prompt and answers as text or messages"
            )
        elif of_tokens := [*self.token_fields, *([self.mask] if self.mask else [])]:
            raise ValueError(
                f"{of_tokens[0]!r} has a number for each token, and column {columns[0]!r} holds no ids, so nobody "
                "knows which tokens those are; give the answers as ids"
            )
        else:
            wholes = self._of_content(row, prompt, answers, columns, tools)
        return group_of(
            {f"column {name!r}": whole for name, whole in zip(answers, wholes, strict=True)},
            fields=numbers_of(row, self.fields, len(wholes)),
            token_fields=token_fields,
            share_prefix=self.share_prefix,
        )

    def _given(self, row: Mapping[str, Any]) -> tuple[dict[str, Any], Columns, str]:
        """Return a row's answers by their names in errors, the columns that they are in, and what ends those of ids."""
        columns = self.answers or (LIST if LIST in row and PAIR[0] not in row else PAIR)
        if isinstance(columns, str):
            if self.prompt not in row:
                raise missing_column(row, self.prompt)
            values = dict(entries_of(row, (columns,)))
            if not values:
                raise ValueError(f"column {columns!r} holds no answer; leave the row out (skip_bad: True)")
            return values, (columns,), ""
        for ending in ("_input_ids", "_ids", ""):  # those of TRL and torchtune
            names = [f"{column}{ending}" for column in columns]
            if all(name in row for name in names):
                return {name: row[name] for name in names}, columns, ending
        raise missing_column(row, next(column for column in columns if column not in row))

    def _of_ids(
        self, row: Mapping[str, Any], prompt: IntArray | None, answers: dict[str, IntArray], columns: Columns
    ) -> list[Sample]:
        """Return answers that are ids, each with the prompt before it; ``columns`` are those of TRL or torchtune."""
        if columns:
            for column, ids in zip((*columns, self.prompt), (*answers.values(), prompt), strict=True):
                if ids is not None:
                    require_no_padding(row, ids.size, f"{column}_attention_mask")
        elif prompt is not None and not prompt.size:
            raise ValueError(
                f"column {self.prompt!r} holds no token, so nothing predicts the answers' first tokens; give the "
                "prompt's ids, with BOS if the model has one"
            )
        labels = [f"{column}_labels" for column in columns]
        if self.mask is not None:
            entries = entries_of(row, (self.mask,), len(answers))
            masks = [
                mask_from_column(value, name, ids.size)
                for ids, (name, value) in zip(answers.values(), entries, strict=True)
            ]
        elif columns and all(label in row for label in labels):  # each holds its own prompt
            return [
                sample_from_pair(ids, row[label], tokens=name, labels=label)
                for (name, ids), label in zip(answers.items(), labels, strict=True)
            ]
        elif prompt is None:
            return _split_where_unequal([*answers.values()])
        else:
            masks = [np.ones(ids.size, bool) for ids in answers.values()]
        before = np.zeros(0, INT32) if prompt is None else prompt
        return [
            masked_sample(np.concatenate([before, ids]), np.concatenate([np.zeros(before.size, bool), mask]))
            for ids, mask in zip(answers.values(), masks, strict=True)
        ]

    def _of_content(
        self, row: Mapping[str, Any], prompt: Any, given: dict[str, Any], columns: Columns, tools: Any
    ) -> list[Sample]:
        """Encode answers that are texts or messages."""
        answers = [*given.values()]
        if prompt is None and not all(
            isinstance(each, list) and each[0]["role"] != "assistant" for each in answers
        ):
            texts = all(isinstance(each, str) for each in answers)
            others = [name for name in PROMPTS if name in row and name not in (*columns, *self.ignore)]
            if others or not texts:
                told, name = "not every answer begins with one", "..."
                if others:
                    told, name = (
                        f"column {others[0]!r} would be left out",
                        f"{others[0]}, or ignore: [{others[0]}]",
                    )
                raise ValueError(
                    f"there is no column {self.prompt!r}, and {told}; name the column of the prompt (prompt: {name}), "
                    "or begin all answers with it"
                )
            return self._of_whole_texts(answers)
        prompt, answers = _divided(prompt, answers)
        return [
            self.chat.encode(prompt, answer, tools=tools, name=f"column {name!r}")
            for name, answer in zip(given, answers, strict=True)
        ]

    def _of_whole_texts(self, texts: Sequence[str]) -> list[Sample]:
        """Encode texts that begin with their prompt: all that they begin with, less a space before they differ.

        The space is the answers', as in TRL, because most tokenizers join it with the word after it.
        """
        encode, bos, eos = self.tokenizer.encode, self.chat.bos, self.chat.add_eos
        ids = [list(encode(text, add_bos=bos, add_eos=eos)) for text in texts]
        prompt = texts[0][: common_prefix([[*text] for text in texts])].removesuffix(" ")
        return _split_where_unequal(ids, self.chat.encode_prompt(prompt))

    def decode(self, tokens: list[int]) -> str:
        """Decode tokens as the tokenizer does."""
        return str(self.tokenizer.decode(tokens))


def _read(value: Any, column: str, *, is_ids: bool, ignore: Sequence[str]) -> Content | IntArray:
    """Return what a column holds: ids, a text, or messages; an empty list is one of ids."""
    if not is_ids and not isinstance(value, str | Mapping) and hasattr(value, "__len__"):
        is_ids = not len(value) or not isinstance(value[0], str | Mapping)
    return _ids(value, column) if is_ids else read_content(value, column, ignore=ignore)


def _ids(value: Any, column: str) -> IntArray:
    return sample_from_pair(value, value, tokens=column, labels=column).tokens


def _divided(prompt: Content | None, answers: Sequence[Content]) -> tuple[Content, list[Content]]:
    """Return the prompt, and the answers without it; where there is none, all are messages that begin with it."""
    if isinstance(prompt, str) and all(isinstance(answer, str) for answer in answers):
        return prompt, list(answers)
    whole = [as_messages(answer, "assistant") for answer in answers]
    if isinstance(prompt, list):
        shared = len(prompt) if all(each[: len(prompt)] == prompt for each in whole) else 0
    elif prompt is None or all(
        each[0]["role"] != "assistant"
        and any(message["role"] == "user" and message["content"] == prompt for message in each)
        for each in whole
    ):
        # What all begin with, before the last answer of any of them.
        lasts = [[i for i, m in enumerate(each) if m["role"] == "assistant"] or [len(each)] for each in whole]
        limit = min(last[-1] for last in lasts)
        shared = common_prefix([each[:limit] for each in whole])
        prompt = whole[0][:shared]
    else:
        shared = 0
    return prompt, [messages[shared:] for messages in whole]


def _split_where_unequal(ids: Sequence[Any], prompt: Sequence[int] | None = None) -> list[Sample]:
    """Return sequences of which all is trained but what all, and the prompt if there is one, begin with."""
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
