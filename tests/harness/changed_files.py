"""Corpora of files, of which some are added, removed or changed between two parts of a run."""

from __future__ import annotations

import random
import shutil
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from streampack import IterablePackedDataset, JSONLSource, ParquetSource
from tests.harness.corpus import STRIDE, write

PER_FILE = 1000  # room for the numbers of a file's rows


Rows = dict[str, list[dict[str, int]]]  # of each file


def new_rows(rng: random.Random, number: int) -> list[dict[str, int]]:
    return [{"i": PER_FILE * number + k, "n": rng.randint(1, 30)} for k in range(rng.randint(3, 25))]


def put(folder: Path, files: Rows) -> None:
    """Write the files, and nothing else, into a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, lines in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        if name.endswith(".parquet"):
            pq.write_table(pa.Table.from_pylist(lines), folder / name, row_group_size=6)
        else:
            write(folder / name, lines)


def source_of(folder: Path, files: Rows) -> Any:
    put(folder, files)
    return (ParquetSource if next(iter(files)).endswith(".parquet") else JSONLSource)(folder)


def changed(rng: random.Random, files: Rows, numbers: Iterable[int]) -> Rows:
    """Remove a file, change another, add one to three new ones."""
    kept = dict(files)
    gone, other = rng.sample(sorted(kept), 2)
    del kept[gone]
    kept[other] = new_rows(rng, next(iter(numbers)))
    for number in islice(numbers, rng.randint(1, 3)):
        kept[f"{rng.choice('amz')}{number}.{other.partition('.')[2]}"] = new_rows(rng, number)
    return kept


def tokens_of(packs: Iterable[Mapping[str, Any]], epoch: int | None = None) -> Counter[int]:
    """Count the tokens in packs, of one epoch or of all."""
    found: Counter[int] = Counter()
    for pack in packs:
        if epoch is None or pack["epoch"] == epoch:
            found.update(pack["tokens"][: int(pack["seq_lens"][: pack["num_seqs"]].sum())].tolist())
    return found


def everything(lists: Iterable[Rows], longest: int = PER_FILE) -> Counter[int]:
    """Count the tokens of the rows of some lists that are not too long."""
    rows = [row for files in lists for found in files.values() for row in found if row["n"] <= longest]
    return Counter(STRIDE * row["i"] + 1 + k for row in rows for k in range(row["n"]))


def resumed(data: IterablePackedDataset, state: Mapping[str, Any]) -> IterablePackedDataset:
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore",
            message="the corpus changed|the state is of one of several|the mixture's weights changed",
        )
        data.load_state_dict(state)
    return data


def untouched(before: Rows, now: Rows) -> Rows:
    return {name: rows for name, rows in before.items() if now.get(name) == rows}
