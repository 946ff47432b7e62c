"""The progress bar of `tokenize`, and the estimate of its total."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from streampack.packing.samples import sample_from_row
from streampack.tokenize.lane_shards import Job, Progress, Report

PROBED_ROWS = 64
"""How many rows are encoded to estimate the total of the progress bar."""


@contextmanager
def progress_bar(job: Job, found: list[Progress], *, shown: bool) -> Iterator[Report]:
    """Show a bar of the tokens that a job writes, if ``shown`` and tqdm is installed; yield what moves it."""
    try:
        from tqdm import tqdm
    except ImportError:
        shown = False
    if not shown:
        yield lambda tokens: None
        return
    total = None
    with suppress(Exception):  # streams have no length; a broken row is reported where it is read
        rows, scale = job.config.source.sample(PROBED_ROWS)
        total = int(sum(_length(job, row.data) for row in rows) * scale * len(found) / job.plan["lanes"])
    done = sum(shard.tokens for progress in found for shard in progress.shards)
    with tqdm(
        total=total, initial=done, unit="tok", unit_scale=True, desc=f"tokenize {job.folder.shown}"
    ) as bar:
        yield bar.update
        bar.total = bar.n  # this replaces the estimate
        bar.refresh()


def _length(job: Job, row: Mapping[str, Any]) -> int:
    try:
        return sample_from_row(job.config.encode(row)).tokens.size
    except Exception:  # reported where the row is read
        return 0
