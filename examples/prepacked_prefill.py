"""Prefill: fill the caches of many prompts by forward passes over packs.

The method is prepacking, arXiv:2404.09529. tests/scoring/test_prepacked_prefill.py compares it with single prompts.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from streampack.attention.mixers import find_mixers
from streampack.attention.prepare import prepared_inputs
from streampack.attention.pretrained import find_pretrained
from streampack.packing.groups import ROOT
from streampack.packing.planner import plan_packs
from streampack.packing.samples import check_ids, sample_from_pair
from streampack.scoring.forward import without_training
from streampack.scoring.prefixes import batch_of
from streampack.types import IntArray
from streampack.validation import require_positive

PLAIN = ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")
"""Layers of caches that hold keys and values only, or nothing because an earlier layer's are used."""


def prefill(
    model: nn.Module, prompts: Iterable[Any], *, max_seq_len: int, pad_token_id: int | None = None
) -> dict[str, Any]:
    """Fill the cache of a Hugging Face model with many prompts, without computing any padding.

    Each pack of prompts is one forward pass. The keys and values of each prompt are then copied to an ordinary cache
    padded on the left, in the order of the prompts, so ``model.generate(**prefill(...), max_new_tokens=...)`` continues
    as from a padded batch. The method is Zhao et al., "Prepacking: A Simple Method for Fast Prefilling and Increased
    Throughput in Large Language Models", arXiv:2404.09529.

    >>> from transformers import AutoConfig, AutoModelForCausalLM
    >>> sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    >>> config = AutoConfig.for_model("llama", **sizes, num_hidden_layers=1, pad_token_id=0)
    >>> model = AutoModelForCausalLM.from_config(config)
    >>> filled = prefill(model, [[5, 6, 7], [8]], max_seq_len=64)
    >>> filled["input_ids"].tolist(), filled["past_key_values"].get_seq_length()
    ([[5, 6, 7], [0, 0, 8]], 2)
    >>> model.generate(**filled, max_new_tokens=4, min_new_tokens=4).shape
    torch.Size([2, 7])

    The model is prepared by `prepare_model_for_packing` unless it is already, and computes in eval mode. The cache has
    all tokens of a prompt except the last. ``generate`` computes that one first, so its first logits predict the first
    new token. For several beams or samples of each prompt, repeat the rows of the cache:
    ``filled["past_key_values"].batch_repeat_interleave(num_beams)``.

    Args:
        model: of Hugging Face, bare or wrapped, whose layers have caches of keys and values, sliding windows included.
        prompts: token ids of each prompt, as lists, arrays or tensors; at least one each.
        max_seq_len: the most tokens of a forward pass. A prompt may have one more.
        pad_token_id: padding of ``input_ids``; None: ``generation_config``'s padding token, else its first EOS token,
            else 0.

    Returns:
        Arguments of ``generate``: ``input_ids`` and ``attention_mask``, ``[prompts, longest]`` int64, and
        ``past_key_values``, of ``longest - 1`` tokens.

    Raises:
        ValueError: for a model that cannot be packed, or whose cache has more than keys and values; for a prompt
            that is empty, too long, or has ids outside the vocabulary.
    """
    from transformers import DynamicCache

    max_seq_len = require_positive(max_seq_len, "max_seq_len")
    inner = find_pretrained(model)
    if inner is None:
        raise ValueError(
            f"{type(model).__name__} holds no Hugging Face model, and prefill fills caches of Hugging Face models only"
        )
    vocab_size = inner.config.get_text_config().vocab_size
    sequences = _read_prompts(prompts, vocab_size=vocab_size, limit=max_seq_len)
    cache = DynamicCache(config=inner.config)
    _require_plain(inner, cache)
    inputs = prepared_inputs(model)
    inputs.require_length(max_seq_len)
    width = max(sequence.size for sequence in sequences)
    begun = [number for number, sequence in enumerate(sequences) if sequence.size > 1]
    takes_last = "logits_to_keep" in inspect.signature(inner.forward).parameters
    only_last = {"logits_to_keep": 1} if takes_last else {}
    # Keys and values, each [prompts, kv_heads, width - 1, head_dim].
    layers: dict[int, tuple[torch.Tensor, ...]] = {}
    with without_training(model):
        for plan in plan_packs([sequences[number].size - 1 for number in begun], max_seq_len):
            numbers = [begun[span.index] for span in plan]
            packed = [sequences[number][:-1] for number in numbers]
            batch = batch_of(packed, [ROOT] * len(packed)).to(inner.device)
            seen = DynamicCache()  # without the config: its windows would be the last tokens of a pack
            model(**inputs(batch) | {"past_key_values": seen, "use_cache": True}, **only_last)
            for layer, parts in enumerate((each.keys, each.values) for each in seen.layers):
                if parts[0] is None:  # it uses those of an earlier layer
                    continue
                if layer not in layers:
                    shapes = [(len(sequences), part.shape[1], width - 1, part.shape[3]) for part in parts]
                    layers[layer] = tuple(map(torch.Tensor.new_zeros, parts, shapes))
                for rows, part in zip(layers[layer], parts, strict=True):
                    pieces = torch.split(part[0], [each.size for each in packed], dim=1)
                    for number, piece in zip(numbers, pieces, strict=True):
                        rows[number, :, width - 1 - piece.shape[1] :] = piece
    for layer in sorted(layers):
        cache.update(*layers.pop(layer), layer)  # so that no more than one layer is held twice
    ids = torch.full((len(sequences), width), _padding_token(inner) if pad_token_id is None else pad_token_id)
    mask = torch.zeros_like(ids)
    for number, sequence in enumerate(sequences):
        ids[number, width - sequence.size :] = torch.from_numpy(sequence)
        mask[number, width - sequence.size :] = 1
    return {
        "input_ids": ids.to(inner.device),
        "attention_mask": mask.to(inner.device),
        "past_key_values": cache,
    }


