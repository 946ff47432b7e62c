"""The encoder of a prompt with several answers: preference pairs, and rollouts with their numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from streampack.packing.columns import mask_from_column
from streampack.packing.encoders.base import TextsEncoder, characters_in
from streampack.packing.encoders.chat import TOOLS, ChatEncoder, as_messages, masked_sample
from streampack.packing.encoders.conversation import (
    Content,
    ReadColumns,
    read_content,
    read_tools,
)
from streampack.packing.encoders.fields import Columns, checked_numbers, columns_of, entries_of, numbers_of
from streampack.packing.encoders.steps import Steps, Text
from streampack.packing.groups import ROOT, Group
from streampack.packing.samples import missing_column, sample_from_pair
from streampack.types import IGNORE_INDEX, INT32, FloatArray, IntArray, Sample

PAIR = ("chosen", "rejected")
LIST = "completions"

PROMPTS = ("question", "instruction", "input", "query", "context", "conversations", "messages")
"""Columns that hold the prompt in many data sets; a row that has one and no prompt is refused."""


class AnswersEncoder(TextsEncoder):
    """Encoder of a prompt with its answers, which stay in one pack: preference pairs, and rollouts of any number.

    The answers are in columns of their own, ``chosen`` and ``rejected``, or in one column with a list,
    ``completions``. Prompt and answers are texts, messages (OpenAI's, ShareGPT's), which a Hugging Face tokenizer's
    chat template renders, or ids, which are taken as they are: nothing is added, also no EOS. In place of a prompt,
    answers in columns of their own may all begin with it. Each answer is encoded together with its prompt, as by
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
        roles: as for `ChatEncoder`.
        mask: the column that holds for each answer a list that says which ids are trained (1) and which are not (0),
            such as what a tool answered.
        add_bos: as for `TextEncoder`.
        add_eos: whether an answer that is text ends with EOS.
        fields: numbers of answers, as a list of columns or as ``{field: column}``: a column with one number for each
            answer, or one for all; or ``{field: [column, ...]}`` with one column for each answer.
        token_fields: numbers of tokens, ``{field: column}``. A column holds for each answer as many numbers as it has
            ids.
        share_prefix: whether the prompt is kept once. Otherwise each answer has its own copy.
        ignore: columns, and flags of messages, to ignore on purpose, such as ``["tools"]``.

    Raises:
        ValueError: for a tokenizer or fields that do not fit.
    """

    makes_groups = True

    def __init__(
        self,
        tokenizer: Any,
        *,
        prompt: str = "prompt",
        answers: str | Sequence[str] | None = None,
        roles: Mapping[str, str] | None = None,
        mask: str | None = None,
        add_bos: bool | None = None,
        add_eos: bool = True,
        fields: Sequence[str] | Mapping[str, Any] | None = None,
        token_fields: Sequence[str] | Mapping[str, Any] | None = None,
        share_prefix: bool = True,
        ignore: Sequence[str] = (),
    ) -> None:
        self.chat = ChatEncoder(tokenizer, roles=roles, add_bos=add_bos, add_eos=add_eos, ignore=ignore)
        self.tokenizer = self.chat.tokenizer
        self.prompt = prompt
        self.answers = answers if answers is None or isinstance(answers, str) else tuple(answers)
        self.mask = mask
        self.fields = columns_of(fields, "fields")
        self.token_fields = columns_of(token_fields, "token_fields")
        self.share_prefix = share_prefix
        self.ignore = tuple(ignore)
        numbers = [name for names in (*self.fields.values(), *self.token_fields.values()) for name in names]
        self.columns = ReadColumns(
            "AnswersEncoder", used=(prompt, *numbers, *([mask] if mask else [])), ignore=ignore
        )

    def steps(self, row: Mapping[str, Any]) -> Steps[Sample]:
        """See `TextsEncoder`."""
        columns = self._columns_of(row)
        if isinstance(columns, str):
            columns = (columns,)
            if self.prompt not in row:
                raise missing_column(row, self.prompt, option="prompt")
        entries = entries_of(row, columns, listed=len(columns) == 1, option="answers")
        if not entries:
            raise ValueError(f"column {columns[0]!r} holds no answer; leave the row out (skip_bad: True)")
        answers = {name: _read(value, name, self.chat.roles) for name, value in entries}
        prompt = _read(row[self.prompt], self.prompt, self.chat.roles) if self.prompt in row else None
        kinds = {type(each) for each in (prompt, *answers.values())}
        self.columns.check(row, *columns, *([] if str in kinds and list not in kinds else [TOOLS]))
        tools = read_tools(row, TOOLS, ignore=self.ignore) if list in kinds else None
        ids = [each for each in answers.values() if isinstance(each, np.ndarray)]
        token_fields = {}
        if len(ids) == len(answers):
            if isinstance(prompt, str | list):
                prompt = _ids((yield from self.chat.encode_prompt(prompt, tools=tools)), self.prompt)
            wholes = self._of_ids(row, prompt, ids)
            token_fields = {
                field: [
                    checked_numbers(value, name, (each.size,)).astype(np.float32)
                    for each, (name, value) in zip(ids, entries_of(row, names, len(ids)), strict=True)
                ]
                for field, names in self.token_fields.items()
            }
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
            wholes = yield from self._of_content(row, prompt, answers, tools)
        return group_of(
            {f"column {name!r}": whole for name, whole in zip(answers, wholes, strict=True)},
            fields=numbers_of(row, self.fields, len(wholes)),
            token_fields=token_fields,
            share_prefix=self.share_prefix,
        )

    def characters(self, row: Mapping[str, Any], /) -> int:
        """See `Encoder`. The longest of prompt and answers counts alone: each answer may repeat the prompt."""
        columns = self._columns_of(row)
        answers = [row.get(name) for name in ((columns,) if isinstance(columns, str) else columns)]
        if len(answers) == 1 and isinstance(answers[0], list | tuple | np.ndarray):
            answers = list(answers[0])
        return max(map(characters_in, [row.get(self.prompt), *answers]))

    def _columns_of(self, row: Mapping[str, Any]) -> str | Columns:
        return self.answers or (LIST if LIST in row and PAIR[0] not in row else PAIR)

    def _of_ids(
        self, row: Mapping[str, Any], prompt: IntArray | None, answers: list[IntArray]
    ) -> list[Sample]:
        """Return answers that are ids, each with the prompt before it."""
        if prompt is None and self.mask is None:
            return _split_where_unequal(answers)
        if prompt is not None and not prompt.size:
            raise ValueError(
                f"column {self.prompt!r} holds no token, so nothing predicts the answers' first tokens; give the "
                "prompt's ids, with BOS if the model has one"
            )
        before = np.zeros(0, INT32) if prompt is None else prompt
        masks = [np.ones(ids.size, bool) for ids in answers]
        if self.mask is not None:
            entries = entries_of(row, (self.mask,), len(answers))
            masks = [
                mask_from_column(value, name, ids.size)
                for ids, (name, value) in zip(answers, entries, strict=True)
            ]
        return [
            masked_sample(np.concatenate([before, ids]), np.concatenate([np.zeros(before.size, bool), mask]))
            for ids, mask in zip(answers, masks, strict=True)
        ]

    def _of_content(
        self, row: Mapping[str, Any], prompt: Any, answers: Mapping[str, Any], tools: Any
    ) -> Steps[list[Sample]]:
        """Encode answers that are texts or messages."""
        given = [*answers.values()]
        if prompt is None and not all(
            isinstance(each, list) and each[0]["role"] != "assistant" for each in given
        ):
            others = [name for name in PROMPTS if name in row and name not in (*answers, *self.ignore)]
            if others or not all(isinstance(each, str) for each in given):
                other = f"{others[0]}, or ignore: [{others[0]}]" if others else "..."
                raise ValueError(
                    f"there is no column {self.prompt!r}, and not every answer begins with one; name the column of "
                    f"the prompt (prompt: {other}), or begin all answers with it"
                )
            bos, eos = self.chat.bos, self.chat.add_eos
            ids = [tokens.ids for tokens in (yield [Text(text, bos, eos) for text in given])]
            # A space before they differ is the answers', as in TRL: most tokenizers join it with the word after it.
            shared = given[0][: _common_prefix([[*text] for text in given])].removesuffix(" ")
            return _split_where_unequal(ids, (yield from self.chat.encode_prompt(shared)))
        prompt, given = _divided(prompt, given)
        made = []
        for name, answer in zip(answers, given, strict=True):
            made.append((yield from self.chat.encode(prompt, answer, tools=tools, name=f"column {name!r}")))
        return made


def group_of(
    wholes: Mapping[str, Sample],
    *,
    fields: Mapping[str, Sequence[float]],
    token_fields: Mapping[str, Sequence[FloatArray]] | None = None,
    share_prefix: bool,
    untrained: bool = False,
) -> Group:
    """Return sequences as one group: the tokens that all begin with, up to the first that any trains, and the rests.

    >>> wholes = {name: Sample(np.array([5, 6, name]), np.array([-100, -100, name])) for name in (7, 8)}
    >>> pair = group_of(wholes, fields={}, share_prefix=True)
    >>> pair.tokens.tolist(), pair.lengths, pair.parents
    ([5, 6, 7, 8], (2, 1, 1), (-1, 0, 0))

    ``token_fields`` have for each sequence one number for each of its last tokens. With ``untrained``, a sequence may
    train nothing.
    """
    starts = []
    for name, whole in wholes.items():
        trained = np.flatnonzero(whole.labels != IGNORE_INDEX)
        if untrained:
            trained = np.append(trained, whole.tokens.size - 1)
        if not trained.size:
            raise ValueError(
                f"{name} has no token to train: it is empty, or all of its messages are masked; leave the row out "
                "(skip_bad: True), or end texts with EOS (add_eos: True)"
            )
        starts.append(int(trained[0]))
    samples = [*wholes.values()]
    # Each keeps its first trained token, or its last one, so each has a segment of its own.
    shared = _common_prefix([whole.tokens[: min(starts)] for whole in samples]) if share_prefix else 0
    parts = [whole.cut(shared, whole.tokens.size) for whole in samples]
    if shared:
        parts.insert(0, samples[0].cut(0, shared))
    numbers = {}
    for name, values in (token_fields or {}).items():
        full = [
            np.concatenate([np.full(whole.tokens.size - each.size, np.nan, np.float32), each])
            for whole, each in zip(samples, values, strict=True)
        ]
        numbers[name] = np.concatenate([full[0][:shared], *(each[shared:] for each in full)])
    return Group(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.labels for part in parts]),
        lengths=[part.tokens.size for part in parts],
        parents=[ROOT, *[0] * len(samples)] if shared else None,
        fields={name: [*[np.nan] * bool(shared), *values] for name, values in fields.items()},
        token_fields=numbers,
    )


def _read(value: Any, column: str, roles: Mapping[str, str] | None) -> Content | IntArray:
    """Return what a column holds: ids, a text, or messages; an empty list is one of ids."""
    listed = not isinstance(value, str | Mapping) and hasattr(value, "__len__")
    if listed and (not len(value) or not isinstance(value[0], str | Mapping)):
        return _ids(value, column)
    return read_content(value, column, roles=roles)


def _ids(value: Any, column: str) -> IntArray:
    return sample_from_pair(value, value, tokens=column, labels=column).tokens


def _divided(prompt: Content | None, answers: Sequence[Content]) -> tuple[Content, list[Content]]:
    """Return the prompt, and the answers without it; where there is none, all are messages that begin with it."""
    if isinstance(prompt, str) and all(isinstance(answer, str) for answer in answers):
        return prompt, list(answers)
    whole = [as_messages(answer, "assistant") for answer in answers]
    shared = 0
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
        shared = _common_prefix([each[:limit] for each in whole])
        prompt = whole[0][:shared]
    return prompt, [messages[shared:] for messages in whole]


def _split_where_unequal(ids: Sequence[Any], prompt: Sequence[int] | None = None) -> list[Sample]:
    """Return sequences whose shared prefix (and prompt, if any) is not trained; every other token is."""
    shared = _common_prefix(ids)
    if all(len(each) == shared for each in ids):
        raise ValueError(
            "the answers are equal, so there is no telling where their prompt ends; leave the row out "
            "(skip_bad: True), or give the prompt a column"
        )
    if prompt is not None:
        shared = _common_prefix([*ids, prompt])
    shared = min(shared, *(len(each) - 1 for each in ids))
    return [masked_sample(each, np.arange(len(each)) >= shared) for each in ids]


def _common_prefix(sequences: Sequence[Any]) -> int:
    """Return the number of elements that all sequences begin with."""
    shortest = min(map(len, sequences))
    equal = [np.asarray(each[:shortest]) == np.asarray(sequences[0][:shortest]) for each in sequences]
    return int(np.logical_and.accumulate(np.all(equal, axis=0)).sum())
