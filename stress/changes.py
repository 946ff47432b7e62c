"""Files, and sources of a mixture, that come and go between the stages of a run."""

from __future__ import annotations

import json
import random
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from streampack import IGNORE_INDEX, IterablePackedDataset, JSONLSource, Mix, ParquetSource, TokenShardSource
from streampack.sources.indexed import INDEX
from streampack.sources.token_files import FORMAT, VERSION, ShardWriter
from streampack.storage.folders import LocalFolder
from stress.corpus import (
    STRIDE,
    Corpus,
    Numbers,
    RankResult,
    Step,
    count_packs,
    global_steps,
    load_state,
    run_rank,
)
from stress.job import Run, job
from tests.harness.processes import RankPools

EPOCHS = 3
PER_FILE = 1000  # room for the numbers of a file's rows
SOURCES: dict[str, Callable[[Path], Any]] = {
    "jsonl": JSONLSource,
    "parquet": ParquetSource,
    "token shards": TokenShardSource,
}
Rows = dict[str, list[dict[str, int]]]  # of each file


@dataclass(frozen=True)
class Changing(Corpus):
    """A folder of files of one kind, or with ``mixed`` two of them in a mixture."""

    kind: str = "jsonl"
    mixed: bool = False

    def dataset(self) -> IterablePackedDataset:
        """See `Corpus.dataset`."""
        assert self.folder is not None
        names = ("a", "b") if self.mixed else ("a",)
        sources = [SOURCES[self.kind](Path(self.folder, name)) for name in names]
        mix = [{"name": n, "source": s, "weight": 1} for n, s in zip(names, sources, strict=True)]
        source = Mix(mix, stop="all_exhausted") if self.mixed else sources[0]
        return IterablePackedDataset(
            source,
            encoder=None if self.kind == "token shards" else Numbers(),
            epochs=EPOCHS,
            untrained="keep",
            corpus_changes="allow",
            corpus_lists=Path(self.folder, "lists"),
            **self.settings,
        )

    def put(self, files: Rows, name: str) -> None:
        """Write the files of a source, and nothing else, into its folder."""
        assert self.folder is not None
        folder = Path(self.folder, name)
        folder.mkdir(exist_ok=True)
        for path in folder.iterdir():
            path.unlink()
        if self.kind == "token shards":
            write_token_shards(folder, files)
            return
        for file, rows in files.items():
            if self.kind == "jsonl":
                Path(folder, f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            else:
                pq.write_table(pa.Table.from_pylist(rows), folder / f"{file}.parquet", row_group_size=9)


def write_token_shards(folder: Path, files: Rows) -> None:
    """Write a shard for each file, and the index of them in the order of their names."""
    encode, shards = Numbers(), []
    for file, rows in sorted(files.items()):
        writer = ShardWriter(LocalFolder(folder), f"{file}.bin", dtype="uint32")
        for row in rows:
            sample = encode(row)
            writer.append(sample.tokens, sample.labels != IGNORE_INDEX)
        shards.append(asdict(writer.close({})))
    Path(folder, INDEX).write_text(
        json.dumps({"format": FORMAT, "version": VERSION, "dtype": "uint32", "shards": shards})
    )


def resume(corpus: Changing, state: bytes | None, workers: int, steps: int | None) -> RankResult:
    """Run a stage in a rank, without the warning of what changed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the corpus changed")
        return run_rank(corpus, state, workers=workers, steps=steps)


def tokens_of(files: Iterable[list[dict[str, int]]], times: int = 1) -> Counter[int]:
    """Count the tokens of all rows ``times`` times."""
    rows = [row for of_file in files for row in of_file]
    return Counter({STRIDE * row["i"] + 1 + k: times for row in rows for k in range(row["n"])})


def found_in(steps: Iterable[Step]) -> Counter[int]:
    """Count the tokens of packs."""
    return Counter(token for step in steps for pack in step for token in pack.tokens)


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
            run.progress(number, points, "points")
            rng, numbers = random.Random(number), count()

            def rows(rng: random.Random = rng, numbers: Iterable[int] = numbers) -> list[dict[str, int]]:
                first = PER_FILE * next(iter(numbers))
                return [{"i": first + k, "n": rng.randint(1, 24)} for k in range(rng.randint(5, 60))]

            with tempfile.TemporaryDirectory() as name:
                settings = {
                    "max_seq_len": 24, "buffer_size": rng.choice([4, 16]), "num_lanes": 12,
                    "shuffle": number % 5 > 1, "shuffle_window": rng.choice([8, 100]), "seed": number,
                }  # fmt: skip
                kind, mixed = list(SOURCES)[number % 3], number % 4 > 1
                corpus = Changing([], name, settings, kind=kind, mixed=mixed)
                before = {f"f{i}": rows() for i in range(8)}
                other = {f"g{i}": rows() for i in range(4)}
                corpus.put(before, "a")
                corpus.put(other, "b")
                ranks = [rng.randint(1, 4) for _ in range(3)]
                stage = partial(resume, corpus)
                whole = global_steps(pools[ranks[0]].run(stage, None, 0, None))
                cut = rng.randrange(1, len(whole))
                begun = pools[ranks[0]].run(stage, None, rng.randint(0, 1), cut)
                state = begun[0].states[-1]
                now = {file: kept for file, kept in before.items() if file not in ("f2", "f5")}
                now |= {"f5": rows(), "e0": rows(), "z0": rows()}
                corpus.put(now, "a")
                ends = [pools[size].run(stage, state, rng.randint(0, 1), None) for size in ranks[1:]]
                check(corpus, before, now, other, global_steps(begun), global_steps(ends[0]), state)
                assert count_packs(global_steps(ends[0])) == count_packs(global_steps(ends[1])), "other packs"
                lanes = load_state(ends[0][0].states[-1])["lanes"]
                ledgers = [lane["ledger"] for lane in lanes.values()]
                dropped += sum(ledger[-1] for ledger in ledgers)
                sizes.append(len(state))
    assert dropped, "nothing waited of what was removed"
    return (
        f"{points} points, {dropped} samples dropped that waited; no token of a removed file after the resume, every "
        f"other once an epoch; on two topologies the same packs; states of 12 lanes at most {max(sizes):,} bytes"
    )


def check(
    corpus: Changing, before: Rows, now: Rows, other: Rows, first: list[Step], rest: list[Step], state: bytes
) -> None:
    """Check what came before and after the change."""
    kept = {file: rows for file, rows in before.items() if now.get(file) == rows}
    gone = tokens_of(rows for file, rows in before.items() if file not in kept)
    new = tokens_of(rows for file, rows in now.items() if file not in kept)
    early, late = found_in(first), found_in(rest)
    assert not late & gone, "tokens of a removed file came after the resume"
    assert not early & new
    if corpus.mixed:  # rows come at least once an epoch
        missing = tokens_of([*kept.values(), *other.values()]) - early - late
        assert not missing, f"{missing.total()} tokens lost"
        return
    epoch = max(lane["epoch"] for lane in load_state(state)["lanes"].values())
    for token in gone:
        assert epoch <= early[token] <= epoch + 1, (
            "a row of a removed file came twice in an epoch, or was missing"
        )
    total = early + late
    for token in gone:
        del total[token]
    expected = tokens_of(kept.values(), EPOCHS) + tokens_of(
        (rows for file, rows in now.items() if file not in kept), EPOCHS - 1 - epoch
    )
    lost, extra = expected - total, total - expected
    assert lost == extra == Counter(), f"{lost.total()} tokens lost, {extra.total()} too many"
