"""Loader states: their size, the cost of a resume, and damaged or hostile ones."""

from __future__ import annotations

import io
import json
import pickle
import random
import resource
import signal
import statistics
import tempfile
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from streampack import IterablePackedDataset, JSONLSource, PackedDataLoader, Sample
from streampack.accounting import Ledger
from streampack.streaming.lane_state import LaneState
from stress.corpus import Corpus, load_state, save_state
from stress.job import Run, job
from tests.harness.corpus import Numbers

LANES = 8


class Documents:
    """A map-style dataset of any size, whose rows are made when they are read."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int, /) -> dict[str, int]:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return {"i": index}


class SkewedLengths:
    """Encode ``{"i": 3}`` as zeros, whose number is drawn by a hash of 3: mostly few, at most 500."""

    def __init__(self) -> None:
        self.zeros = np.zeros(500, dtype=np.int64)

    def __call__(self, row: Mapping[str, Any], /) -> Sample:  # noqa: D102 - the class says it
        share = zlib.crc32(row["i"].to_bytes(8, "little")) / 2**32
        length = 1 + int(499 * share**3)
        return Sample(self.zeros[:length], self.zeros[:length])

    def fingerprint(self) -> str:
        """Return a name."""
        return "skewed"


@job("state-size", "state size at 10^4 and 10^7 documents: means over 200 states equal within 5 %", limit=300)
def state_size(run: Run) -> str:
    """Compare the states of two corpora's first 9,000 documents, and hold all against the bound."""
    big = run.count(10**7, 10**5)
    means: dict[int, float] = {}
    largest = 0.0
    for documents in (10**4, big):
        loader = PackedDataLoader(shuffled_documents(documents), batch_size=4)
        sizes = []
        for _ in islice(loader, 0, 600, 3):
            lanes = loader.state_dict()["lanes"]
            sizes.append(size_of(lanes))
            largest = max(largest, size_of(lanes) / bound_of(lanes))
        assert len(sizes) == 200, f"only {len(sizes)} states of {documents} documents"
        means[documents] = statistics.mean(sizes)
    small, large = means[10**4], means[big]
    assert abs(large / small - 1) < 0.05, f"{small:.0f} and {large:.0f} bytes"
    assert largest < 1
    whole = len(pickle.dumps(loader.state_dict()))
    return (
        f"{LANES} lanes, {small:.0f} bytes at 10,000 documents and {large:.0f} at {big:,} ({large / small - 1:+.1%}); "
        f"{whole} with everything around it; "
        f"at most {largest:.0%} of lanes x (350 + span/4)"
    )


def shuffled_documents(documents: int) -> IterablePackedDataset:
    """Return a shuffled dataset of so many documents, packed to 512 tokens."""
    return IterablePackedDataset(
        Documents(documents),
        encoder=SkewedLengths(),
        max_seq_len=512,
        shuffle=True,
        num_lanes=LANES,
        epochs=None,
    )


def size_of(lanes: Mapping[int, Mapping[str, Any]]) -> int:
    """Return the bytes of the lane states, pickled one by one."""
    return sum(len(pickle.dumps(lane)) for lane in lanes.values())


