"""torchtune's packs, token for token: what ``PackedDataset(parity="torchtune")`` makes of samples with tokens.

`torchtune.datasets.PackedDataset` (0.6.1) differs from the rest of streampack in this:

- It packs greedily, in order.
- Labels are not changed: the first token of a sequence is trained, predicted from the sequence before.
- Positions count through the unsplit sample modulo ``max_seq_len``, also in its parts, and continue through the
  padding, up to ``max_seq_len - 1``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from streampack.types import IGNORE_INDEX, IntArray, Sample


def strategy_of(
    strategy: str | None, *, split_across_pack: bool, pad_seqs_to: int, **others: object
) -> str | None:
    """Return torchtune's strategy, and refuse settings that would change the packs, or that it does not use."""
    changed = pad_seqs_to != 1 or any(value is not None for value in others.values())
    if strategy not in (None, "exact_fit", "next_fit") or changed:
        raise ValueError(
            "parity='torchtune' packs as torchtune does, in order, all samples and without padding in between; leave "
            f"strategy, pad_seqs_to, {', '.join(others)} out, or leave parity out"
        )
    return strategy if split_across_pack else "next_fit"


def assemble(
    sequences: Sequence[Sample], starts: Sequence[int], *, max_seq_len: int, padding_idx: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Lay sequences end to end and pad: ``(tokens, labels, input_pos)``, each ``[max_seq_len]``.

    ``starts`` are the offsets at which sequences begin in their samples.
    """
    lengths = [sequence.tokens.size for sequence in sequences]
    padding = max_seq_len - sum(lengths)
    counts = [np.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)]
    input_pos = np.concatenate(counts) % max_seq_len
    return (
        np.concatenate([*(s.tokens for s in sequences), np.full(padding, padding_idx)]),
        np.concatenate([*(s.labels for s in sequences), np.full(padding, IGNORE_INDEX)]),
        np.append(input_pos, np.minimum(input_pos[-1] + 1 + np.arange(padding), max_seq_len - 1)),
    )
