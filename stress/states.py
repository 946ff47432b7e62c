"""Loader states: their size, the cost of a resume, and damaged or hostile ones."""

from __future__ import annotations

import copy
import io
import json
import pickle
import random
import re
import resource
import signal
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from streampack import IterablePackedDataset, JSONLSource, PackedDataLoader, Sample
from stress.corpus import Corpus, load_state, save_state
from stress.job import Run, job
from tests.harness.corpus import Numbers

LANES = 8


class CachedSamples:
    """Encode a number as one of a few samples made beforehand, so that encoding costs next to nothing."""

    def __init__(self, lengths: list[int]) -> None:
        tokens = np.arange(max(lengths), dtype=np.int64)
        self.samples = [Sample(tokens[:n], tokens[:n]) for n in lengths]

    def __call__(self, row: int, /) -> Sample:  # noqa: D102 - the class says it
        return self.samples[row % len(self.samples)]

    def fingerprint(self) -> str:
        """Return a name."""
        return "cached samples"


@job(
    "state-size",
    "state size at 10^4 and 10^7 documents: longer by the digits of row numbers, at most 20 %",
    limit=300,
)
def state_size(run: Run) -> str:
    """Compare the states of two corpora's first 9,000 documents, packed to 512 tokens."""
    big = run.count(10**7, 10**5)
    sizes = {documents: sizes_of_states(documents) for documents in (10**4, big)}
    small, large = map(statistics.mean, sizes.values())
    assert large / small < 1.2, f"{small:.0f} and {large:.0f} bytes"
    return (
        f"{LANES} lanes, {small:.0f} bytes at 10,000 documents and {large:.0f} at {big:,} ({large / small - 1:+.1%}), "
        f"at most {max(map(max, sizes.values()))}"
    )


def sizes_of_states(documents: int) -> list[int]:
    """Return the sizes of 200 states, pickled, of a shuffled dataset with a number of documents."""
    settings: dict[str, Any] = {"max_seq_len": 512, "shuffle": True, "num_lanes": LANES, "epochs": None}
    lengths = 1 + 499 * np.random.default_rng(0).random(997) ** 3  # mostly few tokens
    encoder = CachedSamples(lengths.astype(int).tolist())
    dataset = IterablePackedDataset(range(documents), encoder=encoder, **settings)
    loader = PackedDataLoader(dataset, batch_size=4)
    sizes = [len(pickle.dumps(loader.state_dict())) for _ in islice(loader, 0, 600, 3)]
    assert len(sizes) == 200, f"only {len(sizes)} states of {documents} documents"
    return sizes


