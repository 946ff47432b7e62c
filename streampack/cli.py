"""The `streampack` command: our recipes and configs by name, from any directory, run by torchtune's own CLI.

Importing torchtune takes 4 to 9 seconds, so commands that do not need it (help, `ls`, `cat` and `cp` of our files,
errors in the words) do not import it.
"""

from __future__ import annotations

import argparse
import difflib
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from streampack import __version__
from streampack.catalog import RECIPES, UsageError, config_file, our_files, unknown
from streampack.inspection import command as inspection
from streampack.inspection import trace_command, unpack_command
from streampack.instantiate import trust
from streampack.training import score_command, tokenize_command
from streampack.tune_cli import hand_over, require_torchtune, theirs
from streampack.validation import raised_here

COMMANDS = {
    "ls": "list recipes and configs",
    "cat": "print a config or a recipe",
    "cp": "copy a config or a recipe, to make it yours",
    "validate": "check a config: keys, components, files, and the first rows; no weights are read",
    "verify": "check that no sample of a pack sees another in this model; needs no weights and no data",
    "inspect": "show what packing does to a corpus: padding, steps, drops, the first packs, what to change",
    "unpack": "show packs as text: the first ones of a config, or those of a step of its run",
    "trace": "show which rows the loss of a step came from",
    "tokenize": "write the config's data.source as token shards",
    "score": "write the log-likelihood of each row of a config's data.source",
    "export": "write a running checkpoint's weights in the model's own format, while the run goes on",
    "run": "train",
}
MEANT = {
    "train": "run RECIPE --config CONFIG",
    "finetune": "run RECIPE --config CONFIG",
    "list": "ls",
    "copy": "cp NAME DESTINATION",
}
"""Words that are no commands, and the commands that do what they say."""
EPILOG = """\
RECIPE and CONFIG are names that `streampack ls` lists, or paths. For example:

  streampack run full_finetune --config quickstart max_steps=3
  streampack run --nproc_per_node 2 full_finetune --config my.yaml

`streampack COMMAND --help` describes each.
"""
RUN_USAGE = (
    "streampack run [TORCHRUN-OPTIONS] RECIPE --config CONFIG [KEY=VALUE ...] [--trust NAME] [--traceback]"
)
RUN_DESCRIPTION = """\
Train with a recipe. torchrun's options, such as --nproc_per_node 2, go before RECIPE. KEY=VALUE replaces a value of
the config, in lists by number: data.source.sources.0.weight=0.3; ~KEY removes a key. The keys of a config are the
fields of streampack.training.config.RunConfig.
"""


