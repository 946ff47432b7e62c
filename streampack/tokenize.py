"""`tokenize`: any source becomes token shards, once, by several processes, and again from where a kill stopped it."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from streampack.assemble import check_sample
from streampack.components import build
from streampack.encode import TokensEncoder, qualified_name, without_truncation
from streampack.mix import Mix
from streampack.plan import require, require_positive
from streampack.sources import as_source
from streampack.sources.base import BadRecord, Reading, Source
from streampack.sources.indexed import INDEX
from streampack.sources.shards import (
    DTYPES,
    FORMAT,
    VERSION,
    Shard,
    ShardWriter,
    read_header,
    settle,
    shard_of,
)
from streampack.types import IGNORE_INDEX, Position, Row, Sample

MOST_LANES = 64  # of a source whose number of lanes was not said: the most workers that can share it out
SHARD_TOKENS = 1 << 26  # 128 or 256 MiB
SMALL_VOCABULARY = 1 << 16
PROBED_ROWS = 64  # for the progress bar's total
TOLD_EVERY = 64  # rows; how often a worker says how far it is, and looks if another one failed

Encode = Callable[[Mapping[str, Any]], Sample]
Tell = Callable[[int], object]  # how many more tokens were written


@dataclass(frozen=True)
class Job:
    """What the shards are made of, and how."""

    source: Source
    encode: Encode
    out: Path
    plan: Mapping[str, Any]  # what decides their bytes; it stands in every header

    def path(self, lane: int, number: int) -> Path:
        """Of a lane's shard. Sorted, they are in the order of the lanes."""
        return self.out / f"tokens-{lane:05d}-{number:05d}.bin"


class Stopped(Exception):
    """Another worker failed."""


def tokenize(
    source: Any,
    *,
    out: str | os.PathLike[str],
    encoder: Encode | None = None,
    workers: int = 1,
    lanes: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    dtype: str = "auto",
    progress: bool = True,
) -> Path:
    """Make a folder of token shards, for `TokenShardSource`. Returns the folder.

    >>> import tempfile
    >>> rows = [{"tokens": [i, i], "labels": [i, i]} for i in range(100)]
    >>> folder = tokenize(rows, out=tempfile.mkdtemp(), lanes=2, progress=False)
    >>> sorted(path.name for path in folder.iterdir())
    ['index.json', 'tokens-00000-00000.bin', 'tokens-00001-00000.bin']

    The bytes are a function of the source, the encoder, ``lanes``, ``shard_tokens`` and ``dtype``: the number of
    workers does not change them, nor does a kill. A shard gets its name when it is complete and on disk; the same call
    again keeps those and goes on behind them. The index is written last.

    Args:
        source: whatever an `IterablePackedDataset` takes.
        out: the folder; made if need be.
        encoder: makes a `Sample` of a row; rows of ready tokens need none.
        workers: processes, each of which makes one lane's shards at a time.
        lanes: the parts that the source is divided into. Default: as many as it fills, up to 64.
        shard_tokens: a shard ends with the document that reaches so many.
        dtype: ``"uint16"``, ``"uint32"``, or ``"auto"``: what the tokenizer's ``vocab_size`` fits into.
        progress: show a bar.

    Raises:
        ValueError: for a row that cannot be read or encoded, with its place; for a folder that holds shards of another
            source, encoder or setting; for a mixture. What was complete stays.
        RuntimeError: if a worker was killed.
    """
    require_positive(workers, "workers")
    source, encode = as_source(source), TokensEncoder() if encoder is None else encoder
    if isinstance(source, Mix):
        raise ValueError(
            "a mixture is weighted while it is read; tokenize each of its sources to a folder of its own, and mix those"
        )
    most = MOST_LANES if source.max_lanes is None else min(MOST_LANES, source.max_lanes)
    lanes = min(source.natural_lanes(), most) if lanes is None else require_positive(lanes, "lanes")
    if source.max_lanes is not None and lanes > source.max_lanes:
        raise ValueError(f"the source can be read as {source.max_lanes} lane(s), not as {lanes}")
    require(dtype, "dtype", ("auto", *DTYPES))
    plan = {
        "corpus": source.fingerprint(),
        "encoder": encode.fingerprint() if hasattr(encode, "fingerprint") else qualified_name(encode),
        "lanes": lanes,
        "shard_tokens": require_positive(shard_tokens, "shard_tokens"),
        "dtype": _dtype_for(encode) if dtype == "auto" else dtype,
    }
    job = Job(source, encode, Path(out), plan)
    job.out.mkdir(parents=True, exist_ok=True)
    for leftover in job.out.glob(".tokens-*"):
        leftover.unlink(missing_ok=True)
    begun = [_begun(job, lane) for lane in range(lanes)]
    with _bar(job, begun, shown=progress) as tell:
        _write_index(job, _finish(job, begun, workers, tell))
    return job.out


