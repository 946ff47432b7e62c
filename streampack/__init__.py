"""Streaming sequence packing for LLM training.

>>> import streampack
>>> rows = [{"tokens": [i] * n, "labels": [i] * n} for i, n in enumerate([5, 4, 2, 3, 4])]
>>> packs = streampack.IterablePackedDataset(rows, max_seq_len=8)
>>> for batch in streampack.PackedDataLoader(packs, batch_size=2):
...     print(batch.tokens.tolist())
[[0, 0, 0, 0, 0, 3, 3, 3], [1, 1, 1, 1, 4, 4, 4, 4]]
[[2, 2, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0]]

From rows to batches: a source (`JSONLSource`, `ParquetSource`, `HFSource`, ...; several are a `Mix`), an encoder
(`TextEncoder`, `ChatEncoder`, ...), `IterablePackedDataset`, `PackedDataLoader`. A model is made ready by
`prepare_model_for_packing`, a Hugging Face Trainer by `prepare_trainer_for_packing`. The command `streampack` trains
from configs; README.md and docs/ say more.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from streampack.accounting import Ledger
from streampack.packing.planner import plan_packs
from streampack.types import IGNORE_INDEX, Fragment, Pack, Sample

if TYPE_CHECKING:
    from streampack.attention import make_mask, prepare_model_for_packing
    from streampack.attention.probe import find_leaks
    from streampack.integrations.hf_trainer import prepare_trainer_for_packing
    from streampack.loader.data_loader import PackedDataLoader
    from streampack.map_style.collators import FlatteningCollator, PaddedCollator
    from streampack.map_style.dataset import PackedDataset, packed_dataset
    from streampack.map_style.flatten import flatten_batch, join_documents
    from streampack.map_style.method_loader import method_loader
    from streampack.map_style.samplers import MultipackBatchSampler
    from streampack.packing.batch import Batch, collate_packed
    from streampack.packing.encoders import (
        ChatEncoder,
        HFTokenizer,
        MessagesEncoder,
        PromptCompletionEncoder,
        TextEncoder,
        TokensEncoder,
    )
    from streampack.sources import (
        HFSource,
        Holdout,
        IterableSource,
        JSONLSource,
        MapSource,
        MDSSource,
        ParquetSource,
        TokenShardSource,
    )
    from streampack.sources.mixture import Mix
    from streampack.streaming.dataset import IterablePackedDataset

__version__ = "0.1.0"  # pyproject.toml reads it from here

__all__ = [
    "IGNORE_INDEX",
    "Batch",
    "ChatEncoder",
    "FlatteningCollator",
    "Fragment",
    "HFSource",
    "HFTokenizer",
    "Holdout",
    "IterablePackedDataset",
    "IterableSource",
    "JSONLSource",
    "Ledger",
    "MDSSource",
    "MapSource",
    "MessagesEncoder",
    "Mix",
    "MultipackBatchSampler",
    "Pack",
    "PackedDataLoader",
    "PackedDataset",
    "PaddedCollator",
    "ParquetSource",
    "PromptCompletionEncoder",
    "Sample",
    "TextEncoder",
    "TokenShardSource",
    "TokensEncoder",
    "collate_packed",
    "find_leaks",
    "flatten_batch",
    "join_documents",
    "make_mask",
    "method_loader",
    "packed_dataset",
    "plan_packs",
    "prepare_model_for_packing",
    "prepare_trainer_for_packing",
]

# Importing torch takes over a second, which `streampack --help` and a planner of lengths need not wait for.
_MODULES = {
    "Batch": "collate",
    "ChatEncoder": "encode",
    "FlatteningCollator": "collators",
    "HFSource": "sources",
    "HFTokenizer": "encode",
    "Holdout": "sources",
    "IterablePackedDataset": "iterable",
    "IterableSource": "sources",
    "JSONLSource": "sources",
    "MDSSource": "sources",
    "MapSource": "sources",
    "MessagesEncoder": "encode",
    "Mix": "mix",
    "MultipackBatchSampler": "samplers",
    "PackedDataLoader": "loader",
    "PackedDataset": "dataset",
    "PaddedCollator": "collators",
    "ParquetSource": "sources",
    "PromptCompletionEncoder": "encode",
    "TextEncoder": "encode",
    "TokenShardSource": "sources",
    "TokensEncoder": "encode",
    "collate_packed": "collate",
    "flatten_batch": "flatten",
    "join_documents": "flatten",
    "find_leaks": "attention.probe",
    "make_mask": "attention",
    "method_loader": "batches",
    "packed_dataset": "dataset",
    "prepare_model_for_packing": "attention",
    "prepare_trainer_for_packing": "trainer",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'streampack' has no attribute {name!r}")
    return getattr(import_module(f"streampack.{_MODULES[name]}"), name)
