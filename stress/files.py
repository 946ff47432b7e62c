"""Files that come, go and change between the stages of a run, or that are empty, damaged, of another kind or gone."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from streampack import IGNORE_INDEX, Mix
from streampack.sources.formats.token_shards import FORMAT, VERSION, ShardWriter
from streampack.sources.mechanics.indexed import INDEX
from streampack.storage.folders import Folder
from stress.corpus import (
    SOURCES,
    Corpus,
    Files,
    Step,
    check_tokens,
    count_packs,
    found_in,
    global_steps,
    run_rank,
    tokens_of,
)
from stress.job import Run, job
from stress.topology import Case, Stage, cases
from tests.harness.corpus import Numbers, write
from tests.harness.files import CASES, HARM, listed
from tests.harness.processes import RankPools

EPOCHS = 3
PER_FILE = 1000  # room for the numbers of a file's rows
Rows = dict[str, list[dict[str, int]]]  # of each file


@dataclass(frozen=True)
class Changing(Files):
    """The files in ``folder/a``, or with ``mixed`` a mixture of them with those in ``folder/b``."""

    mixed: bool = False

    def source(self) -> Any:  # noqa: D102 - see Corpus
        a, b = (SOURCES[self.kind](f"{self.folder}/{name}") for name in "ab")
        if not self.mixed:
            return a
        entries = [{"name": "a", "source": a, "weight": 1}, {"name": "b", "source": b, "weight": 1}]
        return Mix(entries, stop="all_exhausted")


def put(folder: Path, kind: str, files: Rows) -> None:
    """Write the files of a source, and nothing else, into a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if kind == "token shards":
        write_token_shards(folder, files)
    for file, rows in files.items():
        if kind == "jsonl":
            write(folder / f"{file}.jsonl", rows)
        elif kind == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), folder / f"{file}.parquet", row_group_size=9)


def write_token_shards(folder: Path, files: Rows) -> None:
    """Write a shard for each file, and the index of them in the order of their names."""
    encode, shards = Numbers(), []
    for file, rows in sorted(files.items()):
        writer = ShardWriter(Folder(str(folder)), f"{file}.bin", dtype="uint32")
        for row in rows:
            sample = encode(row)
            writer.append(sample.tokens, sample.labels != IGNORE_INDEX)
        shards.append(asdict(writer.close({})))
    index = {"format": FORMAT, "version": VERSION, "dtype": "uint32", "shards": shards}
    Path(folder, INDEX).write_text(json.dumps(index))


def draw_files(rng: random.Random, names: Iterable[str], fewest: int, first: Iterable[int]) -> Rows:
    """Draw the rows of files, ``fewest`` to 60 each; ``first`` counts files."""
    return {
        name: [{"i": PER_FILE * number + k, "n": rng.randint(1, 24)} for k in range(rng.randint(fewest, 60))]
        for name, number in zip(names, first, strict=False)
    }


def draw_settings(rng: random.Random, number: int, *, shuffle: bool) -> dict[str, Any]:
    """Draw how files are read and packed."""
    return {
        "max_seq_len": 24, "buffer_size": rng.choice([4, 16]), "num_lanes": 12, "epochs": EPOCHS,
        "shuffle": shuffle * rng.choice([8, 100]) or False, "seed": number,
    }  # fmt: skip


@job(
    "changing-corpus",
    "files added, removed and changed at 40 random points, 1 to 4 ranks; JSONL, Parquet, token shards, and mixtures",
    limit=420,
)
def changing_corpus(run: Run) -> str:
    """Change the files between two stages; compare the second on two topologies, and count what came."""
    points, dropped, sizes = run.count(40, 6), 0, []
    with RankPools() as pools:
        for number in range(points):
            rng, numbers = random.Random(number), count()
            with tempfile.TemporaryDirectory() as name:
                settings = draw_settings(rng, number, shuffle=number % 5 > 1)
                settings["corpus_lists"] = Path(name, "lists")
                corpus = Changing([], name, settings, kind=list(SOURCES)[number % 3], mixed=number % 4 > 1)
                before = draw_files(rng, [f"f{i}" for i in range(8)], 5, numbers)
                other = draw_files(rng, [f"g{i}" for i in range(4)], 5, numbers)
                put(Path(name, "a"), corpus.kind, before)
                put(Path(name, "b"), corpus.kind, other)
                first, *others = (rng.randint(1, 4) for _ in range(3))
                whole = global_steps(pools[first].run(run_rank, corpus))
                options = {"workers": rng.randint(0, 1), "steps": rng.randrange(1, len(whole))}
                begun = pools[first].run(partial(run_rank, **options), corpus)
                state = begun[0].states[-1]
                now = {file: kept for file, kept in before.items() if file not in ("f2", "f5")}
                now |= draw_files(rng, ("f5", "e0", "z0"), 5, numbers)
                put(Path(name, "a"), corpus.kind, now)
                ends = [
                    pools[size].run(partial(run_rank, workers=rng.randint(0, 1)), corpus, state)
                    for size in others
                ]
                rest, again = map(global_steps, ends)
                check_change(
                    before, now, other if corpus.mixed else None, found_in(global_steps(begun)), rest
                )
                assert count_packs(rest) == count_packs(again), "other packs"
                dropped += sum(result.ledger.dropped_samples["removed"] for result in ends[0])
                sizes.append(len(state))
    assert dropped, "nothing waited of what was removed"
    return (
        f"{points} points, {dropped} samples dropped that waited; no token of a removed file after the resume, every "
        f"other once an epoch; on two topologies the same packs; states of 12 lanes at most {max(sizes):,} bytes"
    )


