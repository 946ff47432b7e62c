"""Packs for the leak probe: random tokens, as long as a model's windows need, or with images of noise."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from streampack.attention.families import media_tokens, position_table
from streampack.attention.layout import untrained_batch
from streampack.attention.vision import FAMILIES, as_arguments
from streampack.packing.assemble import assemble
from streampack.packing.batch import Batch, stack_packs
from streampack.packing.media import MediaSample, media_of
from streampack.packing.model_positions import position_rule
from streampack.types import IGNORE_INDEX, Array, Fragment, Pack, Sample

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

IMAGES = ((1, 9), (0, 5), (2, 12), (1, 3))
"""Images and tokens of text of the samples of the probe's pack."""


def probe_length(model: nn.Module, *, max_length: int | None = None) -> int:
    """Return the length of a pack in which one sample is longer than the model's sliding windows and chunks.

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


def text_pack(
    max_seq_len: int, vocab_size: int, generator: torch.Generator, *, groups: bool
) -> tuple[Batch, list[int]]:
    """Make a pack of random tokens, with padding, and return it with the lengths of its samples."""
    if max_seq_len < MIN_PROBE_LENGTH:
        raise ValueError(
            f"max_seq_len is {max_seq_len}; the probe's pack needs {MIN_PROBE_LENGTH} tokens or more"
        )
    fractions = GROUP_FRACTIONS if groups else SAMPLE_FRACTIONS
    lengths = [max(1, int(fraction * min(max_seq_len, PROBE_LENGTH))) for fraction in fractions]
    lengths[fractions.index(max(fractions))] += max(0, max_seq_len - PROBE_LENGTH)
    tokens = torch.randint(0, vocab_size, (1, max_seq_len), generator=generator)
    return untrained_batch(tokens[0], lengths, GROUP_PARENTS if groups else None), lengths


def vocabulary_of(module: nn.Module | None) -> int:
    """Return the size of the first embedding, or 0 if there is none; but only the ids below those of images."""
    if module is None:
        return 0
    size = next((part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)), 0)
    return min(size, *media_tokens(module), size)


def image_pack(model: Any, *, vocab_size: int, generator: torch.Generator) -> tuple[Batch, list[int]]:
    """Make a pack of samples with and without images, with padding, and return it with the lengths of its samples."""
    config: Any = model.config
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"nothing is known of the images of {config.model_type}; known are {', '.join(FAMILIES)}"
        )
    rule = position_rule(config) if FAMILIES[config.model_type].axes else None
    rng = np.random.default_rng(0)
    samples: list[Sample] = []
    for images, text in IMAGES:
        ids = torch.randint(0, vocab_size, (text,), generator=generator).numpy()
        if not images:
            samples.append(Sample(ids, ids))
            continue
        media, counts = _example(config, images, rng)
        runs = [part for count in counts for part in (np.full(count, config.image_token_id), ids[:1])]
        tokens = np.concatenate([ids[: text // 2], *runs, ids[text // 2 :]])
        positions = None if rule is None else rule(tokens, media)
        labels = np.full(tokens.size, IGNORE_INDEX)
        samples.append(MediaSample(tokens, labels, media=media, positions=positions, images=images))
    lengths = [each.tokens.size for each in samples]
    size = sum(lengths) + 7
    tokens, labels = assemble(samples, max_seq_len=size)
    fragments = tuple(Fragment((number,), 0, length) for number, length in enumerate(lengths))
    return stack_packs([Pack(tokens, labels, tuple(lengths), fragments, media=media_of(samples))]), lengths


def with_other_images(pack: Batch, sample: int) -> Batch:
    """Return a batch of one pack in which the images of a sample are others."""
    assert pack.media is not None
    pixels = pack.media.tensors["pixel_values"].clone()
    start, stop = (sum(pack.media.rows["pixel_values"][0][: sample + i]) for i in range(2))
    pixels[start:stop] = 1 - pixels[start:stop]
    tensors = pack.media.tensors | {"pixel_values": pixels}
    return replace(pack, media=replace(pack.media, tensors=tensors))


def own_arguments(model: Any, pack: Batch, sample: int, tokens: torch.Tensor) -> dict[str, Any]:
    """Return the arguments beside its ``tokens`` for a sample of a pack alone, as the model's authors call it."""
    if pack.media is None or not pack.media.images[0][sample]:
        return {}
    own = {}
    for name, [rows] in pack.media.rows.items():
        start = sum(rows[:sample])
        own[name] = pack.media.tensors[name][start : start + rows[sample]]
    kinds = torch.eq(tokens, model.config.image_token_id).long()
    taken = {"mm_token_type_ids", "token_type_ids"} & inspect.signature(model.forward).parameters.keys()
    return as_arguments(model, own) | dict.fromkeys(taken, kinds)


def _example(config: Any, images: int, rng: np.random.Generator) -> tuple[dict[str, Array], list[int]]:
    """Make the media of a sample with this many small images of noise, and count the tokens of each.

    They are counted without the model: called past its hooks, a sharded one has no weights.
    """
    kind, vision = config.model_type, config.vision_config

    def noise(*shape: int) -> Array:
        return rng.standard_normal(shape, np.float32)

    growing = [2 * (1 + i) for i in range(images)]  # images of several sizes: 1 x 2, 2 x 2 tokens
    if FAMILIES[kind].axes:
        side = vision.spatial_merge_size
        grids = np.array([(1, count // 2 * side, 2 * side) for count in growing])
        width = 3 * vision.temporal_patch_size * vision.patch_size**2
        return {"pixel_values": noise(int(grids.prod(1).sum()), width), "image_grid_thw": grids}, growing
    if vision.model_type == "pixtral":
        side = vision.patch_size * getattr(config, "spatial_merge_size", 1)
        sizes = np.array([(count // 2 * side, 2 * side) for count in growing])
        return {"pixel_values": noise(images, 3, images * side, 2 * side), "image_sizes": sizes}, growing
    height, width = np.broadcast_to(vision.image_size, 2).tolist()
    rows, columns = (np.array([height, width]) // vision.patch_size).tolist()
    count = rows * columns
    if kind == "llava_onevision":
        # A single image is cut into tiles, and has tokens for each.
        tall, wide = min(config.image_grid_pinpoints, key=lambda sizes: sizes[0] * sizes[1])
        most = 1 + max(h * w // (height * width) for h, w in config.image_grid_pinpoints)
        if images == 1:
            count += tall // height * rows * (wide // width * columns + 1)
        else:
            count += 1  # a mark of a new line
        return {
            "pixel_values": noise(images, most, 3, height, width),
            "image_sizes": np.array([(tall, wide)] * images),
            "batch_num_images": np.array([images]),
        }, [count] * images
    if kind == "gemma3":
        count = config.mm_tokens_per_image
    elif kind == "internvl":
        count = round(count * config.downsample_ratio**2)
    elif kind == "llava":
        classes = vision.model_type == "clip_vision_model"
        count += int(classes) - int(config.vision_feature_select_strategy == "default")
    else:
        count //= config.scale_factor**2
    return {"pixel_values": noise(images, 3, height, width)}, [count] * images
