"""`Entry`: one source of a mixture, and the checks of its settings."""

from __future__ import annotations

import math
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
    """One source of a mixture."""

    name: str
    source: Source
    weight: float
    encoder: Encode | None = None


def entry_of(given: Mapping[str, Any], once: Once) -> Entry:
    """Check the settings of a source, a mapping of the fields of `Entry`. For ``once`` see `JSONLSource`."""
    keys = [field.name for field in fields(Entry)]
    name = given.get("name")
    if not isinstance(name, str) or not name or "/" in name:
        raise ValueError(f"a source of a mixture is named {name!r}; give it a name without a slash")
    if unknown := sorted(set(given) - set(keys)):
        raise ValueError(f"source {name!r} has no {unknown[0]!r}; its keys are {', '.join(keys)}")
    for key in ("source", "weight"):
        if given.get(key) is None:
            raise ValueError(f"source {name!r} has no {key}; its keys are {', '.join(keys)}")
    weight = given["weight"]
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise ValueError(
            f"source {name!r} has weight={weight!r}; give a number above 0, its fraction of the trained tokens"
        )
    return Entry(name, as_source(given["source"], once=once), float(weight), given.get("encoder"))
