"""The other families of causal language models that transformers 5.23 has, and whether they can be packed."""

from __future__ import annotations

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
