"""Several ranks on this machine, for tests: processes that join as torchrun's do, in a fraction of the time."""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

# Importing torchtune or transformers takes seconds, so one server does it and ranks are forked from it: unlike the test
# process, it has no threads and has run no model. What is not installed is left out.
_context = mp.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "streampack_recipes.full_finetune",
        "streampack_recipes.lora_finetune",
        "streampack_recipes.dpo",
        "streampack.integrations.hf_trainer",
        "transformers.trainer",
        "transformers.models.llama.modeling_llama",
        "accelerate",
        "datasets",
        "hypothesis",
        "pytest",
    ]
)


class RankError(AssertionError):
    """A rank failed; its traceback, with the rank in front."""


def open_store() -> dist.TCPStore:
    """Where ranks meet; torchrun's agent has one, for all attempts of a run."""
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def run_ranks(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    store: dist.TCPStore | None = None,
    timeout: float = 120,
) -> list[Any]:
    """``function(*args)`` in ``size`` processes that are ranks of one another; what each returned.

    Raises:
        RankError: with the tracebacks of all that failed.
    """
    store = store or open_store()
    shared = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # so the port is ours before anyone needs it
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(size),
    }
    with tempfile.TemporaryDirectory() as folder:
        results = [Path(folder) / f"{rank}" for rank in range(size)]
        processes = [
            _context.Process(
                target=_rank,
                args=(function, args, shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, results[rank]),
            )
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout)
        hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
            process.join()
        outcomes = [
            pickle.loads(path.read_bytes())
            if path.exists()
            else (False, f"ended with exit code {process.exitcode}")
            for path, process in zip(results, processes, strict=True)
        ]
    failures = [f"rank {rank}: {value}" for rank, (well, value) in enumerate(outcomes) if not well]
    failures += [f"rank {rank} still ran after {timeout} s" for rank in hung]
    if failures:
        raise RankError("\n".join(failures))
    return [value for _, value in outcomes]


def start_process(function: Callable[..., Any], *args: Any) -> mp.process.BaseProcess:
    """Start one process that has imported torchtune already, for a test to kill."""
    process = _context.Process(
        target=_rank, args=(function, args, {"OMP_NUM_THREADS": "1"}, Path(os.devnull))
    )
    process.start()
    return process


def _rank(function: Callable[..., Any], args: tuple[Any, ...], env: dict[str, str], result: Path) -> None:
    gc.freeze()  # a collection would copy all that the server has imported
    os.environ.update(env)
    mp.set_start_method("fork", force=True)  # as in any process; else loaders' workers would import all anew
    with Path(os.devnull).open("w") as nowhere:
        sys.stderr = nowhere  # progress bars
        try:
            outcome = (True, function(*args))
        except BaseException:
            outcome = (False, traceback.format_exc())
    result.with_suffix(".part").write_bytes(pickle.dumps(outcome))
    result.with_suffix(".part").rename(result)
