"""The number of lanes of a run."""

from __future__ import annotations

from streampack.sources.source import Source

DEFAULT_LANES = 8


def count_lanes(source: Source, consumers: int, *, wanted: int | None, fixed: bool) -> int:
    """Return ``wanted``, or by default a multiple of ``consumers`` (ranks x workers), at least 8 unless data is small.

    Args:
        source: may limit the number of lanes it can be read as.
        consumers: that read the lanes.
        wanted: as set, loaded or begun with.
        fixed: the user set it, so that too few are an error; a resumed run may have fewer lanes than consumers.

    Raises:
        ValueError: if fewer were asked for, or the source cannot be read as so many.
    """
    if wanted is None:
        at_least = min(DEFAULT_LANES, source.natural_lanes())
        wanted = -(-at_least // consumers) * consumers
        if source.max_lanes is not None and wanted > source.max_lanes >= consumers:
            # Of four shards three consumers read a lane each.
            wanted = source.max_lanes // consumers * consumers
    if wanted < consumers and fixed:
        raise ValueError(
            f"{wanted} lanes cannot feed {consumers} consumers (ranks x workers): some would get nothing; "
            "use fewer workers, or start a new run with more num_lanes"
        )
    if source.max_lanes is not None and wanted > source.max_lanes:
        raise ValueError(
            f"{source.limiting} can be read as {source.max_lanes} lane(s) and {wanted} are needed for "
            f"{consumers} consumers (ranks x workers): {source.way_out}"
        )
    return wanted
