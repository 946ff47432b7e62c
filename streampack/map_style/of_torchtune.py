"""The class that `packed_dataset` builds for a torchtune recipe."""

from torchtune.datasets import PackedDataset as Theirs

from streampack.map_style.dataset import PackedDataset


class TunePackedDataset(PackedDataset, Theirs):  # type: ignore[misc]  # torchtune has no types
    """A `PackedDataset` for a list of datasets, whose ``ConcatDataset`` tells packed ones by torchtune's own class."""
