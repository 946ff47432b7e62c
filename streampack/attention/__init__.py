"""Masks and attention that keep the sequences of a pack apart, for torchtune and Hugging Face models."""

from streampack.attention.layout import Packed, document_ids
from streampack.attention.masks import dense_mask, flex_mask
from streampack.attention.prepare import ATTENTIONS, Inputs, make_mask, prepare_model_for_packing
from streampack.attention.probe import find_leaks
from streampack.attention.varlen import cu_seqlens_of, varlen_attention

__all__ = [
    "ATTENTIONS",
    "Inputs",
    "Packed",
    "cu_seqlens_of",
    "dense_mask",
    "document_ids",
    "find_leaks",
    "flex_mask",
    "make_mask",
    "prepare_model_for_packing",
    "varlen_attention",
]
