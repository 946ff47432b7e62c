"""A tiny causal model and its tokenizer, in Hugging Face's format, and a config of our recipes that starts from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.harness.tiny import WORDS, tiny_config

BUILDERS = {"llama": "llama3", "qwen2": "qwen2", "gemma": "gemma", "mistral": "mistral"}
HEADS, KV_HEADS, DIM, HEAD_DIM = 4, 2, 32, 8


def write_base(folder: Path, family: str = "llama") -> Path:
    """Write random weights, config.json and tokenizer files, as in a download."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["<pad>", "<s>", "</s>", *WORDS]
    vocabulary = {word: i for i, word in enumerate(words)} | {"<unk>": 15}
    sizes: dict[str, Any] = {
        "vocab_size": 16, "hidden_size": DIM, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    if family in ("qwen2", "gemma"):
        sizes["tie_word_embeddings"] = True
    if family == "qwen2":
        del sizes["head_dim"]  # it has none of its own
    config = transformers.AutoConfig.for_model(family, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        # Biases and norms too, or a lost one would not show.
        for name, parameter in model.named_parameters():
            torch.nn.init.normal_(parameter, mean=float("norm" in name and family != "gemma"), std=0.2)
    model.save_pretrained(folder)
    tokens = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokens, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(folder)
    return folder


def hf_config(
    folder: Path, family: str = "llama", *, adapters: dict[str, Any] | None = None, **changes: Any
) -> Any:
    """Return a `tiny_config` with a base in Hugging Face's format, and LoRA if ``adapters`` has its arguments."""
    config = tiny_config(folder, **{"max_steps": 3, "validation": None, "lr_scheduler": None} | changes)
    base = write_base(folder / "base", family)
    name = BUILDERS[family]
    sizes: dict[str, Any] = {
        "vocab_size": 16, "num_layers": 2, "num_heads": HEADS, "num_kv_heads": KV_HEADS, "embed_dim": DIM,
        "intermediate_dim": 48, "max_seq_len": 64,
    }  # fmt: skip
    sizes |= {"norm_eps": 1e-6, "rope_base": 10_000}
    if family == "gemma":
        sizes["head_dim"] = HEAD_DIM
    if family == "qwen2":
        sizes["tie_word_embeddings"] = True
    lora = "lora_" if adapters is not None else ""
    config.model = {"_component_": f"torchtune.models.{name}.{lora}{name}", **sizes, **(adapters or {})}
    config.checkpointer = {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": str(base), "checkpoint_files": ["model.safetensors"],
        "model_type": {"llama": "LLAMA3", "qwen2": "QWEN2", "gemma": "GEMMA", "mistral": "MISTRAL"}[family],
        "output_dir": str(folder / "out"),
    }  # fmt: skip
    return config
