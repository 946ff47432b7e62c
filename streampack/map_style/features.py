"""Conversion of features, which a DataLoader or a Trainer gives to a collator, to samples or to one flat row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from streampack.packing.samples import (
    BOUNDARY_COLUMNS,
    as_mapping,
    check_ids,
    sample_from_row,
    sequence_lengths,
)
from streampack.types import IntArray, Sample

Feature = Mapping[str, Any]


class FlatRow(NamedTuple):
    """The samples of a batch, laid end to end without padding."""

    tokens: IntArray  # [total], fresh memory
    labels: IntArray  # [total], fresh memory
    seq_lens: list[int]


def flat_row(given: Sequence[Any]) -> FlatRow:
    """Lay the samples or packs of a batch end to end, without the padding of packs.

    Raises:
        ValueError: for a feature that is neither a sample nor a pack, naming it, and for a batch that holds both.
    """
    features = mappings_of(given)
    if any("seq_lens" in feature for feature in features):
        parts, seq_lens = [], []
        for number, feature in enumerate(features):
            part, lengths = _unpad(feature, number)
            parts.append(part)
            seq_lens += lengths
        if not seq_lens:
            raise ValueError("the packs of this batch hold no sequence; give at least one that does")
    else:
        parts = samples_of([{name: f[name] for name in f if name not in BOUNDARY_COLUMNS} for f in features])
        seq_lens = []
        for number, (feature, part) in enumerate(zip(features, parts, strict=True)):
            try:
                seq_lens += sequence_lengths(feature, part.tokens.size)
            except ValueError as error:
                raise ValueError(f"sample {number} of the batch: {error}") from None
    return FlatRow(
        np.concatenate([part.tokens for part in parts], dtype=np.int64),
        np.concatenate([part.labels for part in parts], dtype=np.int64),
        seq_lens,
    )


def _unpad(feature: Feature, number: int) -> tuple[Sample, list[int]]:
    """Return the tokens and labels of a pack without its padding, and its sequences' lengths."""
    if missing := {"tokens", "labels", "seq_lens", "num_seqs"} - set(feature):
        raise ValueError(
            f"feature {number} has no {', '.join(map(repr, sorted(missing)))}; a batch holds packs of "
            "streampack.PackedDataset or IterablePackedDataset only, or samples only"
        )
    lengths = [int(length) for length in feature["seq_lens"]][: feature["num_seqs"]]
    used = sum(lengths)
    return Sample(np.asarray(feature["tokens"])[:used], np.asarray(feature["labels"])[:used]), lengths


def mappings_of(features: Sequence[Any]) -> list[Feature]:
    """Return features as mappings.

    Raises:
        ValueError: for a text, a number or None among them, naming it.
    """
    found: list[Feature] = []
    for number, feature in enumerate(features):
        try:
            found.append(as_mapping(feature))
        except ValueError as error:
            raise ValueError(f"sample {number} of the batch: {error}") from None
        if "groups" in found[-1]:
            raise ValueError(
                f"pack {number} of the batch holds groups, whose answers share a prompt and a loss, and a "
                "flattened row has no place for them; use a PackedDataLoader, or streampack.collate_packed"
            )
    return found


def samples_of(features: Sequence[Feature]) -> list[Sample]:
    """Turn features into samples.

    Raises:
        ValueError: for an empty batch, an empty or bad sample, or samples with different columns, naming it.
    """
    if not features:
        raise ValueError("the batch is empty; give at least one sample")
    samples = []
    for number, feature in enumerate(features):
        for column in ("tokens", "input_ids", "labels"):
            if (column in feature) != (column in features[0]):
                raise ValueError(
                    f"sample {number} of the batch {'has' if column in feature else 'lacks'} {column!r} and the first "
                    "does not agree; give all samples the same columns"
                )
        if "labels" in feature and not {"tokens", "input_ids"} & set(feature):
            raise ValueError(
                f"sample {number} of the batch has no 'tokens' and no 'input_ids'; its columns are "
                f"{', '.join(map(repr, sorted(feature)))}. A Trainer removes columns that the model's forward does "
                "not name: set remove_unused_columns=False in TrainingArguments, or name the column input_ids"
            )
        try:
            sample = sample_from_row(feature)
            check_ids([sample])
        except ValueError as error:
            raise ValueError(f"sample {number} of the batch: {error}") from None
        if not sample.tokens.size:
            raise ValueError(f"sample {number} of the batch has 0 tokens; remove it")
        samples.append(sample)
    return samples