def from_config(config: Mapping[str, Any]) -> tuple[Source, Encode | None]:
    """The source and encoder of a run's config: its ``tokenizer``, ``data.source`` and ``data.encoder``.

    Raises:
        ValueError: if there is no ``data.source``, or a component cannot be built.
    """
    trusted = config.get("trusted_packages") or ()
    tokenizer = without_truncation(build(config.get("tokenizer"), trusted=trusted))
    inject = {} if tokenizer is None else {"tokenizer": tokenizer, "model_transform": tokenizer}
    data = config.get("data")
    if not isinstance(data, Mapping) or "source" not in data:
        raise ValueError("data.source is missing; name where the rows come from")
    source = as_source(build(data["source"], trusted=trusted, inject=inject))
    return source, build(data.get("encoder"), trusted=trusted, inject=inject)


def _dtype_for(encode: Encode) -> str:
    size = getattr(getattr(encode, "tokenizer", None), "vocab_size", None)
    return "uint16" if isinstance(size, int) and size <= SMALL_VOCABULARY else "uint32"


class Progress(NamedTuple):
    """How far a lane has come."""

    lane: int
    shards: list[Shard]  # complete
    start: Position | None = None  # of the row behind them
    ended: bool = False


def _begun(job: Job, lane: int) -> Progress:
    """What an earlier call left of a lane's shards."""
    shards: list[Shard] = []
    start: Position | None = None
    while (path := job.path(lane, len(shards))).exists():
        header = read_header(path)
        for key, ours in job.plan.items():
            theirs = header.get("plan", {}).get(key)
            if theirs != ours:
                raise ValueError(
                    f"{path} was made with {key}={theirs!r} and this is {key}={ours!r}; give another folder, or remove "
                    "the old shards"
                )
        shards.append(shard_of(path.name, header))
        if header["next"] is None:
            return Progress(lane, shards, ended=True)
        start = tuple(header["next"])
    return Progress(lane, shards, start)


def _finish(job: Job, begun: list[Progress], workers: int, tell: Tell) -> list[Shard]:
    """Make what is missing. The shards of all lanes, in order."""
    missing = [progress for progress in begun if not progress.ended]
    if workers == 1 or len(missing) < 2:
        made = [_make(job, progress, tell) for progress in missing]
    else:
        made = _share_out(job, missing, min(workers, len(missing)), tell)
    shards = {progress.lane: progress.shards for progress in begun}
    shards.update(zip((progress.lane for progress in missing), made, strict=True))
    return [shard for lane in sorted(shards) for shard in shards[lane]]


def _make(job: Job, begun: Progress, tell: Tell) -> list[Shard]:
    """All shards of a lane, from where it stands to its end. ``tell`` hears how many tokens were written."""
    lane, shards, writer, untold = begun.lane, list(begun.shards), None, 0
    notes = {"lane": lane, "plan": job.plan}
    reader = job.source.read(Reading(lane, num_lanes=job.plan["lanes"], start=begun.start))
    try:
        for count, row in enumerate(reader, 1):
            if writer is not None and writer.tokens >= job.plan["shard_tokens"]:
                shards.append(writer.close({**notes, "next": row.position}))
                writer = None
            if writer is None:
                writer = ShardWriter(job.path(lane, len(shards)), dtype=job.plan["dtype"])
            untold += _append(job, row, writer)
            if count % TOLD_EVERY == 0:
                tell(untold)
                untold = 0
        if writer is not None:
            shards.append(writer.close({**notes, "next": None}))
            writer = None
        tell(untold)
    except BadRecord as error:
        raise ValueError(str(error)) from None  # a BadRecord cannot leave its process
    finally:
        if writer is not None:
            writer.abandon()
    return shards


