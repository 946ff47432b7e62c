"""A data loader for torchtitan's trainer that hands out packs; for torchtitan 0.3."""

from streampack.integrations.torchtitan.data_loader import StreampackDataLoader, trainer_batch

__all__ = ["StreampackDataLoader", "trainer_batch"]
