"""Files that are empty, damaged, of another kind, or gone in the middle of a run."""

from __future__ import annotations

import json
import random
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq

from streampack import IterablePackedDataset
from streampack.sources.bad_records import Quarantine
from streampack.sources.base import OTHER_RECORDS
from streampack.sources.files import FileSource
from streampack.sources.scan import scan
from streampack.storage.problems import GONE
from stress.changes import EPOCHS, PER_FILE, SOURCES, Changing, Rows, found_in, tokens_of
from stress.corpus import Numbers, RankResult, count_packs, global_steps, run_rank
from stress.job import Run, job, require_failure
from stress.servers import SlowWeb
from tests.harness.bad_shards import CASES, HARM, listed
from tests.harness.processes import RankPools

COLUMNS = ["i", "n"]
FILES = 14


def retype_column(path: Path) -> None:
    """Make a column of numbers one of text."""
    table = pq.read_table(path)
    pq.write_table(table.set_column(1, "n", table["n"].cast(pa.string())), path)


HARMS: Mapping[str, tuple[str, ...]] = {
    "jsonl": ("empty", "zeros", "gzip data", "gone"),
    "parquet": ("empty", "zeros", "no column", "no footer", "gone"),
}
RETYPED = "another schema"  # only a scan compares the schemas of files
DO: Mapping[str, Callable[[Path], Any]] = {**HARM, RETYPED: retype_column}
REASONS = {(kind, harm): reason for kind, harm, reason in CASES} | {
    ("parquet", RETYPED): "its column 'n' is string, and integer in most files"
}


@dataclass(frozen=True)
class Damaged(Changing):
    """A folder with files that cannot be read."""

    paths: str | tuple[str, ...] = ()  # on this machine or behind URLs; with a manifest, their folder
    manifest: str | None = None
    quarantine: str | None = None  # None: a file that cannot be read is an error

    def dataset(self) -> IterablePackedDataset:
        """See `Corpus.dataset`."""
        chosen: dict[str, Any] = {"columns": COLUMNS} if self.kind == "parquet" else {}
        return IterablePackedDataset(
            SOURCES[self.kind](self.paths, manifest=self.manifest, retries=1, timeout=10.0, **chosen),
            encoder=Numbers(),
            epochs=EPOCHS,
            untrained="keep",
            on_bad_record="error" if self.quarantine is None else "skip",
            quarantine=self.quarantine,
            **self.settings,
        )


