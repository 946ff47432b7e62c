"""Tiny models of the other families of causal language models that transformers 5.23 has, by common sizes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.hf_models import FAMILIES, LAYERS, MAX_SEQ_LEN, SIZES
from tests.harness.hybrid_models import HYBRIDS

# Those of these that a family's config has; configs have names of their own for one thing.
COMMON = SIZES | {
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
    "sliding_window": 7,
    "topk_group": 1,
    "v_head_dim": 16,
    "word_embed_proj_dim": 64,
}
LATENT_HEADS = {"num_key_value_heads": 4}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
BOTH_ROPES = dict.fromkeys(("full_attention", "sliding_attention"), MROPE)
CHANGES: dict[str, dict[str, Any]] = {
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

ISOLATED = (
    "afmoe", "apertus", "arcee", "aria_text", "axk1", "axk2", "beam", "biogpt", "bitnet", "codegen",
    "cohere", "cohere2", "cohere2_moe", "cohere_compass_text", "ctrl", "cwm", "deepseek_v2", "deepseek_v3",
    "deepseek_v32", "diffllama", "doge", "dots1", "dots3_note_text", "ernie4_5", "ernie4_5_moe", "exaone4",
    "exaone_moe", "flex_olmo", "flint", "gemma3n_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite",
    "glm_moe_dsa", "gpt-sw3", "gpt_bigcode", "gpt_neo", "gpt_neox_japanese", "gptj", "granite_swa",
    "granitemoe", "granitemoe_swa", "granitemoeshared", "helium", "hrm_text", "hunyuan_v1_dense",
    "hunyuan_v1_moe", "hy_v3", "hy_v4", "hyperclovax", "internlm3", "iquestcoder", "jais2", "jetmoe",
    "kolibri1", "laguna", "longcat_flash", "mellum", "mimo_v2_flash", "minicpm3", "minimax_m2", "ministral",
    "ministral3", "modernbert-decoder", "moshi", "nanochat", "nemotron", "olmoe", "opt", "persimmon",
    "phimoe", "seed_oss", "solar_open", "vaultgemma", "xglm", "youtu",
)  # fmt: skip
"""Families that at least one attention keeps apart."""

REFUSED = (
    "bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "blenderbot", "blenderbot-small",
    "camembert", "cpmant", "data2vec-text", "electra", "ernie", "marian", "mbart", "megatron-bert", "mvp",
    "openai-gpt", "pegasus", "plbart", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer",
    "trocr", "xlm", "xlm-roberta", "xlm-roberta-xl",
)  # fmt: skip
"""Encoders, encoder-decoders, and decoders that take no positions and no mask that says where samples begin."""

UNTRIED = (
    "blt", "dots3_note", "emu3", "fuyu", "gemma3", "gemma3n", "gemma4", "gemma4_assistant", "gemma4_text",
    "gemma4_unified", "gemma4_unified_assistant", "gemma4_unified_text", "git", "got_ocr2", "llama4",
    "mllama", "moss_transcribe_diarize", "musicgen", "musicgen_melody", "phi4_multimodal", "prophetnet",
    "qwen4_exp", "reformer", "whisper", "xlnet", "xmod",
)  # fmt: skip
"""Families that read images or sound beside text, or have no tiny model here; where one is used, the probe tries it."""


def sizes_of(family: str) -> dict[str, Any]:
    """Return what `hf_models.build` needs for a family of any table."""
    if family in FAMILIES:
        return {}
    if family in HYBRIDS:
        return HYBRIDS[family]
    transformers = pytest.importorskip("transformers")
    known = transformers.AutoConfig.for_model(family).to_dict()
    sizes = {name: value for name, value in COMMON.items() if name in known}
    if "kv_lora_rank" in known:
        sizes |= LATENT_HEADS
    elif "head_dim" in known:
        sizes["head_dim"] = 16
    return sizes | CHANGES.get(family, {})
