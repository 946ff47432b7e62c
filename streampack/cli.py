"""The `streampack` command: our recipes and configs by name, from any directory, run by torchtune's own CLI.

Importing torchtune takes 4 to 9 seconds, so what can be answered without it (help, `ls`, `cat` of ours, a
misspelt command) is.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from streampack.components import trust

RECIPES: dict[str, tuple[str, ...]] = {
    "full_finetune": ("quickstart", "llama3_2/1B_full_streamed"),
    "lora_finetune": ("lora_quickstart", "llama3_2/1B_lora_streamed"),
    "pretrain": ("pretrain_quickstart", "llama3_2/1B_continued_fineweb_edu", "llama3_2/1B_pretrain_bucket"),
}
"""Every recipe, and the configs made for it. Written out: finding them would mean importing recipes.
`tests/test_cli.py` holds the table against the folders."""

HELP = """\
usage: streampack COMMAND ...

  ls                                  list recipes and configs; --all adds torchtune's
  cat NAME                            print a config or a recipe
  cp NAME DESTINATION                 copy one, to make it yours
  validate CONFIG                     check a config: every component, nested ones too
  verify --config CONFIG [KEY=VALUE ...]
                                      does any sample of a pack see another in this model? needs no weights
  tokenize --config CONFIG --out FOLDER [--workers N] [--lanes N] [--dtype TYPE] [KEY=VALUE ...]
                                      make token shards of the config's data.source, with its tokenizer and
                                      data.encoder; data.on_bad_record holds, as in training
  run RECIPE --config CONFIG [KEY=VALUE ...]
                                      train; torchrun's options go before RECIPE

  --trust NAME                        with any of these: a config may name the public classes and functions of this
                                      package or module, be it in the working directory or installed

RECIPE and CONFIG are names that `ls` shows, or paths. For example:

  streampack run full_finetune --config quickstart max_steps=3
  streampack run --nproc_per_node 2 full_finetune --config my.yaml
"""
COMMANDS = ("ls", "cat", "cp", "validate", "verify", "tokenize", "run")
LISTED = "neither a name that `streampack ls` lists"


class UsageError(ValueError):
    """What the user typed cannot be done; the message says what can."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. The exit status is 0, 1 for a config with problems or leaks, 2 for words that make no sense."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help") or args[1:2] in (["-h"], ["--help"]):
        print(HELP, end="")
        return 0
    try:
        return _dispatch(_trusting(args))
    except UsageError as error:
        print(f"streampack: error: {error}", file=sys.stderr)
        return 2


