"""The commands `inspect`, `unpack` and `trace`; `streampack.cli` parses their arguments."""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streampack.inspection.packs import view
from streampack.inspection.page import report_page
from streampack.inspection.report import Report, RunShape
from streampack.inspection.survey import inspect_dataset
from streampack.inspection.terminal import print_report
from streampack.instantiate import build
from streampack.packing.encoders import HFTokenizer, encoder_for, padding_id
from streampack.sources.as_source import as_source
from streampack.sources.bad_records import quarantine_for
from streampack.sources.reading import Reading
from streampack.storage.folders import write_text
from streampack.streaming.dataset import IterablePackedDataset
from streampack.training.world import World

if TYPE_CHECKING:
    from streampack.training.config import RunConfig
    from streampack.training.row_losses import RowLoss

DATA_KEYS = ("tokenizer", "dataset", "dataset_val", "data", "validation")
"""Keys of a config that these commands build. Others may need torchtune, and are not built."""
RUN_KEYS = ("output_dir", *DATA_KEYS)
SNIPPET = 160
"""Characters of a row's text that `trace` shows."""


def training_data(config: RunConfig) -> IterablePackedDataset:
    """Build the training dataset of a config, for reading only: it writes nothing and lists no bad records.

    Raises:
        ValueError: for a data or validation section that does not fit.
    """
    from streampack.training.data import build_datasets

    vocab_size = config.model.get("vocab_size")
    data = config.data
    if data is not None:
        kept = quarantine_for(data.get("skip_bad"))
        data = {**data, "skip_bad": kept and replace(kept, folder=None)}
    with tempfile.TemporaryDirectory() as scratch:
        return build_datasets(
            replace(config, output_dir=scratch, data=data),
            tokenizer=build(config.tokenizer),
            vocab_size=vocab_size if isinstance(vocab_size, int) else None,
            world=World(),
        ).train


def inspect_config(config: Any, *, title: str, ranks: int, rows: int | None, packs: int) -> Report:
    """Inspect the data of a run's config. See `inspect_dataset` for the other arguments."""
    from streampack.training.checks import read_config

    cfg = read_config(config, built=DATA_KEYS)
    shape = RunShape(
        ranks=ranks,
        workers=cfg.num_workers,
        batch_size=cfg.batch_size,
        accumulation=cfg.gradient_accumulation_steps,
        max_steps=cfg.max_steps,
    )
    report = inspect_dataset(
        training_data(cfg), title=title, shape=shape, rows=rows, packs=packs, progress=_count
    )
    if cfg.dataset is None:
        return report
    packed = "dataset:\n  packed: True  # by exact_fit, to tokenizer.max_seq_len"
    other = "# dataset has no key for this; data, with a source and an encoder, has one"
    told = [replace(each, yaml=packed if "strategy:" in each.yaml else other) for each in report.advice]
    return replace(report, advice=told)


def inspect_files(
    paths: Sequence[str],
    *,
    tokenizer: Mapping[str, Any],
    shape: Mapping[str, Any],
    packing: Mapping[str, Any],
    ranks: int,
    rows: int | None,
    packs: int,
) -> Report:
    """Inspect files of rows.

    ``tokenizer``, ``shape`` and ``packing`` are arguments of `HFTokenizer`, `encoder_for` and `IterablePackedDataset`.
    """
    source = as_source(list(paths) if len(paths) > 1 else paths[0])
    found = source.examples()
    if 2 * sum(row.data is not None for row in found) < len(found):
        next(source.read(Reading()))  # most cannot be read: the error of the first says why
    built = None if tokenizer["path"] is None else HFTokenizer(**tokenizer)
    dataset = IterablePackedDataset(
        source,
        encoder=encoder_for(source, built, strict=False, **shape),
        shuffle=True,
        padding_idx=0 if built is None else padding_id(built),
        **packing,
    )
    title = " ".join(paths[:3]) + (" ..." if len(paths) > 3 else "")
    return inspect_dataset(
        dataset, title=title, shape=RunShape(ranks=ranks), rows=rows, packs=packs, progress=_count
    )


def _count(rows: int) -> None:
    """Print on a terminal how many rows were read."""
    if not rows % 256 and sys.stderr.isatty():
        sys.stderr.write(f"\r{rows:,} rows read\x1b[K\r")


def show(report: Report, *, html: Path | None, json_file: str | None) -> None:
    """Print a report, and write its page and its JSON; ``json_file="-"`` prints JSON only."""
    text = f"{json.dumps(report.as_dict(), ensure_ascii=False, indent=1)}\n"
    if html:
        write_text(html, report_page(report))
    if json_file == "-":
        sys.stdout.write(text)
        return
    if json_file:
        write_text(Path(json_file), text)
    print_report(report)
    if html:
        sys.stdout.write(f"\nthe page: {html}\n")


