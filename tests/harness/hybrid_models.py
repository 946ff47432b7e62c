"""Tiny Hugging Face models with layers that run one sequence at a time."""

from __future__ import annotations

from typing import Any

from tests.harness.groups import MAX_SEQ_LEN

LINEAR_FIRST = {"layer_types": ["linear_attention", "full_attention"]}
CONV_FIRST = {"layer_types": ["conv", "full_attention"]}
INKLING = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "sliding_window_size": 7,
    "rel_extent": 32,
    "n_shared_experts": 1,
}
ZAMBA = {
    "num_hidden_layers": 4,
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    "n_mamba_heads": 8,
}

HYBRIDS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": LINEAR_FIRST
    | {
        "head_dim": 16,
        "num_experts_per_tok": 2,
        "q_lora_rank": 16,
        "n_group": 1,
        "first_k_dense_replace": 2,
    },
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_d_head": 8},
    "falcon_mamba": {},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 32},
    "inkling2_text": INKLING,
    "inkling_text": INKLING,
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "kimi_linear": LINEAR_FIRST
    | {
        "head_dim": 16,
        "q_lora_rank": None,
        "num_experts_per_token": 2,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    },
    "lfm2": CONV_FIRST,
    "lfm2_moe": CONV_FIRST,
    "lfm3": CONV_FIRST,
    "mamba": {"state_size": 4},
    "mamba2": {"state_size": 4, "num_heads": 8, "n_groups": 1, "chunk_size": 8},
    "minimax": LINEAR_FIRST,
    "nemotron_h": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 1,
        "ssm_state_size": 8,
        "chunk_size": 8,
        "layers_block_type": ["mamba", "attention"],
    },
    "olmo_hybrid": LINEAR_FIRST,
    "qwen3_5_moe_text": LINEAR_FIRST,
    "qwen3_5_text": LINEAR_FIRST,
    "qwen3_next": LINEAR_FIRST,
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"],
        "ple_layer_ids": [1],
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "ngram_size": 3,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
        "ple_embed_dim": 16,
    },
    "recurrent_gemma": {"lru_width": 64, "num_hidden_layers": 3},
    "rwkv": {},
    "xlstm": {"num_blocks": 2, "embedding_dim": 64, "chunk_size": 8},
    "zamba": ZAMBA | {"n_mamba_heads": 2},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding"], "router_hidden_size": 16},
    "zamba2": ZAMBA | {"mamba_ngroups": 1, "mamba_headdim": 16, "chunk_size": 8},
}
"""What each family has beside the common sizes."""

FROM_THE_ROW: dict[str, dict[str, Any]] = {
    "bloom": {},
    "deepseek_v4": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "num_key_value_heads": 1,
        "qk_rope_head_dim": 2,
        "o_groups": 2,
        "o_lora_rank": 8,
        "index_n_heads": 2,
        "index_topk": 3,
    },
    "falcon, alibi": {"alibi": True},
    "minimax_m3_vl_text": {
        "index_n_heads": 2,
        "index_block_size": 3,
        "index_topk_blocks": 2,
        "layer_types": ["minimax_m3_sparse", "full_attention"],
    },
    "mpt": {"n_heads": 4, "n_layers": 2, "max_seq_len": MAX_SEQ_LEN},
}
"""Families that count something from the beginning of a row, and are refused."""

# Backends that do not compute a family, and how the refusal begins.
OTHERWISE = {
    ("qwen4_exp_text", "varlen"): "qwen4_exp_text selects keys under a mask, which varlen does not read",
    ("inkling2_text", "varlen"): "inkling2_text adds numbers of its own to its masks",
    ("inkling_text", "varlen"): "inkling_text adds numbers of its own to its masks",
    ("rwkv", "varlen"): "rwkv has its attention written into its layers",
}
