"""One corpus on all ranks: they compare what they list, and share out what all must know of the content.

64 KiB from both ends of 100,000 shards are 13 GB. Read by each of 1,024 ranks they would be 13 TB, at the first
checkpoint, from a file system that all of them share. The footers of 2,400 Parquet files, read by each, would
be millions of requests before the first pack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from streampack.distributed.rank_sync import RankSync
from streampack.fingerprint import digest
from streampack.sources.source import Source
from streampack.storage.base import map_in_threads
from streampack.storage.hub import commit_of

Listing = tuple[int, int, str]
Item = TypeVar("Item")
Result = TypeVar("Result")


def require_same_files(source: Source, rank_sync: RankSync) -> None:
    """Compare names, sizes and, where a listing has them, versions. Nothing is read. A collective.

    A version is an ETag, the checksum that the index of token shards has, and of the Hub the commit.

    Raises:
        ValueError: on all ranks, if one has other files than rank 0.
    """
    ours = None if rank_sync.alone else listing(source)
    if ours is None:
        return
    first, *others = rank_sync.gather(ours)
    for rank, theirs in enumerate(others, 1):
        if theirs != first:
            raise ValueError(other_files(rank, theirs, first))


def listing(source: Source) -> Listing | None:
    """Number, bytes, and a digest of names, sizes and versions of a source's files; None of a source without."""
    files = source.listing()
    if not files:
        return None
    found = digest(*((file.name, file.size, file.tag, commit_of(file.path)) for file in files))
    return len(files), sum(file.size for file in files), found


def other_files(rank: int, theirs: Listing | None, first: Listing | None) -> str:
    """The message for a rank whose `listing` is another than that of rank 0."""
    return (
        f"rank {rank} lists {_shown(theirs)}, and rank 0 lists {_shown(first)}; all ranks must read one "
        "corpus: check what is mounted there, and whether its listing is an old one from a cache; of the Hub, "
        "name the commit, hf://datasets/org/name@<commit>"
    )


def share_fingerprint(source: Source, rank_sync: RankSync) -> None:
    """Each rank reads the ends of every ``world_size``-th file, and hears from the others about the rest. A collective.

    The fingerprint is the one that a single process finds. Content that differs between ranks is not compared, but
    what a rank has read counts: a state is refused if any file was another one for the rank that read it.

    Raises:
        ValueError: on all ranks, if one has other files than rank 0.
        Exception: on all ranks, whatever went wrong on one while reading.
    """
    require_same_files(source, rank_sync)  # or the shares would not fit together
    if not rank_sync.alone:
        for corpus in source.corpora():
            tags = share_out(
                corpus.tag, corpus.files, rank_sync, doing="reading the ends of the corpus's files"
            )
            corpus.identify(tags)


def share_division(source: Source, num_lanes: int, rank_sync: RankSync) -> None:
    """Each rank reads what dividing the source's files into lanes takes of every ``world_size``-th. A collective.

    Worker processes then find the lanes made, where they are forked.

    Raises:
        ValueError: on all ranks, if one would divide into another number of lanes.
        Exception: on all ranks, whatever went wrong on one while reading.
    """
    parts = source.divisible()
    # What one rank knows already, because it has looked at a row or begun an epoch, another may not.
    said = rank_sync.gather((num_lanes, [part.is_divided(num_lanes) for part in parts]))
    for rank, (theirs, _) in enumerate(said):
        if theirs != said[0][0]:
            raise ValueError(
                f"rank {rank} divides the data into {theirs} lanes, and rank 0 into {said[0][0]}; give num_lanes, or "
                "the same num_workers on all ranks"
            )
    share = partial(share_out, rank_sync=rank_sync, doing="dividing the corpus into lanes")
    for number, part in enumerate(parts):
        if not all(known[number] for _, known in said):
            part.divide(num_lanes, share)


def share_out(
    call: Callable[[Item], Result], items: Sequence[Item], rank_sync: RankSync, *, doing: str
) -> list[Result]:
    """``call`` of every item, by some rank, in the items' order, on all ranks. A collective."""
    size = rank_sync.world_size
    shares = rank_sync.share(lambda: map_in_threads(call, items[rank_sync.rank :: size]), doing=doing)
    return [shares[i % size][i // size] for i in range(len(items))]


def _shown(found: Listing | None) -> str:
    if found is None:
        return "no files"
    files, size, names = found
    return f"{files:,} file(s) of {size:,} bytes (names, sizes, versions: {names})"
