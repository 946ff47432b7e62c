"""Collectives that divide among the ranks what every rank must know of the files' content.

If every rank read all files, the load on a shared file system would be too high: 64 KiB from both ends of 100,000
shards are 13 GB, which 1,024 ranks would turn into 13 TB at the first checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from streampack.distributed.rank_sync import RankSync
from streampack.sources.files import file_sources
from streampack.sources.source import Source
from streampack.storage.base import map_in_threads

Item = TypeVar("Item")
Result = TypeVar("Result")


def identify_across_ranks(source: Source, rank_sync: RankSync) -> None:
    """Collective: give the source the ends of its files for its fingerprint, which is that of a single process."""
    if not rank_sync.alone:
        for leaf in file_sources(source).values():
            if leaf.reads_tags:
                corpus, doing = leaf.corpus, "reading the ends of the corpus's files"
                corpus.identify(map_across_ranks(corpus.tag, corpus.files, rank_sync=rank_sync, doing=doing))


def divide_across_ranks(source: Source, num_lanes: int, rank_sync: RankSync) -> None:
    """Collective: divide the source into lanes, before worker processes are forked, which then inherit them."""
    parts = file_sources(source).values()
    # A rank may have divided some before, when it read a row. All ranks must take part in `map_across_ranks`.
    divided = rank_sync.gather([part.is_divided(num_lanes) for part in parts])
    parallel_map = partial(map_across_ranks, rank_sync=rank_sync, doing="dividing the corpus into lanes")
    for part, *known in zip(parts, *divided, strict=True):
        if not all(known):
            part.divide(num_lanes, parallel_map)


def map_across_ranks(
    call: Callable[[Item], Result], items: Sequence[Item], *, rank_sync: RankSync, doing: str
) -> list[Result]:
    """Collective: call a function on each item, on one of the ranks, in threads; return all results on every rank.

    ``doing`` says in errors what the call is for. All ranks must be given the same items.

    Raises:
        Exception: on all ranks, whatever failed on one.
    """
    size = rank_sync.world_size
    results = rank_sync.gather_results(
        lambda: map_in_threads(call, items[rank_sync.rank :: size]), doing=doing
    )
    return [results[number % size][number // size] for number in range(len(items))]
