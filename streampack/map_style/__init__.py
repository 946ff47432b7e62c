"""Packing of map-style data: `PackedDataset`, samplers, collators, and the literature's methods of batching."""

from streampack.map_style.builder import packed_dataset
from streampack.map_style.collators import FlatteningCollator
from streampack.map_style.dataset import PackedDataset
from streampack.map_style.methods import method_loader
from streampack.map_style.samplers import MultipackBatchSampler

__all__ = [
    "FlatteningCollator",
    "MultipackBatchSampler",
    "PackedDataset",
    "method_loader",
    "packed_dataset",
]
