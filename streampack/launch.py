"""`streampack run`: a recipe in this process, or in the processes that torchrun starts."""

from __future__ import annotations

import argparse
import logging
import runpy
import signal
import sys
from pathlib import Path

from streampack.catalog import UsageError, file_of, require_installed, scripts


def run(options: argparse.Namespace) -> int:
    """Train; torchrun's options, such as --nproc_per_node 2, go before RECIPE.

    streampack run [TORCHRUN-OPTIONS] RECIPE --config CONFIG [KEY=VALUE ...] [--traceback]
    streampack run full_finetune --config quickstart max_steps=3
    streampack run --nproc_per_node 2 full_finetune --config my.yaml
    """
    require_installed("torchtune", "tune")
    if not options.words:
        raise UsageError("name a recipe, and a config: streampack run RECIPE --config CONFIG")
    import torch.distributed.run as torchrun

    launch = torchrun.get_args_parser().parse_args(options.words)
    recipe, known = launch.training_script, scripts()
    if recipe not in known and Path(f"{recipe}.py").is_file():
        recipe += ".py"
    script = str(file_of("recipe", recipe, known).resolve())
    if options.words[0] != launch.training_script:  # options of torchrun
        launch.training_script = script
        return _run_ranks(launch)
    sys.argv = [script, *launch.training_script_args]
    sys.path.insert(0, str(Path(script).parent))  # as Python does, and torchrun
    runpy.run_path(script, run_name="__main__")
    return 0


def _run_ranks(launch: argparse.Namespace) -> int:
    """Run torchrun in this process and return the exit status, that of the rank which failed first.

    Without torchrun's report, a traceback of its own and a table of exit codes: ranks have printed their errors.
    """
    import torch.distributed.run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    tracebacks = "--traceback" in launch.training_script_args
    try:
        if not (tracebacks or launch.max_restarts or launch.rdzv_endpoint):
            logging.disable(logging.ERROR)  # torchrun says, for example, that it ends the other ranks
        torchrun.run(launch)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if tracebacks and failure.exitcode not in (128 + signal.SIGINT, 128 + signal.SIGTERM):
            raise
        if failure.exitcode < 0:  # by a signal: it has not said why itself
            print(f"rank {rank} ended with exit code {failure.exitcode}: {failure.message}", file=sys.stderr)
        return max(failure.exitcode, 1)
    except SignalException as error:
        return 128 + int(error.sigval)
    finally:
        logging.disable(logging.NOTSET)
    return 0
