"""A writer of MDS shards, made from the format's description."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

Row = dict[str, Any]
Columns = dict[str, str]


FIXED = {"int": 8, "uint16": 2, "float32": 4, "ndarray:uint16:2,3": 12}


COMPRESS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gz": ("gz", lambda data: gzip.compress(data, mtime=0)),
    "zstd:3": ("zstd", lambda data: zstandard.compress(data, 3)),
}


def array(value: np.ndarray[Any, Any], *, typed: bool) -> bytes:
    """An array whose shape, and if ``typed`` whose type, comes first; dimensions below 256."""
    code = {"uint16": 16, "int64": 65, "float32": 34}[value.dtype.name]
    head = bytes([code] * typed + [value.ndim << 2, *value.shape])
    return head + value.tobytes()


ENCODE: dict[str, Callable[[Any], bytes]] = {
    "str": str.encode,
    "bytes": bytes,
    "json": lambda value: json.dumps(value).encode(),
    "int": lambda value: struct.pack("<q", value),
    "uint16": lambda value: struct.pack("<H", value),
    "float32": lambda value: struct.pack("<f", value),
    "str_int": lambda value: str(value).encode(),
    "str_float": lambda value: repr(value).encode(),
    "ndarray": lambda value: array(value, typed=True),
    "ndarray:uint16": lambda value: array(value, typed=False),
    "ndarray:uint16:2,3": lambda value: value.tobytes(),
}


def write_mds(
    folder: Path, rows: list[Row], columns: Columns, *, per_shard: int = 10, compression: str | None = None
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for number, first in enumerate(range(0, len(rows), per_shard)):
        samples = []
        for row in rows[first : first + per_shard]:
            parts = [ENCODE[encoding](row[name]) for name, encoding in columns.items()]
            sizes = [
                len(p) for p, encoding in zip(parts, columns.values(), strict=True) if encoding not in FIXED
            ]
            samples.append(struct.pack(f"<{len(sizes)}I", *sizes) + b"".join(parts))
        header = json.dumps({"column_names": list(columns)}).encode()
        at = 4 * (len(samples) + 2) + len(header)
        offsets = [at + sum(map(len, samples[:i])) for i in range(len(samples) + 1)]
        data = struct.pack(f"<{len(samples) + 2}I", len(samples), *offsets) + header + b"".join(samples)
        raw = {"basename": f"shard.{number:05d}.mds", "bytes": len(data), "hashes": {}}
        zipped = None
        if compression:
            suffix, compress = COMPRESS[compression]
            data = compress(data)
            zipped = {"basename": f"{raw['basename']}.{suffix}", "bytes": len(data), "hashes": {}}
        (folder / (zipped or raw)["basename"]).write_bytes(data)
        entries.append(
            {
                "column_encodings": list(columns.values()),
                "column_names": list(columns),
                "column_sizes": [FIXED.get(encoding) for encoding in columns.values()],
                "compression": compression,
                "format": "mds",
                "hashes": [],
                "raw_data": raw,
                "samples": len(samples),
                "size_limit": 1 << 26,
                "version": 2,
                "zip_data": zipped,
            }
        )
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))
    return folder