def bound_of(lanes: Mapping[int, Mapping[str, Any]]) -> float:
    """Return the promised bound in bytes: ``350 + span / 4`` a lane, of span pieces since the oldest waiting one."""
    return sum(350 + (lane["next_piece"] - lane["first"]) / 4 for lane in lanes.values())


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

        def make() -> PackedDataLoader:
            # Two lanes, so that their windows are a small part of the epoch.
            settings = {"max_seq_len": 1024, "shuffle": True, "shuffle_window": 1024, "num_lanes": 2}
            return PackedDataLoader(
                IterablePackedDataset(JSONLSource(path), encoder=Numbers(), **settings), batch_size=4
            )

        steps = sum(1 for _ in make()) if run.quick else rows * 150 // 1024 // 4
        states: dict[int, list[dict[str, Any]]] = {10: [], 90: []}
        loader = make()
        for number, _ in enumerate(loader):
            for percent, found in states.items():
                # Several states in a row, because the cost depends on how far into its window each of them is.
                if number >= steps * percent // 100 and len(found) < repeats:
                    found.append(loader.state_dict())
            if len(states[90]) == repeats:
                break
        assert all(len(found) == repeats for found in states.values())
        times: dict[int, list[float]] = {10: [], 90: []}
        again: dict[int, list[tuple[int, int]]] = {10: [], 90: []}
        for number in range(repeats):
            for percent in (10, 90) if number % 2 else (90, 10):
                fresh = make()
                fresh.load_state_dict(states[percent][number])
                source: Any = fresh.dataset.lane_config.source
                begun = time.perf_counter()
                next(iter(fresh))
                times[percent].append(time.perf_counter() - begun)
                encoder: Any = fresh.dataset.lane_config.encode
                again[percent].append((encoder.calls, source.bytes_read))
        early, late = (statistics.median(times[percent]) for percent in (10, 90))
        encoded = {percent: statistics.median(c for c, _ in found) for percent, found in again.items()}
        read = {percent: statistics.median(b for _, b in found) for percent, found in again.items()}
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
    verdicts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        originals = []
        for kind in ("map", "jsonl", "endless", "split"):
            corpus_folder = folder / kind
            corpus_folder.mkdir()
            corpus = Corpus.make(
                300,
                folder=corpus_folder if kind == "jsonl" else None,
                longest=80 if kind == "split" else 12,
                epochs=None if kind == "endless" else 2,
                overlong="split",
                num_lanes=4,
            )
            loader = PackedDataLoader(corpus.dataset(), batch_size=3)
            states = [loader.state_dict() for _ in islice(loader, 40)]
            originals.append((kind, corpus, states))
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        limits = resource.getrlimit(resource.RLIMIT_AS)
        address = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (address + (2 << 30), limits[1]))
        signal.signal(signal.SIGALRM, _too_slow)
        warnings.filterwarnings("ignore", message="Detected pickle protocol")  # torch warns of some damage
        try:
            for number in range(cases):
                run.progress(number, cases, "states")
                rng = random.Random(number)
                kind, corpus, states = originals[number % len(originals)]
                state, attack = damaged(rng.choice(states), rng, folder)
                signal.setitimer(signal.ITIMER_REAL, 5)
                try:
                    verdicts[try_state(corpus, state)] += 1
                except BaseException as error:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    raise AssertionError(
                        f"state {number} of {kind}, {attack}: {type(error).__name__}: {error}"
                    ) from error
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)
        assert not verdicts["an error without a message"]
        assert not (folder / "executed").exists(), "code in a state was executed"
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - used) / 2**20
        assert grown < 256, f"memory grew by {grown:.0f} MiB"
    counts = ", ".join(f"{count:,} {verdict}" for verdict, count in verdicts.most_common())
    return f"{cases:,} states: {counts}; nothing executed, memory grew by {grown:.0f} MiB at most"


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
    try:
        loader.load_state_dict(loaded)
    except ValueError as error:
        return "refused when loaded" if str(error) else "an error without a message"
    try:
        for _ in islice(loader, 3):
            loader.state_dict()
    except ValueError as error:
        return "refused when iterated" if str(error) else "an error without a message"
    return "still a state"


def damaged(state: dict[str, Any], rng: random.Random, folder: Path) -> tuple[bytes, str]:
    """Return the bytes of a checkpoint whose state one of `ATTACKS` has changed, and the attack's name."""
    state = {**state, "identity": dict(state["identity"]), "lanes": dict(state["lanes"])}
    attack = rng.choice(ATTACKS)
    blob = attack(state, rng, folder)
    return (blob if isinstance(blob, bytes) else save_state(state)), attack.__name__


def random_lane(state: dict[str, Any], rng: random.Random) -> int:
    """Return the number of a random lane."""
    lane: int = rng.choice(sorted(state["lanes"]))
    return lane


def flipped_bits(state: dict[str, Any], rng: random.Random, folder: Path) -> None:
    """Flip a bit of a number in a lane state, and leave the checksum as it was."""
    number = random_lane(state, rng)
    lane = dict(state["lanes"][number])
    field = rng.choice(["packs", "epoch", "first", "offset", "next_piece", "consumed", "cursor", "ledger"])
    bit = 1 << rng.randrange(40)
    if field == "consumed":
        lane[field] = f"{int(lane[field], 16) ^ bit:x}"
    elif isinstance(lane[field], list):
        numbers = list(lane[field])
        numbers[rng.randrange(len(numbers))] ^= bit
        lane[field] = numbers
    else:
        lane[field] ^= bit
    state["lanes"][number] = lane


