"""Files behind nginx, S3 and a slow server: the packs of local files, bytes sent, how soon the first batch comes.

A slow server takes 50 ms to answer a request. A round is a request that came only after another was answered.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from streampack import PackedDataLoader
from stress.corpus import Files, digests_of, global_steps, record_packs, run_apart, run_rank
from stress.growth import private_memory
from stress.job import Run, job
from stress.kills import check_log, last_logged_step, saved_step, train_and_save, wait_until
from stress.servers import Nginx, Pace, moto_server, nginx_server
from tests.harness.files import shards, source
from tests.harness.processes import Ranks, run_forked
from tests.harness.stores import Web

KINDS = ("parquet", "jsonl")
COLUMNS = ["i", "n", "text"]  # the Parquet files of `write_shards` also have "other", which is not read
LANES = 8
GROUPS = 4  # row groups of a Parquet file
MAX_OVERHEAD = 1.05  # bytes sent over bytes used
BUCKET = "bucket"

DELAY = 0.05  # seconds a request
BATCH_SIZE = 8
LANE_BYTES = 75_000  # of prefetch for each lane; a row group has 16 KB in the columns that are read
MOST_MEMORY = 90 << 10  # KiB that a process may take for 240 lanes
FIRST_ROUNDS = 60  # to the first batch: 3 s, of 50 ms each, of the 5 s that it may take
MOST_REQUESTS = 800  # of 8 lanes, which prefetch up to 32 blocks each, and footers


def files_of(
    kind: str, paths: str | tuple[str, ...], options: dict[str, Any], settings: dict[str, Any]
) -> Files:
    """Return files that are read once, shuffled, with these options of the source and settings."""
    chosen: dict[str, Any] = {"columns": COLUMNS} if kind == "parquet" else {}
    settings = {"max_seq_len": 64, "num_lanes": LANES, "shuffle": True, "epochs": 1, **settings}
    return Files([], None, settings, kind=kind, paths=paths, options={**chosen, **options})


@job(
    "nginx",
    "Parquet and JSONL shards behind nginx: the packs of local files, 1.05x the bytes used",
    limit=500,
)
def nginx(run: Run) -> str:
    """Run 2 ranks x 2 workers over shards of both kinds, whole and killed in the middle."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / "root"
        with nginx_server(Path(name) / "nginx", root=root) as server:
            used = write_both(run, root)
            return compare(run, root, used, server, server.url, {})


@job("s3", "the same from moto's S3, through s3fs, with nginx as a proxy that counts", limit=500)
def s3(run: Run) -> str:
    """Run 2 ranks x 2 workers over shards of both kinds, whole and killed in the middle."""
    with tempfile.TemporaryDirectory() as name, moto_server() as port:
        root = Path(name) / "root"
        with nginx_server(Path(name) / "nginx", proxied=port) as server:
            used = write_both(run, root)
            run_apart(upload, root, server.url)  # an S3 client leaves threads running
            options = {"key": "key", "secret": "secret", "endpoint_url": server.url}
            return compare(run, root, used, server, f"s3://{BUCKET}", options)


def compare(run: Run, root: Path, used: dict[str, int], server: Nginx, place: str, options: Any) -> str:
    """Compare runs over the network with runs over local files, of shards of both kinds; return a summary."""
    told = []
    # Within the 60 s after which `run_rank` gives up on another rank.
    options = {"storage": {"options": options or {}, "timeout": 10.0, "max_outage": 0.5}}
    for kind in KINDS:
        names = sorted(path.name for path in root.glob(f"*.{kind}"))
        local = files_of(kind, tuple(str(root / name) for name in names), {}, {"shuffle": 32})
        remote = replace(
            local, paths=tuple(f"{place}/{name}" for name in names), options=local.options | options
        )
        told.append(f"{len(names)} {kind} shards: {compare_kind(run, local, remote, used[kind], server)}")
    return "; ".join(told)


