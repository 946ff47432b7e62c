"""The command ``streampack inspect``: its words, and what it does with them."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streampack.catalog import UsageError

if TYPE_CHECKING:
    from streampack.inspection.report import Report
    from streampack.inspection.shape import RunShape
    from streampack.streaming.dataset import IterablePackedDataset

ROWS = 20_000
RANKS = "1,8,64"
DESCRIPTION = """\
Show what packing will do to a corpus before it is trained on: lengths, what is dropped, padding and steps by each
strategy, attention cost, the first packs, and what to change. Of a config:

  streampack inspect --config my.yaml [KEY=VALUE ...]

or of files, whose rows have messages, a prompt and completion, text or input_ids:

  streampack inspect data/*.jsonl --tokenizer my_model --max-seq-len 4096
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the words of the command to its parser."""
    parser.description = DESCRIPTION
    parser.add_argument("words", nargs="*", metavar="FILE", help="files to read; with --config: KEY=VALUE")
    parser.add_argument(
        "--config", metavar="CONFIG", help="a name that `streampack ls` lists, or a YAML file"
    )
    parser.add_argument("--tokenizer", metavar="PATH", help="of Hugging Face: a folder, or a name on the Hub")
    parser.add_argument("--max-seq-len", type=int, metavar="N", help="tokens in a pack")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rows", type=int, default=ROWS, metavar="N", help=f"rows to read ({ROWS:,})")
    which.add_argument("--all", action="store_true", help="read every row: exact figures")
    parser.add_argument(
        "--ranks", default=RANKS, metavar="N,N", help=f"of the run, then others to compare it with ({RANKS})"
    )
    parser.add_argument("--packs", type=int, default=6, metavar="N", help="first packs to show (6)")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page that opens from disk")
    parser.add_argument("--json", metavar="FILE", help="write the figures; - prints them and nothing else")
    parser.add_argument(
        "--trust", action="append", default=[], metavar="NAME",
        help="a package or module, installed or in the working directory, that the config may name",
    )  # fmt: skip


def run(options: argparse.Namespace, config: Any | None) -> int:
    """Inspect what the words of a command name, and print and write the report.

    Args:
        options: as `add_arguments` defines them.
        config: the content of the config, with its overrides; None to inspect files.

    Returns:
        The exit status.
    """
    ranks = _ranks(options.ranks)
    for name in ("rows", "packs"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name} {getattr(options, name)} is below 1; give at least 1")
    render = _renderer(options)
    report = _report(options, config, ranks)
    if options.json:
        text = json.dumps(report.as_dict(), ensure_ascii=False, indent=1)
        if options.json == "-":
            sys.stdout.write(f"{text}\n")
        else:
            Path(options.json).write_text(f"{text}\n", encoding="utf-8")
    if options.html:
        from streampack.inspection.page_report import report_page

        options.html.write_text(report_page(report), encoding="utf-8")
    render(report)
    if options.html and options.json != "-":
        sys.stdout.write(f"\nthe page: {options.html}\n")
    return 0


def _renderer(options: argparse.Namespace) -> Callable[[Report], None]:
    """Return what prints the report, and fail before the corpus is read if it cannot."""
    if options.json == "-":
        return lambda report: None
    from streampack.inspection.terminal import print_report, require_rich

    try:
        require_rich()
    except ImportError as error:
        raise UsageError(f"{error}; or write JSON: --json FILE, --json - to print it") from None
    return print_report


def _ranks(words: str) -> tuple[int, ...]:
    try:
        ranks = tuple(int(word) for word in words.split(","))
    except ValueError:
        ranks = (0,)
    if min(ranks) < 1:
        raise UsageError(f"--ranks {words} is no list of numbers; write such as --ranks 8,64")
    return tuple(dict.fromkeys(ranks))


def _report(options: argparse.Namespace, config: Any | None, ranks: Sequence[int]) -> Report:
    from streampack.inspection.survey import inspect_dataset

    if config is None:
        dataset, shape = _of_files(options, ranks)
        title = " ".join(options.words[:3]) + (" ..." if len(options.words) > 3 else "")
    else:
        dataset, shape = _of_config(config, ranks)
        title = str(options.config)
    rows = None if options.all else options.rows
    with _progress(None if options.all else options.rows) as (progress, finished):
        return inspect_dataset(
            dataset,
            title=title,
            shape=shape,
            rows=rows,
            packs=options.packs,
            progress=progress,
            finished=finished,
        )


def _of_files(options: argparse.Namespace, ranks: Sequence[int]) -> tuple[IterablePackedDataset, RunShape]:
    from streampack.inspection.shape import RunShape
    from streampack.packing.encoders import padding_id
    from streampack.sources.as_source import as_source
    from streampack.streaming.dataset import IterablePackedDataset

    if options.max_seq_len is None:
        raise UsageError("--max-seq-len is missing: give the tokens of a pack, such as --max-seq-len 4096")
    source = as_source(options.words if len(options.words) > 1 else options.words[0])
    tokenizer = None
    if options.tokenizer is not None:
        from streampack.packing.encoders import HFTokenizer

        tokenizer = HFTokenizer(options.tokenizer)
    rows = [row.data for row in source.examples() if row.data is not None]
    encoder = _encoder(rows[0] if rows else {}, tokenizer)
    padding = 0 if tokenizer is None else padding_id(tokenizer)
    dataset = IterablePackedDataset(
        source, encoder=encoder, max_seq_len=options.max_seq_len, shuffle=True, padding_idx=padding
    )
    return dataset, RunShape(ranks=ranks)


def _encoder(row: Any, tokenizer: Any) -> Any:
    """Return the encoder that fits the columns of a row.

    Raises:
        ValueError: if none does, or it needs a tokenizer and there is none.
    """
    from streampack.packing.encoders import (
        AnswersEncoder,
        ChatEncoder,
        TextEncoder,
    )

    if {"input_ids", "tokens"} & set(row):
        return None
    made: Callable[[], Any]
    # Pairs may have their conversation in another column, too.
    if {"chosen", "rejected"} <= set(row) or {"prompt", "completions"} <= set(row):
        made = lambda: AnswersEncoder(tokenizer)  # noqa: E731
    elif {"messages", "conversations"} & set(row) or {"prompt", "completion"} <= set(row):
        made = lambda: ChatEncoder(tokenizer)  # noqa: E731
    elif "text" in row:
        made = lambda: TextEncoder(tokenizer)  # noqa: E731
    elif "content" in row:
        made = lambda: TextEncoder(tokenizer, column="content")  # noqa: E731
    else:
        columns = ", ".join(sorted(map(str, row))) or "none that can be read"
        raise ValueError(
            f"the rows have the columns {columns}, and none of messages, prompt with completion, chosen with rejected, "
            "text or input_ids; write a config with data.encoder: streampack cp quickstart my.yaml"
        )
    if tokenizer is None:
        raise ValueError("the rows are text: name the tokenizer of the model, --tokenizer PATH")
    return made()


def _of_config(config: Any, ranks: Sequence[int]) -> tuple[IterablePackedDataset, RunShape]:
    from streampack.inspection.run_data import training_data
    from streampack.inspection.shape import RunShape
    from streampack.training.config import read_config

    cfg = read_config(config)
    dataset = training_data(cfg)
    shape = RunShape(
        ranks=ranks,
        workers=cfg.num_workers,
        batch_size=cfg.batch_size,
        packs_per_step=cfg.packs_per_step,
        max_steps=cfg.max_steps,
        model=_model(cfg.model),
    )
    return dataset, shape


def _model(node: Any) -> Any:
    from streampack.inspection.costs import model_work

    try:
        return model_work(node)
    except Exception as error:  # models of users may need what is not here; their figures are left out
        sys.stderr.write(f"note: operations of the model are left out: {error}\n")
        return None


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
