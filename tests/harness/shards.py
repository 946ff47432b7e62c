"""Shards behind a URL: their content, sources with short waits, and the packs that come of them."""

from __future__ import annotations

import gzip
import io
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from streampack import IterablePackedDataset, JSONLSource
from streampack.sources import ParquetSource
from streampack.storage.retries import Retries
from tests.harness.corpus import Numbers, plain, rows
from tests.harness.web import Web

KINDS = ("jsonl", "gz", "parquet")
COLUMNS = ["i", "n", "text"]


def shards(kind: str, count: int, per_shard: int = 40, *, text: int = 300) -> dict[str, bytes]:
    """``/c/000.jsonl`` and so on; rows for `Numbers`, with a text of varying length."""
    rng = np.random.default_rng(0)
    data = [
        {**row, "text": bytes(rng.integers(97, 123, rng.integers(1, 2 * text), np.uint8)).decode()}
        for row in rows(count * per_shard)
    ]
    files = {}
    for shard in range(count):
        part = data[shard * per_shard : (shard + 1) * per_shard]
        if kind == "parquet":
            stream = io.BytesIO()
            table = pa.Table.from_pylist([{**row, "other": row["text"] * 3} for row in part])
            pq.write_table(table, stream, row_group_size=max(1, per_shard // 4))
            content = stream.getvalue()
        else:
            content = "".join(json.dumps(row) + "\n" for row in part).encode()
            content = gzip.compress(content) if kind == "gz" else content
        files[f"/c/{shard:03}.{'jsonl.gz' if kind == 'gz' else kind}"] = content
    return files


def source(kind: str, paths: Any = None, **settings: Any) -> Any:
    """A source of that kind, with short waits between retries."""
    settings = {"retries": 9, **settings}
    made: Any = (
        ParquetSource(paths, columns=COLUMNS, **settings)
        if kind == "parquet"
        else JSONLSource(paths, **settings)
    )
    made.corpus = replace(
        made.corpus, retries=Retries(attempts=settings["retries"], first=0.01, longest=0.05)
    )
    return made


def stream(data: Any, **settings: Any) -> IterablePackedDataset:
    common = {"max_seq_len": 24, "buffer_size": 6, "encoder": Numbers(), "num_lanes": 2, "shuffle": True}
    return IterablePackedDataset(data, **{**common, "shuffle_window": 8, "epochs": 1, **settings})


def packs(data: Any, **settings: Any) -> list[Any]:
    return [plain(pack) for pack in stream(data, **settings).stream()]


def used(kind: str, files: dict[str, bytes]) -> int:
    """Bytes that a reader needs: whole files; of Parquet the footers and the columns that are read."""
    if kind != "parquet":
        return sum(map(len, files.values()))
    total = 0
    for content in files.values():
        footer = pq.read_metadata(io.BytesIO(content))
        total += footer.serialized_size + 8
        for group in map(footer.row_group, range(footer.num_row_groups)):
            columns = map(group.column, range(group.num_columns))
            total += sum(c.total_compressed_size for c in columns if c.path_in_schema in COLUMNS)
    return total


def urls(web: Web) -> list[str]:
    return [web.url + path for path in web.files]
