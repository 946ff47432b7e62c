"""Hugging Face models on packed batches: prepare the model once, make the arguments of each forward pass.

There is one way for each backend. ``dense`` and ``flex`` get finished masks, one for each type of layer. ``varlen`` and
``flash`` are attention functions of ours, which get boundaries by transformers' own keywords.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask

from streampack.attention import families
from streampack.attention.backends import why_not_backend
from streampack.attention.layout import (
    PackedRows,
    as_packed,
    labels_of,
    positions_of,
    shares_prefixes,
    visible_of,
)
from streampack.attention.masks import dense_mask, flex_mask
from streampack.attention.mixers import LENGTHS, find_mixers, host_lengths, split_mixers
from streampack.attention.pretrained import (
    REGISTERED_NAMES,
    current_attention,
    disable_cache,
    find_pretrained,
    is_stateful,
    keywords_of,
    register_functions,
    set_attention,
    stock_attention,
    why_not_settable,
)
from streampack.attention.probe import TRIED, find_leaks
from streampack.attention.varlen import Boundaries, compute_dtype
from streampack.attention.vision import image_blocks, media_inputs, text_of
from streampack.packing.batch import Batch
from streampack.validation import require_token_ids

if TYPE_CHECKING:
    from streampack.attention.layout import Packed

KNOWN_LIBRARIES = frozenset(
    {"torch", "transformers", "peft", "accelerate", "bitsandbytes", "torchao", "liger_kernel"}
)
"""Where the modules of a known family may be from. A module from elsewhere may mix samples, so the model is tried."""

_MEDIA = ("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw", "input_features")
_NO_MEDIA = (
    "packs hold images only as VisionEncoder makes them, or an encoder of MediaSample; leave such samples out, or "
    "train on padded batches, one sample a row"
)

Mask = torch.Tensor | BlockMask | None


@dataclass(frozen=True)
class TransformersInputs:
    """Makes the forward arguments of a prepared model for a packed batch: ``model(**inputs(batch))``."""

    model: Any  # the PreTrainedModel, without its wrappers
    attention: str  # "dense", "flex", "varlen" or "flash"
    summary: str

    def __call__(self, batch: Packed | Mapping[str, Any]) -> dict[str, Any]:
        """Return keyword arguments on the batch's device; with ``labels`` where a dict has them.

        Positions are computed from ``seq_lens``, also if a dict has ``position_ids``.
        """
        if isinstance(batch, Mapping):
            if found := [name for name in _MEDIA if name in batch]:
                raise ValueError(f"the batch has {found[0]!r}, and {_NO_MEDIA}")
            packed = as_packed(batch)
            return self(packed) | labels_of(batch, packed)
        self._require_prepared()
        self._try_once()
        max_seq_len = batch.tokens.shape[1]
        self.require_length(max_seq_len)
        self.require_tokens(text_of(batch, self.model.config))
        shared = shares_prefixes(batch)
        if shared and (why := self.why_not_shared(max_seq_len)):
            raise ValueError(f"the batch has shared prefixes, and {why}")
        positions = batch.input_pos if shared else positions_of(batch.seq_lens, max_seq_len=max_seq_len)
        inputs: dict[str, Any] = {"input_ids": batch.tokens, "use_cache": False}
        if "position_ids" in inspect.signature(self.model.forward).parameters:
            inputs["position_ids"] = self._limited(batch, positions)
        inputs |= media_inputs(self.model, batch)
        if self._mixers:
            inputs[LENGTHS] = host_lengths(batch)
        blocks = image_blocks(batch, self.model.config)
        # Without boundaries, our attention functions compute what a mask says (see `pretrained`).
        if self.attention in REGISTERED_NAMES and blocks is None:
            return inputs | keywords_of(Boundaries.of(batch), batch.tokens)
        if not families.takes_no_masks(self._config):  # else transformers makes them where positions restart
            inputs["attention_mask"] = self._masks(batch, positions, blocks)
        return inputs

    @property
    def _config(self) -> Any:
        return self.model.config.get_text_config()

    @cached_property
    def _longest_pack(self) -> tuple[int, str] | None:
        return families.longest_pack(self.model, self._config)

    @cached_property
    def _mixers(self) -> list[nn.Module]:
        return find_mixers(self.model)

    @cached_property
    def _media_tokens(self) -> tuple[int, ...]:
        return families.media_tokens(self.model)

    def require_tokens(self, tokens: torch.Tensor) -> None:
        """Check ids that are on the CPU: a number from another device would hold up the host."""
        try:  # moshi has one more than its config says
            size = int(max(self._config.vocab_size, self.model.get_input_embeddings().num_embeddings))
        except (NotImplementedError, AttributeError):  # its embeddings are hidden, or have no such number
            size = int(self._config.vocab_size)
        require_token_ids(tokens, size)
        if self._media_tokens and tokens.device.type == "cpu":
            found = tokens[torch.isin(tokens, torch.tensor(self._media_tokens))]
            if len(found):
                raise ValueError(
                    f"the batch has the token {int(found[0])}, which stands for an image, video or sound, and "
                    + _NO_MEDIA
                )

    def require_length(self, max_seq_len: int) -> None:
        """Check that packs are not longer than the model's table of positions, nor too long to keep samples apart."""
        limit = self._longest_pack
        if limit is not None and max_seq_len > limit[0]:
            raise ValueError(f"max_seq_len is {max_seq_len}, {limit[1]}; set max_seq_len={limit[0]} or less")

    def why_not_shared(self, max_seq_len: int) -> str | None:
        """Return why the model cannot take packs with shared prefixes, or None if it can."""
        if self._mixers:
            return (
                f"{self._config.model_type} has layers that run one sequence at a time, which cannot share one; set "
                "share_prefix=False in the encoder"
            )
        if self.attention not in REGISTERED_NAMES and families.takes_no_masks(self._config):
            return (
                "they need masks that a router's loss (output_router_logits) cannot read; use attention='varlen', or "
                "share_prefix=False"
            )
        return None

    def _limited(self, batch: Packed, positions: torch.Tensor) -> torch.Tensor:
        """Return positions below the length of the model's longest sample, which padding may exceed."""
        limit = families.longest_sample(self._config, self.attention)
        if limit is None:
            return positions
        longest = batch.longest if isinstance(batch, Batch | PackedRows) else None
        if longest is None and positions.device.type == "cpu":
            longest = int(positions.max()) + 1
        message = (
            f"a sample has {longest or 'too many'} tokens, but a packed {self._config.model_type} model with this "
            f"config takes samples of up to {limit[0]}: {limit[1]}; leave longer ones out, or set "
            f"max_seq_len={limit[0]}"
        )
        if longest is None:  # of a dict on a device, which checks it without making the host wait
            torch._assert_async(positions.max() < limit[0], message)
        elif longest > limit[0]:
            raise ValueError(message)
        return positions % limit[0]

    def _masks(
        self, batch: Packed, positions: torch.Tensor, blocks: torch.Tensor | None
    ) -> Mask | dict[str, Mask]:
        """Return the ``attention_mask``: a mask, or one for each type of layer if the config names types."""
        seq_lens, size = batch.seq_lens, batch.tokens.shape[1]
        visible = visible_of(batch)
        made: dict[tuple[int | None, int | None], Mask] = {}

        def mask(kind: str | None) -> Mask:
            window, chunk = limits = families.limits_of(self._config, kind)
            if kind in families.RECURRENT_LAYERS:
                return None
            if limits not in made:
                make = flex_mask if self.attention == "flex" else dense_mask
                allowed = make(
                    seq_lens,
                    max_seq_len=size,
                    window=window,
                    chunk=chunk,
                    visible=visible,
                    positions=positions,  # other answers may separate a token from its prefix
                    blocks=blocks,
                )
                made[limits] = self._as_stock(allowed) if isinstance(allowed, torch.Tensor) else allowed
            return made[limits]

        kinds = {*(getattr(self._config, "layer_types", None) or ())}
        if not kinds:
            return mask(None)
        if kinds <= families.RECURRENT_LAYERS:
            return None
        # Some look for types of their own beside those that their config names.
        return {kind: mask(kind) for kind in sorted(kinds | {"full_attention", "sliding_attention"})} | (
            dict.fromkeys(families.RECURRENT_LAYERS)
        )

    def _as_stock(self, allowed: torch.Tensor) -> torch.Tensor:
        """Return a boolean mask ``[batch, query, key]`` as sdpa takes it, or as numbers to be added to scores."""
        if stock_attention(self.model) == "sdpa":
            return allowed[:, None]
        added = torch.zeros(allowed.shape, dtype=self.model.dtype, device=allowed.device)
        return added.masked_fill_(~allowed, torch.finfo(self.model.dtype).min)[:, None]

    def _require_prepared(self) -> None:
        """Check that nobody has switched the model's attention since it was prepared."""
        if (now := current_attention(self.model)) != _implementation_name(self.model, self.attention):
            raise ValueError(
                f"the model was prepared with attention={self.attention!r}, and its attention was changed to {now!r} "
                "since; call prepare_model_for_packing again, and use the inputs that it returns"
            )

    def _try_once(self) -> None:
        """Try a model of an unknown family, on the device and in the dtype in which it trains."""
        if self.model in TRIED:
            return
        if _is_known(self.model) and not self._mixers:
            TRIED.add(self.model)
            return
        unknown = f"nothing is known of {self._config.model_type} with attention={self.attention!r}, and it"
        try:
            report = find_leaks(self.model, inputs=self)
        except torch.OutOfMemoryError:
            raise
        except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError) as error:
            failed = f"failed a try: {type(error).__name__}: {error}; use padded batches, one sample a row"
            raise ValueError(f"{unknown} {failed}") from error
        if not report.ok:
            raise ValueError(f"{unknown} mixes samples: {report}")


