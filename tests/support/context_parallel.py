"""Attention of a context-parallel rank, written plainly: it gathers all keys and values, and the mask chooses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from streampack import Batch
from streampack.attention import dense_mask
from streampack.attention.context_parallel import (
    ContextParallelShard,
    shard_for_context_parallel,
    unshard_context_parallel,
)
from streampack.losses import summed_cross_entropy
from streampack.types import IGNORE_INDEX

HEADS, WIDTH, VOCAB = 2, 12, 40


class Gathered(torch.autograd.Function):
    """All ranks' parts, stacked; backward adds up what each rank wants of this rank's part."""

    @staticmethod
    def forward(_ctx: Any, part: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(_ctx: Any, *grads: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        [grad] = grads
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad[dist.get_rank()]


class Layer(nn.Module):
    """Embeddings of tokens and positions, causal attention within sequences, and logits; in fp64."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        shapes = {
            "tokens": (VOCAB, WIDTH),
            "positions": (64, WIDTH),
            "qkv": (3 * WIDTH, WIDTH),
            "out": (VOCAB, WIDTH),
        }
        for name, shape in shapes.items():
            setattr(
                self, name, nn.Parameter(0.5 * torch.randn(shape, dtype=torch.float64, generator=generator))
            )

    def forward(self, tokens: torch.Tensor, input_pos: torch.Tensor, attend: Any) -> torch.Tensor:
        x = self.tokens[tokens] + self.positions[input_pos]
        q, k, v = (F.linear(x, self.qkv).unflatten(-1, (3, HEADS, -1))[..., i, :, :] for i in range(3))
        return F.linear(x + attend(q, k, v).flatten(-2), self.out)


def attend_all(batch: Batch) -> Any:
    """Return attention over whole packs, ``[batch, max_seq_len, heads, head_dim]``."""
    mask = dense_mask(batch.seq_lens, max_seq_len=batch.tokens.shape[1])[:, None]
    return lambda q, k, v: F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask
    ).transpose(1, 2)


def attend_gathered(shard: ContextParallelShard, batch: Batch) -> Any:
    """Return attention of a rank's queries to the keys and values of all ranks, in the order of the packs."""
    mask = dense_mask(batch.seq_lens, max_seq_len=batch.tokens.shape[1])
    rows = torch.arange(len(mask))[:, None]
    own = mask[rows, shard.indices][:, None]  # [batch, 1, queries of the rank, max_seq_len]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        whole = (unshard_context_parallel(Gathered.apply(x).unbind(), batch) for x in (k, v))
        return F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, *whole)), attn_mask=own
        ).transpose(1, 2)

    return attend


@dataclass
class Result:
    logits: torch.Tensor  # of the whole batch
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]


def run_whole(batch: Batch) -> Result:
    """Run the layer on whole packs, with the loss that recipes have."""
    layer = Layer()
    logits = layer(batch.tokens, batch.input_pos, attend_all(batch))
    loss = summed_cross_entropy(logits, batch.labels) / batch.num_trained
    loss.backward()
    return Result(logits.detach(), loss.detach(), _gradients(layer))


def run_rank(batch: Batch) -> Result:
    """Run the layer on this rank's part of the batch; the results are those of all ranks together."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shard = shard_for_context_parallel(batch, rank=rank, size=size)
    layer = Layer()
    logits = layer(shard.tokens, shard.input_pos, attend_gathered(shard, batch))
    losses = F.cross_entropy(
        logits.flatten(0, 1), shard.labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    loss = losses / batch.num_trained
    loss.backward()
    gradients = _gradients(layer)
    for each in (total := loss.detach().clone(), *gradients.values()):
        dist.all_reduce(each)
    parts = [torch.empty_like(logits) for _ in range(size)]
    dist.all_gather(parts, logits.detach().contiguous())
    return Result(unshard_context_parallel(parts, batch), total, gradients)


def _gradients(layer: Layer) -> dict[str, torch.Tensor]:
    return {name: weight.grad for name, weight in layer.named_parameters() if weight.grad is not None}
