"""Shapes of rows that people publish: the columns that tell each, and how it becomes messages, a pair or a text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

import numpy as np

from streampack.packing.columns import shown

ROLES = ("system", "developer", "user", "assistant", "tool", "function_call")
"""Roles of messages; a ``function_call`` becomes an answer of the assistant with tool calls."""
THEIR_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}
"""Roles of ShareGPT's messages that have another name here."""
KNOWN_ROLES = ("human", "gpt", *ROLES, "observation")

Row = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """A shape of rows.

    Attributes:
        key: short name, for arguments.
        name: for people, as in "rows are ...".
        needs: columns that every row of this shape has, and that are not empty.
        uses: columns that it may have besides.
        encoder: class name of the encoder that takes what `read` returns.
        read: makes such a row of columns that are not empty; None: they are taken as they are.
    """

    key: str
    name: str
    needs: tuple[str, ...]
    uses: tuple[str, ...]
    encoder: str
    read: Callable[[Row], Row] | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that are read."""
        return self.needs + self.uses


def is_empty(value: Any) -> bool:
    """Return whether a value is None or empty; a table holds such values in rows that lack the column."""
    return value is None or (isinstance(value, str | Sequence | Mapping | np.ndarray) and len(value) == 0)


def _alpaca(row: Row) -> Row:
    """Return messages: the prompt is instruction, line break, input; earlier answers are not trained."""
    texts = {name: row.pop(name, "") for name in ("instruction", "input", "output")}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise ValueError(f"column {name!r} holds {shown(text)}; it must be text")
    messages = []
    for number, turn in enumerate(row.pop("history", ())):
        if not _is_list(turn) or len(turn) != 2 or not all(isinstance(text, str) and text for text in turn):
            raise ValueError(
                f"column 'history', entry {number} is {shown(turn)}; it must be a list of a prompt and its answer"
            )
        messages += [_message("user", turn[0]), _message("assistant", turn[1]) | {"weight": 0}]
    question = "\n".join(text for text in (texts["instruction"], texts["input"]) if text)
    return _with_system(
        row, "messages", [*messages, _message("user", question), _message("assistant", texts["output"])]
    )


def _conversation(row: Row) -> Row:
    messages = row.pop("conversations", None)
    return _with_system(row, "messages", row.pop("messages") if messages is None else messages)


def _pair(row: Row) -> Row:
    """Return a pair; without a prompt, a conversation that the answers do not begin with is the prompt."""
    for name in ("chosen", "rejected"):
        if f"{name}_messages" in row:
            row[name] = row.pop(f"{name}_messages")
    before = next((name for name in ("prompt", "conversations", "messages") if name in row), None)
    if before == "messages" and not _is_answer(row["chosen"]):
        before = None
    if before is None:
        return row
    prompt = row.pop(before)
    if "system" in row and (not isinstance(prompt, str) or not isinstance(row["chosen"], str)):
        return _with_system(row, "prompt", [_message("user", prompt)] if isinstance(prompt, str) else prompt)
    return {**row, "prompt": prompt}


def _content(row: Row) -> Row:
    return {**row, "text": row.pop("content")}


TOKENS = "TokensEncoder"
OF_MODEL = ("system", "tools", "images")
SHAPES = (
    Shape("tokens", "token ids", ("input_ids",), ("labels", "attention_mask"), TOKENS),
    Shape("torchtune", "torchtune's token ids", ("tokens",), ("labels",), TOKENS),
    Shape("pair", "preference pairs", ("chosen", "rejected"), ("prompt", "conversations", "system", "tools"),
          "AnswersEncoder", _pair),
    Shape("pair_messages", "preference pairs", ("chosen_messages", "rejected_messages"), ("tools",),
          "AnswersEncoder", _pair),
    Shape("rollouts", "prompts with several answers", ("prompt", "completions"), ("tools",), "AnswersEncoder"),
    Shape("openai", "OpenAI's messages", ("messages",), OF_MODEL, "ChatEncoder", _conversation),
    Shape("sharegpt", "ShareGPT's conversations", ("conversations",), OF_MODEL, "ChatEncoder", _conversation),
    Shape("alpaca", "Alpaca's", ("instruction", "output"), ("input", "history", *OF_MODEL), "ChatEncoder", _alpaca),
    Shape("completion", "prompts with completions", ("prompt", "completion"), ("tools",), "ChatEncoder"),
    Shape("text", "text", ("text",), (), "TextEncoder"),
    Shape("content", "text", ("content",), (), "TextEncoder", _content),
)  # fmt: skip
"""The shapes, those first that are meant where a row has the columns of others, too (`STRONGER`)."""
STRONGER = ("tokens", "torchtune", "pair", "pair_messages", "rollouts")
"""Shapes that win over those after them: tokens were made of the other columns, and pairs may hold messages, too."""
BY_KEY = {shape.key: shape for shape in SHAPES}
OURS = sorted({column for shape in SHAPES for column in shape.columns})
QUESTION = ("question", "answer")
"""Columns that may be turns of a chat or texts to join, so that a mapping must say it."""


def find_shape(row: Mapping[str, Any]) -> Shape:
    """Return the shape of a row, by its columns that are not empty.

    >>> find_shape({"instruction": "Add.", "input": "", "output": "5"}).name
    "Alpaca's"

    Raises:
        ValueError: for columns of no shape, or of two.
    """
    there = frozenset(name for name, value in row.items() if not is_empty(value))
    found = [shape for shape in _with_columns(there) if _fits(shape, row)]
    if found and (found[0].key in STRONGER or len(found) == 1):
        return found[0]
    names = ", ".join(map(repr, row)) or "none"
    if found:
        first, second = found[:2]
        raise ValueError(
            f"the row may be {first.name} ({', '.join(first.needs)}) or {second.name} ({', '.join(second.needs)}); say "
            f"ignore: [{second.needs[-1]}] or ignore: [{first.needs[-1]}]"
        )
    if there.issuperset(QUESTION):
        raise ValueError(
            "columns 'question' and 'answer' may be turns of a chat, columns: {question: instruction, answer: output}, "
            "or texts to be joined, columns: {question: prompt, answer: completion}; say which"
        )
    raise ValueError(f"the row's columns are {names}, which is no known shape of rows{_nearly(there, row)}")


@lru_cache(256)
def _with_columns(there: frozenset[str]) -> list[Shape]:
    """Return the shapes with these columns, without the weak one of ``content`` where there are others."""
    found = [shape for shape in SHAPES if there.issuperset(shape.needs)]
    return found if len(found) < 2 else [shape for shape in found if shape.key != "content"]


def _fits(shape: Shape, row: Mapping[str, Any]) -> bool:
    """Return whether ids are ids: ``tokens`` may be their number, beside a text."""
    return shape.encoder != TOKENS or _is_list(row[shape.needs[0]]) or len(row) == 1


def _nearly(there: frozenset[str], row: Mapping[str, Any]) -> str:
    """Say which columns are empty, or nearly have the name of one of ours."""
    for shape in SHAPES:
        lacking = [name for name in shape.needs if name not in there]
        if len(lacking) < len(shape.needs) or len(shape.needs) == 1:
            for name in lacking:
                if name in row:
                    return f": {name!r} is empty; mend the row, or leave it out (skip_bad: True)"
                for near in get_close_matches(name, sorted(there.difference(OURS)), n=1, cutoff=0.75):
                    return f"; if {near!r} is the {name}, say columns: {{{near}: {name}}}"
    return (
        "; map them to ours, columns: {YOURS: OURS} (messages; instruction with output; prompt with completion; chosen "
        "with rejected; text; input_ids), or write an encoder"
    )


@lru_cache(256)
def misspelt(shape: Shape, names: tuple[str, ...]) -> dict[str, str]:
    """Return names that are nearly those of columns that a row of a shape lacks, with these.

    >>> misspelt(BY_KEY["alpaca"], ("instruction", "inputs", "output"))
    {'inputs': 'input'}
    """
    lacking = [name for name in shape.uses if name not in names]
    near = {name: get_close_matches(name, lacking, n=1, cutoff=0.8) for name in names}
    return {name: found[0] for name, found in near.items() if found and name not in OURS}


def renamed(row: Mapping[str, Any], columns: Mapping[str, str]) -> Row:
    """Return a row with the user's columns under our names."""
    taken = {ours: name for name, ours in columns.items() if name in row}
    for ours, name in taken.items():
        if ours not in columns and not is_empty(row.get(ours)):
            raise ValueError(
                f"there are both {name!r}, which columns= maps to {ours!r}, and {ours!r}; remove one"
            )
    return {
        columns.get(name, name): value for name, value in row.items() if name in columns or name not in taken
    }


