"""Padded batches, which every model library takes: a sample a row, and an attention mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence


def padded(samples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad samples to the longest; the first label of each is -100, because nothing predicts it."""
    ids = [torch.as_tensor(each["input_ids" if "input_ids" in each else "tokens"]) for each in samples]
    labels = [torch.as_tensor(each.get("labels", of)).clone() for each, of in zip(samples, ids, strict=True)]
    for each in labels:
        each[0] = -100
    ones = [torch.ones_like(each) for each in ids]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
        "attention_mask": pad_sequence(ones, batch_first=True),
    }
