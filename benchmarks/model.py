"""A llama of known sizes, the FLOPs of its training, and the peak FLOPs of devices."""

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

    @property
    def matmul_weights(self) -> int:
        """Weights that every token is multiplied with: all but the norms and the embedding.

        (The embedding is tied to the output, and counts there.)
        """
        heads = 2 * self.num_heads + 2 * self.num_kv_heads  # q and output, k and v
        head_dim = self.embed_dim // self.num_heads
        layer = self.embed_dim * (heads * head_dim + 3 * self.intermediate_dim)
        return self.num_layers * layer + self.embed_dim * self.vocab_size

    def train_flops(self, *, tokens: int, pairs: int) -> int:
        """Multiplications and additions of one forward and backward pass over real tokens.

        ``6 * matmul_weights * tokens + 12 * num_layers * embed_dim * pairs``: two for each weight and token, two for
        each pair and channel in the scores and again in the weighted sum, and the backward pass twice that. ``pairs``
        are the (query, key) that causal attention within the samples needs. Work on padding and what activation
        checkpointing computes again do not count: it is model FLOPs (Chowdhery et al. 2022, PaLM, appendix B, which
        counts attention as if it were not causal).
        """
        return 6 * self.matmul_weights * tokens + 12 * self.num_layers * self.embed_dim * pairs

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

# Dense bf16 FLOP/s by the vendor's data sheets (without sparsity); the first name that the device's contains.
PEAK_FLOPS = {
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
}


def utilization(shape: Shape, *, tokens: int, pairs: int, seconds: float, device: str) -> float | None:
    """Return the MFU, `Shape.train_flops` over the device's peak in that time; None where the peak is not known."""
    peak = next((peak for name, peak in PEAK_FLOPS.items() if name in device), None)
    return peak and shape.train_flops(tokens=tokens, pairs=pairs) / (seconds * peak)
