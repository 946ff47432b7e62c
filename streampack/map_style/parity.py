"""torchtune's packs, token for token: what ``PackedDataset(parity="torchtune")`` makes.

`torchtune.datasets.PackedDataset` (0.6.1) differs from the rest of streampack:

- It packs greedily, in order. A pack closes when a sample *overflows* it, so a full pack is not yielded before the
  next sample is read.
- Labels are not changed: the first token of a sequence is trained, predicted from the sequence before.
- Positions count through the whole sample modulo ``max_seq_len``, also in the parts of a split sample.
- The padding's positions continue from the last token's, up to ``max_seq_len - 1``.
- An empty sample is kept as a sequence of 0 tokens. It never closes a pack, and alone it makes none.
- ``max_packs`` is checked after a sample, so 0 still reads the first one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from streampack.packing.planner import Span
from streampack.types import IGNORE_INDEX, IntArray, Sample


def require_defaults(settings: tuple[object, ...]) -> None:
    """Check that those settings of `PackedDataset` that torchtune's does not have keep their defaults.

    Raises:
        ValueError: if one of them differs.
    """
    if settings != ("exact_fit", 128, None, None, 1, None, None):
        raise ValueError(
            "parity='torchtune' packs as torchtune does, so strategy, buffer_size, overlong, "
            "max_seqs_per_pack, pad_seqs_to, eos_id and untrained have no effect; leave them out, or "
            "leave parity out"
        )


def plan(
    lengths: Iterable[int], max_seq_len: int, *, split_across_pack: bool, max_packs: int | None
) -> Iterator[list[Span]]:
    """Plan the packs of samples of these lengths, reading no further than torchtune does.

    >>> [[tuple(span) for span in pack] for pack in plan([5, 3, 4], 8, split_across_pack=False, max_packs=None)]
    [[(0, 0, 5), (1, 0, 3)], [(2, 0, 4)]]
    >>> [[tuple(span) for span in pack] for pack in plan([5, 6], 8, split_across_pack=True, max_packs=None)]
    [[(0, 0, 5), (1, 0, 3)], [(1, 3, 6)]]

    Raises:
        ValueError: as torchtune does, for a sample that is too long and may not be split.
    """
    spans: list[Span] = []
    used = made = 0
    for index, length in enumerate(lengths):
        if length > max_seq_len and not split_across_pack:
            raise ValueError(
                f"sample {index} has {length} tokens, max_seq_len is {max_seq_len}; "
                "set split_across_pack=True or raise max_seq_len"
            )
        spans.append(Span(index, 0, length))
        used += length
        while used > max_seq_len and made != max_packs:
            last = spans.pop()
            cut = last.start
            if split_across_pack:
                cut = last.stop - (used - max_seq_len)
                if cut > last.start:
                    spans.append(last._replace(stop=cut))
            yield spans
            made += 1
            spans, used = [last._replace(start=cut)], last.stop - cut
        if made == max_packs:
            return
    if used:
        yield spans


def assemble(
    sequences: Sequence[Sample], starts: Sequence[int], *, max_seq_len: int, padding_idx: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Lay sequences end to end and pad: ``(tokens, labels, input_pos)``, each ``[max_seq_len]``.

    ``starts`` are the offsets at which sequences begin in their samples. There is at least one token.
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
