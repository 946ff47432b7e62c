"""The encoder of rollouts: a prompt, and several completions of it with their numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from streampack.fingerprint import digest, plain
from streampack.packing.columns import mask_from_column
from streampack.packing.encoders.answers import AnswerEncoder, Content, read_content
from streampack.packing.encoders.base import PROBE_TEXT, Encoder
from streampack.packing.encoders.chat import masked_sample
from streampack.packing.encoders.conversation import UnreadColumns, parse_json, refuse_left_out
from streampack.packing.encoders.shared_prefix import (
    as_numbers,
    columns_of,
    group_of,
    numbers_of,
    require_trained,
)
from streampack.packing.encoders.tokenizer import own_fingerprint
from streampack.packing.groups import Group
from streampack.packing.samples import missing_column, sample_from_pair
from streampack.types import INT64, FloatArray, IntArray, Sample

WAY_OUT = "give texts or ids"


class RolloutEncoder(Encoder):
    """Encoder of a prompt with any number of completions, for GRPO and the like, which stay in one pack.

    The prompt is a text, messages or ids. Completions are a list of texts, of messages (each one message or a list of
    them) or of ids. Ids are taken as they are: nothing is added, also no EOS. The completions are trained, the prompt
    is kept once.

    >>> class Letters:
    ...     bos_id, eos_id = 1, 2
    ...     def encode(self, text, add_bos=True, add_eos=True):
    ...         return [1] * add_bos + list(text.encode()) + [2] * add_eos
    >>> encoder = RolloutEncoder(Letters(), fields=["reward"], token_fields={"old_logps": "logprobs"})
    >>> group = encoder({"prompt": [5, 6], "completions": [[7], [8, 9]], "reward": [0, 1],
    ...                  "logprobs": [[-0.5], [-0.25, -1]]})
    >>> group.tokens.tolist(), group.lengths, group.fields["reward"].tolist()
    ([5, 6, 7, 8, 9], (2, 1, 2), [nan, 0.0, 1.0])
    >>> group.token_fields["old_logps"].tolist()
    [nan, nan, -0.5, -0.25, -1.0]

    Args:
        tokenizer: one of transformers or torchtune; messages need a chat template.
        prompt: the column that holds the prompt.
        completions: the column that holds the completions.
        tools: the column that holds the descriptions of tools, if there are any.
        mask: the column that holds for each completion a list of which of its ids are trained (1) and which are not
            (0), such as what a tool answered.
        add_bos: as for `TextEncoder`.
        add_eos: whether a completion that is text ends with EOS.
        fields: numbers of completions, as a list of columns or as ``{field: column}``. A column holds one number for
            each completion, or one for all.
        token_fields: numbers of tokens, likewise. A column holds for each completion as many numbers as it has ids.
        share_prefix: whether the prompt is kept once. Otherwise each completion has its own copy.
        ignore: columns to leave out on purpose, such as ``["tools"]``.

    Raises:
        ValueError: for a tokenizer or fields that do not fit.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        prompt: str = "prompt",
        completions: str = "completions",
        tools: str = "tools",
        mask: str | None = None,
        add_bos: bool | None = None,
        add_eos: bool = True,
        fields: Sequence[str] | Mapping[str, Any] | None = None,
        token_fields: Sequence[str] | Mapping[str, Any] | None = None,
        share_prefix: bool = True,
        ignore: Sequence[str] = (),
    ) -> None:
        self.answers = AnswerEncoder(tokenizer, add_bos=add_bos, add_eos=add_eos, way_out=WAY_OUT)
        self.tokenizer = self.answers.tokenizer
        self.prompt = prompt
        self.completions = completions
        self.tools = tools
        self.mask = mask
        self.fields = columns_of(fields, "fields")
        self.token_fields = columns_of(token_fields, "token_fields")
        if both := sorted(self.fields.keys() & self.token_fields.keys()):
            raise ValueError(f"{both[0]!r} is in fields and in token_fields; give it two names")
        self.share_prefix = share_prefix
        self.ignore = tuple(ignore)
        columns = [
            each for each in (*self.fields.values(), *self.token_fields.values()) if isinstance(each, str)
        ]
        used = (prompt, completions, tools, *columns, *([mask] if mask else []))
        self.unread = UnreadColumns("RolloutEncoder", used=used, ignore=ignore)

    def __call__(self, row: Mapping[str, Any], /) -> Group:
        """See `Encoder`."""
        for column in (self.prompt, self.completions):
            if column not in row:
                raise missing_column(row, column)
        refuse_left_out(row, used=(self.prompt, self.completions, self.tools), ignore=self.ignore)
        self.unread.name(row)
        given = row[self.completions]
        if isinstance(given, str | Mapping) or not hasattr(given, "__len__"):
            raise ValueError(
                f"column {self.completions!r} holds a {type(given).__name__}; give a list with one entry for each "
                "completion"
            )
        if not len(given):
            raise ValueError(
                f"column {self.completions!r} holds no completion; leave the row out (on_bad_record: skip)"
            )
        as_ids = [_is_ids(completion) for completion in given]
        token_fields: dict[str, list[FloatArray]] = {}
        if all(as_ids):
            wholes, token_fields = self._of_ids(row, given)
        elif any(as_ids):
            raise ValueError(
                f"column {self.completions!r} holds ids and texts or messages; give one kind in a row"
            )
        else:
            wholes = self._of_content(row, given)
        return group_of(
            wholes,
            fields={
                name: numbers_of(row, column, sequences=len(wholes)) for name, column in self.fields.items()
            },
            token_fields=token_fields,
            share_prefix=self.share_prefix,
        )

    def _of_content(self, row: Mapping[str, Any], given: Sequence[Any]) -> list[Sample]:
        """Encode completions that are texts or messages."""
        of_tokens = [*self.token_fields, *([self.mask] if self.mask else [])]
        if of_tokens:
            raise ValueError(
                f"{of_tokens[0]!r} has a number for each token, and column {self.completions!r} holds no ids, so "
                "nobody knows which tokens those are; give the completions as ids"
            )
        if _is_ids(row[self.prompt]):
            raise ValueError(
                f"column {self.prompt!r} holds ids and {self.completions!r} does not; give both as ids, or both as "
                "text or messages"
            )
        prompt, tools = read_content(row[self.prompt], self.prompt), self._tools_of(row)
        found = []
        for i, completion in enumerate(given):
            name = f"{self.completions}[{i}]"
            answer = read_content(completion, name)
            if isinstance(prompt, str) and isinstance(answer, str):
                refuse_left_out(row, used=(self.prompt, self.completions), ignore=self.ignore)
            found.append(self.answers.encode(prompt, answer, name=f"column {name!r}", tools=tools))
        return found

    def _of_ids(
        self, row: Mapping[str, Any], given: Sequence[Any]
    ) -> tuple[list[Sample], dict[str, list[FloatArray]]]:
        """Return completions that are ids, and the numbers of their tokens, each with the prompt before it."""
        names = [f"column '{self.completions}[{i}]'" for i in range(len(given))]
        ids = [_ids(each, name) for each, name in zip(given, names, strict=True)]
        sizes = [each.size for each in ids]
        before = self._prompt_ids(row)
        if not before.size:
            raise ValueError(
                f"column {self.prompt!r} holds no token, so nothing predicts the completions' first tokens; give the "
                "prompt's ids, with BOS if the model has one"
            )
        if self.mask is None:
            masks = [np.ones(size, bool) for size in sizes]
        else:
            masks = [
                mask_from_column(each, f"{self.mask}[{i}]", size)
                for i, (each, size) in enumerate(
                    zip(self._each_of(row, self.mask, sizes), sizes, strict=True)
                )
            ]
        untrained = np.zeros(before.size, bool)
        wholes = [
            require_trained(
                masked_sample(np.concatenate([before, after]), np.concatenate([untrained, mask])), name
            )
            for after, mask, name in zip(ids, masks, names, strict=True)
        ]
        nothing = np.full(before.size, np.nan, np.float32)
        token_fields = {
            field: [np.concatenate([nothing, each]) for each in self._of_tokens(row, column, sizes)]
            for field, column in self.token_fields.items()
            if isinstance(column, str)
        }
        return wholes, token_fields

    def _of_tokens(self, row: Mapping[str, Any], column: str, sizes: Sequence[int]) -> list[FloatArray]:
        """Return a column that holds for each completion one number for each of its ids."""
        return [
            as_numbers(each, f"column '{column}[{i}]'", (size,)).astype(np.float32)
            for i, (each, size) in enumerate(zip(self._each_of(row, column, sizes), sizes, strict=True))
        ]

    def _each_of(self, row: Mapping[str, Any], column: str, sizes: Sequence[int]) -> Sequence[Any]:
        """Return a column that has an entry for each completion."""
        if column not in row:
            raise missing_column(row, column)
        given = row[column]
        if isinstance(given, str | Mapping) or not hasattr(given, "__len__") or len(given) != len(sizes):
            count = f"{len(given)} entries" if hasattr(given, "__len__") else f"a {type(given).__name__}"
            raise ValueError(
                f"column {column!r} has {count} for {len(sizes)} completions; give a list of numbers for each"
            )
        entries: Sequence[Any] = given
        return entries

    def _prompt_ids(self, row: Mapping[str, Any]) -> IntArray:
        """Return the ids of the prompt alone, as at inference."""
        value = row[self.prompt]
        if _is_ids(value):
            return _ids(value, f"column {self.prompt!r}")
        content: Content = read_content(value, self.prompt)
        if isinstance(content, str):
            refuse_left_out(row, used=(self.prompt, self.completions), ignore=self.ignore)
            found = self.answers.bare(content, add_eos=False)
        else:
            found = self.answers.chat.chat.prompt(content, tools=self._tools_of(row))
        return np.array(found, INT64)

    def _tools_of(self, row: Mapping[str, Any]) -> Any:
        if self.tools in self.ignore:
            return None
        return parse_json(row.get(self.tools) or None, f"column {self.tools!r}") or None

    def decode(self, tokens: list[int]) -> str:
        """Decode tokens as the tokenizer does."""
        return str(self.tokenizer.decode(tokens))

    def fingerprint(self) -> str:
        """Return a digest of the columns, the settings and the tokenizer."""
        texts = self.answers.texts
        probe = plain(self.answers.bare(PROBE_TEXT, add_eos=texts.add_eos))
        columns = (self.prompt, self.completions, self.tools, self.mask)
        fields = (sorted(self.fields.items()), sorted(self.token_fields.items()))
        settings = (texts.add_bos, texts.add_eos, self.share_prefix, self.ignore)
        return digest("rollout", columns, fields, settings, probe, own_fingerprint(self.tokenizer))


def _is_ids(value: Any) -> bool:
    """Return whether a value is a list of ids, and not text or messages; an empty one is."""
    if value is None or isinstance(value, str | Mapping) or not hasattr(value, "__len__"):
        return False
    return not len(value) or not isinstance(value[0], str | Mapping)


def _ids(value: Any, place: str) -> IntArray:
    try:
        return sample_from_pair(value, value, tokens="ids", labels="ids").tokens
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
