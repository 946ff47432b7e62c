"""Ranks as processes forked from the test process, over gloo: no import of torchtune, so they start at once."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

KILLED = "killed"
"""The outcome of the rank that ``dies``."""


def run_ranks(
    size: int, job: Callable[..., Any], *args: Any, folder: Path, dies: int | None = None, timeout: float = 60
) -> list[Any]:
    """Call ``job(*args)`` in ``size`` forked ranks, and return what each returned.

    Fails if a rank hangs, or fails without being the one that ``dies``.
    """
    folder = folder / f"ranks-{len(list(folder.iterdir()))}"
    folder.mkdir()
    context = mp.get_context("fork")
    processes = [context.Process(target=_rank, args=(job, args, rank, size, folder)) for rank in range(size)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout
    try:
        for process in processes:
            process.join(max(0, deadline - time.monotonic()))
        hung = [rank for rank, process in enumerate(processes) if process.exitcode is None]
    finally:
        for process in processes:
            process.kill()
            process.join()
    outcomes: list[Any] = []
    for rank, process in enumerate(processes):
        file = folder / f"{rank}.result"
        well, value = (
            pickle.loads(file.read_bytes()) if file.exists() else (False, f"exit {process.exitcode}")
        )
        if rank == dies:
            assert not file.exists()
            assert process.exitcode == -signal.SIGKILL
            well, value = True, KILLED
        assert rank not in hung, f"rank {rank} hangs"
        assert well, f"rank {rank}: {value}"
        outcomes.append(value)
    return outcomes


def _rank(job: Callable[..., Any], args: tuple[Any, ...], rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)  # the threads of the process that forked are not here, and would be waited for
    try:
        store = dist.FileStore(str(folder / "store"), size)
        limit = timedelta(seconds=60)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
        value = job(*args)
        if dist.is_initialized():
            dist.barrier()  # whoever leaves early resets the connections of those that still read
            dist.destroy_process_group()
        outcome = (True, value)
    except BaseException:
        outcome = (False, traceback.format_exc())
    (folder / f"{rank}.part").write_bytes(pickle.dumps(outcome))
    (folder / f"{rank}.part").rename(folder / f"{rank}.result")
    os._exit(0)
