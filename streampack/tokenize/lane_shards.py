"""Write the token shards of one lane, from its beginning or from the end of its last complete shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from streampack.packing.groups import Group
from streampack.sources.corpus_identity import first_difference
from streampack.sources.reading import BadRecord, Reading
from streampack.sources.token_files import Shard, ShardWriter, read_header, shard_of
from streampack.storage.folders import PATIENCE, Folder
from streampack.streaming.lane_config import LaneConfig
from streampack.types import IGNORE_INDEX, Cursor, Row, RowId, Sample

ROWS_PER_REPORT = 64
"""After so many rows a worker reports its progress and checks whether another one failed."""

ENDING = ".bin"
Report = Callable[[int], object]
"""A function that is called with the number of tokens written since its last call."""


@dataclass(frozen=True)
class Job:
    """Rows to tokenize, the folder of their token shards, and the plan by which each shard is made."""

    config: LaneConfig
    folder: Folder
    plan: Mapping[str, Any]  # all that decides the bytes of the shards; it is saved in every header


class Progress(NamedTuple):
    """The complete shards of a lane, and where reading continues after them."""

    lane: int
    shards: list[Shard]
    start: Cursor | None = None
    """The cursor of the first row that is in no shard; None for the lane's beginning."""

    ended: bool = False
    """Whether the shards hold all rows of the lane."""

    bad: int = 0
    """How many records were skipped before ``start``."""


def shard_name(lane: int, number: int) -> str:
    """Return the name of a lane's shard; sorted names are in the order of the lanes."""
    return f"tokens-{lane:05d}-{number:05d}{ENDING}"


def read_progress(job: Job, lane: int) -> Progress:
    """Read the headers of a lane's shards from an earlier call.

    Raises:
        ValueError: for shards of another source, encoder or setting, and for shards with skipped records if broken
            records are errors in this call.
    """
    shards: list[Shard] = []
    progress = Progress(lane, shards)
    while not progress.ended and (header := read_header(job.folder, name := shard_name(lane, len(shards)))):
        path = f"{job.folder.shown}/{name}"
        if (found := first_difference(header.get("plan"), job.plan)) is not None:
            key, before, now = found
            raise ValueError(
                f"{path} was made with {key}={before!r} and this is {key}={now!r}; give another folder, or remove the "
                "old shards (TokenShardSource reads several folders as one corpus, so new files can have their own)"
            )
        bad = header.get("bad", 0)
        if bad and job.config.quarantine is None:
            raise ValueError(
                f"{path} leaves out {bad} broken record(s) before its end; set skip_bad=True, or remove the old shards"
            )
        shards.append(shard_of(name, header))
        ended = header["next"] is None
        start = None if ended else tuple(header["next"])
        progress = Progress(lane, shards, start, ended, bad)
    return progress


def write_lane(job: Job, lane: int, report: Report, *, patience: float = PATIENCE) -> Progress:
    """Write the remaining shards of a lane.

    Locks keep other processes from writing the lane meanwhile, also on other machines where they share the folder. An
    object store has no locks between machines, and needs none here: a shard's bytes follow from the job, and each is
    stored as a whole, so whichever copy is stored last is the same.

    Args:
        job: to which the lane belongs.
        lane: its number.
        report: called with the number of tokens written since its last call.
        patience: seconds to wait for another process that writes the lane.

    Raises:
        ValueError: for a row that cannot be read or encoded, or one skipped record too many, with its place; and if
            another process writes the lane.
    """
    way_out = "wait until it has ended, or stop it"
    with job.folder.lock(f"{lane:05d}", way_out=way_out, patience=patience):
        job.folder.clean(f"tokens-{lane:05d}-")
        return _write_rest(job, read_progress(job, lane), report)


def _write_rest(job: Job, progress: Progress, report: Report) -> Progress:
    """Write the shards of a lane behind its complete ones."""
    if progress.ended:
        return progress
    lane, shards, writer, unreported = progress.lane, list(progress.shards), None, 0
    notes = {"lane": lane, "plan": job.plan}
    samples = _Samples(job, progress)
    try:
        for count, (row, sample) in enumerate(samples, 1):
            if writer is not None and writer.tokens >= job.plan["shard_tokens"]:
                shards.append(writer.close({**notes, "next": samples.cursor, **samples.skipped}))
                writer = None
            if writer is None:
                writer = ShardWriter(job.folder, shard_name(lane, len(shards)), dtype=job.plan["dtype"])
            unreported += _append_document(job, row, sample, writer)
            if count % ROWS_PER_REPORT == 0:
                report(unreported)
                unreported = 0
        if writer is None:  # the lane has no rows; an empty shard tells other processes that it was read
            writer = ShardWriter(job.folder, shard_name(lane, len(shards)), dtype=job.plan["dtype"])
        shards.append(writer.close({**notes, "next": None, **samples.skipped}))
        writer = None
        report(unreported)
    finally:
        if writer is not None:
            writer.abandon()
    return Progress(lane, shards, None, ended=True, bad=samples.bad)


class _Samples:
    """Iterate over the rows of a lane with their samples; skip and count broken records if the config allows it."""

    def __init__(self, job: Job, progress: Progress) -> None:
        self.config = job.config
        self.lane = progress.lane
        self.bad = progress.bad
        self.documents = sum(shard.documents for shard in progress.shards)
        reading = Reading(self.lane, num_lanes=job.plan["lanes"], start=progress.start)
        self.reader = job.config.source.read(reading)
        self.config.check_shards()

    def __iter__(self) -> Iterator[tuple[Row, Sample]]:
        while True:
            self.cursor = self.reader.cursor  # from which reading begins with the next row again
            try:
                row = next(self.reader, None)
            except BadRecord as error:
                if self.config.quarantine is None:
                    raise error.unskipped() from None
                self._skip(error.row_id, error.reason)
                self.reader.skip()
                continue
            if row is None:
                return
            sample_or_reason = self.config.sample(row)
            if isinstance(sample_or_reason, str):
                self._skip(row.row_id, sample_or_reason)
            else:
                self.documents += 1
                yield row, sample_or_reason

    @property
    def skipped(self) -> dict[str, Any]:
        """The number of bad records skipped so far, for a shard's header."""
        return {"bad": self.bad}

    def _skip(self, row_id: RowId, reason: str) -> None:
        quarantine, source = self.config.quarantine, self.config.source
        assert quarantine is not None
        quarantine.skip(
            self.lane,
            source=source,
            row_id=row_id,
            reason=reason,
            before=self.bad,
            rows=self.documents + self.bad,
        )
        self.bad += 1


def _append_document(job: Job, row: Row, sample: Sample, writer: ShardWriter) -> int:
    """Append a sample to a shard and return its length in tokens.

    Raises:
        ValueError: for a sample that a shard cannot hold; it is never skipped as a bad record.
    """
    trained = sample.labels == sample.tokens
    try:
        if isinstance(sample, Group):
            raise ValueError("it is a group of segments, which a shard has no place for; stream the rows")
        if not (trained | (sample.labels == IGNORE_INDEX)).all():
            raise ValueError(f"a label is neither its token nor {IGNORE_INDEX}, and a shard keeps no other")
        writer.append(sample.tokens, trained)
    except ValueError as error:
        raise ValueError(f"{job.config.source.locate(row.row_id)}: {error}") from error
    return sample.tokens.size
