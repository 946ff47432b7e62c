"""Tiny Hugging Face models of any family of causal language models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from streampack import prepare_model_for_packing
from tests.harness.groups import MAX_SEQ_LEN, VOCAB
from tests.harness.hybrid_models import FROM_THE_ROW, HYBRIDS

LAYERS = 2
SPECIAL = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES: dict[str, Any] = {
    **SPECIAL,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_SEQ_LEN,
}
ONE_WINDOW = {"layer_types": ["sliding_attention", "full_attention"]}
FIRST_WINDOW = {"use_sliding_window": True, "max_window_layers": 1}
GEMMA = {"query_pre_attn_scalar": 16}

# What each family has beside the common sizes. The first, to starcoder2, are those of Kundu et al., "Enhancing Training
# Efficiency Using Packing with Flash Attention", 2024.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "mixtral": {},
    "granite": {"attention_multiplier": 0.2},
    "dbrx": {
        "n_heads": 4,
        "n_layers": LAYERS,
        "max_seq_len": MAX_SEQ_LEN,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "falcon": {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
    "gemma": {},
    "olmo": {},
    "phi": {},
    "phi3": {},
    "qwen2": FIRST_WINDOW,
    "qwen2_moe": FIRST_WINDOW,
    "stablelm": {},
    "starcoder2": {},
    "qwen3": FIRST_WINDOW,
    "qwen3_moe": {"use_sliding_window": True},
    "llama4_text": {"attention_chunk_size": 8, "intermediate_size_mlp": 48, "no_rope_layers": [1, 0]},
    "gemma2": GEMMA,
    "gemma3_text": GEMMA | ONE_WINDOW,
    "olmo2": {},
    "olmo3": ONE_WINDOW,
    "smollm3": ONE_WINDOW | {"use_sliding_window": True, "no_rope_layers": [1, 0]},
    "gpt_oss": ONE_WINDOW | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "gpt_neox": {},
    "gpt2": {},
}

# Of these, a family's config gets those that it has; configs have names of their own for one thing.
COMMON: dict[str, Any] = {
    "attention_dropout": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "attn_pdrop": 0.0,
    "d_ff": 48,
    "d_model": 64,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "decoder_layers": LAYERS,
    "embed_dim": 64,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "encoder_layers": LAYERS,
    "ffn_dim": 48,
    "first_k_dense_replace": 1,
    "index_head_dim": 16,
    "index_n_heads": 16,  # with fewer, scores that are all 0 tie, and a tie is broken by the row's length
    "index_topk": 4,
    "kv_lora_rank": 16,
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_value_head_dim": 8,
    "mamba_chunk_size": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_n_heads": 8,
    "moe_intermediate_size": 32,
    "moe_k": 2,
    "moe_num_experts": 4,
    "n_embd": 64,
    "n_group": 1,
    "n_head": 4,
    "n_layer": LAYERS,
    "n_positions": MAX_SEQ_LEN,
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_heads": 4,
    "num_layers": LAYERS,
    "num_local_experts": 4,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "shared_expert_intermediate_size": 32,
    "sliding_window": 7,  # far shorter than the longest sample, so that losing it shows
    "topk_group": 1,
    "v_head_dim": 16,
    "word_embed_proj_dim": 64,
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
BOTH_ROPES = dict.fromkeys(("full_attention", "sliding_attention"), MROPE)
OTHERS: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {"rope_parameters": BOTH_ROPES, "layer_types": [*BOTH_ROPES]},
    "dots1": {"n_shared_experts": 1},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "layer_types": [*BOTH_ROPES],
        "vocab_size_per_layer_input": 61,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 7},
    "gptj": {"rotary_dim": 8},
    "longcat_flash": {
        "head_dim": 8,
        "expert_ffn_hidden_size": 32,
        "ffn_hidden_size": 48,
        "zero_expert_num": 2,
        "moe_topk": 2,
    },
}


def common_sizes(known: dict[str, Any]) -> dict[str, Any]:
    """Return the common sizes for a config that has these keys."""
    sizes = SIZES | {name: value for name, value in COMMON.items() if name in known}
    if "kv_lora_rank" in known:
        sizes["num_key_value_heads"] = 4
    elif "head_dim" in known:
        sizes["head_dim"] = 16
    return sizes


def sizes_of(family: str) -> dict[str, Any]:
    """Return the sizes of any family's tiny model; a variant of a family stands behind a comma."""
    name = family.partition(",")[0]
    transformers = pytest.importorskip("transformers")
    common = common_sizes(transformers.AutoConfig.for_model(name).to_dict())
    others = HYBRIDS | FROM_THE_ROW | OTHERS
    return common | FAMILIES.get(name, {}) | others.get(family, {})


