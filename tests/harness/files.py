"""Files of every format: writers made from the formats' descriptions, corpora of six files, and their damage."""

from __future__ import annotations

import gzip
import io
import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from streampack import (
    DatatroveSource,
    IterablePackedDataset,
    JSONLSource,
    MDSSource,
    MegatronSource,
    ParquetSource,
    TokenShardSource,
)
from streampack.tokenize import tokenize
from tests.harness.corpus import Numbers, rows, write

Documents = Sequence[Sequence[int]]

# MDS.

FIXED = {"int": 8, "uint16": 2, "float32": 4, "ndarray:uint16:2,3": 12}
COMPRESS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gz": ("gz", lambda data: gzip.compress(data, mtime=0)),
    "zstd:3": ("zstd", lambda data: zstandard.compress(data, 3)),
}


def array(value: np.ndarray[Any, Any], *, typed: bool) -> bytes:
    """An array whose shape, and if ``typed`` whose type, comes first; dimensions below 256."""
    code = {"uint16": 16, "int64": 65, "float32": 34}[value.dtype.name]
    return bytes([code] * typed + [value.ndim << 2, *value.shape]) + value.tobytes()


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
    folder: Path,
    rows: Sequence[Mapping[str, Any]],
    columns: dict[str, str],
    *,
    per_shard: int = 10,
    compression: str | None = None,
) -> Path:
    """Write shards of ``per_shard`` samples and their index. ``columns`` has the encoding of each."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for number, first in enumerate(range(0, len(rows), per_shard)):
        samples = []
        for row in rows[first : first + per_shard]:
            parts = [(encoding, ENCODE[encoding](row[name])) for name, encoding in columns.items()]
            sizes = [len(part) for encoding, part in parts if encoding not in FIXED]
            samples.append(struct.pack(f"<{len(sizes)}I", *sizes) + b"".join(part for _, part in parts))
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
        (folder / str((zipped or raw)["basename"])).write_bytes(data)
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


# Tokens of other programs.

MEGATRON_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def write_megatron(
    folder: Path,
    documents: Documents,
    *,
    dtype: str = "int32",
    per_file: int | None = None,
    sentence: int | None = None,
    modes: bool = False,
) -> Path:
    """Write ``.bin`` and ``.idx`` files of ``per_file`` documents. With ``sentence``, documents have several sequences,
    of that many tokens each. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    width = np.dtype(dtype).itemsize
    per_file = per_file or len(documents)
    for number, begin in enumerate(range(0, len(documents), per_file)):
        own = documents[begin : begin + per_file]
        lengths: list[int] = []
        firsts = [0]
        for document in own:
            step = sentence or max(1, len(document))
            lengths += [len(document[i : i + step]) for i in range(0, len(document), step)]
            if not document and sentence is None:
                lengths.append(0)
            firsts.append(len(lengths))
        data = b"".join(np.array(document, dtype).tobytes() for document in own)
        index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + bytes([MEGATRON_CODES[dtype]])
        index += struct.pack("<QQ", len(lengths), len(firsts)) + struct.pack(f"<{len(lengths)}i", *lengths)
        pointers = [width * sum(lengths[:i]) for i in range(len(lengths))]
        index += struct.pack(f"<{len(pointers)}q", *pointers) + struct.pack(f"<{len(firsts)}q", *firsts)
        (folder / f"text_document_{number}.bin").write_bytes(data)
        (folder / f"text_document_{number}.idx").write_bytes(index + bytes(len(lengths) if modes else 0))
    return folder


