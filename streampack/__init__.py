"""streampack: streaming sequence packing for LLM training."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from streampack.metrics import Ledger
from streampack.plan import plan_packs
from streampack.types import IGNORE_INDEX, Fragment, Pack, Sample

if TYPE_CHECKING:
    from streampack.attention import make_mask
    from streampack.collate import Batch, collate_packed
    from streampack.dataset import PackedDataset, packed_dataset
    from streampack.encode import MessagesEncoder, TextEncoder, TokensEncoder
    from streampack.iterable import IterablePackedDataset
    from streampack.loader import PackedDataLoader
    from streampack.sources import Holdout, IterableSource, JSONLSource, MapSource

__all__ = [
    "IGNORE_INDEX",
    "Batch",
    "Fragment",
    "Holdout",
    "IterablePackedDataset",
    "IterableSource",
    "JSONLSource",
    "Ledger",
    "MapSource",
    "MessagesEncoder",
    "Pack",
    "PackedDataLoader",
    "PackedDataset",
    "Sample",
    "TextEncoder",
    "TokensEncoder",
    "collate_packed",
    "make_mask",
    "packed_dataset",
    "plan_packs",
]

# Importing torch takes over a second, which `streampack --help` and a planner of lengths need not wait for.
_MODULES = {
    "Batch": "collate",
    "Holdout": "sources",
    "IterablePackedDataset": "iterable",
    "IterableSource": "sources",
    "JSONLSource": "sources",
    "MapSource": "sources",
    "MessagesEncoder": "encode",
    "PackedDataLoader": "loader",
    "PackedDataset": "dataset",
    "TextEncoder": "encode",
    "TokensEncoder": "encode",
    "collate_packed": "collate",
    "make_mask": "attention",
    "packed_dataset": "dataset",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'streampack' has no attribute {name!r}")
    return getattr(import_module(f"streampack.{_MODULES[name]}"), name)