def _append(job: Job, row: Row, writer: ShardWriter) -> int:
    """Encode and write a document; its length in tokens."""
    try:
        sample = job.encode(row.data)
        check_sample(sample)
        trained = sample.labels == sample.tokens
        if not (trained | (sample.labels == IGNORE_INDEX)).all():
            raise ValueError(f"a label is neither its token nor {IGNORE_INDEX}, and a shard keeps no other")
        writer.append(sample.tokens, trained)
    except ValueError as error:
        raise ValueError(f"{job.source.locate(row.origin)}: {error}") from error
    except Exception as error:
        error.add_note(f"while encoding {job.source.locate(row.origin)}")
        raise
    return sample.tokens.size


@dataclass
class Worker:
    """What a worker process knows."""

    job: Job
    counted: Any  # tokens that all workers wrote, in shared memory
    stop: Any  # whether another one failed

    def tell(self, tokens: int) -> None:
        """Count, and leave if nobody waits for the result."""
        with self.counted.get_lock():
            self.counted.value += tokens
        if self.stop.value:
            raise Stopped


_worker: Worker | None = None


def _begin(job: Job, counted: Any, stop: Any, parent: int) -> None:
    global _worker
    _worker = Worker(job, counted, stop)
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()


def _leave_with(parent: int) -> None:
    """End this process when its parent was killed: the queue that it waits at would not tell."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def _work(begun: Progress) -> list[Shard]:
    assert _worker is not None
    return _make(_worker.job, begun, _worker.tell)


def _share_out(job: Job, missing: list[Progress], workers: int, tell: Tell) -> list[list[Shard]]:
    counted, stop, told = mp.Value("q", 0), mp.RawValue("b", 0), 0
    with ProcessPoolExecutor(workers, initializer=_begin, initargs=(job, counted, stop, os.getpid())) as pool:
        futures = [pool.submit(_work, progress) for progress in missing]
        try:
            running = set(futures)
            while running:
                done, running = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()
                tell(counted.value - told)
                told = counted.value
        except BrokenProcessPool:
            raise RuntimeError(
                "a worker process was killed, perhaps for want of memory; the same call again goes on where it stopped"
            ) from None
        finally:
            stop.value = 1
            pool.shutdown(cancel_futures=True)
    return [future.result() for future in futures]


@contextmanager
def _bar(job: Job, begun: list[Progress], *, shown: bool) -> Iterator[Tell]:
    if not shown:
        yield lambda tokens: None
        return
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError("a progress bar needs tqdm: pip install 'streampack[tune]'") from error
    total = None
    with suppress(Exception):  # a stream has no length, and a broken row is reported where it is read
        rows, scale = job.source.probe(PROBED_ROWS)
        total = int(sum(job.encode(row).tokens.size for row in rows) * scale)
    done = sum(shard.tokens for progress in begun for shard in progress.shards)
    with tqdm(total=total, initial=done, unit="tok", unit_scale=True, desc=f"tokenize {job.out}") as bar:
        yield bar.update
        bar.total = bar.n  # until here, an estimate
        bar.refresh()


def _write_index(job: Job, shards: list[Shard]) -> None:
    if not shards:
        raise ValueError("the source has no rows; there is nothing to write")
    index = {
        "format": FORMAT,
        "version": VERSION,
        "dtype": job.plan["dtype"],
        "plan": job.plan,
        "shards": [
            {key: value for key, value in asdict(shard).items() if key != "dtype"} for shard in shards
        ],
    }
    unfinished = job.out / f".tokens-{INDEX}.{os.getpid()}"
    with unfinished.open("w", encoding="utf-8") as file:
        json.dump(index, file, indent=1)
        settle(file, unfinished, job.out / INDEX)
