"""Shards behind nginx and S3: the same packs as from local files, and the bytes that nginx's log counts."""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from streampack import IterablePackedDataset, JSONLSource
from streampack.sources import ParquetSource
from stress.corpus import RankResult, global_steps, run_rank
from stress.job import Run, job
from stress.kills import check_log, last_logged_step, saved_step, train_and_save
from stress.servers import Moto, Nginx
from tests.harness.corpus import Numbers
from tests.harness.processes import Ranks

KINDS = ("parquet", "jsonl")
COLUMNS = ["i", "n", "text"]  # the Parquet files also have "other", which is not read
LANES = 8
GROUPS = 4  # row groups of a Parquet file
MAX_OVERHEAD = 1.05  # bytes sent over bytes used
BUCKET = "bucket"


@dataclass(frozen=True)
class Shards:
    """Files of one kind, local or behind URLs; has the `dataset` method of `stress.corpus.Corpus`."""

    kind: str
    paths: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    def dataset(self) -> IterablePackedDataset:
        """Build a new dataset, as a new process would."""
        # Within the 60 s after which `run_rank` gives up on another rank.
        settings: Any = {"storage_options": self.options, "retries": 3, "timeout": 10.0}
        if self.kind == "parquet":
            source: Any = ParquetSource(self.paths, columns=COLUMNS, **settings)
        else:
            source = JSONLSource(self.paths, **settings)
        return IterablePackedDataset(
            source,
            encoder=Numbers(),
            max_seq_len=64,
            num_lanes=LANES,
            shuffle=True,
            shuffle_window=32,
            epochs=1,
        )


MakeRemote = Callable[[str, list[str]], Shards]
"""Function (kind, file names) -> those files behind URLs."""


@job(
    "nginx",
    "Parquet and JSONL shards behind nginx: the packs of local files, 1.05x the bytes used",
    limit=500,
)
def nginx(run: Run) -> str:
    """Run 2 ranks x 2 workers over shards of both kinds, whole and killed in the middle."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / "root"
        with Nginx(Path(name) / "nginx", root=root) as server:
            used = write(run, root)

            def remote(kind: str, names: list[str]) -> Shards:
                return Shards(kind, tuple(f"{server.url}/{each}" for each in names))

            return "; ".join(compare(run, kind, root, used[kind], server, remote) for kind in KINDS)


@job("s3", "the same behind moto's S3, through s3fs, with nginx as a proxy that counts", limit=500)
def s3(run: Run) -> str:
    """Run 2 ranks x 2 workers over shards of both kinds, whole and killed in the middle."""
    with tempfile.TemporaryDirectory() as name, Moto() as moto:
        root = Path(name) / "root"
        with Nginx(Path(name) / "nginx", proxied=moto.port) as server:
            used = write(run, root)
            with Ranks(1, join=False) as process:  # an S3 client leaves threads behind
                process.run(upload, root, server.url)
            options = {"key": "key", "secret": "secret", "endpoint_url": server.url}

            def remote(kind: str, names: list[str]) -> Shards:
                return Shards(kind, tuple(f"s3://{BUCKET}/{each}" for each in names), options)

            return "; ".join(compare(run, kind, root, used[kind], server, remote) for kind in KINDS)


def compare(run: Run, kind: str, root: Path, used: int, server: Nginx, remote_of: MakeRemote) -> str:
    """Compare runs over the network, whole and killed, with one over local files; return a summary."""
    names = sorted(path.name for path in root.glob(f"*.{kind}"))
    local, remote = Shards(kind, tuple(str(root / name) for name in names)), remote_of(kind, names)
    with Ranks(2) as ranks:
        results = ranks.run(run_rank, local, timeout=200)
    packs = sum(map(len, global_steps(results)))
    reference = hex_digests(results)
    steps = len(reference[0])

    since = len(server.responses())
    with Ranks(2) as ranks:
        results = ranks.run(partial(run_rank, workers=2), remote, timeout=200)
    assert hex_digests(results) == reference
    whole = traffic(server, since)
    if not run.quick:  # with few shards, what is read behind the ends of parts is more of the whole
        assert whole.bytes <= MAX_OVERHEAD * used, (
            f"{whole.bytes:,} bytes of {kind} were sent, {used:,} are used"
        )

    kills, rng = run.count(3, 1), random.Random(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(kills):
            target = steps * (number + 1) // (kills + 1) + rng.randrange(4)
            with Ranks(2) as ranks:
                ranks.start(train_and_save, remote, folder, 0.0)
                deadline = time.monotonic() + 100
                while last_logged_step(folder) < target:
                    assert time.monotonic() < deadline, f"step {target} of {steps} was not reached"
                    time.sleep(0.002)
                ranks.kill()
        since, left = len(server.responses()), 1 - saved_step(folder) / steps
        with Ranks(2) as ranks:
            ranks.run(train_and_save, remote, folder, 0.0, timeout=200)
        rest = traffic(server, since)
        for rank, expected in enumerate(reference):
            check_log(folder, rank, expected)
    # Each lane resumes within a row group or a window, and reads it again.
    repeated = LANES / (GROUPS * len(names))
    assert rest.bytes < (left + repeated + 0.05) * whole.bytes, (
        f"{rest.bytes:,} bytes for {left:.0%} of {whole.bytes:,}"
    )
    return (
        f"{len(names)} {kind} shards: {packs:,} packs as of local files, {whole.bytes / used:.3f} times the "
        f"{used / 1e6:,.1f} MB used, in {whole.requests:,} ranged requests; {kills} kills, the packs identical, "
        f"the last {left:.0%} of the run by {rest.bytes / whole.bytes:.0%} of the bytes"
    )


def hex_digests(results: Sequence[RankResult]) -> list[list[list[str]]]:
    """Return the digests of all packs, by rank and step."""
    return [[[pack.digest.hex() for pack in step] for step in result.steps] for result in results]


class Traffic(NamedTuple):
    """Requests and bytes of a run."""

    requests: int
    bytes: int


def traffic(server: Nginx, since: int) -> Traffic:
    """Count what nginx sent from line ``since`` of its log on, and check that every request was for a range."""
    time.sleep(0.2)  # nginx writes its log after the client has the answer
    sent = server.responses(since=since)
    whole = [each for each in sent if each.status != 206 or not each.range.startswith("bytes=")]
    assert not whole, f"not a range: {whole[0]}"
    return Traffic(len(sent), sum(each.body for each in sent))


def write(run: Run, root: Path) -> dict[str, int]:
    """Write shards of both kinds with the same rows; return the bytes that a run uses of each kind."""
    root.mkdir()
    with Ranks(1, join=False) as process:  # pyarrow leaves threads behind
        [used] = process.run(write_shards, root, run.count(64, 6), run.count(1200, 1500), timeout=200)
    found: dict[str, int] = used
    return found


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
