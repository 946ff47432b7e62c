"""Other packers on the same samples, and the floor: copying alone.

Every function takes samples and returns a function that runs the packer once, so that imports and the conversion to
the input that suits this packer best are not timed. A packer that is not installed raises ``ModuleNotFoundError``
before anything is measured.
"""

from __future__ import annotations

import contextlib
import io
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.lengths import PADDING

Samples = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Run:
    """Result of one run of a packer."""

    packs: int
    tokens: int  # of samples, counted in the packs
    checksum: int  # the sum of all token ids in the packs
    seconds: float
    peak: int = 0  # bytes of memory beyond those before, where they were measured


def stream(make: Callable[[], Iterable[dict[str, Any]]]) -> Run:
    """Take every pack that ``make()`` yields and drop it, as training does; counting is not timed."""
    packs = tokens = checksum = 0
    start = time.perf_counter()
    iterator = iter(make())
    seconds = time.perf_counter() - start
    while True:
        start = time.perf_counter()
        pack = next(iterator, None)
        seconds += time.perf_counter() - start
        if pack is None:
            return Run(packs, tokens, checksum, seconds)
        values = np.asarray(pack["tokens"])
        packs += 1
        tokens += int(np.count_nonzero(values != PADDING))
        checksum += int(values.sum())


def steady(run: Callable[[], Run], *, least: float) -> Run:
    """Run until ``least`` seconds are measured, and return the run of median time."""
    done = [run()]
    while sum(each.seconds for each in done) < least:
        done.append(run())
    return sorted(done, key=lambda each: each.seconds)[len(done) // 2]


def lost_or_added(done: Mapping[str, Sequence[Any]], *, tokens: int, checksum: int) -> str:
    """Say which packers' runs did not have all tokens that went in, with their sum of ids."""
    notes = [
        f"**{packer} changed the tokens**: {tokens:,} in, {runs[0].tokens:,} out."
        for packer, runs in done.items()
        if any((run.tokens, run.checksum) != (tokens, checksum) for run in runs)
    ]
    return "\n".join(notes or ["In every row the packs held all tokens, with the same sum of ids."])


def torchtune(samples: Samples, *, max_seq_len: int) -> Callable[[], Run]:
    """Run ``torchtune.datasets.PackedDataset``, which packs everything before the first step and holds it in memory.

    It needs Python lists: with arrays its ``list += tokens`` makes a scalar object of every token.
    """
    import torchtune.datasets  # noqa: F401 - not to be timed

    return lambda: stream(lambda: torchtune_packs(samples, max_seq_len=max_seq_len).packs)


def torchtune_packs(rows: Any, *, max_seq_len: int) -> Any:
    """Return torchtune's ``PackedDataset`` of a map-style dataset, without its progress bar."""
    from torchtune.datasets import PackedDataset

    with contextlib.redirect_stderr(io.StringIO()):
        return PackedDataset(rows, max_seq_len=max_seq_len, padding_idx=PADDING)


def trl(samples: Samples, *, max_seq_len: int, batch: int | None) -> Callable[[], Run]:
    """Run TRL's ``pack_dataset(strategy="bfd")`` in batches of ``batch`` samples; ``None``: all at once.

    Arrow in, Arrow out, in memory: padding and tensors are not timed. It truncates samples longer than
    ``max_seq_len`` silently, which is one reason to count the tokens of the output.
    """
    import trl  # noqa: F401 - not to be timed

    dataset = trl_rows(samples)
    return lambda: arrow_run(lambda: trl_packs(dataset, max_seq_len=max_seq_len, batch=batch))


def trl_rows(samples: Samples) -> Any:
    """Return samples as a ``Dataset`` of ids and labels, in memory."""
    import pyarrow as pa
    from datasets import Dataset

    offsets = np.cumsum([0, *(len(sample["tokens"]) for sample in samples)], dtype=np.int32)

    def column(key: str) -> pa.ListArray:
        return pa.ListArray.from_arrays(offsets, np.concatenate([sample[key] for sample in samples]))

    return Dataset(pa.table({"input_ids": column("tokens"), "labels": column("labels")}))


def trl_packs(dataset: Any, *, max_seq_len: int, batch: int | None) -> Any:
    """Return a ``Dataset`` of the packs that TRL's ``bfd`` makes of one with ``input_ids`` and ``labels``."""
    from datasets import disable_progress_bars, enable_progress_bars
    from trl import pack_dataset

    # Without the last setting, a second round would be read from the cache of the first.
    settings = {"batch_size": batch or len(dataset), "keep_in_memory": True, "load_from_cache_file": False}
    disable_progress_bars()
    packed = pack_dataset(dataset, max_seq_len, strategy="bfd", map_kwargs=settings)
    enable_progress_bars()
    return packed


def arrow_run(make: Callable[[], Any]) -> Run:
    """Make a ``Dataset`` of packs, and count what is in it."""
    cost, packed = report.timed(make)
    chunks = [chunk.flatten().to_numpy() for chunk in packed.data.column("input_ids").chunks]
    return Run(len(packed), sum(map(len, chunks)), sum(int(each.sum()) for each in chunks), cost.seconds)


def grain(samples: Samples, *, max_seq_len: int, bins: int = 64) -> Callable[[], Run]:
    """Run Grain's ``BestFitPackIterDataset`` with ``bins`` open bins, NumPy arrays out."""
    grain_packs(samples, max_seq_len=max_seq_len, bins=bins)  # imports
    return lambda: stream(lambda: grain_packs(samples, max_seq_len=max_seq_len, bins=bins))


def grain_packs(samples: Any, *, max_seq_len: int, bins: int = 64) -> Iterator[dict[str, Any]]:
    """Return an iterator over the packs that Grain makes of a map-style dataset of arrays."""
    absl = logging.getLogger("absl")  # grain warns there that jax is missing, which packing does not need
    level = absl.level
    absl.setLevel(logging.ERROR)
    import grain.python as pygrain

    absl.setLevel(level)
    # No threads, as Grain's documentation advises for data in memory.
    options = pygrain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    rows = pygrain.MapDataset.source(samples).to_iter_dataset(read_options=options)
    return iter(
        pygrain.experimental.BestFitPackIterDataset(
            rows,
            length_struct=dict.fromkeys(("tokens", "labels"), max_seq_len),
            num_packing_bins=bins,
            padding_struct={"tokens": PADDING, "labels": -100},
        )
    )


def copy_floor(samples: Samples, *, max_seq_len: int, keep: bool) -> Callable[[], Run]:
    """Copy three int64 arrays pack by pack, the least that any packer of tensors does.

    ``keep=True`` holds all packs, so that every copy goes to fresh memory of the system (page faults included), as
    an offline packer's does; ``keep=False`` drops each, so that memory is used again.
    """
    tokens = np.concatenate([sample["tokens"] for sample in samples])
    labels = np.concatenate([sample["labels"] for sample in samples])
    positions = np.arange(len(tokens), dtype=np.int64)

    def packs() -> Iterator[dict[str, Any]]:
        kept = []
        for start in range(0, len(tokens), max_seq_len):
            part = slice(start, start + max_seq_len)
            pack = {
                "tokens": tokens[part].copy(),
                "labels": labels[part].copy(),
                "input_pos": positions[part].copy(),
            }
            if keep:
                kept.append(pack)
            yield pack

    def run() -> Run:
        if keep:
            report.give_memory_back()
        return stream(packs)

    return run