@job(
    "resume-time",
    "resume at 90 % of an epoch against 10 %, seekable source: at most 1.2 x the time",
    limit=240,
)
def resume_time(run: Run) -> str:
    """Time a resume up to its first batch, and count the rows and bytes that it reads again."""
    rows, repeats = run.count(400_000, 20_000), run.count(15, 3)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "rows.jsonl"
        rng = np.random.default_rng(0)
        with path.open("w") as file:
            for i, n in enumerate(rng.integers(1, 300, rows).tolist()):
                file.write(json.dumps({"i": i, "n": n, "text": "x" * n}) + "\n")
        size = path.stat().st_size

        def make() -> tuple[PackedDataLoader, Any, Numbers]:
            # Two lanes, so that their windows are a small part of the epoch.
            settings: Any = {"max_seq_len": 1024, "shuffle": 1024, "num_lanes": 2}
            source, encoder = JSONLSource(path), Numbers()
            dataset = IterablePackedDataset(source, encoder=encoder, **settings)
            return PackedDataLoader(dataset, batch_size=4), source, encoder

        steps = sum(1 for _ in make()[0]) if run.quick else rows * 150 // 1024 // 4
        # Several states in a row, because the cost depends on how far into its window each of them is.
        firsts = {percent: steps * percent // 100 for percent in (10, 90)}
        states: dict[int, list[dict[str, Any]]] = {10: [], 90: []}
        loader = make()[0]
        for number, _ in enumerate(islice(loader, firsts[90] + repeats)):
            for percent, first in firsts.items():
                if first <= number < first + repeats:
                    states[percent].append(loader.state_dict())
        assert len(states[90]) == repeats
        costs: dict[int, list[tuple[float, int, int]]] = {10: [], 90: []}  # seconds, rows, bytes
        for number in range(repeats):
            for percent in (10, 90) if number % 2 else (90, 10):
                fresh, source, encoder = make()
                fresh.load_state_dict(states[percent][number])
                begun = time.perf_counter()
                next(iter(fresh))
                costs[percent].append((time.perf_counter() - begun, encoder.calls, source.bytes_read))
        medians = {at: [statistics.median(of) for of in zip(*found)] for at, found in costs.items()}  # noqa: B905
        (early, *_), (late, *_) = medians[10], medians[90]
        encoded, read = ({at: found[i] for at, found in medians.items()} for i in (1, 2))
        assert read[10], "nothing was counted"
        assert read[90] < 1.2 * read[10], read
        assert late <= 1.2 * early, f"{late * 1e3:.1f} ms against {early * 1e3:.1f} ms"
    return (
        f"{size / 1e6:.0f} MB of JSONL, medians of {repeats}: {late * 1e3:.1f} ms at 90 %, {early * 1e3:.1f} ms at "
        f"10 % ({late / early:.2f} x); to the first batch {read[90] / 1e3:.0f} kB and {encoded[90]:.0f} rows against "
        f"{read[10] / 1e3:.0f} kB and {encoded[10]:.0f} rows"
    )


@job(
    "hostile",
    "10,000 mutated or hostile states: a typed error, nothing executed, no unbounded allocation",
    limit=300,
)
def hostile(run: Run) -> str:
    """Load each state and iterate from it, within 2 GiB and 5 s; it must work or be refused by a ValueError."""
    cases = run.count(10_000, 500)
    verdicts = Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        originals = [original(kind, folder / kind) for kind in ("map", "jsonl", "endless", "split")]
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        limits = resource.getrlimit(resource.RLIMIT_AS)
        address = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (address + (2 << 30), limits[1]))
        signal.signal(signal.SIGALRM, _too_slow)
        warnings.filterwarnings("ignore", message="Detected pickle protocol")  # torch warns of some damage
        try:
            for number in range(cases):
                rng = random.Random(number)
                corpus, states = originals[number % len(originals)]
                attack = rng.choice(ATTACKS)
                state = copy.deepcopy(rng.choice(states))
                blob = attack(state, rng, folder) or save_state(state)
                signal.setitimer(signal.ITIMER_REAL, 5)
                try:
                    verdict = try_state(corpus, blob)
                except BaseException as error:
                    raise AssertionError(f"state {number}, {attack.__name__}: {error!r}") from error
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                verdicts[verdict] += 1
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)
        assert not verdicts["an error without a message"]
        assert not (folder / "executed").exists(), "code in a state was executed"
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - used) / 2**20
        assert grown < 256, f"memory grew by {grown:.0f} MiB"
    counts = ", ".join(f"{count:,} {verdict}" for verdict, count in verdicts.most_common())
    return f"{cases:,} states: {counts}; nothing executed, memory grew by {grown:.0f} MiB at most"


def original(kind: str, folder: Path) -> tuple[Corpus, list[dict[str, Any]]]:
    """Return a corpus and the states of its first steps."""
    folder.mkdir()
    corpus = Corpus.make(
        300,
        folder=folder if kind == "jsonl" else None,
        longest=80 if kind == "split" else 12,
        epochs=None if kind == "endless" else 2,
        overlong="split",
        num_lanes=4,
    )
    loader = PackedDataLoader(corpus.dataset(), batch_size=3)
    return corpus, [loader.state_dict() for _ in islice(loader, 40)]


def _too_slow(signum: int, frame: object) -> None:
    raise TimeoutError("took more than 5 s")


