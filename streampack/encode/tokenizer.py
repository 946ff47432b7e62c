"""Tokenizers as encoders and recipes use them."""

from __future__ import annotations

import copy
from typing import Any


def without_truncation(tokenizer: Any) -> Any:
    """A copy of a torchtune tokenizer that does not cut."""
    if getattr(tokenizer, "max_seq_len", None) is None:
        return tokenizer
    whole = copy.copy(tokenizer)
    whole.max_seq_len = None
    return whole
