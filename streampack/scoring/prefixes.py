"""Requests that begin alike, laid out as trees, so that what they begin with is computed once."""

from __future__ import annotations

from collections.abc import Sequence

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


class Node:
    """A segment of a tree: tokens ``[start, stop)`` of any request that goes through it."""

    __slots__ = ("parent", "place", "start", "stop", "tokens")

    def __init__(self, tokens: IntArray, start: int, stop: int, parent: Node | None) -> None:
        self.tokens, self.start, self.stop, self.parent = tokens, start, stop, parent
        self.place = 0  # of the first token, in a pack


class Tree:
    """Requests that begin alike, added in lexicographic order.

    Attributes:
        size: tokens of all segments together.
        requests: numbers of the requests, and the segment in which each ends.
    """

    def __init__(self, tokens: IntArray) -> None:
        self.last = tokens
        self.path = [Node(tokens, 0, tokens.size, None)]  # of the request added last
        self.nodes = [*self.path]
        self.size: int = tokens.size
        self.requests: list[tuple[int, Node]] = []

    def cost(self, tokens: IntArray, common: int) -> int:
        """Return how many tokens a request would add that begins with ``common`` tokens of the last one."""
        return int(tokens.size) - self._branch(common)[0]

    def add(self, tokens: IntArray, common: int) -> None:
        """Add the next request; it begins with ``common`` tokens of the last one."""
        depth, keep = self._branch(common)
        self.size += tokens.size - depth
        if depth == self.last.size:  # it continues the last one
            tail = self.path[-1]
            tail.tokens, tail.stop = tokens, tokens.size
        else:
            del self.path[keep + 1 :]
            node = self.path.pop()
            if depth > node.start:
                upper = Node(node.tokens, node.start, depth, node.parent)
                node.start, node.parent = depth, upper
                self.nodes.append(upper)
                self.path.append(upper)
            self.path.append(Node(tokens, depth, tokens.size, self.path[-1]))
            self.nodes.append(self.path[-1])
        self.last = tokens

    def end(self, number: int) -> None:
        """Note that request ``number`` is the one added last."""
        self.requests.append((number, self.path[-1]))

    def segments(self) -> list[Node]:
        """Return the segments, each behind the one that it continues."""
        return sorted(self.nodes, key=lambda node: node.start)

    def _branch(self, common: int) -> tuple[int, int]:
        """Return after how many tokens a request would branch off, and the number of the node in the path there."""
        if common == self.last.size:
            return common, len(self.path) - 1
        number = next(number for number, node in enumerate(self.path) if common < node.stop)
        start = self.path[number].start
        return (start if number and common - start < LEAST_BRANCH else common), number


def share_prefixes(requests: Sequence[Request], *, limit: int, branch: bool) -> list[Tree]:
    """Lay requests out as trees of at most ``limit`` tokens, in the order of the first request of each.

    >>> asked = [Request(np.array(ids), np.array([0]), np.array([1])) for ids in ([3] * 20, [4], [3] * 20 + [5])]
    >>> [(tree.size, [number for number, _ in tree.requests]) for tree in share_prefixes(asked, limit=64, branch=True)]
    [(21, [0, 2]), (1, [1])]

    Args:
        requests: of at most ``limit`` tokens each.
        limit: of a tree, in tokens.
        branch: whether two requests may continue one prefix. Otherwise only a request that another begins with, or
            that is equal to it, shares its tokens.
    """
    keys = [request.tokens.astype(">u4").tobytes() for request in requests]
    trees: list[Tree] = []
    for number in sorted(range(len(requests)), key=keys.__getitem__):
        tokens = requests[number].tokens
        tree = trees[-1] if trees else None
        common = 0 if tree is None else _common(tree.last, tokens)
        if tree is not None and _joins(tree, tokens, common, limit=limit, branch=branch):
            tree.add(tokens, common)
        else:
            tree = Tree(tokens)
            trees.append(tree)
        tree.end(number)
    return sorted(trees, key=lambda tree: min(number for number, _ in tree.requests))


def _joins(tree: Tree, tokens: IntArray, common: int, *, limit: int, branch: bool) -> bool:
    """Return whether a request becomes part of a tree: if it fits, and shares all of the last one, or a good part."""
    shares = common == tree.last.size or (branch and common >= LEAST_SHARED and 4 * common >= tokens.size)
    return shares and tree.size + tree.cost(tokens, common) <= limit


def _common(first: IntArray, second: IntArray) -> int:
    """Return how many tokens two sequences begin with alike."""
    length = min(first.size, second.size)
    unequal = np.flatnonzero(first[:length] != second[:length])
    return int(unequal[0]) if unequal.size else length


def lay_out(trees: Sequence[Tree], requests: Sequence[Request]) -> tuple[Batch, dict[int, IntArray]]:
    """Lay the trees of one pack end to end, in a batch of one row without padding.

    Returns:
        The batch, and for each request its number and the places of its predictors in the pack.
    """
    parts: list[IntArray] = []
    parents: list[int] = []
    size = 0
    for tree in trees:
        numbers: dict[Node | None, int] = {None: ROOT}
        for node in tree.segments():
            parents.append(numbers[node.parent])
            numbers[node] = len(parts)
            parts.append(node.tokens[node.start : node.stop])
            node.place = size
            size += parts[-1].size
    places = {
        number: _places(requests[number].predictors, end) for tree in trees for number, end in tree.requests
    }
    return batch_of(parts, parents), places


def batch_of(segments: Sequence[IntArray], parents: Sequence[int]) -> Batch:
    """Make a batch of one row, in which nothing is trained."""
    shared = any(parent != ROOT for parent in parents)
    tokens = torch.from_numpy(np.concatenate(segments))
    return untrained_batch(tokens, [segment.size for segment in segments], parents if shared else None)


def _places(predictors: IntArray, end: Node) -> IntArray:
    """Return where tokens of a request, which ends in the segment ``end``, lie in the pack."""
    starts, shifts = [], []
    node: Node | None = end
    while node is not None:
        starts.append(node.start)
        shifts.append(node.place - node.start)
        node = node.parent
    found: IntArray = (
        predictors + np.array(shifts[::-1])[np.searchsorted(starts[::-1], predictors, side="right") - 1]
    )
    return found
