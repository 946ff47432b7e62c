"""Rows and the tests marked gpu, each in a process with a time limit."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil

from benchmarks.gpu.machine import ROOT
from benchmarks.gpu.settings import Settings


def run_row(name: str, settings: Settings, *, device: str, limit: float) -> dict[str, Any] | None:
    """Measure a row in a process of its own; return its outcome, None if the time limit ended it."""
    job = {"row": name, "device": device, "settings": asdict(settings)}
    code, output = run(["-m", "benchmarks.gpu.row", json.dumps(job)], limit=limit)
    if code is None:
        return None
    try:
        outcome = json.loads(output.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        return {"outcome": f"failed: ended with exit code {code}"}
    return dict(outcome)


def gpu_tests() -> list[str]:
    """Return the files with a test marked gpu; others may import packages that the machine lacks."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in files if "mark.gpu" in path.read_text("utf-8")]


@cache
def code_digest() -> str:
    """Return a short hash of the code that the tests depend on; when it changes, a later call runs them again."""
    digest = hashlib.sha256()
    for folder in ("streampack", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def run_tests(file: str, *, limit: float) -> dict[str, Any] | None:
    """Run a file's tests marked gpu; return how many passed, failed and were skipped, and the failed ones' names."""
    with tempfile.TemporaryDirectory() as folder:
        seen = Path(folder) / "junit.xml"
        # Versions other than those of constraints.txt may warn of other things, which is no failure here.
        quiet = ["-q", "-W", "default", "-p", "no:cacheprovider"]
        begun = time.perf_counter()
        code, output = run(["-m", "pytest", "-m", "gpu", *quiet, f"--junitxml={seen}", file], limit=limit)
        seconds = time.perf_counter() - begun
        if code is None:
            return None
        if code not in (0, 1) or not seen.exists():
            lines = output.strip().splitlines() or ["no output"]
            return {"outcome": f"failed: pytest ended with exit code {code}: {lines[-1]}"}
        return {**count(seen.read_text("utf-8")), "seconds": seconds}


def count(junit: str) -> dict[str, Any]:
    """Count the tests of a JUnit report.

    >>> seen = count('<a><testcase name="x"/><testcase classname="t" name="y"><failure/></testcase></a>')
    >>> seen["outcome"], seen["passed"], seen["failures"]
    ('failed: 1 of 2 tests', 1, ['t::y'])
    """
    cases = list(ElementTree.fromstring(junit).iter("testcase"))
    skipped = [case for case in cases if case.find("skipped") is not None]
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    return {
        "outcome": f"failed: {len(failed)} of {len(cases)} tests" if failed else "measured",
        "passed": len(cases) - len(skipped) - len(failed),
        "failed": len(failed),
        "skipped": len(skipped),
        "failures": [f"{case.get('classname')}::{case.get('name')}" for case in failed],
    }


def run(arguments: Sequence[str], *, limit: float) -> tuple[int | None, str]:
    """Run Python with these arguments; return the exit code (None if the limit ended it) and standard output.

    It stays in this process's group, so that a signal to the group ends it too, and nothing is left on the GPU.
    """
    with subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            end(process)
            return None, ""
        except BaseException:
            end(process)
            raise
    return process.returncode, output


def end(process: subprocess.Popen[str]) -> None:
    """Kill a process and its children: the workers of torch.compile would keep the pipe open."""
    started = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for child in started:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(started, timeout=10)  # a kill takes a moment
