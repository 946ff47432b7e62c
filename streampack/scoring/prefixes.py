"""Requests that begin alike, laid out as trees, so that what they begin with is computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch

from streampack.attention.layout import untrained_batch
from streampack.packing.batch import Batch
from streampack.packing.groups import ROOT
from streampack.scoring.requests import Request
from streampack.types import IntArray

LEAST_SHARED = 16
"""Tokens that two requests must begin with alike to become one tree. A tree is never split, so it is harder to pack."""

LEAST_BRANCH = 8
"""Tokens that a branch must share to get a segment of its own; each is one more call of attention on a CPU."""


@dataclass(slots=True)
class Tree:
    """Requests that begin alike, in lexicographic order."""

    size: int  # tokens, those that are shared once
    requests: list[tuple[int, int]]  # the number of each, and how many tokens it shares with the one before


def share_prefixes(requests: Sequence[Request], *, limit: int, branch: bool) -> list[Tree]:
    """Put requests that begin alike into trees of at most ``limit`` tokens, in the order of the first one of each.

    >>> asked = [Request(np.array(ids), np.array([0]), np.array([1])) for ids in ([3] * 20, [4], [3] * 20 + [5])]
    >>> share_prefixes(asked, limit=64, branch=True)
    [Tree(size=21, requests=[(0, 0), (2, 20)]), Tree(size=1, requests=[(1, 0)])]

    Args:
        requests: of at most ``limit`` tokens each.
        limit: of a tree, in tokens.
        branch: whether two requests may continue one prefix. Otherwise only a request that another begins with, or
            that is equal to it, shares its tokens.
    """
    keys = [request.tokens.astype(">u4").tobytes() for request in requests]
    trees: list[Tree] = []
    last, bounds = np.empty(0, np.int64), [0]  # the request before, and where its segments begin
    for number in sorted(range(len(requests)), key=keys.__getitem__):
        tokens = requests[number].tokens
        shared = common = _common(last, tokens)
        whole = common == last.size
        joins = whole or (branch and common >= LEAST_SHARED and 4 * common >= tokens.size)
        if not whole:
            segment = max(bound for bound in bounds if bound <= common)
            shared = segment if segment and common - segment < LEAST_BRANCH else common
        if trees and joins and trees[-1].size + tokens.size - shared <= limit:
            trees[-1].size += tokens.size - shared
            trees[-1].requests.append((number, shared))
            if not whole:
                bounds = [*(bound for bound in bounds if bound < shared), shared]
        else:
            trees.append(Tree(tokens.size, [(number, 0)]))
            bounds = [0]
        last = tokens
    return sorted(trees, key=lambda tree: min(tree.requests)[0])


def _common(first: IntArray, second: IntArray) -> int:
    """Return how many tokens two sequences begin with alike."""
    length = min(first.size, second.size)
    unequal = np.flatnonzero(first[:length] != second[:length])
    return int(unequal[0]) if unequal.size else length


@dataclass(slots=True)
class _Run:
    """The tokens that a request adds to its tree, ``tokens[start:]``, cut where others branch off."""

    tokens: IntArray
    start: int
    shift: int  # from an index of the request to its place in the pack
    parent: _Run | None
    cuts: set[int] = field(default_factory=set)
    segments: dict[int, int] = field(default_factory=dict)  # the number of the segment that ends at a token


def lay_out(trees: Sequence[Tree], requests: Sequence[Request]) -> tuple[Batch, dict[int, IntArray]]:
    """Lay the trees of one pack end to end, in a batch of one row without padding.

    Returns:
        The batch, and for each request its number and the places of its predictors in the pack.
    """
    runs: list[_Run] = []
    places: dict[int, IntArray] = {}
    for tree in trees:
        path: list[_Run] = []  # the parts of the request before
        for number, shared in tree.requests:
            tokens, predictors = requests[number].tokens, requests[number].predictors
            if path and shared == path[-1].tokens.size:
                path[-1].tokens = tokens
            else:
                while path and path[-1].start >= shared:
                    path.pop()
                parent = path[-1] if path else None
                if parent is not None:
                    parent.cuts.add(shared)
                size = runs[-1].tokens.size + runs[-1].shift if runs else 0  # of the pack so far
                runs.append(_Run(tokens, shared, size - shared, parent))
                path.append(runs[-1])
            starts, shifts = np.array([(run.start, run.shift) for run in path]).T
            places[number] = predictors + shifts[np.searchsorted(starts, predictors, side="right") - 1]
    parts: list[IntArray] = []
    parents: list[int] = []
    for run in runs:
        parent_number = ROOT if run.parent is None else run.parent.segments[run.start]
        for start, stop in pairwise([run.start, *sorted(run.cuts), run.tokens.size]):
            parents.append(parent_number)
            parent_number = run.segments[stop] = len(parts)
            parts.append(run.tokens[start:stop])
    return batch_of(parts, parents), places


def batch_of(segments: Sequence[IntArray], parents: Sequence[int]) -> Batch:
    """Make a batch of one row, in which nothing is trained."""
    shared = any(parent != ROOT for parent in parents)
    tokens = torch.from_numpy(np.concatenate(segments))
    return untrained_batch(tokens, [segment.size for segment in segments], parents if shared else None)
