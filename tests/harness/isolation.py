"""Run packs of a stream, and each of their sequences alone, through a torchtune model, and compare the results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from streampack import IGNORE_INDEX, Batch, Fragment, IterablePackedDataset, collate_packed
from streampack.attention.prepare import make_mask
from streampack.losses import summed_cross_entropy

VOCAB, MAX_SEQ_LEN = 61, 32
LENGTHS = (5, 32, 1, 17, 9, 2, 23, 12, 3, 8, 20)
STREAMS: dict[str, dict[str, Any]] = {
    "exact_fit": {"strategy": "exact_fit"},
    "best_fit": {"strategy": "best_fit"},
    "first_fit": {"strategy": "first_fit"},
    "next_fit": {"strategy": "next_fit"},
    "overlong": {"overlong": "split"},
    "wrap": {"split_across_pack": True},
    "padded": {"pad_seqs_to": 8},
    "padded wrap": {"split_across_pack": True, "pad_seqs_to": 8},
}


def rows_of(lengths: tuple[int, ...]) -> list[dict[str, list[int]]]:
    """Make rows of random tokens; the first third of every other row is a prompt, and one row trains nothing."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for number, length in enumerate(lengths):
        tokens = torch.randint(1, VOCAB, (length,), generator=generator).tolist()
        prompt = length if number == 4 else length // 3 if number % 2 else 0
        rows.append({"tokens": tokens, "labels": [IGNORE_INDEX] * prompt + tokens[prompt:]})
    return rows


def stream_and_batch(stream: str) -> tuple[IterablePackedDataset, Batch]:
    """Return a stream and the batch of all its packs."""
    lengths = (*LENGTHS, 75) if "split" in str(STREAMS[stream]) else LENGTHS
    data = IterablePackedDataset(rows_of(lengths), max_seq_len=MAX_SEQ_LEN, num_lanes=1, **STREAMS[stream])
    return data, collate_packed(list(data))


class AbsolutePositions(nn.Module):
    """Position embeddings that depend on absolute positions; RoPE depends on distances only."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(MAX_SEQ_LEN, 1, head_dim))

    def forward(self, x: torch.Tensor, *, input_pos: torch.Tensor | None = None) -> torch.Tensor:
        return x + (self.table[: x.shape[1]] if input_pos is None else self.table[input_pos])


def build(family: str) -> nn.Module:
    """Make a tiny torchtune llama with grouped queries and random parameters; ``absolute`` has no RoPE."""
    llama3 = pytest.importorskip("torchtune.models.llama3")
    sizes = {
        "vocab_size": VOCAB, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 64,
        "intermediate_dim": 48, "max_seq_len": MAX_SEQ_LEN,
    }  # fmt: skip
    model: nn.Module = llama3.llama3(**sizes)
    if family == "absolute":
        for layer in model.layers:
            layer.attn.pos_embeddings = AbsolutePositions(head_dim=16)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, mean=float("scale" in name), std=0.2, generator=generator)
    return model


@dataclass
class Run:
    """The results of one forward and backward pass."""

    loss: torch.Tensor  # [], the mean over trained tokens
    gradient: torch.Tensor  # [trainable parameters]
    logits: torch.Tensor  # [real tokens, vocab], in the order of the packs


def run_of(model: nn.Module, loss: torch.Tensor, logits: list[torch.Tensor]) -> Run:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # What is only compared to choose keys or experts has no gradient.
    gradients = torch.autograd.grad(loss, trainable, allow_unused=True, materialize_grads=True)
    return Run(loss.detach(), torch.cat([g.flatten() for g in gradients]), torch.cat(logits).detach())


def whole(output: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else torch.cat(output, 1)


def run_packed(model: nn.Module, batch: Batch, *, mask: Any = None) -> Run:
    mask = make_mask(batch) if mask is None else mask
    output = model(batch.tokens, mask=mask, input_pos=batch.input_pos)
    loss = summed_cross_entropy(output, batch.labels, chunk_size=50) / batch.num_trained.clamp(min=1)
    return run_of(model, loss, [whole(output)[~is_padding(batch)]])


def run_alone(
    model: nn.Module,
    data: IterablePackedDataset,
    batch: Batch,
    *,
    forward: Callable[[torch.Tensor], Any] | None = None,
) -> Run:
    """Run each sequence by itself, read from its row; the loss is the mean over all trained tokens."""
    loss, trained, logits = torch.zeros((), device=batch.tokens.device), 0, []
    for _, _, fragment in placed(batch):
        tokens, labels = (own(data, fragment, column).to(loss.device) for column in ("tokens", "labels"))
        logits.append(whole((forward or model)(tokens[None]))[0])
        if count := int((labels[1:] != IGNORE_INDEX).sum()):
            loss = loss + count * F.cross_entropy(logits[-1][:-1], labels[1:])
            trained += count
    return run_of(model, loss / trained, logits)


def placed(batch: Batch) -> Iterator[tuple[int, int, Fragment]]:
    """Yield (pack, its start there, fragment) of all sequences."""
    for number, pack in enumerate(batch.fragments):
        start = 0
        for fragment in pack:
            yield number, start, fragment
            start += fragment.length


def own(data: IterablePackedDataset, fragment: Fragment, column: str) -> torch.Tensor:
    """Return a column of the fragment's row, cut to the fragment."""
    return torch.tensor(data.trace(fragment)["row"][column][fragment.start : fragment.stop])


def differences(ours: Run, theirs: Run) -> dict[str, float]:
    """Return the relative differences by norm; infinity instead of NaN, which ``max`` may pass over."""
    found = {
        name: float((getattr(ours, name) - value).norm() / value.norm())
        for name, value in vars(theirs).items()
    }
    return {name: math.inf if math.isnan(value) else value for name, value in found.items()}


def is_padding(batch: Batch) -> torch.Tensor:
    padding = torch.ones_like(batch.tokens, dtype=torch.bool)
    for pack, start, fragment in placed(batch):
        padding[pack, start : start + fragment.stop - fragment.start] = False
    return padding
