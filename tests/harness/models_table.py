"""The tables of docs/guides/models.md: which families of models keep samples apart, with which attention.

Tests record outcomes with the fixture ``record_model``. In an ordinary run it is compared with the
page; `make models` collects it and writes the page's tables anew.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "models.md"
VARIABLE = "STREAMPACK_WRITE_TABLES"  # names the file in which records are collected
BACKENDS = ("dense", "flex", "varlen", "flash")
EVERY = "every attention"  # instead of a backend, for a model that is refused
NUMBER = re.compile(r"\d(?:\.\d)?e-\d+")
LIMITS = {"logits": 1e-5, "gradients": 1e-5, "fp64": 1e-9}

BETWEEN = " · "  # the families of a row

Record = tuple[str, str, str, str]  # library, family, backend, outcome


def figures(**differences: float) -> str:
    """Format an outcome.

    >>> figures(logits=3.21e-7, gradients=4e-7, fp64=2e-16)
    'logits 3e-07, gradients 4e-07, fp64 2e-16'
    """
    return ", ".join(f"{name} {max(value, 1e-17):.0e}" for name, value in differences.items())


def over_the_limit(outcome: str) -> list[str]:
    """List the figures of an outcome that are over the limit.

    >>> over_the_limit("logits 3e-04, gradients 4e-07"), over_the_limit("refused: it leaks")
    (['logits 3e-04'], [])
    """
    found = re.findall(r"(\w+) (\d(?:\.\d)?e-\d+)", outcome)
    # Figures are rounded: one below its limit may be written as the limit.
    return [f"{name} {value}" for name, value in found if float(value) > LIMITS.get(name, 1e-5)]


def file_record(record: Record) -> None:
    """Collect a record, or compare it with the page."""
    record = without_name(record)
    collect = os.environ.get(VARIABLE)
    if collect:
        with Path(collect).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    elif PAGE.exists():
        library, family, backend, outcome = record
        written = read_page(PAGE.read_text(encoding="utf-8")).get((library, family, backend))
        assert shape(written or "nothing") == shape(outcome), (
            f"docs/guides/models.md says {written!r} of {library} {family} with {backend}, the test saw {outcome!r}; "
            "`make models` writes it anew"
        )


def without_name(record: Record) -> Record:
    """Say "it" in place of the family, so that families of one reason share a note.

    >>> without_name(("hf", "gpt2", "flex", "refused: hf has no flex attention for gpt2"))[3]
    'refused: hf has no flex attention for it'
    """
    library, family, backend, outcome = record
    return library, family, backend, re.sub(rf"(?<=[ ]){re.escape(family)}(?= |$)", "it", outcome)


def shape(outcome: str) -> str:
    """Remove the figures of an outcome, which differ between machines."""
    return NUMBER.sub("#", outcome)


def render(records: Iterable[Record]) -> dict[str, str]:
    """Library -> its tables in Markdown: families with the same outcomes by backends, who is refused, and why."""
    cells = {record[:3]: record[3] for record in records}
    tables = {}
    for library in sorted({library for library, _, _ in cells}):
        families = sorted({family for lib, family, _ in cells if lib == library})
        backends = [word for word in BACKENDS if any(key[0] == library and key[2] == word for key in cells)]
        reasons: list[str] = []
        rows: dict[tuple[str, ...], dict[str, list[str]]] = {}
        refused: dict[str, list[str]] = {}
        for family in families:
            if why := cells.get((library, family, EVERY)):
                refused.setdefault(why.removeprefix("refused: "), []).append(family)
                continue
            row = [_cell(cells.get((library, family, backend), ""), reasons) for backend in backends]
            rows.setdefault(tuple(map(shape, row)), {})[family] = row
        lines = [f"| families | {' | '.join(backends)} |", f"|---|{'---|' * len(backends)}"]
        for group in rows.values():
            worst = [_largest(column) for column in zip(*group.values(), strict=True)]
            lines.append(f"| {BETWEEN.join(group)} | {' | '.join(worst)} |")
        lines += ["", *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))]
        if refused:
            lines += ["", f"Refused with {EVERY}:", "", "| families | why |", "|---|---|"]
            lines += [f"| {BETWEEN.join(names)} | {why} |" for why, names in refused.items()]
        tables[library] = "\n".join(lines).strip()
    return tables


def _largest(outcomes: Sequence[str]) -> str:
    """Return outcomes of one shape as one, with the largest figures.

    >>> _largest(["logits 3e-07, gradients 4e-07", "logits 1e-07, gradients 6e-07"])
    'logits 3e-07, gradients 6e-07'
    """
    figures = zip(*map(NUMBER.findall, outcomes), strict=True)
    largest = iter([max(each, key=float) for each in figures])
    return NUMBER.sub(lambda _: next(largest), outcomes[0])


def _cell(outcome: str, reasons: list[str]) -> str:
    if not outcome.startswith("refused: "):
        return outcome
    reason = outcome.removeprefix("refused: ")
    if reason not in reasons:
        reasons.append(reason)
    return f"refused ({reasons.index(reason) + 1})"


def read_page(page: str) -> dict[tuple[str, str, str], str]:
    """(library, family, backend) -> outcome, back from what `render` made."""
    cells = {}
    for library, text in re.findall(r"<!-- table: (\w+) -->\n(.*?)<!-- end -->", page, re.DOTALL):
        reasons = dict(re.findall(r"^(\d+)\. (.*)$", text, re.MULTILINE))
        for line in text.splitlines():
            if not line.startswith("| "):
                continue
            names, *row = (cell.strip() for cell in line.strip("|").split("|"))
            if names == "families":
                columns = [EVERY if column == "why" else column for column in row]
                continue
            for backend, cell in zip(columns, row, strict=True):
                number = re.fullmatch(r"refused \((\d+)\)", cell)
                if number or backend == EVERY:
                    cell = f"refused: {reasons[number[1]] if number else cell}"
                if cell:
                    cells |= {(library, family, backend): cell for family in names.split(BETWEEN)}
    return cells


def write(page: str, tables: dict[str, str]) -> str:
    """The page with new tables."""
    for library, table in tables.items():
        page = re.sub(
            rf"(<!-- table: {library} -->\n).*?(<!-- end -->)",
            lambda found, table=table: f"{found[1]}\n{table}\n\n{found[2]}",  # type: ignore[misc]
            page,
            flags=re.DOTALL,
        )
    return page


def merged(page: str, records: Iterable[Record]) -> list[Record]:
    """The records of a page, with those of each family that was tried again in place of its old ones.

    >>> page = "<!-- table: hf -->\\n| families | dense | flex |\\n| a | refused (1) | 2e-7 |\\n1. leaks\\n<!-- end -->"
    >>> merged(page, [("hf", "a", "dense", "logits 1e-7")])
    [('hf', 'a', 'dense', 'logits 1e-7')]
    >>> merged(page, [("hf", "b", "dense", "logits 1e-7")])[0]
    ('hf', 'a', 'dense', 'refused: leaks')
    """
    records = list(records)
    again = {record[:2] for record in records}
    old = [(*key, outcome) for key, outcome in read_page(page).items() if key[:2] not in again]
    return [*old, *records]


def main() -> None:
    """Write the tables from the file of records named on the command line; with ``--some``, only those families'."""
    path, *options = sys.argv[1:]
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    records: list[Record] = [tuple(json.loads(line)) for line in lines]
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(write(page, render(merged(page, records) if options else records)), encoding="utf-8")
    print(f"{PAGE}: {len(lines)} records")


if __name__ == "__main__":
    main()
