"""Write any source as token shards, in several processes, resumable after a kill."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from streampack.instantiate import build
from streampack.lanes.lane_config import Encode, LaneConfig
from streampack.lanes.number_of_lanes import require_lanes
from streampack.packing.encoders import TokensEncoder, check_tokenizer
from streampack.packing.encoders.shaped import SHAPE_KEYS, with_encoders
from streampack.packing.settings import Packing
from streampack.sources.as_source import as_source
from streampack.sources.bad_records import BAD_RECORDS_FOLDER, SkipBad, quarantine_for
from streampack.sources.formats.token_shards import DTYPES, FORMAT, VERSION
from streampack.sources.mechanics.corpus_identity import fingerprint_of
from streampack.sources.mechanics.indexed import INDEX
from streampack.sources.source import shared_by_lanes
from streampack.storage.base import map_in_threads
from streampack.storage.folders import Folder, folder_at, write_file
from streampack.storage.remote import scheme_of
from streampack.storage.retries import Storage
from streampack.streaming.run_identity import encoder_identity
from streampack.tokenize.engines import write_here, write_on_ray
from streampack.tokenize.lane_shards import Job, Progress, read_progress
from streampack.validation import require, require_positive

log = logging.getLogger(__name__)
Place = TypeVar("Place", str, Path)
MAX_DEFAULT_LANES = 64
"""The most lanes unless the user says otherwise. A worker writes one lane at a time, so no more workers have work."""

SHARD_TOKENS = 1 << 26
"""Default of ``shard_tokens``: 128 MiB as uint16, 256 MiB as uint32."""

UINT16_VOCABULARY = 1 << 16
"""The largest vocabulary whose ids fit uint16."""

ENGINES = ("processes", "ray")
"""Values of ``engine``."""


def tokenize(
    source: Any,
    *,
    out: Place,
    encoder: Encode | None = None,
    workers: int = 1,
    lanes: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    dtype: str = "auto",
    progress: bool = True,
    engine: str = "processes",
    address: str | None = None,
    shard: tuple[int, int] | None = None,
    finish: bool = False,
    skip_bad: SkipBad = False,
    storage: Storage | Mapping[str, Any] | None = None,
) -> Place:
    """Write a folder of token shards, for `TokenShardSource`, and return ``out``.

    >>> import tempfile
    >>> rows = [{"tokens": [i, i], "labels": [i, i]} for i in range(100)]
    >>> folder = tokenize(rows, out=Path(tempfile.mkdtemp()), lanes=2, progress=False)
    >>> sorted(path.name for path in folder.glob("[!.]*"))
    ['index.json', 'tokens-00000-00000.bin', 'tokens-00001-00000.bin']

    The bytes are a function of the source, the encoder, ``lanes``, ``shard_tokens`` and ``dtype``; neither the number
    of workers nor a kill changes them. A shard gets its name when it is complete and on disk, or stored; the same call
    keeps such shards and continues after them. The index is written last. Tokenize what is new to another folder:
    `TokenShardSource` reads several as one corpus.

    Args:
        source: whatever an `IterablePackedDataset` takes, except a mixture.
        out: the folder, on this machine or behind a URL (``s3://``, ``gs://``, ``az://`` and what fsspec reaches); made
            if need be. Shards for a URL are made below ``TMPDIR`` first, one for each worker at a time.
        encoder: makes a `Sample` of a row; rows of ready tokens need none.
        workers: processes on this machine; each writes one lane at a time.
        lanes: parts of the source. Default: what it fills, up to 64.
        shard_tokens: a shard ends with the document that reaches this number.
        dtype: ``"uint16"``, ``"uint32"``, or ``"auto"``: the smallest that holds the tokenizer's ``vocab_size``.
        progress: show a bar of the lanes, if tqdm is installed.
        engine: ``"processes"``, or ``"ray"``: the lanes are tasks of a Ray cluster, as many at a time as it has CPUs.
            They are tried again where a process or a node dies. All nodes must reach the folder.
        address: of the Ray cluster, such as ``"auto"``. Default: that of ``RAY_ADDRESS``, otherwise a new one here.
        shard: ``(i, n)`` writes the lanes of the i-th of n equal parts of the work, from 0, and no index: for n
            processes on machines that reach the same folder, which know nothing of one another.
        finish: write the index when all shards are there, and tokenize nothing.
        skip_bad: whether to skip what cannot be read or encoded, as an `IterablePackedDataset` does. The index
            counts it. It is listed in ``out/bad_records`` unless a folder is named; with ``out`` behind a URL, each
            process logs the first ten.
        storage: how ``out`` is reached behind a URL, see `JSONLSource`.

    Raises:
        ValueError: for a row that cannot be read or encoded, with its place; for a mixture; for a folder with shards of
            another source, encoder or setting; with ``finish``, if shards are missing. Complete shards stay.
        RuntimeError: if a worker was killed.
    """
    require_positive(workers, "workers")
    folder = folder_at(out, storage=storage)
    local = scheme_of(os.fspath(out)) is None
    quarantine = quarantine_for(skip_bad, folder=Path(out, BAD_RECORDS_FOLDER) if local else None)
    source, encode = as_source(source), TokensEncoder() if encoder is None else encoder
    if source.names:
        raise ValueError(
            "a mixture is weighted while it is read; tokenize each of its sources to a folder of its own, and mix those"
        )
    require(engine, "engine", ENGINES)
    if engine == "ray" and workers != 1:
        raise ValueError(
            f"workers={workers} are processes of this machine, and engine='ray' uses the CPUs of its cluster; leave "
            "workers out"
        )
    if engine != "ray" and address is not None:
        raise ValueError(f"address={address!r} is that of a Ray cluster; set engine='ray', or leave it out")
    require(dtype, "dtype", ("auto", *DTYPES))
    default = min(source.natural_lanes(), MAX_DEFAULT_LANES) if lanes is None else lanes
    lanes = require_lanes(default, "lanes", source)
    config = LaneConfig(source, encode, Packing(1, split_across_pack=True), quarantine=quarantine)
    config.check_shards()
    plan = {
        "corpus": fingerprint_of(source),
        "encoder": encoder_identity(encode, source),
        "lanes": lanes,
        "shard_tokens": require_positive(shard_tokens, "shard_tokens"),
        "dtype": _dtype_for(encode) if dtype == "auto" else dtype,
    }
    ours = _require_shard(shard, lanes, finish=finish)
    job = Job(config, folder, plan)
    found = _found(job, ours)
    missing = [each.lane for each in found if not each.ended]
    if finish:
        _require_complete(job, found)
    elif missing:
        for what in shared_by_lanes(source, lanes):
            log.warning("%s", what)
        written = (
            write_on_ray(job, missing, address=address)
            if engine == "ray"
            else write_here(job, missing, workers=workers)
        )
        with closing(written):
            for _ in _with_bar(written, len(missing), folder) if progress else written:
                pass
    if shard is None:
        # Of the shards that are there, not of those that this call knows of: nothing keeps another call, with
        # other settings, from replacing some.
        found = _found(job, ours)
        _require_complete(job, found)
        _write_index(job, found)
        folder.clean("tokens-", older=0)
    return out


def from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of `tokenize` from a run's config: its source, encoder, and ``skip_bad``.

    Raises:
        ValueError: if there is no ``data.source``, or a component cannot be built.
    """
    inject = {}
    if (tokenizer := build(config.get("tokenizer"))) is not None:
        inject = dict.fromkeys(("tokenizer", "model_transform"), check_tokenizer(tokenizer))
    data = config.get("data")
    if not isinstance(data, Mapping) or "source" not in data:
        of = ", and not torchtune's dataset, which this command does not read" * (
            config.get("dataset") is not None
        )
        raise ValueError(f"data.source is missing; name where the rows come from{of}")
    source = as_source(build(data["source"], inject=inject))
    source, encoder = with_encoders(
        source,
        build(data.get("encoder"), inject=inject),
        inject.get("tokenizer"),
        settings={name: data[name] for name in SHAPE_KEYS if name in data},
        strict=not data.get("skip_bad"),
    )
    return {
        "source": source,
        "encoder": encoder,
        "skip_bad": data.get("skip_bad", False),
    }


def _require_shard(shard: tuple[int, int] | None, lanes: int, *, finish: bool) -> Sequence[int]:
    """Return the lanes that this process writes."""
    if shard is None:
        return range(lanes)
    index, count = shard
    if finish:
        raise ValueError(
            "finish=True writes the index of all shards, and shard= writes some; give one of the two"
        )
    if not 0 <= index < count:
        raise ValueError(f"shard={index}/{count} is none of 0/{count} to {count - 1}/{count}")
    if count > lanes:
        raise ValueError(
            f"shard={index}/{count} of {lanes} lanes: some shards would have nothing to do; give all of them, and the "
            f"call that finishes, lanes={count} or more, or use {lanes} shards"
        )
    return range(index, lanes, count)


def _listed(lanes: Sequence[int]) -> str:
    return ", ".join(map(str, lanes[:5])) + (", ..." if len(lanes) > 5 else "")


def _dtype_for(encode: Encode) -> str:
    size = getattr(getattr(encode, "tokenizer", None), "vocab_size", None)
    return "uint16" if isinstance(size, int) and size <= UINT16_VOCABULARY else "uint32"


def _found(job: Job, lanes: Sequence[int]) -> list[Progress]:
    """Return the progress of lanes, in order."""
    return map_in_threads(partial(read_progress, job), lanes)


def _require_complete(job: Job, found: Sequence[Progress]) -> None:
    if missing := [progress.lane for progress in found if not progress.ended]:
        raise ValueError(
            f"{job.folder.shown} is not complete: {len(missing)} of {job.plan['lanes']} lanes are missing or end early "
            f"({_listed(missing)}); run again the shards that write them (shard i of n: lanes i, i + n, ...), "
            "or remove finish=True (--finish), to tokenize here what is missing"
        )


def _write_index(job: Job, lanes: Sequence[Progress]) -> None:
    shards = [shard for progress in lanes for shard in progress.shards if shard.documents]
    bad = sum(progress.bad for progress in lanes)
    folder, quarantine = job.folder, job.config.quarantine
    if bad:
        listed = quarantine.report() if quarantine is not None else ""
        log.warning("%s skips %d broken record(s)%s", folder.shown, bad, listed and f": {listed}")
    if not shards:
        raise ValueError("the source has no rows; there is nothing to write")
    index = {
        "format": FORMAT,
        "version": VERSION,
        "dtype": job.plan["dtype"],
        "plan": job.plan,
        "bad_records": bad,
        "shards": [
            {key: value for key, value in asdict(shard).items() if key != "dtype"} for shard in shards
        ],
    }
    write_file(folder, INDEX, json.dumps(index, indent=1).encode())


def _with_bar(written: Iterable[int], count: int, folder: Folder) -> Iterable[int]:
    """Show a bar of the lanes that are written, if tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return written
    found: Iterable[int] = tqdm(written, total=count, unit="lane", desc=f"tokenize {folder.shown}")
    return found
