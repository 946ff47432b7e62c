"""Checks of tokenizers: each is prepared for encoders and recipes, or refused."""

from __future__ import annotations

import copy
from typing import Any

from streampack.packing.encoders.hf_tokenizer import PROBE_TEXT, HFTokenizer


def check_tokenizer(tokenizer: Any) -> Any:
    """Return a tokenizer that encoders can use, or raise: Hugging Face's are wrapped, length limits switched off."""
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
    """Raise ValueError for a tokenizer, a class, or what cannot be called; the error names what to wrap it with."""
    kind = encoder if isinstance(encoder, type) else type(encoder)
    if is_hf(encoder) or isinstance(encoder, HFTokenizer):
        raise ValueError(
            f"encoder is a tokenizer, a {kind.__name__}; wrap it: TextEncoder(tokenizer) for rows of text, "
            "ChatEncoder(tokenizer) for messages and prompts with completions"
        )
    if encoder is kind or not callable(encoder):
        raise ValueError(
            f"encoder is {f'the class {kind.__name__}' if encoder is kind else f'a {kind.__name__}'}; give an encoder, "
            "such as TextEncoder(tokenizer), or a function that makes a streampack.Sample of a row"
        )


def check_ends(tokenizer: Any, *, add_bos: bool | None, add_eos: bool) -> bool | None:
    """Return the ``add_bos`` to call a tokenizer with; refuse one that ignores it or ``add_eos`` for a short text."""
    named = f"the tokenizer ({getattr(tokenizer, 'name', None) or type(tokenizer).__name__})"
    try:
        plain = list(tokenizer.encode(PROBE_TEXT, add_bos=False, add_eos=False))
        begun = list(tokenizer.encode(PROBE_TEXT, add_bos=bool(add_bos), add_eos=False))
        ended = list(tokenizer.encode(PROBE_TEXT, add_bos=False, add_eos=add_eos))
    except (TypeError, AttributeError) as error:
        raise ValueError(
            f"{named} has no encode(text, add_bos=, add_eos=): {error}; give one of torchtune's, or "
            "streampack.HFTokenizer, with a path or a tokenizer of transformers"
        ) from error
    for name, asked, made, at in (("BOS", add_bos, begun, 0), ("EOS", add_eos, ended, -1)):
        flag = f"add_{name.lower()}"
        token = getattr(tokenizer, f"{name.lower()}_id", None)
        there = len(made) > len(plain) or (bool(plain) and plain[at] == token)
        if asked and not there:
            raise ValueError(
                f"{named} adds no {name}, though {flag} is True; say {flag}: False, or give a tokenizer "
                "that has one (streampack.HFTokenizer takes Hugging Face's)"
            )
        if asked is False and there:
            raise ValueError(
                f"{named} adds {name} though {flag} is False; say {flag}: True, or give another tokenizer"
            )
    if add_bos is None and not isinstance(tokenizer, HFTokenizer):
        return True  # torchtune's add BOS by default
    return add_bos


def eos_of(tokenizer: Any) -> int | None:
    """Return the end-of-text id of a tokenizer, or of an encoder that has an ``eos_id``; None if it has none."""
    found = getattr(tokenizer, "eos_id", None)
    return found if type(found) is int and found >= 0 else None


def padding_id(tokenizer: Any) -> int:
    """Return the id to pad with: the tokenizer's, or its EOS, or 0. Padding is never attended and never trained.

    >>> padding_id(object())
    0
    """
    found = (getattr(tokenizer, name, None) for name in ("pad_id", "eos_id"))
    return next((i for i in found if isinstance(i, int) and i >= 0), 0)
