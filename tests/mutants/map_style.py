"""Mutants of map_style."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import numpy as np

from streampack import FlatteningCollator, MultipackBatchSampler, PackedDataset
from tests.mutants.registry import replaces


@replaces(FlatteningCollator, "__call__")
def longest_sequence_without_the_padding(good, self, features, **settings):
    """``max_length_q`` is that of the samples, also where the row's padding is a longer sequence."""
    batch = good(self, features, **settings)
    if "max_length_q" in batch:
        bare = replace(self, pad_to_multiple_of=1)
        batch["max_length_q"] = batch["max_length_k"] = good(bare, features)["max_length_q"]
    return batch


@replaces(FlatteningCollator, "__call__")
def first_labels_within_a_feature_trained(good, self, features, **settings):
    """Of a feature that is a row of several samples, only the first sample's first label is untrained."""
    batch = good(self, features, **settings)
    offset = 0
    for feature in features if isinstance(features, list) else ():
        row = feature if isinstance(feature, dict) else {"input_ids": feature}
        starts = np.cumsum(row.get("seq_lengths", [0]))[:-1]
        batch["labels"][0, offset + starts] = batch["input_ids"][0, offset + starts]
        offset += len(row["input_ids"]) if "input_ids" in row else 0
    return batch


@replaces(MultipackBatchSampler, "__init__")
def each_rank_shuffles_by_itself(good, self, lengths, *, seed=0, rank=None, **settings):
    """``MultipackBatchSampler`` adds the rank to its seed: some samples come twice an epoch, and others never."""
    good(self, lengths, seed=seed + (rank or 0), rank=rank, **settings)


@replaces(MultipackBatchSampler, "set_epoch")
def resumed_behind_what_one_rank_did(good, self, epoch, *, done=0):
    """A resumed sampler takes the batches that all ranks have done for those of each: some are never trained."""
    return good(self, epoch, done=done * self.num_replicas)


@replaces(PackedDataset, "__getitem__")
def first_label_of_a_second_part_trained(good, self, index):
    """Where a pack begins with the rest of a split sample, its first token is trained, though nothing predicts it."""
    pack = good(self, index)
    if not self.parity and pack["fragments"] and pack["fragments"][0].start:
        pack["labels"][0] = pack["tokens"][0]
    return pack


# Not method_loader itself: warnings name the caller's file, so any patch of it would be seen.
@replaces(import_module("streampack.map_style.methods"), "plan_batches")
def epochs_in_the_order_of_the_first(good, *args, epoch=0, **settings):
    """Each epoch of ``method_loader`` has the batches of the first one."""
    return good(*args, **settings)
