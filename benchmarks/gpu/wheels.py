"""The packages that a GPU machine without network lacks, as a folder of wheels that one copies there.

``python -m benchmarks.gpu.wheels fetch`` fills it where there is network, ``install`` adds to the running Python
what it lacks. The machine brings a torch, of its own driver's CUDA, and what comes with it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from benchmarks.gpu.machine import ROOT

WHEELS = ROOT / "wheels"
SITE = ROOT / ".site-gpu"

# What `import torchtune`, the tests marked gpu and the benchmark need besides torch, transformers and what those
# bring; versions from constraints.txt.
PACKAGES = (
    *(
        "torchtune",
        "torchao",
        "torchdata",
        "omegaconf",
        "datasets",
        "dill",
        "multiprocess",
        "xxhash",
        "kagglehub",
    ),
    *("kagglesdk", "blobfile", "pycryptodomex", "lxml", "sentencepiece", "tiktoken", "psutil"),
    *("pytest", "hypothesis", "sortedcontainers"),
)
# torchtune 0.6.1 runs with these versions only; of the others, what a machine has will do.
EXACT = ("torchtune", "torchao", "torchdata")
# pip takes a wheel for exactly the platforms that are named.
PLATFORMS = ["manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64"] + [
    f"manylinux_2_{minor}_x86_64" for minor in range(5, 40)
]


def fetch(python: str, *, folder: Path) -> list[Path]:
    """Fill ``folder`` with wheels for that version of Python on x86-64 Linux, and nothing else."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--implementation", "cp", "--python-version", python, "-c", str(ROOT / "constraints.txt")]
    command += [argument for platform in PLATFORMS for argument in ("--platform", platform)]
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as fresh:
        subprocess.run([*command, "-d", fresh, *PACKAGES], check=True)
        for old in folder.glob("*.whl"):  # two versions of a package would stop the installation
            old.unlink()
        return [wheel.rename(folder / wheel.name) for wheel in sorted(Path(fresh).glob("*.whl"))]


def lacking(wheels: Sequence[Path]) -> list[Path]:
    """The wheels whose package the running Python has not, or not in the version that is needed."""
    missing = []
    for wheel in wheels:
        name, version = wheel.name.split("-")[:2]
        try:
            there = metadata.version(name)
        except metadata.PackageNotFoundError:
            there = None
        if there is None or (name in EXACT and there != version):
            missing.append(wheel)
    return missing


def install(*, folder: Path, site: Path) -> list[Path]:
    """Put what is lacking into ``site``, for PYTHONPATH. Returns the wheels that were.

    Not a virtual environment: made from one (and a machine's torch often lives in one), it would not see that torch.
    """
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise SystemExit(
            f"no wheels in {folder}; run `make wheels` where there is network and copy the folder here"
        )
    missing = lacking(wheels)
    if missing:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--upgrade"]
        subprocess.run([*command, "--target", str(site), *map(str, missing)], check=True)
    return missing


def main(arguments: Sequence[str] | None = None) -> None:
    """The two commands."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.wheels", description=__doc__)
    parser.add_argument("command", choices=["fetch", "install"])
    parser.add_argument("--python", default="3.12", help="the GPU machine's version (%(default)s)")
    options = parser.parse_args(arguments)
    done = (
        fetch(options.python, folder=WHEELS)
        if options.command == "fetch"
        else install(folder=WHEELS, site=SITE)
    )
    size = sum(wheel.stat().st_size for wheel in done) / 2**20
    print(f"{options.command}: {len(done)} wheels, {size:.1f} MiB")


if __name__ == "__main__":
    main()
