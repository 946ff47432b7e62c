"""Mutants of encoders."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import wraps
from typing import Any

import numpy as np

from streampack import (
    AnswersEncoder,
    ChatEncoder,
    Group,
    HFTokenizer,
    MediaSample,
    MessagesEncoder,
    Sample,
    TextEncoder,
    VisionEncoder,
)
from streampack.packing.encoders.answers import PAIR
from streampack.packing.encoders.chat import is_trained, masked_sample
from streampack.packing.encoders.conversation import flags_against
from streampack.packing.encoders.giants import PART, cut_giant
from streampack.packing.encoders.template import ChatTemplate
from streampack.packing.encoders.tokenizer import with_one_end
from streampack.types import IGNORE_INDEX
from tests.mutants.registry import replaces


def changing_rows(encoder: type) -> Any:
    """Give encoders the rows that the decorated function makes, where they are given mappings."""

    def register(change: Any) -> Any:
        @wraps(change)
        def encode(good: Any, self: Any, row: Any) -> Any:
            return good(self, change(self, row) if isinstance(row, Mapping) else row)

        return replaces(encoder, "__call__")(encode)

    return register


@replaces(TextEncoder, "__call__")
def end_not_trained(good, self, row):
    """The EOS token of a text is not trained, so the model does not learn to end one."""
    tokens, labels = good(self, row)
    if not self.add_eos:
        return Sample(tokens, labels)
    return Sample(tokens, np.where(np.arange(tokens.size) < tokens.size - 1, labels, IGNORE_INDEX))


@replaces(with_one_end)
def second_end_of_a_text(good, tokenizer, ids, text):
    """A text that ends with EOS gets another, and both are trained, so the model learns to say it twice."""
    ids = good(tokenizer, ids, text)
    return ids + [tokenizer.eos_id] * (text.add_eos and text.text.endswith("</s>"))


@replaces(cut_giant)
def giants_cut_at_any_line_break(good, text, *, size=PART):
    """A giant text is cut at line breaks among blanks, which make one token in the whole."""
    return [part for part in re.split(r"(?<=\n)(?=\w)", text) if part] or [""]


@replaces(is_trained)
def answers_of_tools_trained(good, message):
    """What a tool answered is trained, as if the model had said it."""
    return good({**message, "role": "assistant"} if message["role"] == "tool" else message)


@replaces(flags_against)
def flags_of_other_programs_unread(good, message):
    """Of the flags that say that a message is not trained, only OpenAI's is read."""
    return good(message) & {"weight"}


@replaces(ChatTemplate, "steps")
def later_answers_begin_a_token_early(good, self, messages, trained, *, tools=None):
    """From a conversation's second answer on, the last token of what asks for it is trained, too."""
    ids, mask = yield from good(self, messages, trained, tools=tools)
    begins = np.flatnonzero(mask[1:] & ~mask[:-1])
    mask = mask.copy()
    mask[begins[1:]] = True
    return ids, mask


@replaces(ChatEncoder, "encode_text")
def prompt_and_completion_apart(good, self, prompt, completion):
    """A prompt and its completion are tokenized apart, into other tokens than at inference, instead of refused."""
    head = yield from self.encode_prompt(prompt)
    tail = self.tokenizer.encode(completion, add_bos=False, add_eos=self.add_eos)
    ids = [*head, *tail]
    return masked_sample(ids, np.arange(len(ids)) >= len(head))


@changing_rows(ChatEncoder)
def tools_as_text_left_out(encoder, row):
    """Tools that are JSON text, as in Parquet files, are left out of the conversation."""
    return {**row, "tools": None} if isinstance(row.get("tools"), str) else row


@changing_rows(AnswersEncoder)
def sides_of_conversations_swapped(encoder, row):
    """Of whole conversations without a prompt column, the rejected one is taken for the chosen one."""
    chosen, rejected = PAIR
    if encoder.prompt in row or not isinstance(row.get(chosen), list):
        return row
    return {**row, chosen: row.get(rejected), rejected: row[chosen]}


@replaces(AnswersEncoder, "__call__")
def field_of_the_rejected_answer_lost(good, self, row):
    """Of a field with a column for each answer, both answers get the chosen one's number."""
    given = self.fields
    self.fields = {name: (columns[0],) * len(columns) for name, columns in given.items()}
    try:
        return good(self, row)
    finally:
        self.fields = given


@replaces(AnswersEncoder, "__call__")
def numbers_of_later_completions_shifted(good, self, row):
    """From a group's second completion on, the numbers of tokens belong to the token before."""
    group = good(self, row)
    fields = {name: values.copy() for name, values in group.token_fields.items()}
    for values in fields.values():
        for leaf in group.leaves[1:]:
            start, stop = group.bounds[leaf]
            values[start:stop] = np.roll(values[start:stop], -1)
    return Group(*group, lengths=group.lengths, parents=group.parents, fields=group.fields,
                 token_fields=fields)  # fmt: skip


@changing_rows(AnswersEncoder)
def mask_of_the_first_completion_only(encoder, row):
    """The mask of a rollout's tokens is heeded for its first completion only: what tools answered is trained."""
    masks = row.get(encoder.mask) if encoder.mask is not None else None
    if not isinstance(masks, list) or not all(isinstance(each, list) for each in masks):
        return row
    return {**row, encoder.mask: [*masks[:1], *([1] * len(each) for each in masks[1:])]}


@changing_rows(MessagesEncoder)
def weights_of_messages_dropped(encoder, row):
    """With torchtune's transforms, messages of weight 0 are trained."""

    def weighed(message: Any) -> Any:
        if not isinstance(message, dict):
            return message
        return {key: value for key, value in message.items() if key != "weight"}

    return {
        name: list(map(weighed, column)) if isinstance(column, list) else column
        for name, column in row.items()
    }


@replaces(HFTokenizer, "encode")
def texts_cut_at_the_models_length(good, self, text, add_bos=True, add_eos=True):
    """A text is cut at the length that a Hugging Face tokenizer says of its model, in silence."""
    return good(self, text, add_bos, add_eos)[: self.tokenizer.model_max_length]


@replaces(HFTokenizer, "__init__")
def template_settings_left_out(
    good, self, path, *, chat_template=None, template_kwargs=None, date=None, **others
):
    """The chat template is rendered without the user's ``template_kwargs``."""
    good(self, path, chat_template=chat_template, date=date, **others)


@replaces(VisionEncoder, "__call__")
def images_trained(good, self, row):
    """Tokens of images in answers are trained."""
    sample = good(self, row)
    if isinstance(sample, MediaSample):
        labels = np.where(np.isin(sample.tokens, [*self.media_ids]), sample.tokens, sample.labels)
        others = {name: getattr(sample, name) for name in ("media", "positions", "cost", "images")}
        return MediaSample(sample.tokens, labels, **others)
    return sample