def mapping_of(given: Mapping[str, str] | str | None, name: str, ours: Sequence[str]) -> dict[str, str]:
    """Return a mapping from the user's names to ours; text is ``"theirs=ours,..."``.

    >>> mapping_of("bot=assistant", "roles", ROLES)
    {'bot': 'assistant'}
    """
    if isinstance(given, str):
        pairs = [each.partition("=") for each in names_of(given)]
        given = {theirs.strip(): mine.strip() for theirs, _, mine in pairs}
    made = {str(theirs): str(mine) for theirs, mine in (given or {}).items()}
    for theirs, mine in made.items():
        if mine not in ours and (name == "columns" or theirs != mine):
            raise ValueError(f"{name} maps {theirs!r} to {mine!r}; ours are {', '.join(ours)}")
    if len(set(made.values())) < len(made) and name == "columns":
        raise ValueError(f"columns={made} maps two columns to one; map each to another")
    return made


def names_of(given: Sequence[str] | str) -> list[str]:
    """Return names of a list, or of text with commas."""
    return (
        [each.strip() for each in given.split(",") if each.strip()] if isinstance(given, str) else list(given)
    )


def plain_message(given: Mapping[str, Any], place: str, roles: Mapping[str, str] | None) -> Row:
    """Return a message under OpenAI's keys ``role`` and ``content``, with its role by ``roles``, without nulls.

    With ``roles=None``, any role is taken that does not look like a misspelt one.
    """
    message = {str(key): value for key, value in given.items() if value is not None}
    theirs = "role" not in message and "from" in message
    role = message.pop("from") if theirs else message.get("role")
    if theirs:
        message = {"role": role, "content": message.pop("value", message.pop("content", None)), **message}
    if not isinstance(role, str) or not role:
        raise ValueError(f"{place} has no role; its keys are {', '.join(map(repr, given)) or 'none'}")
    ours = (roles or {}).get(role) or (role if role in ROLES else THEIR_ROLES.get(role, role))
    if ours not in ROLES and role not in (roles or {}):
        near = get_close_matches(role.lower(), KNOWN_ROLES, n=1, cutoff=0.75)
        if theirs or roles is not None or near:
            guess = f"{role}: {near[0] if near else 'assistant'}"
            raise ValueError(
                f"{place} is from {role!r}; the known ones are {', '.join(KNOWN_ROLES)}. Map it, such as "
                f"roles: {{{guess}}}, or leave the row out"
            )
    message["role"] = ours
    if ours == "function_call":
        calls = message.pop("content", None)
        if isinstance(calls, str):
            try:
                calls = json.loads(calls)
            except json.JSONDecodeError as error:
                raise ValueError(f"{place} ({role}) holds text that is no JSON: {error}") from None
        message |= {"role": "assistant", "content": "", "tool_calls": calls if _is_list(calls) else [calls]}
    return message