make_inputs = TransformersInputs


def find(model: nn.Module) -> Any:
    """Return the ``PreTrainedModel`` in a causal language model, bare or wrapped."""
    inner = find_pretrained(model)
    if inner is None:
        raise ValueError(
            f"{type(model).__name__} holds no PreTrainedModel, so nothing is known of its attention; give it a mask of "
            "streampack.make_mask(batch), or call streampack.attention.varlen_attention in it"
        )
    config = inner.config.get_text_config()
    why = families.why_not_packable(config, stateful=is_stateful(inner), split=bool(find_mixers(inner)))
    if {module.is_causal for module in inner.modules() if hasattr(module, "is_causal")} == {False}:
        why = why or (
            f"{config.model_type} attends to later tokens (is_causal=False), and a pack's masks hide them; use padded "
            "batches, one sample a row"
        )
    why = why or families.why_not_positions(inner, config)
    for module in model.modules():
        if getattr(getattr(module, "active_peft_config", None), "is_prompt_learning", False):
            why = "prompt tuning trains tokens before each row, not before each sample; use LoRA, or padded batches"
    if why:
        raise ValueError(f"this model cannot be packed: {why}")
    return inner


def set_up(inner: Any, attention: str) -> None:
    """Set the attention of a model, and let its mixers keep sequences apart."""
    if mixers := find_mixers(inner):
        split_mixers(inner, mixers)
    register_functions()
    set_attention(inner, _implementation_name(inner, attention))
    disable_cache(inner)
    TRIED.discard(inner)


