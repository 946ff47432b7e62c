"""The results of jobs: a JSON file, and a table in docs/reliability.md."""

from __future__ import annotations

import json
import platform
import re
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


def table(results: Mapping[str, Mapping[str, Any]], jobs: Mapping[str, Job], *, page: str = "") -> str:
    """Format the results, by job, as a Markdown table, with machine and date above it.

    ``page`` has an earlier table, from another checkout maybe: rows of jobs that have no result now are kept.
    """
    earlier = {
        found[1]: found[0] for found in re.finditer(r"^\|.*\(`([\w-]+)`\) \|.*\|$", page, re.MULTILINE)
    }
    rows = ["| what it shows | what was done | time | result |", "|---|---|--:|---|"]
    for name in jobs:
        if (result := results.get(name)) is None:
            rows += [earlier[name]] if name in earlier else []
            continue
        verdict = {True: "holds", False: "**fails**", None: "**not run**"}[result["holds"]]
        done = str(result["counts"]).replace("|", "/")
        rows.append(f"| {jobs[name].shows} (`{name}`) | {done} | {result['seconds']:.0f} s | {verdict} |")
    runs = {f"{r['date']} · {r['machine']} · {r['versions']}" for r in results.values()}
    if any(name not in results for name in earlier):
        runs |= set(re.findall(r"^\d{4}-\d\d-\d\d · .*$", page, re.MULTILINE))
    missing = [f"`{name}`" for name in jobs if name not in results and name not in earlier]
    notes = [*sorted(runs), *([f"Not run yet: {', '.join(missing)}."] if missing else [])]
    return "\n\n".join([*notes, "\n".join(rows)])


def render(results: Mapping[str, Mapping[str, Any]], jobs: Mapping[str, Job]) -> None:
    """Write the table between the two markers of the page."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    earlier, after = rest.split(END)
    made = table(results, jobs, page=earlier)
    PAGE.write_text(f"{before}{BEGIN}\n\n{made}\n\n{END}{after}", encoding="utf-8")
