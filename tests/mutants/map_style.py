"""Mutants of map_style."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np

from streampack import FlatteningCollator, MultipackBatchSampler, PackedDataset
from tests.mutants.registry import mutant, patch


@mutant
def longest_sequence_without_the_padding() -> None:
    """``max_length_q`` is that of the samples, also where the row's padding is a longer sequence."""

    def make(good: Any) -> Any:
        def collate(self: Any, features: Any, **settings: Any) -> Any:
            batch = good(self, features, **settings)
            if "max_length_q" in batch:
                bare = replace(self, pad_to_multiple_of=None, max_tokens=None, max_seqs=None)
                batch["max_length_q"] = batch["max_length_k"] = good(bare, features)["max_length_q"]
            return batch

        return collate

    patch(FlatteningCollator, "__call__", make)


@mutant
def first_labels_within_a_feature_trained() -> None:
    """Of a feature that is a row of several samples, only the first sample's first label is untrained."""

    def make(good: Any) -> Any:
        def collate(self: Any, features: Any, **settings: Any) -> Any:
            batch = good(self, features, **settings)
            offset = 0
            for feature in features if isinstance(features, list) else ():
                row = feature if isinstance(feature, dict) else {"input_ids": feature}
                starts = np.cumsum(row.get("seq_lengths", [0]))[:-1]
                batch["labels"][0, offset + starts] = batch["input_ids"][0, offset + starts]
                offset += len(row["input_ids"]) if "input_ids" in row else 0
            return batch

        return collate

    patch(FlatteningCollator, "__call__", make)


@mutant
def each_rank_shuffles_by_itself() -> None:
    """``MultipackBatchSampler`` adds the rank to its seed: some samples come twice an epoch, and others never."""

    def make(good: Any) -> Any:
        def init(self: Any, lengths: Any, *, seed: int = 0, rank: int | None = None, **settings: Any) -> None:
            good(self, lengths, seed=seed + (rank or 0), rank=rank, **settings)

        return init

    patch(MultipackBatchSampler, "__init__", make)


@mutant
def prefetched_batches_in_the_state() -> None:
    """A sampler's state counts the batches that workers have fetched ahead as trained."""

    def make(good: Any) -> Any:
        return lambda self, *, consumed=None: good(self)

    patch(MultipackBatchSampler, "state_dict", make)


@mutant
def first_label_of_a_second_part_trained() -> None:
    """Where a pack begins with the rest of a split sample, its first token is trained, though nothing predicts it."""

    def make(good: Any) -> Any:
        def item(self: Any, index: Any) -> Any:
            pack = good(self, index)
            if not self.parity and pack["fragments"] and pack["fragments"][0].start:
                pack["labels"][0] = pack["tokens"][0]
            return pack

        return item

    patch(PackedDataset, "__getitem__", make)


@mutant
def epochs_in_the_order_of_the_first() -> None:
    """Each epoch of ``method_loader`` has the batches of the first one."""
    # Not method_loader itself: warnings name the caller's file, so any patch of it would be seen.
    from streampack.map_style import method_loader

    def make(good: Any) -> Any:
        return lambda *args, epoch=0, **settings: good(*args, **settings)

    patch(sys.modules[method_loader.__module__], "plan_batches", make)
