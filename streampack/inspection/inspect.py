"""Inspections of a config, or of files whose encoder follows from their columns, and where their reports go."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from streampack.inspection.costs import model_work
from streampack.inspection.page import report_page
from streampack.inspection.report import Report
from streampack.inspection.run_data import training_data
from streampack.inspection.shape import RunShape
from streampack.inspection.survey import inspect_dataset
from streampack.inspection.terminal import print_report
from streampack.packing.encoders import AnswersEncoder, ChatEncoder, HFTokenizer, TextEncoder, padding_id
from streampack.sources.as_source import as_source
from streampack.streaming.dataset import IterablePackedDataset


def inspect_config(config: Any, *, title: str, ranks: Sequence[int], rows: int | None, packs: int) -> Report:
    """Inspect the data of a run's config; the other arguments are those of `inspect_dataset`."""
    from streampack.training.config import read_config

    cfg = read_config(config)
    model = None
    try:
        model = model_work(cfg.model)
    except Exception as error:  # models of users may need what is not here; their figures are left out
        sys.stderr.write(f"note: operations of the model are left out: {error}\n")
    shape = RunShape(
        ranks=ranks,
        workers=cfg.num_workers,
        batch_size=cfg.batch_size,
        packs_per_step=cfg.packs_per_step,
        max_steps=cfg.max_steps,
        model=model,
    )
    return _inspect(training_data(cfg), title=title, shape=shape, rows=rows, packs=packs)


def inspect_files(
    paths: Sequence[str],
    *,
    tokenizer: str | None,
    max_seq_len: int,
    ranks: Sequence[int],
    rows: int | None,
    packs: int,
) -> Report:
    """Inspect files of rows.

    Raises:
        ValueError: if no encoder fits their columns, or it needs a tokenizer and there is none.
    """
    source = as_source(list(paths) if len(paths) > 1 else paths[0])
    built = None if tokenizer is None else HFTokenizer(tokenizer)
    examples = [row.data for row in source.examples() if row.data is not None]
    dataset = IterablePackedDataset(
        source,
        encoder=_encoder(examples[0] if examples else {}, built),
        max_seq_len=max_seq_len,
        shuffle=True,
        padding_idx=0 if built is None else padding_id(built),
    )
    title = " ".join(paths[:3]) + (" ..." if len(paths) > 3 else "")
    return _inspect(dataset, title=title, shape=RunShape(ranks=ranks), rows=rows, packs=packs)


def show(report: Report, *, html: Path | None, json_file: str | None) -> None:
    """Print a report and write its page and its JSON, as ``--html`` and ``--json`` say; ``-`` prints JSON only."""
    text = f"{json.dumps(report.as_dict(), ensure_ascii=False, indent=1)}\n"
    if html:
        html.write_text(report_page(report), encoding="utf-8")
    if json_file == "-":
        sys.stdout.write(text)
        return
    if json_file:
        Path(json_file).write_text(text, encoding="utf-8")
    print_report(report)
    if html:
        sys.stdout.write(f"\nthe page: {html}\n")


def _inspect(
    dataset: IterablePackedDataset, *, title: str, shape: RunShape, rows: int | None, packs: int
) -> Report:
    with _progress(rows) as (progress, finished):
        return inspect_dataset(
            dataset, title=title, shape=shape, rows=rows, packs=packs, progress=progress, finished=finished
        )


def _encoder(row: Any, tokenizer: Any) -> Any:
    """Return the encoder that fits the columns of a row."""
    columns = set(row)
    made: Callable[[], Any]
    if columns & {"input_ids", "tokens"}:
        return None
    # Pairs may have their conversation in another column, too.
    if {"chosen", "rejected"} <= columns or {"prompt", "completions"} <= columns:
        made = lambda: AnswersEncoder(tokenizer)  # noqa: E731
    elif columns & {"messages", "conversations"} or {"prompt", "completion"} <= columns:
        made = lambda: ChatEncoder(tokenizer)  # noqa: E731
    elif columns & {"text", "content"}:
        made = lambda: TextEncoder(tokenizer, column="text" if "text" in columns else "content")  # noqa: E731
    else:
        raise ValueError(
            f"the rows have the columns {', '.join(sorted(map(str, row))) or 'none that can be read'}, and none of "
            "messages, prompt with completion, chosen with rejected, text or input_ids; write a config with "
            "data.encoder: streampack cp quickstart my.yaml"
        )
    if tokenizer is None:
        raise ValueError("the rows are text: name the tokenizer of the model, --tokenizer PATH")
    return made()


@contextmanager
def _progress(total: int | None) -> Iterator[tuple[Callable[[int], None], Callable[[], None]]]:
    """Show on a terminal how many rows were read; elsewhere nothing."""
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield (lambda rows: None), (lambda: None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading rows", total=total)

        def progress(rows: int) -> None:
            if not rows % 64:
                bar.update(task, completed=rows)

        yield progress, lambda: bar.update(task, description="planning packs", total=None)
