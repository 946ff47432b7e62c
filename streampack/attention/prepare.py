"""What a model's attention needs to keep a pack's sequences apart, made on the batch's device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask

from streampack.attention.dense import dense_mask
from streampack.attention.flex import flex_mask
from streampack.attention.mappings import Packed, packed_of
from streampack.streaming.consumers import model_parallel_mesh
from streampack.validation import require, warn_user

ATTENTIONS = ("auto", "dense", "flex", "varlen", "flash")
"""The words that `prepare_model_for_packing` and the config's ``attention`` know."""

_MASKS: dict[str, Callable[..., torch.Tensor | BlockMask]] = {"dense": dense_mask, "flex": flex_mask}


class Inputs(Protocol):
    """What `prepare_model_for_packing` gives: a batch's arguments for the prepared model's ``forward``."""

    @property
    def attention(self) -> str:
        """The backend: ``"dense"``, ``"flex"``, ``"varlen"`` or ``"flash"``."""

    def __call__(self, batch: Packed | Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments, on the batch's device, which is the model's.

        A dict may come from any collator that says where its sequences begin: see `packed_of`.
        """

    def require_length(self, max_seq_len: int) -> None:
        """Raise a ValueError if the model cannot take packs of so many tokens; every call does this first."""


def prepare_model_for_packing(model: nn.Module, *, attention: str = "auto") -> Inputs:
    """Make a model of torchtune's or Hugging Face's keep a pack's sequences apart, or refuse it.

    It sets on the model what must be set, and gives what turns a packed batch into the model's arguments.

    >>> from torchtune.models.llama3 import llama3
    >>> from streampack import IterablePackedDataset, collate_packed
    >>> rows = [{"tokens": [7, 8, 9], "labels": [7, 8, 9]}, {"tokens": [4, 5], "labels": [4, 5]}]
    >>> batch = collate_packed(list(IterablePackedDataset(rows, max_seq_len=6)))
    >>> model = llama3(vocab_size=16, num_layers=1, num_heads=2, num_kv_heads=1, embed_dim=8, max_seq_len=6)
    >>> inputs = prepare_model_for_packing(model)
    >>> inputs.attention, model(**inputs(batch)).shape
    ('varlen', torch.Size([1, 6, 16]))

    ``inputs`` takes a `Batch`, or a dict such as `FlatteningCollator` returns, whose ``labels`` it hands on:
    ``loss = model(**inputs(batch)).loss``. Without ``inputs`` the model computes what it did before. Preparing it twice
    is harmless.

    Args:
        model: as it will train: on its device, in its type; LoRA, activation checkpointing, ``torch.compile``
            and FSDP2 may have been applied, or follow.
        attention: ``"dense"``, a boolean mask, works anywhere, and time and memory grow with ``max_seq_len ** 2``.
            ``"flex"`` skips what a mask hides; CUDA only (on a CPU, torch has no backward pass for it).
            ``"varlen"`` has no mask: torch's own flash attention over sequences laid end to end; 16-bit floats
            on CUDA, anything on a CPU. ``"flash"`` is the same by the flash-attn package. ``"auto"`` is the
            first of varlen, flex and dense that fits the model and its device.

    Raises:
        ValueError: for an unknown ``attention``, and for a model whose sequences would see one another; the
            message says why and what to do.
        ImportError: if ``attention="flash"`` and there is no flash-attn.
    """
    require(attention, "attention", ATTENTIONS)
    if shared := model_parallel_mesh(model):
        warn_user(shared)
    for module in model.modules():
        roots = {cls.__module__.partition(".")[0] for cls in type(module).__mro__}
        if "torchtune" in roots:
            from streampack.attention.torchtune import prepare as prepare_torchtune

            return prepare_torchtune(model, attention=attention)
        if "transformers" in roots:
            from streampack.attention.transformers import prepare as prepare_transformers

            return prepare_transformers(model, attention=attention)
    raise ValueError(
        f"{type(model).__name__} is no model of torchtune's or Hugging Face's, so nothing is known of its attention; "
        "give it a mask of streampack.make_mask(batch), or call streampack.attention.varlen_attention in it"
    )


def make_mask(batch: Packed | Mapping[str, Any], *, attention: str = "auto") -> torch.Tensor | BlockMask:
    """The ``mask`` argument of a torchtune model for a packed batch; call it where the batch has arrived.

    ``"dense"`` is a boolean tensor and works anywhere; ``"flex"`` is a `BlockMask`, which needs CUDA to
    train (on a CPU, torch's flex attention has no backward). ``"auto"`` is flex on CUDA and dense elsewhere.
    `prepare_model_for_packing` knows faster ways, and models for which this is not enough.

    >>> from streampack import IterablePackedDataset, collate_packed
    >>> rows = [{"tokens": [7, 8, 9], "labels": [7, 8, 9]}, {"tokens": [4, 5], "labels": [4, 5]}]
    >>> batch = collate_packed(list(IterablePackedDataset(rows, max_seq_len=6)))
    >>> make_mask(batch).shape
    torch.Size([1, 6, 6])

    Raises:
        ValueError: for an unknown ``attention``.
    """
    require(attention, "attention", ("auto", *_MASKS))
    batch = packed_of(batch)
    if attention == "auto":
        attention = "flex" if batch.tokens.device.type == "cuda" else "dense"
    return _MASKS[attention](batch.seq_lens, max_seq_len=batch.tokens.shape[1])
