"""Number of packs and speed of each strategy, beside other packers on the same samples.

Run ``python -m benchmarks.density``; README.md in this folder explains the table.
"""

from __future__ import annotations

import gc
import logging
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypedDict, TypeVar

from benchmarks import lengths as corpora
from benchmarks import peers, report

STRATEGIES = ("next_fit", "first_fit", "best_fit", "exact_fit", "split_across_pack")
FRESH_FLOOR = "copy floor, packs kept"
TORCHTUNE = "torchtune PackedDataset"
HEADER = (
    "packer",
    "packs",
    "above bound",
    "padding",
    "Mtok/s",
    "of floor",
    "x torchtune",
    "plan Mtok/s",
    "waits mean",
    "waits max",
    "held mean",
)
# A faster row runs several times: one run of the floor takes 20 ms, which is mostly noise.
LEAST_SECONDS = 0.5

Runner = Callable[[], peers.Run]
T = TypeVar("T")


class Settings(TypedDict):
    """Settings of all of streampack's rows."""

    max_seq_len: int
    buffer_size: int


@dataclass
class Measured:
    """The lengths of one distribution, and the results of all rounds."""

    lengths: list[int]
    checksum: int
    settings: Settings
    runs: dict[str, list[peers.Run]] = field(default_factory=dict)
    plans: dict[str, list[float]] = field(default_factory=dict)  # seconds
    missing: dict[str, str] = field(default_factory=dict)  # why a row was not measured


def filling(strategy: str) -> dict[str, Any]:
    """Return the settings of one of our rows, which is a strategy or ``split_across_pack``."""
    return {"split_across_pack": True} if strategy == "split_across_pack" else {"strategy": strategy}


def our_stream(samples: peers.Samples, *, max_seq_len: int, strategy: str, buffer_size: int) -> Runner:
    """Return a run of our packer from samples in memory to tensors: one lane, no workers, no shuffling."""
    from streampack import IterablePackedDataset

    return lambda: peers.stream(
        lambda: IterablePackedDataset(
            samples,
            max_seq_len=max_seq_len,
            buffer_size=buffer_size,
            num_lanes=1,
            **filling(strategy),
        )
    )


def our_plan(
    lengths: Sequence[int], *, max_seq_len: int, strategy: str, buffer_size: int
) -> Callable[[], float]:
    """Return a function that measures the seconds to plan all packs from lengths alone."""
    from streampack import plan_packs

    def run() -> float:
        start = time.perf_counter()
        deque(plan_packs(lengths, max_seq_len, buffer_size=buffer_size, **filling(strategy)), maxlen=0)
        return time.perf_counter() - start

    return run


def waiting(
    lengths: Sequence[int], *, max_seq_len: int, strategy: str, buffer_size: int
) -> tuple[float, int, float]:
    """Return the packs completed while a sample waits (mean, max), and the samples held after a pack (mean)."""
    from streampack import plan_packs

    packs = 0
    read_at: list[int] = []  # packs completed when each sample was read
    waits: list[int] = []
    held: list[int] = []

    def read() -> Iterator[int]:
        for length in lengths:
            read_at.append(packs)
            yield length

    for pack in plan_packs(read(), max_seq_len, buffer_size=buffer_size, **filling(strategy)):
        waits.extend(packs - read_at[index] for index, _, stop in pack if stop == lengths[index])
        packs += 1
        held.append(len(read_at) - len(waits))
    return statistics.fmean(waits), max(waits), statistics.fmean(held)


