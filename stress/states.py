"""States: their size, what resuming from them costs, and what hostile ones can do."""

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
from stress.corpus import Corpus, Numbers, pack, unpack
from stress.job import Run, job

LANES = 8


class Documents:
    """A map-style data set of any size, made as it is read."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int, /) -> dict[str, int]:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return {"i": index}


class Skewed:
    """Encodes ``{"i": 3}`` as zeros, as many as a hash of 3 says: mostly short, at most 500."""

    def __init__(self) -> None:
        self.zeros = np.zeros(500, dtype=np.int64)

    def __call__(self, row: Mapping[str, Any], /) -> Sample:  # noqa: D102 - the class says it
        share = zlib.crc32(row["i"].to_bytes(8, "little")) / 2**32
        length = 1 + int(499 * share**3)
        return Sample(self.zeros[:length], self.zeros[:length])

    def fingerprint(self) -> str:
        """Its name."""
        return "skewed"


@job("state-size", "state size at 10^4 and 10^7 documents: means over 200 states equal within 5 %", limit=300)
def state_size(run: Run) -> str:
    """200 states over the first 9,000 documents of each; and 200 deep in the larger one, against the bound."""
    big = run.count(10**7, 10**5)
    means: dict[int, float] = {}
    largest = 0.0
    for documents in (10**4, big):
        loader = PackedDataLoader(data_of(documents), batch_size=4)
        sizes = []
        for number, _ in enumerate(loader):
            if number % 3 == 0:
                lanes = loader.state_dict()["lanes"]
                sizes.append(size_of(lanes))
                largest = max(largest, size_of(lanes) / bound_of(lanes))
            if len(sizes) == 200:
                break
        assert len(sizes) == 200, f"only {len(sizes)} states of {documents} documents"
        means[documents] = statistics.mean(sizes)
    small, large = means[10**4], means[big]
    assert abs(large / small - 1) < 0.05, f"{small:.0f} and {large:.0f} bytes"
    # Nine tenths through the larger one: all that can have grown are the digits of its counters.
    loader = PackedDataLoader(data_of(big), batch_size=4)
    state = data_of(big).state_dict()
    per_lane = big * 9 // 10 // LANES
    packed = per_lane * 125
    at_nine_tenths = LaneState(
        packed // 512, False, 0, (per_lane,), per_lane, 0, per_lane, 0,
        Ledger(per_lane, packed, packed // 512, packed, packed),
    ).as_dict()  # fmt: skip
    loader.load_state_dict(
        {**state, "num_lanes": LANES, "lanes": dict.fromkeys(range(LANES), at_nine_tenths)}
    )
    sizes = []
    for _ in islice(loader, 200, 400):  # its buffers are as full as in any run
        lanes = loader.state_dict()["lanes"]
        sizes.append(size_of(lanes))
        largest = max(largest, size_of(lanes) / bound_of(lanes))
    assert largest < 1
    whole = len(pickle.dumps(loader.state_dict()))
    return (
        f"{LANES} lanes, {small:.0f} bytes at 10,000 documents and {large:.0f} at {big:,} ({large / small - 1:+.1%}); "
        f"{statistics.mean(sizes):.0f} after 90 % of the latter (longer counters), {whole} with everything around it; "
        f"at most {largest:.0%} of lanes x (256 + span/4)"
    )


def data_of(documents: int) -> IterablePackedDataset:
    """Shuffled, packed to 512."""
    return IterablePackedDataset(
        Documents(documents), encoder=Skewed(), max_seq_len=512, shuffle=True, num_lanes=LANES, epochs=None
    )


def size_of(lanes: Mapping[int, Mapping[str, Any]]) -> int:
    """Bytes of the lanes' states, pickled one by one."""
    return sum(len(pickle.dumps(lane)) for lane in lanes.values())


def bound_of(lanes: Mapping[int, Mapping[str, Any]]) -> float:
    """Bytes that they may have: ``256 + span/4`` a lane, where span counts the pieces since the oldest that waits."""
    return sum(256 + (lane["next_piece"] - lane["first"]) / 4 for lane in lanes.values())