def stage(corpus: Damaged, state: bytes | None = None, **options: Any) -> RankResult:
    """Run a stage in a rank, without the warning of what is left out."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* cannot be read and are left out")
        return run_rank(corpus, state, **options)


def resume_or_refusal(corpus: Damaged, state: bytes | None = None) -> RankResult | str:
    """Run a stage, and return its result or its error. Called in a rank."""
    try:
        return stage(corpus, state)
    except (ValueError, OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


@dataclass
class Counts:
    """What was seen in all cases."""

    bad: int = 0  # files
    resumed: int = 0
    lost: int = 0  # tokens of files that were gone in the middle of a run
    exact: int = 0  # resumes after a file was gone that gave the packs of the run without
    refused: int = 0


@job(
    "bad-shards",
    "files empty, zeros, of another schema, without column or footer, gone in mid-run: the rest comes, all are listed",
    limit=300,
)
def bad_shards(run: Run) -> str:
    """Damage files of a folder and of a web server, before a run and in the middle of it."""
    cases, counts = run.count(8, 2), Counts()
    with tempfile.TemporaryDirectory() as name, SlowWeb(Path(name)) as web:
        with RankPools() as pools:
            for number in range(cases):
                run.progress(number, cases, "cases")
                check_case(pools, Path(name, f"{number}"), web, number, counts)
        bugs: list[tuple[Any, str, Any, str]] = [
            (FileSource, "judge", lambda self, error, left: None, "while reading"),
            (Quarantine, "append", lambda self, lane, **entry: None, "the list has"),
        ]
        for number, (owner, attribute, bug, message) in enumerate(bugs):
            with patch.object(owner, attribute, bug), RankPools() as pools:
                folder = Path(name, f"bug-{number}")
                require_failure(lambda: check_case(pools, folder, web, 0, Counts()), message)  # noqa: B023
    assert counts.lost, "no file was gone before it was read"
    assert counts.exact, "no run went on after a file was gone"
    return (
        f"{cases} cases, files and HTTP, JSONL and Parquet, with a scan and without: {counts.bad} bad files, each "
        "listed with its reason, and named in one error where a scan knows and nothing is skipped; every other row "
        f"once an epoch; {counts.resumed} resumes identical; {cases} files gone in mid-run, {counts.lost:,} of their "
        f"tokens left out, {counts.exact} resumes after that identical, {counts.refused} refused as "
        "a waiting row was lost; with two bugs planted, the checks fail"
    )


def check_case(pools: RankPools, folder: Path, web: SlowWeb, number: int, counts: Counts) -> None:
    """Run one corpus whole, resumed, and with a file that is gone from some step on."""
    rng = random.Random(number)
    kind, remote, scanned = list(HARMS)[number % 2], number % 4 > 1, number % 8 > 3
    folder.mkdir()
    settings = {
        "max_seq_len": 24, "buffer_size": rng.choice([4, 16]), "num_lanes": 12, "shuffle": rng.random() < 0.7,
        "shuffle_window": rng.choice([8, 100]), "seed": number,
    }  # fmt: skip
    corpus = Damaged([], str(folder), settings, kind=kind)
    files: Rows = {
        f"f{i:02}": [{"i": PER_FILE * i + k, "n": rng.randint(1, 24)} for k in range(rng.randint(20, 60))]
        for i in range(FILES)
    }
    corpus.put(files, "data")
    harms = (*HARMS[kind], *[RETYPED] * (scanned and kind == "parquet"))
    bad = dict(zip(rng.sample(sorted(files), len(harms)), harms, strict=True))
    for file, harm in bad.items():
        DO[harm](folder / "data" / f"{file}.{kind}")
    reasons = {f"{file}.{kind}": REASONS[kind, harm] for file, harm in bad.items()}
    good = {file: rows for file, rows in files.items() if file not in bad}
    root = f"{web.url}/{folder.name}/data" if remote else str(folder / "data")
    paths = tuple(f"{root}/{file}.{kind}" for file in files)
    manifest = str(folder / "manifest")
    pools[1].run(
        partial(scan, out=manifest, columns=COLUMNS if kind == "parquet" else None, progress=False), paths
    )
    by_scan = replace(corpus, paths=root, manifest=manifest)
    corpus = by_scan if scanned else replace(corpus, paths=paths)
    [message] = pools[1].run(resume_or_refusal, by_scan)
    assert isinstance(message, str), "files that cannot be read are no error"
    unnamed = [
        file for file, reason in reasons.items() if f"{file}: " not in message or reason not in message
    ]
    assert not unnamed, f"{unnamed} are not named in {message}"

    first, *others = (rng.randint(1, 3) for _ in range(3))
    ran = partial(quarantined, corpus, pools, folder)
    whole = ran(first, "whole", reasons, None)
    steps = global_steps(whole)
    assert found_in(steps) == tokens_of(good.values(), EPOCHS), "other rows came than those of the good files"
    cut = rng.randrange(1, len(steps))
    begun = ran(first, "begun", None, None, workers=rng.randint(0, 1), steps=cut)
    for size in others:
        end = ran(size, "begun", reasons, begun[0].states[-1], workers=rng.randint(0, 1))
        both = count_packs(global_steps(begun) + global_steps(end))
        assert both == count_packs(steps), "a resume gives other packs"
    counts.bad, counts.resumed = counts.bad + len(bad), counts.resumed + len(others)

    # Gone in mid-run. Nothing is fetched ahead, or it might have been fetched before.
    corpus = replace(by_scan, settings={**settings, "read_ahead": 0})
    gone, at = rng.choice(sorted(good)), rng.randrange(1, len(steps) // 2)
    remove = partial(remove_after, at, folder / "data" / f"{gone}.{kind}")
    ran = partial(quarantined, corpus, pools, folder)
    reasons[f"{gone}.{kind}"] = GONE
    kept = str(folder / "bad-resumed")
    results = ran(first, "gone", reasons, None, every_state=True, after_step=remove)
    found = found_in(steps := global_steps(results))
    left = tokens_of([good.pop(gone)], EPOCHS)
    assert not found - tokens_of(good.values(), EPOCHS) - left, "rows came twice"
    assert Counter({token: found[token] for token in tokens_of(good.values())}) == tokens_of(
        good.values(), EPOCHS
    )
    counts.lost += sum((left - found).values())
    for size in others:
        begin = rng.randrange(at, len(steps))
        end = pools[size].run(resume_or_refusal, replace(corpus, quarantine=kept), results[0].states[begin])
        if refusals := [each for each in end if isinstance(each, str)]:
            assert len(refusals) == size, "only some ranks refuse a resume"
            told = [each for each in refusals if OTHER_RECORDS in each or f"{gone}.{kind}" in each]
            assert told, f"a resume is refused otherwise: {refusals}"
            counts.refused += 1
            continue
        assert count_packs(global_steps(end)) == count_packs(steps[begin:]), "a resume gives other packs"
        counts.exact += 1


def quarantined(
    corpus: Damaged,
    pools: RankPools,
    folder: Path,
    ranks: int,
    name: str,
    reasons: Mapping[str, str] | None,
    state: bytes | None,
    **options: Any,
) -> list[RankResult]:
    """Run a stage on so many ranks, and check the list of what was left out against ``reasons``, unless None."""
    kept = folder / f"bad-{name}"
    results: list[RankResult] = pools[ranks].run(
        partial(stage, **options), replace(corpus, quarantine=str(kept)), state
    )
    if reasons is not None:
        entries = listed(kept)
        files = {entry["shard"] for entry in entries}
        assert files == set(reasons), f"the list has {sorted(files)} and not {sorted(reasons)}"
        wrong = [entry for entry in entries if reasons[entry["shard"]] not in entry["reason"]]
        assert not wrong, f"the list has other reasons: {wrong}"
        for path in kept.iterdir():
            lines = [entry["shard"] for entry in map(json.loads, path.read_text().splitlines())]
            assert len(set(lines)) == len(lines), "a lane lists a file twice"
    return results


def remove_after(steps: int, path: Path, done: int) -> None:
    """Remove a file after so many steps."""
    if done == steps:
        path.unlink(missing_ok=True)
