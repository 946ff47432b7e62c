"""Checks of tokenizers: each is prepared for encoders and recipes, or refused."""

from __future__ import annotations

import copy
from typing import Any

from streampack.packing.encoders.base import PROBE_TEXT
from streampack.packing.encoders.hf_tokenizer import HFTokenizer, is_hf


def check_tokenizer(tokenizer: Any) -> Any:
    """Return a tokenizer that encoders can use: Hugging Face's are wrapped, length limits switched off.

    Raises:
        ValueError: for anything else, and for a bare tokenizer of the tokenizers library, which does not know its BOS
            and EOS.
    """
    if is_hf(tokenizer):
        return HFTokenizer(tokenizer)
    kind = type(tokenizer)
    if kind.__module__.split(".")[0] == "tokenizers":
        raise ValueError(
            f"a {kind.__name__} of the tokenizers library does not say which of its tokens are BOS and EOS; wrap it: "
            "HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=..., eos_token=...))"
        )
    if isinstance(tokenizer, str | dict):
        raise ValueError(
            f"the tokenizer is {tokenizer!r}; name a component: "
            "{_component_: streampack.HFTokenizer, path: ...} or one of torchtune's tokenizers"
        )
    return without_truncation(tokenizer)


def require_encoder(encoder: Any) -> None:
    """Check that this is an encoder: raise if it is a tokenizer or a class, or cannot be called.

    Raises:
        ValueError: naming what to wrap it with.
    """
    if is_hf(encoder) or isinstance(encoder, HFTokenizer):
        raise ValueError(
            f"encoder is a tokenizer, a {type(encoder).__name__}; wrap it: TextEncoder(tokenizer) for rows of text, "
            "ChatEncoder(tokenizer) for messages and prompts with completions"
        )
    if isinstance(encoder, type):
        raise ValueError(
            f"encoder is the class {encoder.__name__}; call it with what it needs, such as "
            f"encoder={encoder.__name__}(tokenizer)"
        )
    if not callable(encoder):
        raise ValueError(
            f"encoder is a {type(encoder).__name__}; it must be a function that makes a streampack.Sample of a row"
        )


def check_ends(tokenizer: Any, *, add_bos: bool | None, add_eos: bool) -> None:
    """Refuse a tokenizer that ignores ``add_bos`` or ``add_eos``, as its tokens of a short text show.

    Raises:
        ValueError: naming what it ignores.
    """
    try:
        plain = list(tokenizer.encode(PROBE_TEXT, add_bos=False, add_eos=False))
        begun = list(tokenizer.encode(PROBE_TEXT, add_bos=bool(add_bos), add_eos=False))
        ended = list(tokenizer.encode(PROBE_TEXT, add_bos=False, add_eos=add_eos))
    except (TypeError, AttributeError) as error:
        raise ValueError(
            f"{_name(tokenizer)} has no encode(text, add_bos=, add_eos=): {error}; give one of torchtune's, or a "
            "Hugging Face tokenizer"
        ) from error
    for name, flag, asked, made, at in (
        ("BOS", "add_bos", add_bos, begun, 0), ("EOS", "add_eos", add_eos, ended, -1),
    ):  # fmt: skip
        token = getattr(tokenizer, f"{name.lower()}_id", None)
        there = bool(made) and made[at] == token if token is not None else len(made) > len(plain)
        if asked and not there:
            raise ValueError(
                f"{_name(tokenizer)} adds no {name}, though {flag} is True; say {flag}: False, or give a tokenizer "
                "that has one (streampack.HFTokenizer takes Hugging Face's)"
            )
        if asked is False and there and token is not None:
            raise ValueError(
                f"{_name(tokenizer)} adds {name} though {flag} is False; say {flag}: True, or give another tokenizer"
            )


def own_bos(tokenizer: Any) -> bool | None:
    """Return the ``add_bos`` that lets a tokenizer begin a text as it does by default."""
    return None if isinstance(tokenizer, HFTokenizer) else True  # torchtune's tokenizers add BOS by default


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


def without_truncation(tokenizer: Any) -> Any:
    """Copy a torchtune tokenizer without its length limit, its own or that of a tokenizer.json."""
    inner: Any = getattr(tokenizer, "tokenizer", None)
    limited = type(inner).__module__.split(".")[0] == "tokenizers" and (inner.truncation or inner.padding)
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


def _name(tokenizer: Any) -> str:
    return f"the tokenizer ({getattr(tokenizer, 'name', None) or type(tokenizer).__name__})"
