"""Recipes started by `streampack run`: in this process, or by torchrun."""

from __future__ import annotations

import argparse
import logging
import runpy
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from streampack.catalog import NOT_LISTED, RECIPES, UsageError, config_file, our_files, unknown
from streampack.instantiate import trust


def trust_named(names: Iterable[str]) -> None:
    """Trust the packages and modules that a command line names."""
    try:
        trust(names)  # by a variable, which processes inherit
    except ValueError as error:
        raise UsageError(str(error)) from None


def run_recipe(words: Sequence[str]) -> int:
    """Run ``[TORCHRUN-OPTIONS] RECIPE --config CONFIG ...`` and return the exit status."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    parser.add_argument("--trust", action="append", default=[])
    options, words = parser.parse_known_args(words)  # wherever they stand
    recipe, *rest = words or [""]
    torchrun = None
    if recipe.startswith("-"):
        from torch.distributed.run import get_args_parser

        torchrun = get_args_parser().parse_args(words)
        recipe, rest = torchrun.training_script, torchrun.training_script_args
    named = (our_files().get(recipe, Path(recipe)), Path(f"{recipe}.py"))
    script = next((path.resolve() for path in named if path.suffix == ".py" and path.is_file()), None)
    if script is None:
        raise UsageError(unknown("recipe", recipe, RECIPES, rule=f"{NOT_LISTED} nor a Python file"))
    if options.config is None:
        choice = " or ".join([*RECIPES.get(recipe, ()), "the path of a YAML file"])
        raise UsageError(f"recipe {recipe} needs --config with {choice}")
    trust_named(options.trust)
    rest = ["--config", str(config_file(options.config)), *rest]
    if torchrun is None:
        sys.argv = [str(script), *rest]
        sys.path.insert(0, str(script.parent))  # as Python does, and torchrun
        runpy.run_path(str(script), run_name="__main__")
        return 0
    from torch.distributed.run import run

    torchrun.training_script, torchrun.training_script_args = str(script), rest
    tracebacks = "--traceback" in rest
    if not (tracebacks or torchrun.max_restarts or torchrun.rdzv_endpoint):
        for name in list(
            logging.root.manager.loggerDict
        ):  # it says that it ends the other ranks, for example
            if name.startswith("torch.distributed.elastic"):
                logging.getLogger(name).setLevel(logging.CRITICAL)
    return run_torchrun(partial(run, torchrun), tracebacks=tracebacks)


def run_torchrun(run: Callable[[], None], *, tracebacks: bool) -> int:
    """Run torchrun in this process and return its exit status, without its report of errors that ranks have printed.

    That report is a traceback of torchrun itself and a table of exit codes. torchrun's log is kept, because it tells of
    several machines and of restarts.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        stopped = failure.exitcode in (128 + signal.SIGINT, 128 + signal.SIGTERM)  # by a signal to a rank
        if tracebacks and not stopped:
            raise
        if failure.exitcode < 0:  # by a signal: it has not said why itself
            print(f"rank {rank} ended with exit code {failure.exitcode}: {failure.message}", file=sys.stderr)  # noqa: T201
        return failure.exitcode if stopped else 1
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0
