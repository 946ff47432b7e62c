"""Rows before a run: what a lane makes of each, their shape, and the first sample with its trained part marked."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

from streampack.accounting import trained_tokens
from streampack.packing.encoders.shaped import ShapeEncoder
from streampack.packing.groups import Group, lacks_training
from streampack.packing.media import MediaSample
from streampack.packing.shapes import find_shape, is_empty
from streampack.sources.bad_records import Quarantine
from streampack.sources.examples import Example, first_rows
from streampack.sources.mixture import Mix
from streampack.sources.reading import Reading
from streampack.streaming.lane_config import CHARACTERS_OF_A_TOKEN, GIANT, LaneConfig
from streampack.types import IGNORE_INDEX, Row, RowId, Sample

MOST = 240
"""Characters of consecutive tokens that are all trained, or all masked, of which more are cut in the middle."""
TRIED = 12
"""Rows that are tried until one can be encoded."""


class Seen(NamedTuple):
    """The result of reading one row: its lengths and trained tokens, or why it was dropped."""

    row_id: RowId
    length: int  # tokens of the whole sample
    trained: int
    kept: int  # tokens of its pieces
    kept_trained: int
    reason: str | None  # one of DROP_REASONS
    detail: str
    media: int = 0  # of its pieces


def tolerant(config: LaneConfig) -> LaneConfig:
    """Return a configuration that drops what would stop the run, so that it can be counted."""
    packing = config.packing
    return replace(
        config,
        endless=False,
        untrained="drop" if config.untrained == "error" else config.untrained,
        packing=replace(packing, overlong="drop") if packing.overlong == "error" else packing,
        quarantine=Quarantine(limit=sys.maxsize, quiet=True),
    )


def look(config: LaneConfig, row: Row) -> tuple[Seen, list[Sample]]:
    """Encode and cut a row as a lane of a `tolerant` configuration does; return its counts and its pieces."""
    sample = config.sample(row)
    if isinstance(sample, str):
        return Seen(row.row_id, 0, 0, 0, 0, "bad", sample), []
    if sample is GIANT:
        detail = f"more than {CHARACTERS_OF_A_TOKEN} * max_document_tokens characters, which were not encoded"
        return Seen(row.row_id, 0, 0, 0, 0, "overlong", detail), []
    length = sample.tokens.size
    trained = trained_tokens(sample)
    parts = config.cut(sample)
    pieces = [piece for _, piece in parts]
    kept = sum(piece.tokens.size for piece in pieces)
    kept_trained = sum(map(trained_tokens, pieces)) if kept < length or len(pieces) > 1 else trained
    reason, detail = None, ""
    lacks = bool(parts) and (lacks_training(parts[0][1]) if len(parts) == 1 else not kept_trained)
    nothing = "no token is trained" + (" of an answer" if isinstance(sample, Group) else "")
    if lacks and config.drops_untrained(sample, parts):
        pieces, kept, kept_trained, reason, detail = [], 0, 0, "untrained", nothing
    elif not pieces:
        over = f", {sample.cost:,} of max_media" if isinstance(sample, MediaSample) else ""
        reason, detail = "overlong", f"{length:,} tokens{over}"
    elif kept < length:
        reason, detail = "truncated", f"{length:,} tokens, {trained - kept_trained:,} trained ones cut off"
    elif lacks and isinstance(sample, Group):  # `Rows.untrained` finds the plain ones
        reason, detail = "untrained", nothing
    media = sum(piece.cost for piece in pieces if isinstance(piece, MediaSample))
    return Seen(row.row_id, length, trained, kept, kept_trained, reason, detail, media), pieces


def first_look(config: LaneConfig) -> list[str]:
    """Return lines about the rows of each source: their shape, and the first sample, its trained part in brackets."""
    lines = []
    for number, (name, source) in enumerate(config.source.leaves().items()):
        prefix = (number,) if isinstance(config.source, Mix) else ()
        examples = list[Example]()
        with suppress(OSError, ValueError):  # reading for training raises it again, on all ranks
            examples = first_rows(source.read(Reading()), TRIED)
        for example in examples:
            row_id = (*prefix, *example.row_id)
            sample = None if example.data is None else _encoded(config, Row(example.data, row_id))
            if sample is not None:
                encode = config.encoder(row_id)
                of = f" of {name}" if name else ""
                lines.append(f"rows{of} are {shape_of(encode, example.data)}")
                if decode := getattr(encode, "decode", None):
                    lines.append(
                        f"the first sample, {source.locate(example.row_id)}, with what is trained in ⟦ ⟧:"
                    )
                    lines += [f"    {line}" for line in marked(sample, decode).splitlines()]
                break
    return lines


def shape_of(encode: Any, row: Any) -> str:
    """Say what shape a row has, and which of its columns are read.

    >>> shape_of(None, {"text": "a", "id": 1})
    'text: text'
    """
    named = encode.named(row) if isinstance(encode, ShapeEncoder) else row
    try:
        shape = find_shape(named if hasattr(named, "keys") else {"input_ids": named})
    except ValueError:
        return f"of the columns {', '.join(map(repr, row))}"
    read = (
        [name for name in shape.columns if not is_empty(named.get(name))]
        if hasattr(named, "keys")
        else ["ids"]
    )
    theirs = {ours: name for name, ours in encode.columns.items()} if named is not row else {}
    return f"{shape.name}: {', '.join(theirs.get(name, name) for name in read)}"


def marked(sample: Any, decode: Callable[[list[int]], str]) -> str:
    """Return the text of a sample, what is trained in brackets; of a group a text for each answer with its prompt."""
    if not isinstance(sample, Group):
        return _marked(sample.tokens.tolist(), (sample.labels != IGNORE_INDEX).tolist(), decode)
    texts = []
    for leaf in sample.leaves:
        ranges = [sample.bounds[segment] for segment in sample.paths()[leaf]]
        places = [place for start, stop in ranges for place in range(start, stop)]
        tokens, trained = sample.tokens[places].tolist(), (sample.labels[places] != IGNORE_INDEX).tolist()
        texts.append(_marked(tokens, trained, decode))
    return "\n".join(texts)


def _marked(tokens: Sequence[int], trained: Sequence[bool], decode: Callable[[list[int]], str]) -> str:
    cuts = [0, *(i for i in range(1, len(trained)) if trained[i] != trained[i - 1]), len(trained)]
    parts = [(_short(decode(list(tokens[start:stop]))), trained[start]) for start, stop in pairwise(cuts)]
    return "".join(f"⟦{text}⟧" if flag else text for text, flag in parts)


def _short(text: str) -> str:
    """Return a text without its middle if it is long, and without what moves a terminal's cursor."""
    text = "".join(
        letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in text
    )
    return text if len(text) <= MOST else f"{text[: MOST // 2]} [...] {text[-MOST // 3 :]}"


def _encoded(config: LaneConfig, row: Row) -> Any:
    """Return the sample of a row, None if it is a bad one: reading it says so."""
    try:
        sample = config.sample(row)
    except Exception:
        return None
    return None if isinstance(sample, str) or not sample.tokens.size else sample
