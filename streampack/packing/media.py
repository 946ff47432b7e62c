"""Media: what samples bring besides tokens, such as the pixels of their images, from samples to packs and batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from streampack.packing.columns import ids_from_column
from streampack.packing.groups import Group
from streampack.packing.settings import Packing
from streampack.types import Array, IntArray, Pack, Sample
from streampack.validation import require_positive

MOST_PADDED = 1 << 32
"""The most bytes of arrays of several sizes in a pack or batch, each padded to the largest: 1,000 icons beside one
large image would take 28 GB."""


class MediaSample(Sample):
    """A sample with media: arrays by name, whose rows lie end to end in packs and batches, as the tokens do.

    >>> seen = MediaSample([9, 9, 5], [-100, -100, 5], media={"pixel_values": np.zeros((8, 3), np.float32)})
    >>> seen.cost, seen.tokens.tolist()
    (8, [9, 9, 5])

    An encoder that makes them has the attribute ``reads_images = True``, unless packs have ``max_media``: Trainer then
    checks ranks and isolation with images.

    Args:
        tokens: ``[tokens]``, with as many tokens in place of each image as the model has features for it.
        labels: ``[tokens]``, unshifted; -100 at the tokens of images.
        media: arrays by the names under which the model's ``forward`` takes them, each ``[rows, ...]``.
        positions: ``[axes, tokens]``, by the model's own rule for this sample alone. None: they count from 0.
        cost: what the sample takes of ``max_media``. None: the rows of its largest array: patches of images in models
            of Qwen, images or tiles of them in most others.
        images: how many it has, for the ledger. None: the rows of its smallest array.

    Raises:
        ValueError: for arrays that do not fit.
    """

    media: dict[str, Array]
    positions: IntArray | None
    cost: int
    images: int

    def __new__(
        cls,
        tokens: Any,
        labels: Any,
        *,
        media: Mapping[str, Any],
        positions: Any = None,
        cost: int | None = None,
        images: int | None = None,
    ) -> MediaSample:
        """Check the arguments, which the class describes."""
        ids, targets = ids_from_column(tokens, "tokens"), ids_from_column(labels, "labels")
        try:
            own = {str(name): each.numpy() if torch.is_tensor(each) else each for name, each in media.items()}
            arrays = {name: np.array(values) for name, values in own.items()}
        except TypeError as error:  # as for bfloat16
            raise ValueError(f"media are no arrays of numpy: {error}; give float32") from None
        for name, values in arrays.items():
            if values.ndim == 0 or not len(values) or values.dtype.kind not in "fiub":
                raise ValueError(
                    f"the media {name!r} is an array {list(values.shape)} of {values.dtype}; give numbers, [rows, ...]"
                )
        if not arrays or not ids.size or targets.size != ids.size:
            raise ValueError(
                f"a sample with media has {ids.size} tokens, {targets.size} labels and {len(arrays)} arrays; give a "
                "label for each token, and at least one array (without any, it is a plain Sample)"
            )
        places = None if positions is None else np.array(positions)
        if places is not None and (
            places.dtype.kind not in "iu" or places.shape[1:] != (ids.size,) or places.min() < 0
        ):
            raise ValueError(
                f"positions are {list(places.shape)} of {places.dtype}, and the sample has {ids.size} tokens; give "
                f"whole numbers [axes, {ids.size}], from 0"
            )
        rows = [len(values) for values in arrays.values()]
        self = super().__new__(cls, ids, targets)
        self.media, self.positions = arrays, places
        self.cost = max(rows) if cost is None else require_positive(cost, "cost")
        self.images = min(rows) if images is None else require_positive(images, "images")
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple.__new__, (type(self), tuple(self)), self.__dict__  # it was checked and copied

    @property
    def nbytes(self) -> int:
        """Memory of the arrays."""
        return sum(values.nbytes for values in self.media.values())

    def cut(self, start: int, stop: int) -> MediaSample:
        """Return the sample itself; it has no parts."""
        assert (start, stop) == (0, self.tokens.size), "a sample with media is never split"
        return self


def has_room(sample: MediaSample, packing: Packing) -> bool:
    """Return whether a sample fits unsplit into an empty pack."""
    return sample.tokens.size <= packing.max_seq_len and sample.cost <= (packing.max_media or sample.cost)


def require_room(sample: MediaSample, packing: Packing) -> None:
    """Raise for a sample that fits into no pack, unless ``overlong`` drops it."""
    if packing.split_across_pack:
        raise ValueError("it has images, and such samples are never split; leave split_across_pack=True out")
    if packing.overlong != "drop" and not has_room(sample, packing):
        raise ValueError(
            f"it has {sample.tokens.size} tokens (max_seq_len is {packing.max_seq_len}) and {sample.images} image(s) "
            f"that take {sample.cost} rows (max_media is {packing.max_media}), and a sample with images is never cut; "
            "let the processor make them smaller, raise the limit, or leave such rows out with overlong='drop' or "
            "skip_bad"
        )


def media_of(sequences: Sequence[Sample]) -> tuple[MediaSample | None, ...]:
    """Return for each sequence of a pack itself if it has media, else None."""
    if any(isinstance(each, Group) for each in sequences):
        raise ValueError(
            "a pack would hold a group of segments and a sample with images, which are not packed together; give them "
            "two runs"
        )
    return tuple(each if isinstance(each, MediaSample) else None for each in sequences)


@dataclass(frozen=True, slots=True)
class BatchMedia:
    """The media of all sequences of a batch, end to end."""

    tensors: dict[str, torch.Tensor]  # by name, each [rows of all packs, ...]
    rows: dict[str, tuple[tuple[int, ...], ...]]  # by name, how many of those each sequence of each pack has
    images: tuple[tuple[int, ...], ...]  # of each sequence of each pack
    positions: torch.Tensor | None  # [axes, batch, max_seq_len] int64; None: those of `Batch.input_pos`

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> BatchMedia:
        """Return a copy with changed tensors."""
        positions = None if self.positions is None else change(self.positions)
        tensors = {name: change(tensor) for name, tensor in self.tensors.items()}
        return BatchMedia(tensors, self.rows, self.images, positions)


def stack_media(packs: Sequence[Pack], input_pos: torch.Tensor) -> BatchMedia | None:
    """Lay the media of packs end to end; None if no pack has any.

    Arrays of images of several sizes are padded with zeros at the ends of their axes.

    Args:
        packs: of a batch.
        input_pos: ``[batch, max_seq_len]``, the positions of text, which count from 0 in each sequence.

    Raises:
        ValueError: for arrays or positions that do not go together.
    """
    if all(pack.media is None for pack in packs):
        return None
    seen: list[Sequence[MediaSample | None]] = [pack.media or (None,) * len(pack.seq_lens) for pack in packs]
    found = [each for own in seen for each in own if each is not None]

    def of_each(count: Callable[[MediaSample], int]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(0 if each is None else count(each) for each in own) for own in seen)

    tensors, rows = {}, {}
    for name in dict.fromkeys(name for each in found for name in each.media):
        parts = [each.media[name] for each in found if name in each.media]
        tensors[name] = torch.from_numpy(_end_to_end(name, parts))
        rows[name] = of_each(partial(_rows, name))
    return BatchMedia(tensors, rows, of_each(attrgetter("images")), _positions(packs, seen, input_pos))


def _rows(name: str, sample: MediaSample) -> int:
    return len(sample.media.get(name, ()))


def _positions(
    packs: Sequence[Pack], seen: Sequence[Sequence[MediaSample | None]], input_pos: torch.Tensor
) -> torch.Tensor | None:
    axes = {0 if each.positions is None else len(each.positions) for own in seen for each in own if each}
    if len(axes) > 1:
        raise ValueError(
            f"samples with images have positions of {sorted(axes)} axes; use encoders of one model"
        )
    if axes == {0}:
        return None
    positions = input_pos.expand(*axes, *input_pos.shape).clone()
    for number, (pack, own) in enumerate(zip(packs, seen, strict=True)):
        starts = accumulate(pack.seq_lens, initial=0)
        for each, start, length in zip(own, starts, pack.seq_lens, strict=False):
            if each is not None and each.positions is not None:
                padding = each.positions.max() + 1 + np.arange(length - each.tokens.size)
                whole = np.concatenate([each.positions, np.tile(padding, (*axes, 1))], 1)
                positions[:, number, start : start + length] = torch.from_numpy(whole)
    return positions


def _end_to_end(name: str, parts: Sequence[Array]) -> Array:
    if len({(part.dtype, part.shape[1:]) for part in parts}) == 1:
        return np.concatenate(parts)
    rows, kind = [len(part) for part in parts], np.result_type(*parts)
    shapes = sorted({part.shape[1:] for part in parts})
    # Rows of other widths are no images of other sizes, but other things, such as patches of another processor.
    if len(set(map(len, shapes))) > 1 or (len(shapes[0]) < 2 and len(shapes) > 1):
        raise ValueError(
            f"rows of the media {name!r} have the shapes {shapes}; use one encoder, and of one model"
        )
    shape = [max(sizes) for sizes in zip(*shapes, strict=True)]
    if (size := math.prod((sum(rows), *shape)) * kind.itemsize) > MOST_PADDED:
        raise ValueError(
            f"{name!r} of {len(parts)} samples, padded to the largest of a batch, would take {size:,} bytes, and have "
            f"{sum(part.nbytes for part in parts):,}; set max_media, or let the processor make large images smaller"
        )
    whole = np.zeros((sum(rows), *shape), kind)
    for part, start in zip(parts, accumulate(rows, initial=0), strict=False):
        whole[(slice(start, start + len(part)), *(slice(size) for size in part.shape[1:]))] = part
    return whole
