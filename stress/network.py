"""Shards behind servers that are not ours: the packs of local files, and nginx's own log of what that took."""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from streampack import IterablePackedDataset, JSONLSource
from streampack.sources import ParquetSource
from stress.corpus import Numbers, ride, together
from stress.job import Run, job
from stress.kills import last_step, logged, saved_step, train_and_save
from stress.ranks import Ranks
from stress.servers import Moto, Nginx

KINDS = ("parquet", "jsonl")
COLUMNS = ["i", "n", "text"]  # "other" is in the Parquet files, and nobody asks for it
LANES = 8
GROUPS = 4  # in a Parquet file
MOST = 1.05  # times the bytes that are used
BUCKET = "bucket"


@dataclass(frozen=True)
class Shards:
    """Files of one kind, here or behind a URL, as `stress.kills` takes a corpus."""

    kind: str
    paths: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    def dataset(self) -> IterablePackedDataset:
        """A new one, as a new process would make it."""
        # Within the 60 s that `ride` lets the other rank wait.
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


Place = Callable[[str, list[str]], Shards]
"""(kind, names) -> those files, behind a URL."""


@job(
    "nginx",
    "Parquet and JSONL shards behind nginx: the packs of local files, 1.05x the bytes used",
    limit=500,
)
def nginx(run: Run) -> str:
    """2 ranks x 2 workers, killed in the middle."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / "root"
        with Nginx(Path(name) / "nginx", root=root) as server:
            used = write(run, root)

            def there(kind: str, names: list[str]) -> Shards:
                return Shards(kind, tuple(f"{server.url}/{each}" for each in names))

            return "; ".join(compare(run, kind, root, used[kind], server, there) for kind in KINDS)


@job("s3", "the same behind moto's S3, through s3fs; nginx stands in front, and counts", limit=500)
def s3(run: Run) -> str:
    """2 ranks x 2 workers, killed in the middle."""
    with tempfile.TemporaryDirectory() as name, Moto() as moto:
        root = Path(name) / "root"
        with Nginx(Path(name) / "nginx", proxied=moto.port) as server:
            used = write(run, root)
            with Ranks(1, join=False) as one:  # a client leaves threads behind
                one.run(upload, root, server.url)
            options = {"key": "key", "secret": "secret", "endpoint_url": server.url}

            def there(kind: str, names: list[str]) -> Shards:
                return Shards(kind, tuple(f"s3://{BUCKET}/{each}" for each in names), options)

            return "; ".join(compare(run, kind, root, used[kind], server, there) for kind in KINDS)


def compare(run: Run, kind: str, root: Path, used: int, server: Nginx, there: Place) -> str:
    """Runs over the network beside one over local files; what is to be said of them."""
    names = sorted(path.name for path in root.glob(f"*.{kind}"))
    here, far = Shards(kind, tuple(str(root / name) for name in names)), there(kind, names)
    with Ranks(2) as ranks:
        rides = ranks.run(ride, here, timeout=200)
    packs = sum(map(len, together(rides)))
    reference = [[[pack.digest.hex() for pack in step] for step in one.steps] for one in rides]
    steps = len(reference[0])

    since = len(server.sent())
    with Ranks(2) as ranks:
        rides = ranks.run(partial(ride, workers=2), far, timeout=200)
    assert [[[pack.digest.hex() for pack in step] for step in one.steps] for one in rides] == reference
    whole = ranged(server, since)
    assert whole.bytes <= MOST * used, f"{whole.bytes:,} bytes of {kind} were read and {used:,} are used"

    kills, rng = run.count(3, 1), random.Random(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(kills):
            target = steps * (number + 1) // (kills + 1) + rng.randrange(4)
            with Ranks(2) as ranks:
                ranks.start(train_and_save, far, folder, 0.0)
                deadline = time.monotonic() + 100
                while last_step(folder) < target:
                    assert time.monotonic() < deadline, f"step {target} of {steps} was not reached"
                    time.sleep(0.002)
                ranks.kill()
        since, left = len(server.sent()), 1 - saved_step(folder) / steps
        with Ranks(2) as ranks:
            ranks.run(train_and_save, far, folder, 0.0, timeout=200)
        rest = ranged(server, since)
        for rank, expected in enumerate(reference):
            made = dict(logged(folder, rank))
            assert sorted(made) == list(range(1, steps + 1)), f"rank {rank}: steps are missing"
            assert all(digests == expected[step - 1] for step, digests in logged(folder, rank)), "other packs"
    again = LANES / (GROUPS * len(names))  # each lane begins in the middle of a row group, or a window
    assert rest.bytes < (left + again + 0.05) * whole.bytes, (
        f"{rest.bytes:,} bytes for {left:.0%} of {whole.bytes:,}"
    )
    return (
        f"{len(names)} {kind} shards: {packs:,} packs as of local files, {whole.bytes / used:.3f} times the "
        f"{used / 1e6:,.1f} MB used, in {whole.requests:,} ranged requests; {kills} kills, the packs identical, "
        f"the last {left:.0%} of the run by {rest.bytes / whole.bytes:.0%} of the bytes"
    )


class Traffic(NamedTuple):
    """What a run took."""

    requests: int
    bytes: int


def ranged(server: Nginx, since: int) -> Traffic:
    """What nginx sent since then. All of it ranges, but for what a kill cut off."""
    time.sleep(0.2)  # it writes its log after the client has the answer
    sent = server.sent(since=since)
    whole = [each for each in sent if each.status != 206 or not each.range.startswith("bytes=")]
    assert not whole, f"not a range: {whole[0]}"
    return Traffic(len(sent), sum(each.body for each in sent))


def write(run: Run, root: Path) -> dict[str, int]:
    """Shards of both kinds, with the same rows. Of each kind, the bytes that a run uses."""
    root.mkdir()
    with Ranks(1, join=False) as one:  # pyarrow leaves threads behind
        [used] = one.run(write_shards, root, run.count(64, 6), run.count(1200, 1500), timeout=200)
    found: dict[str, int] = used
    return found


def write_shards(root: Path, shards: int, per_shard: int) -> dict[str, int]:
    """In a process of its own. Rows of some 1.5 kB, as short web pages."""
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
        # Statistics of whole texts would make the footers, which each of four workers reads, 1.6 % of the files.
        parquet.write_table(table, path, row_group_size=per_shard // GROUPS, write_statistics=["i", "n"])
        footer = parquet.read_metadata(path)
        used["parquet"] += footer.serialized_size + 8
        for group in map(footer.row_group, range(footer.num_row_groups)):
            chunks = map(group.column, range(group.num_columns))
            used["parquet"] += sum(c.total_compressed_size for c in chunks if c.path_in_schema in COLUMNS)
    return used


def upload(root: Path, url: str) -> None:
    """In a process of its own."""
    import boto3  # moto brings it

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
