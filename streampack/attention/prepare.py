"""Prepare models to keep a pack's sequences apart, and make masks on the device of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask

from streampack.attention.backends import auto_backends
from streampack.attention.calls import PREPARED
from streampack.attention.layout import Packed, as_packed, visible_of
from streampack.attention.masks import dense_mask, flex_mask
from streampack.attention.varlen import compute_dtype
from streampack.distributed.ranks import model_parallel_warning
from streampack.validation import require, warn_user

ATTENTIONS = ("auto", "dense", "sdpa", "flex", "varlen", "flash")
"""Values of ``attention`` in `prepare_model_for_packing` and in configs; ``"sdpa"`` is another name of ``"dense"``."""

_MASKS: dict[str, Callable[..., torch.Tensor | BlockMask]] = {"dense": dense_mask, "flex": flex_mask}


class Inputs(Protocol):
    """The result of `prepare_model_for_packing`: makes the arguments of the prepared model's ``forward``."""

    @property
    def attention(self) -> str:
        """The backend: ``"dense"``, ``"flex"``, ``"varlen"`` or ``"flash"``."""

    @property
    def summary(self) -> str:
        """One line to print: the backend, dtype and device, and why ``"auto"`` refused each better backend."""

    def __call__(self, batch: Packed | Mapping[str, Any]) -> dict[str, Any]:
        """Return keyword arguments for a batch, on its device.

        A dict may come from any collator that says where its sequences begin: see `as_packed`.
        """

    def require_length(self, max_seq_len: int) -> None:
        """Raise a ValueError if the model cannot take packs of ``max_seq_len`` tokens. Every call checks this too."""

    def require_tokens(self, tokens: torch.Tensor) -> None:
        """Raise a ValueError for ids that the model cannot embed, if they are on the CPU. Every call checks this too.

        A number read back from another device would hold up the host, so give the ids before they are moved there.
        """

    def why_not_shared(self, max_seq_len: int) -> str | None:
        """Return why the model cannot take packs of ``max_seq_len`` tokens with shared prefixes, or None if it can."""


def prepare_model_for_packing(model: nn.Module, *, attention: str = "auto") -> Inputs:
    """Make a torchtune or Hugging Face model keep a pack's sequences apart, or raise if it cannot.

    Changes the attention function of ``model``, and returns a function from a packed batch to the model's arguments.

    >>> from torchtune.models.llama3 import llama3
    >>> from streampack import IterablePackedDataset, collate_packed
    >>> rows = [{"tokens": [7, 8, 9], "labels": [7, 8, 9]}, {"tokens": [4, 5], "labels": [4, 5]}]
    >>> batch = collate_packed(list(IterablePackedDataset(rows, max_seq_len=6)))
    >>> model = llama3(vocab_size=16, num_layers=1, num_heads=2, num_kv_heads=1, embed_dim=8, max_seq_len=6)
    >>> inputs = prepare_model_for_packing(model)
    >>> inputs.attention, model(**inputs(batch)).shape
    ('varlen', torch.Size([1, 6, 16]))
    >>> inputs.summary
    'attention=varlen, float32 on cpu'

    ``inputs`` takes a `Batch`, or a dict such as `FlatteningCollator` returns, whose ``labels`` it passes on:
    ``loss = model(**inputs(batch)).loss``. Called without ``inputs``, the model computes what it did before. A model
    may be prepared again; the last call counts.

    Args:
        model: the model, on the device and in the dtype in which it will train, and under autocast if it trains (or is
            sharded to compute) in another dtype than that of its weights. LoRA, activation checkpointing,
            ``torch.compile`` and FSDP2 may be applied before or after. A Hugging Face model of an unknown family
            is tried when its first inputs are made.
        attention: ``"dense"``, a boolean mask, works anywhere; time and memory grow with ``max_seq_len ** 2``.
            ``"sdpa"``, torchtune's and transformers' name for it, is the same. ``"flex"`` skips blocks of tokens that
            do not attend to one another; it trains on CUDA only (on a CPU, torch has no backward pass for it).
            ``"varlen"`` needs no mask: on CUDA it is torch's varlen flash attention, for 16-bit floats only; on a CPU
            it computes one sequence at a time. ``"flash"`` is the same with the flash-attn package, on CUDA only.
            ``"auto"`` is the first of varlen, flex and dense that supports the model; on a CPU, of varlen and dense.

    Raises:
        ValueError: for an unknown ``attention``, and for a model whose sequences would see one another; the
            message says why and what to do.
        ImportError: if ``attention="flash"`` and no flash-attn is installed.
    """
    attention = _backend(attention, ATTENTIONS)
    if warning := model_parallel_warning(model):
        warn_user(warning)
    # Wrappers such as PEFT's hide the model, so the first module of either library decides.
    for module in model.modules():
        roots = {cls.__module__.partition(".")[0] for cls in type(module).__mro__}
        if name := next((name for name in ("torchtune", "transformers") if name in roots), None):
            return _prepare(import_module(f"streampack.attention.{name}"), model, attention)
    raise ValueError(
        f"{type(model).__name__} is not a torchtune or Hugging Face model, so its attention is unknown; "
        "give it the mask of streampack.make_mask(batch), or call streampack.attention.varlen_attention in it"
    )


