"""Packs for the leak probe."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from streampack.attention.positions import position_table
from streampack.packing.batch import Batch
from streampack.types import IGNORE_INDEX, Fragment

PROBED = 256  # tokens of the pack for a model without windows: two blocks of a block mask
SHORTEST = 8
SHARES = (
    0.3,
    0.0,
    0.4,
    0.2,
)  # lengths of samples as a fraction of 256; 0: a single token, the rest is padding
LONGEST_PROBE = 1 << 14  # tokens; windows that need more are not probed
WINDOWS = ("sliding_window", "attention_chunk_size", "window_size", "sliding_window_size")


def probe_length(model: nn.Module, *, most: int | None = None) -> int:
    """Return the length of a pack in which one sample is longer than the model's sliding windows and chunks.

    >>> from torch import nn
    >>> probe_length(nn.Linear(2, 2))
    256

    Without windows that is 256. Windows of more than 16,128 tokens are ignored, because the pack would take too much
    memory. The length is at most the model's number of positions and ``most``, and at least 8.
    """
    configs: list[Any] = [module.config for module in model.modules() if hasattr(module, "config")]
    texts = [config.get_text_config() for config in configs if hasattr(config, "get_text_config")]
    holders = [*configs, *texts, *model.modules()]
    widths = [getattr(holder, name, None) for holder in holders for name in WINDOWS]
    lengths = [PROBED + width for width in widths if type(width) is int and width > 0]
    length = max((length for length in lengths if length <= LONGEST_PROBE), default=PROBED)
    limits = [most, position_table(model)]
    limits += [
        getattr(part, "max_seq_len", None) for part in model.modules()
    ]  # torchtune's decoders, rotary caches
    limits += [getattr(text, "max_position_embeddings", None) for text in texts[:1]]
    return max(SHORTEST, min([length, *(limit for limit in limits if type(limit) is int and limit > 0)]))


def make_pack(max_seq_len: int, vocab_size: int, generator: torch.Generator) -> Batch:
    """Make a pack of four samples and padding with random tokens; tokens beyond 256 belong to the longest sample.

    Raises:
        ValueError: if ``max_seq_len`` is below 8.
    """
    if max_seq_len < SHORTEST:
        raise ValueError(f"max_seq_len is {max_seq_len}; the probe's pack needs {SHORTEST} tokens or more")
    lengths = [max(1, int(share * min(max_seq_len, PROBED))) for share in SHARES]
    lengths[SHARES.index(max(SHARES))] += max(0, max_seq_len - PROBED)
    return pack_of(torch.randint(0, vocab_size, (1, max_seq_len), generator=generator), lengths)


def pack_of(tokens: torch.Tensor, lengths: list[int]) -> Batch:
    """Cut ``tokens`` ``[1, max_seq_len]`` into samples of these lengths and padding."""
    segments = [*lengths, tokens.shape[1] - sum(lengths)]
    positions = torch.cat([torch.arange(length) for length in segments])[None]
    return Batch(
        tokens=tokens,
        labels=torch.full_like(tokens, IGNORE_INDEX),
        input_pos=positions.to(tokens.device),
        seq_lens=torch.tensor([segments], dtype=torch.int32, device=tokens.device),
        fragments=(tuple(Fragment((number,), 0, length) for number, length in enumerate(lengths)),),
    )


def first_pack(batch: Batch) -> Batch:
    """Return the first pack of a batch, as a batch.

    Raises:
        ValueError: if it holds no sample.
    """
    if not batch.fragments or not batch.fragments[0]:
        raise ValueError("the first pack of the batch holds no sample; give another batch, or none")
    return Batch(
        batch.tokens[:1], batch.labels[:1], batch.input_pos[:1], batch.seq_lens[:1], batch.fragments[:1]
    )


def pack_alone(pack: Batch, tokens: torch.Tensor) -> Batch:
    """Put one sample into a pack of its own, of the same length as ``pack``."""
    rest = pack.tokens.shape[1] - tokens.shape[1]
    return pack_of(nn.functional.pad(tokens, (0, rest)), [tokens.shape[1]])


def rows_of(pack: Batch) -> list[slice]:
    """Return the place of each sample in a single pack."""
    ends = accumulate((fragment.stop - fragment.start for fragment in pack.fragments[0]), initial=0)
    return [slice(start, stop) for start, stop in pairwise(ends)]
