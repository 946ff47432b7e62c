"""Reading what every rank must know of the corpus's content: each rank reads every ``world_size``-th file.

64 KiB from both ends of 100,000 shards are 13 GB. Read by each of 1,024 ranks they would be 13 TB, at the first
checkpoint, from a file system that all of them share. The footers of 2,400 Parquet files, read by each, would
be millions of requests before the first pack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from streampack.distributed.rank_sync import RankSync
from streampack.sources.source import Source
from streampack.storage.base import map_in_threads

Item = TypeVar("Item")
Result = TypeVar("Result")


def gather_fingerprint(source: Source, rank_sync: RankSync) -> None:
    """Collective: read the ends of all files, each on one rank, for the source's fingerprint.

    The fingerprint equals that of a single process. All ranks must list the same files, see `require_one_run`. Whether
    a file's content differs between ranks is not compared, but a state is refused if any file was another one for the
    rank that read it.

    Raises:
        Exception: on all ranks, whatever failed on one while reading.
    """
    if not rank_sync.alone:
        for corpus in source.corpora():
            tags = gather_map(
                corpus.tag, corpus.files, rank_sync, doing="reading the ends of the corpus's files"
            )
            corpus.identify(tags)


def gather_division(source: Source, num_lanes: int, rank_sync: RankSync) -> None:
    """Collective: divide the source into lanes, reading what that takes of each file on one rank.

    Worker processes are forked after this, and find the lanes divided.

    Raises:
        ValueError: on all ranks, if one would divide into another number of lanes.
        Exception: on all ranks, whatever failed on one while reading.
    """
    parts = source.divisible()
    # A rank that has looked at a row or begun an epoch may have divided already.
    known = rank_sync.gather((num_lanes, [part.is_divided(num_lanes) for part in parts]))
    first = known[0][0]
    for rank, (theirs, _) in enumerate(known):
        if theirs != first:
            raise ValueError(
                f"rank {rank} divides the data into {theirs} lanes, and rank 0 into {first}; give num_lanes, or "
                "the same num_workers on all ranks"
            )
    parallel_map = partial(gather_map, rank_sync=rank_sync, doing="dividing the corpus into lanes")
    for number, part in enumerate(parts):
        if not all(divided[number] for _, divided in known):
            part.divide(num_lanes, parallel_map)


def gather_map(
    call: Callable[[Item], Result], items: Sequence[Item], rank_sync: RankSync, *, doing: str
) -> list[Result]:
    """Collective: a parallel map, split over the ranks; every rank gets all results, in the items' order."""
    size = rank_sync.world_size
    results = rank_sync.gather_results(
        lambda: map_in_threads(call, items[rank_sync.rank :: size]), doing=doing
    )
    return [results[i % size][i // size] for i in range(len(items))]
