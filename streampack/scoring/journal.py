"""`Journal`: the results of rows, one JSON object a line, kept while they come in, so that a killed job goes on."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from streampack.storage.folders import lock_folder, settle, write_whole

SUFFIXES = (".jsonl", ".parquet")
ROWS, SETTINGS = "rows.jsonl", "settings.json"


class Journal:
    """The rows written so far, in a folder beside the file that they become.

    Attributes:
        out: the file, which exists only when it is complete.
        kept: rows that an earlier job has written.
    """

    def __init__(self, out: Path, file: BinaryIO, kept: int) -> None:
        self.out = out
        self.kept = kept
        self._file = file

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row.

        Raises:
            ValueError: for a value that JSON cannot hold.
        """
        try:
            line = json.dumps(row, default=_plain, ensure_ascii=False)
        except TypeError as error:
            raise ValueError(
                f"{error}: the result keeps the row's columns, and JSON cannot hold this one; leave the columns out "
                "(--without-rows)"
            ) from None
        self._file.write(line.encode() + b"\n")

    def flush(self) -> None:
        """Hand what was written to the operating system, so that it survives the death of this process."""
        self._file.flush()

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield all rows written so far."""
        self.flush()
        with (_folder(self.out) / ROWS).open("rb") as file:
            for line in file:
                yield json.loads(line)

    def finish(self) -> None:
        """Turn the rows into the file, and remove the folder."""
        folder = _folder(self.out)
        if self.out.suffix == ".jsonl":
            settle(self._file, folder / ROWS, self.out)
        else:
            self._file.close()
            _write_parquet(folder / ROWS, self.out)
        shutil.rmtree(folder)


@contextmanager
def open_journal(out: Path, *, settings: Mapping[str, Any]) -> Iterator[Journal]:
    """Open the journal of a file, and hold it against other processes within the block.

    Args:
        out: the file to write; ``.jsonl`` or ``.parquet``.
        settings: all that decides the rows, by name: text. An earlier journal must have the same ones.

    Raises:
        ValueError: for another suffix, a file that exists, and a journal of other settings or of a running process.
    """
    require_suffix(out)
    if out.exists():
        raise ValueError(f"{out} exists; name another file, or remove it")
    folder = _folder(out)
    with lock_folder(folder, way_out="wait until it ends, or write to another file"):
        _require_same(folder, settings)
        rows = folder / ROWS
        rows.touch()
        kept = _whole_lines(rows)
        with rows.open("ab") as file:
            yield Journal(out, file, kept)


def require_suffix(out: Path) -> None:
    """Check that a file is one of the kinds that can be written.

    Raises:
        ValueError: if it is not.
    """
    if out.suffix not in SUFFIXES:
        raise ValueError(f"{out} ends in {out.suffix!r}; name a file that ends in {' or '.join(SUFFIXES)}")


def _folder(out: Path) -> Path:
    return out.with_name(f"{out.name}.unfinished")


def _require_same(folder: Path, settings: Mapping[str, Any]) -> None:
    path = folder / SETTINGS
    ours = dict(settings)
    if not path.exists():
        write_whole(path, json.dumps(ours, indent=1).encode())
        return
    theirs = json.loads(path.read_bytes())
    for name in sorted({*ours, *theirs}):
        if ours.get(name) != theirs.get(name):
            raise ValueError(
                f"{folder} holds rows of a job with {name}={theirs.get(name)}, and this has {name}={ours.get(name)}; "
                "go on with what it began with, or remove the folder"
            )


def _whole_lines(path: Path) -> int:
    """Count the lines of a file, and cut off the beginning of a line that a killed process left."""
    count = end = 0
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                count, end = count + 1, end + len(line)
    os.truncate(path, end)
    return count


def _plain(value: Any) -> Any:
    """Convert what JSON has no form for: arrays, numpy's numbers, and mappings that are no dicts."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__}")


def _write_parquet(rows: Path, out: Path) -> None:
    """Convert JSON lines to a Parquet file.

    Raises:
        ImportError: without pyarrow.
    """
    import pyarrow
    from pyarrow import json as arrow_json
    from pyarrow import parquet

    with rows.open("rb") as file:
        longest = max((len(line) for line in file), default=0)
    # A line must lie in one block.
    options = arrow_json.ReadOptions(block_size=max(1 << 22, 2 * longest))
    table = arrow_json.read_json(rows, read_options=options) if longest else pyarrow.table({})
    unfinished = out.with_name(f".{out.name}.{os.getpid()}")
    with unfinished.open("wb") as target:
        parquet.write_table(table, target)
        settle(target, unfinished, out)
