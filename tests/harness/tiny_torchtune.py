"""torchtune's models, shrunk."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

from tests.harness.groups import MAX_SEQ_LEN, VOCAB

# Family: the builder of one of its models, and the general builder that it calls.
FAMILIES = {
    "llama2": ("llama2_7b", "llama2"),
    "llama3": ("llama3_8b", "llama3"),
    "llama3_1": ("llama3_1_8b", "llama3_1"),
    "llama3_2": ("llama3_2_1b", "llama3_2"),  # the output's weights are the embedding's
    "mistral": ("mistral_7b", "mistral"),
    "phi3": ("phi3_mini", "phi3"),
    "phi4": ("phi4_14b", "phi3"),
    "qwen2": ("qwen2_7b", "qwen2"),  # biases in q, k and v
    "qwen2_5": ("qwen2_5_0_5b", "qwen2"),
    "gemma": ("gemma_2b", "gemma"),  # one head of keys for all
    "gemma2": ("gemma2_2b", "gemma2"),  # a window in every other layer, soft caps
}
# A window shorter than most samples, a softcap within reach of the scores, and an unusual scale.
SIZES = {
    "vocab_size": VOCAB, "num_layers": 2, "embed_dim": 128, "intermediate_dim": 48, "head_dim": 32,
    "max_seq_len": MAX_SEQ_LEN, "sliding_window_size": 7, "hidden_capping_value": 2.0,
    "query_pre_attn_scalar": 9,
}  # fmt: skip
LINEARS = ["q_proj", "k_proj", "v_proj", "output_proj"]


def build(
    family: str, *, lora: bool = False, dtype: torch.dtype = torch.float32, **changed: Any
) -> nn.Module:
    """Build a model with random parameters, also in LoRA's B, which starts at 0; with LoRA, only LoRA's train.

    ``changed`` are arguments of the general builder.
    """
    module = pytest.importorskip(f"torchtune.models.{family}._model_builders")
    name, general = (f"lora_{builder}" if lora else builder for builder in FAMILIES[family])
    full_size = getattr(module, general)
    known = inspect.signature(full_size).parameters

    def shrunk(*args: Any, **kwargs: Any) -> nn.Module:
        kwargs |= {key: value for key, value in SIZES.items() if key in known}
        kwargs["num_kv_heads"] = max(1, 8 * kwargs["num_kv_heads"] // kwargs["num_heads"])
        model: nn.Module = full_size(*args, **(kwargs | {"num_heads": 8} | changed))
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, general, shrunk)
        model = getattr(module, name)(*([LINEARS] if lora else []))
    generator = torch.Generator().manual_seed(1)
    for key, parameter in model.named_parameters():
        nn.init.normal_(parameter, mean=float("scale" in key), std=0.1, generator=generator)
        parameter.requires_grad_(not lora or "lora_" in key)
    built: nn.Module = model.to(dtype)
    return built


def attention_modules(model: nn.Module) -> list[Any]:
    classes = import_module("torchtune.modules").TransformerSelfAttentionLayer
    return [module.attn for module in model.modules() if isinstance(module, classes)]
