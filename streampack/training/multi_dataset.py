"""The ``datasets`` and ``dataloader`` of torchtune's recipe for several datasets, as nodes of ``dataset``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streampack.instantiate import COMPONENT

BUILDER = "streampack.training.multi_dataset.transformed_dataset"
OF_LOADER = {"shuffle", "collate_fn", "num_workers"}
WITHOUT_EFFECT = {"parallel_method", "prefetch_factor", "pin_memory", "stop_criteria", "packed"}
"""Other keys of ``dataloader``: the loader here always has processes as workers, pins memory for a GPU, and reads every
source to its end at least once, as torchtune's default ``stop_criteria`` says."""


def transformed_dataset(
    tokenizer: Any,
    *,
    source: str,
    transform: Callable[[Any], Any],
    subset: str | None = None,
    **settings: Any,
) -> Any:
    """Build torchtune's dataset of the rows of ``datasets.load_dataset`` after a transform of the config's."""
    from torchtune.datasets import SFTDataset

    name = {} if subset is None else {"name": subset}
    return SFTDataset(
        source=source, message_transform=transform, model_transform=tokenizer, **name, **settings
    )


def with_dataset(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config with ``dataset`` in place of its ``datasets`` and ``dataloader``.

    >>> made = with_dataset({"datasets": [{"source": "a", "weight": 1.0}], "dataloader": {"shuffle": True}})
    >>> made["shuffle"], made["dataset"][0]["source"], made["dataset"][0]["packed"]
    (True, 'a', False)

    Raises:
        ValueError: for keys that are not used, and beside ``dataset`` or ``data``.
    """
    if both := [key for key in ("dataset", "data") if config.get(key) is not None]:
        raise ValueError(f"datasets and {both[0]} are two answers to what is trained; give one of the two")
    rest = {key: value for key, value in config.items() if key not in ("datasets", "dataloader")}
    nodes, loader = config.get("datasets"), dict(config.get("dataloader") or {})
    if not isinstance(nodes, list) or not nodes or not all(isinstance(node, dict) for node in nodes):
        raise ValueError("dataloader needs datasets: a list with source, transform and weight of each")
    if unknown := sorted({*loader} - OF_LOADER - WITHOUT_EFFECT):
        raise ValueError(
            f"dataloader.{unknown[0]} is not used; its keys are {', '.join(sorted(OF_LOADER | WITHOUT_EFFECT))}"
        )
    packed = {"packed": loader.get("packed", False)}
    made = [
        {COMPONENT: BUILDER, **packed, **{k: v for k, v in node.items() if k != "name"}} for node in nodes
    ]
    return rest | {"dataset": made} | {key: loader[key] for key in OF_LOADER.intersection(loader)}
