"""Corpora of six files in every format, and ways to make one of the files unreadable."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from streampack import (
    DatatroveSource,
    IterablePackedDataset,
    JSONLSource,
    MDSSource,
    MegatronSource,
    TokenShardSource,
)
from streampack.sources import ParquetSource
from streampack.sources.token_files import read_header
from streampack.storage.folders import LocalFolder
from streampack.tokenize.tokenize import tokenize
from tests.harness.corpus import Numbers, rows, write
from tests.harness.foreign_tokens import write_datatrove, write_megatron
from tests.harness.mds import write_mds

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
    if kind == "tokens":
        made = tokenize(ROWS, out=folder, encoder=Numbers(), lanes=1, shard_tokens=150, progress=False)
        paths = sorted(made.glob("*.bin"))
        counts = [header_of(path)["documents"] for path in paths]
        starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
        numbers = [list(range(*starts[i : i + 2])) for i in range(len(counts))]
        return Files(paths, lambda: TokenShardSource(folder), numbers)
    if kind == "mds":
        write_mds(folder, ROWS, {"i": "int", "n": "int"}, per_shard=PER_FILE)
        return Files(sorted(folder.glob("*.mds")), lambda: MDSSource(folder, columns=["i", "n"]), numbers)
    if kind in ("megatron", "datatrove"):
        documents = [Numbers()(row).tokens.tolist() for row in ROWS]
        if kind == "megatron":
            paths = sorted(write_megatron(folder, documents, per_file=PER_FILE).glob("*.bin"))
            return Files(paths, lambda: MegatronSource(paths), numbers)
        paths = sorted(write_datatrove(folder, documents, width=4, per_file=PER_FILE).glob("*.ds"))
        return Files(paths, lambda: DatatroveSource(paths), numbers)
    ending = {"jsonl": ".jsonl", "gz": ".jsonl.gz", "parquet": ".parquet"}[kind]
    paths = [folder / f"{number}{ending}" for number in range(len(parts))]
    if kind == "parquet":
        for path, part in zip(paths, parts, strict=True):
            pq.write_table(pa.Table.from_pylist(part), path, row_group_size=10)
        return Files(paths, lambda: ParquetSource(paths, columns=["i", "n"]), numbers)
    for path, part in zip(paths, parts, strict=True):
        write(path, part)
    return Files(paths, lambda: JSONLSource(paths), numbers)


def cut_footer(path: Path) -> None:
    """Remove the end of a file."""
    path.write_bytes(path.read_bytes()[:-30])


def rename_column(path: Path) -> None:
    """Give a column of a Parquet file another name."""
    table = pq.read_table(path)
    pq.write_table(table.rename_columns(["i", "m"]), path, row_group_size=10)


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
    header = read_header(LocalFolder(path.parent), path.name)
    assert header is not None
    return header


def change_header(path: Path) -> None:
    """Say in the header of a token shard that its tokens have another type."""
    header = {**header_of(path), "dtype": "uint16"}
    path.write_bytes(json.dumps(header).encode().ljust(4095) + b"\n" + path.read_bytes()[4096:])


def drop_index(path: Path) -> None:
    """Remove the index beside a file."""
    (path.with_suffix(".idx") if path.suffix == ".bin" else path.with_name(f"{path.name}.index")).unlink()


HARM: dict[str, Callable[[Path], Any]] = {
    "empty": lambda path: path.write_bytes(b""),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "gone": Path.unlink,
    "gzip data": lambda path: path.write_bytes(gzip.compress(path.read_bytes() * 3)),
    "no footer": cut_footer,
    "no column": rename_column,
    "no column of the index": drop_column,
    "another header": change_header,
    "no index": drop_index,
}
KNOWN_AT_START = ("empty", "gone", "no column of the index", "no index")
"""Harm that is known when the source is made; other harm shows when the file is read."""
CUT_OFF = "it was cut off or replaced"
CASES = [
    ("jsonl", "empty", "it is empty"),
    ("jsonl", "zeros", "it is zeros"),
    ("jsonl", "gone", "there is no such file"),
    ("jsonl", "gzip data", "it is gzip data and would be read as plain text"),
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


def stream(data: Any, **settings: Any) -> IterablePackedDataset:
    """Pack rows of `Numbers`, or ready tokens, in two lanes; bad shards are left out."""
    common: dict[str, Any] = {"max_seq_len": 24, "buffer_size": 6, "num_lanes": 2, "on_bad_record": "skip"}
    if not isinstance(data, TokenShardSource | MegatronSource | DatatroveSource):
        common["encoder"] = Numbers()
    return IterablePackedDataset(data, **{**common, "shuffle": True, "shuffle_window": 7, **settings})


def survivors(packs: Any) -> list[int]:
    """Return the numbers of the rows in packs, each as often as it is there."""
    return sorted(token // 1000 for pack in packs for token in pack["tokens"].tolist() if token % 1000 == 1)


def listed(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a quarantine."""
    return [json.loads(line) for path in sorted(folder.glob("*")) for line in path.read_text().splitlines()]
