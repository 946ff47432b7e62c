"""Packs for the leak probe."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from streampack.attention.positions import position_table
from streampack.packing.batch import Batch
from streampack.types import IGNORE_INDEX, Fragment

PROBE_LENGTH = 256
"""Tokens of the pack for a model without windows: two blocks of a block mask."""
MIN_PROBE_LENGTH = 8
MAX_PROBE_LENGTH = 1 << 14
"""Windows that need a longer pack are not probed."""
SAMPLE_FRACTIONS = (0.3, 0.0, 0.4, 0.2)
"""Lengths of the samples as fractions of 256 tokens; 0 is a sample of one token. The rest is padding."""
WINDOW_SETTINGS = ("sliding_window", "attention_chunk_size", "window_size", "sliding_window_size")
"""Attributes of models and configs that hold the length of a window or chunk, in tokens."""


def probe_length(model: nn.Module, *, max_length: int | None = None) -> int:
    """Return the length of a pack in which one sample is longer than the model's sliding windows and chunks.

    >>> from torch import nn
    >>> probe_length(nn.Linear(2, 2))
    256

    For a model without windows it is 256. Windows of more than 16,128 tokens are ignored, because the pack would take
    too much memory. The length is at most the model's number of positions and ``max_length``, and at least 8.
    """
    configs: list[Any] = [module.config for module in model.modules() if hasattr(module, "config")]
    texts = [config.get_text_config() for config in configs if hasattr(config, "get_text_config")]
    holders = [*configs, *texts, *model.modules()]
    widths = [getattr(holder, name, None) for holder in holders for name in WINDOW_SETTINGS]
    lengths = [PROBE_LENGTH + width for width in widths if type(width) is int and width > 0]
    length = max((length for length in lengths if length <= MAX_PROBE_LENGTH), default=PROBE_LENGTH)
    limits = [max_length, position_table(model)]
    # torchtune's decoders and rotary caches have a max_seq_len.
    limits += [getattr(part, "max_seq_len", None) for part in model.modules()]
    limits += [getattr(text, "max_position_embeddings", None) for text in texts[:1]]
    return max(
        MIN_PROBE_LENGTH, min([length, *(limit for limit in limits if type(limit) is int and limit > 0)])
    )


def make_pack(max_seq_len: int, vocab_size: int, generator: torch.Generator) -> Batch:
    """Make a pack of four samples and padding, with random tokens.

    The first 256 tokens are divided as `SAMPLE_FRACTIONS` says; all further tokens belong to the longest sample.

    Raises:
        ValueError: if ``max_seq_len`` is below 8.
    """
    if max_seq_len < MIN_PROBE_LENGTH:
        raise ValueError(
            f"max_seq_len is {max_seq_len}; the probe's pack needs {MIN_PROBE_LENGTH} tokens or more"
        )
    lengths = [max(1, int(fraction * min(max_seq_len, PROBE_LENGTH))) for fraction in SAMPLE_FRACTIONS]
    lengths[SAMPLE_FRACTIONS.index(max(SAMPLE_FRACTIONS))] += max(0, max_seq_len - PROBE_LENGTH)
    return pack_of(torch.randint(0, vocab_size, (1, max_seq_len), generator=generator), lengths)


def pack_of(tokens: torch.Tensor, lengths: list[int]) -> Batch:
    """Return ``tokens`` ``[1, max_seq_len]`` as a batch of one pack: samples of these lengths, then padding."""
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


def sample_slices(pack: Batch) -> list[slice]:
    """Return the slice of tokens that each sample has in a batch of one pack."""
    ends = accumulate((fragment.stop - fragment.start for fragment in pack.fragments[0]), initial=0)
    return [slice(start, stop) for start, stop in pairwise(ends)]