def print_packs(config: Any, *, step: int | None, packs: int | None) -> None:
    """Print the first packs of a config, 2 by default, or up to ``packs`` of a step of its run."""
    from rich.console import Console
    from rich.text import Text

    from streampack.training.checks import read_config
    from streampack.training.row_losses import packs_of_step
    from streampack.training.run_folder import checkpoints_folder, saved_settings

    cfg = read_config(config, built=DATA_KEYS if step is None else RUN_KEYS)
    if step is not None:
        cfg.seed = saved_settings(cfg).get("seed", cfg.seed) if cfg.seed is None else cfg.seed
    dataset = training_data(cfg)
    if step is None:
        found = list(islice(dataset.stream(), packs or 2))
    else:
        found = packs_of_step(dataset, checkpoints_folder(cfg), step)
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    for number, pack in enumerate(found[:packs], start=1):
        of = "" if step is None else f" of {len(found)} in step {step}"
        shown = view(pack, dataset.lane_config, whole=True)
        console.print(Text(f"\npack {number}{of}: {len(shown.sequences)} sequences", style="bold cyan"))
        for at, each in enumerate(shown.sequences, start=1):
            source = f"{each.source}, " if each.source else ""
            part = f", from token {each.of_sample[0]:,} on" if each.of_sample[0] else ""
            padding = f", {each.padding:,} of padding" if each.padding else ""
            about = f"{source}{each.place}{part}; {each.length:,} tokens, {each.trained:,} trained{padding}"
            console.print(Text(f"── sequence {at}: {about}", style="cyan"))
            texts = ((run.text or "", "bold" if run.trained else "dim") for run in each.runs)
            console.print(Text.assemble(*texts))
        if shown.padding:
            console.print(Text(f"── padding: {shown.padding:,} tokens", style="dim italic"))
    console.print(Text("\nbold is trained, dim is masked, <id> is a special token", style="dim"))


def worst_steps(config: Any, *, top: int) -> list[str]:
    """Return lines about the steps with the highest loss. Losses that are not finite come first."""
    from streampack.training.checks import read_config
    from streampack.training.progress import METRICS_FILE, read_metrics

    path = Path(read_config(config, built=["output_dir"]).output_dir, METRICS_FILE)
    losses = {step: found["loss"] for step, found in read_metrics(path).items() if "loss" in found}
    if not losses:
        raise ValueError(f"{path} has no steps: no run has logged any in this output_dir")
    worst = sorted(losses, key=lambda step: -losses[step] if math.isfinite(losses[step]) else -math.inf)[:top]
    lines = [f"{'step':>8} {'loss':>8}   of {len(losses):,} steps; --step N shows the rows of one"]
    return lines + [f"{step:>8} {losses[step]:>8.3f}" for step in worst]


def rows_of_step(config: Any, step: int, *, top: int) -> list[str]:
    """Return lines about the rows of a step. Rows that add most to its loss for their length come first."""
    from streampack.training.checks import read_config
    from streampack.training.row_losses import ROWS_FOLDER, read_step

    cfg = read_config(config, built=RUN_KEYS)
    rows = read_step(Path(cfg.output_dir, ROWS_FOLDER), step)
    dataset = training_data(cfg)
    weight = sum(row.weight for row in rows)
    loss = sum(row.loss for row in rows) / weight if weight else 0.0
    lines = [
        f"step {step}: loss {loss:.3f}, {len(rows):,} sequences",
        f"{'excess':>8} {'loss':>7} {'tokens':>7}  row",
    ]
    for row in rows[:top]:
        tokens = row.fragment.stop - row.fragment.start
        lines.append(f"{row.excess:>+8.2%} {row.mean:>7.3f} {tokens:>7,}  {_described(dataset, row)}")
    return lines


def _described(dataset: IterablePackedDataset, row: RowLoss) -> str:
    """Return a row's place and the beginning of its text."""
    row_id = row.fragment.row_id
    try:
        place = dataset.lane_config.source.locate(row_id)
    except LookupError:
        return f"row {row_id[-1]} of file {row_id[-2]}, which no longer exists: files were removed since"
    try:
        found = dataset.trace(row.fragment)
    except (ValueError, OSError, LookupError) as error:
        return f"{place}: can no longer be read: {error}"
    text = " ".join(str(found.get("text", found["tokens"])).split())
    if len(text) > SNIPPET:
        text = f"{text[: SNIPPET - 3]}..."
    changed = sum(map(int, found["tokens"])) != row.token_sum
    # A row is found by the number of its file, which changes if files are added or removed.
    note = " (not what was trained on: the row or the list of files changed since)" if changed else ""
    return f"{place}{note}: {text}"
