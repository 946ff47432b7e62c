"""Cost of the agreement among ranks in step time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch.distributed as dist

from streampack import PackedDataLoader
from streampack.distributed.rank_sync import Agreement, combine_counts
from stress.corpus import Corpus
from stress.job import Run, job
from tests.harness.processes import Ranks

STEP = 0.020  # seconds
MAX_COST = 0.005  # of a step


@job("agreement", "the agreement costs no measurable step time, with steps of 20 ms", limit=180)
def agreement(run: Run) -> str:
    """Time blocks of steps on 2 ranks x 2 workers, with and without the agreement in turn."""
    blocks, steps = run.count(12, 2), run.count(60, 20)
    times: dict[bool, list[float]] = {True: [], False: []}
    waits: dict[bool, list[float]] = {True: [], False: []}
    corpus = Corpus.make(20_000, num_lanes=12, epochs=None)
    with Ranks(2) as ranks:
        for block in range(2 * blocks):
            run.progress(block, 2 * blocks, "blocks")
            agreed = block % 2 == 0
            for whole, in_loader in ranks.run(time_steps, corpus, agreed, steps):
                times[agreed] += whole
                waits[agreed] += in_loader
    with_it, without = (statistics.median(times[agreed]) for agreed in (True, False))
    cost = statistics.median(waits[True]) - statistics.median(waits[False])
    if not run.quick:
        assert cost < MAX_COST * STEP, f"{with_it * 1e3:.2f} ms against {without * 1e3:.2f} ms"
    return (
        f"{len(times[True])} steps with it, {len(times[False])} without: medians {with_it * 1e3:.2f} and "
        f"{without * 1e3:.2f} ms a step; in the loader "
        f"{cost * 1e3:+.2f} ms ({cost / STEP:+.1%}), the work of starting a collective on cores that others use too"
    )


def time_steps(corpus: Corpus, agreed: bool, steps: int) -> tuple[list[float], list[float]]:
    """Return the seconds of every step, and the seconds of each spent in the loader. Called in a rank."""
    loader = PackedDataLoader(corpus.dataset(), batch_size=4, num_workers=2)
    if not agreed:
        loader.rank_sync.agree = OwnAgreement
    iterator = iter(loader)
    whole, in_loader = [], []
    next(iterator)
    dist.barrier()
    for _ in range(steps):
        begun = time.perf_counter()
        next(iterator)
        in_loader.append(time.perf_counter() - begun)
        time.sleep(STEP)
        whole.append(time.perf_counter() - begun)
    for stream in iterator.rank_batches.streams:
        stream.close()
    return whole, in_loader


class OwnAgreement(Agreement):
    """An agreement that a rank reaches from its own number, without the other ranks."""

    def __init__(self, count: int, *, failed: bool = False, notes: Sequence[int] = ()) -> None:
        self.number = ~count if failed else count
        self.noted = list(notes)

    def wait(self) -> tuple[int, bool]:
        """Return what follows from this rank's number."""
        return combine_counts([self.number])

    def notes(self) -> list[list[int]]:
        """Return this rank's notes."""
        return [self.noted]
