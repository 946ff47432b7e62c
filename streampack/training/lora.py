"""Low-rank adapters: initialize, merge, and save them for torchtune and PEFT.

LoRA is by Hu et al., 2021, https://arxiv.org/abs/2106.09685. The layers of LoRA, QLoRA and DoRA are torchtune's.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torchtune import training
from torchtune.modules import peft

# Layers that can have adapters, and the weights of an adapter: torchtune's name -> Hugging Face's and PEFT's name.
TARGETS = {
    "q_proj": "self_attn.q_proj", "k_proj": "self_attn.k_proj", "v_proj": "self_attn.v_proj",
    "output_proj": "self_attn.o_proj", "w1": "mlp.gate_proj", "w2": "mlp.down_proj", "w3": "mlp.up_proj",
    "output": "lm_head",
}  # fmt: skip
PARTS = {
    "lora_a.weight": "lora_A.weight", "lora_b.weight": "lora_B.weight", "magnitude": "lora_magnitude_vector",
}  # fmt: skip
# Rotary embeddings that rotate pairs of numbers which lie side by side, and those whose pairs are half a head apart, as
# in Hugging Face's format.
NEIGHBOURS, HALVES = ("RotaryPositionalEmbeddings", "Llama3ScaledRoPE"), ("Qwen2RotaryPositionalEmbeddings",)

log = logging.getLogger(__name__)


def start_adapters(model: nn.Module, *, seed: int) -> dict[str, torch.Tensor]:
    """Freeze all but the adapters of a model, and return the adapters' initial weights.

    As in the paper, A is random and B is zero, so that the model computes at first what its base computes. The values
    depend on ``seed`` alone, not on the number of ranks or the device.

    Raises:
        ValueError: if the model has no adapters, or DoRA's in a layer with a bias.
    """
    adapters = peft.get_adapter_params(model)
    if not adapters:
        raise ValueError(
            f"{type(model).__name__} has no adapters to train; name one of torchtune's lora_ or qlora_ models in "
            "the config, or use the full_finetune recipe"
        )
    for name, layer in model.named_modules():
        if isinstance(layer, peft.DoRALinear) and getattr(layer, "bias", None) is not None:
            raise ValueError(
                f"{name} has a bias, which DoRA scales in torchtune, and neither when its weights are merged nor in "
                "PEFT; set use_dora to False"
            )
    peft.set_trainable_params(model, adapters)
    generator = torch.Generator().manual_seed(seed)
    weights = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in adapters.items()}
    for name, value in weights.items():
        if name.endswith("lora_a.weight"):
            nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
    return weights


def adapter_config(model: nn.Module) -> dict[str, Any]:
    """Return a model's adapters as PEFT's config describes them, with torchtune's names of the layers."""
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
    weights: dict[str, torch.Tensor], *, config: Mapping[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Split all weights of a model into the base with the adapters merged in, and the adapters.

    Changes ``weights``: the merged weights are computed in place.
    """
    adapters = peft.get_adapter_state_dict(weights)
    merged = peft.get_merged_lora_ckpt(weights, rank=config["r"], alpha=config["lora_alpha"])
    return merged, adapters


def save_adapters(
    checkpointer: Any, weights: Mapping[str, torch.Tensor], *, model: nn.Module, output_dir: str
) -> Path:
    """Write adapters to a folder of their own: ``adapter_model.pt`` for torchtune, and two files for PEFT.

    PEFT's files are written only if the base is in Hugging Face's format and PEFT knows its layers. They must not be in
    the folder of the merged weights, because transformers would apply the adapter to these again.

    Args:
        checkpointer: torchtune's checkpointer that loaded the base.
        weights: the adapters, under torchtune's names.
        model: the model in which they were trained.
        output_dir: the output folder of the run.

    Returns:
        The folder, ``adapter`` in ``output_dir``.
    """
    folder = Path(output_dir) / "adapter"
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(dict(weights), folder / "adapter_model.pt")
    from_hf = isinstance(checkpointer, training.FullModelHFCheckpointer)
    try:
        converted = peft_weights(weights, model) if from_hf else None
    except ValueError as error:
        log.warning("%s has no files for PEFT: %s", folder, error)
        converted = None
    if converted is not None:
        config = adapter_config(model)
        config["target_modules"] = [TARGETS[name].rpartition(".")[2] for name in config["target_modules"]]
        config["base_model_name_or_path"] = checkpointer.repo_id or str(
            checkpointer._checkpoint_dir.resolve()
        )
        config |= {"task_type": "CAUSAL_LM", "inference_mode": True}
        save_file(converted, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder


def peft_weights(weights: Mapping[str, torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
    """Convert adapters to PEFT's names and order of rows.

    torchtune's own ``tune_to_peft_adapter_weights`` is right for LoRA in llama and gemma only: it permutes the queries
    and keys of Qwen2, which have Hugging Face's order already, and does not permute DoRA's magnitudes.

    Args:
        weights: the adapters, under torchtune's names.
        model: the model that they were trained in.

    Raises:
        ValueError: if PEFT's layers compute something else than torchtune's.
    """
    heads: Any = next(module for module in model.modules() if hasattr(module, "pos_embeddings"))
    rotary = type(heads.pos_embeddings).__name__
    if rotary not in (*NEIGHBOURS, *HALVES):
        raise ValueError(
            f"torchtune's layers with {rotary} are not Hugging Face's, Phi's for one; use the merged weights, or "
            "adapter_model.pt in torchtune"
        )
    converted = {}
    for name, value in weights.items():
        part = next(part for part in PARTS if name.endswith(f".{part}"))
        layer, _, target = name.removesuffix(f".{part}").rpartition(".")
        if rotary in NEIGHBOURS and target in ("q_proj", "k_proj") and part != "lora_a.weight":
            value = (
                value.reshape(-1, heads.head_dim // 2, 2, *value.shape[1:])
                .transpose(1, 2)
                .reshape(value.shape)
            )
        within = f"model.{layer.rpartition('.')[0]}." if layer else ""  # layers.3.attn: model.layers.3.
        converted[f"base_model.model.{within}{TARGETS[target]}.{PARTS[part]}"] = value.contiguous()
    return converted