class _Parser(argparse.ArgumentParser):
    """A parser that raises `UsageError`, which `main` prints."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; `{self.prog} --help` shows how it is used")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Exit status: 0; 1 for a config or files with problems, or leaks; 2 for a wrong command line; 130 if it was
    interrupted.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    try:
        return _dispatch(words)
    except UsageError as error:
        print(f"streampack: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("streampack: interrupted", file=sys.stderr)
        return 130  # as of a program that SIGINT ended


def _dispatch(words: list[str]) -> int:
    parser, commands = _parsers()
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        raise _unknown_command(words[0])
    if not words or words[0] in ("-h", "--help"):
        parser.print_help()
        return 0
    if {"-h", "--help"} & set(words[1:]):
        commands[words[0]].print_help()
        return 0
    if words[0] == "run":  # all other words are for torchrun and the recipe
        trusting = _Parser("streampack run", add_help=False, allow_abbrev=False)
        trusting.add_argument("--trust", action="append", default=[])
        options, rest = trusting.parse_known_args(words[1:])
        _trust(options.trust)
        return hand_over("run", rest)
    options, rest = parser.parse_known_args(words)
    if words[0] == "inspect" and not any(word.startswith("-") for word in rest):
        options.words += rest  # words between which options stood
    elif rest and not hasattr(options, "overrides"):
        commands[words[0]].error(f"unrecognized arguments: {' '.join(rest)}")
    if hasattr(options, "overrides"):
        _settle_config(options, rest, commands[words[0]])
    try:
        return int(options.act(options))
    except UsageError:
        raise
    except Exception as error:
        if not raised_here(error):
            raise
        said = " ".join([str(error), *getattr(error, "__notes__", ())])
        print(f"{getattr(options, 'path', 'streampack: error')}: {said}", file=sys.stderr)
        return 1


def _unknown_command(word: str) -> UsageError:
    rule = f"it is none of {', '.join(COMMANDS)}"
    for close in difflib.get_close_matches(word, [*COMMANDS, *MEANT], n=1):
        if close in MEANT:
            return UsageError(
                f"unknown command {word!r}: {rule}; to {close}, write `streampack {MEANT[close]}`"
            )
    return UsageError(unknown("command", word, COMMANDS, rule=rule))


def _parsers() -> tuple[_Parser, dict[str, _Parser]]:
    """Return the parser of `streampack`, and that of each of its commands."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser("streampack", epilog=EPILOG, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"streampack {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    commands = {
        name: subparsers.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            formatter_class=raw,
            allow_abbrev=False,
        )
        for name, text in COMMANDS.items()
    }
    for name, act in {
        "ls": _ls, "cat": _cat, "cp": _cp, "validate": _validate, "verify": _verify, "inspect": _inspect,
        "unpack": _unpack, "trace": _trace, "tokenize": _tokenize, "export": _export, "score": _score,
    }.items():  # fmt: skip
        commands[name].set_defaults(act=act)
    commands["export"].add_argument(
        "checkpoint", metavar="CHECKPOINT", type=Path, help="OUTPUT_DIR/checkpoints/step_00000100, say"
    )
    commands["export"].add_argument(
        "--out", metavar="FOLDER", type=Path, required=True, help="of the weights"
    )
    for name in ("validate", "verify", "unpack", "trace", "tokenize", "export", "score"):
        _add_config(commands[name])
    unpack_command.add_arguments(commands["unpack"])
    trace_command.add_arguments(commands["trace"])
    score_command.add_arguments(commands["score"])
    tokenize_command.add_arguments(commands["tokenize"])
    inspection.add_arguments(commands["inspect"])
    commands["run"].usage, commands["run"].description = RUN_USAGE, RUN_DESCRIPTION
    commands["run"].add_argument(
        "recipe", metavar="RECIPE", help="a name that `streampack ls` lists, or a path"
    )
    _add_config(commands["run"])
    commands["run"].add_argument("--traceback", action="store_true", help="show where an error was raised")

    commands["ls"].add_argument("--all", action="store_true", help="torchtune's too")
    commands["cat"].add_argument("name", metavar="NAME", help="that `streampack ls --all` lists")
    cp = commands["cp"]
    cp.add_argument("name", metavar="NAME", help="that `streampack ls --all` lists")
    cp.add_argument("destination", metavar="DESTINATION", type=Path, help="a file or a folder")
    cp.add_argument("--force", action="store_true", help="overwrite what is there")
    cp.add_argument("--make-parents", action="store_true", help="make the folder of DESTINATION")
    validate = commands["validate"]
    validate.add_argument(
        "--recipe",
        metavar="RECIPE",
        choices=RECIPES,
        help="that the config is for; default: the one it is listed with",
    )
    validate.add_argument(
        "--no-files", action="store_true", help="open no file: keys, values and components only"
    )
    return parser, commands


def _add_config(parser: argparse.ArgumentParser) -> None:
    """Add ``--config CONFIG KEY=VALUE ... --trust NAME`` to a command."""
    parser.add_argument(
        "--config", metavar="CONFIG", help="a name that `streampack ls` lists, or a YAML file"
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="replaces a value of the config")
    parser.add_argument(
        "--trust", action="append", default=[], metavar="NAME",
        help="a package or module, installed or in the working directory, that the config may name",
    )  # fmt: skip


def _trust(names: Sequence[str]) -> None:
    try:
        trust(names)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _settle_config(options: argparse.Namespace, rest: list[str], parser: _Parser) -> None:
    """Set ``config`` and ``overrides`` from the words of a command; ``--config`` may be left out."""
    words = [*options.overrides, *rest]
    if options.config is None and words and "=" not in words[0] and words[0][0] not in "-~":
        options.config = words.pop(0)
    wrong = [word for word in words if word.startswith("-")]  # first: the word after one may be its value
    wrong += [word for word in words if "=" not in word and word[0] not in "-~"]
    if wrong:
        parser.error(f"{wrong[0]!r} is neither an option nor KEY=VALUE")
    if options.config is None:
        parser.error("--config is missing: name a config or the path of a YAML file")
    options.overrides = words
    _trust(options.trust)


