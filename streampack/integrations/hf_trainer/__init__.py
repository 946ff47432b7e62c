"""Packed streams under transformers' `Trainer` and the trainers derived from it, such as TRL's `SFTTrainer`."""

from streampack.integrations.hf_trainer.prepare import prepare_trainer_for_packing

__all__ = ["prepare_trainer_for_packing"]
