"""Parsing of conversations: rows are checked and converted to OpenAI's form, without nulls."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from streampack.packing.samples import missing_column

log = logging.getLogger(__name__)

SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
}
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys under which a message carries its chain of thought."""

FLAGS = ("train", "training", "loss", "masked", "mask")
"""Keys by which other programs say whether a message is trained: axolotl, ms-swift and torchtune."""

COMPANIONS = ("system", "tools", "functions", "history")
"""Columns beside a conversation that change what the model sees, so that they may not be left out unnoticed."""


def parse_conversation(
    row: Mapping[str, Any], column: str, *, option: str | None = None
) -> list[dict[str, Any]]:
    """Parse a row's messages to dicts with ``role``, ``content`` (text) and, where there are any, ``tool_calls``.

    Accepts OpenAI's form and ShareGPT's (``from``, ``value``), as lists, arrays or JSON text. Content in parts is
    joined if all parts are text. The row is not changed.

    >>> parse_conversation({"messages": '[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]'}, "messages")
    [{'role': 'user', 'content': 'Hi'}]

    Args:
        row: with the messages.
        column: that holds them.
        option: the encoder's option that names the column, for the error of a row without it.

    Raises:
        ValueError: for anything but a conversation of text, naming the message.
    """
    if column not in row:
        raise missing_column(row, column, option=option)
    found = parse_json(row[column], f"column {column!r}")
    if not isinstance(found, list | tuple | np.ndarray):
        raise ValueError(
            f"column {column!r} holds a {type(found).__name__}; it must be a list of messages, or JSON text of one"
        )
    if len(found) == 0:
        raise ValueError(f"column {column!r} holds no message; leave the row out")
    return [_parse_message(message, f"column {column!r}, message {i}") for i, message in enumerate(found)]


def parse_json(value: Any, place: str) -> Any:
    """Parse JSON text; return anything else unchanged.

    Raises:
        ValueError: for text that is no JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} holds text that is no JSON: {error}") from None


def read_tools(row: Mapping[str, Any], column: str, *, ignore: Sequence[str]) -> Any:
    """Return the descriptions of tools that a column holds, None if there are none or they are ignored."""
    found = None if column in ignore else parse_json(row.get(column) or None, f"column {column!r}")
    return None if is_empty(found) else found


def refuse_left_out(row: Mapping[str, Any], *, used: Sequence[str], ignore: Sequence[str]) -> None:
    """Raise if a row has one of `COMPANIONS`, not empty, that is neither used nor ignored on purpose.

    Raises:
        ValueError: naming the column and the ways out.
    """
    for name in COMPANIONS:
        if name in row and name not in used and name not in ignore and not is_empty(row[name]):
            raise ValueError(
                f"column {name!r} would be left out, and the model trained without it; make it part of the messages, "
                f"remove it, or say ignore: [{name}]"
            )


def refuse_flags(message: Mapping[str, Any], place: str) -> None:
    """Raise if a message says by another key than ``weight`` whether it is trained.

    Raises:
        ValueError: naming the key.
    """
    for key in FLAGS:
        if message.get(key) is not None:
            raise ValueError(
                f"{place} has {key}={message[key]!r}, which is not read; say whether it is trained by weight, 0 or 1"
            )


class UnreadColumns:
    """Names each column that an encoder does not read and that is no number, once in a run.

    Worker processes know what was named before they were forked, when the rows that identify a run were encoded.

    Args:
        what: the name of what reads the rows.
        used: columns that it reads.
        ignore: columns that are left out on purpose.
    """

    def __init__(self, what: str, *, used: Iterable[str], ignore: Sequence[str]) -> None:
        self.what = what
        self.known = {*used, *ignore, *COMPANIONS}  # `refuse_left_out` sees to the companions

    def name(self, row: Mapping[str, Any], *read: str) -> None:
        """Log the columns of this row that hold anything but a number and were neither read nor named."""
        if not isinstance(row, Mapping) or not (new := row.keys() - self.known - {*read}):
            return
        held = {name for name in new if not is_empty(row[name])}
        self.known |= held
        if texts := sorted(name for name in held if type(row[name]) not in (int, float)):
            log.warning(
                "%s does not read %s: nothing of it is trained or seen; ignore: [%s] says that this is meant",
                self.what,
                ", ".join(map(repr, texts)),
                ", ".join(texts),
            )


def _parse_message(given: Any, place: str) -> dict[str, Any]:
    """Convert one message to OpenAI's form; ``place`` names it in errors."""
    if not isinstance(given, Mapping):
        raise ValueError(f"{place} is a {type(given).__name__}; it must be a dict with 'role' and 'content'")
    message = {str(key): value for key, value in given.items() if value is not None}
    if "role" not in message and "from" in message:
        role = message.pop("from")
        if role not in SHAREGPT_ROLES:
            raise ValueError(
                f"{place} is from {role!r}; the known ones are {', '.join(SHAREGPT_ROLES)}; give it a 'role' instead"
            )
        message = {"role": SHAREGPT_ROLES[role], "content": message.pop("value", None), **message}
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{place} has no role; its keys are {', '.join(map(repr, given)) or 'none'}")
    place = f"{place} ({role})"
    refuse_flags(message, place)
    if not is_empty(message.pop("function_call", None)):
        raise ValueError(f"{place} has a function_call, OpenAI's older form; write it as tool_calls")
    if not is_empty(message.pop("refusal", None)):
        raise ValueError(f"{place} has a refusal; make it the content, or leave the row out")
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
    if made.get("weight", 1) not in (0, 1):
        raise ValueError(f"{place} has weight={made['weight']!r}; it must be 0 (not trained) or 1")
    return made


def _join_text(content: Any, place: str) -> str:
    """Join a message's content to one text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple | np.ndarray):
        raise ValueError(f"{place} has content of type {type(content).__name__}; it must be text")
    texts = []
    for part in content:
        kind, text = "text", part
        if isinstance(part, Mapping):
            kind, text = part.get("type", "text"), part.get("text", part.get("content"))
        if kind != "text":
            raise ValueError(f"{place} has a part that is {kind!r}; only text can be packed")
        if not isinstance(text, str):
            raise ValueError(
                f"{place} has a part that is text of type {type(text).__name__}; only text can be packed"
            )
        texts.append(text)
    return "".join(texts)


def _parse_call(call: Any, place: str) -> dict[str, Any]:
    """Convert a tool call to OpenAI's form, with its arguments as a dict, as chat templates expect it."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(
            f"{place} names no function; it must be {{'function': {{'name': ..., 'arguments': ...}}}}"
        )
    arguments = function.get("arguments")
    arguments = {} if arguments in (None, "") else parse_json(arguments, f"{place}, arguments")
    rest = {key: value for key, value in call.items() if key != "function" and value is not None}
    outer = rest if function is not call else {}
    return {"type": "function", **outer, "function": {**function, "arguments": arguments}}


def is_empty(value: Any) -> bool:
    """Return whether a value is None or empty; a table holds such values in rows that lack the column."""
    return value is None or (isinstance(value, str | Sequence | Mapping | np.ndarray) and len(value) == 0)
