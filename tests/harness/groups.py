"""Batches of groups, and the segments of any batch one by one: which tokens each would see by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from streampack import IGNORE_INDEX, Batch, Group, IterablePackedDataset, Sample, collate_packed

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


def without_sharing(group: Group) -> Group:
    """A group with a sequence for each answer, from the root on; shared tokens are trained in their first copy only."""
    paths = [group.paths()[leaf] for leaf in group.leaves]
    order = [segment for path in paths for segment in path]
    index = np.concatenate([np.arange(*group.bounds[segment]) for segment in order])
    first = np.isin(np.arange(index.size), np.unique(index, return_index=True)[1])
    return Group(
        group.tokens[index],
        np.where(first, group.labels[index], IGNORE_INDEX),
        lengths=[sum(group.lengths[segment] for segment in path) for path in paths],
        fields={name: values[group.leaves] for name, values in group.fields.items()},
        token_fields={name: values[index] for name, values in group.token_fields.items()},
    )


class Pairs:
    """Encodes ``{"i": 3, "n": 4}`` as a group of the tokens 3001, 3002, ...: 2 of the prompt, 4 and 2 of two answers.

    Rows whose number 4 divides are plain samples of as many tokens. Field and token field say which token it is.
    """

    name = "pairs"

    def __init__(self, *, shared: bool = True) -> None:
        self.shared = shared

    def __call__(self, row: Mapping[str, Any], /) -> Sample:
        i, n = row["i"], row["n"]
        lengths = [2, n, n // 2 + 1]
        tokens = 1000 * i + 1 + np.arange(sum(lengths))
        labels = tokens.copy()
        labels[:2] = IGNORE_INDEX
        if i % 4 == 0:
            return Sample(tokens, labels)
        group = Group(
            tokens, labels, lengths=lengths, parents=[-1, 0, 0],
            fields={"number": [np.nan, 10 * i + 1, 10 * i + 2]},
            token_fields={"logps": np.where(labels == IGNORE_INDEX, np.nan, -tokens)},
        )  # fmt: skip
        return group if self.shared else without_sharing(group)

    def fingerprint(self) -> str:
        return f"{self.name} {self.shared}"
