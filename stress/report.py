"""The results of jobs: a JSON file, and a table in docs/reliability.md."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.report import cpu_count, cpu_model, versions
from stress.job import Job

RESULTS = Path(__file__).parent / "results.json"
PAGE = Path(__file__).resolve().parent.parent / "docs" / "reliability.md"
BEGIN, END = "<!-- stress: begin -->", "<!-- stress: end -->"


def machine_info() -> dict[str, str]:
    """Return the machine and the versions that a result came from."""
    return {
        "machine": f"{cpu_model()}, {cpu_count()} cores, {platform.system()}",
        "versions": f"Python {platform.python_version()}, {versions('torch', 'numpy')}",
    }


def read() -> dict[str, dict[str, Any]]:
    """Read the results of the last call, by job."""
    found: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return found


def write(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Write results to `RESULTS`."""
    RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


def table(results: Mapping[str, Mapping[str, Any]], jobs: Mapping[str, Job]) -> str:
    """Format the results as a Markdown table, with machine and date above it."""
    rows = ["| what it shows | what was done | time | result |", "|---|---|--:|---|"]
    for name, result in results.items():
        verdict = {True: "holds", False: "**fails**", None: "**not run**"}[result["holds"]]
        done = str(result["counts"]).replace("|", "/")
        shows = f"{jobs[name].shows} (`{name}`)"
        rows.append(f"| {shows} | {done} | {result['seconds']:.0f} s | {verdict} |")
    runs = sorted({f"{r['date']} · {r['machine']} · {r['versions']}" for r in results.values()})
    missing = [f"`{name}`" for name in jobs if name not in results]
    notes = [*runs, *([f"Not run yet: {', '.join(missing)}."] if missing else [])]
    return "\n\n".join([*notes, "\n".join(rows)])


def render(results: Mapping[str, Mapping[str, Any]], jobs: Mapping[str, Job]) -> None:
    """Write the table between the two markers of the page."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(results, jobs)}\n\n{END}{after}", encoding="utf-8")
