"""Parsing of conversations: rows are checked and converted to OpenAI's form, without nulls."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np

from streampack.packing.shapes import is_empty, plain_message

log = logging.getLogger(__name__)

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys under which a message carries its chain of thought."""

FLAGS = {
    **dict.fromkeys(
        ("weight", "train", "training", "train_on_turn", "loss", "loss_weight", "loss_mask"), True
    ),
    "masked": False,
}
"""Keys by which OpenAI, axolotl, ms-swift, LLaMA-Factory and torchtune say whether a message is trained, and whether it
is where they are 1."""
LIKE_FLAGS = re.compile("(?<![A-Za-z])(train|loss|mask|weight)|Train|Loss|Mask|Weight")

BEGINS_MESSAGES = re.compile(r"\s*\[\s*\{")
"""How JSON text of messages begins."""

COMPANIONS = {"system", "tools", "functions", "history"}
"""Columns beside a conversation that change what the model sees, so they must not be ignored unnoticed."""
MEDIA = {"images", "image", "videos", "video", "audios", "audio"}
JUDGEMENTS = {"label", "labels", "kto_tag"}
"""Columns that may say whether an answer is a good one, TRL's and LLaMA-Factory's: a number, or flags."""
SPECIAL = COMPANIONS | MEDIA | JUDGEMENTS | FLAGS.keys()

Messages = list[dict[str, Any]]
"""A conversation in OpenAI's form."""

Content = str | Messages
"""A text, or messages."""


def parse_conversation(value: Any, column: str, *, roles: Mapping[str, str] | None = None) -> Messages:
    """Return messages of OpenAI's form or ShareGPT's, as a list, an array or JSON text, in a new list of OpenAI's form.

    For ``roles`` see `ShapeEncoder`; None takes any that does not look like a misspelt one.

    >>> parse_conversation('[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]', "messages")
    [{'role': 'user', 'content': 'Hi'}]
    """
    place = f"column {column!r}"
    found = parse_json(value, place)
    if not isinstance(found, list | tuple | np.ndarray):
        raise ValueError(
            f"{place} holds a {type(found).__name__}; it must be a list of messages, or JSON text of one"
        )
    if len(found) == 0:
        raise ValueError(f"{place} holds no message; leave the row out")
    return [_parse_message(message, f"{place}, message {i}", roles) for i, message in enumerate(found)]


def read_content(value: Any, column: str, *, roles: Mapping[str, str] | None = None) -> Content:
    """Return what a column holds: a text, or messages, also one alone."""
    if isinstance(value, str):
        found = json_messages(value)
        return value if found is None else parse_conversation(found, column, roles=roles)
    if isinstance(value, Mapping):
        value = [value]
    elif value is None:
        raise ValueError(f"column {column!r} is null; mend the row, or leave it out (skip_bad: True)")
    elif not isinstance(value, list | tuple | np.ndarray):
        raise ValueError(f"column {column!r} holds a {type(value).__name__}; give text, or messages")
    return parse_conversation(value, column, roles=roles)


def json_messages(text: str) -> Any:
    """Return the messages of JSON text, None for any other text."""
    if BEGINS_MESSAGES.match(text):
        with suppress(json.JSONDecodeError, RecursionError):
            first, *_ = found = json.loads(text)
            return found if first.keys() & {"role", "from"} else None
    return None