def _trusting(args: list[str]) -> list[str]:
    """``args`` without ``--trust NAME``, which is heeded here: in the environment, which other processes inherit."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--trust", action="append", default=[])
    try:
        options, rest = parser.parse_known_args(args)
        trust(options.trust)
    except (argparse.ArgumentError, ValueError) as error:
        raise UsageError(str(error)) from None
    return rest


def _dispatch(args: list[str]) -> int:
    command, *rest = args
    if command not in COMMANDS:
        raise UsageError(_unknown("command", command, COMMANDS, rule=f"it is none of {', '.join(COMMANDS)}"))
    if command == "validate":
        return _validate(rest)
    if command == "verify":
        return _verify(rest)
    if command == "tokenize":
        return _tokenize(rest)
    if command == "ls" and not rest:
        return _ls()
    if command == "cat" and len(rest) == 1 and rest[0] in our_files():
        # As written: torchtune's `cat` parses and dumps the YAML, and the comments are gone.
        print(our_files()[rest[0]].read_text(encoding="utf-8"), end="")
        return 0
    return _hand_over(command, rest)


def our_files() -> dict[str, Path]:
    """Name -> file, for every recipe and config of ours."""
    recipes, configs = _folder("streampack_recipes"), _folder("streampack_configs")
    files = {name: recipes / f"{name}.py" for name in RECIPES}
    files |= {name: configs / f"{name}.yaml" for names in RECIPES.values() for name in names}
    return files


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(f"package {package} is not installed; install streampack again, with pip")
    return Path(spec.submodule_search_locations[0])


def _ls() -> int:
    print(f"{'RECIPE':<40} CONFIG")
    for recipe, configs in RECIPES.items():
        for row, config in enumerate(configs or ("<>",)):
            print(f"{recipe if row == 0 else '':<40} {config}")
    return 0


def _validate(rest: list[str]) -> int:
    if len(rest) != 1:
        raise UsageError(f"validate takes one config, a name or a path; got {' '.join(rest) or 'none'}")
    path, config = _read_yaml("validate", rest[0])
    from streampack.training.validate import validate

    problems = validate(config)
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{path}: {len(problems)} problem(s)" if problems else f"{path} is well-formed")
    return 1 if problems else 0


def _verify(rest: list[str]) -> int:
    words = [
        part for word in rest for part in (word.split("=", 1) if word.startswith("--config=") else [word])
    ]
    if len(words) < 2 or words[0] != "--config" or any("=" not in word for word in words[2:]):
        raise UsageError(
            f"verify takes --config with a name or a path, then KEY=VALUE; got {' '.join(rest) or 'nothing'}"
        )
    path, config = _read_yaml("verify", words[1])
    from streampack.training.isolation import probe_config
    from streampack.training.overrides import with_overrides

    try:
        report = probe_config(with_overrides(config, words[2:]))
    except (ValueError, ImportError) as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 1
    print(f"{path}: {report}", file=sys.stdout if report.ok else sys.stderr)
    return 0 if report.ok else 1


def _tokenize(rest: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "streampack tokenize", add_help=False, allow_abbrev=False, exit_on_error=False
    )
    parser.add_argument("--config")
    parser.add_argument("--out")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--lanes", type=int)
    parser.add_argument("--dtype", default="auto")
    try:
        options, values = parser.parse_known_args(rest)
        sound = bool(options.config and options.out) and all(word.find("=") > 0 for word in values)
    except (argparse.ArgumentError, SystemExit):
        sound = False
    if not sound or any(word.startswith("-") for word in values):
        raise UsageError(
            "tokenize takes --config with a name or a path and --out with a folder, then --workers and --lanes with "
            f"numbers, --dtype with a type, and KEY=VALUE; got {' '.join(rest) or 'nothing'}"
        )
    path, config = _read_yaml("tokenize", options.config)
    from omegaconf import OmegaConf

    from streampack.tokenize import from_config, tokenize
    from streampack.training.overrides import with_overrides

    try:
        merged = with_overrides(config, values)
        tokenize(
            **from_config(OmegaConf.to_container(merged, resolve=True)),  # type: ignore[arg-type]
            out=options.out,
            workers=options.workers,
            lanes=options.lanes,
            dtype=options.dtype,
        )
    except (ValueError, ImportError, RuntimeError, OSError) as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 1
    return 0


def _read_yaml(command: str, config: str) -> tuple[Path, Any]:
    """(path, content) of a config that is named, or the path of."""
    path = our_files().get(config, Path(config))
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        names = [name for configs in RECIPES.values() for name in configs]
        raise UsageError(_unknown("config", config, names, rule=f"{LISTED} nor a YAML file"))

    _require_torchtune(command)
    import yaml
    from omegaconf import DictConfig, OmegaConf

    try:
        content = OmegaConf.load(path)
    except (yaml.YAMLError, OSError) as error:
        raise UsageError(f"{path} cannot be read as YAML: {error}") from None
    if not isinstance(content, DictConfig):
        raise UsageError(f"{path} holds a list; a config is a mapping of keys to values")
    return path, content


def _hand_over(command: str, rest: list[str]) -> int:
    """Let torchtune's CLI do it, with our recipes on top of its list."""
    _require_torchtune(command)
    from torchtune import _recipe_registry as registry
    from torchtune._cli.tune import TuneCLIParser

    if command == "ls":
        rest = [word for word in rest if word != "--all"]
    # torchtune looks for "--config" as a word of its own, and counts sys.argv to tell whether options of
    # torchrun's stand before the recipe.
    sys.argv = ["streampack", command]
    for word in rest:
        sys.argv += word.split("=", 1) if word.startswith("--config=") else [word]

    known = {recipe.name for recipe in registry.get_all_recipes()}
    files = our_files()
    registry._ALL_RECIPES[:0] = [
        registry.Recipe(
            name=name,
            file_path=str(files[name]),
            configs=[registry.Config(name=config, file_path=str(files[config])) for config in configs],
            supports_distributed=True,
        )
        for name, configs in RECIPES.items()
        if name not in known
    ]
    tune = TuneCLIParser()
    _speak_as_streampack(tune._parser)
    args = tune.parse_args()
    if command == "run":
        _check_run(args, registry)
    elif command == "cp":
        _check_cp(args, registry)
    if command != "run":
        tune.run(args)
        return 0
    from streampack.training.launcher import launch, silence_torchrun

    tracebacks = "--traceback" in args.recipe_args
    if not (tracebacks or args.max_restarts or args.rdzv_endpoint):
        silence_torchrun()
    return launch(lambda: tune.run(args), tracebacks=tracebacks)


