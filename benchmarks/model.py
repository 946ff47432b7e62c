"""A llama of known sizes."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import nn

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
OUTPUT_CHUNKS = 8  # as in the recipes: avoids torchtune's fp32 copy of all logits


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a torchtune llama 3.2."""

    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    embed_dim: int
    intermediate_dim: int

    def build(self, *, device: str, dtype: str, seed: int) -> nn.Module:
        """Build the model with random weights, in training mode."""
        from torchtune import training
        from torchtune.models.llama3_2 import llama3_2

        torch.manual_seed(seed)  # layers initialise themselves from it; nothing else runs in this process
        with training.set_default_dtype(DTYPES[dtype]), torch.device(device):
            model: nn.Module = llama3_2(**asdict(self), max_seq_len=131_072, rope_base=500_000)
        # torch draws embeddings from N(0, 1); tied to the output, they would give logits of the root of the width.
        with torch.no_grad():
            model.tok_embeddings.weight.mul_(0.02)
        model.set_num_output_chunks(OUTPUT_CHUNKS)
        return model.train()


LLAMA_1B = Shape(
    vocab_size=128_256, num_layers=16, num_heads=32, num_kv_heads=8, embed_dim=2048, intermediate_dim=8192
)
TINY = Shape(vocab_size=32_000, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=32, intermediate_dim=64)
