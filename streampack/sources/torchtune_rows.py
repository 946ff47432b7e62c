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
    prompt is trained as the answer; ``AlpacaToMessages`` formats ``None`` into the prompt.

    Args:
        row: for the transform.
        columns: that it reads, see `columns_read`.

    Raises:
        ValueError: naming the column and the message.
    """
    alpaca = "instruction" in columns  # it has an optional input
    for name, column in columns.items():
        if name == "image" or column not in row:
            continue
        value = row[column]
        if isinstance(value, list | tuple | np.ndarray):
            key = "value" if name == "conversations" else "content"
            for i, message in enumerate(value):
                content = message.get(key, "") if isinstance(message, Mapping) else ""
                if not isinstance(content, str | list):
                    role = message.get("role") or message.get("from")
                    raise ValueError(
                        f"column {column!r}, message {i} ({role}) has {_no_text(content)}, for which torchtune's "
                        "transform may put that of the message before it; mend the row, or leave it out "
                        "(skip_bad: True)"
                    )
        elif not isinstance(value, str) and not (value is None and (name, alpaca) == ("input", True)):
            raise ValueError(
                f"column {column!r} has {_no_text(value)}; mend the row, or leave it out (skip_bad: True)"
            )


def _no_text(value: Any) -> str:
    return "no content (null)" if value is None else f"content of type {type(value).__name__}, not text"


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
