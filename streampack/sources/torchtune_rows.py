"""Rows without nulls that mislead: Arrow's are removed, torchtune's transforms get none as content."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from streampack.sources.arrow_dataset import ArrowDataset

ARROW = "datasets.arrow_dataset"
"""The module of the class ``Dataset``, which is not imported for this."""


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
    """Raise ValueError if one of the ``columns`` that a transform reads, or a message in it, holds no text.

    torchtune's ``OpenAIToMessages`` gives a message without text the content of the message before it, so that the
    prompt is trained as the answer; ``AlpacaToMessages`` formats ``None`` into the prompt.
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


def null_safe(dataset: Any) -> Any:
    """Return a map-style dataset whose rows hold no null that misleads; one that holds none is returned as it is.

    A ``Dataset`` of Hugging Face's becomes an `ArrowDataset`, also within torch's ``Subset`` and ``ConcatDataset``.
    Rows of torchtune's datasets pass `require_content`: its builders (``chat_dataset``, ``alpaca_dataset``) create
    their transforms themselves, so that these rows pass no encoder of ours. Datasets within others are found.
    """
    if type(dataset).__module__ == ARROW:
        return ArrowDataset(dataset)
    if isinstance(dataset, ArrowDataset):
        return dataset
    of_torch = type(dataset).__module__ == "torch.utils.data.dataset"
    changed: dict[str, Any] = {}
    prepare = getattr(dataset, "_prepare_sample", None)
    transform = getattr(prepare, "_message_transform", None)
    if transform is not None and columns_read(transform):
        changed["_prepare_sample"] = copy.copy(prepare)
        changed["_prepare_sample"]._message_transform = _NoNulls(transform)
    for name in ("_datasets", *["datasets"] * of_torch):
        if isinstance(parts := getattr(dataset, name, None), list):
            changed[name] = [null_safe(part) for part in parts]
    within = getattr(dataset, "dataset", None)
    # A class of the user's may use more of a `Dataset` than its rows.
    if hasattr(within, "__getitem__") and (of_torch or type(within).__module__ != ARROW):
        changed["dataset"] = null_safe(within)
    if all(value is getattr(dataset, name) for name, value in changed.items()):
        return dataset
    made = copy.copy(dataset)
    vars(made).update(changed)
    return made