def compare_kind(run: Run, local: Files, remote: Files, used: int, server: Nginx) -> str:
    """Compare runs over the network, whole and killed, with one over local files; return a summary."""
    results = run_forked(run_rank, 2, local, timeout=200)
    packs = sum(map(len, global_steps(results)))
    reference = digests_of(results)
    steps = len(reference[0])

    since = len(server.lines())
    results = run_forked(partial(run_rank, workers=2), 2, remote, timeout=200)
    assert digests_of(results) == reference
    whole = server.traffic(since)
    if not run.quick:  # with few shards, what is read after the ends of parts is more of the whole
        assert whole.bytes <= MAX_OVERHEAD * used, (
            f"{whole.bytes:,} bytes of {remote.kind} were sent, {used:,} are used"
        )

    kills, rng = run.count(3, 1), random.Random(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(kills):
            target = steps * (number + 1) // (kills + 1) + rng.randrange(4)
            with Ranks(2) as ranks:
                ranks.start(train_and_save, remote, folder, 0.0)
                wait_until(lambda target=target: last_logged_step(folder) >= target, 100, f"step {target}")
                ranks.kill()
        since, left = len(server.lines()), 1 - saved_step(folder) / steps
        run_forked(train_and_save, 2, remote, folder, 0.0, timeout=200)
        rest = server.traffic(since)
        for rank, expected in enumerate(reference):
            check_log(folder, rank, expected)
    # Each lane resumes within a row group or a window, and reads it again.
    repeated = LANES / (GROUPS * len(remote.paths))
    assert rest.bytes < (left + repeated + 0.05) * whole.bytes, (
        f"{rest.bytes:,} bytes for {left:.0%} of {whole.bytes:,}"
    )
    return (
        f"{packs:,} packs as of local files, {whole.bytes / used:.3f} times the "
        f"{used / 1e6:,.1f} MB used, in {whole.requests:,} ranged requests; {kills} kills, the packs identical, "
        f"the last {left:.0%} of the run by {rest.bytes / whole.bytes:.0%} of the bytes"
    )


def write_both(run: Run, root: Path) -> Any:
    """Write shards of both kinds with the same rows; return the bytes that a run uses of each kind."""
    root.mkdir()
    # Pyarrow leaves threads running.
    [used] = run_apart(write_shards, root, run.count(64, 6), run.count(1200, 1500), timeout=200)
    return used


def write_shards(root: Path, shards: int, per_shard: int) -> dict[str, int]:
    """Write rows of some 1.5 kB, like short web pages. Called in a process of its own."""
    import pyarrow
    from pyarrow import parquet

    rng, used = np.random.default_rng(0), dict.fromkeys(KINDS, 0)
    for shard in range(shards):
        rows = [
            {
                "i": i,
                "n": int(rng.integers(1, 30)),
                "text": rng.integers(97, 123, rng.integers(1, 3000), np.uint8).tobytes().decode(),
            }
            for i in range(shard * per_shard, (shard + 1) * per_shard)
        ]
        text = root / f"{shard:03}.jsonl"
        text.write_text("".join(json.dumps(row) + "\n" for row in rows))
        used["jsonl"] += text.stat().st_size
        path = root / f"{shard:03}.parquet"
        table = pyarrow.Table.from_pylist([{**row, "other": row["text"][::-1]} for row in rows])
        # With statistics of the texts, the footers, which each of four workers reads, would be 1.6 % of the files.
        parquet.write_table(table, path, row_group_size=per_shard // GROUPS, write_statistics=["i", "n"])
        footer = parquet.read_metadata(path)
        used["parquet"] += footer.serialized_size + 8
        for group in map(footer.row_group, range(footer.num_row_groups)):
            chunks = map(group.column, range(group.num_columns))
            used["parquet"] += sum(c.total_compressed_size for c in chunks if c.path_in_schema in COLUMNS)
    return used


def upload(root: Path, url: str) -> None:
    """Upload all files of a folder to the S3 server. Called in a process of its own."""
    import boto3  # a dependency of moto

    client = boto3.client(
        "s3",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id="key",
        aws_secret_access_key="secret",
    )
    client.create_bucket(Bucket=BUCKET)
    for path in sorted(root.iterdir()):
        client.put_object(Bucket=BUCKET, Key=path.name, Body=path.read_bytes())


class Read(NamedTuple):
    """Counts of what one process has read."""

    packs: list[str]  # digests
    seconds: float
    memory: int
    """KiB that the process had more of at the end."""
    requests: int
    rounds: int
    """The most requests in a chain, where each came only after the one before was answered."""


def read(files: Files, web: Web, batches: int) -> Read:
    """Read the first batches in a process of its own; count from the listing of files on."""
    web.requests.clear()
    web.fault = pace = Pace(DELAY)
    [found] = run_apart(read_batches, files, batches)
    return Read(*found, len(web.requests), pace.answered)


def read_batches(files: Files, batches: int) -> tuple[list[str], float, int]:
    """Return what `Read` holds of the first batches. Called in a process of its own."""
    begun, before = time.perf_counter(), private_memory(os.getpid())
    loader = PackedDataLoader(files.dataset(), batch_size=BATCH_SIZE)
    steps = [record_packs(batch) for batch in islice(loader, batches)]
    assert len(steps) == batches, "the data ended"
    seconds, memory = time.perf_counter() - begun, private_memory(os.getpid()) - before
    return [pack.digest for step in steps for pack in step], seconds, memory


@job(
    "many-lanes",
    "240 lanes of Parquet over HTTP with 50 ms a request, one process: few rounds of requests to the first batches",
    limit=240,
)
def many_lanes(run: Run) -> str:
    """Read the first batch, and the first 60; compare these with those of local files."""
    lanes, batches = run.count(240, 48), run.count(60, 12)
    files = {f"/{path.rpartition('/')[2]}": data for path, data in shards("parquet", lanes, 200).items()}
    with tempfile.TemporaryDirectory() as name, Web(files) as web:
        for path, data in files.items():
            Path(name + path).write_bytes(data)
        urls = tuple(web.url + path for path in files)

        def remote(prefetch: int) -> Files:
            settings = {"buffer_size": 16, "shuffle": 16, "num_lanes": lanes, "prefetch": prefetch}
            return files_of("parquet", urls, {}, settings)

        reading = remote(lanes * LANE_BYTES)
        first, many = read(reading, web, 1), read(reading, web, batches)
        local = read(replace(reading, paths=tuple(name + path for path in files)), web, batches)
        assert many.packs == local.packs, "other packs than of local files"
        # Of each file the size, the version, and the footer by two requests; and of some lanes the first rows.
        most, made = 4 * lanes + 64, first.requests
        assert made <= most, f"{made} requests before the first batch, not {most}"
        check_rounds(first, 1)
        check_rounds(many, batches)
        assert many.memory <= MOST_MEMORY, f"{many.memory} KiB, not {MOST_MEMORY}"
        alone = read(remote(0), web, 8)
        if not run.quick:  # few lanes need few rounds in any case
            with pytest.raises(AssertionError, match="rounds of requests"):
                check_rounds(alone, 8)
    return (
        f"{lanes} lanes and files: the first batch after {first.seconds:.1f} s, {first.requests} requests in "
        f"{first.rounds} rounds; {batches} batches after {many.seconds:.1f} s, {many.rounds} rounds and "
        f"{many.memory >> 10} MiB, packs as of local "
        f"files; without prefetching {alone.rounds} rounds for 8 batches, which the check refuses"
    )


def check_rounds(found: Read, batches: int) -> None:
    """Check that the requests for these batches were made side by side."""
    most = FIRST_ROUNDS + 2 * batches
    assert found.rounds <= most, f"{found.rounds} rounds of requests, and {most} are enough"


@job(
    "many-shards",
    "10,000 shards over HTTP with 50 ms a request and a manifest with sizes: few requests to the first batch",
    limit=300,
)
def many_shards(run: Run) -> str:
    """Read the first batch of few and of many shards, by a manifest with sizes, and by a list of names."""
    counts = (1000, run.count(10_000, 2000))
    told = []
    for kind in ("jsonl", "parquet"):
        few = list(shards(kind, 4, 20, text=20).values())
        found = []
        for count in counts:
            files = {f"/data/{i:05}.{kind}": few[i % 4] for i in range(count)}
            with tempfile.TemporaryDirectory() as name, Web(files) as web:
                listed, manifest = Path(name, "names"), Path(name, "manifest")
                listed.write_text("".join(f"{Path(path).name}\n" for path in files))
                begun = time.perf_counter()
                by_names = {"manifest": str(listed)}
                whole = source(kind, f"{web.url}/data", **by_names)
                manifest.write_text(whole.corpus.manifest())
                seconds = time.perf_counter() - begun
                settings = {"buffer_size": 16, "shuffle": 16, "prefetch": 16 << 20}
                reading = files_of(kind, f"{web.url}/data", {"manifest": str(manifest)}, settings)
                found.append(read(reading, web, 1))
                check_requests(found[-1])
                if count == counts[0]:
                    unlisted = read(replace(reading, options=reading.options | by_names), web, 1)
                    with pytest.raises(AssertionError, match="requests"):
                        check_requests(unlisted)
        first = found[-1]
        told.append(
            f"{kind}: the first batch of {counts[1]:,} shards after {first.seconds:.1f} s, {first.requests} "
            f"requests in {first.rounds} rounds, and {found[0].requests} of {counts[0]:,} shards; "
            f"{unlisted.requests:,} by their names alone, which the check refuses; looking them up took "
            f"{seconds:.0f} s without the delay"
        )
    return "; ".join(told)


def check_requests(found: Read) -> None:
    """Check that the requests until the first batch are those of the lanes, and not of all shards."""
    many = f"{found.requests} requests before the first batch, {MOST_REQUESTS} are enough"
    assert found.requests <= MOST_REQUESTS, many
    assert found.rounds <= FIRST_ROUNDS, f"{found.rounds} rounds of requests, {FIRST_ROUNDS} are enough"
