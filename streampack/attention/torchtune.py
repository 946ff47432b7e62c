"""torchtune models on packed batches: attention modules get `Sequences` in place of a mask."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from streampack.attention.backends import flash_attention, why_not_backend
from streampack.attention.layout import as_packed, shares_prefixes, visible_of
from streampack.attention.masks import dense_mask, flex_attention_of, flex_mask
from streampack.attention.varlen import Boundaries, compute_dtype, varlen_attention
from streampack.validation import require_token_ids

if TYPE_CHECKING:
    from torchtune.modules import TransformerDecoder

    from streampack.attention.layout import Packed

Attention: TypeAlias = Any  # torchtune's MultiHeadAttention or Gemma2Attention, which are untyped

_WITH_CACHE = (
    "{} has a key-value cache, which is for generating and would mix packs; take it away with "
    "torchtune.modules.common_utils.delete_kv_caches(model)"
)


class Sequences:
    """The boundaries of a batch's sequences, given to torchtune's attention in place of a mask.

    torchtune passes the object on unchanged, and ``torch.compile`` traces through it. It is a plain class because a
    NamedTuple made ``torch.compile`` build 10 graphs for 6 packs.
    """

    def __init__(self, batch: Packed, *, attention: str) -> None:
        self.block_mask = None
        if attention == "flex":
            size = batch.tokens.shape[1]
            self.block_mask = flex_mask(batch.seq_lens, max_seq_len=size, visible=visible_of(batch))
        else:
            self.boundaries = Boundaries.of(batch)
            self.kernel = varlen_attention if attention == "varlen" else flash_attention

    def __getitem__(self, _: Any) -> Any:
        """Raise: torchtune's own attention takes this for a mask."""
        raise ValueError(
            "an attention module of this model was not prepared, or was replaced since; call "
            "prepare_model_for_packing(model), and use the inputs that it returns"
        )

    def attend(
        self,
        q: torch.Tensor,  # [batch, heads, max_seq_len, head_dim]
        k: torch.Tensor,  # the same shape: torchtune has repeated the keys for every query head
        v: torch.Tensor,
    ) -> torch.Tensor:
        """Compute causal attention within each sequence, ``[batch, heads, max_seq_len, head_dim]``."""
        if self.block_mask is not None:
            return flex_attention_of(q, k, v, block_mask=self.block_mask)
        return self.boundaries.attend(self.kernel, q, k, v).transpose(1, 2)


@dataclass(frozen=True)
class TorchtuneInputs:
    """Makes the arguments of ``TransformerDecoder.forward`` for a packed batch."""

    model: TransformerDecoder  # without its wrappers
    attention: str
    summary: str

    @cached_property
    def _window(self) -> int | None:
        """The shortest sliding window of the model's layers, in tokens."""
        windows = {getattr(module, "sliding_window_size", None) for module in _attentions(self.model)}
        return min(filter(None, windows), default=None)

    def __call__(self, batch: Packed | Mapping[str, Any]) -> dict[str, Any]:
        """Return ``tokens``, ``mask`` and ``input_pos``."""
        batch = as_packed(batch)
        size = batch.tokens.shape[1]
        self.require_length(size)
        self.require_tokens(batch.tokens)
        if self.model.caches_are_enabled():
            raise ValueError(_WITH_CACHE.format("the model"))
        if shares_prefixes(batch) and (why := self.why_not_shared(size)):
            raise ValueError(f"the batch has shared prefixes, and {why}")
        mask: torch.Tensor | Sequences
        if self.attention == "dense":
            mask = dense_mask(batch.seq_lens, max_seq_len=size, visible=visible_of(batch))
        else:
            mask = Sequences(batch, attention=self.attention)
        return {"tokens": batch.tokens, "mask": mask, "input_pos": batch.input_pos}

    def require_tokens(self, tokens: torch.Tensor) -> None:
        """Raise a ValueError for ids on the CPU that the model does not have."""
        require_token_ids(tokens, self.model.tok_embeddings.num_embeddings)

    def require_length(self, max_seq_len: int) -> None:
        """Check that packs are not longer than the model's ``max_seq_len``."""
        limit = self.model.max_seq_len
        if isinstance(limit, int) and max_seq_len > limit:
            raise ValueError(
                f"packs have {max_seq_len} tokens, and the model has max_seq_len={limit}; set max_seq_len={limit} or "
                f"less for the packs, or build the model with max_seq_len={max_seq_len}"
            )

    def why_not_shared(self, max_seq_len: int) -> str | None:
        """Return why the model cannot take packs with shared prefixes, or None if it can."""
        if self._window is None or self._window >= max_seq_len:
            return None
        return (
            f"torchtune counts this model's window of {self._window} tokens in packs; use share_prefix=False"
        )


