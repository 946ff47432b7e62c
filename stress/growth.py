"""A run of a million packs: memory and descriptors do not grow, and no process or shared memory is left behind."""

from __future__ import annotations

import os
import pickle
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from streampack import IterablePackedDataset, PackedDataLoader
from stress.corpus import end, worker_pids
from stress.job import Run, job
from stress.states import CachedSamples
from tests.harness.processes import Ranks

MAX_SEQ_LEN, BATCH = 256, 64
KIB = 1024


class Usage(NamedTuple):
    """Resources that one rank and its workers use at one moment."""

    packs: int  # returned by this rank so far
    memory: list[int]  # KiB, of the rank and of each worker
    descriptors: list[int]  # open, likewise
    shared: int  # mapped or open pieces of shared memory, of all of them together
    state: int  # bytes of the loader's state, pickled


@job(
    "million", "10^6 packs of 256 tokens: memory flat, nothing left behind, after SIGKILL included", limit=900
)
def million(run: Run) -> str:
    """Iterate on 2 ranks x 2 workers, shuffled, for many epochs; then once more, and kill all."""
    total = run.count(1_000_000, 40_000)
    before = shared_memory()
    began = time.monotonic()
    with Ranks(2) as ranks:
        ranks.start(sample_usage, total // 2, total // 20)
        usages = ranks.collect(850)
        seconds = time.monotonic() - began
        ended = ranks.run(descriptors)
        ranks.start(sample_usage, 10**9, total // 20)
        time.sleep(2)
        members = ranks.members()
        assert len(members) == 6, f"{len(members)} processes for 2 ranks x 2 workers"
        ranks.kill()  # raises if any process is left
        left = [name for name in shared_memory() - before if any(str(pid) in name for pid in members)]
    slopes = []
    for rank, samples in enumerate(usages):
        first, last = samples[1], samples[-1]  # caches have filled by the second sample
        # A dataset has one small piece, which does not grow; packs do not go through shared memory.
        assert first.shared == last.shared, f"pieces of shared memory: {first.shared}, {last.shared}"
        spans = (last.packs - first.packs) * 2 / 100_000  # of both ranks together
        slopes += [(b - a) / spans for a, b in zip(first.memory, last.memory, strict=True)]
        assert first.descriptors == last.descriptors, f"descriptors: {first.descriptors}, {last.descriptors}"
        assert last.state <= 1.3 * samples[2].state, f"the state grew from {samples[2].state} to {last.state}"
        open_before, open_after = samples[0].descriptors[0], ended[rank]
        assert open_after <= open_before, f"rank {rank} left descriptors open: {open_before}, {open_after}"
    if not run.quick:
        assert max(slopes) < KIB, f"{max(slopes):.0f} KiB per 100,000 packs"
    assert not left, f"left in shared memory: {left}"
    peaks = [max(sizes) / KIB for sizes in zip(*(sample.memory for sample in usages[0]), strict=True)]
    return (
        f"{total:,} packs ({total / seconds:,.0f} a second); memory grew by {max(slopes):.0f} KiB per 100,000 packs at "
        f"most, in a rank ({peaks[0]:.0f} MiB) or a worker ({peaks[1]:.0f} MiB); descriptors and shared "
        "memory constant; no process left after the end, nor after SIGKILL"
    )


def sample_usage(packs: int, every: int) -> list[Usage]:
    """Iterate over a number of packs, and sample the resources in use every ``every`` packs. Called in a rank."""
    settings: Any = {"max_seq_len": MAX_SEQ_LEN, "shuffle": True, "num_lanes": 8, "epochs": None}
    lengths = np.random.default_rng(0).choice([64, 128, 150, 192, 256], 997).tolist()
    dataset = IterablePackedDataset(range(400_000), encoder=CachedSamples(lengths), **settings)
    loader = PackedDataLoader(dataset, batch_size=BATCH, num_workers=2, timeout=120)
    samples: list[Usage] = []
    iterator = iter(loader)
    made = 0
    try:
        while made < packs:
            batch = next(iterator)
            assert batch.tokens.shape == (BATCH, MAX_SEQ_LEN)
            made += BATCH
            if made // every > len(samples):
                pids = [os.getpid(), *worker_pids()]
                counts = [list(map(of, pids)) for of in (private_memory, descriptors, shared_segments)]
                memory, opened, shared = counts
                samples.append(
                    Usage(made, memory, opened, sum(shared), len(pickle.dumps(loader.state_dict())))
                )
        return samples
    finally:
        end(loader, iterator)


def private_memory(pid: int) -> int:
    """Return the KiB of resident memory of a process that no file backs."""
    return int(Path(f"/proc/{pid}/status").read_text().partition("RssAnon:")[2].split()[0])


def descriptors(pid: int | str = "self") -> int:
    """Count the open descriptors of a process; of this one by default."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def shared_segments(pid: int) -> int:
    """Count the pieces of shared memory that a process has mapped or open."""
    found = Path(f"/proc/{pid}/maps").read_text().count("/dev/shm/")
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            found += str(link.readlink()).startswith("/dev/shm/")
    return found


def shared_memory() -> set[str]:
    """Return the names of all pieces of shared memory; torch puts a process id into the names of its own."""
    place = Path("/dev/shm")
    return {file.name for file in place.iterdir()} if place.is_dir() else set()
