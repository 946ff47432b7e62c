"""A plugin of pytest that plants the mutant of ``STREAMPACK_MUTANT``, or notes which tests run which (``all``)."""

from __future__ import annotations

import os

import pytest

from tests.mutants.registry import note_runs, plant, write_trace

if _name := os.environ.get("STREAMPACK_MUTANT"):
    note_runs() if _name == "all" else plant(_name)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write how long a test took and how it ended; xdist hands reports to the controlling process, too."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    if report.when == "call" or report.outcome != "passed":
        write_trace(f"{report.outcome} {report.duration:.3f} {report.nodeid}")