def _prepare(library: Any, model: nn.Module, attention: str) -> Inputs:
    """Set the first backend that computes a model of a library; ``attention`` names one, or is ``"auto"``."""
    inner = library.find(model)
    refused: dict[str, str] = {}
    weights = next(inner.parameters())
    for backend in auto_backends(weights.device) if attention == "auto" else (attention,):
        if why := library.why_not(inner, backend, chosen=attention != "auto"):
            refused[backend] = why
            continue
        library.set_up(inner, backend)
        dtype = str(compute_dtype(weights.device, weights.dtype)).removeprefix("torch.")
        reasons = (f"; {name} refused: {why}" for name, why in refused.items())
        summary = f"attention={backend}, {dtype} on {weights.device.type}{''.join(reasons)}"
        PREPARED[inner] = partial(library.make_inputs, attention=backend, summary=summary)
        return cast(Inputs, PREPARED[inner](inner))
    others = [repr(name) for name in ("dense", "flex", "varlen") if library.why_not(inner, name) is None]
    raise ValueError(
        "; ".join(f"attention={backend!r} will not do: {why}" for backend, why in refused.items())
        + f"; use {' or '.join(others) or 'padded batches, one sample a row'}"
    )


def prepared_inputs(model: nn.Module) -> Inputs:
    """Return the inputs of a model as it was prepared last; prepare it if it was not yet."""
    for module in model.modules():
        if module in PREPARED:
            return cast(Inputs, PREPARED[module](module))
    return prepare_model_for_packing(model)


def make_mask(batch: Packed | Mapping[str, Any], *, attention: str = "auto") -> torch.Tensor | BlockMask:
    """Make the ``mask`` argument of a torchtune model for a packed batch, on the batch's device.

    ``"dense"`` (or ``"sdpa"``) is a boolean tensor and works anywhere; ``"flex"`` is a `BlockMask`, which needs CUDA to
    train (on a CPU, torch's flex attention has no backward). ``"auto"`` is flex on CUDA and dense elsewhere.
    `prepare_model_for_packing` has faster backends, and supports models for which a mask is not enough.

    >>> from streampack import IterablePackedDataset, collate_packed
    >>> rows = [{"tokens": [7, 8, 9], "labels": [7, 8, 9]}, {"tokens": [4, 5], "labels": [4, 5]}]
    >>> batch = collate_packed(list(IterablePackedDataset(rows, max_seq_len=6)))
    >>> make_mask(batch).shape
    torch.Size([1, 6, 6])

    Raises:
        ValueError: for an unknown ``attention``.
    """
    attention = _backend(attention, ("auto", "dense", "sdpa", "flex"))
    batch = as_packed(batch)
    if attention == "auto":
        attention = "flex" if batch.tokens.device.type == "cuda" else "dense"
    size, visible = batch.tokens.shape[1], visible_of(batch)
    return _MASKS[attention](batch.seq_lens, max_seq_len=size, visible=visible)


def _backend(attention: str, known: tuple[str, ...]) -> str:
    """Check a value of ``attention``, and return the backend that it names or ``"auto"``."""
    require(attention, "attention", known)
    return "dense" if attention == "sdpa" else attention
