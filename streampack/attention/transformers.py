"""Hugging Face models on packed batches: prepare the model once, make the arguments of each forward pass.

Samples are kept apart in one of three ways:

- ``dense`` and ``flex``: transformers makes a packed mask where ``position_ids`` restart, provided that the call has
  neither a cache nor an ``attention_mask``.
- ``dense`` and ``flex``, families that ignore ``position_ids``: the inputs hold masks, one for each type of layer.
- ``varlen`` and ``flash``: an attention function registered with transformers gets the boundaries in place of a mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from streampack.attention.backends import auto_backends, why_not_backend
from streampack.attention.calls import PREPARED
from streampack.attention.families import (
    IGNORE_POSITIONS,
    PROVEN,
    longest_pack,
    longest_sample,
    why_not_family,
    why_not_packable,
)
from streampack.attention.mappings import as_packed, labels_of, positions_of
from streampack.attention.media import media_tokens, position_axes, require_text, require_text_columns
from streampack.attention.mixer_tables import find_mixers
from streampack.attention.mixers import LENGTHS, split_mixers
from streampack.attention.positions import position_table
from streampack.attention.pretrained import disable_cache, find_pretrained, set_attention, stock_attention
from streampack.attention.registered import REGISTERED_NAMES, register_functions
from streampack.attention.shared import SharedPrefixes, fold_keys
from streampack.attention.shared_masks import shared_masks
from streampack.attention.tried import why_mixed
from streampack.attention.varlen import cu_seqlens_of
from streampack.packing.batch import Batch
from streampack.validation import require_token_ids

if TYPE_CHECKING:
    from streampack.attention.mappings import Packed

BACKENDS = ("dense", "flex", *REGISTERED_NAMES)

KNOWN_LIBRARIES = frozenset(
    {"torch", "transformers", "peft", "accelerate", "bitsandbytes", "torchao", "liger_kernel"}
)
"""Where the modules of a proven family may be from. A module from elsewhere may mix samples, so the model is probed."""


@dataclass(frozen=True)
class TransformersInputs:
    """Makes the forward arguments of a prepared model for a packed batch: ``model(**inputs(batch))``."""

    attention: str  # "dense", "flex", "varlen" or "flash"
    model: Any  # the PreTrainedModel, without its wrappers
    num_positions: int | None = None  # length of the model's table of positions; None if it has no table
    refused: Mapping[str, str] = field(default_factory=dict)
    masks: bool = False  # whether the inputs hold masks, because the model makes its own without positions
    split: bool = False  # whether it has mixers, which must know the lengths of sequences
    takes_positions: bool = True
    axes: int | None = (
        None  # of positions (mRoPE), where transformers makes masks from them; None if a number will do
    )
    media: tuple[int, ...] = ()  # token ids that stand for images, video or sound

    def __call__(self, batch: Packed | Mapping[str, Any]) -> dict[str, Any]:
        """Return keyword arguments on the batch's device; with ``labels`` where a dict has them.

        Positions are computed from ``seq_lens``, also if a dict has ``position_ids``. transformers finds boundaries
        where positions do not increase by 1, so it depends on positions that begin at 0 in every sequence: a dict's
        sequence that begins at position 1 behind one of a single token (position 0) would be taken for its
        continuation.

        Where transformers makes masks from the positions of a model that has several axes of them (mRoPE), positions
        are ``[1 + axes, batch, max_seq_len]``, the first row for masks; all rows are equal, as text has them.

        Raises:
            ValueError: if packs are too long for the model, the batch has anything but text or, on the CPU, ids that
                the model does not have, a dict does not say where its samples begin (see `as_packed`), or the model's
                attention was changed.
        """
        if isinstance(batch, Mapping):
            require_text_columns(batch)
            packed = as_packed(batch)
            labels = labels_of(batch, packed)
            return self(packed) if labels is None else self(packed) | {"labels": labels}
        config, max_seq_len = self.model.config.get_text_config(), batch.tokens.shape[1]
        self._require_prepared()
        self.require_length(max_seq_len)
        require_token_ids(batch.tokens, self._count_embeddings(config))
        if self.media:
            require_text(batch.tokens, self.media)
        shared = SharedPrefixes.of(batch)
        positions = batch.input_pos if shared else positions_of(batch.seq_lens, max_seq_len=max_seq_len)
        if (limit := longest_sample(config, self.attention)) is not None:
            if (longest := _longest_sample(batch, positions)) > limit[0]:
                raise ValueError(
                    f"a sample has {longest} tokens, but a packed {config.model_type} model with this config takes "
                    f"samples of up to {limit[0]}: {limit[1]}; leave longer ones out, or set max_seq_len={limit[0]}"
                )
            positions = positions % limit[0]  # of padding, which may be longer than any sample
        inputs: dict[str, Any] = {"input_ids": batch.tokens, "use_cache": False}
        if self.takes_positions:
            rows = () if self.axes is None else (1 + self.axes,)
            inputs["position_ids"] = positions.expand(*rows, *positions.shape)
        if shared and (why := self.why_not_shared(max_seq_len)):
            raise ValueError(f"the batch has shared prefixes, and {why}")
        if self.split:
            inputs[LENGTHS] = batch.seq_lens
        if self.attention in REGISTERED_NAMES:
            cu_seqlens = (
                fold_keys(shared.keys()) if shared else cu_seqlens_of(batch.seq_lens, max_seq_len=max_seq_len)
            )
            # The loss of a router would take an attention_mask for a mask of tokens, so the boundaries go elsewhere.
            if getattr(config, "output_router_logits", False):
                return inputs | {"cu_seq_lens_q": cu_seqlens}
            # As a tensor of 4 dimensions they look like a finished mask, which every family hands to its attention
            # function. Some families (stablelm) do not hand on keyword arguments such as cu_seq_lens_q.
            if shared:
                return inputs | {"attention_mask": cu_seqlens}
            cu_seqlens = cu_seqlens[None, None, None]
            torch._dynamo.maybe_mark_dynamic(cu_seqlens, 3)  # without it, torch.compile makes two graphs
            return inputs | {"attention_mask": cu_seqlens}
        if shared:
            inputs["attention_mask"] = shared_masks(self.model, batch, shared, attention=self.attention)
        elif self.masks:
            inputs["attention_mask"] = self._make_masks(config, positions)
        return inputs

    def require_length(self, max_seq_len: int) -> None:
        """Check that packs are not longer than the model's table of positions, nor too long to keep samples apart.

        Raises:
            ValueError: if they are.
        """
        config = self.model.config.get_text_config()
        if self.num_positions is not None and max_seq_len > self.num_positions:
            raise ValueError(
                f"max_seq_len is {max_seq_len}, and this {config.model_type} model has {self.num_positions} "
                f"positions; set max_seq_len={self.num_positions} or less"
            )
        limit = longest_pack(config)
        if limit is not None and max_seq_len > limit[0]:
            raise ValueError(
                f"max_seq_len is {max_seq_len}, but a packed {config.model_type} model with this config keeps "
                f"samples apart up to {limit[0]}: {limit[1]}; set max_seq_len={limit[0]} or less"
            )

    def _count_embeddings(self, config: Any) -> int:
        """Return how many ids the model has; moshi has one more than its config says."""
        try:
            return int(max(config.vocab_size, self.model.get_input_embeddings().num_embeddings))
        except (NotImplementedError, AttributeError):  # its embeddings are hidden, or have no such number
            return int(config.vocab_size)

    def _require_prepared(self) -> None:
        """Check that nobody has switched the model's attention since it was prepared.

        Raises:
            ValueError: if somebody has.
        """
        prepared = REGISTERED_NAMES.get(self.attention, "flex_attention")
        if self.attention == "dense":
            prepared = stock_attention(self.model)
        if (now := self.model.config._attn_implementation) != prepared:
            raise ValueError(
                f"the model was prepared with attention={self.attention!r}, and its attention was changed to {now!r} "
                "since; call prepare_model_for_packing again, and use the inputs that it returns"
            )

    def why_not_shared(self, max_seq_len: int) -> str | None:
        """Return why the model cannot take packs with shared prefixes, or None if it can."""
        config = self.model.config.get_text_config()
        if self.split:
            return (
                f"{config.model_type} has layers that run one sequence at a time, which cannot share one; set "
                "share_prefix=False in the encoder"
            )
        if self.attention in REGISTERED_NAMES:
            return None
        if getattr(config, "output_router_logits", False):
            return (
                "they need masks that a router's loss (output_router_logits) cannot read; use attention='varlen', or "
                "share_prefix=False"
            )
        if self.attention == "flex" and getattr(config, "attention_chunk_size", None) is not None:
            return "flex attention cuts no chunks in them; use attention='dense', or share_prefix=False"
        return None

    def _make_masks(self, config: Any, positions: torch.Tensor) -> Any:
        """Make the masks that transformers would make if the model passed on its positions."""
        from transformers.masking_utils import create_masks_for_generate

        # transformers reads only shape, dtype and device of the embeddings.
        embeddings = torch.empty(*positions.shape, 0, dtype=self.model.dtype, device=positions.device)
        return create_masks_for_generate(config, embeddings, None, None, positions)


def _longest_sample(batch: Packed, positions: torch.Tensor) -> int:
    """Return the tokens of the longest sample, those that it continues included; padding counts only in dicts.

    One number is copied from the device, as dynamic RoPE does.
    """
    if isinstance(batch, Batch):
        real = [[sum(fragment.length for fragment in pack)] for pack in batch.fragments]
        size, device = batch.tokens.shape[1], positions.device
        positions = positions * (torch.arange(size, device=device) < torch.tensor(real, device=device))
    return int(positions.max()) + 1


def prepare(model: nn.Module, *, attention: str) -> TransformersInputs:
    """Set the attention of a causal language model, bare or wrapped, and return its inputs.

    The model must have its weights, because a family without a test is probed with `find_leaks`. See
    `prepare_model_for_packing`.

    Raises:
        ValueError: if samples would see one another in this model, or it lacks this kind of attention; the message has
            the reason and the way out.
    """
    inner = find_pretrained(model)
    if inner is None:
        raise ValueError(
            f"{type(model).__name__} holds no PreTrainedModel, so nothing is known of its attention; give it a mask of "
            "streampack.make_mask(batch), or call streampack.attention.varlen_attention in it"
        )
    config = inner.config.get_text_config()
    mixers = find_mixers(inner)
    stateful = bool(inner._is_stateful)
    if why := why_not_packable(config, stateful=stateful, split=bool(mixers)) or _why_not_with_prompts(model):
        raise ValueError(f"this model cannot be packed: {why}")
    if mixers:
        split_mixers(inner, mixers)
    before = inner.config._attn_implementation
    reasons: dict[str, str] = {}
    for backend in auto_backends(inner.device) if attention == "auto" else (attention,):
        if why := _why_not_backend(inner, backend):
            reasons[backend] = why
            continue
        set_attention(inner, _implementation_name(inner, backend))
        for masks in _ways(inner, backend):
            inputs = _make_inputs(backend, reasons, masks, inner)
            why = None if _is_proven(inner, config) else why_mixed(model, inputs, mixers)
            if why is None:
                disable_cache(inner)
                PREPARED[inner] = partial(_make_inputs, backend, reasons, masks)
                return inputs
            reasons.setdefault(
                backend, f"nothing is known of {config.model_type}, and it failed a try: {why}"
            )
        set_attention(inner, before)
    ahead = {module.is_causal for module in inner.modules() if hasattr(module, "is_causal")} == {False}
    others = [
        repr(backend)
        for backend in ("dense", "flex", "varlen")
        if backend not in reasons and _why_not_backend(inner, backend) is None and not ahead
    ]
    both_ways = (
        f"{config.model_type} attends to tokens ahead (is_causal=False), and a pack's masks hide them; "
    )
    raise ValueError(
        both_ways * ahead
        + "; ".join(f"attention={backend!r} will not do: {why}" for backend, why in reasons.items())
        + f"; use {' or '.join(others) or 'padded batches, one sample a row'}"
    )


def _is_proven(inner: nn.Module, config: Any) -> bool:
    """Return whether a test has shown that a model's family can be packed, and it has no modules of somebody else's."""
    roots = {type(module).__module__.partition(".")[0] for module in inner.modules()}
    return config.model_type in PROVEN and roots <= KNOWN_LIBRARIES and not find_mixers(inner)


def _ways(inner: Any, attention: str) -> tuple[bool, ...]:
    """Return whether masks should be given to a model, best first: most families make them from positions."""
    config = inner.config.get_text_config()
    if attention in REGISTERED_NAMES or getattr(config, "alibi", False):
        return (False,)
    if config.model_type in IGNORE_POSITIONS:
        return (True,)
    return (False,) if _is_proven(inner, config) else (False, True)


def _make_inputs(
    attention: str, refused: Mapping[str, str], masks: bool, inner: nn.Module
) -> TransformersInputs:
    return TransformersInputs(
        attention,
        inner,
        num_positions=position_table(inner),
        refused=refused,
        masks=masks,
        split=bool(find_mixers(inner)),
        takes_positions="position_ids" in inspect.signature(inner.forward).parameters,
        axes=None if masks or attention in REGISTERED_NAMES else position_axes(inner),
        media=media_tokens(inner),
    )


def _why_not_backend(inner: Any, attention: str) -> str | None:
    """Return why this model cannot use a backend on its device, or None if it can."""
    config = inner.config.get_text_config()
    routed = getattr(config, "output_router_logits", False)
    if routed and config.model_type in IGNORE_POSITIONS and attention not in REGISTERED_NAMES:
        return f"{config.model_type} needs packed masks, which its router's loss (output_router_logits) cannot read"
    if attention == "dense":
        return None
    if not inner._can_set_attn_implementation():
        return f"{config.model_type} has its attention written into its layers"
    if attention == "flex" and not inner._supports_flex_attn:
        return f"transformers has no flex attention for {config.model_type}"
    if inner.device.type == "cuda" or attention == "flash":
        why = why_not_backend(
            attention,
            device=inner.device,
            dtype=inner.dtype,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            softcap=getattr(config, "attn_logit_softcapping", None),
        )
        if why:
            return why
    return why_not_family(config, attention)


def _implementation_name(inner: Any, attention: str) -> str:
    """Return transformers' name of a backend; for dense sdpa or eager, whichever the model was loaded with."""
    if attention in REGISTERED_NAMES:
        register_functions()
        return REGISTERED_NAMES[attention]
    return "flex_attention" if attention == "flex" else stock_attention(inner)


def _why_not_with_prompts(model: nn.Module) -> str | None:
    """Return why a model with PEFT's prompt or prefix tuning cannot be packed; None for any other.

    Prompt tuning puts trained tokens before each row, so only the first sample of a pack would have them.
    """
    for module in model.modules():
        if getattr(getattr(module, "active_peft_config", None), "is_prompt_learning", False):
            return "prompt tuning trains tokens before each row, not before each sample; use LoRA, or padded batches"
    return None