def contenders(
    samples: peers.Samples, *, max_seq_len: int, buffer_size: int
) -> Iterator[tuple[str, Callable[[], Runner]]]:
    """Yield each row's name, and a function that prepares its run or raises ``ModuleNotFoundError``."""
    ours = partial(our_stream, max_seq_len=max_seq_len, buffer_size=buffer_size)
    lists = corpora.as_lists(samples)
    for strategy in STRATEGIES:
        yield strategy, partial(ours, samples, strategy=strategy)
    yield "exact_fit, from Python lists", partial(ours, lists, strategy="exact_fit")
    yield TORCHTUNE, partial(peers.torchtune, lists, max_seq_len=max_seq_len)
    yield "TRL bfd, batches of 1,000", partial(peers.trl, samples, max_seq_len=max_seq_len, batch=1000)
    yield "TRL bfd, whole set", partial(peers.trl, samples, max_seq_len=max_seq_len, batch=None)
    yield "Grain best-fit, 64 bins", partial(peers.grain, samples, max_seq_len=max_seq_len)
    yield FRESH_FLOOR, partial(peers.copy_floor, samples, max_seq_len=max_seq_len, keep=True)
    yield "copy floor, packs dropped", partial(peers.copy_floor, samples, max_seq_len=max_seq_len, keep=False)


def prepare(samples: peers.Samples, settings: Settings) -> tuple[dict[str, Runner], dict[str, str]]:
    """Return a function to run each row, and the reasons of the rows whose package is not installed."""
    runners: dict[str, Runner] = {}
    missing: dict[str, str] = {}
    for row, make in contenders(samples, **settings):
        try:
            runners[row] = make()
        except ModuleNotFoundError as error:
            missing[row] = f"not installed ({error.name})"
    return runners, missing


def warm_up(settings: Settings) -> None:
    """Run every packer once, so that its imports and first-call setup are not timed."""
    samples = corpora.samples(corpora.lengths("flan", count=20, longest=settings["max_seq_len"]))
    for run in prepare(samples, settings)[0].values():
        run()


