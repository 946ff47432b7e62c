"""Low-rank adapters: which weights train, how they begin, and what is saved at the end.

LoRA: Hu et al., 2021, https://arxiv.org/abs/2106.09685. The layers, and QLoRA's and DoRA's, are torchtune's.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torchtune import training
from torchtune.modules import peft

TARGETS = ("q_proj", "k_proj", "v_proj", "output_proj", "w1", "w2", "w3", "output")  # as torchtune names them


def start_adapters(model: nn.Module, *, seed: int) -> dict[str, torch.Tensor]:
    """Freeze all but the adapters of a model, and make the weights they begin with.

    As in the paper, A is random and B zero, so the model begins as its base. The numbers depend on
    ``seed`` alone, not on how many ranks there are nor on where the model lies.

    Raises:
        ValueError: if the model has no adapters.
    """
    adapters = peft.get_adapter_params(model)
    if not adapters:
        raise ValueError(
            f"{type(model).__name__} has no adapters to train; name one of torchtune's lora_ or qlora_ models in "
            "the config, or use the full_finetune recipe"
        )
    peft.set_trainable_params(model, adapters)
    generator = torch.Generator().manual_seed(seed)
    weights = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in adapters.items()}
    for name, value in weights.items():
        if name.endswith("lora_a.weight"):
            nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
    return weights


def start_magnitudes(model: nn.Module) -> None:
    """DoRA's third part: the norms of the base weights, once these are loaded."""
    for module in model.modules():
        if hasattr(module, "initialize_dora_magnitude"):
            module.initialize_dora_magnitude()  # type: ignore[operator]


def adapter_config(model: nn.Module) -> dict[str, Any]:
    """Rank, scale and place of a model's adapters, as torchtune's checkpointers and PEFT want them."""
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, peft.LoRALinear | peft.DoRALinear)
    }
    first = next(iter(layers.values()))  # torchtune's builders make all of them alike
    rank = first.lora_a.out_features
    dora = isinstance(first, peft.DoRALinear)
    adapted = {name.rpartition(".")[2] for name in layers}
    return {
        "r": rank,
        "lora_alpha": first.scaling * rank if dora else first.alpha,
        "target_modules": [name for name in TARGETS if name in adapted],
        "peft_type": "LORA",
        "use_dora": dora,
    }


def split_and_merge(
    weights: dict[str, torch.Tensor], *, config: dict[str, Any], adapters_only: bool = False
) -> dict[str, Any]:
    """All weights of a model as what torchtune's checkpointers save: the adapters, and the base with BA added.

    ``weights`` is used up.
    """
    state = {training.ADAPTER_KEY: peft.get_adapter_state_dict(weights), training.ADAPTER_CONFIG: config}
    if not adapters_only:
        state[training.MODEL_KEY] = peft.get_merged_lora_ckpt(
            weights, rank=config["r"], alpha=config["lora_alpha"]
        )
    return state
