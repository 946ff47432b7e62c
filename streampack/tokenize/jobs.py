"""The jobs of a call of `tokenize`: one for each generation of the folder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from streampack.sources.corpus_lists import Entry
from streampack.sources.source import Source
from streampack.storage.base import map_in_threads
from streampack.storage.folders import Folder
from streampack.tokenize.generations import (
    Generation,
    divided,
    entries_of,
    name_of,
    read_generations,
    require_plan,
)
from streampack.tokenize.lane_shards import Job, shard_name

log = logging.getLogger(__name__)
Make = Callable[[Source, int, Mapping[str, Any]], Job]
"""``(source, first lane, settings of an earlier call)`` returns the job; the settings go before those of this call."""

KEPT = ("lanes", "shard_tokens")
"""Settings that a generation keeps, and another one need not share."""


def jobs_of(source: Source, folder: Folder, make: Make, *, add: bool, alone: bool) -> list[Job]:
    """Return the jobs of a folder's generations, the oldest first.

    Args:
        source: all of the corpus.
        folder: of the token shards.
        make: makes a job.
        add: whether files that are in no generation become one, which is saved.
        alone: whether no other process writes to the folder, so that the newest generation is made anew if it has no
            shard: a call that failed at its first rows can be repeated with other settings.

    Raises:
        ValueError: if a file is gone or has changed since an earlier call, and for another encoder or setting.
    """
    now = entries_of(source)
    while True:
        recorded = read_generations(folder)
        if add and alone and recorded and not _begun(folder, recorded):
            recorded.pop()
        parts, new, files = _parts(source, now, recorded, shown=folder.shown)
        jobs: list[Job] = []
        for number, (generation, part) in enumerate(zip(recorded, parts, strict=True)):
            newest = number == len(recorded) - 1 and new is None
            kept = {} if newest else {key: generation.plan.get(key) for key in KEPT}
            job = make(part, _lanes(jobs), kept)
            require_plan(job.plan, generation.plan, shown=f"{folder.shown}/{name_of(number)}")
            jobs.append(job)
        if new is None:
            return jobs
        job = make(new, _lanes(jobs), {})
        if not add:
            if jobs and files:
                log.warning(
                    "%d file(s) that were added are in no shard, such as %s; tokenize them, and finish again",
                    len(files), files[0].name,
                )  # fmt: skip
            return jobs or [job]
        ours = Generation(job.plan, files)
        ours.save(folder, len(recorded), replace=alone)
        # Another process may have been faster, and may have found other files.
        if read_generations(folder)[len(recorded) :] == [ours]:
            return [*jobs, job]


def _parts(
    source: Source, now: Sequence[Entry] | None, recorded: Sequence[Generation], *, shown: str
) -> tuple[list[Source], Source | None, list[Entry] | None]:
    """Return the source of each generation; and that of the new files, with these, or None if there are none."""
    before = [generation.files for generation in recorded if generation.files is not None]
    if now is None or len(before) < len(recorded):  # a source that is not made of files
        return [source] * len(recorded), None if recorded else source, None
    found = divided(now, before, shown=shown)
    everything = [(number, entry.name) for number, entry in enumerate(now)]
    parts = [
        source if files == everything else source.of_files(files)
        for files in [*found.generations, found.new]
        if files
    ]
    new = parts.pop() if found.new else None
    return parts, new, [now[number] for number, _ in found.new]


def _begun(folder: Folder, recorded: Sequence[Generation]) -> bool:
    """Return whether the newest generation has a shard."""
    *earlier, newest = (int(generation.plan.get("lanes", 0)) for generation in recorded)
    lanes = range(sum(earlier), sum(earlier) + newest)
    return any(map_in_threads(lambda lane: folder.head(shard_name(lane, 0), 1), lanes))


def _lanes(jobs: Sequence[Job]) -> int:
    return jobs[-1].lanes.stop if jobs else 0
