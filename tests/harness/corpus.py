"""Small corpora for tests of streams. All tokens differ, so that a pack's content shows in its tokens."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import zstandard

from streampack import IGNORE_INDEX, IterableSource, JSONLSource, MapSource, Pack, Sample
from streampack.lanes.lane_state import LaneEvent, Snapshot
from streampack.sources import Reading, Source
from streampack.types import Row

# Without the time of writing, so that a file that is written again with the same rows is the same file.
PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": lambda data: gzip.compress(data, mtime=0),
    ".bz2": bz2.compress,
    ".xz": lambda data: lzma.compress(data, preset=1),  # whose window takes 1 MiB
    ".zst": zstandard.compress,
    ".zstd": zstandard.compress,
    ".lz4": lambda data: pa.compress(data, "lz4", asbytes=True),
}
STRIDE = 1000  # sample i has the tokens 1000 i + 1, 1000 i + 2, ...


def rows(
    count: int, *, longest: int = 12, overlong: int = 0, empty: bool = False, seed: int = 0
) -> list[dict[str, int]]:
    """Make rows for `Numbers`: mostly short, up to ``longest`` tokens, every twelfth up to ``overlong``; some empty."""
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.integers(1, longest + 1, count), rng.integers(1, longest + 1, count))
    if overlong:
        lengths[::12] = rng.integers(longest, overlong + 1, len(lengths[::12]))
    if empty:
        lengths[rng.random(count) < 0.1] = 0
    return [{"i": i, "n": n} for i, n in enumerate(lengths.tolist())]


class Numbers:
    """Encodes ``{"i": 3, "n": 4}`` as the tokens 3001 to 3004, the first third of them not trained.

    Of every third row all are, and labels and tokens are one array.
    """

    def __init__(self, name: str = "numbers") -> None:
        self.name = name
        self.calls = 0
        self.bad: int | None = None  # the row that cannot be encoded
        self.error: Exception = ValueError("cannot be encoded")

    def __call__(self, row: Mapping[str, Any], /) -> Sample:
        self.calls += 1
        if row["i"] == self.bad:
            raise self.error
        tokens = STRIDE * row["i"] + 1 + np.arange(row["n"])
        if row["i"] % 3 == 0:
            return Sample(tokens, tokens)
        labels = tokens.copy()
        labels[: row["n"] // 3] = IGNORE_INDEX
        return Sample(tokens, labels)

    def fingerprint(self) -> str:
        return self.name


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write JSON lines, compressed as the ending of the name says."""
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    data = PACK.get(path.suffix, bytes)(data)
    path.write_bytes(data)
    return path


def make_source(kind: str, folder: Path, rows: list[dict[str, int]]) -> Any:
    """Make a source of that kind; files are written once per folder."""
    if kind == "map":
        return MapSource(rows)
    if kind == "iterable":
        return IterableSource(rows)
    paths = [folder / f"{number}.jsonl{'' if kind == 'jsonl' else '.' + kind}" for number in range(3)]
    step = -(-len(rows) // 3)
    for number, path in enumerate(paths):
        if not path.exists():
            write(path, rows[number * step : (number + 1) * step])
    return JSONLSource(paths)


def samples_in(packs: Iterable[Mapping[str, Any]]) -> dict[int, list[int]]:
    """Return the packs' tokens without padding, by sample: ``{3: [1, 2, 3, 4]}`` for the tokens 3001 to 3004."""
    found: dict[int, list[int]] = {}
    for pack in packs:
        used = int(pack["seq_lens"][: pack["num_seqs"]].sum())
        for token in pack["tokens"][:used].tolist():
            found.setdefault(token // STRIDE, []).append(token % STRIDE)
    return {i: sorted(places) for i, places in sorted(found.items())}


def all_of(rows: Iterable[Mapping[str, int]], times: int = 1) -> dict[int, list[int]]:
    """Return the result of `samples_in` for packs with each sample exactly ``times`` times."""
    return {row["i"]: sorted(list(range(1, row["n"] + 1)) * times) for row in rows if row["n"]}


def numbered(count: int) -> list[dict[str, Any]]:
    """Make rows of text, numbered by ``i``."""
    return [{"i": i, "text": "x" * (i * 7 % 23)} for i in range(count)]


def read_all(source: Any, *, num_lanes: int = 1, **settings: Any) -> list[Mapping[str, Any]]:
    """Return the rows of all lanes, lane after lane."""
    return [
        row.data
        for lane in range(num_lanes)
        for row in source.read(Reading(lane, num_lanes=num_lanes, **settings))
    ]


def identity_of(value: Any) -> Any:
    """Return the identity of a source's corpus, with those entries that must be read from files."""
    if isinstance(value, Source):
        return identity_of(value.identity())
    if isinstance(value, Mapping):
        return {name: identity_of(item) for name, item in value.items()}
    return value() if callable(value) else value


def recorded(events: Iterable[LaneEvent], states: dict[int, Snapshot]) -> Iterator[Pack]:
    """The packs of some lanes; ``states`` takes what is needed to go on behind them."""
    for event in events:
        states[event.lane] = event.state
        if event.pack is not None:
            yield event.pack


def plain(pack: Pack) -> tuple[Any, ...]:
    """All of a pack, to be compared."""
    return (
        pack.tokens.tolist(),
        pack.labels.tolist(),
        pack.seq_lens,
        pack.fragments,
        pack.epoch,
        pack.number,
        pack.lane,
    )


def next_error(reader: Iterator[Row]) -> str:
    """Return the message of the next error."""
    with pytest.raises(ValueError) as error:
        next(reader)
    return str(error.value)


def in_memory(folder: Path) -> str:
    """Copy a folder behind a URL."""
    import fsspec

    files = fsspec.filesystem("memory")
    for path in folder.iterdir():
        files.pipe(f"/{folder.name}/{path.name}", path.read_bytes())
    return f"memory://{folder.name}"
