"""The `streampack` command.

Importing torchtune takes 4 to 9 seconds, and torch 1 to 2, so commands import what they need when they act.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import io
import logging
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from streampack import __version__
from streampack.catalog import EXAMPLES, RECIPES, UsageError, config_file, our_files, unknown
from streampack.launch import run_recipe, trust_named
from streampack.validation import raised_here
from streampack.words import Parser, Word, json_object, positive, ranks, shard

Options = argparse.Namespace
Act = Callable[[Options], int | None]


class Command(NamedTuple):
    """A command: what it is for, with examples; its arguments; what it does, which returns the exit status."""

    help: str
    example: str
    words: Sequence[Word]
    act: Act


TRUST = Word(
    "--trust", "NAME", "a package or module, installed or in the working directory, that the config may name",
    default=[], action="append",
)  # fmt: skip
CONFIG = (
    Word("--config", "CONFIG", "a name that `streampack ls` lists, or a YAML file"),
    Word("overrides", "KEY=VALUE", "replaces a value of the config; ~KEY removes it", nargs="*"),
    TRUST,
)
NAME = Word("name", "NAME", "that `streampack ls` lists")


COMMANDS: dict[str, Command] = {}


def command(text: str, *examples: str, words: Sequence[Word] = ()) -> Callable[[Act], Act]:
    """Decorate what a command does; its name is the function's."""

    def add(act: Act) -> Act:
        COMMANDS[act.__name__] = Command(text, "\n  ".join(examples), words, act)
        return act

    return add


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
        return _dispatch(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        print("streampack: interrupted", file=sys.stderr)
        return 130  # as of a program that SIGINT ended
    except Exception as error:
        if not isinstance(error, UsageError) and not raised_here(error):
            raise
        said = " ".join([str(error), *getattr(error, "__notes__", ())])
        print(f"streampack: error: {said}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1


def _dispatch(words: list[str]) -> int:
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    if not words or words[0] in ("-h", "--help"):
        print("usage: streampack COMMAND ...\n")
        for name, each in COMMANDS.items():
            print(f"  {name:10} {each.help}\n{'':13}{each.example.splitlines()[0]}")
        print(
            "\nRECIPE and CONFIG are names that `streampack ls` lists, or paths. COMMAND --help tells more."
        )
        return 0
    if words[0] == "--version":
        print(f"streampack {__version__}")
        return 0
    name, *words = words
    if name not in COMMANDS:
        raise UsageError(unknown("command", name, COMMANDS, rule=f"it is none of {', '.join(COMMANDS)}"))
    about = COMMANDS[name]
    parser = Parser(
        f"streampack {name}",
        description=f"{about.help[0].upper()}{about.help[1:]}.\n\n  {about.example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for word in about.words:
        word.add(parser)
    if {"-h", "--help"} & set(words):
        parser.print_help()
        return 0
    if name == "run":  # its words are for torchrun, the recipe and the config
        return about.act(argparse.Namespace(words=words)) or 0
    options = parser.parse_intermixed_args(words)
    trust_named(getattr(options, "trust", ()))
    return about.act(options) or 0


def read(options: Options) -> Any:
    """Return the content of the config that a command names, with its overrides; ``--config`` may be left out."""
    words = options.overrides
    if options.config is None and words and "=" not in words[0] and words[0][0] != "~":
        options.config = words.pop(0)
    if options.config is None:
        raise UsageError("--config is missing: name a config or the path of a YAML file")
    options.path = path = config_file(options.config)
    require_installed("omegaconf", "data")
    import yaml
    from omegaconf import DictConfig

    from streampack.training.entry import load_config, with_overrides

    try:
        content = load_config(path)
    except (yaml.YAMLError, OSError) as error:
        raise UsageError(f"{path} cannot be read as YAML: {error}") from None
    if not isinstance(content, DictConfig):
        raise UsageError(f"{path} holds a list; a config is a mapping of keys to values")
    try:
        return with_overrides(content, words)
    except ValueError as error:
        raise UsageError(str(error)) from None


def require_installed(library: str, extra: str) -> None:
    """Raise UsageError without a library, which an extra brings."""
    if importlib.util.find_spec(library) is None:
        raise UsageError(f"this needs {library}, which is not installed: pip install 'streampack[{extra}]'")


# Recipes and configs.


@command("list recipes, configs and examples", "streampack ls")
def ls(options: Options) -> None:
    print(f"{'RECIPE':<40} CONFIG")
    for recipe, configs in RECIPES.items():
        for row, config in enumerate(configs):
            print(f"{recipe if row == 0 else '':<40} {config}")
    print("\nEXAMPLE", *EXAMPLES, sep="\n")


@command("print a config, a recipe or an example", "streampack cat quickstart", words=[NAME])
def cat(options: Options) -> None:
    print(_file(options.name).read_text(encoding="utf-8"), end="")


def _file(name: str) -> Path:
    files = our_files()
    if name not in files:
        raise UsageError(unknown("recipe, config or example", name, files, rule="`streampack ls` lists them"))
    return files[name]


@command(
    "copy a config, a recipe or an example, to make it yours",
    "streampack cp quickstart my.yaml",
    words=[
        NAME,
        Word("destination", "DESTINATION", "a file or a folder", Path),
        Word("--force", None, "overwrite what is there"),
    ],
)
def cp(options: Options) -> None:
    source, destination = _file(options.name), options.destination
    if destination.is_dir():
        destination /= source.name
    elif destination.suffix != source.suffix:
        destination = destination.with_name(destination.name + source.suffix)
    if destination.exists() and not options.force:
        raise UsageError(f"{destination} exists; name another destination, or add --force to overwrite it")
    if not destination.parent.is_dir():
        raise UsageError(f"there is no folder {destination.parent}; make it, or name another")
    shutil.copyfile(source, destination)
    print(f"copied to {destination}")


# Before a run, and after it.


@command(
    "check a config, by a run that stops before its first step and leaves no file",
    "streampack validate --config my.yaml",
    words=[
        *CONFIG,
        Word("--recipe", "RECIPE", "default: the one that fits the config", choices=[*RECIPES]),
        Word("--no-files", None, "open no file: keys, values and components only"),
    ],
)
def validate(options: Options) -> int:
    require_installed("torchtune", "tune")
    config = read(options)
    from streampack.training.validate import validate

    def train_of(recipe: str) -> Any:
        return importlib.import_module(f"streampack_recipes.{recipe}").train

    problems = validate(config, recipe=options.recipe, train_of=None if options.no_files else train_of)
    for problem in problems:
        print(problem, file=sys.stderr)
    looked = " (keys, values and components; no file was opened)" if options.no_files else ""
    print(
        f"{options.path}: {len(problems)} problem(s)"
        if problems
        else f"{options.path} is well-formed{looked}"
    )
    return 1 if problems else 0


@command(
    "show what packing does to a corpus: padding, steps, drops, the first packs, what to change",
    "streampack inspect data/*.jsonl --tokenizer my_model --max-seq-len 4096",
    "streampack inspect --config my.yaml data.max_seq_len=8192 --html report.html",
    words=[
        CONFIG[0],
        Word("overrides", "FILE", "files to read; with a config: KEY=VALUE", nargs="*"),
        TRUST,
        Word("--tokenizer", "PATH", "of Hugging Face: a folder, or a name on the Hub"),
        Word("--max-seq-len", "N", "tokens in a pack", positive),
        Word(
            "--overlong", "CHOICE", "longer rows: error (the default), truncate, truncate_left, drop, split"
        ),
        Word("--rows", "N", "rows to read (20,000)", positive),
        Word("--all", None, "read every row: exact figures"),
        Word("--ranks", "N,N", "of the run, then others to compare it with (1,8,64)", ranks, (1, 8, 64)),
        Word("--packs", "N", "first packs to show (6)", positive, 6),
        Word("--html", "FILE", "write a page that opens from disk", Path),
        Word("--json", "FILE", "write the figures; - prints them and nothing else"),
    ],
)
def inspect(options: Options) -> None:
    if options.all and options.rows:
        raise UsageError("--all reads every row; leave --rows out")
    files = options.overrides
    first = Path(files[0] if files else "")
    ours = any(str(first) in configs for configs in RECIPES.values()) and not first.exists()
    is_config = ours or first.suffix in (".yaml", ".yml")
    of_files = options.config is None and not is_config
    if of_files and not files:
        raise UsageError("name files, or a config: --config CONFIG; `streampack inspect --help` shows both")
    if not of_files and (options.max_seq_len or options.tokenizer or options.overlong):
        raise UsageError(
            "--max-seq-len, --overlong and --tokenizer are for files; a config has its own: data.max_seq_len=N "
            "replaces one"
        )
    if of_files and options.max_seq_len is None:
        raise UsageError("--max-seq-len is missing: give the tokens of a pack, such as --max-seq-len 4096")
    if options.json != "-" and importlib.util.find_spec("rich") is None:
        raise UsageError("rich, which prints this, is missing: pip install 'streampack[data]'; or --json -")
    config = None if of_files else read(options)
    from streampack.inspection.commands import inspect_config, inspect_files, show

    sizes = {"ranks": options.ranks, "packs": options.packs}
    sizes["rows"] = None if options.all else options.rows or 20_000
    if config is None:
        sizes["max_seq_len"] = options.max_seq_len
        report = inspect_files(files, tokenizer=options.tokenizer, overlong=options.overlong, **sizes)
    else:
        report = inspect_config(config, title=str(options.config), **sizes)
    show(report, html=options.html, json_file=options.json)


@command(
    "show packs as text: the first ones of a config, or those of a step of its run",
    "streampack unpack --config my.yaml --packs 3",
    "streampack unpack --config my.yaml --step 1200",
    words=[
        *CONFIG,
        Word("--step", "N", "of the run in the config's output_dir, whose packs are made again", int),
        Word("--packs", "N", "show at most so many (2; of a step, all)", positive),
    ],
)
def unpack(options: Options) -> None:
    config = read(options)
    from streampack.inspection.commands import print_packs

    print_packs(config, step=options.step, packs=options.packs)


@command(
    "show the steps with the highest loss; with log_rows: true, the rows of one",
    "streampack trace --config my.yaml",
    "streampack trace --config my.yaml --step 1200",
    words=[
        *CONFIG,
        Word("--step", "N", "of the run in the config's output_dir", int),
        Word("--top", "N", "how many steps or rows to show (10)", positive, 10),
    ],
)
def trace(options: Options) -> None:
    config = read(options)
    from streampack.inspection.commands import rows_of_step, worst_steps

    if options.step is None:
        lines = worst_steps(config, top=options.top)
    else:
        lines = rows_of_step(config, options.step, top=options.top)
    print("\n".join(lines))


@command(
    "write the config's data.source, encoded by data.encoder, as token shards; a killed command goes on",
    "streampack tokenize --config my.yaml --out tokens --workers 16",
    "streampack tokenize --config my.yaml --out s3://bucket/tokens --engine ray --address auto --lanes 800",
    "streampack tokenize --config my.yaml --out s3://bucket/tokens --lanes 800 --shard 0/50   (... to 49/50)",
    "streampack tokenize --config my.yaml --out s3://bucket/tokens --lanes 800 --finish",
    words=[
        *CONFIG,
        Word("--out", "FOLDER", "folder of the shards, or a URL", required=True),
        Word(
            "--storage-options", "JSON", "of fsspec, for a URL; better keep secrets in variables", json_object
        ),
        Word("--workers", "N", "processes (1)", int, 1),
        Word("--lanes", "N", "parts of the source, at least as many as workers or shards", int),
        Word("--dtype", "TYPE", "uint16, uint32, or auto (auto)", default="auto"),
        Word("--engine", "NAME", "processes, or ray: a Ray cluster (processes)", default="processes"),
        Word("--address", "ADDRESS", "of the Ray cluster; default: RAY_ADDRESS, or a new one here"),
        Word("--shard", "I/N", "write the I-th of N parts, from 0/N, and no index", shard),
        Word("--finish", None, "write the index, once all parts are there"),
    ],
)
def tokenize(options: Options) -> None:
    config = read(options)
    from streampack.tokenize.tokenize import from_config, tokenize
    from streampack.training.checks import to_plain

    names = ("out", "workers", "lanes", "dtype", "engine", "address", "shard", "finish")
    settings = {name: getattr(options, name) for name in names}
    storage = {"options": options.storage_options or {}}
    tokenize(**from_config(to_plain(config)), storage=storage, **settings)


@command(
    "write the log-likelihood of each row of a config's data.source",
    "streampack score --config my.yaml --out scores.jsonl",
    "torchrun --nproc_per_node 2 -m streampack score --config my.yaml --model my_model --out scores.jsonl",
    words=[
        *CONFIG,
        Word("--out", "FILE", "to write; ends in .jsonl", Path, required=True),
        Word("--model", "FOLDER", "a model in Hugging Face's format, instead of the config's"),
        Word(
            "--overlong", "CHOICE", "longer rows: error, truncate their beginnings, windows", default="error"
        ),
        Word("--per-token", None, "write the log-probability of each token, too: token_logps"),
        Word("--without-rows", None, "leave the columns of the rows out"),
    ],
)
def score(options: Options) -> None:
    if options.model is None:
        require_installed("torchtune", "tune")
    config = read(options)
    from streampack.training.score_rows import score_rows

    names = ("out", "model", "overlong", "per_token")
    settings = {name: getattr(options, name) for name in names}
    if line := score_rows(config, with_rows=not options.without_rows, **settings):
        print(line)


@command(
    "write a running checkpoint's weights in the model's own format, while the run goes on",
    "streampack export outputs/checkpoints/step_00000100 --config my.yaml --out weights",
    words=[
        Word("checkpoint", "CHECKPOINT", "OUTPUT_DIR/checkpoints/step_00000100, say", Path),
        *CONFIG,
        Word("--out", "FOLDER", "of the weights", Path, required=True),
    ],
)
def export(options: Options) -> None:
    require_installed("torchtune", "tune")
    config = read(options)
    from streampack.training.weights import export

    for name, folder in export(options.checkpoint, config=config, out=options.out).items():
        print(f"{name:12} {folder}")


@command(
    "train; torchrun's options, such as --nproc_per_node 2, go before RECIPE",
    "streampack run full_finetune --config quickstart max_steps=3",
    "streampack run --nproc_per_node 2 full_finetune --config my.yaml",
    words=[
        Word("recipe", "RECIPE", "a name that `streampack ls` lists, or a path"),
        *CONFIG,
        Word("--traceback", None, "show where an error was raised"),
    ],
)
def run(options: Options) -> int:
    require_installed("torchtune", "tune")
    return run_recipe(options.words)
