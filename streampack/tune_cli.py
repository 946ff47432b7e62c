"""torchtune's own command line, with our recipes on top of its list."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from streampack.catalog import NOT_LISTED, RECIPES, UsageError, our_files, unknown


def require_torchtune(command: str) -> None:
    """Raise UsageError without torchtune; with it, keep torchao from complaining when it is imported."""
    if importlib.util.find_spec("torchtune") is None:
        raise UsageError(
            f"`streampack {command}` needs torchtune, which is not installed: pip install 'streampack[tune]'"
        )
    # torchao 0.15 has no C++ extensions for torch 2.13, which only quantization would want, and says so.
    logging.getLogger("torchao").setLevel(logging.ERROR)


def hand_over(command: str, words: Sequence[str]) -> int:
    """Let torchtune's command line run ``ls``, ``cat`` or ``run``."""
    registry = registry_with_ours(command)
    from torchtune._cli.tune import TuneCLIParser

    # torchtune looks for "--config" as a word of its own, and counts sys.argv to tell whether options of
    # torchrun's stand before the recipe.
    sys.argv = ["streampack", command]
    for word in words:
        sys.argv += word.split("=", 1) if word.startswith("--config=") else [word]
    tune = TuneCLIParser()
    args = tune.parse_args()
    if command != "run":
        tune.run(args)
        return 0
    _check_run(args, registry)

    tracebacks = "--traceback" in args.recipe_args
    if not (tracebacks or args.max_restarts or args.rdzv_endpoint):
        silence_torchrun()
    return run_torchrun(lambda: tune.run(args), tracebacks=tracebacks)


def run_torchrun(run: Callable[[], None], *, tracebacks: bool) -> int:
    """Run torchrun in this process and return its exit status, without its report of errors that ranks have printed.

    That report is a traceback of torchrun itself and a table of exit codes. torchrun's log is kept, because it tells of
    several machines and of restarts.

    Args:
        run: calls torchrun.
        tracebacks: let torchrun print its report.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run()
    except ChildFailedError as error:
        if tracebacks:
            raise
        rank, failure = error.get_first_failure()
        if not Path(failure.error_file).is_file():  # it has reported no error; perhaps the system killed it
            print(f"rank {rank} ended with exit code {failure.exitcode}: {failure.message}", file=sys.stderr)  # noqa: T201
        stopped = failure.exitcode in (128 + signal.SIGINT, 128 + signal.SIGTERM)  # by a signal to a rank
        return failure.exitcode if stopped else 1
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def silence_torchrun() -> None:
    """Keep torchrun's warnings and errors, such as that it terminates ranks, out of the log."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def theirs(name: str) -> Path:
    """Return the file of a recipe or config of torchtune's.

    Raises:
        UsageError: if there is none of this name.
    """
    registry = registry_with_ours("cp")
    import torchtune

    # Our recipes and configs are listed with absolute paths, which joining them to this folder does not change.
    recipes: Path = Path(torchtune.__file__).parent.parent / "recipes"
    files: dict[str, Path] = {
        recipe.name: recipes / recipe.file_path for recipe in registry.get_all_recipes()
    }
    for recipe in registry.get_all_recipes():
        files |= {config.name: recipes / "configs" / config.file_path for config in recipe.configs}
    if name not in files:
        raise UsageError(unknown("recipe or config", name, files, rule="`streampack ls --all` lists them"))
    return files[name]


def registry_with_ours(command: str) -> Any:
    """Return torchtune's list of recipes, with ours in front."""
    require_torchtune(command)
    from torchtune import _recipe_registry as registry

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
    return registry


def _check_run(args: argparse.Namespace, registry: Any) -> None:
    """Register a recipe that is given by path; raise UsageError for words that torchtune would fail on in runpy."""
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
                unknown("recipe", args.recipe, recipes, rule=f"{NOT_LISTED} nor a Python file or module")
            )

    words = args.recipe_args
    fitting = recipes[args.recipe].configs if args.recipe in recipes else []
    if "--config" not in words or words[-1] == "--config":
        choice = " or ".join([*(config.name for config in fitting), "the path of a YAML file"])
        raise UsageError(f"recipe {args.recipe} needs --config with {choice}")
    config = words[words.index("--config") + 1]
    names = [config.name for recipe in recipes.values() for config in recipe.configs]
    if config not in names and not Path(config).is_file():
        raise UsageError(unknown("config", config, names, rule=f"{NOT_LISTED} nor a file"))


def _is_module(recipe: str) -> bool:
    """Return whether torchtune, which turns slashes into dots and cuts an extension off, will find a module."""
    name = os.path.splitext(recipe)[0].replace("/", ".")  # noqa: PTH122 - as torchtune does it
    sys.path.append(str(Path.cwd()))
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
    finally:
        sys.path.pop()
