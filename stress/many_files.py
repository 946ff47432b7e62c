"""Many lanes, and many files, behind a network with 50 ms a request: how soon the first batch comes."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from streampack import IterablePackedDataset, PackedDataLoader
from streampack.sources.scan import scan
from streampack.storage.ranges import Fetcher
from streampack.storage.read_ahead import SMALLEST_BLOCK
from stress.corpus import record_packs
from stress.files import SOURCES
from stress.job import Run, job, require_failure
from stress.servers import Asked, SlowWeb
from tests.harness.corpus import Numbers
from tests.harness.files import shards
from tests.harness.processes import Ranks

DELAY = 0.05  # seconds a request
BATCH_SIZE = 8
COLUMNS = ["i", "n", "text"]
LANE_BYTES = 75_000  # of read_ahead for each lane; a row group has 16 KB in the columns that are read
TIGHT_LANE_BYTES = 40_000  # where it is read_ahead that limits what is fetched ahead
FIRST_ROUNDS = 60  # to the first batch: 3 s, of 50 ms each, of the 5 s that it may take
SHARD_LANES = 8
MOST_REQUESTS = 800  # of 8 lanes, each of which fetches up to 32 blocks ahead, and footers


@dataclass(frozen=True)
class Reading:
    """What a process reads.

    Attributes:
        kind: of the files.
        paths: the files, or their folder.
        lanes: how many.
        read_ahead: bytes for read-ahead and windows.
        manifest: of a scan.
    """

    kind: str
    paths: str | tuple[str, ...]
    lanes: int
    read_ahead: int
    manifest: str | None = None

    def dataset(self) -> IterablePackedDataset:
        """Build a new dataset, as a new process would."""
        chosen: dict[str, Any] = {"columns": COLUMNS} if self.kind == "parquet" else {}
        return IterablePackedDataset(
            SOURCES[self.kind](self.paths, manifest=self.manifest, **chosen),
            encoder=Numbers(),
            max_seq_len=64,
            buffer_size=16,
            num_lanes=self.lanes,
            shuffle=True,
            shuffle_window=16,
            untrained="keep",
            epochs=1,
            read_ahead=self.read_ahead,
        )


class Read(NamedTuple):
    """What a process read."""

    packs: list[bytes]  # digests
    seconds: float
    held: int  # the most bytes that were fetched ahead of need or lay in windows
    asked: Asked


def read(reading: Reading, web: SlowWeb, batches: int) -> Read:
    """Read the first batches in a process of its own; count from the listing of files on."""
    web.begin(DELAY)
    with Ranks(1, join=False) as process:
        [found] = process.run(read_batches, reading, batches)
        return Read(*found, web.asked())


def read_batches(reading: Reading, batches: int) -> tuple[list[bytes], float, int]:
    """Read, and watch what all lanes hold. Called in a process of its own."""
    fetchers: list[Fetcher] = []
    held = 0
    begin, top_up = Fetcher.__init__, Fetcher.top_up

    def counted(fetcher: Fetcher, *given: Any, **named: Any) -> None:
        begin(fetcher, *given, **named)
        fetchers.append(fetcher)

    def watched(fetcher: Fetcher, **named: Any) -> None:
        nonlocal held
        top_up(fetcher, **named)
        blocks = [block for each in fetchers for block in (*each.in_flight, *each.old)]
        ahead = sum(stop - start for _, start, stop in blocks)
        held = max(held, ahead + sum(each.window + each.reading for each in fetchers))

    begun = time.perf_counter()
    with patch.object(Fetcher, "__init__", counted), patch.object(Fetcher, "top_up", watched):
        loader = PackedDataLoader(reading.dataset(), batch_size=BATCH_SIZE)
        steps = [record_packs(batch) for batch in islice(loader, batches)]
        seconds = time.perf_counter() - begun
    assert len(steps) == batches, "the data ended"
    return [pack.digest for step in steps for pack in step], seconds, held


@job(
    "many-lanes",
    "240 lanes of Parquet over HTTP with 50 ms a request, one process: few rounds of requests to the first batches",
    limit=240,
)
def many_lanes(run: Run) -> str:
    """Read the first batch, and the first 60; compare these with those of local files."""
    lanes, batches = run.count(240, 48), run.count(60, 12)
    with tempfile.TemporaryDirectory() as name, SlowWeb(Path(name)) as web:
        names = write(Path(name), shards("parquet", lanes, 200))
        reading = Reading("parquet", tuple(f"{web.url}/{each}" for each in names), lanes, lanes * LANE_BYTES)
        first, many = read(reading, web, 1), read(reading, web, batches)
        local = read(replace(reading, paths=tuple(f"{name}/{each}" for each in names)), web, batches)
        assert many.packs == local.packs, "other packs than of local files"
        most = (
            4 * lanes + 64
        )  # of each file the size, the version, the footer; and of some lanes the first rows
        assert first.asked.requests <= most, (
            f"{first.asked.requests} requests before the first batch, not {most}"
        )
        check_rounds(first, 1)
        check_rounds(many, batches)
        tight = replace(reading, read_ahead=lanes * TIGHT_LANE_BYTES)
        bounded = read(tight, web, batches)
        limit = tight.read_ahead + SMALLEST_BLOCK  # the last request may exceed it
        assert bounded.held <= limit, f"held {bounded.held:,} bytes, with read_ahead of {tight.read_ahead:,}"
        alone = read(replace(reading, read_ahead=0), web, 8)
        if not run.quick:  # few lanes need few rounds in any case
            require_failure(lambda: check_rounds(alone, 8), "rounds of requests")
    return (
        f"{lanes} lanes and files: the first batch after {first.seconds:.1f} s, {first.asked.requests} requests in "
        f"{first.asked.rounds} rounds; {batches} batches after {many.seconds:.1f} s, {many.asked.rounds} rounds, packs "
        f"as of local files; without read-ahead {alone.asked.rounds} rounds for 8 batches, which the check refuses; "
        f"held at most {bounded.held / 1e6:.1f} MB with read_ahead of {tight.read_ahead / 1e6:.1f} MB"
    )


def check_rounds(found: Read, batches: int) -> None:
    """Check that the requests for so many batches were made side by side."""
    most = FIRST_ROUNDS + 2 * batches
    assert found.asked.rounds <= most, f"{found.asked.rounds} rounds of requests, and {most} are enough"


@job(
    "many-shards",
    "10,000 shards over HTTP with 50 ms a request and a scanned manifest: few requests to the first batch",
    limit=300,
)
def many_shards(run: Run) -> str:
    """Read the first batch of few and of many shards, by a scanned manifest, and by a list of names."""
    counts = (1000, run.count(10_000, 2000))
    told = []
    for kind in ("jsonl", "parquet"):
        few = list(shards(kind, 4, 20, text=20).values())
        found = []
        for count in counts:
            with tempfile.TemporaryDirectory() as name, SlowWeb(Path(name)) as web:
                folder = Path(name, "data")
                folder.mkdir()
                names = write(folder, {f"{i:05}.{kind}": few[i % 4] for i in range(count)})
                listed, manifest = Path(name, "names"), Path(name, "manifest")
                listed.write_text("\n".join(names))
                begun = time.perf_counter()
                with Ranks(1, join=False) as process:  # a scan leaves threads behind
                    scanned = partial(scan, out=manifest, manifest=listed, progress=False)
                    process.run(scanned, f"{web.url}/data", timeout=200)
                seconds = time.perf_counter() - begun
                reading = Reading(kind, f"{web.url}/data", SHARD_LANES, 16 << 20, str(manifest))
                found.append(read(reading, web, 1))
                check_requests(found[-1])
                if count == counts[0]:
                    unscanned = read(replace(reading, manifest=str(listed)), web, 1)
                    require_failure(lambda unscanned=unscanned: check_requests(unscanned), "requests")
        first = found[-1]
        told.append(
            f"{kind}: the first batch of {counts[1]:,} shards after {first.seconds:.1f} s, {first.asked.requests} "
            f"requests in {first.asked.rounds} rounds, and {found[0].asked.requests} of {counts[0]:,} shards; "
            f"{unscanned.asked.requests:,} by their names alone, which the check refuses; the scan took "
            f"{seconds:.0f} s without the delay"
        )
    return "; ".join(told)


def check_requests(found: Read) -> None:
    """Check that the requests until the first batch are those of the lanes, and not of all shards."""
    asked = found.asked
    assert asked.requests <= MOST_REQUESTS, (
        f"{asked.requests} requests before the first batch, {MOST_REQUESTS} are enough"
    )
    assert asked.rounds <= FIRST_ROUNDS, f"{asked.rounds} rounds of requests, {FIRST_ROUNDS} are enough"


def write(folder: Path, files: dict[str, bytes]) -> list[str]:
    """Write files into a folder, and return their names."""
    names = [path.rpartition("/")[2] for path in files]
    for name, content in zip(names, files.values(), strict=True):
        (folder / name).write_bytes(content)
    return names