def _is_known(inner: nn.Module) -> bool:
    """Return whether a test has shown that a model's family can be packed, and it has no modules of somebody else's."""
    roots = {type(module).__module__.partition(".")[0] for module in inner.modules()}
    kind = inner.config.get_text_config().model_type  # type: ignore[union-attr, operator]
    return kind in families.KNOWN and roots <= KNOWN_LIBRARIES


def why_not(inner: Any, attention: str, *, chosen: bool = True) -> str | None:
    """Return why this model cannot use a backend on its device, or None if it can, ``chosen`` by the user or not."""
    config = inner.config.get_text_config()
    if attention != "dense":
        why = why_not_settable(inner, flex=attention == "flex")
        if why is None and (inner.device.type == "cuda" or attention == "flash"):
            why = why_not_backend(
                attention,
                device=inner.device,
                dtype=compute_dtype(inner.device, inner.dtype),
                head_dim=families.head_dim_of(config),
                softcap=getattr(config, "attn_logit_softcapping", None),
            )
        if why:
            return why
    sinks = any(name.endswith("sinks") for name, _ in inner.named_parameters())
    why = families.why_not_family(config, attention, sinks=sinks)
    if why or chosen or attention not in REGISTERED_NAMES:
        return why
    if not _is_known(inner):
        return f"nothing is known of {config.model_type}, and masks do for more families"
    return families.why_not_auto(inner, config, attention)


def _implementation_name(inner: Any, attention: str) -> str:
    """Return transformers' name of a backend; for dense sdpa or eager, whichever the model was loaded with."""
    if attention == "dense":
        return stock_attention(inner)
    return REGISTERED_NAMES.get(attention, "flex_attention")
