"""Speed and memory from data that is tokenized already to batches of tensors, beside other packers.

Run ``python -m benchmarks.inputs``; README.md in this folder explains the tables.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing as mp
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks import lengths as corpora
from benchmarks import peers, report

MAX_SEQ_LEN = 4096
BATCH = 4  # packs
OURS = "streampack"
HEADER = "packer | Mtok/s | streampack is faster | rounds | peak memory, MB"
# An input is measured so long in a round at least.
LEAST_SECONDS = 0.5


class Input(NamedTuple):
    """One kind of data: what streampack takes, and functions that return what the others take."""

    ours: Callable[[], Any]  # a source, or what `IterablePackedDataset` makes one of
    rows: Callable[[], Any]  # a map-style dataset of lists
    arrays: Callable[[], Any]  # a map-style dataset of arrays
    arrow: Callable[[], Any]  # a ``Dataset``


def inputs(samples: peers.Samples, folder: Path) -> dict[str, Input]:
    """Write the samples in every form."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from datasets import Dataset, disable_progress_bars, load_from_disk

    from streampack import ParquetSource

    def from_parquet(path: Path) -> Any:
        return Dataset(pq.read_table(path, use_threads=False))

    found = {}
    offsets = np.cumsum([0, *(len(sample["tokens"]) for sample in samples)], dtype=np.int32)
    for dtype in (np.int32, np.int64):
        columns = {
            name: pa.ListArray.from_arrays(
                offsets, np.concatenate([sample[name] for sample in samples]).astype(dtype)
            )
            for name in ("tokens", "labels")
        }
        path = folder / f"{dtype.__name__}.parquet"
        pq.write_table(pa.table(columns), path, row_group_size=5000)
        read = partial(from_parquet, path)
        found[f"{dtype.__name__} Parquet"] = Input(
            partial(ParquetSource, path), read, lambda read=read: read().with_format("numpy"), read
        )
    disable_progress_bars()
    from_parquet(path).save_to_disk(folder / "dataset")
    stored = load_from_disk(folder / "dataset")
    found["int64 datasets"] = Input(
        lambda: stored, lambda: stored, lambda: stored.with_format("numpy"), lambda: stored
    )
    lists = corpora.as_lists(samples)
    found["Python lists"] = Input(
        lambda: lists,
        lambda: lists,
        lambda: [{name: np.array(ids) for name, ids in row.items()} for row in lists],
        lambda: Dataset.from_list(lists),
    )
    return found


def packed(source: Any) -> Iterator[dict[str, Any]]:
    """Yield streampack's batches."""
    from streampack import IterablePackedDataset, PackedDataLoader

    data = IterablePackedDataset(source, max_seq_len=MAX_SEQ_LEN, num_lanes=1, untrained="keep")
    return ({"tokens": batch.tokens} for batch in PackedDataLoader(data, batch_size=BATCH))