def write_datatrove(
    folder: Path,
    documents: Documents,
    *,
    losses: Sequence[Sequence[int]] | None = None,
    width: int = 2,
    per_file: int | None = None,
) -> Path:
    """Write ``.ds`` files of ``per_file`` documents, with ``losses`` as bytes of 0 or 1. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    per_file = per_file or len(documents)
    for number, begin in enumerate(range(0, len(documents), per_file)):
        own = documents[begin : begin + per_file]
        path = folder / f"{number:05d}_unshuffled.ds"
        tokens = [token for document in own for token in document]
        ends = np.cumsum([len(document) for document in own]).tolist()
        path.write_bytes(struct.pack(f"<{len(tokens)}{'H' if width == 2 else 'I'}", *tokens))
        path.with_name(f"{path.name}.index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))
        if losses is not None:
            marks = [mark for loss in losses[begin : begin + per_file] for mark in loss]
            path.with_name(f"{path.name}.loss").write_bytes(bytes(marks))
    return folder


def write_flat(
    path: Path, tokens: Sequence[int], *, dtype: str = "uint16", header: str | None = None
) -> Path:
    """Write a flat file of tokens: raw, or with the header of ``numpy`` or ``llm.c``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ids = np.array(tokens, np.dtype(dtype).newbyteorder("<"))
    if header == "numpy":
        with path.open("wb") as file:  # `numpy.save` would add an ending to the name
            np.save(file, ids)
        return path
    head = b""
    if header == "llm.c":
        magic, version = {"uint16": (20240520, 1), "uint32": (20240801, 7)}[dtype]
        head = struct.pack("<3i", magic, version, len(tokens)) + bytes(1012)
    path.write_bytes(head + ids.tobytes())
    return path


# Shards of rows with a text, as they lie behind a URL.

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
    """A source of such shards, that is patient."""
    return (
        ParquetSource(paths, columns=COLUMNS, **settings)
        if kind == "parquet"
        else JSONLSource(paths, **settings)
    )


def small_pieces(monkeypatch: pytest.MonkeyPatch, *, block: int | None = None) -> None:
    """Make parts, batches, chunks and blocks so small that a corpus of some rows has many. They decide no row."""
    for module, sizes in SMALL.items():
        for name, size in sizes.items():
            monkeypatch.setattr(f"streampack.sources.{module}.{name}", size)
    if block is not None:
        monkeypatch.setattr("streampack.storage.remote.RemoteStorage.block", block)


# private: nobody sets these sizes, and a corpus as large as they are would take minutes
SMALL = {
    "formats.row_groups": {"BATCH_ROWS": 3, "KEPT_GROUPS": 2},
    "formats.flat_tokens": {"FlatTokensSource.least": 1, "CHUNK": 22, "ONE_DOCUMENT": 512},
    "hugging_face": {"BATCH_ROWS": 4},
    "arrow_dataset": {"BATCH_ROWS": 4, "KEPT_BATCHES": 3},
}

# Corpora of six files.

FORMATS = ("jsonl", "gz", "parquet", "tokens", "mds", "megatron")
FILES, PER_FILE = 6, 30
ROWS = rows(FILES * PER_FILE)


class Files(NamedTuple):
    """A corpus: its files, in order, and how to open it."""

    paths: list[Path]
    open: Callable[[], Any]
    rows_of: list[list[int]]  # the numbers of the rows of each file

    def rest(self, *bad: int) -> list[int]:
        """Return the numbers of the rows of all files but those."""
        return [i for number, found in enumerate(self.rows_of) if number not in bad for i in found]


