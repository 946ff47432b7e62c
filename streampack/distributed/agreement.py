"""One run on all ranks: before they begin, save or load together, they compare what each was given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from streampack.distributed.corpus import listing, other_files
from streampack.distributed.rank_sync import RankSync
from streampack.fingerprint import digest
from streampack.sources.corpus_identity import first_difference
from streampack.streaming.dataset import IterablePackedDataset

DATA = (
    "give every rank the whole dataset: streampack shares it out among the ranks itself, so leave out slices such as "
    "rows[rank::world_size], split_dataset_by_node and DistributedSampler"
)
ENCODER = "give all ranks the same encoder: the same code, and the same files of its tokenizer"
SETTINGS = "give all ranks the same"


def require_one_run(
    dataset: IterablePackedDataset,
    rank_sync: RankSync,
    *,
    doing: str,
    settings: Callable[[], Mapping[str, Any]],
) -> None:
    """Compare the data, the encoder and all settings of every rank with those of rank 0. A collective.

    Of files, names, sizes and known versions are compared, and the few rows that are looked at. One digest of each rank
    travels; the values follow only where digests differ.

    Args:
        dataset: of this rank.
        rank_sync: the ranks.
        doing: what this rank is about to do, in words: the others must be about to do the same.
        settings: gives what else must be the same; may raise, on behalf of all ranks.

    Raises:
        ValueError: on all ranks, naming the first rank that differs, and in what.
        Exception: on all ranks, whatever went wrong on one.
    """
    if rank_sync.alone:
        settings()
        return

    def look() -> dict[str, Any]:
        return {
            "is about to": doing,
            "files": listing(dataset.lane_config.source),  # first: other files hold other rows, too
            **dataset.identity(listed=True),
            **settings(),
        }

    error, ours = None, {}
    try:
        ours = look()
    except Exception as own:
        error = own
    try:
        rank_sync.raise_any(error, doing=f"preparing to {doing}")
    finally:
        error = None  # its traceback holds this frame
    if len(set(rank_sync.gather(digest(ours)))) == 1:
        return
    first, *others = rank_sync.gather(ours)
    for rank, theirs in enumerate(others, 1):
        if (found := first_difference(theirs, first)) is not None:
            raise ValueError(_words(rank, *found))


def _words(rank: int, name: str, theirs: Any, first: Any) -> str:
    part, _, last = name.rpartition(".")
    if name == "is about to":
        return f"rank {rank} is about to {theirs} and rank 0 to {first}; all ranks must do the same, in the same order"
    if name == "files":
        return other_files(rank, theirs, first)
    if name.startswith("encoder"):
        return f"the encoder of rank {rank} is another than that of rank 0 ({name}: {theirs} and {first}); {ENCODER}"
    if last in ("content", "hashed"):
        return f"rank {rank} is given other rows than rank 0 ({part or name}); {DATA}"
    advice = DATA if name.startswith("corpus") else SETTINGS
    return f"rank {rank} has {name}={theirs!r} and rank 0 has {name}={first!r}; {advice}"
