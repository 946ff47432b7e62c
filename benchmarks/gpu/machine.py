"""Device and versions: ``python -m benchmarks.gpu.machine cuda`` prints them as JSON.

This runs in a process of its own, because a process that initialises CUDA holds half a gigabyte of the device.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import TypedDict

from benchmarks import report

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "triton", "torchtune", "torchao", "transformers", "flash-attn", "flash-attn-4")


class Machine(TypedDict):
    """The machine that a row was measured on."""

    device: str
    torch: str
    about: str  # memory, system and versions


def describe(device: str) -> Machine:
    """Describe the device that torch calls ``device``.

    Raises:
        ValueError: if it is ``"cuda"`` and torch sees none.
    """
    import torch

    if device == "cpu":
        name, memory = f"{report.cpu_model()}, {report.cpu_count()} cores", ""
    elif torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(device)
        name, memory = (
            properties.name,
            f"{properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda} · ",
        )
    else:
        raise ValueError(
            f"torch {torch.__version__} sees no CUDA device; run it where there is one, or set DEVICE=cpu"
        )
    system = f"{platform.system()} · Python {platform.python_version()}"
    return Machine(
        device=name, torch=torch.__version__, about=f"{memory}{system}, {report.versions(*PACKAGES)}"
    )


def ask(device: str) -> Machine:
    """Run `describe` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.gpu.machine", device]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(run.stderr.strip().splitlines()[-1])
    found: Machine = json.loads(run.stdout)
    return found


if __name__ == "__main__":
    print(json.dumps(describe(sys.argv[1])))