def build(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """Make a language model in eval mode, the same at every call; all parameters are random, biases and sinks too.

    ``changes`` are added to the family's sizes.
    """
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(family.partition(",")[0], **(sizes_of(family) | changes))
    kind = transformers.AutoModelForCausalLM
    if config.is_encoder_decoder:
        kind = transformers.AutoModelForSeq2SeqLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind.from_config(config, dtype=dtype)
    return randomized(model, dtype)


def randomized(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Give all parameters random values, the same at every call, and put a model into eval mode."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.1, generator=generator)
            else:  # the scale of a norm is near 1 (gemma's near 0), a bias near 0
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    if dtype == torch.float64 and model._can_set_experts_implementation():  # type: ignore[operator]
        model.set_experts_implementation("eager")  # type: ignore[operator]  # the grouped kernel has no fp64
    return model.eval()


# Backends that cannot compute a family on any device, and the refusal.
WITHOUT = {
    ("falcon", "flex"): "falcon has its attention written into its layers",
    ("falcon", "varlen"): "falcon has its attention written into its layers",
    ("stablelm", "varlen"): "stablelm does not hand boundaries on to its attention",
    ("stablelm", "flex"): "transformers has no flex attention for stablelm",
    ("gpt2", "flex"): "transformers has no flex attention for gpt2",
    ("gpt_oss", "varlen"): "gpt_oss has attention sinks, which varlen does not compute",
}
# With varlen, the chunks of llama4 must be longer than the packs.
CHANGES = {("llama4_text", "varlen"): {"attention_chunk_size": MAX_SEQ_LEN}}


@contextmanager
def fp64_throughout() -> Iterator[None]:
    """Keep fp64 in families that cast to fp32 in the middle.

    gemma2 does in its softmax, llama4 in its RoPE, qwen3_next and qwen3_5 in the gated delta rule and its norm, and
    glm4v_moe in its router.
    """
    softmax, to_float, to, to_type = F.softmax, torch.Tensor.float, torch.Tensor.to, torch.Tensor.type

    def kept(x: torch.Tensor, *args: Any, **settings: Any) -> torch.Tensor:
        if x.dtype == torch.float64 and torch.float32 in (*args[:1], settings.get("dtype")):
            return x
        return to(x, *args, **settings)

    def kept_type(x: torch.Tensor, *args: Any, **settings: Any) -> Any:
        return x if x.dtype == torch.float64 and torch.float32 in args[:1] else to_type(x, *args, **settings)

    with (
        patch.object(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else to_float(x)),
        patch.object(torch.Tensor, "to", kept),
        patch.object(torch.Tensor, "type", kept_type),
        patch.object(F, "softmax", lambda scores, dim, dtype=None: softmax(scores, dim)),
    ):
        yield


def prepared(family: str, attention: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Return a prepared model, its inputs, and the same model unprepared."""
    changes |= CHANGES.get((family, attention), {})
    model = build(family, dtype, **changes)
    return model, prepare_model_for_packing(model, attention=attention), build(family, dtype, **changes)


class Wrapper(nn.Module):
    """Holds a model as PEFT, DDP and FSDP do."""

    def __init__(self, module: nn.Module, *, prompt_learning: bool = False) -> None:
        super().__init__()
        self.module = module
        self.active_peft_config = SimpleNamespace(is_prompt_learning=prompt_learning)

    def forward(self, **inputs: Any) -> Any:
        return self.module(**inputs)