def check_change(
    before: Rows, now: Rows, mixed_with: Rows | None, early: Counter[int], rest: list[Step]
) -> None:
    """Check what came before and after the change."""
    kept = {file: rows for file, rows in before.items() if now.get(file) == rows}
    gone = tokens_of(rows for file, rows in before.items() if file not in kept)
    new = [rows for file, rows in now.items() if file not in kept]
    late = found_in(rest)
    assert not late & gone, "tokens of a removed file came after the resume"
    assert not early & tokens_of(new)
    if mixed_with is not None:  # rows come at least once an epoch
        missing = tokens_of([*kept.values(), *mixed_with.values()]) - early - late
        assert not missing, f"{missing.total()} tokens lost"
        return
    epoch = max(early.values()) - 1
    assert all(early[token] >= epoch for token in gone), "a row that was removed later was missing"
    total = early + late
    for token in gone:
        del total[token]
    check_tokens(total, tokens_of(kept.values(), EPOCHS) + tokens_of(new, EPOCHS - 1 - epoch))


HARMS: Mapping[str, tuple[str, ...]] = {
    "jsonl": ("empty", "zeros", "gzip data", "UTF-16 text", "gone"),
    "parquet": ("empty", "zeros", "no column", "no footer", "gone"),
}
REASONS = {(kind, harm): reason for kind, harm, reason in CASES}


@cases(
    "bad-shards",
    "files empty, zeros, of another kind or schema, without column or footer, or gone: the rest comes, all are listed",
    full=16, quick=4, limit=300,
)  # fmt: skip
def bad_files(number: int, folder: Path) -> Case:
    """Draw JSONL or Parquet files, some of them bad, named one by one or by a manifest."""
    rng = random.Random(number)
    kind, by_manifest = list(HARMS)[number % 2], number % 4 > 1
    settings = draw_settings(rng, number, shuffle=rng.random() < 0.7)
    settings["skip_bad"] = str(folder / "bad")
    files, data = draw_files(rng, [f"f{i:02}" for i in range(14)], 20, count()), folder / "data"
    put(data, kind, files)
    harms = HARMS[kind]
    bad = dict(zip(rng.sample(sorted(files), len(harms)), harms, strict=True))
    for file, harm in bad.items():
        HARM[harm](data / f"{file}.{kind}")
    paths = tuple(str(data / f"{file}.{kind}") for file in files)
    columns: dict[str, Any] = {"columns": ["i", "n"]} if kind == "parquet" else {}
    options = {"storage": {"timeout": 10.0}, **columns}
    if by_manifest:
        options["manifest"] = str(folder / "manifest")
        Path(options["manifest"]).write_text("".join(f"{file}.{kind}\n" for file in files))
    corpus = Files(
        [], None, settings, kind=kind, paths=str(data) if by_manifest else paths, options=options,
        good=[rows for file, rows in files.items() if file not in bad],
    )  # fmt: skip
    reasons = {f"{file}.{kind}": REASONS[kind, harm] for file, harm in bad.items()}
    stages = [Stage(rng.randint(1, 3), rng.randint(0, 1), steps) for steps in (rng.randint(1, 60), 20, None)]
    return Case(corpus, stages, judge=partial(check_list, reasons))


def check_list(reasons: Mapping[str, str], corpus: Corpus, state: bytes) -> None:
    """Check the list of the files that were skipped: each with its reason, and each part once by each lane."""
    folder = Path(corpus.settings["skip_bad"])
    entries = listed(folder)
    files = {Path(entry["path"]).name for entry in entries}
    assert files == set(reasons), f"the list has {sorted(files)} and not {sorted(reasons)}"
    wrong = [entry for entry in entries if reasons[Path(entry["path"]).name] not in entry["reason"]]
    assert not wrong, f"the list has other reasons: {wrong}"
    for path in folder.iterdir():
        found = [json.loads(line) for line in path.read_text().splitlines()]
        lines = [(line["path"], line["offset"]) for line in found]
        assert len(set(lines)) == len(lines), "a lane lists a part twice"
