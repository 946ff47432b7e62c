"""Text about the rows of a run, before the first step: their shape, and the first sample, its trained part marked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

from streampack.lanes.lane_config import LaneConfig
from streampack.packing.encoders.shaped import ShapeEncoder
from streampack.packing.groups import Group
from streampack.packing.shapes import find_shape, is_empty
from streampack.sources.examples import Example, first_rows
from streampack.sources.mixture import Mix
from streampack.sources.reading import Reading
from streampack.types import IGNORE_INDEX, Row

MOST = 240
"""Most characters to show of consecutive tokens that are all trained, or all masked; longer texts lose their middle."""
TRIED = 12
"""Rows that are tried until one can be encoded."""


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
    return sample if sample.tokens.size else None
