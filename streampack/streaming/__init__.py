"""Lanes of packs, each a logical part of the corpus that resumes by itself, and the dataset that yields packs."""

from streampack.streaming.dataset import IterablePackedDataset

__all__ = ["IterablePackedDataset"]
