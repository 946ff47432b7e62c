"""Checks that all ranks were given the same run: data, encoder, settings and state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from streampack.distributed.rank_sync import RankSync
from streampack.fingerprint import digest
from streampack.sources.corpus_identity import first_difference
from streampack.sources.source import Source
from streampack.storage.hub import commit_of
from streampack.streaming.dataset import IterablePackedDataset

Listing = tuple[int, int, str]
"""Number of files, their bytes, and a digest of names, sizes and versions."""

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
    """Collective: raise unless every rank has the data, the encoder and all settings of rank 0.

    Of files, names, sizes and known versions are compared, and the few rows of the corpus's identity. Each rank sends
    one digest; the values follow only where digests differ.

    Args:
        dataset: of this rank.
        rank_sync: the ranks.
        doing: what this rank is about to do, such as "iterate"; the others must be about to do the same.
        settings: returns what else must be the same; an error it raises is raised on all ranks.

    Raises:
        ValueError: on all ranks, naming the first rank that differs, and in what.
        Exception: on all ranks, whatever failed on one.
    """
    if rank_sync.alone:
        settings()
        return
    error, ours = None, {}
    try:
        ours = {
            "is about to": doing,
            "files": listing(dataset.lane_config.source),  # first: other files also hold other rows
            **dataset._identity.plain(listed=True),
            **settings(),
        }
    except Exception as own:
        error = own
    try:
        rank_sync.raise_on_all(error, doing=f"preparing to {doing}")
    finally:
        error = None  # its traceback holds this frame
    if len(set(rank_sync.gather(digest(ours)))) == 1:
        return
    first, *others = rank_sync.gather(ours)
    for rank, theirs in enumerate(others, 1):
        if (found := first_difference(theirs, first)) is not None:
            raise ValueError(_message(rank, *found))


def listing(source: Source) -> Listing | None:
    """Summarize a source's files as a `Listing`; None for a source without files."""
    files = source.listing()
    if not files:
        return None
    found = digest(*((file.name, file.size, file.tag, commit_of(file.path)) for file in files))
    return len(files), sum(file.size for file in files), found


def _message(rank: int, name: str, theirs: Any, first: Any) -> str:
    part, _, last = name.rpartition(".")
    if name == "is about to":
        return f"rank {rank} is about to {theirs} and rank 0 to {first}; all ranks must do the same, in the same order"
    if name == "files":
        return _other_files(rank, theirs, first)
    if name.startswith("encoder"):
        return f"the encoder of rank {rank} is another than that of rank 0 ({name}: {theirs} and {first}); {ENCODER}"
    if last in ("content", "hashed"):
        return f"rank {rank} is given other rows than rank 0 ({part or name}); {DATA}"
    advice = DATA if name.startswith("corpus") else SETTINGS
    return f"rank {rank} has {name}={theirs!r} and rank 0 has {name}={first!r}; {advice}"


def _other_files(rank: int, theirs: Listing | None, first: Listing | None) -> str:
    return (
        f"rank {rank} lists {_shown(theirs)}, and rank 0 lists {_shown(first)}; all ranks must read one "
        "corpus: check what is mounted there, and whether its listing is an old one from a cache; of the Hub, "
        "name the commit, hf://datasets/org/name@<commit>"
    )


def _shown(found: Listing | None) -> str:
    if found is None:
        return "no files"
    files, size, names = found
    return f"{files:,} file(s) of {size:,} bytes (names, sizes, versions: {names})"