@job(
    "resume-time",
    "resume at 90 % of an epoch against 10 %, seekable source: at most 1.2 x the time",
    limit=240,
)
def resume_time(run: Run) -> str:
    """To the first batch; and what is read again, in rows and bytes."""
    rows, repeats = run.count(400_000, 20_000), run.count(15, 3)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "rows.jsonl"
        rng = np.random.default_rng(0)
        with path.open("w") as file:
            for i, n in enumerate(rng.integers(1, 300, rows).tolist()):
                file.write(json.dumps({"i": i, "n": n, "text": "x" * n}) + "\n")
        size = path.stat().st_size

        def make() -> PackedDataLoader:
            # Two lanes, so that one window of each is little of the epoch.
            settings = {"max_seq_len": 1024, "shuffle": True, "shuffle_window": 1024, "num_lanes": 2}
            return PackedDataLoader(
                IterablePackedDataset(JSONLSource(path), encoder=Numbers(), **settings), batch_size=4
            )

        loader = make()
        steps = sum(1 for _ in islice(loader, 10**9)) if run.quick else rows * 150 // 1024 // 4
        states: dict[int, list[dict[str, Any]]] = {10: [], 90: []}
        for number, _ in enumerate(loader := make()):
            for percent, found in states.items():
                # Not one state but several in a row: where in its window it stands is a matter of chance.
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
    """Each is loaded under ``weights_only`` and iterated, within 2 GiB and 5 s, or refused with a ValueError."""
    cases = run.count(10_000, 500)
    verdicts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        victims = []
        for kind in ("map", "jsonl", "endless", "split"):
            place = folder / kind
            place.mkdir()
            corpus = Corpus.make(
                300,
                folder=place if kind == "jsonl" else None,
                longest=80 if kind == "split" else 12,
                epochs=None if kind == "endless" else 2,
                overlong="split",
                num_lanes=4,
            )
            loader = PackedDataLoader(corpus.dataset(), batch_size=3)
            states = [loader.state_dict() for _ in islice(loader, 40)]
            victims.append((kind, corpus, states))
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        limits = resource.getrlimit(resource.RLIMIT_AS)
        address = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (address + (2 << 30), limits[1]))
        signal.signal(signal.SIGALRM, _too_slow)
        warnings.filterwarnings(
            "ignore", message="Detected pickle protocol"
        )  # that is what damage looks like
        try:
            for number in range(cases):
                run.progress(number, cases, "states")
                rng = random.Random(number)
                kind, corpus, states = victims[number % len(victims)]
                state, what = damaged(rng.choice(states), rng, folder)
                signal.setitimer(signal.ITIMER_REAL, 5)
                try:
                    verdicts[try_it(corpus, state)] += 1
                except BaseException as error:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    raise AssertionError(
                        f"state {number} of {kind}, {what}: {type(error).__name__}: {error}"
                    ) from error
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)
        assert not verdicts["an error without words"]
        assert not (folder / "executed").exists(), "code in a state was executed"
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - used) / 2**20
        assert grown < 256, f"memory grew by {grown:.0f} MiB"
    counts = ", ".join(f"{count:,} {verdict}" for verdict, count in verdicts.most_common())
    return f"{cases:,} states: {counts}; nothing executed, memory grew by {grown:.0f} MiB at most"


def _too_slow(signum: int, frame: object) -> None:
    raise TimeoutError("took more than 5 s")


def try_it(corpus: Corpus, state: bytes) -> str:
    """What becomes of a state.

    Raises:
        Exception: anything but a ``ValueError`` of the library or a refusal to unpickle.
    """
    try:
        loaded = unpack(state)
    except (MemoryError, TimeoutError):
        raise
    except Exception:  # torch's own, of many types, before anything of ours sees it
        return "refused by torch.load"
    loader = PackedDataLoader(corpus.dataset(), batch_size=3)
    try:
        loader.load_state_dict(loaded)
    except ValueError as error:
        return "refused when loaded" if str(error) else "an error without words"
    try:
        for _ in islice(loader, 3):
            loader.state_dict()
    except ValueError as error:
        return "refused when iterated" if str(error) else "an error without words"
    return "still a state"


def damaged(state: dict[str, Any], rng: random.Random, folder: Path) -> tuple[bytes, str]:
    """The bytes of a checkpoint with a state that is not what it was, and what was done to it."""
    state = {**state, "identity": dict(state["identity"]), "lanes": dict(state["lanes"])}
    attack = rng.choice(ATTACKS)
    blob = attack(state, rng, folder)
    return (blob if isinstance(blob, bytes) else pack(state)), attack.__name__


def _lane(state: dict[str, Any], rng: random.Random) -> int:
    lane: int = rng.choice(sorted(state["lanes"]))
    return lane


def flipped_bits(state: dict[str, Any], rng: random.Random, folder: Path) -> None:
    """A bit of a number of a lane's state is flipped; its checksum is as it was."""
    lane = dict(state["lanes"][_lane(state, rng)])
    field = rng.choice(["packs", "epoch", "first", "offset", "next_piece", "cursor", "ledger"])
    if isinstance(lane[field], list):
        numbers = list(lane[field])
        numbers[rng.randrange(len(numbers))] ^= 1 << rng.randrange(40)
        lane[field] = numbers
    else:
        lane[field] ^= 1 << rng.randrange(40)
    state["lanes"][_lane(state, rng)] = lane