def _read_prompts(prompts: Iterable[Any], *, vocab_size: int, limit: int) -> list[IntArray]:
    """Return the ids of each prompt, ``[tokens]``."""
    sequences = []
    for number, prompt in enumerate(prompts):
        try:
            sample = sample_from_pair(prompt, prompt, tokens="ids")
            check_ids([sample], vocab_size)
        except ValueError as error:
            raise ValueError(f"prompt {number}: {error}") from None
        size = sample.tokens.size
        if not size:
            raise ValueError(
                f"prompt {number} is empty; begin it with a token that begins texts, such as the tokenizer's BOS or EOS"
            )
        if size - 1 > limit:
            raise ValueError(
                f"prompt {number} has {size} tokens, and max_seq_len={limit} allows {limit + 1}; raise max_seq_len, or "
                "cut the prompt"
            )
        sequences.append(np.asarray(sample.tokens, np.int64))
    if not sequences:
        raise ValueError("there are no prompts; give at least one")
    return sequences


def _require_plain(inner: Any, cache: Any) -> None:
    """Check that a model's cache has nothing but keys and values.

    Raises:
        ValueError: if it has more, by name.
    """
    family = inner.config.model_type
    kinds = {type(layer).__name__ for layer in cache.layers}.difference(PLAIN)
    kinds |= {type(mixer).__name__ for mixer in find_mixers(inner)}
    if family == "moshi":  # its tokens depend on how a cache is made
        kinds |= {"DynamicSlidingWindowLayer, and its masks no window"}
    if kinds:
        raise ValueError(
            f"prefill fills caches of keys and values, and {family} has {', '.join(sorted(kinds))}; use model.generate "
            "on padded batches of prompts"
        )


def _padding_token(inner: Any) -> int:
    """Return the id that a model's ``generate`` pads with; 0 if it has none."""
    config = inner.generation_config
    found = config.eos_token_id if config.pad_token_id is None else config.pad_token_id
    return int((found[0] if isinstance(found, list) else found) or 0)
