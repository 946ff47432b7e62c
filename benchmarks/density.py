"""Number of packs and speed of each strategy, beside other packers on the same samples.

Run ``python -m benchmarks.density``; README.md in this folder explains the table.
"""

from __future__ import annotations

import gc
import logging
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks import lengths as corpora
from benchmarks import peers, report
from streampack import IterablePackedDataset, plan_packs

# The settings of streampack's rows.
OURS: dict[str, dict[str, Any]] = {
    **{name: {"strategy": name} for name in ("next_fit", "first_fit", "best_fit", "exact_fit")},
    "split_across_pack": {"split_across_pack": True},
}
FRESH_FLOOR = "copy floor, packs kept"
TORCHTUNE = "torchtune PackedDataset"
HEADER = (
    "packer | packs | above bound | padding | Mtok/s | of floor | x torchtune | plan Mtok/s | "
    "waits mean | waits max | held mean"
)
ORDER = f"packer | correlation | {' | '.join(f'decile {i}' for i in range(1, 11))}"
# A faster row runs several times: one run of the floor takes 20 ms, which is mostly noise.
LEAST_SECONDS = 0.5

Runner = Callable[[], peers.Run]


def our_stream(samples: peers.Samples, **settings: Any) -> Runner:
    """Return a run of our packer from samples in memory to tensors: one lane, no workers, no shuffling."""
    return lambda: peers.stream(lambda: IterablePackedDataset(samples, num_lanes=1, **settings))


def our_plan(lengths: Sequence[int], max_seq_len: int, **settings: Any) -> peers.Run:
    """Plan all packs from lengths alone, once."""
    start = time.perf_counter()
    deque(plan_packs(lengths, max_seq_len, **settings), maxlen=0)
    return peers.Run(0, 0, 0, time.perf_counter() - start)


def waiting(lengths: Sequence[int], max_seq_len: int, **settings: Any) -> tuple[float, int, float]:
    """Return the packs completed while a sample waits (mean, max), and the samples held after a pack (mean)."""
    packs = 0
    read_at: list[int] = []  # packs completed when each sample was read
    waits: list[int] = []
    held: list[int] = []

    def read() -> Iterator[int]:
        for length in lengths:
            read_at.append(packs)
            yield length

    for pack in plan_packs(read(), max_seq_len, **settings):
        waits.extend(packs - read_at[index] for index, _, stop in pack if stop == lengths[index])
        packs += 1
        held.append(len(read_at) - len(waits))
    return statistics.fmean(waits), max(waits), statistics.fmean(held)


def order(packs: Iterable[Any], lengths: Sequence[int], max_seq_len: int) -> list[str]:
    """Return how lengths of samples correlate with their packs, and mean delays by decile of length, in packs.

    Each sample is made of its own number, from 1. Its delay counts from the pack it would be in if samples were cut.
    """
    found = np.zeros(len(lengths))
    for number, pack in enumerate(packs):
        numbers = np.unique(np.asarray(pack.get("tokens", pack.get("input_ids"))))
        found[numbers[numbers > 0] - 1] = number
    delays = found - (np.cumsum(lengths) - lengths) / max_seq_len
    deciles = np.array_split(delays[np.argsort(lengths, kind="stable")], 10)
    return [f"{np.corrcoef(lengths, found)[0, 1]:.2f}", *(f"{decile.mean():.1f}" for decile in deciles)]


def order_section(options: Any, *, count: int) -> str:
    """Compare the order of training with that of arrival, for lengths where half fit with no other of that half."""
    max_seq_len = options.max_seq_len
    lengths = np.random.default_rng(options.seed).integers(2, max_seq_len + 1, count)
    rows = [
        {"tokens": np.full(length, i + 1), "labels": np.full(length, i + 1)}
        for i, length in enumerate(lengths)
    ]
    lists = corpora.as_lists(rows)

    def ours(**settings: Any) -> Iterable[Any]:
        return IterablePackedDataset(
            rows, max_seq_len=max_seq_len, buffer_size=options.buffer_size, **settings
        )

    packers: dict[str, Callable[[], Iterable[Any]]] = {
        **{name: partial(ours, num_lanes=1, **settings) for name, settings in OURS.items()},
        "exact_fit, 8 lanes": partial(ours, num_lanes=8),
        TORCHTUNE: lambda: peers.torchtune_packs(lists, max_seq_len=max_seq_len).packs,
        "TRL bfd, whole set": lambda: peers.trl_packs(
            peers.trl_rows(rows), max_seq_len=max_seq_len, batch=None
        ),
        "Grain best-fit, 64 bins": lambda: peers.grain_packs(rows, max_seq_len=max_seq_len, bins=64),
    }
    table = []
    for name, packs in packers.items():
        try:
            table.append([name, *order(packs(), lengths.tolist(), max_seq_len)])
        except ModuleNotFoundError as error:
            table.append([f"{name}: not installed ({error.name})"])
    return "\n\n".join(
        [
            f"## Order\n\n{count:,} samples of uniform lengths up to {max_seq_len:,}.",
            report.table(ORDER, table),
        ]
    )


def contenders(samples: peers.Samples, max_seq_len: int, buffer_size: int) -> dict[str, Callable[[], Runner]]:
    """Return for each row a function that prepares its run, or raises ``ModuleNotFoundError``."""
    ours = partial(partial, our_stream, max_seq_len=max_seq_len, buffer_size=buffer_size)
    lists = corpora.as_lists(samples)
    length = {"max_seq_len": max_seq_len}
    return {
        **{name: ours(samples, **settings) for name, settings in OURS.items()},
        "exact_fit, from Python lists": ours(lists, strategy="exact_fit"),
        TORCHTUNE: partial(peers.torchtune, lists, **length),
        "TRL bfd, batches of 1,000": partial(peers.trl, samples, **length, batch=1000),
        "TRL bfd, whole set": partial(peers.trl, samples, **length, batch=None),
        "Grain best-fit, 64 bins": partial(peers.grain, samples, **length),
        FRESH_FLOOR: partial(peers.copy_floor, samples, **length, keep=True),
        "copy floor, packs dropped": partial(peers.copy_floor, samples, **length, keep=False),
    }


