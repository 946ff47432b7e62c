"""Packs of requests: planned from the sizes of their trees, and laid out as batches of one row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from streampack.packing.batch import Batch, stack_packs
from streampack.packing.groups import ROOT
from streampack.packing.planner import plan_packs
from streampack.scoring.prefixes import Node, Tree, places_of, share_prefixes
from streampack.scoring.requests import Request
from streampack.types import IGNORE_INDEX, Fragment, IntArray, Pack, PackGroups


@dataclass(slots=True)
class Asked:
    """What one request asks of a pack."""

    number: int  # of the request
    places: IntArray  # [scored]: indices of tokens in the pack
    targets: IntArray  # [scored]: the ids asked for behind them


@dataclass(slots=True)
class RequestPack:
    """A batch of one row without padding, and what is asked of it."""

    batch: Batch
    asked: list[Asked]


def plan_requests(requests: Sequence[Request], *, max_seq_len: int, share: bool) -> list[list[Tree]]:
    """Plan packs of at most ``max_seq_len`` tokens that hold all requests.

    Args:
        requests: of at most ``max_seq_len`` tokens each.
        max_seq_len: of a pack, in tokens.
        share: whether several requests may continue one prefix.
    """
    trees = share_prefixes(requests, limit=max_seq_len, branch=share)
    plan = plan_packs([tree.size for tree in trees], max_seq_len, strategy="exact_fit")
    return [[trees[span.index] for span in pack] for pack in plan]


def lay_out(trees: Sequence[Tree], requests: Sequence[Request]) -> RequestPack:
    """Lay trees end to end.

    Args:
        trees: of one pack.
        requests: those whose numbers the trees have.
    """
    parts: list[IntArray] = []
    lengths: list[int] = []
    parents: list[int] = []
    size = 0
    for tree in trees:
        numbers: dict[Node | None, int] = {None: ROOT}
        for node in tree.segments():
            parents.append(numbers[node.parent])
            numbers[node] = len(lengths)
            parts.append(node.tokens[node.start : node.stop])
            lengths.append(node.stop - node.start)
            node.place = size
            size += lengths[-1]
    asked = [
        Asked(number, places_of(requests[number].predictors, end), requests[number].targets)
        for tree in trees
        for number, end in tree.requests
    ]
    return RequestPack(_batch(np.concatenate(parts), lengths, parents), asked)


def null_batch() -> Batch:
    """Make a batch of one token, for a rank that has no pack where others have one."""
    return _batch(np.zeros(1, np.int64), [1], [ROOT])


def _batch(tokens: IntArray, lengths: Sequence[int], parents: Sequence[int]) -> Batch:
    """Make a batch of one row, in which nothing is trained."""
    untrained, groups = np.full(tokens.size, IGNORE_INDEX), None
    if any(parent != ROOT for parent in parents):
        groups = PackGroups(tuple(parents), (IGNORE_INDEX,) * len(lengths), {}, {})
    fragments = tuple(Fragment((number,), 0, length) for number, length in enumerate(lengths))
    return stack_packs([Pack(tokens, untrained, tuple(lengths), fragments, groups=groups)])