def _message(role: str, text: Any) -> Row:
    return {"role": role, "content": text}


def _with_system(row: Row, name: str, messages: Any) -> Row:
    """Return a row with messages, and its system prompt before them."""
    if "system" not in row:
        return {**row, name: messages}
    if isinstance(messages, str):
        try:
            messages = json.loads(messages)
        except json.JSONDecodeError as error:
            raise ValueError(f"column {name!r} holds text that is no JSON: {error}") from None
    first = messages[0] if _is_list(messages) and len(messages) else None
    if not isinstance(first, Mapping):
        raise ValueError(f"column {name!r} holds {shown(messages)}; it must be a list of messages")
    system = row.pop("system")
    if not isinstance(system, str):
        raise ValueError(f"column 'system' holds {shown(system)}; it must be text")
    if first.get("role", first.get("from")) == "system":
        raise ValueError(
            f"column 'system' and the first message of {name!r} are two system prompts; remove one, or say ignore: "
            "[system]"
        )
    return {**row, name: [_message("system", system), *messages]}


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple | np.ndarray) or type(value).__module__ in ("torch", "array")


def _is_answer(value: Any) -> bool:
    """Return whether an answer has no prompt before it."""
    first = value[0] if _is_list(value) and len(value) else value
    return not isinstance(first, Mapping) or first.get("role", first.get("from")) in ("assistant", "gpt")
