"""The number of lanes of a run: its default, its limits, and what it means."""

from __future__ import annotations

from streampack.sources.source import Source
from streampack.validation import require_positive

MOST_LANES = 1 << 16  # 100,000 take 7 s and 726 MB before the first pack
SOME_LANES = 1024
DEFAULT_LANES = (1, 2, 4, 8, 24, 48)


def default_lanes(source: Source, ranks: int) -> int:
    """Return the number of lanes of a new run. It follows from the data, so that packs are the same on all machines.

    Each number is a multiple of those before it, so that most numbers of ranks divide it; others get the next multiple
    of theirs. Up to 8 lanes have 100 rows or more each, with which their last packs are 2 to 5 % padding in packs of
    4,096; more lanes have 2,000, about 0.2 %.
    """
    filled = source.natural_lanes()
    lanes = max(lanes for lanes in DEFAULT_LANES if lanes * (1 if lanes <= 8 else 20) <= max(1, filled))
    return -(-lanes // ranks) * ranks


def require_lanes(value: object, name: str, source: Source) -> int:
    """Return a number of lanes; raise if it is above `MOST_LANES`, or far above the rows of data whose length is known.

    A few lanes more than rows are allowed: many ranks may evaluate on five rows.
    """
    lanes = require_positive(value, name)
    if lanes > MOST_LANES:
        raise ValueError(
            f"{name}={lanes} is above the limit of {MOST_LANES:,}; give a small multiple of the ranks that you may use"
        )
    rows = source.size if source.map_style and lanes > SOME_LANES else None
    if rows is not None and lanes > rows:
        raise ValueError(
            f"{name}={lanes} is more than the {rows:,} rows of the data, so most lanes would be empty; give {rows:,} "
            "or fewer"
        )
    return lanes


def lanes_text(lanes: int, *, fixed: bool = False) -> str:
    """Say what the number of lanes means for a run, for its first lines.

    >>> print(lanes_text(8))
    8 lanes for the life of the run: steps are the same on ranks that divide 8, at most 8; num_lanes sets another number

    ``fixed``: nobody can set another number.
    """
    return (
        f"{lanes} lane{'s' * (lanes > 1)} for the life of the run: steps are the same on ranks that divide {lanes}, at "
        f"most {lanes}{'' if fixed else '; num_lanes sets another number'}"
    )