def parse_json(value: Any, place: str) -> Any:
    """Parse JSON text; return anything else unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} holds text that is no JSON: {error}") from None


def read_tools(row: Mapping[str, Any], column: str, *, ignore: Iterable[str]) -> Any:
    """Return the descriptions of tools that a column holds, None if there are none or they are ignored."""
    found = None if column in ignore else parse_json(row.get(column) or None, f"column {column!r}")
    return None if is_empty(found) else found


class ReadColumns:
    """The columns that an encoder reads. Beside them, one that changes the prompt is refused, any other named once.

    Worker processes know what was named before they were forked, when the rows that identify a run were encoded.
    """

    def __init__(self, what: str, *, used: Iterable[str] = (), ignore: Iterable[str] = ()) -> None:
        self.what = what
        self.known = {*used, *ignore}
        self.named: set[str] = set()

    def check(self, row: Mapping[str, Any], *read: str) -> None:
        """Refuse or name columns of a row that are not empty, neither read nor ignored on purpose."""
        unread = row.keys() - self.known - {*read}
        for name in sorted(unread & SPECIAL):
            if not (_holds_nothing if name in MEDIA else is_empty)(row[name]):
                self._check_special(name, row[name])
        fresh = {name for name in unread - self.named if not is_empty(row[name])}
        self.named |= fresh
        if texts := sorted(name for name in fresh if type(row[name]) not in (int, float)):
            log.warning(
                "%s does not read %s: nothing of it is trained or seen; ignore: [%s] says that this is meant",
                self.what,
                ", ".join(map(repr, texts)),
                ", ".join(texts),
            )

    def _check_special(self, name: str, value: Any) -> None:
        if name in COMPANIONS | MEDIA:
            what, way_out = "without it", "make it part of the messages, remove it"
            if name in MEDIA:
                what, way_out = "on the words about it", "VisionEncoder takes images"
            raise ValueError(
                f"column {name!r} would be ignored, and the model trained {what}; {way_out}, or say ignore: [{name}]"
            )
        if name in FLAGS:
            if flags_against({name: value} if _is_flag(value) else {}):
                raise ValueError(
                    f"column {name!r} holds {value!r}, which says that the row is not trained, and {self.what} would "
                    f"train it; leave such rows out, or say ignore: [{name}]"
                )
            return
        # Each number: classes that are refused where they are 0 or 1 alone would be missing, with ``skip_bad``.
        several = isinstance(value, list | tuple | np.ndarray)
        if all(map(_is_flag, value)) if several else _is_number(value):
            raise ValueError(
                f"column {name!r} holds {value!r}: the row's answer is judged, as for KTO, and {self.what} would train "
                f"it good or bad; leave the bad ones out and say ignore: [{name}], or give pairs to AnswersEncoder"
            )


def _parse_message(given: Any, place: str, roles: Mapping[str, str] | None) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise ValueError(f"{place} is a {type(given).__name__}; it must be a dict with 'role' and 'content'")
    message = plain_message(given, place, roles)
    role = message["role"]
    place = f"{place} ({given.get('role') or given.get('from')})"
    _check_flags(message, role, place)
    for key, way_out in (("function_call", "write it as tool_calls"), ("refusal", "make it the content")):
        if not is_empty(message.pop(key, None)):
            raise ValueError(f"{place} has a {key}; {way_out}, or leave the row out")
    calls = parse_json(message.pop("tool_calls", None), f"{place}, tool_calls")
    content = message.pop("content", None)
    if content is None:
        if is_empty(calls) and not any(message.get(key) for key in REASONING):
            raise ValueError(
                f"{place} has no content (null) and no tool_calls; mend the row, or leave it out"
            )
        content = ""
    made = {"role": role, "content": _join_text(content, place), **message}
    if not is_empty(calls):
        made["tool_calls"] = [_parse_call(call, f"{place}, tool call {i}") for i, call in enumerate(calls)]
    return made


def _check_flags(message: Mapping[str, Any], role: str, place: str) -> None:
    if FLAGS.keys().isdisjoint(message):  # as most are
        return
    given = [key for key in FLAGS if key in message]
    for key in given:
        if not _is_flag(message[key]):
            untrained = 1 - FLAGS[key]
            raise ValueError(
                f"{place} has {key}={message[key]!r}; it must be {untrained} (not trained) or {1 - untrained}"
            )
        if role != "assistant" and key != "weight" and key not in flags_against(message):
            raise ValueError(
                f"{place} has {key}={message[key]!r}, and only answers are trained; give it the role of the assistant, "
                "or remove the flag"
            )
    if len(flags_against(message)) not in (0, len(given)):
        said = " and ".join(f"{key}={message[key]!r}" for key in given)
        raise ValueError(f"{place} has {said}, which contradict one another; keep one of them")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.bool_ | np.number)


def _is_flag(value: Any) -> bool:
    return _is_number(value) and value in (0, 1)


def flags_against(message: Mapping[str, Any]) -> set[str]:
    """Return the keys of a message that say that it is not trained."""
    return {key for key in FLAGS.keys() & message.keys() if bool(message[key]) != FLAGS[key]}


def unread_flags(message: Mapping[str, Any]) -> set[str]:
    """Return the keys of a message that speak of training, and may mean anything."""
    return {key for key in message.keys() - FLAGS.keys() if _is_like_flag(key)}


@lru_cache(1024)  # messages have the same few keys
def _is_like_flag(key: str) -> bool:
    return LIKE_FLAGS.search(key) is not None


def _join_text(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple | np.ndarray):
        raise ValueError(f"{place} has content of type {type(content).__name__}; it must be text")
    texts = []
    for part in content:
        kind, text = read_part(part)
        if kind != "text" or not isinstance(text, str):
            what = repr(kind) if kind != "text" else f"text of type {type(text).__name__}"
            raise ValueError(
                f"{place} has a part that is {what}; only text can be packed, and images with VisionEncoder"
            )
        texts.append(text)
    return "".join(texts)


def read_part(part: Any) -> tuple[Any, Any]:
    """Return the type of a part of a content, and its text: OpenAI's, torchtune's or LLaMA-Factory's.

    >>> read_part("Hi"), read_part({"type": "text", "value": "Hi"})
    (('text', 'Hi'), ('text', 'Hi'))
    """
    if not isinstance(part, Mapping):
        return "text", part
    texts = (part[key] for key in ("text", "content", "value") if part.get(key) is not None)
    return part.get("type", "text"), next(texts, None)


def parts_of(message: Mapping[str, Any]) -> list[Any]:
    """Return the parts of a message's content; a text is one."""
    content = message.get("content")
    if isinstance(content, list | tuple | np.ndarray):
        return list(content)
    return [] if content is None else [content]