def odd_fields(state: dict[str, Any], rng: random.Random, folder: Path) -> None:
    """Something else in the place of a field of a lane's state, or none, or one more."""
    number = _lane(state, rng)
    lane = dict(state["lanes"][number])
    field = rng.choice([*lane])
    if rng.random() < 0.2:
        del lane[field]
    elif rng.random() < 0.1:
        lane["more"] = 1
    else:
        odd = [
            None,
            True,
            -1,
            2**63,
            2**70,
            1.5,
            "",
            "zz",
            "f" * 10**6,
            b"x",
            [],
            [[]] * 1000,
            [2**64],
            {},
            {"a": 1},
        ]
        lane[field] = rng.choice(odd)
    state["lanes"][number] = lane


def forged_numbers(state: dict[str, Any], rng: random.Random, folder: Path) -> None:
    """A well-formed lane state with other numbers in it, and a checksum that is right."""
    number_of_lane = _lane(state, rng)
    forged = LaneState.from_dict(state["lanes"][number_of_lane])
    number = rng.choice([0, 1, 2, 7, 500, 10**6, 2**31, 2**32, 2**53, 2**63 - 1])
    field = rng.choice(
        ["packs", "done", "epoch", "cursor", "first", "offset", "next_piece", "consumed", "ledger"]
    )
    if field == "cursor":
        cursor = list(forged.cursor) or [0]
        deed = rng.randrange(3)
        if deed == 0:
            cursor[rng.randrange(len(cursor))] = number
        elif deed == 1:
            cursor += [number] * rng.randint(1, 3)
        else:
            cursor = cursor[: rng.randrange(len(cursor))]
        forged.cursor = tuple(cursor)
    elif field == "next_piece":
        forged.next_piece = forged.first + number
    elif field == "consumed":
        span = rng.choice([8, 100, 10_000])
        forged.consumed = rng.getrandbits(span)
        forged.next_piece = forged.first + rng.choice([span, number + span])
    elif field == "ledger":
        numbers = forged.ledger.numbers()
        numbers[rng.randrange(len(numbers))] = number
        forged.ledger = Ledger.from_numbers(numbers)
    elif field == "first":
        forged.next_piece += number - forged.first
        forged.first = number
    elif field == "done":
        forged.done = not forged.done
    else:
        setattr(forged, field, number)
    state["lanes"][number_of_lane] = forged.as_dict()


def other_lanes(state: dict[str, Any], rng: random.Random, folder: Path) -> None:
    """Lanes swapped, lost, doubled, or of lanes that are none."""
    lanes = state["lanes"]
    first, second = rng.choice(sorted(lanes)), rng.choice(sorted(lanes))
    deed = rng.randrange(5)
    if deed == 0:
        lanes[first], lanes[second] = lanes[second], lanes[first]
    elif deed == 1:
        del lanes[first]
    elif deed == 2:
        lanes[second] = lanes[first]
    elif deed == 3:
        lanes[rng.choice([-1, 4, 10**9, 2**70, "0", 1.0, None, (1,)])] = lanes[first]
    else:
        lanes.clear()


def other_values(state: dict[str, Any], rng: random.Random, folder: Path) -> None:
    """Something else in the place of a field, or none."""
    odd = [
        *(None, True, -1, 0, 1, 3, 10**6, 10**9, 2**40, 2**63, 2**200, 1.5, float("nan"), "", "x" * 1000),
        *(
            b"",
            b"\0" * 100,
            [],
            [[]] * 1000,
            (),
            {},
            {1: 2},
            {"lanes": {}},
            torch.zeros(3),
            "$(touch executed)",
        ),
    ]
    field = rng.choice([*state, *state, "num_lanes", "epoch", "lanes"])
    if rng.random() < 0.1:
        del state[field]
    elif field == "lanes" and rng.random() < 0.7:
        state["lanes"][_lane(state, rng)] = rng.choice(odd)
    elif field == "identity" and rng.random() < 0.7:
        state["identity"][rng.choice(sorted(state["identity"]))] = rng.choice(odd)
    else:
        state[field] = rng.choice(odd)


def no_state(state: dict[str, Any], rng: random.Random, folder: Path) -> bytes:
    """A damaged file, or a pickle that runs a command when it is loaded by plain pickle."""
    if rng.random() < 0.3:
        buffer = io.BytesIO()
        state["identity" if rng.random() < 0.5 else "epoch"] = _Bomb(folder / "executed")
        torch.save(state, buffer)
        return buffer.getvalue()
    # The state's own stream inside the archive; damage of the zip around it is torch's to see.
    blob = bytearray(pack(state))
    start = blob.find(b"identity") - 60
    for _ in range(rng.randint(1, 8)):
        blob[start + rng.randrange(600)] = rng.randrange(256)
    return bytes(blob)


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (str(self.path), "w")


ATTACKS = (flipped_bits, odd_fields, forged_numbers, forged_numbers, other_lanes, other_values, no_state)
