"""Reading one sample of a map-style dataset."""

from __future__ import annotations

from typing import Any

from streampack.packing.groups import Group
from streampack.packing.samples import check_ids, sample_from_row
from streampack.types import Sample


def read_sample(ds: Any, index: int, *, vocab_size: int | None = None) -> Sample:
    """Read sample ``index`` of a map-style dataset, and check it; errors name the index.

    Raises:
        ValueError: for a row that is not one sample, or an id outside the vocabulary.
    """
    try:
        row = ds[index]
    except Exception as error:
        error.add_note(f"while reading sample {index}")
        raise
    try:
        if isinstance(row, Group):
            raise ValueError("is a group of segments; only IterablePackedDataset packs those")
        sample = sample_from_row(row)
        check_ids([sample], vocab_size)
    except ValueError as error:
        raise ValueError(f"sample {index}: {error}") from None
    return sample
