"""Checks of tokenizers and encoders: they are made ready to be used, or refused."""

from __future__ import annotations

import copy
from typing import Any

from streampack.packing.encoders.tokenizer import PROBE_TEXT, HFTokenizer


def check_tokenizer(tokenizer: Any) -> Any:
    """Return a tokenizer that encoders can use: Hugging Face's are wrapped, length limits of others switched off."""
    if is_hf(tokenizer):
        return HFTokenizer(tokenizer)
    inner: Any = getattr(tokenizer, "tokenizer", None)
    limited = type(inner).__module__.startswith("tokenizers") and (inner.truncation or inner.padding)
    if getattr(tokenizer, "max_seq_len", None) is None and not limited:
        return tokenizer
    whole = copy.copy(tokenizer)
    if limited:
        whole.tokenizer = copy.deepcopy(inner)
        whole.tokenizer.no_truncation()
        whole.tokenizer.no_padding()
    else:
        whole.max_seq_len = None
    return whole


def is_hf(tokenizer: Any) -> bool:
    """Return whether a tokenizer is one of transformers, without importing it."""
    bases = {(base.__module__, base.__name__) for base in type(tokenizer).__mro__}
    return ("transformers.tokenization_utils_base", "PreTrainedTokenizerBase") in bases


def require_encoder(encoder: Any) -> None:
    """Raise ValueError for a tokenizer, a class, or what cannot be called."""
    kind = encoder if isinstance(encoder, type) else type(encoder)
    if encoder is kind or not callable(encoder) or is_hf(encoder) or isinstance(encoder, HFTokenizer):
        raise ValueError(
            f"encoder is {f'the class {kind.__name__}' if encoder is kind else f'a {kind.__name__}'}; give an encoder, "
            "such as TextEncoder(tokenizer) for rows of text or ChatEncoder(tokenizer) for messages and prompts with "
            "completions, or a function that makes a streampack.Sample of a row"
        )


def check_ends(tokenizer: Any, *, add_bos: bool | None, add_eos: bool) -> bool | None:
    """Return the ``add_bos`` to call a tokenizer with; refuse one that ignores it or ``add_eos`` for a short text."""
    named = f"the tokenizer ({getattr(tokenizer, 'name', None) or type(tokenizer).__name__})"
    try:
        plain, begun, ended = (
            list(tokenizer.encode(PROBE_TEXT, add_bos=bos, add_eos=eos))
            for bos, eos in ((False, False), (bool(add_bos), False), (False, add_eos))
        )
    except (TypeError, AttributeError) as error:
        raise ValueError(
            f"{named} has no encode(text, add_bos=, add_eos=): {error}; give one of torchtune's, or "
            "streampack.HFTokenizer, with a path or a tokenizer of transformers"
        ) from error
    for name, asked, made, at in (("bos", add_bos, begun, 0), ("eos", add_eos, ended, -1)):
        there = len(made) > len(plain) or plain[at : at + 1 or None] == [
            getattr(tokenizer, f"{name}_id", None)
        ]
        if asked not in (None, there):
            raise ValueError(
                f"{named} adds {'no ' if asked else ''}{name.upper()}, though add_{name} is {asked}; say add_{name}: "
                f"{not asked}, or give another tokenizer (streampack.HFTokenizer takes Hugging Face's)"
            )
    if add_bos is None and not isinstance(tokenizer, HFTokenizer):
        return True  # torchtune's add BOS by default
    return add_bos
