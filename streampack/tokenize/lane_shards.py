"""One lane of a source becomes token shards, from its beginning or from where its last complete shard ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from streampack.packing.assemble import check_sample
from streampack.packing.token_rows import encode_row
from streampack.sources.bad_records import Quarantine
from streampack.sources.base import BadRecord, Reading
from streampack.sources.corpus_identity import state_of
from streampack.sources.source import Source
from streampack.sources.token_files import Shard, ShardWriter, read_header, shard_of
from streampack.types import IGNORE_INDEX, Cursor, Row, RowId, Sample

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
    quarantine: Quarantine | None = None  # None: a broken record is an error

    @property
    def recorded(self) -> dict[str, Any]:
        """The plan as plain values. Without the encoder's name, so that a renamed one makes the same bytes."""
        plan = state_of(self.plan)
        return {**plan, "encoder": {key: plan["encoder"][key] for key in ("fingerprint", "samples")}}

    def path(self, lane: int, number: int) -> Path:
        """Of a lane's shard. Sorted, they are in the order of the lanes."""
        return self.out / f"tokens-{lane:05d}-{number:05d}.bin"


class Progress(NamedTuple):
    """How far a lane has come."""

    lane: int
    shards: list[Shard]  # complete
    start: Cursor | None = None  # of the row behind them
    ended: bool = False
    bad: int = 0  # records that were passed by before that row


def begun(job: Job, lane: int) -> Progress:
    """What an earlier call left of a lane's shards.

    Raises:
        ValueError: for shards of another source, encoder or setting, and for those that leave out what is an error now.
    """
    shards: list[Shard] = []
    progress = Progress(lane, shards)
    while not progress.ended and (path := job.path(lane, len(shards))).exists():
        header = read_header(path)
        for key, ours in job.plan.items():
            theirs = header.get("plan", {}).get(key)
            if hasattr(ours, "difference"):
                words = ours.difference(theirs)
                different = None if words is None else f"another {key}: {words}"
            else:
                different = None if theirs == ours else f"{key}={theirs!r} and this is {key}={ours!r}"
            if different is not None:
                raise ValueError(
                    f"{path} was made with {different}; give another folder, or remove the old shards"
                )
        if (bad := header.get("bad", 0)) and job.quarantine is None:
            raise ValueError(
                f'{path} leaves out {bad} broken record(s) before its end; set on_bad_record="skip", or remove the old '
                "shards"
            )
        shards.append(shard_of(path.name, header))
        ended = header["next"] is None
        progress = Progress(lane, shards, None if ended else tuple(header["next"]), ended, bad)
    return progress


def make(job: Job, progress: Progress, tell: Tell) -> Progress:
    """All shards of a lane, from where it stands to its end. ``tell`` hears how many tokens were written.

    Raises:
        ValueError: for a row that cannot be read or encoded, or one that is passed by too many, with its place.
    """
    lane, shards, writer, untold = progress.lane, list(progress.shards), None, 0
    notes = {"lane": lane, "plan": job.recorded}
    samples = _Samples(job, progress)
    try:
        for count, (row, sample) in enumerate(samples, 1):
            if writer is not None and writer.tokens >= job.plan["shard_tokens"]:
                shards.append(writer.close({**notes, "next": row.cursor, "bad": samples.bad}))
                writer = None
            if writer is None:
                writer = ShardWriter(job.path(lane, len(shards)), dtype=job.plan["dtype"])
            untold += _append(job, row, sample, writer)
            if count % TOLD_EVERY == 0:
                tell(untold)
                untold = 0
        if writer is not None:
            shards.append(writer.close({**notes, "next": None, "bad": samples.bad}))
            writer = None
        tell(untold)
    finally:
        if writer is not None:
            writer.abandon()
    return Progress(lane, shards, None, ended=True, bad=samples.bad)


class _Samples:
    """The rows of a lane with their samples. Broken records are passed by, if the job says so, and counted."""

    def __init__(self, job: Job, progress: Progress) -> None:
        self.job = job
        self.lane = progress.lane
        self.bad = progress.bad
        self.reader = job.source.read(
            Reading(progress.lane, num_lanes=job.plan["lanes"], start=progress.start)
        )

    def __iter__(self) -> Iterator[tuple[Row, Sample]]:
        while True:
            try:
                row = next(self.reader, None)
            except BadRecord as error:
                if self.job.quarantine is None:
                    raise error.unskipped() from None
                self._pass_by(error.row_id, error.reason)
                self.reader.skip()
                continue
            if row is None:
                return
            if (sample := self._encode(row)) is not None:
                yield row, sample

    def _encode(self, row: Row) -> Sample | None:
        place = self.job.source.locate
        try:
            sample = encode_row(self.job.encode, row.data)
            check_sample(sample)
        except Exception as error:
            if self.job.quarantine is not None:
                self._pass_by(row.row_id, f"{type(error).__name__}: {error}")
                return None
            if isinstance(error, ValueError):
                raise ValueError(f"{place(row.row_id)}: {error}") from error
            error.add_note(f"while encoding {place(row.row_id)}")
            raise
        return sample

    def _pass_by(self, row_id: RowId, reason: str) -> None:
        quarantine = self.job.quarantine
        assert quarantine is not None
        quarantine.skip(self.lane, source=self.job.source, row_id=row_id, reason=reason, before=self.bad)
        self.bad += 1


def _append(job: Job, row: Row, sample: Sample, writer: ShardWriter) -> int:
    """Write a document; its length in tokens. What a shard cannot hold is an error, whatever is skipped."""
    trained = sample.labels == sample.tokens
    try:
        if not (trained | (sample.labels == IGNORE_INDEX)).all():
            raise ValueError(f"a label is neither its token nor {IGNORE_INDEX}, and a shard keeps no other")
        writer.append(sample.tokens, trained)
    except ValueError as error:
        raise ValueError(f"{job.source.locate(row.row_id)}: {error}") from error
    return sample.tokens.size
