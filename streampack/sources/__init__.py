"""Rows: from files, token shards, Hugging Face datasets, memory and iterables; shuffled, mixed, or held out."""

from streampack.sources.arrow_files import ArrowSource
from streampack.sources.as_source import as_source
from streampack.sources.datatrove import DatatroveSource
from streampack.sources.flat_tokens import FlatTokensSource
from streampack.sources.holdout import Holdout
from streampack.sources.hugging_face import HFSource
from streampack.sources.jsonl import JSONLSource
from streampack.sources.mds import MDSSource
from streampack.sources.megatron import MegatronSource
from streampack.sources.memory import IterableSource, MapSource
from streampack.sources.mixture import Mix
from streampack.sources.parquet import ParquetSource
from streampack.sources.reading import Reading
from streampack.sources.source import Source
from streampack.sources.text import TextSource
from streampack.sources.token_shards import TokenShardSource
from streampack.sources.webdataset import WebDatasetSource

__all__ = [
    "ArrowSource",
    "DatatroveSource",
    "FlatTokensSource",
    "HFSource",
    "Holdout",
    "IterableSource",
    "JSONLSource",
    "MDSSource",
    "MapSource",
    "MegatronSource",
    "Mix",
    "ParquetSource",
    "Reading",
    "Source",
    "TextSource",
    "TokenShardSource",
    "WebDatasetSource",
    "as_source",
]
