"""Rows for torchtune's message transforms: content that is null is refused, which they would fill or format."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


def columns_read(transform: Any) -> dict[str, str]:
    """Return the columns that one of torchtune's message transforms reads, by its names; empty for any other callable.

    A class of the user's that inherits from one of torchtune's and overrides ``__call__`` reads rows in its own way.
    """
    owner = next((base for base in type(transform).__mro__ if "__call__" in vars(base)), object)
    if not owner.__module__.startswith("torchtune."):
        return {}
    given = getattr(transform, "_column_map", None) or getattr(transform, "column_map", None) or {}
    # AlpacaToMessages knows its columns without a column_map.
    own = ("instruction", "input", "output") if owner.__name__ == "AlpacaToMessages" else ()
    return {**{name: name for name in own}, **given}


def require_content(row: Mapping[str, Any], columns: Mapping[str, str]) -> None:
    """Raise if a column that a transform reads, or a message in it, holds no text.

    torchtune's ``OpenAIToMessages`` gives a message without text the content of the message before it, so that the
    prompt is trained as the answer, and drops tool calls; ``AlpacaToMessages`` formats ``None`` into the prompt.

    Args:
        row: for the transform.
        columns: that it reads, see `columns_read`.

    Raises:
        ValueError: naming the column and the message.
    """
    for name, column in columns.items():
        if name == "image" or column not in row:
            continue
        value = row[column]
        if value is None and not (name == "input" and "instruction" in columns):
            raise ValueError(f"column {column!r} is null; mend the row, or leave it out (skip_bad: True)")
        if not isinstance(value, list | tuple | np.ndarray):
            continue
        for i, message in enumerate(value):
            if not isinstance(message, Mapping):
                continue
            role = message.get("role") or message.get("from")
            calls = message.get("tool_calls")
            if calls is not None and len(calls):
                raise ValueError(
                    f"column {column!r}, message {i} ({role}) has tool calls, which torchtune's transform drops; "
                    "render them by the model's chat template, with ChatEncoder"
                )
            if message.get("value" if name == "conversations" else "content") is None:
                raise ValueError(
                    f"column {column!r}, message {i} ({role}) has no content (null), for which torchtune's transform "
                    "may put that of the message before it; mend the row, or leave it out (skip_bad: True)"
                )


class _NoNulls:
    """One of torchtune's message transforms, with `require_content` before it."""

    def __init__(self, transform: Callable[[Any], Any]) -> None:
        self.transform = transform
        self.columns = columns_read(transform)

    def __call__(self, row: Mapping[str, Any]) -> Any:
        require_content(row, self.columns)
        return self.transform(row)


def refusing_nulls(dataset: Any) -> Any:
    """Return a dataset whose rows pass `require_content`: of torchtune's datasets a shallow copy, any other as it is.

    torchtune's builders (``chat_dataset``, ``alpaca_dataset``) create their transforms themselves, so that their rows
    pass no encoder of ours. Datasets within its ``ConcatDataset`` and torch's ``Subset`` are found.
    """
    changed: dict[str, Any] = {}
    prepare = getattr(dataset, "_prepare_sample", None)
    transform = getattr(prepare, "_message_transform", None)
    if transform is not None and columns_read(transform):
        changed["_prepare_sample"] = copy.copy(prepare)
        changed["_prepare_sample"]._message_transform = _NoNulls(transform)
    if isinstance(parts := getattr(dataset, "_datasets", None), list):
        changed["_datasets"] = [refusing_nulls(part) for part in parts]
    if hasattr(within := getattr(dataset, "dataset", None), "__getitem__"):
        changed["dataset"] = refusing_nulls(within)
    if all(value is getattr(dataset, name) for name, value in changed.items()):
        return dataset
    made = copy.copy(dataset)
    vars(made).update(changed)
    return made
