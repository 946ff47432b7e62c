"""Collectives that divide among the ranks what every rank must know of the files' content.

Each rank reads every ``world_size``-th file, and gathers the rest from the other ranks. If every rank read all files,
the load on a shared file system would be too high: 64 KiB from both ends of 100,000 shards are 13 GB, which 1,024 ranks
would turn into 13 TB at the first checkpoint. The footers of 2,400 Parquet files would take those ranks millions of
requests before the first pack.
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


def identify_across_ranks(source: Source, rank_sync: RankSync) -> None:
    """Collective: give the source the ends of its files for its fingerprint, reading each file on one rank.

    The fingerprint equals that of a single process. All ranks must list the same files, which `require_same_run`
    checks. Whether a file has the same content on all ranks is not checked. But if the rank that reads a file finds
    other content than an earlier run, the fingerprint differs, and the state of that run is refused.

    Raises:
        Exception: on all ranks, whatever failed on one while reading.
    """
    if not rank_sync.alone:
        for corpus in source.corpora():
            tags = map_across_ranks(
                corpus.tag, corpus.files, rank_sync, doing="reading the ends of the corpus's files"
            )
            corpus.identify(tags)


def divide_across_ranks(source: Source, num_lanes: int, rank_sync: RankSync) -> None:
    """Collective: divide the source into lanes, reading each file that this needs on one rank.

    It must be called before worker processes are forked, which then inherit the lanes.

    Raises:
        ValueError: on all ranks, if a rank has another ``num_lanes``.
        Exception: on all ranks, whatever failed on one while reading.
    """
    parts = source.divisible()
    # A rank may have divided some sources before, when it read a row or began an epoch. A source is skipped only if all
    # ranks have divided it, because all must take part in the collectives of `map_across_ranks`.
    of_ranks = rank_sync.gather((num_lanes, [part.is_divided(num_lanes) for part in parts]))
    first = of_ranks[0][0]
    for rank, (theirs, _) in enumerate(of_ranks):
        if theirs != first:
            raise ValueError(
                f"rank {rank} divides the data into {theirs} lanes, and rank 0 into {first}; give num_lanes, or "
                "the same num_workers on all ranks"
            )
    parallel_map = partial(map_across_ranks, rank_sync=rank_sync, doing="dividing the corpus into lanes")
    for index, part in enumerate(parts):
        if not all(divided[index] for _, divided in of_ranks):
            part.divide(num_lanes, parallel_map)


def map_across_ranks(
    call: Callable[[Item], Result], items: Sequence[Item], rank_sync: RankSync, *, doing: str
) -> list[Result]:
    """Collective: call a function on each item, on one of the ranks; return all results on every rank, in order.

    ``doing`` says in errors what the call is for. Each rank calls the function in threads.
    """
    size = rank_sync.world_size
    results = rank_sync.gather_results(
        lambda: map_in_threads(call, items[rank_sync.rank :: size]), doing=doing
    )
    return [results[i % size][i // size] for i in range(len(items))]