def stacked(packs: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Yield batches of packs of equal length: tokens, labels and positions."""
    rest = iter(packs)
    while group := list(islice(rest, BATCH)):
        positions = "input_pos" if "input_pos" in group[0] else "tokens_positions"
        names = ("tokens", "labels", positions)
        yield {name: torch.stack([torch.as_tensor(pack[name]) for pack in group]) for name in names}


def collated(dataset: Any) -> Iterator[dict[str, Any]]:
    """Yield batches of TRL's packs by its own collator, as its trainer does: all packs of a batch end to end."""
    from torch.utils.data import DataLoader
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    collator = DataCollatorForLanguageModeling(pad_token_id=corpora.PADDING, padding_free=True)
    loader = DataLoader(dataset, batch_size=BATCH, collate_fn=collator)
    return ({"tokens": batch["input_ids"]} for batch in loader)


def with_trl(arrow: Callable[[], Any], *, batch: int = 1000) -> Any:
    """Return TRL's packs of a ``Dataset`` with ``tokens``."""
    return peers.trl_packs(arrow().rename_column("tokens", "input_ids"), max_seq_len=MAX_SEQ_LEN, batch=batch)


def flattened(arrow: Callable[[], Any]) -> Iterator[dict[str, Any]]:
    """Yield transformers' batches: the next samples end to end, with the tokens of ours on average."""
    from torch.utils.data import DataLoader
    from transformers import DataCollatorWithFlattening

    dataset = arrow().rename_column("tokens", "input_ids")
    tokens = sum(len(chunk.flatten()) for chunk in dataset.data.column("input_ids").chunks)
    samples = round(BATCH * MAX_SEQ_LEN * len(dataset) / tokens)
    loader = DataLoader(dataset, batch_size=max(1, samples), collate_fn=DataCollatorWithFlattening())
    return ({"tokens": batch["input_ids"]} for batch in loader)


def contenders(given: Input) -> dict[str, Callable[[], peers.Run]]:
    """Return a run of each packer that is installed, from an input to batches."""

    def items(packs: Any) -> Iterator[Any]:
        return (packs[i] for i in range(len(packs)))

    # The modules are imported before runs are forked, so that this takes none of their time and memory.
    batches: dict[str, tuple[str, Callable[[], Iterable[dict[str, Any]]]]] = {
        OURS: ("streampack", lambda: packed(given.ours())),
        "torchtune PackedDataset": (
            "torchtune.datasets",
            lambda: stacked(items(peers.torchtune_packs(given.rows(), max_seq_len=MAX_SEQ_LEN))),
        ),
        "TRL bfd, its collator": ("trl.trainer.sft_trainer", lambda: collated(with_trl(given.arrow))),
        "Grain best-fit, 64 bins": (
            "grain.python",
            lambda: stacked(peers.grain_packs(given.arrays(), max_seq_len=MAX_SEQ_LEN)),
        ),
        "transformers, flattening": ("transformers.data.data_collator", lambda: flattened(given.arrow)),
    }
    found: dict[str, Callable[[], peers.Run]] = {}
    for name, (module, make) in batches.items():
        with suppress(ModuleNotFoundError):
            import_module(module)
            found[name] = partial(peers.stream, make)
            if "TRL" in name:
                found["TRL bfd, Arrow out"] = lambda: peers.arrow_run(lambda: with_trl(given.arrow))
    return found


def in_own_process(run: Callable[[], peers.Run], *, least: float) -> peers.Run:
    """Run a packer in a forked process: once for its memory, then for its time, for ``least`` seconds."""
    context = mp.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(run, least, sender))
    process.start()
    sender.close()
    try:
        measured: peers.Run = receiver.recv()
    except EOFError:
        raise RuntimeError("a packer failed; its error is printed above") from None
    finally:
        process.join()
    return measured


def _measure(run: Callable[[], peers.Run], least: float, sender: Any) -> None:
    before = report.resident_memory("VmRSS") or 0
    run()
    peak = (report.resident_memory("VmHWM") or 0) - before
    sender.send(replace(peers.steady(run, least=least), peak=peak))


def draw(name: str, rounds: dict[str, list[peers.Run]], *, tokens: int, checksum: int) -> str:
    """Format the table of one input."""
    rows = []
    for packer, runs in rounds.items():
        ratios = report.quotients((run.seconds for run in runs), (run.seconds for run in rounds[OURS]))
        speed = tokens / statistics.median(run.seconds for run in runs) / 1e6
        peak = statistics.median(run.peak for run in runs) / 1e6
        rows.append([packer, f"{speed:.1f}", *report.median_and_range(ratios), f"{peak:,.0f}"])
    note = peers.lost_or_added(rounds, tokens=tokens, checksum=checksum)
    return "\n\n".join([f"## {name}", report.table(HEADER, rows), note])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the tables."""
    options = report.parser(__doc__, smoke="200 samples, one round").parse_args(arguments)
    count, repeats, least = (200, 1, 0.0) if options.smoke else (20_000, 5, LEAST_SECONDS)
    # torchao logs a line about CUDA extensions when torchtune imports it.
    logging.getLogger("torchao").setLevel(logging.ERROR)
    samples = corpora.samples(corpora.lengths("flan", count=count))
    tokens = sum(len(sample["tokens"]) for sample in samples)
    checksum = sum(int(sample["tokens"].sum()) for sample in samples)
    torch.set_num_threads(1)
    sections = []
    with tempfile.TemporaryDirectory() as folder:
        found = {name: contenders(given) for name, given in inputs(samples, Path(folder)).items()}
        step = report.progress(repeats * sum(map(len, found.values())))
        for name, runs in found.items():
            rounds: dict[str, list[peers.Run]] = {packer: [] for packer in runs}
            for _ in range(repeats):
                for packer, run in runs.items():
                    step(f"{name}: {packer}")
                    gc.collect()
                    rounds[packer].append(in_own_process(run, least=least))
            sections.append(draw(name, rounds, tokens=tokens, checksum=checksum))
    report.publish(
        options,
        "inputs",
        "Tokenized data to batches",
        f"{count:,} samples with lengths like FLAN's, {tokens:,} tokens, packs of {MAX_SEQ_LEN:,}, batches of {BATCH}, "
        f"one process; medians of {repeats} interleaved rounds. Explained in ../README.md.",
        *sections,
        packages=["numpy", "torchtune", "trl", "datasets", "pyarrow", "grain", "transformers"],
    )


if __name__ == "__main__":
    main()
