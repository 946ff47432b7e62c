"""The torchrun that launched this rank: ranks find one another through its store, and end when it ends."""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

POLL_SECONDS = 0.5
"""Seconds between two checks of the launcher. A rank outlives it by about this time."""


def end_with_launcher() -> None:
    """End this process when torchrun ends, even if torchrun is killed with SIGKILL.

    torchrun starts every rank in a session of its own, so a signal to the process group of ``tune run`` or
    ``torchrun`` does not reach the ranks. Ranks of a killed launcher would train on, and write checkpoints beside the
    run that replaces them. A thread polls the parent's process id, because the kernel's PR_SET_PDEATHSIG would also
    fire when only the thread ends that started this process. A process that torchrun did not start is left alone: it
    may be meant to outlive the shell that did.

    Raises:
        ProcessLookupError: if the launcher has ended before this call.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = os.getppid()
    if _collects_orphans(launcher):
        raise ProcessLookupError("the torchrun that launched this rank was killed, and the rank ends with it")

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="end-with-launcher", daemon=True).start()


def _collects_orphans(parent: int) -> bool:
    """Return whether ``parent`` collects orphans: the system's first process, or a user's systemd.

    In a container, torchrun itself may be the first process. It is told apart by its executable, Python.
    """
    process = Path(f"/proc/{parent}")
    try:
        if parent != 1:
            return (process / "comm").read_text().strip() == "systemd"
        return "py" not in (process / "exe").readlink().name
    except OSError:  # there is no /proc, or the process belongs to another user
        return parent == 1


def open_store(rank: int, size: int, *, timeout: float) -> Store:
    """Return torchrun's store, in which the ranks find one another, with keys that no earlier attempt has used.

    When torchrun restarts ranks, it gives them the store of the ranks that died, and torch would read the addresses of
    dead ranks from it (https://github.com/pytorch/pytorch/issues/135712; with torch 2.13 a restart hangs). Nor does
    torchrun give all ranks of an attempt a common value that is new. So rank 0 draws a random prefix for the keys, and
    every other rank asks for it under a random name of its own. An answer to that name cannot be an old one.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    _require_store(address, port)
    store = TCPStore(address, port, size, False, timedelta(seconds=timeout))
    name = uuid.uuid4().hex
    if rank > 0:
        store.set(f"streampack/question/{rank}", name)
        answer: str = store.get(f"streampack/answer/{name}").decode()  # waits for rank 0
        store.set(f"streampack/{answer}/{rank}", "here")
        return PrefixStore(answer, store)
    missing = set(range(1, size))
    deadline = time.monotonic() + timeout
    while missing:
        if time.monotonic() > deadline:
            raise TimeoutError(f"ranks {sorted(missing)} of {size} did not join within {timeout:.0f} s")
        for other in sorted(missing):
            # The question may be of a dead rank, until the rank of this attempt overwrites it.
            if store.check([f"streampack/question/{other}"]):
                store.set(f"streampack/answer/{store.get(f'streampack/question/{other}').decode()}", name)
            if store.check([f"streampack/{name}/{other}"]):
                missing.remove(other)
        time.sleep(0.01)
    return PrefixStore(name, store)


def _require_store(address: str, port: int) -> None:
    """Raise at once if nothing listens at the store's address; torch would try to connect until its timeout.

    torchrun opens the store before it starts ranks, so a refused connection means that torchrun has ended.
    """
    try:
        socket.create_connection((address, port), timeout=10).close()
    except ConnectionRefusedError:
        raise ConnectionRefusedError(
            f"the torchrun that keeps the ranks' store at {address}:{port} has ended, and this rank ends with it"
        ) from None
    except OSError:  # other errors may pass, and torch tries again
        return
