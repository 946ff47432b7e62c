"""Weights of a checkpoint under names that `Trainer` ignores."""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from streampack.attention.pretrained import find_pretrained

if TYPE_CHECKING:
    from transformers import Trainer


def load_renamed(trainer: Trainer, checkpoint: str) -> bool:
    """Load weights that have other names in a checkpoint than in the model; return whether there were any.

    ``save_pretrained`` writes the names under which a model is published. Most vision-language models and the experts
    of an MoE have other names in memory. Trainer 5.23 looks for those, warns of the others, and continues from the
    weights with which the process began. FSDP, ZeRO and peft save and load in their own ways, and a compiled model, or
    one in a module of the user's, has the names that Trainer saved.
    """
    from safetensors import safe_open

    model, folder = find_pretrained(trainer.model), Path(checkpoint)
    files = sorted(folder.glob("model*.safetensors"))
    # For a model in a module of the user's, Trainer saves that module's names, and no config.
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or not (folder / "config.json").is_file():
        return False
    saved = {name for file in files for name in safe_open(file, "pt").keys()}  # type: ignore[no-untyped-call]  # noqa: SIM118
    if not saved or saved <= set(trainer.model.state_dict()):
        return False
    # In a dtype that holds all values, because parts may differ.
    dtype = reduce(
        torch.promote_types, {each.dtype for each in model.parameters() if each.is_floating_point()}
    )
    loaded, found = type(model).from_pretrained(checkpoint, dtype=dtype, output_loading_info=True)
    weights = {name: each for name, each in loaded.state_dict().items() if name not in found["missing_keys"]}
    model.load_state_dict(weights, strict=False)
    return True
