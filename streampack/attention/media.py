"""Models that read images, video or sound beside text: packs hold text only, and anything else is refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

_KINDS = ("image", "video", "audio")
_COLUMNS = ("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw", "input_features")
_WAY_OUT = "leave such samples out, or train on padded batches, one sample a row"


def position_axes(model: nn.Module) -> int | None:
    """Return how many axes of positions a model rotates its queries by (mRoPE), or None if there is one only.

    Text has the same position on each axis.

    >>> rotary = nn.Module()
    >>> rotary.mrope_section = [16, 24, 24]  # frequencies of each axis: time, height, width
    >>> position_axes(nn.Sequential(rotary))
    3
    """
    for module in model.modules():
        sections: Any = getattr(module, "mrope_section", None)
        if isinstance(sections, dict):  # for each type of layer
            sections = next(iter(sections.values()), None)
        if sections:
            return len(sections)
    return None


def media_tokens(model: nn.Module) -> tuple[int, ...]:
    """Return the token ids that stand for images, video or sound in a Hugging Face model, in ascending order."""
    names = [f"{kind}_token_{suffix}" for kind in _KINDS for suffix in ("id", "index")]
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    found = {getattr(config, name, None) for config in configs for name in names}
    return tuple(sorted(token for token in found if type(token) is int and token >= 0))


def require_text_columns(columns: Iterable[str]) -> None:
    """Check that a batch that is a dict has no column of images, video or sound.

    Raises:
        ValueError: if it has one.
    """
    if found := [name for name in _COLUMNS if name in columns]:
        raise ValueError(f"the batch has {found[0]!r}, and packs hold text only; {_WAY_OUT}")


def require_text(tokens: torch.Tensor, media: tuple[int, ...]) -> None:
    """Check that no token stands for an image, video or sound; one number is copied from the tokens' device.

    Args:
        tokens: ``[batch, max_seq_len]``.
        media: from `media_tokens`.

    Raises:
        ValueError: if one does.
    """
    stands = torch.isin(tokens, torch.tensor(media, device=tokens.device))
    if stands.any():
        token = int(tokens[stands][0])
        raise ValueError(
            f"the batch has the token {token}, which stands for an image, video or sound, and packs hold text only; "
            + _WAY_OUT
        )
