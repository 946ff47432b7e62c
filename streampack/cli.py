"""The `streampack` command.

Importing torchtune takes 4 to 9 seconds, and torch 1 to 2, so commands import what they need when they act.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import io
import json
import logging
import sys
from collections.abc import Callable, Sequence
from inspect import getdoc
from pathlib import Path
from typing import Any

from streampack import __version__, catalog
from streampack.catalog import UsageError, add_config_words, configs, require_installed
from streampack.launch import run
from streampack.validation import raised_here

Options = argparse.Namespace


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Exit status: 0; 1 for a config or files with problems, or leaks; 2 for a wrong command line; 130 if it was
    interrupted. Exceptions that this package does not raise itself are mistakes in code, and go through.
    """
    # torchao 0.15 has no C++ extensions for torch 2.13, which only quantization would want, and says so.
    logging.getLogger("torchao").setLevel(logging.ERROR)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files may be no UTF-8
    try:
        options = _parse(list(sys.argv[1:] if argv is None else argv))
    except SystemExit as end:  # of argparse: its help, or its error
        return int(end.code or 0)
    try:
        return options.act(options) or 0
    except KeyboardInterrupt:
        print("streampack: interrupted", file=sys.stderr)
        return 130  # as of a program that SIGINT ended
    except Exception as error:
        if not isinstance(error, UsageError) and not raised_here(error):
            raise
        said = " ".join([str(error), *getattr(error, "__notes__", ())])
        print(f"streampack: error: {said}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1


def _parse(words: list[str]) -> Options:
    parser = argparse.ArgumentParser(prog="streampack")
    parser.add_argument("--version", action="version", version=f"streampack {__version__}")
    parser.set_defaults(act=lambda _: parser.print_help())
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_looks(commands)
    _add_work(commands)
    options, rest = parser.parse_known_args(words)
    if options.act is run:
        options.words = words[1:]  # argparse would sort out torchrun's options
    elif rest and ("overrides" not in options or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    else:  # argparse does not join the words before an option and after it
        getattr(options, "overrides", []).extend(rest)
    return options


def _add(commands: Any, act: Callable[[Options], int | None], *, config: str = "") -> argparse.ArgumentParser:
    """Add a command that is a function, with its docstring as help, and return its parser."""
    text = getdoc(act) or ""
    layout = argparse.RawDescriptionHelpFormatter
    parser: argparse.ArgumentParser = commands.add_parser(
        act.__name__, help=text.split("\n")[0], description=text, formatter_class=layout
    )
    parser.set_defaults(act=act)
    if config:
        add_config_words(parser, overrides=config)
    return parser


def read(options: Options) -> Any:
    """Return the content of the config that ``--config`` or the first word names, with overrides."""
    words = options.overrides
    if options.config is None and words and "=" not in words[0] and not words[0].startswith("~"):
        options.config = words.pop(0)
    if options.config is None:
        raise UsageError("--config is missing: name a config or the path of a YAML file")
    catalog.file_of("config", options.config, configs())  # before an import that takes seconds
    require_installed("omegaconf", "data")
    from streampack.training.entry import read_named

    return read_named(options.config, words)


# What a run will do, and what it did.


def _add_looks(commands: Any) -> None:
    _add(commands, catalog.ls)
    word = _add(commands, catalog.cp).add_argument
    word("name", help="one that `streampack ls` shows")
    word("destination", type=Path, help="a file or a folder")
    word("--force", action="store_true", help="overwrite what is there")

    word = _add(commands, validate, config="KEY=VALUE").add_argument
    word("--recipe", choices=catalog.RECIPES, help="default: the one that `streampack ls` shows for it")
    word("--no-files", action="store_true", help="open no file: keys, values and components only")

    word = _add(commands, inspect, config="FILE|KEY=VALUE").add_argument
    word("--tokenizer", help="of Hugging Face: a folder, or a name on the Hub")
    word("--max-seq-len", type=positive, help="tokens in a pack")
    word("--chat-template", help="a file of Jinja, if the tokenizer has no template")
    word("--overlong", help="longer rows: error (the default), truncate, truncate_left, drop, split")
    word("--strategy", help="how packs are filled (exact_fit)")
    word("--skip-bad", action="store_true", help="the run skips rows that cannot be read")
    word("--columns", default="", help="your columns and ours: question=instruction,answer=output")
    word("--roles", default="", help="your roles and ours: bot=assistant")
    word("--answers", help="all, or last: of each chat, to train only that")
    word("--ignore", default="", help="columns to skip on purpose: tools,label")
    word("--rows", type=positive, help="rows to read (20,000)")
    word("--all", action="store_true", help="read every row: exact figures")
    word("--ranks", type=positive, default=1, help="of the run (1)")
    word("--packs", type=positive, default=6, help="first packs to show (6)")
    word("--html", type=Path, help="write a page that opens from disk")
    word("--json", help="write the figures to a file; - prints them and nothing else")

    word = _add(commands, unpack, config="KEY=VALUE").add_argument
    word("--step", type=int, help="of the run in the config's output_dir, whose packs are made again")
    word("--packs", type=positive, help="how many packs to show (2; of a step, all)")

    word = _add(commands, trace, config="KEY=VALUE").add_argument
    word("--step", type=int, help="of the run in the config's output_dir")
    word("--top", type=positive, default=10, help="how many steps or rows to show (10)")


def positive(word: str) -> int:
    """Return a number from 1 on."""
    if not word.isdecimal() or not int(word):
        raise argparse.ArgumentTypeError(f"{word!r} is no whole number from 1 on")
    return int(word)


def validate(options: Options) -> int:
    """Check a config, by a run that stops before its first step and leaves no file.

    streampack validate --config my.yaml
    """
    require_installed("torchtune", "tune")
    config = read(options)
    from streampack.training.validate import validate

    def train_of(recipe: str) -> Any:
        return importlib.import_module(f"streampack_recipes.{recipe}").train

    recipe = options.recipe or catalog.recipe_for(options.config)
    problems = validate(config, recipe=recipe, train_of=None if options.no_files else train_of)
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{options.config}: {len(problems)} problem(s)" if problems else f"{options.config} is well-formed")
    return 1 if problems else 0


def inspect(options: Options) -> None:
    """Show what packing does to a corpus: padding, steps, drops, the first packs, what to change.

    streampack inspect data/*.jsonl --tokenizer my_model --max-seq-len 4096
    streampack inspect --config my.yaml data.max_seq_len=8192 --html report.html
    """
    files = options.overrides
    first = files[0] if files and options.config is None else ""
    if first in configs() or first.endswith((".yaml", ".yml")):
        options.config = files.pop(0)
    if options.all and options.rows:
        raise UsageError("--all reads every row; leave --rows out")
    if options.config is None and not files:
        raise UsageError("name files, or a config: --config CONFIG; `streampack inspect --help` shows both")
    shape = {name: getattr(options, name) for name in ("columns", "roles", "answers", "ignore")}
    packing = {name: getattr(options, name) for name in ("max_seq_len", "overlong", "strategy", "skip_bad")}
    tokenizer = {"path": options.tokenizer, "chat_template": options.chat_template}
    if options.config and any((*tokenizer.values(), *packing.values(), *shape.values())):
        raise UsageError(
            "--max-seq-len, --tokenizer and the other words about files are not for a config, which has its own: "
            "data.max_seq_len=N replaces one"
        )
    if options.config is None and options.max_seq_len is None:
        raise UsageError("--max-seq-len is missing: give the tokens of a pack, such as --max-seq-len 4096")
    if options.json != "-" and importlib.util.find_spec("rich") is None:
        raise UsageError("rich, which prints this, is missing: pip install 'streampack[data]'; or --json -")
    config = read(options) if options.config else None
    from streampack.inspection.commands import inspect_config, inspect_files, show

    sizes = {"ranks": options.ranks, "packs": options.packs}
    sizes["rows"] = None if options.all else options.rows or 20_000
    if config is None:
        report = inspect_files(files, tokenizer=tokenizer, shape=shape, packing=packing, **sizes)
    else:
        report = inspect_config(config, title=options.config, **sizes)
    show(report, html=options.html, json_file=options.json)


def unpack(options: Options) -> None:
    """Show packs as text: the first ones of a config, or those of a step of its run.

    streampack unpack --config my.yaml --step 1200
    """
    config = read(options)
    from streampack.inspection.commands import print_packs

    print_packs(config, step=options.step, packs=options.packs)


def trace(options: Options) -> None:
    """Show the steps with the highest loss; with log_rows: true, the rows of one.

    streampack trace --config my.yaml --step 1200
    """
    config = read(options)
    from streampack.inspection.commands import rows_of_step, worst_steps

    top = options.top
    lines = (
        worst_steps(config, top=top) if options.step is None else rows_of_step(config, options.step, top=top)
    )
    print(*lines, sep="\n")


# Work on many rows, and runs.


def _add_work(commands: Any) -> None:
    word = _add(commands, tokenize, config="KEY=VALUE").add_argument
    word("--out", required=True, help="folder of the shards, or a URL")
    text = "of fsspec, for a URL, as JSON; better keep secrets in variables"
    word("--storage-options", type=json.loads, default={}, help=text)
    word("--workers", type=int, default=1, help="processes (1)")
    word("--lanes", type=int, help="parts of the source: at least the number of workers or shards")
    word("--dtype", default="auto", help="uint16, uint32, or auto (auto)")
    word("--engine", default="processes", help="processes, or ray: a Ray cluster (processes)")
    word("--address", help="of the Ray cluster; default: RAY_ADDRESS, or a new one here")
    word("--shard", metavar="I/N", type=shard, help="write the I-th of N parts, from 0/N, and no index")
    word("--finish", action="store_true", help="write the index, once all parts are there")

    word = _add(commands, score, config="KEY=VALUE").add_argument
    word("--out", type=Path, required=True, help="file to write; ends in .jsonl")
    word("--model", help="folder of a model in Hugging Face's format, instead of the config's")
    word("--overlong", default="error", help="longer rows: error, truncate their beginnings, windows")
    word("--per-token", action="store_true", help="write the log-probability of each token, too: token_logps")
    word("--without-rows", action="store_true", help="write the scores only")

    parser = _add(commands, export)
    parser.add_argument("checkpoint", type=Path, help="OUTPUT_DIR/checkpoints/step_00000100, say")
    add_config_words(parser)
    parser.add_argument("--out", type=Path, required=True, help="folder of the weights")

    _add(commands, run).add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def shard(word: str) -> tuple[int, int]:
    """Return a shard's number and how many there are: ``0/8``."""
    index, count = map(int, word.split("/"))
    return index, count


def tokenize(options: Options) -> None:
    """Write a config's data.source, encoded by data.encoder, as token shards; a killed command continues.

    streampack tokenize --config my.yaml --out tokens --workers 16
    streampack tokenize --config my.yaml --out s3://bucket/tokens --lanes 800 --shard 0/50
    """
    config = read(options)
    from streampack.tokenize.tokenize import from_config, tokenize
    from streampack.training.checks import to_plain

    names = ("out", "workers", "lanes", "dtype", "engine", "address", "shard", "finish")
    settings = {name: getattr(options, name) for name in names}
    tokenize(**from_config(to_plain(config)), storage={"options": options.storage_options}, **settings)


def score(options: Options) -> None:
    """Write the log-likelihood of each row of a config's data.source.

    streampack score --config my.yaml --out scores.jsonl
    torchrun --nproc_per_node 2 -m streampack score --config my.yaml --model my_model --out scores.jsonl
    """
    if options.model is None:
        require_installed("torchtune", "tune")
    config = read(options)
    from streampack.training.score_rows import score_rows

    names = ("out", "model", "overlong", "per_token")
    settings = {name: getattr(options, name) for name in names}
    if line := score_rows(config, with_rows=not options.without_rows, **settings):
        print(line)


def export(options: Options) -> None:
    """Write a running checkpoint's weights in the model's own format, while the run continues.

    streampack export outputs/checkpoints/step_00000100 --config my.yaml --out weights
    """
    require_installed("torchtune", "tune")
    config = read(options)
    from streampack.training.weights import export

    for name, folder in export(options.checkpoint, config=config, out=options.out).items():
        print(f"{name:12} {folder}")