def try_state(corpus: Corpus, state: bytes) -> str:
    """Load a state and iterate from it; return whether and when it was refused.

    Raises:
        Exception: anything but a ``ValueError`` of streampack or a refusal by ``torch.load``.
    """
    try:
        loaded = load_state(state)
    except (MemoryError, TimeoutError):
        raise
    except Exception:  # torch raises errors of many types
        return "refused by torch.load"
    loader = PackedDataLoader(corpus.dataset(), batch_size=3)
    when = "loaded"
    try:
        loader.load_state_dict(loaded)
        when = "iterated"
        for _ in islice(loader, 3):
            loader.state_dict()
    except ValueError as error:
        return f"refused when {when}" if str(error) else "an error without a message"
    return "still a state"


# Attacks: each changes a state in place, or returns the bytes of a checkpoint.


def place_in(value: Any, rng: random.Random) -> tuple[Any, Any]:
    """Descend from a dict or list to some value in it, mostly the innermost; return what holds it, and its key."""
    while True:
        key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        if not isinstance(value[key], dict | list) or not value[key] or rng.random() < 0.1:
            return value, key
        value = value[key]


def change_number(state: dict[str, Any], rng: random.Random, change: Callable[[int], int]) -> None:
    """Change a number in the lane states, or the hexadecimal digits of one."""
    while True:
        holder, key = place_in(state["lanes"], rng)
        value = holder[key]
        if isinstance(value, int):
            holder[key] = type(value)(change(value))
            return
        if isinstance(value, str) and re.fullmatch("[0-9a-f]+", value):
            holder[key] = f"{change(int(value, 16)):x}"
            return


def flipped_bit(state: dict[str, Any], rng: random.Random, folder: Path) -> None:
    """Flip a bit of a number in the lane states, and leave the checksum as it was."""
    change_number(state, rng, lambda number: number ^ 1 << rng.randrange(40))


def odd_value(state: dict[str, Any], rng: random.Random, folder: Path) -> None:
    """Replace or remove a value anywhere in the state, or add one."""
    holder, key = place_in(state, rng)
    if rng.random() < 0.2:
        del holder[key]
    elif rng.random() < 0.1 and isinstance(holder, dict):
        holder["more"] = 1
    else:
        holder[key] = rng.choice(ODD)


def other_lanes(state: dict[str, Any], rng: random.Random, folder: Path) -> None:
    """Swap, copy or remove lane states, or use keys that are no lane numbers."""
    lanes = state["lanes"]
    first, second = rng.choice(sorted(lanes)), rng.choice(sorted(lanes))
    change = rng.randrange(4)
    if change == 0:
        lanes[first], lanes[second] = lanes[second], lanes[first]
    elif change == 1:
        lanes[second] = lanes[first]
    elif change == 2:
        lanes[rng.choice([-1, 4, 10**9, 2**70, "0", 1.0, None, (1,)])] = lanes[first]
    else:
        lanes.clear()


def damaged_file(state: dict[str, Any], rng: random.Random, folder: Path) -> bytes:
    """Return a file with damaged bytes, or a pickle that creates a file when plain pickle loads it."""
    if rng.random() < 0.3:
        buffer = io.BytesIO()
        state[rng.choice(["identity", "epoch"])] = CreatesFile(folder / "executed")
        torch.save(state, buffer)
        return buffer.getvalue()
    # Only the pickle inside the zip archive is damaged: the archive's own checks are torch's.
    blob = bytearray(save_state(state))
    start = blob.index(b"identity") - 60
    stop = blob.index(b"PK", start)
    for _ in range(rng.randint(1, 8)):
        blob[rng.randrange(start, stop)] = rng.randrange(256)
    return bytes(blob)


class CreatesFile:
    """An object whose pickle creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (str(self.path), "w")


ATTACKS = (flipped_bit, odd_value, odd_value, other_lanes, damaged_file)
ODD: list[Any] = [
    None, True, -1, 0, 1, 3, 10**6, 10**9, 2**40, 2**63, 2**70, 2**200, 1.5, float("nan"), "", "zz", "x" * 1000,
    "f" * 10**6, "$(touch executed)", b"", b"x", b"\0" * 100, [], [[]] * 1000, [2**64], (), {}, {1: 2}, {"a": 1},
    {"lanes": {}}, torch.zeros(3),
]  # fmt: skip
