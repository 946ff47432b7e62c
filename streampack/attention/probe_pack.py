"""Packs for the leak probe."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

from streampack.attention.families import position_table
from streampack.packing.batch import Batch, stack_packs
from streampack.packing.groups import paths_of
from streampack.types import IGNORE_INDEX, Fragment, Pack, PackGroups

PROBE_LENGTH = 256
"""Tokens of the pack for a model without windows: two blocks of a block mask."""
MIN_PROBE_LENGTH = 8
MAX_PROBE_LENGTH = 1 << 14
"""Windows that need a longer pack are not probed."""
SAMPLE_FRACTIONS = (0.3, 0.0, 0.4, 0.2)
"""Lengths of the samples as fractions of 256 tokens; 0 is a sample of one token. The rest is padding."""
GROUP_FRACTIONS, GROUP_PARENTS = (0.3, 0.2, 0.1, 0.15, 0.1), (-1, 0, 0, 2, -1)
"""A pack with a group: a prompt, two answers, a third that continues the second; then a sample of its own."""
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


def make_pack(
    max_seq_len: int, vocab_size: int, generator: torch.Generator, *, groups: bool = False
) -> Batch:
    """Make a pack of four samples and padding, with random tokens; or, with ``groups``, one of a group and a sample.

    The first 256 tokens are divided as `SAMPLE_FRACTIONS` or `GROUP_FRACTIONS` says; all further tokens belong to the
    longest sample.

    Raises:
        ValueError: if ``max_seq_len`` is below 8.
    """
    if max_seq_len < MIN_PROBE_LENGTH:
        raise ValueError(
            f"max_seq_len is {max_seq_len}; the probe's pack needs {MIN_PROBE_LENGTH} tokens or more"
        )
    fractions = GROUP_FRACTIONS if groups else SAMPLE_FRACTIONS
    lengths = [max(1, int(fraction * min(max_seq_len, PROBE_LENGTH))) for fraction in fractions]
    lengths[fractions.index(max(fractions))] += max(0, max_seq_len - PROBE_LENGTH)
    tokens = torch.randint(0, vocab_size, (1, max_seq_len), generator=generator)
    return pack_of(tokens, lengths, parents=GROUP_PARENTS if groups else None)


def pack_of(tokens: torch.Tensor, lengths: list[int], *, parents: tuple[int, ...] | None = None) -> Batch:
    """Return ``tokens`` ``[1, max_seq_len]`` as a batch of one pack: samples of these lengths, then padding.

    Args:
        tokens: on the model's device.
        lengths: of the samples.
        parents: for each sample the one that it continues, or -1; None: no sample continues another.
    """
    ids = tokens[0].numpy(force=True)
    groups = None
    if parents is not None:
        groups = PackGroups(parents, (IGNORE_INDEX,) * len(lengths), {}, {})
    fragments = tuple(Fragment((number,), 0, length) for number, length in enumerate(lengths))
    pack = Pack(ids, np.full(ids.size, IGNORE_INDEX), tuple(lengths), fragments, groups=groups)
    return stack_packs([pack]).to(tokens.device)


def first_pack(batch: Batch) -> Batch:
    """Return the first pack of a batch, as a batch.

    Raises:
        ValueError: if it holds no sample.
    """
    if not batch.fragments or not batch.fragments[0]:
        raise ValueError("the first pack of the batch holds no sample; give another batch, or none")
    groups = batch.groups
    if groups is not None:
        groups = replace(groups.map(lambda tensor: tensor[:1]), parents=groups.parents[:1])
    return Batch(
        batch.tokens[:1],
        batch.labels[:1],
        batch.input_pos[:1],
        batch.seq_lens[:1],
        batch.fragments[:1],
        groups,
    )


def pack_alone(pack: Batch, tokens: torch.Tensor) -> Batch:
    """Put one sample into a pack of its own, of the same length as ``pack``."""
    rest = pack.tokens.shape[1] - tokens.shape[1]
    return pack_of(nn.functional.pad(tokens, (0, rest)), [tokens.shape[1]])


def sample_slices(pack: Batch) -> list[slice]:
    """Return the slice of tokens that each sample has in a batch of one pack, its padding included."""
    ends = accumulate((fragment.length for fragment in pack.fragments[0]), initial=0)
    return [slice(start, stop) for start, stop in pairwise(ends)]


def sample_paths(pack: Batch) -> list[list[int]]:
    """Return for each sample of a batch of one pack the samples that it continues, from the root on, and itself."""
    if pack.groups is None:
        return [[number] for number in range(len(pack.fragments[0]))]
    return paths_of(pack.groups.parents[0])
