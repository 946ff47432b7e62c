"""Vision-language models on packs with images: which families take them, and in which arguments.

The tower keeps transformers' own attention, and takes the images of a pack as it takes those of one sample: apart, by
their grid or by their rows. The text's masks are ours, made from `Batch.seq_lens`; positions of several axes are only
positions. Tests show for each family that a sample has the logits and gradients that it has alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from streampack.attention.layout import document_ids
from streampack.packing.batch import Batch
from streampack.packing.media import BatchMedia

if TYPE_CHECKING:
    from streampack.attention.layout import Packed


@dataclass(frozen=True)
class Family:
    """How a family takes images."""

    arrays: tuple[str, ...] = ("pixel_values",)  # that its ``forward`` needs
    optional: tuple[str, ...] = ()
    axes: int = 0  # of its positions; 0: they count from 0, as those of text
    both_ways: bool = False  # whether the tokens of an image see later ones
    of_texts: bool = False  # whether arrays have a first axis for texts


_GRID = Family(("pixel_values", "image_grid_thw"), axes=3)
_MASKED = Family(optional=("pixel_attention_mask",), of_texts=True)
FAMILIES: dict[str, Family] = {
    "gemma3": Family(both_ways=True),
    "idefics3": _MASKED,
    "internvl": Family(),
    "llava": Family(optional=("image_sizes",)),
    "llava_onevision": Family(("pixel_values", "image_sizes", "batch_num_images")),
    "mistral3": Family(("pixel_values", "image_sizes")),
    "qwen2_5_vl": _GRID,
    "qwen2_vl": _GRID,
    "qwen3_vl": _GRID,
    "smolvlm": _MASKED,
}
"""Families, by the ``model_type`` of the model's own config, for which a test shows that images are kept apart."""

WAY_OUT = "leave such samples out, or train on padded batches, one sample a row"


def text_of(batch: Packed, config: Any) -> torch.Tensor:
    """Check that a model can take a batch's images, and return the batch's ids, on the CPU with 0 in place of images'.

    Whose tokens are whose is looked at on the CPU only, because a number from another device would hold up the host.
    """
    if not isinstance(batch, Batch) or batch.media is None:
        return batch.tokens
    family, media = _require_known(config, batch.media.tensors), batch.media
    given = 0 if media.positions is None else len(media.positions)
    if given != family.axes:
        raise ValueError(
            f"the samples have positions of {given} axes (0: none), and {config.model_type} takes {family.axes}; give "
            "the encoder this model or its config (VisionEncoder(processor, model=...)), or MediaSample what the "
            "model's own get_rope_index returns"
        )
    if batch.tokens.device.type != "cpu":
        return batch.tokens
    seen = batch.tokens == config.image_token_id
    _require_own_tokens(config, seen, batch.seq_lens, media)
    return batch.tokens.masked_fill(seen, 0)


def _require_known(config: Any, names: Mapping[str, object]) -> Family:
    """Return the family of a config, after checking the names of arrays."""
    kind = config.model_type
    if (family := FAMILIES.get(kind)) is None:
        raise ValueError(
            f"the batch has images, and nothing shows that a packed {kind} model keeps the images of samples apart "
            f"(known are {', '.join(FAMILIES)}); {WAY_OUT}"
        )
    if missing := [name for name in family.arrays if name not in names]:
        raise ValueError(
            f"the samples' media lack {missing[0]!r}, which {kind} takes beside {', '.join(names)}"
        )
    if unknown := names.keys() - {*family.arrays, *family.optional}:
        raise ValueError(
            f"the samples' media have {sorted(unknown)[0]!r}, and {kind} takes images only, as "
            f"{', '.join(family.arrays)}; {WAY_OUT}"
        )
    return family


def _require_own_tokens(config: Any, seen: torch.Tensor, seq_lens: torch.Tensor, media: BatchMedia) -> None:
    """Check how many tokens of images, ``seen`` ``[batch, max_seq_len]`` bool, each sample has.

    The model looks at their sum only, and fills them in order, so one too many would take another sample's feature. How
    many they must be is said by the sizes of the sample's images, or where all rows of pixels become equally many, by
    their proportion; of llava_onevision, whether there are any.
    """
    ids = document_ids(seq_lens, max_seq_len=seen.shape[1])
    # Of each sample, and of each pack's padding.
    counts = {name: [count for own in packs for count in (*own, 0)] for name, packs in media.rows.items()}
    rows, sizes = counts["pixel_values"], [len(own) + 1 for own in media.images]
    held = [n for i, size in enumerate(sizes) for n in ids[i][seen[i]].bincount(minlength=size).tolist()]

    def sums(name: str, values: torch.Tensor) -> list[int]:
        return [int(own.sum()) for own in torch.split(values, counts[name])]

    vision, patches, wanted = config.vision_config, rows, held
    if "image_grid_thw" in counts:
        patches = sums("image_grid_thw", media.tensors["image_grid_thw"].prod(1))
        wanted = [count // vision.spatial_merge_size**2 for count in patches]
    elif vision.model_type == "pixtral":
        side = vision.patch_size * getattr(config, "spatial_merge_size", 1)
        wanted = sums("image_sizes", (media.tensors["image_sizes"] // side).prod(1))
    elif "image_sizes" not in counts:
        wanted = [-(-count * sum(held) // max(1, sum(rows))) for count in rows]
    places = [(pack, sample) for pack, size in enumerate(sizes) for sample in range(size)]
    for place, *each in zip(places, held, wanted, rows, patches, strict=True):
        tokens, right, count, own = each
        if tokens != right or count != own or bool(tokens) != bool(count):
            raise ValueError(
                f"sample {place[1]} of pack {place[0]} has tokens of images: {tokens}, where its images need {right}, "
                f"and {count} rows of pixels, where their sizes say {own}; it would take the images of another, so "
                "mend its encoder"
            )


def media_inputs(model: Any, batch: Packed) -> dict[str, Any]:
    """Return a batch's images as arguments of a model, and ``position_ids`` where they have several axes."""
    if not isinstance(batch, Batch) or batch.media is None:
        return {}
    found = as_arguments(model, batch.media.tensors)
    return found if batch.media.positions is None else found | {"position_ids": batch.media.positions}


def as_arguments(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return arrays as a model's ``forward`` takes them: in its dtype, with the axis for texts where it has one."""
    of_texts = FAMILIES[model.config.model_type].of_texts
    found = {
        name: each.to(model.dtype) if each.is_floating_point() else each for name, each in tensors.items()
    }
    return {name: each[None] if of_texts else each for name, each in found.items()}


def image_blocks(batch: Packed, config: Any) -> torch.Tensor | None:
    """Number the runs of image tokens as `dense_mask` takes them; None if they see only what is before them."""
    family = FAMILIES.get(config.model_type)
    if family is None or not family.both_ways or not isinstance(batch, Batch) or batch.media is None:
        return None
    seen = batch.tokens == config.image_token_id
    starts = seen.clone()
    starts[:, 1:] &= ~seen[:, :-1]
    return torch.where(seen, starts.cumsum(1) - 1, -1)
