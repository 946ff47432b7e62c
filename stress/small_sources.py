"""A mixture with a source that is much smaller than the number of lanes."""

from __future__ import annotations

import gzip
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from streampack import IterablePackedDataset, JSONLSource, MapSource, Mix
from stress.corpus import Corpus, Numbers, count_packs, load_state
from stress.job import Run, job
from stress.topology import Stage, run_stages
from tests.harness.processes import RankPools

FIRST = 100_000  # number of the large source's first row


@dataclass(frozen=True)
class Mixture(Corpus):
    """``folder`` holds compressed files of a few rows; the rows of ``lengths`` are beside them in memory."""

    weight: float = 0.002

    def dataset(self) -> IterablePackedDataset:
        """See `Corpus.dataset`."""
        assert self.folder is not None
        small = JSONLSource(sorted(Path(self.folder).glob("*.gz")))
        large = MapSource([{"i": FIRST + i, "n": n} for i, n in enumerate(self.lengths)])
        mix = Mix(
            [
                {"name": "small", "source": small, "weight": self.weight},
                {"name": "large", "source": large, "weight": 1 - self.weight},
            ],
            stop="never",
        )
        return IterablePackedDataset(mix, encoder=Numbers(), epochs=None, untrained="keep", **self.settings)


@job(
    "small-sources",
    "2 compressed files of weight 0.002 beside a large source: no run ends, weights within 0.2 points, the same packs",
    limit=240,
)
def small_sources(run: Run) -> str:
    """Read 8 and 32 lanes on 4 ranks x 2 workers, and on other ranks and workers from the middle on."""
    per_step, steps = 16, run.count(125, 20)
    stages: list[Stage] = [(4, 2, steps // 2), (2, 1, steps // 4), (1, 3, steps - steps // 2 - steps // 4)]
    off = drawn = resumes = 0.0
    for rows in (200, 5, 1):  # in each of the two files
        for lanes in (8, 32):
            with tempfile.TemporaryDirectory() as name, RankPools() as pools:
                rng = np.random.default_rng(rows)
                for number in range(2):
                    lines = [{"i": rows * number + i, "n": int(rng.integers(4, 100))} for i in range(rows)]
                    text = "".join(json.dumps(line) + "\n" for line in lines)
                    Path(name, f"{number}.jsonl.gz").write_bytes(gzip.compress(text.encode()))
                settings = {
                    "max_seq_len": 256, "buffer_size": 16, "num_lanes": lanes, "shuffle": True, "shuffle_window": 32
                }  # fmt: skip
                corpus = Mixture(rng.integers(4, 200, 20_000).tolist(), name, settings)
                whole, _, state = run_stages(pools, corpus, [(4, 2, steps)], per_step=per_step)
                assert [len(step) for step in whole] == [per_step] * steps, "null packs: a lane has ended"
                resumed, _, end = run_stages(pools, corpus, stages, per_step=per_step)
                for step, (one, other) in enumerate(zip(whole, resumed, strict=True)):
                    assert count_packs([one]) == count_packs([other]), f"other packs in step {step}"
                assert load_state(end) == load_state(state), "the last states differ"
                dataset = corpus.dataset()
                dataset.load_state_dict(load_state(state))
                small, large = dataset.source_stats().values()
                off = max(off, abs(small.trained / (small.trained + large.trained) - corpus.weight))
                drawn += small.samples
                resumes += len(stages) - 1
                run.progress(int(resumes), 12, "resumes")
                assert small.trained > 0, "the small source gave nothing"
                assert off < 0.002, f"its fraction is {off:.4f} from its weight"
    return (
        f"8 and 32 lanes, files of 200, 5 and 1 rows: 6 runs of {steps * per_step:,} packs on 4 ranks x 2 workers, "
        f"{int(drawn)} rows of the small source, its fraction at most {100 * off:.2f} points from its weight; "
        f"{int(resumes)} resumes on 2 x 1 and 1 x 3, the packs and the last states identical"
    )