def _require_torchtune(command: str) -> None:
    if importlib.util.find_spec("torchtune") is None:
        raise UsageError(
            f"`streampack {command}` needs torchtune, which is not installed: pip install 'streampack[tune]'"
        )
    # torchao 0.15 has no C++ extensions for torch 2.13, which only quantization would want, and says so.
    logging.getLogger("torchao").setLevel(logging.ERROR)


def _speak_as_streampack(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                sub.prog = f"streampack {name}"
                sub.usage = sub.usage and sub.usage.replace("tune ", "streampack ", 1)


def _check_run(args: argparse.Namespace, registry: Any) -> None:
    """Make of a recipe or config that torchtune would fail on, deep in runpy, one that works, or an error."""
    recipes = {recipe.name: recipe for recipe in registry.get_all_recipes()}
    if args.recipe not in recipes:
        file = next((f for f in (Path(args.recipe), Path(f"{args.recipe}.py")) if f.is_file()), None)
        if file is not None:
            # By path. torchtune would make a module name of it, which fails for an absolute path, and
            # in a folder called recipes/, where its own package of that name is found instead.
            recipe = registry.Recipe(
                name=args.recipe, file_path=str(file.resolve()), configs=[], supports_distributed=True
            )
            registry._ALL_RECIPES.append(recipe)
        elif not _is_module(args.recipe):
            raise UsageError(
                _unknown("recipe", args.recipe, recipes, rule=f"{LISTED} nor a Python file or module")
            )

    words = args.recipe_args
    fitting = recipes[args.recipe].configs if args.recipe in recipes else []
    if "--config" not in words or words[-1] == "--config":
        choice = " or ".join([*(config.name for config in fitting), "the path of a YAML file"])
        raise UsageError(f"recipe {args.recipe} needs --config with {choice}")
    config = words[words.index("--config") + 1]
    names = [config.name for recipe in recipes.values() for config in recipe.configs]
    if config not in names and not Path(config).is_file():
        raise UsageError(_unknown("config", config, names, rule=f"{LISTED} nor a file"))


def _check_cp(args: argparse.Namespace, registry: Any) -> None:
    names = [recipe.name for recipe in registry.get_all_recipes()]
    names += [config.name for recipe in registry.get_all_recipes() for config in recipe.configs]
    if args.file not in names:
        raise UsageError(
            _unknown("recipe or config", args.file, names, rule="`streampack ls --all` lists them")
        )
    source = our_files().get(args.file)
    if source is not None and args.destination.is_dir():
        args.destination /= source.name  # torchtune would write DESTINATION.yaml beside the folder


def _is_module(recipe: str) -> bool:
    """Whether torchtune, which turns slashes into dots and cuts an extension off, will find it."""
    name = os.path.splitext(recipe)[0].replace("/", ".")  # noqa: PTH122 - as torchtune does it
    sys.path.append(str(Path.cwd()))
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
    finally:
        sys.path.pop()


def _unknown(kind: str, value: str, known: Iterable[str], *, rule: str) -> str:
    """Say what is wrong with a name, what would be right, and what may have been meant.

    >>> _unknown("config", "quikstart", ["quickstart"], rule="`streampack ls` lists them")
    "unknown config 'quikstart': `streampack ls` lists them; did you mean 'quickstart'?"
    """
    close = difflib.get_close_matches(value, list(known), n=1)
    return f"unknown {kind} {value!r}: {rule}" + (
        f"; did you mean {close[0]!r}?" if close and close[0] != value else ""
    )
