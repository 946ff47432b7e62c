"""The cost of a pack's attention, by which packs of equal length differ."""

from __future__ import annotations

from collections.abc import Iterable


def attention_cost(seq_lens: Iterable[int], starts: Iterable[int] | None = None) -> int:
    """Count the pairs of tokens of causal attention in a pack: a token attends to its sequence up to itself.

    >>> attention_cost([3, 1])
    7
    >>> attention_cost([3, 2], [0, 3]) == attention_cost([5])
    True

    Args:
        seq_lens: of its sequences, without the padding.
        starts: positions of their first tokens where sequences continue others, as of `path_starts`; None: all are 0.
    """
    if starts is None:
        return sum([length * (length + 1) for length in seq_lens]) // 2
    ends = [(start, start + length) for start, length in zip(starts, seq_lens, strict=True)]
    return sum([end * (end + 1) - start * (start + 1) for start, end in ends]) // 2
