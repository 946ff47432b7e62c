"""Batches of groups, and the segments of any batch one by one: which tokens each would see by itself."""

from __future__ import annotations

from typing import Any

import torch

from streampack import IGNORE_INDEX, Batch, Group, IterablePackedDataset, collate_packed

VOCAB, MAX_SEQ_LEN = 61, 32

# Lengths and parents: a pair, four answers, a tree of depth 3 in which an answer goes on in two ways, an answer of one
# token to a prompt of one, a prompt longer than the window of the models, and samples without a prefix.
TREES: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((6, 3, 5), (-1, 0, 0)),
    ((4, 3, 2, 1, 6), (-1, 0, 0, 0, 0)),
    ((4, 3, 3, 2, 6), (-1, 0, 1, 1, 0)),
    ((1, 1), (-1, 0)),
    ((10, 3, 8), (-1, 0, 0)),
    ((9,), (-1,)),
    ((3, 7), (-1, -1)),
)


def trees(seed: int = 3) -> list[Group]:
    """Random tokens, of which prompts are masked, and so is a token in the middle of some answers."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for lengths, parents in TREES:
        tokens = torch.randint(1, VOCAB, (sum(lengths),), generator=generator).numpy()
        labels = tokens.copy()
        if len(lengths) > 1 and parents[1] == 0:
            labels[: lengths[0]] = IGNORE_INDEX
        labels[-2] = IGNORE_INDEX
        found.append(Group(tokens, labels, lengths=lengths, parents=parents))
    return found


def batch_of(groups: list[Group], *, max_seq_len: int = MAX_SEQ_LEN, **settings: Any) -> Batch:
    """Return the batch of all packs of the groups, of which a plain sample is the last."""
    rows: list[dict[str, Any]] = [{"group": group} for group in groups]
    data = IterablePackedDataset(
        [*rows, {"tokens": [7, 8, 9]}],
        max_seq_len=max_seq_len,
        num_lanes=1,
        encoder=lambda row: row.get("group") or row["tokens"],
        **settings,
    )
    return collate_packed(list(data))


def segments(batch: Batch) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """For each segment: its pack, its number there, and where the segments from the root to it lie in the pack.

    A sample without a prefix, in a batch with or without groups, is one segment.
    """
    found = []
    for pack, fragments in enumerate(batch.fragments):
        parents = batch.groups.parents[pack] if batch.groups else (-1,) * len(fragments)
        start = 0
        paths: list[list[tuple[int, int]]] = []
        for number, (fragment, parent) in enumerate(zip(fragments, parents, strict=True)):
            stop = start + fragment.stop - fragment.start
            paths.append([*(paths[parent] if parent >= 0 else []), (start, stop)])
            found.append((pack, number, paths[-1]))
            start += fragment.length  # behind the padding of the sequence
    return found


def label(batch: Batch, pack: int, segment: int, token: int, start: int) -> int:
    """The label of a token, which is the first of its segment at ``start``."""
    assert batch.groups is not None
    if token == start:
        return int(batch.groups.first_labels[pack, segment])
    return int(batch.labels[pack, token])