def corpus(kind: str, folder: Path) -> Files:
    """Write a corpus of one format, whose rows are `ROWS`."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = [ROWS[first : first + PER_FILE] for first in range(0, len(ROWS), PER_FILE)]
    numbers = [[row["i"] for row in part] for part in parts]
    documents = [Numbers()(row).tokens.tolist() for row in ROWS]
    if kind == "tokens":
        made = tokenize(ROWS, out=folder, encoder=Numbers(), lanes=1, shard_tokens=150, progress=False)
        paths = sorted(made.glob("*.bin"))
        starts = np.cumsum([0, *(header_of(path)["documents"] for path in paths)]).tolist()
        numbers = [list(range(*starts[i : i + 2])) for i in range(len(paths))]
        return Files(paths, lambda: TokenShardSource(folder), numbers)
    if kind == "mds":
        write_mds(folder, ROWS, {"i": "int", "n": "int"}, per_shard=PER_FILE)
        return Files(sorted(folder.glob("*.mds")), lambda: MDSSource(folder, columns=["i", "n"]), numbers)
    if kind == "megatron":
        paths = sorted(write_megatron(folder, documents, per_file=PER_FILE).glob("*.bin"))
        return Files(paths, lambda: MegatronSource(paths), numbers)
    if kind == "datatrove":
        paths = sorted(write_datatrove(folder, documents, width=4, per_file=PER_FILE).glob("*.ds"))
        return Files(paths, lambda: DatatroveSource(paths), numbers)
    ending = {"jsonl": ".jsonl", "gz": ".jsonl.gz", "parquet": ".parquet"}[kind]
    paths = [folder / f"{number}{ending}" for number in range(len(parts))]
    for path, part in zip(paths, parts, strict=True):
        if kind == "parquet":
            pq.write_table(pa.Table.from_pylist(part), path, row_group_size=10)
        else:
            write(path, part)
    if kind == "parquet":
        return Files(paths, lambda: ParquetSource(paths, columns=["i", "n"]), numbers)
    return Files(paths, lambda: JSONLSource(paths), numbers)


def stream(data: Any, **settings: Any) -> IterablePackedDataset:
    """Pack rows of `Numbers`, or ready tokens, in two lanes, once, in windows of seven."""
    common: dict[str, Any] = {"max_seq_len": 24, "buffer_size": 6, "num_lanes": 2, "shuffle": 7}
    if not isinstance(data, TokenShardSource | MegatronSource | DatatroveSource):
        common["encoder"] = Numbers()
    return IterablePackedDataset(data, **{**common, "epochs": 1, **settings})


def skipping(data: Any, **settings: Any) -> IterablePackedDataset:
    """Make a `stream` that leaves out what is bad."""
    return stream(data, **{"skip_bad": True, **settings})


def survivors(packs: Iterable[Any]) -> list[int]:
    """Return the numbers of the rows in packs, or in a loader's batches, each as often as it is there."""
    tokens = [token for pack in packs for token in pack["tokens"].flatten().tolist()]
    return sorted(token // 1000 for token in tokens if token % 1000 == 1)


def listed(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a quarantine."""
    return [json.loads(line) for path in sorted(folder.glob("*")) for line in path.read_text().splitlines()]


# What may happen to a file.


def damage(path: Path, *, group: int, column: int = 0) -> None:
    """Flip bytes in the middle of a column chunk of a Parquet file, whose pages have checksums."""
    chunk = pq.read_metadata(path).row_group(group).column(column)
    middle = chunk.data_page_offset + chunk.total_compressed_size // 2
    content = bytearray(path.read_bytes())
    content[middle : middle + 8] = bytes(byte ^ 0xFF for byte in content[middle : middle + 8])
    path.write_bytes(content)


def varint(number: int) -> bytes:
    """Encode an i64 as in Thrift's compact protocol."""
    number, written = number << 1, bytearray()
    while number >= 0x80:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*written, number])


def rewrite(path: Path, before: int, after: int, *, first: bool = False) -> None:
    """Replace a number in a Parquet footer by one of the same length, everywhere or only at its first place."""
    assert len(varint(before)) == len(varint(after))
    content = path.read_bytes()
    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    footer = content[start:].replace(varint(before), varint(after), 1 if first else -1)
    assert footer != content[start:]
    path.write_bytes(content[:start] + footer)


def rename_column(path: Path) -> None:
    """Give a column of a Parquet file another name."""
    pq.write_table(pq.read_table(path).rename_columns(["i", "m"]), path, row_group_size=10)


def drop_column(path: Path) -> None:
    """Remove a column of an MDS shard from the index."""
    index = json.loads(path.with_name("index.json").read_text())
    for shard in index["shards"]:
        if shard["raw_data"]["basename"] == path.name:
            for key in ("names", "encodings", "sizes"):
                shard[f"column_{key}"].pop()
    path.with_name("index.json").write_text(json.dumps(index))


