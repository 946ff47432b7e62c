"""Rows: from files, token shards, Hugging Face datasets, memory and iterables; shuffled, mixed, or held out."""

from streampack.sources.as_source import as_source
from streampack.sources.formats.arrow_files import ArrowSource
from streampack.sources.formats.datatrove import DatatroveSource
from streampack.sources.formats.flat_tokens import FlatTokensSource
from streampack.sources.formats.jsonl import JSONLSource
from streampack.sources.formats.mds import MDSSource
from streampack.sources.formats.megatron import MegatronSource
from streampack.sources.formats.parquet import ParquetSource
from streampack.sources.formats.text import TextSource
from streampack.sources.formats.token_shards import TokenShardSource
from streampack.sources.formats.webdataset import WebDatasetSource
from streampack.sources.holdout import Holdout
from streampack.sources.hugging_face import HFSource
from streampack.sources.memory import IterableSource, MapSource
from streampack.sources.mixture import Mix
from streampack.sources.reading import Reading
from streampack.sources.source import Source

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
