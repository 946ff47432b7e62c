"""The sources of a mixture, each with its name, weight and encoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from streampack.sources.as_source import as_source
from streampack.sources.source import Source
from streampack.storage.listing import Once
from streampack.types import Sample

Encode = Callable[[Mapping[str, Any]], Sample]


@dataclass(frozen=True)
class Entry:
    """One source of a mixture.

    Attributes:
        name: such as ``"code"``, or ``"web/en"`` for the source ``"en"`` of a mixture ``"web"`` within the mixture.
        source: yields the rows.
        weight: target fraction of the trained tokens, up to a factor that all sources have in common.
        encoder: for the rows of this source; None if they are encoded with the run's encoder.
    """

    name: str
    source: Source
    weight: float
    encoder: Encode | None = None


def entry_of(given: Mapping[str, Any] | Entry, once: Once) -> Entry:
    """Check the settings of a source: an `Entry`, or a mapping of its fields."""
    keys = [field.name for field in fields(Entry)]
    # A name with a slash is that of a mixture within another one. Only `_flattened` makes such names.
    slash_allowed = isinstance(given, Entry)
    if isinstance(given, Entry):
        given = {key: getattr(given, key) for key in keys}
    name = given.get("name")
    if not isinstance(name, str) or not name or ("/" in name and not slash_allowed):
        raise ValueError(f"a source of a mixture is named {name!r}; give it a name without a slash")
    if unknown := sorted(set(given) - set(keys)):
        raise ValueError(f"source {name!r} has no {unknown[0]!r}; its keys are {', '.join(keys)}")
    for key in ("source", "weight"):
        if given.get(key) is None:
            raise ValueError(f"source {name!r} has no {key}; its keys are {', '.join(keys)}")
    weight = given["weight"]
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < 2**63:
        raise ValueError(
            f"source {name!r} has weight={weight!r}; give its fraction of the trained tokens, 0 to leave it out"
        )
    return Entry(name, as_source(given["source"], once=once), float(weight), given.get("encoder"))
