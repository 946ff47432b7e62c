"""Write the token shards of one lane, from its beginning or from the end of its last complete shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from streampack.lanes.lane_config import LaneConfig
from streampack.sources.formats.token_shards import Shard, ShardWriter, read_header, shard_of
from streampack.sources.mechanics.corpus_identity import first_difference
from streampack.sources.reading import BadRecord
from streampack.storage.folders import Folder
from streampack.types import IGNORE_INDEX, Cursor, Row, Sample


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
    return f"tokens-{lane:05d}-{number:05d}.bin"


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
                f"{path} skips {bad} broken record(s) before its end; set skip_bad=True, or remove the old shards"
            )
        shards.append(shard_of(name, header))
        ended = header["next"] is None
        start = None if ended else tuple(header["next"])
        progress = Progress(lane, shards, start, ended, bad)
    return progress


def write_lane(job: Job, lane: int, between_rows: Callable[[], object] = lambda: None) -> None:
    """Write the remaining shards of a lane. What ``between_rows`` raises ends that.

    Another process may do so, too: a shard's bytes follow from the job, and each gets its name when it is whole, so
    whichever copy comes last is the same.

    Raises:
        ValueError: for a row that cannot be read or encoded, or one skipped record too many, with its place.
    """
    job.folder.clean(f"tokens-{lane:05d}-")
    progress = read_progress(job, lane)
    if progress.ended:
        return
    number, notes = len(progress.shards), {"lane": lane, "plan": job.plan}
    writer = ShardWriter(job.folder, shard_name(lane, number), dtype=job.plan["dtype"])
    try:
        for cursor, bad, found in _samples(job, progress):
            between_rows()
            if found is None:  # of a lane without rows, an empty shard tells other processes that it was read
                writer.close({**notes, "next": None, "bad": bad})
                break
            if writer.tokens >= job.plan["shard_tokens"]:
                writer.close({**notes, "next": cursor, "bad": bad})
                number += 1
                writer = ShardWriter(job.folder, shard_name(lane, number), dtype=job.plan["dtype"])
            _append_document(job, *found, writer)
    finally:
        writer.abandon()


def _samples(job: Job, progress: Progress) -> Iterator[tuple[Cursor, int, tuple[Row, Sample] | None]]:
    """Yield each row of a lane that is in no shard, with its sample; None at the end.

    Before it are the cursor from which reading begins with the row again, and the number of bad records before it.
    """
    config, lane, bad = job.config, progress.lane, progress.bad
    documents = sum(shard.documents for shard in progress.shards)
    reader = config.open(lane, num_lanes=job.plan["lanes"], epoch=0, start=progress.start)
    config.check_shards()
    while True:
        cursor = reader.cursor
        try:
            if (row := next(reader, None)) is None:
                yield cursor, bad, None
                return
            sample = config.sample(row)
        except BadRecord as error:
            if config.quarantine is None:
                raise error.unskipped() from None
            config.quarantine.skip(
                lane,
                source=config.source,
                row_id=error.row_id,
                reason=error.reason,
                before=bad,
                rows=documents + bad,
            )
            bad += 1
            continue
        documents += 1
        yield cursor, bad, (row, sample)


def _append_document(job: Job, row: Row, sample: Sample, writer: ShardWriter) -> None:
    """Append a sample to a shard.

    Raises:
        ValueError: for a sample that a shard cannot hold; it is never skipped as a bad record.
    """
    trained = sample.labels == sample.tokens
    try:
        if type(sample) is not Sample:
            raise ValueError("it has segments or images, which a shard has no place for; stream the rows")
        if not (trained | (sample.labels == IGNORE_INDEX)).all():
            raise ValueError(f"a label is neither its token nor {IGNORE_INDEX}, and a shard keeps no other")
        writer.append(sample.tokens, trained)
    except ValueError as error:
        raise ValueError(f"{job.config.source.locate(row.row_id)}: {error}") from error
