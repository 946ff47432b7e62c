"""Runs of recipes that many tests look at, each made once a session in a folder that nobody changes; and kills."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.harness.tiny import lora_config, tiny_config

_runs: dict[str, Run] = {}


@dataclass(frozen=True)
class Run:
    """The folder of a run that is over, what the recipe returned, and what it printed."""

    folder: Path
    result: dict[str, Any]
    said: str

    def checkpoint(self, step: int) -> Path:
        return self.folder / "out" / "checkpoints" / f"step_{step:08}"

    def copy_to(self, folder: Path, *, newest: int | None = None) -> Path:
        """Copy the run; with ``newest``, as a kill behind that checkpoint leaves it, and without its log."""
        shutil.copytree(self.folder, folder, dirs_exist_ok=True)
        out = folder / "out"
        if newest is not None:
            for path in (out / "logs", out / "epoch_0", *sorted((out / "checkpoints").iterdir())):
                if path.parent == out or int(path.name[5:]) > newest:
                    shutil.rmtree(path)
            (out / "finished.json").unlink()
        return folder


def run_once(
    factory: pytest.TempPathFactory, name: str, train: Callable[[Any], dict[str, Any]], config_of: Any
) -> Run:
    """Train as ``config_of(folder)`` says, or return the run of this name that this session has made."""
    if name not in _runs:
        folder, said = factory.mktemp(name), io.StringIO()
        with contextlib.redirect_stdout(said):
            result = train(config_of(folder))
        _runs[name] = Run(folder, result, said.getvalue())
    return _runs[name]


def whole_run(factory: pytest.TempPathFactory) -> Run:
    """Twelve steps of full_finetune with checkpoints of the steps 4, 8 and 12, and a log of their rows."""
    from streampack_recipes.full_finetune import train

    return run_once(
        factory, "whole", train, lambda folder: tiny_config(folder, log_rows=True, keep_last_n_checkpoints=9)
    )


def lora_run(factory: pytest.TempPathFactory) -> Run:
    """Twenty steps of lora_finetune."""
    from streampack_recipes.lora_finetune import train

    return run_once(factory, "lora", train, lambda folder: lora_config(folder, max_steps=20))


class DyingFile(io.FileIO):
    """Writes half of the data before a kill point: at every 40th write, because torch.save makes hundreds."""

    point: Callable[[str], None]
    writes = 0

    def write(self, data: Any) -> int:
        data = bytes(data)
        super().write(data[: len(data) // 2])
        if self.writes % 40 == 0:
            DyingFile.point("write")
        self.writes += 1
        super().write(data[len(data) // 2 :])
        return len(data)


def die_at(number: int, journal: int) -> None:
    """Let this process end at the ``number``-th write, sync, rename or removal from now on.

    The kind of each is written to the file descriptor ``journal``.
    """
    passed = 0

    def point(kind: str) -> None:
        nonlocal passed
        passed += 1
        os.write(journal, f"{kind}\n".encode())
        if passed == number:
            os._exit(9)

    def watched(kind: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            point(kind)
            return function(*args, **kwargs)

        return call

    def open_file(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        return DyingFile(path, "w") if "w" in mode else opened(path, mode, *args, **kwargs)

    opened: Any = Path.open
    DyingFile.point = staticmethod(point)
    Path.open = open_file  # type: ignore[method-assign,assignment]
    os.fsync = watched("fsync", os.fsync)
    for name in ("rename", "mkdir", "unlink", "rmdir"):
        setattr(os, name, watched(name, getattr(os, name)))
    Path.rename = lambda path, target: os.rename(path, target)  # type: ignore[method-assign,assignment,return-value]  # noqa: PTH104
