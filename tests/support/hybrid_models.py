"""Tiny Hugging Face models with layers that run one sequence at a time: the sizes that `hf_models.build` needs."""

from __future__ import annotations

from typing import Any

from tests.support.hf_models import EXPERTS, HEADS, LOCAL_EXPERTS, MAX_SEQ_LEN

LINEAR_FIRST = {"layer_types": ["linear_attention", "full_attention"]}
CONV_FIRST = {"layer_types": ["conv", "full_attention"]}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
INKLING = HEADS | {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "sliding_window_size": 7,
    "rel_extent": 32,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
}
ZAMBA = {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]}
SHARED_EXPERT = EXPERTS | {"shared_expert_intermediate_size": 32}

HYBRIDS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": LINEAR_FIRST
    | EXPERTS
    | LATENT
    | HEADS
    | {"num_key_value_heads": 4, "q_lora_rank": 16, "n_group": 1, "topk_group": 1},
    "bamba": MAMBA2 | {"attn_layer_indices": [1]},
    "bloom": {"n_head": 4, "n_layer": 2},
    "falcon, alibi": {"alibi": True},
    "falcon_h1": MAMBA2 | {"mamba_d_ssm": 64, "mamba_d_head": 8},
    "falcon_mamba": {},
    "granitemoehybrid": MAMBA2
    | LOCAL_EXPERTS
    | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 32},
    "inkling2_text": INKLING,
    "inkling_text": INKLING,
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 4,
    },
    "kimi_linear": LINEAR_FIRST
    | EXPERTS
    | LATENT
    | HEADS
    | {"num_key_value_heads": 4, "num_experts_per_token": 2, "linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2": CONV_FIRST,
    "lfm2_moe": CONV_FIRST | EXPERTS,
    "lfm3": CONV_FIRST,
    "mamba": {"state_size": 4},
    "mamba2": {"state_size": 4, "num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 8},
    "minimax": LINEAR_FIRST | LOCAL_EXPERTS | HEADS,
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": MAX_SEQ_LEN},
    "nemotron_h": HEADS
    | {
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 1,
        "ssm_state_size": 8,
        "chunk_size": 8,
        "layers_block_type": ["mamba", "attention"],
    },
    "olmo_hybrid": DELTA | LINEAR_FIRST,
    "qwen3_5_moe_text": DELTA | LINEAR_FIRST | SHARED_EXPERT | HEADS,
    "qwen3_5_text": DELTA | LINEAR_FIRST | HEADS,
    "qwen3_next": DELTA | LINEAR_FIRST | EXPERTS | HEADS,
    "recurrent_gemma": HEADS | {"lru_width": 64, "num_hidden_layers": 3},
    "rwkv": {},
    "xlstm": {"num_heads": 4, "num_blocks": 2, "embedding_dim": 64},
    "zamba": ZAMBA | {"mamba_d_state": 4, "n_mamba_heads": 2},
    "zamba2": ZAMBA
    | {"mamba_d_state": 8, "mamba_ngroups": 1, "n_mamba_heads": 8, "mamba_headdim": 16, "chunk_size": 8},
}

# Backends that do not compute a family, and how the refusal begins.
WRITTEN = "has its attention written into its layers"
OTHERWISE = {
    ("bloom", "varlen"): f"bloom {WRITTEN}",
    ("falcon, alibi", "varlen"): f"falcon {WRITTEN}",
    ("mpt", "varlen"): f"mpt {WRITTEN}",
    ("inkling2_text", "varlen"): "nothing is known of inkling2_text, and it failed a try: ",
    ("inkling_text", "varlen"): "nothing is known of inkling_text, and it failed a try: ",
    ("rwkv", "varlen"): f"rwkv {WRITTEN}",
    ("zamba", "varlen"): "nothing is known of zamba, and it failed a try: ",
}