def prepare(samples: peers.Samples, max_seq_len: int, buffer_size: int) -> dict[str, Runner | str]:
    """Return a function to run each row, or why it cannot run; run each once on few samples, to import and set up."""
    found: dict[str, Runner | str] = {}
    first = contenders(samples[:20], max_seq_len, buffer_size)
    for row, make in contenders(samples, max_seq_len, buffer_size).items():
        try:
            found[row] = make()
            first[row]()()
        except ModuleNotFoundError as error:
            found[row] = f"not installed ({error.name})"
    return found


def section(name: str, options: Any, *, count: int, least: float) -> str:
    """Run every packer ``options.repeats`` times on the lengths called ``name``; format the table and its notes.

    Interleaved: a neighbour's load on the machine falls on all packers of a round, so ratios within it hold.
    """
    max_seq_len, buffer_size = options.max_seq_len, options.buffer_size
    values = corpora.lengths(name, count=count, seed=options.seed, longest=min(corpora.LONGEST, max_seq_len))
    lengths, samples = values.tolist(), corpora.samples(values, seed=options.seed)
    tokens, checksum = sum(lengths), sum(int(sample["tokens"].sum()) for sample in samples)
    runners = prepare(samples, max_seq_len, buffer_size)
    done: dict[str, list[peers.Run]] = {row: [] for row, run in runners.items() if callable(run)}
    plans: dict[str, list[float]] = {row: [] for row in OURS}
    step = report.progress(options.repeats * len(done))
    for _ in range(options.repeats):
        for row, runs in done.items():
            step(f"{name}: {row}")
            gc.collect()
            runs.append(peers.steady(runners[row], least=least))
            if row in OURS:
                plan = partial(our_plan, lengths, max_seq_len, buffer_size=buffer_size, **OURS[row])
                plans[row].append(peers.steady(plan, least=least).seconds)

    bound = corpora.lower_bound(lengths, max_seq_len)
    seconds = {row: [run.seconds for run in runs] for row, runs in done.items()}

    def rate(times: Sequence[float]) -> str:
        return f"{tokens / statistics.median(times) / 1e6:,.1f}"

    def ratio(row: str, to: str, form: str) -> str:
        if to not in seconds:
            return report.NONE
        return format(statistics.median(report.quotients(seconds[to], seconds[row])), form)

    rows = []
    for row, run in runners.items():
        if isinstance(run, str):
            cells = [f"{row}: {run}"]
        else:
            packs, real = done[row][0].packs, done[row][0].tokens
            cells = [row, f"{packs:,}", f"{packs - bound:,}", f"{1 - real / (packs * max_seq_len):.3%}"]
            cells += [rate(seconds[row]), ratio(row, FRESH_FLOOR, ".1%"), ratio(row, TORCHTUNE, ".2f")]
        if row in OURS:
            mean, most, held = waiting(lengths, max_seq_len, buffer_size=buffer_size, **OURS[row])
            cells += [rate(plans[row]), f"{mean:.1f}", f"{most:,}", f"{held:.1f}"]
        rows.append(cells)
    rows.append(["lower bound", f"{bound:,}", "0", f"{1 - tokens / (bound * max_seq_len):.3%}"])
    spread = {row: max(times) / min(times) for row, times in seconds.items()}
    widest = max(spread, key=spread.__getitem__)
    return "\n\n".join(
        [
            f"## {name}",
            f"{len(lengths):,} samples, {tokens:,} tokens: median {statistics.median(lengths):,.0f}, "
            f"mean {statistics.fmean(lengths):,.0f}, longest {max(lengths):,}.",
            report.table(HEADER, rows),
            peers.lost_or_added(done, tokens=tokens, checksum=checksum)
            + f"\nA row's slowest round took at most {spread[widest]:.2f} times its fastest ({widest}).",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the tables."""
    parser = report.parser(__doc__, smoke="300 samples, one round")
    add = parser.add_argument
    add("--max-seq-len", type=int, default=4096, help="tokens in a pack (%(default)s)")
    add("--buffer-size", type=int, default=128, help="samples that our strategies may hold (%(default)s)")
    add("--repeats", type=int, default=3, help="rounds; the table shows their medians (%(default)s)")
    add("--seed", type=int, default=0, help="of the order of the samples (%(default)s)")
    add("--distributions", nargs="+", choices=corpora.DISTRIBUTIONS, default=list(corpora.DISTRIBUTIONS))
    options = parser.parse_args(arguments)
    if options.smoke:
        options.repeats = 1
    # torchao logs a line about CUDA extensions when torchtune imports it.
    logging.getLogger("torchao").setLevel(logging.ERROR)
    count, least = (300, 0.0) if options.smoke else (20_000, LEAST_SECONDS)
    report.publish(
        options,
        "density",
        f"Packing: {options.max_seq_len:,} tokens a pack, buffer of {options.buffer_size} samples",
        f"Medians of {options.repeats} interleaved rounds, seed {options.seed}. Explained in ../README.md.",
        *(section(name, options, count=count, least=least) for name in options.distributions),
        order_section(options, count=min(count, 2000)),
        packages=["numpy", "torchtune", "trl", "datasets", "pyarrow", "grain"],
    )


if __name__ == "__main__":
    main()
