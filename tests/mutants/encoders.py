"""Mutants of encoders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from streampack import (
    ChatEncoder,
    Group,
    HFTokenizer,
    MessagesEncoder,
    PreferenceEncoder,
    PromptCompletionEncoder,
    RolloutEncoder,
    Sample,
    TextEncoder,
)
from streampack.packing.encoders.chat import is_trained, masked_sample
from streampack.packing.encoders.template import ChatTemplate
from streampack.types import IGNORE_INDEX
from tests.mutants.registry import mutant, patch, patch_function


def of_changed_rows(change: Any) -> Any:
    """Make an encoder's ``__call__`` that is given the rows that ``change`` makes, where it is given mappings."""

    def make(good: Any) -> Any:
        return lambda self, row: good(self, change(self, row) if isinstance(row, Mapping) else row)

    return make


@mutant
def end_not_trained() -> None:
    """The EOS token of a text is not trained, so the model does not learn to end one."""

    def make(good: Any) -> Any:
        def encode(self: Any, row: Any) -> Any:
            tokens, labels = good(self, row)
            if not self.add_eos:
                return Sample(tokens, labels)
            return Sample(tokens, np.where(np.arange(tokens.size) < tokens.size - 1, labels, IGNORE_INDEX))

        return encode

    patch(TextEncoder, "__call__", make)


@mutant
def answers_of_tools_trained() -> None:
    """What a tool answered is trained, as if the model had said it."""

    def make(good: Any) -> Any:
        return lambda message: good(
            {**message, "role": "assistant"} if message["role"] == "tool" else message
        )

    patch_function(is_trained, make)


@mutant
def later_answers_begin_a_token_early() -> None:
    """From a conversation's second answer on, the last token of what asks for it is trained, too."""

    def make(good: Any) -> Any:
        def render(self: Any, messages: Any, trained: Any, *, tools: Any = None) -> Any:
            ids, mask = good(self, messages, trained, tools=tools)
            begins = np.flatnonzero(mask[1:] & ~mask[:-1])
            mask = mask.copy()
            mask[begins[1:]] = True
            return ids, mask

        return render

    patch(ChatTemplate, "__call__", make)


@mutant
def prompt_and_completion_apart() -> None:
    """A prompt and its completion are tokenized apart, into other tokens than at inference, instead of refused."""

    def make(good: Any) -> Any:
        def encode(self: Any, prompt: str, completion: str) -> Any:
            head = self.tokenizer.encode(prompt, add_bos=self.add_bos, add_eos=False)
            tail = self.tokenizer.encode(completion, add_bos=False, add_eos=self.add_eos)
            ids = [*head, *tail]
            return masked_sample(ids, np.arange(len(ids)) >= len(head))

        return encode

    patch(PromptCompletionEncoder, "encode_text", make)


@mutant
def tools_as_text_left_out() -> None:
    """Tools that are JSON text, as in Parquet files, are left out of the conversation."""
    patch(
        ChatEncoder,
        "__call__",
        of_changed_rows(
            lambda self, row: {**row, self.tools: None} if isinstance(row.get(self.tools), str) else row
        ),
    )


@mutant
def sides_of_conversations_swapped() -> None:
    """Of whole conversations without a prompt column, the rejected one is taken for the chosen one."""

    def swapped(self: Any, row: Any) -> Any:
        chosen, rejected = self.columns
        if self.transform is not None or self.prompt in row or not isinstance(row.get(chosen), list):
            return row
        return {**row, chosen: row.get(rejected), rejected: row[chosen]}

    patch(PreferenceEncoder, "__call__", of_changed_rows(swapped))


@mutant
def field_of_the_rejected_answer_lost() -> None:
    """Of a field with a column for each answer, both answers get the chosen one's number."""

    def make(good: Any) -> Any:
        def encode(self: Any, row: Any) -> Any:
            given = self.fields
            self.fields = {k: v if isinstance(v, str) else (v[0], v[0]) for k, v in given.items()}
            try:
                return good(self, row)
            finally:
                self.fields = given

        return encode

    patch(PreferenceEncoder, "__call__", make)


@mutant
def numbers_of_later_completions_shifted() -> None:
    """From a group's second completion on, the numbers of tokens belong to the token before."""

    def make(good: Any) -> Any:
        def encode(self: Any, row: Any) -> Any:
            group = good(self, row)
            fields = {name: values.copy() for name, values in group.token_fields.items()}
            for values in fields.values():
                for leaf in group.leaves[1:]:
                    start, stop = group.bounds[leaf]
                    values[start:stop] = np.roll(values[start:stop], -1)
            return Group(*group, lengths=group.lengths, parents=group.parents, fields=group.fields,
                         token_fields=fields)  # fmt: skip

        return encode

    patch(RolloutEncoder, "__call__", make)


@mutant
def mask_of_the_first_completion_only() -> None:
    """The mask of a rollout's tokens is heeded for its first completion only: what tools answered is trained."""

    def unmasked(self: Any, row: Any) -> Any:
        masks = row.get(self.mask)
        if (
            self.mask is None
            or not isinstance(masks, list)
            or not all(isinstance(each, list) for each in masks)
        ):
            return row
        return {**row, self.mask: [*masks[:1], *([1] * len(each) for each in masks[1:])]}

    patch(RolloutEncoder, "__call__", of_changed_rows(unmasked))


@mutant
def weights_of_messages_dropped() -> None:
    """With torchtune's transforms, messages of weight 0 are trained."""

    def weighed(self: Any, row: Any) -> Any:
        return {
            name: [
                {key: value for key, value in each.items() if key != "weight"}
                if isinstance(each, dict)
                else each
                for each in column
            ]
            if isinstance(column, list)
            else column
            for name, column in row.items()
        }

    patch(MessagesEncoder, "__call__", of_changed_rows(weighed))


@mutant
def texts_cut_at_the_models_length() -> None:
    """A text is cut at the length that a Hugging Face tokenizer says of its model, in silence."""

    def make(good: Any) -> Any:
        def encode(self: Any, text: str, add_bos: Any = True, add_eos: bool = True) -> Any:
            return good(self, text, add_bos, add_eos)[: self.tokenizer.model_max_length]

        return encode

    patch(HFTokenizer, "encode", make)


@mutant
def template_settings_not_compared() -> None:
    """A run that goes on with other ``template_kwargs`` is not refused."""

    def make(good: Any) -> Any:
        def fingerprint(self: Any) -> Any:
            plain = HFTokenizer(self.tokenizer, chat_template=self._templates.get("default"), date=self._date)
            return good(plain)

        return fingerprint

    patch(HFTokenizer, "fingerprint", make)
