"""Batches of packs: worker processes, ranks in step, and one state for all."""

from streampack.loader.data_loader import PackedDataLoader

__all__ = ["PackedDataLoader"]
