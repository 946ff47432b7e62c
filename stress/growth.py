"""A million packs: nothing grows, and nothing is left behind."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist

from streampack import IterablePackedDataset, PackedDataLoader, Sample
from stress.job import Run, job
from stress.ranks import Ranks
from stress.states import Documents

MAX_SEQ_LEN, BATCH = 256, 64
KIB = 1024


class Cheap:
    """Encodes ``{"i": 3}`` as tokens that are always the same ones, so that it costs next to nothing."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.samples = [_sample(n) for n in rng.choice([64, 128, 150, 192, 256], 997).tolist()]

    def __call__(self, row: Mapping[str, Any], /) -> Sample:  # noqa: D102 - the class says it
        return self.samples[row["i"] % len(self.samples)]

    def fingerprint(self) -> str:
        """Its name."""
        return "cheap"


def _sample(length: int) -> Sample:
    tokens = np.arange(length, dtype=np.int64)
    return Sample(tokens, tokens)


class Look(NamedTuple):
    """One rank and its workers at one moment."""

    packs: int  # of this rank
    resident: list[int]  # KiB, of the rank and of each worker
    descriptors: list[int]
    shared: int  # shared memory that any of them has mapped or open
    state: int  # bytes of the lanes' states


@job(
    "million", "10^6 packs of 256 tokens: memory flat, nothing left behind, after SIGKILL included", limit=900
)
def million(run: Run) -> str:
    """2 ranks x 2 workers, shuffled, epoch after epoch."""
    total = run.count(1_000_000, 40_000)
    before = shared_memory()
    began = time.monotonic()
    with Ranks(2) as ranks:
        ranks.start(look_while_packing, total // 2, total // 20)
        looks = ranks.collect(850)
        seconds = time.monotonic() - began
        ended = ranks.run(open_descriptors)
        # Once more, and killed in the middle.
        ranks.start(look_while_packing, 10**9, total // 20)
        time.sleep(2)
        members = ranks.members()
        assert len(members) == 6, f"{len(members)} processes for 2 ranks x 2 workers"
        ranks.kill()  # raises if any lives on
        left = [name for name in shared_memory() - before if any(str(pid) in name for pid in members)]
    slopes, descriptors = [], []
    for rank, found in enumerate(looks):
        warm, last = found[1], found[-1]
        assert not any(look.shared for look in found), "shared memory is in use"
        spans = (last.packs - warm.packs) * 2 / 100_000  # of both ranks together
        slopes += [(b - a) / spans for a, b in zip(warm.resident, last.resident, strict=True)]
        assert warm.descriptors == last.descriptors, (
            f"descriptors: {warm.descriptors}, then {last.descriptors}"
        )
        assert last.state <= 1.3 * found[2].state, "the state grew"
        descriptors.append((found[0].descriptors[0], ended[rank]))
    assert all(after <= during for during, after in descriptors), f"descriptors are left open: {descriptors}"
    if not run.quick:
        assert max(slopes) < KIB, f"{max(slopes):.0f} KiB per 100,000 packs"
    assert not left, f"left in shared memory: {left}"
    resident = [max(sizes) / KIB for sizes in zip(*(look.resident for look in looks[0]), strict=True)]
    return (
        f"{total:,} packs ({total / seconds:,.0f} a second); memory grew by {max(slopes):.0f} KiB per 100,000 packs at "
        f"most, in a rank ({resident[0]:.0f} MiB) or a worker ({resident[1]:.0f} MiB); descriptors constant; no "
        "shared memory; no process left after the end, nor after SIGKILL"
    )


def look_while_packing(packs: int, every: int) -> list[Look]:
    """In a rank: its looks at itself and its workers."""
    dataset = IterablePackedDataset(
        Documents(400_000), encoder=Cheap(), max_seq_len=MAX_SEQ_LEN, shuffle=True, num_lanes=8, epochs=None
    )
    loader = PackedDataLoader(dataset, batch_size=BATCH, num_workers=2, timeout=120)
    looks: list[Look] = []
    iterator = iter(loader)
    made = 0
    try:
        while made < packs:
            batch = next(iterator)
            assert batch.tokens.shape == (BATCH, MAX_SEQ_LEN)
            made += BATCH
            if made // every > len(looks):
                streams: list[Any] = iterator.rank_batches.streams  # type: ignore[attr-defined]
                pids = [os.getpid(), *(stream.process.pid for stream in streams)]
                size = sum(map(len, loader.state_dict()["lanes"].values()))
                looks.append(
                    Look(
                        made,
                        list(map(resident, pids)),
                        list(map(descriptors, pids)),
                        sum(map(shared, pids)),
                        size,
                    )
                )
        return looks
    finally:
        for stream in iterator.rank_batches.streams:  # type: ignore[attr-defined]
            stream.close()
        if loader.rank_sync.group is not None:
            dist.destroy_process_group(loader.rank_sync.group)


def open_descriptors() -> int:
    """In a rank."""
    return descriptors(os.getpid())


def resident(pid: int) -> int:
    """KiB that a process has in memory and shares with no file."""
    fields = dict(
        text.split(":", 1) for text in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in text
    )
    return int(fields["RssAnon"].split()[0])


def descriptors(pid: int) -> int:
    """How many a process has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def shared(pid: int) -> int:
    """How many pieces of shared memory a process has mapped or open."""
    found = Path(f"/proc/{pid}/maps").read_text().count("/dev/shm/")
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            found += str(link.readlink()).startswith("/dev/shm/")
    return found


def shared_memory() -> set[str]:
    """The names of the pieces of shared memory that the system has. Those of torch hold a process's number."""
    place = Path("/dev/shm")
    return {file.name for file in place.iterdir()} if place.is_dir() else set()