def odd_fields(state: dict[str, Any], rng: random.Random, folder: Path) -> None:
    """Replace or remove a field of a lane state, or add one."""
    number = random_lane(state, rng)
    lane = dict(state["lanes"][number])
    field = rng.choice([*lane])
    if rng.random() < 0.2:
        del lane[field]
    elif rng.random() < 0.1:
        lane["more"] = 1
    else:
        odd: list[Any] = [None, True, -1, 2**63, 2**70, 1.5, "", "zz", "f" * 10**6, b"x"]
        odd += [[], [[]] * 1000, [2**64], {}, {"a": 1}]
        lane[field] = rng.choice(odd)
    state["lanes"][number] = lane


def forged_numbers(state: dict[str, Any], rng: random.Random, folder: Path) -> None:
    """Change a number of a lane state, and recompute its checksum."""
    lane = random_lane(state, rng)
    forged = LaneState.from_dict(state["lanes"][lane])
    number = rng.choice([0, 1, 2, 7, 500, 10**6, 2**31, 2**32, 2**53, 2**63 - 1])
    span = rng.choice([8, 100, 10_000])
    cursor = list(forged.cursor) or [0]
    at = rng.randrange(len(cursor))
    ledger = forged.ledger.numbers()
    ledger[rng.randrange(len(ledger))] = number
    changes: list[dict[str, Any]] = [
        {"packs": number},
        {"epoch": number},
        {"offset": number},
        {"done": not forged.done},
        {"cursor": (*cursor[:at], number, *cursor[at + 1 :])},
        {"cursor": (*cursor, *[number] * rng.randint(1, 3))},
        {"cursor": tuple(cursor[:at])},
        {"next_piece": forged.first + number},
        {"consumed": rng.getrandbits(span), "next_piece": forged.first + rng.choice([span, number + span])},
        {"first": number, "next_piece": forged.next_piece + number - forged.first},
        {"ledger": Ledger.from_numbers(ledger)},
    ]
    for field, value in rng.choice(changes).items():
        setattr(forged, field, value)
    state["lanes"][lane] = forged.as_dict()


def other_lanes(state: dict[str, Any], rng: random.Random, folder: Path) -> None:
    """Swap, remove or copy lane states, or use keys that are no lane numbers."""
    lanes = state["lanes"]
    first, second = rng.choice(sorted(lanes)), rng.choice(sorted(lanes))
    change = rng.randrange(5)
    if change == 0:
        lanes[first], lanes[second] = lanes[second], lanes[first]
    elif change == 1:
        del lanes[first]
    elif change == 2:
        lanes[second] = lanes[first]
    elif change == 3:
        lanes[rng.choice([-1, 4, 10**9, 2**70, "0", 1.0, None, (1,)])] = lanes[first]
    else:
        lanes.clear()


def other_values(state: dict[str, Any], rng: random.Random, folder: Path) -> None:
    """Replace or remove a field of the loader's state, of its identity, or a whole lane state."""
    odd: list[Any] = [None, True, -1, 0, 1, 3, 10**6, 10**9, 2**40, 2**63, 2**200, 1.5, float("nan"), ""]
    odd += ["x" * 1000, b"", b"\0" * 100, [], [[]] * 1000, (), {}, {1: 2}, {"lanes": {}}, torch.zeros(3)]
    odd += ["$(touch executed)"]
    field = rng.choice([*state, *state, "num_lanes", "epoch", "lanes"])
    if rng.random() < 0.1:
        del state[field]
    elif field == "lanes" and rng.random() < 0.7:
        state["lanes"][random_lane(state, rng)] = rng.choice(odd)
    elif field == "identity" and rng.random() < 0.7:
        state["identity"][rng.choice(sorted(state["identity"]))] = rng.choice(odd)
    else:
        state[field] = rng.choice(odd)


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


ATTACKS = (flipped_bits, odd_fields, forged_numbers, forged_numbers, other_lanes, other_values, damaged_file)
