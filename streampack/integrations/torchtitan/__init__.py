"""A data loader of packs for the trainer of torchtitan 0.3."""

from streampack.integrations.torchtitan.data_loader import StreampackDataLoader, trainer_batch

__all__ = ["StreampackDataLoader", "trainer_batch"]
