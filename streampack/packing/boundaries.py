"""Checks that a row of ready tokens holds one sequence, and no padding or images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from streampack.packing.columns import numbers_of_tokens
from streampack.sources.arrow_rows import column_of

SEVERAL_SEQUENCES = "its samples would see one another; give the dataset as it was before it was packed"
REFUSED_COLUMNS = {
    "seq_lens": "it is a pack already; give the dataset that was packed, or leave packing to one of the two",
    "encoder_input": "it has images, which a pack has no place for; train on it unpacked",
}
LENGTHS = "seq_lengths"
"""The column in which TRL stores the lengths of a row's sequences."""

POSITIONS = ("position_ids", "input_pos")
BOUNDARY_COLUMNS = (LENGTHS, *POSITIONS, "attention_mask")
"""Columns from which the functions below tell whether a row holds one sequence, without padding."""


def require_one_sequence(row: Mapping[str, Any], size: int) -> None:
    """Refuse a row of ``size`` tokens that holds several sequences, or padding.

    >>> require_one_sequence({"tokens": [5, 6, 7], "position_ids": [0, 1, 2]}, 3)
    >>> require_one_sequence({"tokens": [5, 6, 7], "position_ids": [0, 1, 0]}, 3)
    Traceback (most recent call last):
    ...
    ValueError: column 'position_ids' says that the row holds 2 sequences: its samples would see one another; \
give the dataset as it was before it was packed

    Raises:
        ValueError: for such a row, and as `sequence_lengths`.
    """
    require_no_padding(row, size)
    if (count := len(sequence_lengths(row, size))) > 1:
        column = next(name for name in (LENGTHS, *POSITIONS) if column_of(row, name) is not None)
        raise ValueError(f"column {column!r} says that the row holds {count} sequences: {SEVERAL_SEQUENCES}")


def require_no_padding(row: Mapping[str, Any], size: int, column: str = "attention_mask") -> None:
    """Refuse a row of ``size`` tokens whose attention mask hides one of them, or numbers several sequences.

    Raises:
        ValueError: for such a row, and for a mask that has no number for each token.
    """
    if (mask := column_of(row, column)) is None:
        return
    if type(mask) is list and len(mask) == size == mask.count(1):  # a tenth of the time of an array
        return
    numbers = numbers_of_tokens(mask, column, size)
    if (numbers == 1).all():
        return
    if (numbers == 0).any():
        raise ValueError(
            f"the {column} hides the row's padding, which would be packed like its tokens; tokenize without "
            "padding (padding=False)"
        )
    raise ValueError(f"the {column} numbers the row's sequences: {SEVERAL_SEQUENCES}")


def sequence_lengths(row: Mapping[str, Any], size: int) -> list[int]:
    """Return the lengths of the sequences in a row of ``size`` tokens, by its ``seq_lengths`` or its positions.

    >>> sequence_lengths({"input_ids": [5, 6, 7], "seq_lengths": [2, 1]}, 3)
    [2, 1]
    >>> sequence_lengths({"input_ids": [5, 6, 7], "position_ids": [0, 0, 1]}, 3)
    [1, 2]

    Raises:
        ValueError: if the lengths do not add up to ``size``, or there is not one position a token.
    """
    if (given := column_of(row, LENGTHS)) is not None:
        lengths = [int(length) for length in given]
        if sum(lengths) != size or min(lengths, default=1) < 1:
            raise ValueError(
                f"column {LENGTHS!r} holds {lengths}, and the row has {size} tokens; they must add up to it"
            )
        return lengths
    for column in POSITIONS:
        if (given := column_of(row, column)) is not None:
            starts = _starts(given, column)
            if len(given) != size:
                raise ValueError(f"column {column!r} has {len(given)} entries, and the row has {size} tokens")
            return np.diff([*starts, size]).tolist()  # type: ignore[no-any-return]
    return [size]


def _starts(positions: Any, column: str) -> list[int]:
    """Return the indices at which positions do not continue by one: starts of sequences."""
    found = np.asarray(positions)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iuf"):
        raise ValueError(
            f"column {column!r} has shape {list(found.shape)} and type {found.dtype}; it must be flat, one position "
            "a token"
        )
    return [0, *(np.flatnonzero(np.diff(found) != 1) + 1).tolist()]
