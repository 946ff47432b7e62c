"""SIGKILL: of everything, of a rank, of a worker; and an error that one rank raises."""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from streampack import PackedDataLoader
from stress.corpus import Corpus, Seen, check_exactly, pack, ride, seen, together, unpack
from stress.job import Run, job
from stress.ranks import Leaving, Ranks

SAVE_EVERY = 4  # steps
SOON = 10.0  # seconds in which every rank must know


@job("kill-all", "SIGKILL of the whole process tree at 50 random points: the same packs", limit=420)
def kill_all(run: Run) -> str:
    """2 ranks x 2 workers; they save every few steps, and go on from what was saved."""
    kills = run.count(50, 3)
    rng = random.Random(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = Corpus.make(max(900, kills * 110), folder=folder, epochs=3)
        with Ranks(2) as ranks:
            rides = ranks.run(ride, corpus)
        check_exactly(together(rides), corpus, times=3)
        reference = [[[s.digest.hex() for s in step] for step in one.steps] for one in rides]
        total = len(reference[0])
        counted = starts = 0
        while counted < kills:
            run.progress(counted, kills, "kills")
            before, starts = saved_step(folder), starts + 1
            assert before < total - 40, "the corpus is too small for so many kills"
            with Ranks(2) as ranks:
                ranks.start(train_and_save, corpus, folder, 0.002)
                # Anywhere from the first start of a process to a few saved states later.
                target = rng.randrange(0, 4 * SAVE_EVERY)
                deadline = time.monotonic() + 60
                while last_step(folder) < before + target and time.monotonic() < deadline:
                    time.sleep(0.001)
                time.sleep(rng.random() * 0.02)
                ranks.kill()
            assert saved_step(folder) >= before
            counted += saved_step(folder) > before
        with Ranks(2) as ranks:
            ranks.run(train_and_save, corpus, folder, 0.0)
        again = 0
        for rank in range(2):
            made: dict[int, int] = {}
            for step, digests in logged(folder, rank):
                assert digests == reference[rank][step - 1], f"rank {rank}, step {step}: other packs"
                made[step] = made.get(step, 0) + 1
            assert sorted(made) == list(range(1, total + 1)), "steps are missing"
            again += sum(made.values()) - total
    packs = sum(len(step) for one in reference for step in one)
    return (
        f"{counted} kills after new progress, of {starts}; {total} steps, {packs:,} packs, 3 epochs; {again} "
        "batches made twice, all identical; 0 lost, 0 twice"
    )


def train_and_save(corpus: Corpus, folder: Path, pause: float) -> None:
    """In a rank: a run that logs what it is handed and saves the stream's state now and then."""
    rank = dist.get_rank()
    loader = PackedDataLoader(corpus.dataset(), batch_size=2, num_workers=2)
    step = 0
    place = folder / "state.pt"
    if place.exists():
        saved = unpack(place.read_bytes())
        step = saved["step"]
        loader.load_state_dict(saved["stream"])
    with (folder / f"log-{rank}").open("a") as log:
        log.write("\n")  # after half a line, perhaps
        for batch in loader:
            step += 1
            log.write(json.dumps([step, [s.digest.hex() for s in seen(batch)]]) + "\n")
            log.flush()
            time.sleep(pause)
            if step % SAVE_EVERY == 0:
                state = loader.state_dict()
                if rank == 0:
                    part = place.with_suffix(".part")
                    part.write_bytes(pack({"step": step, "stream": state}))
                    part.replace(place)


def saved_step(folder: Path) -> int:
    """Of the saved state; 0 without one."""
    place = folder / "state.pt"
    return int(unpack(place.read_bytes())["step"]) if place.exists() else 0


def last_step(folder: Path) -> int:
    """The last one that rank 0 logged."""
    return max((step for step, _ in logged(folder, 0)[-2:]), default=0)


def logged(folder: Path, rank: int) -> list[tuple[int, list[str]]]:
    """What a rank wrote, but for lines that a kill cut off."""
    lines = []
    with suppress(FileNotFoundError):
        for text in (folder / f"log-{rank}").read_text().splitlines():
            with suppress(ValueError):
                lines.append((*json.loads(text),))
    return lines  # type: ignore[return-value]


@job("kill-rank", "SIGKILL of a rank: its peers raise in under 10 s, its workers go with it", limit=240)
def kill_rank(run: Run) -> str:
    """3 ranks x 2 workers; each rank in turn."""
    kills = run.count(15, 2)
    rng = random.Random(2)
    slowest = 0.0
    corpus = Corpus.make(4000, num_lanes=12, epochs=None)
    for number in range(kills):
        run.progress(number, kills, "kills")
        victim = number % 3
        with Ranks(3) as ranks:
            ranks.start(until_it_breaks, corpus)
            time.sleep(0.5 + rng.random())
            killed = time.monotonic()
            os.kill(ranks.processes[victim].pid, signal.SIGKILL)
            results = ranks.collect(SOON + 5, dead=(victim,))
            for rank, result in enumerate(results):
                if rank != victim:
                    raised, error, steps = result
                    assert raised > killed, f"rank {rank} had ended before the kill: {error}"
                    assert steps, "the kill came before the first step"
                    slowest = max(slowest, raised - killed)
            ranks.wait_until_gone(killed + SOON)
    assert slowest < SOON
    return f"{kills} kills of one of 3 ranks; the slowest peer raised after {slowest:.2f} s; no worker outlived a rank"


def until_it_breaks(corpus: Corpus) -> Leaving:
    """In a rank: when it raised, what, and after how many steps. An error ends a training process; so here."""
    steps = 0
    try:
        for _ in PackedDataLoader(corpus.dataset(), batch_size=2, num_workers=2, timeout=600):
            steps += 1
            time.sleep(0.005)
    except Exception as error:
        return Leaving((time.monotonic(), f"{type(error).__name__}: {error}", steps))
    raise AssertionError("an endless stream ended")


@job("error", "an error on one rank is raised on all in under 10 s", limit=120)
def error(run: Run) -> str:
    """A row that cannot be encoded, early, late and in the middle; 3 ranks."""
    slowest, cases = 0.0, 0
    with Ranks(3) as ranks:
        for workers in (0, 2):
            for bad in (0, 5, 1000, 1799)[: run.count(4, 2)]:
                begun = time.monotonic()
                results = ranks.run(what_it_raises, Corpus.make(1800, num_lanes=12, epochs=2), bad, workers)
                slowest = max(slowest, *(raised - said for raised, said, *_ in results))
                own = [text for *_, name, text in results if name == "ValueError"]
                others = [text for *_, name, text in results if name == "RuntimeError"]
                assert len(own) == 1, results
                assert f"sample {bad}: is out of order" in own[0]
                assert len(others) == 2, results
                assert all(own[0] in text for text in others), results
                assert time.monotonic() - begun < 60
                cases += 1
    assert slowest < SOON
    return f"{cases} bad rows on 3 ranks, workers 0 and 2; the slowest rank raised {slowest:.2f} s after its last batch"


def what_it_raises(corpus: Corpus, bad: int, workers: int) -> tuple[float, float, str, str]:
    """In a rank: when, the time of the last batch, what."""
    broken = Corpus(corpus.lengths, None, corpus.settings, bad=bad)
    last = time.monotonic()
    try:
        for _ in PackedDataLoader(broken.dataset(), batch_size=2, num_workers=workers, timeout=600):
            last = time.monotonic()
    except Exception as caught:
        return time.monotonic(), last, type(caught).__name__, str(caught)
    raise AssertionError("no error")


@job("kill-worker", "SIGKILL of a worker, 20 times, and once too often", limit=240)
def kill_worker(run: Run) -> str:
    """2 ranks x 2 workers: healed and identical; then every rank raises."""
    kills = run.count(20, 3)
    # Packs so large that few of them lie ready between worker and trainer: a death is noticed behind them.
    corpus = Corpus.make(kills * 400, longest=900, max_seq_len=1536, epochs=2)
    with Ranks(2) as ranks:
        rides = ranks.run(ride, corpus)
        check_exactly(together(rides), corpus, times=2)
        healed = ranks.run(with_dying_workers, corpus, kills, timeout=200)
        for rank, (steps, restarts) in enumerate(healed):
            assert restarts == kills, f"rank {rank} mended {restarts} workers of {kills}"
            assert steps == rides[rank].steps, f"rank {rank} was handed other packs"
        raised = ranks.run(once_too_often, corpus, kills, timeout=200)
        slowest = max(when for when, _ in raised) - min(killed for _, killed in raised if killed)
        assert slowest < SOON
    return (
        f"{kills} kills on each of 2 ranks: {len(rides[0].steps)} steps identical; one kill more than "
        f"max_worker_restarts={kills}: both raised within {slowest:.2f} s"
    )


def with_dying_workers(corpus: Corpus, kills: int) -> tuple[list[list[Seen]], int]:
    """In a rank: its steps, and how often a worker was made again."""
    rng = random.Random(dist.get_rank())
    loader = PackedDataLoader(corpus.dataset(), batch_size=2, num_workers=2, max_worker_restarts=kills)
    iterator = iter(loader)
    steps: list[list[Seen]] = []
    killed = 0
    while (batch := next(iterator, None)) is not None:
        steps.append(seen(batch))
        workers: list[Any] = iterator.rank_batches.streams  # type: ignore[attr-defined]
        restarts = sum(worker.restarts for worker in workers)
        # The next one only when the last was noticed: two deaths of one process are one.
        if restarts == killed < kills and len(steps) > 3:
            time.sleep(rng.random() * 0.01)
            os.kill(workers[rng.randrange(2)].process.pid, signal.SIGKILL)
            killed += 1
    return steps, sum(worker.restarts for worker in workers)


def once_too_often(corpus: Corpus, kills: int) -> tuple[float, float]:
    """In a rank: when it raised, and when rank 0 killed its worker for the last time."""
    loader = PackedDataLoader(
        corpus.dataset(), batch_size=2, num_workers=2, max_worker_restarts=kills, timeout=600
    )
    iterator = iter(loader)
    last = 0.0
    killed = 0
    try:
        while next(iterator, None) is not None:
            worker: Any = iterator.rank_batches.streams[1]  # type: ignore[attr-defined]
            if dist.get_rank() == 0 and worker.restarts == killed <= kills:
                last = time.monotonic()
                os.kill(worker.process.pid, signal.SIGKILL)
                killed += 1
    except RuntimeError as caught:
        if "died" in str(caught):
            return time.monotonic(), last
        raise
    raise AssertionError("no error")