def _parse_call(call: Any, place: str) -> dict[str, Any]:
    """Convert a tool call to OpenAI's form, with its arguments as a dict, as chat templates expect it."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(
            f"{place} names no function; it must be {{'function': {{'name': ..., 'arguments': ...}}}}"
        )
    arguments = function.get("arguments")
    arguments = (
        {} if arguments in (None, "") else _without_arrays(parse_json(arguments, f"{place}, arguments"))
    )
    rest = {key: value for key, value in call.items() if key != "function" and value is not None}
    outer = rest if function is not call else {}
    return {"type": "function", **outer, "function": {**function, "arguments": arguments}}


def _without_arrays(value: Any) -> Any:
    """Return plain values; transformers writes an array as the text ``<ndarray>``."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _without_arrays(each) for key, each in value.items()}
    return [*map(_without_arrays, value)] if isinstance(value, list | tuple) else value


def _holds_nothing(value: Any) -> bool:
    """Return whether a value is empty, or holds nothing but empty ones, as a table does in rows without images."""
    if isinstance(value, Mapping):
        return all(map(_holds_nothing, value.values()))
    return all(map(_holds_nothing, value)) if isinstance(value, list) else is_empty(value)


def refuse_marks(text: str, row: Mapping[str, Any]) -> None:
    """Refuse a text with the mark of an image, a video or audio beside a column of such."""
    for name in sorted(MEDIA & row.keys()):
        if (mark := f"<{name.removesuffix('s')}>") in text and not _holds_nothing(row[name]):
            raise ValueError(
                f"column {name!r} would be ignored, and the model trained on the words about it, such as {mark!r}; "
                "VisionEncoder takes messages with images; or remove the column"
            )