def _ls(options: argparse.Namespace) -> int:
    if options.all:
        return hand_over("ls", [])
    print(f"{'RECIPE':<40} CONFIG")
    for recipe, configs in RECIPES.items():
        for row, config in enumerate(configs or ("<>",)):
            print(f"{recipe if row == 0 else '':<40} {config}")
    return 0


def _cat(options: argparse.Namespace) -> int:
    ours = our_files().get(options.name)
    if ours is None:
        return hand_over("cat", [options.name])
    # As written: torchtune's `cat` parses and dumps the YAML, and the comments are gone.
    print(ours.read_text(encoding="utf-8"), end="")
    return 0


def _cp(options: argparse.Namespace) -> int:
    source = our_files().get(options.name) or theirs(options.name)
    destination: Path = options.destination
    if destination.is_dir():
        destination /= source.name
    elif destination.suffix != source.suffix:
        destination = destination.with_name(destination.name + source.suffix)
    if destination.exists() and not options.force:
        raise UsageError(f"{destination} exists; name another destination, or add --force to overwrite it")
    if options.make_parents:
        destination.parent.mkdir(parents=True, exist_ok=True)
    if not destination.parent.is_dir():
        raise UsageError(f"there is no folder {destination.parent}; add --make-parents to make it")
    shutil.copyfile(source, destination)
    print(f"copied to {destination}")
    return 0


def _validate(options: argparse.Namespace) -> int:
    path, config = _read("validate", options)
    from streampack.training.validate import notes, validate

    listed = (recipe for recipe, configs in RECIPES.items() if options.config in configs)
    problems = validate(config, files=not options.no_files, recipe=options.recipe or next(listed, None))
    for problem in problems:
        print(problem, file=sys.stderr)
    looked = " (keys, values and components; no file was opened)" if options.no_files else ""
    print(f"{path}: {len(problems)} problem(s)" if problems else f"{path} is well-formed{looked}")
    for note in [] if problems else notes(config):
        print(f"note: {note}")
    return 1 if problems else 0


def _verify(options: argparse.Namespace) -> int:
    path, config = _read("verify", options)
    from streampack.training.isolation import probe_config

    report = probe_config(config)
    print(f"{path}: {report}", file=sys.stdout if report.ok else sys.stderr)
    return 0 if report.ok else 1


def _inspect(options: argparse.Namespace) -> int:
    _trust(options.trust)
    if options.config is None and options.words and options.words[0].endswith((".yaml", ".yml")):
        options.config = options.words.pop(0)
    if options.config is None:
        if not options.words:
            raise UsageError(
                "name files, or a config: --config CONFIG; `streampack inspect --help` shows both"
            )
        return inspection.run(options, None)
    options.overrides = options.words
    _, config = _read("inspect", options)
    return inspection.run(options, config)


def _unpack(options: argparse.Namespace) -> int:
    return unpack_command.run(options, _read("unpack", options)[1])


def _trace(options: argparse.Namespace) -> int:
    return trace_command.run(options, _read("trace", options)[1])


def _score(options: argparse.Namespace) -> int:
    return score_command.run(options, _read("score", options)[1])


def _tokenize(options: argparse.Namespace) -> int:
    return tokenize_command.run(options, _read("tokenize", options)[1])


def _export(options: argparse.Namespace) -> int:
    _, config = _read("export", options)
    from streampack.training.export import export

    for name, folder in export(options.checkpoint, config=config, out=options.out).items():
        print(f"{name:12} {folder}")
    return 0


def _read(command: str, options: argparse.Namespace) -> tuple[Path, Any]:
    """Return the path of the config, and its content with the overrides."""
    options.path = path = config_file(options.config)
    require_torchtune(command)
    import yaml
    from omegaconf import DictConfig, OmegaConf

    from streampack.training.overrides import with_overrides

    try:
        content = OmegaConf.load(path)
    except (yaml.YAMLError, OSError) as error:
        raise UsageError(f"{path} cannot be read as YAML: {error}") from None
    if not isinstance(content, DictConfig):
        raise UsageError(f"{path} holds a list; a config is a mapping of keys to values")
    try:
        return path, with_overrides(content, options.overrides)
    except ValueError as error:
        raise UsageError(str(error)) from None