def steady(run: Callable[[], T], *, seconds: Callable[[T], float], least: float) -> T:
    """Run until ``least`` seconds are measured, and return the run of median time."""
    done = [run()]
    while sum(map(seconds, done)) < least:
        done.append(run())
    return sorted(done, key=seconds)[len(done) // 2]


def measure(
    name: str,
    settings: Settings,
    *,
    count: int,
    repeats: int,
    least: float,
    seed: int,
    step: Callable[[str], None],
) -> Measured:
    """Run every packer ``repeats`` times on the lengths called ``name``.

    Interleaved: a neighbour's load on the machine falls on all packers of a round, so ratios within it hold.
    """
    step(f"{name}: samples")
    values = corpora.lengths(
        name, count=count, seed=seed, longest=min(corpora.LONGEST, settings["max_seq_len"])
    )
    lengths = values.tolist()
    samples = corpora.samples(values, seed=seed)
    runners, missing = prepare(samples, settings)
    done = Measured(lengths, sum(int(s["tokens"].sum()) for s in samples), settings, missing=missing)
    for number in range(1, repeats + 1):
        step(f"{name}, round {number}: plans")
        for strategy in STRATEGIES:
            plan = our_plan(lengths, strategy=strategy, **settings)
            done.plans.setdefault(strategy, []).append(steady(plan, seconds=float, least=least))
        for row, run in runners.items():
            step(f"{name}, round {number}: {row}")
            gc.collect()
            done.runs.setdefault(row, []).append(steady(run, seconds=lambda done: done.seconds, least=least))
    return done


def draw(name: str, done: Measured) -> str:
    """Format the table of one distribution, with notes below it."""
    max_seq_len = done.settings["max_seq_len"]
    tokens = sum(done.lengths)
    bound = corpora.lower_bound(done.lengths, max_seq_len)
    seconds = {row: [run.seconds for run in runs] for row, runs in done.runs.items()}

    def padding(packs: int, real: int) -> str:
        return f"{1 - real / (packs * max_seq_len):.3%}"

    def rate(seconds: Sequence[float]) -> str:
        return f"{tokens / statistics.median(seconds) / 1e6:,.1f}"

    def ratio(row: str, to: str, form: str) -> str:
        if to not in seconds:
            return report.NONE
        return format(statistics.median(b / a for a, b in zip(seconds[row], seconds[to], strict=True)), form)

    rows = []
    notes = []
    for row, _ in contenders((), **done.settings):
        if row in done.missing:
            cells = [f"{row}: {done.missing[row]}"]
        else:
            run = done.runs[row][0]
            if any(
                (r.packs, r.tokens, r.checksum) != (run.packs, tokens, done.checksum) for r in done.runs[row]
            ):
                notes.append(f"**{row} changed the tokens**: {tokens:,} in, {run.tokens:,} out.")
            cells = [row, f"{run.packs:,}", f"{run.packs - bound:,}", padding(run.packs, run.tokens)]
            cells += [rate(seconds[row]), ratio(row, FRESH_FLOOR, ".1%"), ratio(row, TORCHTUNE, ".2f")]
        if row in done.plans:
            mean, most, held = waiting(done.lengths, strategy=row, **done.settings)
            cells += [rate(done.plans[row]), f"{mean:.1f}", f"{most:,}", f"{held:.1f}"]
        rows.append(cells + [report.NONE] * (len(HEADER) - len(cells)))
    rows.append(
        ["lower bound", f"{bound:,}", "0", padding(bound, tokens), *[report.NONE] * (len(HEADER) - 4)]
    )

    about = (
        f"{len(done.lengths):,} samples, {tokens:,} tokens: median {statistics.median(done.lengths):,.0f}, "
        f"mean {statistics.fmean(done.lengths):,.0f}, longest {max(done.lengths):,}."
    )
    if not notes:
        notes.append("In every row the packs held all tokens, with the same sum of ids.")
    spread = {row: max(times) / min(times) for row, times in seconds.items()}
    widest = max(spread, key=spread.__getitem__)
    notes.append(f"A row's slowest round took at most {spread[widest]:.2f} times its fastest ({widest}).")
    return "\n\n".join([f"## {name}", about, report.table(HEADER, rows), "\n".join(notes)])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the tables."""
    parser = report.parser(__doc__, smoke="300 samples, one round")
    add = parser.add_argument
    add("--samples", type=int, default=20_000, help="samples of each distribution (%(default)s)")
    add("--max-seq-len", type=int, default=4096, help="tokens in a pack (%(default)s)")
    add("--buffer-size", type=int, default=128, help="samples that our strategies may hold (%(default)s)")
    add("--repeats", type=int, default=3, help="rounds; the table shows their medians (%(default)s)")
    add("--seed", type=int, default=0, help="of the order of the samples (%(default)s)")
    add("--distributions", nargs="+", choices=corpora.DISTRIBUTIONS, default=list(corpora.DISTRIBUTIONS))
    options = parser.parse_args(arguments)
    count, repeats, least = options.samples, options.repeats, LEAST_SECONDS
    if options.smoke:
        count, repeats, least = 300, 1, 0.0
    for option, value in (
        ("--samples", count),
        ("--repeats", repeats),
        ("--max-seq-len", options.max_seq_len),
    ):
        if value < 1:
            parser.error(f"{option} is {value}; it must be at least 1")
    # torchao logs a line about CUDA extensions when torchtune imports it.
    logging.getLogger("torchao").setLevel(logging.ERROR)

    settings = Settings(max_seq_len=options.max_seq_len, buffer_size=options.buffer_size)
    names = list(dict.fromkeys(options.distributions))
    rows = sum(1 for _ in contenders((), **settings))
    step = report.progress(1 + len(names) * (1 + repeats * (1 + rows)))
    step("imports")
    warm_up(settings)
    sections = []
    for name in names:
        done = measure(
            name, settings, count=count, repeats=repeats, least=least, seed=options.seed, step=step
        )
        sections.append(draw(name, done))
    report.publish(
        "density",
        options,
        f"# Packing: {options.max_seq_len:,} tokens a pack, buffer of {options.buffer_size} samples",
        report.machine_line(
            "streampack", "torch", "numpy", "torchtune", "trl", "datasets", "pyarrow", "grain"
        ),
        f"Medians of {repeats} interleaved rounds, seed {options.seed}. Explained in ../README.md.",
        *sections,
    )


if __name__ == "__main__":
    main()
