"""The cost of a pack's attention, by which packs of equal length differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streampack.validation import require_positive


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """Counts the pairs of tokens that a pack's causal attention computes: a token attends to its sequence up to itself.

    >>> AttentionCost().of([3, 1])
    7
    >>> AttentionCost(sliding_window=2).of([3, 1])
    6
    >>> AttentionCost(chunk_size=2).of([3, 1])
    5

    Args:
        sliding_window: tokens to which a token attends at most, itself included.
        chunk_size: tokens of a chunk, beyond whose beginning no token attends.

    Raises:
        ValueError: for a limit below 1, or if both are given.
    """

    sliding_window: int | None = None
    chunk_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("sliding_window", "chunk_size"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, require_positive(getattr(self, name), f"balance_cost.{name}"))
        if self.sliding_window is not None and self.chunk_size is not None:
            raise ValueError("balance_cost takes a sliding_window or a chunk_size; give one of the two")

    @classmethod
    def from_setting(cls, setting: Mapping[str, Any] | None) -> AttentionCost:
        """Make the cost of the setting ``balance_cost``.

        Raises:
            ValueError: for an unknown key, or a limit that cannot be.
        """
        known = ("sliding_window", "chunk_size")
        if setting is not None and not isinstance(setting, Mapping):
            raise ValueError(f"balance_cost={setting!r} is no mapping; its keys are {', '.join(known)}")
        if unknown := sorted(set(setting or {}) - set(known)):
            raise ValueError(f"balance_cost has no {unknown[0]!r}; its keys are {', '.join(known)}")
        return cls(**(setting or {}))

    def of(self, seq_lens: Iterable[int]) -> int:
        """Return the pairs of a pack with sequences of these lengths, padding left out."""
        if self.sliding_window is not None:
            return sum(_windowed(length, self.sliding_window) for length in seq_lens)
        if self.chunk_size is not None:
            return sum(_chunked(length, self.chunk_size) for length in seq_lens)
        return sum([length * (length + 1) for length in seq_lens]) // 2

    def of_pack(self, seq_lens: Sequence[int], starts: Sequence[int] | None) -> int:
        """Return the pairs of a pack of which sequences may continue others.

        >>> AttentionCost().of_pack([3, 2], [0, 3]) == AttentionCost().of([5])
        True

        Args:
            seq_lens: of its sequences.
            starts: positions of their first tokens, as of `path_starts`; None: all are 0.
        """
        if starts is None:
            return self.of(seq_lens)
        ends = (start + length for start, length in zip(starts, seq_lens, strict=True))
        return self.of(ends) - self.of(starts)


def _windowed(length: int, window: int) -> int:
    full = min(length, window)
    return full * (full + 1) // 2 + (length - full) * window


def _chunked(length: int, chunk: int) -> int:
    full, rest = divmod(length, chunk)
    return full * (chunk * (chunk + 1) // 2) + rest * (rest + 1) // 2
