"""Checks that all ranks have one run, before they iterate, save or load it; reads of files that ranks share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from streampack.distributed.rank_sync import RankSync
from streampack.fingerprint import digest
from streampack.sources.mechanics.corpus_identity import first_difference
from streampack.sources.mechanics.files import file_sources
from streampack.sources.source import Source
from streampack.streaming.dataset import IterablePackedDataset

ADVICE = {
    "doing": "all ranks must do the same, in the same order",
    "files": "all ranks must read one corpus: check what is mounted there, and whether its listing is an old one from "
    "a cache; of the Hub, name the commit, hf://datasets/org/name@<commit>",
    "corpus": "give every rank the whole dataset: streampack divides it among the ranks itself, so remove slices "
    "such as rows[rank::world_size], split_dataset_by_node and DistributedSampler",
    "encoder": "give all ranks the same encoder: the same code, and the same files of its tokenizer",
}
"""Ends of the error for a value that differs between ranks, by the first part of its name: how to mend it."""


def require_same_run(
    dataset: IterablePackedDataset,
    rank_sync: RankSync,
    *,
    doing: str,
    settings: Callable[[], Mapping[str, Any]],
) -> None:
    """Collective: raise on all ranks unless every rank has the same data, encoder and settings as rank 0.

    Each rank sends one digest, also of files and of a few rows; they exchange the values only if digests differ. What
    they are ``doing`` is compared too, and what ``settings`` returns; what it raises is raised on all ranks.
    """
    if rank_sync.alone:
        settings()  # may raise
        return
    ours: dict[str, Any] = {"doing": doing}

    def describe() -> str:
        # Files before rows, so that the message is about the files where other files hold other rows.
        ours["files"] = _summary_of_files(dataset.lane_config.source)
        ours.update({**dataset._identity.plain(listed=True), **settings()})
        return digest(ours)

    if len({*rank_sync.gather_results(describe, doing=f"preparing to {doing}")}) == 1:
        return
    first, *others = rank_sync.gather(ours)
    for rank, theirs in enumerate(others, 1):
        if (found := first_difference(theirs, first)) is not None:
            name, value, value_of_first = found
            advice = ADVICE.get(name.partition(".")[0], "give all ranks the same")
            raise ValueError(
                f"rank {rank} has {name}={value!r} and rank 0 has {name}={value_of_first!r}; {advice}"
            )


def _summary_of_files(source: Source) -> dict[str, Any]:
    leaves = file_sources(source).values()
    return {
        "number": sum(len(leaf.files) for leaf in leaves),
        "bytes": sum(sum(leaf.files.sizes) for leaf in leaves),
        "names_sizes_and_versions": digest(
            *(leaf.corpus.listed(read=not leaf.reads_tags) for leaf in leaves)
        ),
    }


def identify_across_ranks(source: Source, rank_sync: RankSync) -> None:
    """Collective: give the source the ends of its files for its fingerprint, which is that of a single process."""
    if not rank_sync.alone:
        for leaf in file_sources(source).values():
            if leaf.reads_tags:
                corpus, doing = leaf.corpus, "reading the ends of the corpus's files"
                corpus.identify(corpus.find_tags(partial(rank_sync.map, doing=doing)))


def divide_across_ranks(source: Source, num_lanes: int, rank_sync: RankSync) -> None:
    """Collective: divide the source into lanes, before worker processes are forked, which then inherit them."""
    parts = file_sources(source).values()
    # A rank may have divided some before, when it read a row. All ranks must take part in `RankSync.map`.
    divided = rank_sync.gather([part.is_divided(num_lanes) for part in parts])
    for part, *known in zip(parts, *divided, strict=True):
        if not all(known):
            part.divide(num_lanes, partial(rank_sync.map, doing="dividing the corpus into lanes"))