def header_of(path: Path) -> dict[str, Any]:
    """Return the header of a token shard."""
    header: dict[str, Any] = json.loads(path.read_bytes()[:4096])
    return header


def change_header(path: Path) -> None:
    """Let a token shard say that it is another one of the same size."""
    header = {**header_of(path), "crc32": 7}
    path.write_bytes(json.dumps(header).encode().ljust(4095) + b"\n" + path.read_bytes()[4096:])


def drop_index(path: Path) -> None:
    """Remove the index beside a file."""
    (path.with_suffix(".idx") if path.suffix == ".bin" else path.with_name(f"{path.name}.index")).unlink()


def as_array(path: Path) -> None:
    """Replace JSON lines by one JSON array, a row on each line."""
    lines = path.read_text().splitlines()
    path.write_text("[" + ",\n".join(lines) + "]")


def as_binary(path: Path) -> None:
    """Replace a compressed file by one, under its name, that holds numbers and no lines."""
    path.write_bytes(gzip.compress(np.arange(1000, 2000, dtype="<u4").tobytes()))


HARM: dict[str, Callable[[Path], Any]] = {
    "empty": lambda path: path.write_bytes(b""),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "gone": Path.unlink,
    "gzip data": lambda path: path.write_bytes(gzip.compress(path.read_bytes() * 3)),
    "UTF-16 text": lambda path: path.write_bytes(path.read_text().encode("utf-16")),
    "a JSON array": as_array,
    "CSV": lambda path: path.write_bytes(b"i,n\n" + b"".join(b"%d,3\n" % i for i in range(150))),
    "binary": as_binary,
    "no footer": lambda path: path.write_bytes(path.read_bytes()[:-30]),
    "no column": rename_column,
    "no column of the index": drop_column,
    "another header": change_header,
    "no index": drop_index,
}
KNOWN_AT_START = (
    "empty",
    "gone",
    "no column of the index",
    "no index",
    "no footer",
    "no column",
)
"""Harm that is known when the source is made, or divided by its footers; other harm shows when the file is read."""
CUT_OFF = "it was cut off or replaced"
CASES = [
    ("jsonl", "empty", "it is empty"),
    ("jsonl", "zeros", "bytes are zeros: it was not written to its end"),
    ("jsonl", "gone", "there is no such file"),
    ("jsonl", "gzip data", "it is compressed: let its name end in .gz"),
    ("jsonl", "UTF-16 text", "it is UTF-16: convert it to UTF-8"),
    ("jsonl", "a JSON array", "it is a JSON array: let its name end in .json"),
    ("jsonl", "CSV", "if it is text, TextSource("),
    ("gz", "binary", "lines is a JSON object"),
    ("gz", "empty", "it is empty"),
    ("gz", "zeros", "it cannot be decompressed"),
    ("gz", "gone", "there is no such file"),
    ("parquet", "empty", "it is empty"),
    ("parquet", "zeros", "this is no Parquet file"),
    ("parquet", "gone", "there is no such file"),
    ("parquet", "no footer", "this is no Parquet file, or its end is missing"),
    ("parquet", "no column", "it has no column 'n'; it has 'i', 'm'"),
    ("tokens", "empty", CUT_OFF),
    ("tokens", "zeros", "the shard is no token shard"),
    ("tokens", "gone", "there is no such file"),
    ("tokens", "another header", "it is not the shard that its index describes"),
    ("mds", "empty", CUT_OFF),
    ("mds", "zeros", "it holds 0 samples and its index says 30"),
    ("mds", "gone", "there is no such file"),
    ("mds", "no column of the index", "it has no column 'n'; it has 'i'"),
    ("megatron", "empty", "it is empty"),
    ("megatron", "no index", ".idx beside it; name pairs of Megatron's files"),
    ("datatrove", "gone", "there is no such file"),
    ("datatrove", "no index", ".ds.index beside it, which says where documents end"),
]
"""(format, harm, the reason that is listed)."""
