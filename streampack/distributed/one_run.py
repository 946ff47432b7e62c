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
"""(number of files, their bytes, a digest of their names, sizes and versions)."""

DATA_ADVICE = (
    "give every rank the whole dataset: streampack shares it out among the ranks itself, so leave out slices such as "
    "rows[rank::world_size], split_dataset_by_node and DistributedSampler"
)
ENCODER_ADVICE = "give all ranks the same encoder: the same code, and the same files of its tokenizer"
SETTINGS_ADVICE = "give all ranks the same"


def require_same_run(
    dataset: IterablePackedDataset,
    rank_sync: RankSync,
    *,
    doing: str,
    settings: Callable[[], Mapping[str, Any]],
) -> None:
    """Collective: raise on all ranks unless every rank has the same data, encoder and settings as rank 0.

    Files are compared by name, size and version, where it is known; data and encoder also by the few rows that their
    identity is made of. Each rank sends one digest; the ranks exchange the values only if digests differ.

    Args:
        dataset: this rank's dataset.
        rank_sync: the ranks to compare.
        doing: what this rank is about to do, such as "iterate". It is compared too.
        settings: returns further values to compare; an error that it raises is raised on all ranks.

    Raises:
        ValueError: on all ranks, naming the first rank that differs, and in what.
        Exception: on all ranks, whatever failed on one.
    """
    if rank_sync.alone:
        settings()  # may raise
        return
    error, ours = None, {}
    try:
        ours = {
            "is about to": doing,
            # Before the identity, so that the message is about the files where other files hold other rows.
            "files": summarize_files(dataset.lane_config.source),
            **dataset._identity.plain(listed=True),
            **settings(),
        }
    except Exception as own:
        error = own
    try:
        rank_sync.raise_on_all(error, doing=f"preparing to {doing}")
    finally:
        error = None  # a traceback refers to this frame, so keeping the error would make a reference cycle
    if len(set(rank_sync.gather(digest(ours)))) == 1:
        return
    first, *others = rank_sync.gather(ours)
    for rank, theirs in enumerate(others, 1):
        if (found := first_difference(theirs, first)) is not None:
            raise ValueError(_message(rank, *found))


def summarize_files(source: Source) -> Listing | None:
    """Summarize a source's files as a `Listing`; None for a source without files."""
    files = source.listing()
    if not files:
        return None
    found = digest(*((file.name, file.size, file.tag, commit_of(file.path)) for file in files))
    return len(files), sum(file.size for file in files), found


def _message(rank: int, name: str, theirs: Any, first: Any) -> str:
    """Describe that the value ``name`` is ``theirs`` on ``rank``, and ``first`` on rank 0."""
    if name == "is about to":
        return f"rank {rank} is about to {theirs} and rank 0 to {first}; all ranks must do the same, in the same order"
    if name == "files":
        return _message_of_files(rank, theirs, first)
    if name.startswith("encoder"):
        difference = f"{name}: {theirs} and {first}"
        return f"the encoder of rank {rank} is another than that of rank 0 ({difference}); {ENCODER_ADVICE}"
    for rows in (".content.", ".hashed."):
        if name.startswith("corpus") and rows in name:
            return f"rank {rank} is given other rows than rank 0 ({name.partition(rows)[0]}); {DATA_ADVICE}"
    advice = DATA_ADVICE if name.startswith("corpus") else SETTINGS_ADVICE
    return f"rank {rank} has {name}={theirs!r} and rank 0 has {name}={first!r}; {advice}"


def _message_of_files(rank: int, theirs: Listing | None, first: Listing | None) -> str:
    return (
        f"rank {rank} lists {_describe(theirs)}, and rank 0 lists {_describe(first)}; all ranks must read one "
        "corpus: check what is mounted there, and whether its listing is an old one from a cache; of the Hub, "
        "name the commit, hf://datasets/org/name@<commit>"
    )


def _describe(found: Listing | None) -> str:
    if found is None:
        return "no files"
    files, size, names = found
    return f"{files:,} file(s) of {size:,} bytes (names, sizes, versions: {names})"
