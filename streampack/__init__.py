"""streampack: streaming sequence packing for LLM training."""

from streampack.collate import Batch, collate_packed
from streampack.encode import MessagesEncoder, TextEncoder, TokensEncoder
from streampack.iterable import IterablePackedDataset
from streampack.metrics import Ledger
from streampack.plan import plan_packs
from streampack.sources import IterableSource, JSONLSource, MapSource
from streampack.types import IGNORE_INDEX, Fragment, Pack, Sample

__all__ = [
    "IGNORE_INDEX",
    "Batch",
    "Fragment",
    "IterablePackedDataset",
    "IterableSource",
    "JSONLSource",
    "Ledger",
    "MapSource",
    "MessagesEncoder",
    "Pack",
    "Sample",
    "TextEncoder",
    "TokensEncoder",
    "collate_packed",
    "plan_packs",
]
