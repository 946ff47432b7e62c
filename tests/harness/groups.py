"""Batches of groups, and their segments one by one: a prompt and its answers as the model would see each by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from streampack import IGNORE_INDEX, Batch, IterablePackedDataset, collate_packed
from streampack.packing.groups import Group
from tests.harness.isolation import MAX_SEQ_LEN, VOCAB, Run, run_of, whole

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
    """For each segment: its pack, its number there, and where the segments from the root to it lie in the pack."""
    assert batch.groups is not None
    found = []
    for pack, (fragments, parents) in enumerate(zip(batch.fragments, batch.groups.parents, strict=True)):
        start = 0
        paths: list[list[tuple[int, int]]] = []
        for number, (fragment, parent) in enumerate(zip(fragments, parents, strict=True)):
            stop = start + fragment.stop - fragment.start
            paths.append([*(paths[parent] if parent >= 0 else []), (start, stop)])
            found.append((pack, number, paths[-1]))
            start = stop
    return found


def label(batch: Batch, pack: int, segment: int, token: int, start: int) -> int:
    """The label of a token, which is the first of its segment at ``start``."""
    assert batch.groups is not None
    if token == start:
        return int(batch.groups.first_labels[pack, segment])
    return int(batch.labels[pack, token])


def run_packed(model: nn.Module, batch: Batch, inputs: Callable[[Batch], dict[str, Any]]) -> Run:
    """The mean loss of all labels, each compared with the logits of the token before it on its path."""
    output = model(**inputs(batch))
    logits = whole(getattr(output, "logits", output))
    losses, real = [], []
    for pack, segment, path in segments(batch):
        start, stop = path[-1]
        real.append(logits[pack, start:stop])
        predictors = [path[-2][1] - 1 if len(path) > 1 else -1, *range(start, stop - 1)]
        for token, predictor in zip(range(start, stop), predictors, strict=True):
            if (target := label(batch, pack, segment, token, start)) != IGNORE_INDEX:
                losses.append(
                    F.cross_entropy(logits[pack, predictor], torch.tensor(target, device=logits.device))
                )
    return run_of(model, torch.stack(losses).mean(), real)


def run_alone(model: nn.Module, batch: Batch) -> Run:
    """The same of each segment behind its own prefix, one by one, unpadded, as the model's authors call it."""
    losses, real = [], []
    for pack, segment, path in segments(batch):
        tokens = torch.cat([batch.tokens[pack, start:stop] for start, stop in path])
        output = model(tokens[None])
        logits = whole(getattr(output, "logits", output))[0]
        start, stop = path[-1]
        prefix = len(tokens) - (stop - start)
        real.append(logits[prefix:])
        for token in range(start, stop):
            if (target := label(batch, pack, segment, token, start)) != IGNORE_INDEX:
                losses.append(
                    F.cross_entropy(
                        logits[prefix + token - start - 1], torch.tensor(target, device=logits.device)
                    )
                )
    return run_of(model, torch.stack(losses).mean(), real)
