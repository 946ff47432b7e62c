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

if TYPE_CHECKING:
    from streampack.accounting import Ledger
    from streampack.attention import find_leaks, make_mask, prepare_model_for_packing
    from streampack.integrations.hf_trainer import prepare_trainer_for_packing
    from streampack.loader import PackedDataLoader
    from streampack.losses import summed_cross_entropy
    from streampack.map_style import (
        FlatteningCollator,
        MultipackBatchSampler,
        PackedDataset,
        method_loader,
        packed_dataset,
    )
    from streampack.packing import Batch, collate_packed
    from streampack.packing.encoders import (
        AnswersEncoder,
        ChatEncoder,
        Encoder,
        HFTokenizer,
        MessagesEncoder,
        ShapeEncoder,
        TextEncoder,
        TokensEncoder,
        encoder_for,
    )
    from streampack.packing.groups import Group
    from streampack.packing.planner import plan_packs
    from streampack.scoring import Score, score
    from streampack.sources import (
        ArrowSource,
        DatatroveSource,
        FlatTokensSource,
        HFSource,
        Holdout,
        IterableSource,
        JSONLSource,
        MapSource,
        MDSSource,
        MegatronSource,
        Mix,
        ParquetSource,
        Source,
        TextSource,
        TokenShardSource,
        WebDatasetSource,
    )
    from streampack.sources.bad_records import Quarantine
    from streampack.storage import Storage
    from streampack.streaming import IterablePackedDataset
    from streampack.types import IGNORE_INDEX, Fragment, Pack, Sample

__version__ = "0.2.0"  # pyproject.toml reads it from here

__all__ = [
    "IGNORE_INDEX",
    "AnswersEncoder",
    "ArrowSource",
    "Batch",
    "ChatEncoder",
    "DatatroveSource",
    "Encoder",
    "FlatTokensSource",
    "FlatteningCollator",
    "Fragment",
    "Group",
    "HFSource",
    "HFTokenizer",
    "Holdout",
    "IterablePackedDataset",
    "IterableSource",
    "JSONLSource",
    "Ledger",
    "MDSSource",
    "MapSource",
    "MediaSample",
    "MegatronSource",
    "MessagesEncoder",
    "Mix",
    "MultipackBatchSampler",
    "Pack",
    "PackedDataLoader",
    "PackedDataset",
    "ParquetSource",
    "Quarantine",
    "Sample",
    "Score",
    "ShapeEncoder",
    "Source",
    "Storage",
    "TextEncoder",
    "TextSource",
    "TokenShardSource",
    "TokensEncoder",
    "VisionEncoder",
    "WebDatasetSource",
    "collate_packed",
    "encoder_for",
    "find_leaks",
    "make_mask",
    "method_loader",
    "packed_dataset",
    "plan_packs",
    "prepare_model_for_packing",
    "prepare_trainer_for_packing",
    "score",
    "summed_cross_entropy",
]

# Importing torch takes over a second and numpy a tenth, which `streampack --help` need not wait for.
_MODULES = {
    "accounting": "Ledger",
    "attention": "find_leaks make_mask prepare_model_for_packing",
    "integrations.hf_trainer": "prepare_trainer_for_packing",
    "loader": "PackedDataLoader",
    "losses": "summed_cross_entropy",
    "map_style": "FlatteningCollator MultipackBatchSampler PackedDataset method_loader packed_dataset",
    "packing": "Batch collate_packed",
    "packing.encoders": "AnswersEncoder ChatEncoder Encoder HFTokenizer MessagesEncoder ShapeEncoder TextEncoder "
    "TokensEncoder VisionEncoder encoder_for",
    "packing.groups": "Group",
    "packing.media": "MediaSample",
    "packing.planner": "plan_packs",
    "scoring": "Score score",
    "sources": "ArrowSource DatatroveSource FlatTokensSource HFSource Holdout IterableSource JSONLSource MDSSource "
    "MapSource MegatronSource Mix ParquetSource Source TextSource TokenShardSource WebDatasetSource",
    "sources.bad_records": "Quarantine",
    "storage": "Storage",
    "streaming": "IterablePackedDataset",
    "types": "IGNORE_INDEX Fragment Pack Sample",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names.split():
            # Kept: an encoder that names `streampack.Sample` for each row would search here each time, 10 us a row.
            return globals().setdefault(name, getattr(import_module(f"streampack.{module}"), name))
    raise AttributeError(f"module 'streampack' has no attribute {name!r}")