make_inputs = TorchtuneInputs


def find(model: nn.Module) -> TransformerDecoder:
    """Return the decoder inside ``torch.compile`` (``_orig_mod``) and DistributedDataParallel (``module``)."""
    from torchtune.modules import TransformerDecoder

    inner: object = model
    while not isinstance(inner, TransformerDecoder):
        inner = getattr(inner, "_orig_mod", getattr(inner, "module", None))
        if not isinstance(inner, nn.Module):
            raise ValueError(
                f"{type(model).__name__} is no TransformerDecoder, and how it makes use of one is not known; prepare "
                "the decoder itself, or give the model a mask of streampack.make_mask(batch)"
            )
    _attentions(inner)
    return inner


def set_up(decoder: TransformerDecoder, _attention: str) -> None:
    """Let the attention modules of a decoder accept `Sequences`, also if they were replaced, as by LoRA."""
    for module in _attentions(decoder):
        stock = getattr(module, "_attention_call", None)  # Gemma2Attention has none
        if stock is not None and getattr(stock, "func", None) is not _attention_call:
            module._attention_call = partial(_attention_call, stock)


def _attentions(decoder: TransformerDecoder) -> list[Attention]:
    """Return the attention modules, one for each layer."""
    from torchtune.modules import TransformerCrossAttentionLayer, TransformerSelfAttentionLayer

    found = []
    for number, layer in enumerate(decoder.layers):
        inside = list(layer.modules())
        if any(isinstance(module, TransformerCrossAttentionLayer) for module in inside):
            raise ValueError(
                f"layer {number} attends to a second input (images, an encoder's), and packs do not say which part of "
                "that is whose; train this model without packing"
            )
        attentions = [module.attn for module in inside if isinstance(module, TransformerSelfAttentionLayer)]
        if len(attentions) != 1 or not _is_known(attentions[0]):
            names = ", ".join(type(module).__name__ for module in attentions) or type(layer).__name__
            raise ValueError(
                f"layer {number} has an attention that is not known ({names}); train this model without packing, or "
                "make it keep sequences apart with streampack.make_mask(batch)"
            )
        attention = attentions[0]
        if attention.kv_cache is not None:
            raise ValueError(_WITH_CACHE.format(f"layer {number}"))
        if not attention.is_causal:
            raise ValueError(
                f"layer {number} sees later tokens (is_causal=False), which a pack's masks hide; train this model "
                "without packing"
            )
        found.append(attention)
    return found


def _is_known(attention: Attention) -> bool:
    """Return whether a module's forward is torchtune's; its class does not tell, because FSDP2 makes new classes."""
    from torchtune.models.gemma2._attention import Gemma2Attention
    from torchtune.modules import MultiHeadAttention

    known = (MultiHeadAttention.forward, Gemma2Attention.forward)
    return getattr(attention.forward, "__func__", None) in known


def why_not(decoder: TransformerDecoder, attention: str, *, chosen: bool = True) -> str | None:
    """Return why a backend cannot compute a decoder, or None if it can, ``chosen`` by the user or not."""
    attentions, parameter = _attentions(decoder), next(decoder.parameters())
    if attention == "dense":
        return None
    if not all(hasattr(module, "_attention_call") for module in attentions):
        return "torchtune's Gemma2Attention computes the scores of all pairs of tokens itself, under a dense mask"
    if (dropout := max(module.attn_dropout for module in attentions)) > 0:
        return f"only 'dense' has dropout in its attention, and attn_dropout is {dropout}"
    return why_not_backend(
        attention,
        device=parameter.device,
        dtype=compute_dtype(parameter.device, parameter.dtype),
        head_dim=attentions[0].head_dim,
    )


def _attention_call(
    stock: Callable[..., torch.Tensor],
    q: torch.Tensor,  # [batch, heads, max_seq_len, head_dim]
    k: torch.Tensor,  # the same shape: torchtune has repeated the keys for every query head
    v: torch.Tensor,
    *,
    mask: Any,
    dropout_p: float,
    is_causal: bool,
) -> torch.Tensor:
    if isinstance(mask, Sequences):
        return mask.attend(q, k, v)
    return stock(q, k, v, mask=mask, dropout_p=dropout_p, is_causal=is_causal)
