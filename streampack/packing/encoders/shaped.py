"""`ShapeEncoder`: rows of a shape that people publish; `encoder_for`, which finds the shape by the first rows."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from streampack.packing.encoders.answers import AnswersEncoder
from streampack.packing.encoders.base import Encoder, TextEncoder, TextsEncoder, TokensEncoder, characters_in
from streampack.packing.encoders.chat import ChatEncoder
from streampack.packing.encoders.steps import Steps
from streampack.packing.shapes import (
    BY_KEY,
    OURS,
    ROLES,
    TOKENS,
    Shape,
    find_shape,
    is_empty,
    mapping_of,
    misspelt,
    names_of,
    renamed,
)
from streampack.sources.as_source import as_source
from streampack.sources.mixture import Mix
from streampack.sources.reading import BadRecord, Reading
from streampack.sources.source import Source
from streampack.types import RowId, Sample
from streampack.validation import require

log = logging.getLogger(__name__)

AUTO = "auto"
SHAPE_KEYS = ("columns", "roles", "answers", "ignore")
"""Arguments of `encoder_for` that are beside the source in a config."""
LOOKED_AT = 1000
"""Rows at the beginning of a source that are looked at before training."""
NAMED = 3
"""Rows of another shape that are named with their places."""


class ShapeEncoder(TextsEncoder):
    """Encoder of rows of one shape: token ids, text, conversations, Alpaca's instructions, preference pairs.

    `encoder_for` finds the shape of a source. A row of another shape is refused, so that it is an error or a bad
    record. docs/guides/encoders.md has the table of shapes, and says what is trained of each.

    >>> ShapeEncoder(None, shape="tokens", columns={"ids": "input_ids"})({"ids": [4, 5]}).labels.tolist()
    [4, 5]

    Args:
        tokenizer: one of transformers or torchtune; None for token ids.
        shape: ``"alpaca"``, ``"sharegpt"``, ``"openai"``, ``"completion"``, ``"pair"``, ``"rollouts"``, ``"text"``,
            ``"tokens"``.
        columns: your columns by name, and ours that they stand for, such as ``{"question": "instruction"}``; also text,
            ``"question=instruction,answer=output"``.
        roles: roles of your messages, and ours that they stand for: system, developer, user, assistant, tool, or
            function_call, whose content is JSON text of a call. A role that is mapped to itself is left to the chat
            template. Text, as for ``columns``.
        answers: ``"all"`` or ``"last"``. Default: all, of Alpaca's ``history`` none.
        ignore: columns, and flags of messages, to ignore on purpose; also text, ``"tools,label"``.

    Raises:
        ValueError: for an unknown shape, column or role, and for a tokenizer that does not fit.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        shape: str,
        columns: Mapping[str, str] | str | None = None,
        roles: Mapping[str, str] | str | None = None,
        answers: str | None = None,
        ignore: Sequence[str] | str = (),
    ) -> None:
        require(shape, "shape", tuple(BY_KEY))
        self.shape, self.answers, self.tokenizer = BY_KEY[shape], answers, tokenizer
        self.columns = mapping_of(columns, "columns", OURS)
        self.roles = mapping_of(roles, "roles", ROLES)
        self.ignore = frozenset(names_of(ignore))
        if self.shape.encoder == TOKENS:
            self.inner: Encoder = TokensEncoder()
        elif tokenizer is None:
            raise ValueError(f"the rows are {self.shape.name}: name the tokenizer of the model (--tokenizer)")
        elif self.shape.encoder == "TextEncoder":
            self.inner = TextEncoder(tokenizer)
        elif self.shape.encoder == "AnswersEncoder":
            self.inner = AnswersEncoder(tokenizer, roles=self.roles, ignore=tuple(self.ignore))
        else:
            self.inner = ChatEncoder(
                tokenizer, roles=self.roles, answers=answers or "all", ignore=tuple(self.ignore)
            )
        self.makes_groups = getattr(self.inner, "makes_groups", False)
        self.tokenizer = getattr(self.inner, "tokenizer", tokenizer)

    def steps(self, row: Mapping[str, Any]) -> Steps[Sample]:
        """See `TextsEncoder`."""
        made = self.read(row)
        return (
            (yield from self.inner.steps(made)) if isinstance(self.inner, TextsEncoder) else self.inner(made)
        )

    def check(self, row: Mapping[str, Any]) -> None:
        """Raise for a row that makes no sample, as far as that shows without a tokenizer."""
        made = self.read(row)
        if isinstance(self.inner, ChatEncoder):
            self.inner.contents(made)

    def read(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row as the encoder within takes it."""
        made = self.named(row)
        if (found := find_shape(made)) is not self.shape:
            raise ValueError(
                f"the row is {_described(found)}, and the others are {_described(self.shape)}; move it to a file of "
                "its own, or leave it out (skip_bad: True)"
            )
        for name, ours in misspelt(self.shape, tuple(made)).items():
            if not is_empty(made[name]):
                raise ValueError(
                    f"column {name!r} is not read, and there is no {ours!r}; say columns: {{{name}: {ours}}}, or "
                    f"ignore: [{name}]"
                )
        if self.shape.read is not None:
            made = self.shape.read({name: value for name, value in made.items() if not is_empty(value)})
            if self.answers == "all":  # Alpaca's earlier answers, too
                for message in made.get("messages", ()) if self.shape.key == "alpaca" else ():
                    message.pop("weight", None)
        return made

    def named(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row under our names of columns, without those to ignore."""
        kept = {name: value for name, value in row.items() if name not in self.ignore}
        return renamed(kept, self.columns) if self.columns else kept

    def characters(self, row: Mapping[str, Any], /) -> int:
        """See `Encoder`."""
        theirs = {ours: name for name, ours in self.columns.items()}
        found = [characters_in(row.get(theirs.get(name, name))) for name in self.shape.columns]
        return max(found) if self.makes_groups else sum(found)


def encoder_for(
    source: Any,
    tokenizer: Any,
    *,
    columns: Mapping[str, str] | str | None = None,
    roles: Mapping[str, str] | str | None = None,
    answers: str | None = None,
    ignore: Sequence[str] | str = (),
    pairs: bool | None = None,
    strict: bool = True,
) -> Encoder:
    """Return the encoder of a source's rows, by the shape of most of its first thousand.

    >>> encoder_for([{"input_ids": [4, 5]}], None)({"input_ids": [4, 5]}).tokens.tolist()
    [4, 5]

    Args:
        source: whatever an `IterablePackedDataset` takes, except a mixture.
        tokenizer: as for `ShapeEncoder`; as the others.
        columns: see there.
        roles: see there.
        answers: see there.
        ignore: see there.
        pairs: whether the loss compares the answers of a row; None: rows may have one answer or several.
        strict: raise if some of the rows have another shape; otherwise warn.

    Raises:
        ValueError: if no row has a known shape, or with ``strict`` one has another than most; with its place.
    """
    source = as_source(source)
    # Renames columns of rows whose shape is not known yet.
    probe = ShapeEncoder(None, shape="tokens", columns=columns, roles=roles, answers=answers, ignore=ignore)
    counts, places = _count_shapes(source, probe)
    known = Counter({key: count for key, count in counts.items() if key})
    if not known:
        raise ValueError(_named(source, places[""][0]) if places else _why_unread(source))
    [(key, most)] = known.most_common(1)
    others = [row for name, found in places.items() if name != key for row in found]
    if others:
        text = f"{most:,} of the first {counts.total():,} rows are {_described(BY_KEY[key])}"
        text += f"; {'; '.join(_named(source, row) for row in others[:NAMED])}"
        if strict:
            raise ValueError(
                f"{text}. Move such rows to files of their own, or leave them out (skip_bad: True)"
            )
        log.warning("%s", text)
    rows, several = f"the rows are {_described(BY_KEY[key])}", BY_KEY[key].encoder == "AnswersEncoder"
    if pairs is False and several:
        raise ValueError(
            f"{rows}, and this run would train their bad answers like good ones; run dpo, or name the good ones: "
            "columns: {chosen: completion}, ignore: [rejected]"
        )
    if pairs and not several and BY_KEY[key].encoder != TOKENS:
        raise ValueError(
            f"{rows}, and the loss compares two answers; give rows with chosen and rejected, or run full_finetune"
        )
    if BY_KEY[key].encoder == TOKENS and not probe.columns:
        return TokensEncoder()
    made = ShapeEncoder(tokenizer, shape=key, columns=columns, roles=roles, answers=answers, ignore=ignore)
    for row_id, row in _first_rows(source) if strict else ():
        try:
            made.check(row)
        except ValueError as error:
            raise ValueError(f"{source.locate(row_id)}: {error}") from None
    return made


def _first_rows(source: Source) -> Iterator[tuple[RowId, Mapping[str, Any]]]:
    """Yield the first rows of a source; those that cannot be read are bad records of their own."""
    reader = source.read(Reading())
    for _ in range(LOOKED_AT):
        with suppress(BadRecord):
            if (row := next(reader, None)) is None:
                return
            yield row.row_id, row.data if isinstance(row.data, Mapping) else {"input_ids": row.data}


def _why_unread(source: Source) -> str:
    """Say why a source has no row that can be read, by its first record."""
    try:
        next(source.read(Reading()), None)
    except BadRecord as error:
        return str(error)
    return "the source has no rows; check its paths"


Reason = tuple[RowId, str]
"""A row, and what is said of it after its place, which may take reading the file up to there."""


def _named(source: Source, row: Reason) -> str:
    return source.locate(row[0]) + row[1]


def _count_shapes(source: Source, probe: ShapeEncoder) -> tuple[Counter[str], dict[str, list[Reason]]]:
    """Count the shapes of a source's first rows, by their keys, and name some of each; a row of no shape has no key."""
    counts, places, unmapped = Counter[str](), dict[str, list[Reason]](), set(probe.columns)
    for row_id, row in _first_rows(source):
        unmapped.difference_update(row)
        key = ""
        try:
            shape = find_shape(probe.named(row))
            key, why = shape.key, f" is {_described(shape)}"
        except ValueError as error:
            why = f": {error}"
        counts[key] += 1
        if len(found := places.setdefault(key, [])) < NAMED:
            found.append((row_id, why))
        if key and shape.encoder == TOKENS and counts.total() == counts[key] == NAMED:
            break  # such rows are many, and checked as they are read
    if unmapped and places:
        raise ValueError(
            f"columns maps {sorted(unmapped)[0]!r}, which none of the first rows has; name one of theirs"
        )
    return counts, places


def with_encoders(
    source: Source,
    encoder: Any,
    tokenizer: Any,
    *,
    settings: Mapping[str, Any],
    strict: bool,
    pairs: bool | None = None,
) -> tuple[Source, Any]:
    """Return a source and its encoder, found by `encoder_for` where none or ``"auto"`` was given.

    ``settings`` are arguments of `encoder_for`. In a mixture, each source without an encoder gets its own.
    """
    given = sorted(name for name, value in settings.items() if value)
    if encoder not in (None, AUTO):
        if given:
            raise ValueError(
                f"{given[0]} is for rows whose encoder is found by their shape; leave the encoder out, or give "
                f"{given[0]} to {type(encoder).__name__}"
            )
        return source, encoder
    if not isinstance(source, Mix):
        return source, encoder_for(source, tokenizer, pairs=pairs, strict=strict, **settings)
    entries = [
        entry
        if entry.encoder is not None or not entry.weight
        else replace(
            entry, encoder=encoder_for(entry.source, tokenizer, pairs=pairs, strict=strict, **settings)
        )
        for entry in source.entries
    ]
    return Mix(entries, stop=source.stop), None


def _described(shape: Shape) -> str:
    return f"{shape.name} ({', '.join(shape.needs)})"
