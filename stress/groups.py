"""Groups, whose segments share prefixes: killed, resumed at every step and on other ranks, always whole."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

from stress.corpus import Corpus, check_coverage, global_steps, load_state, run_rank
from stress.job import Run, job
from stress.kills import kill_and_resume
from stress.topology import check_steps, common_steps, resume_from_each, run_stages
from tests.harness.processes import RankPools, Ranks

CHAINS = ((0, 1, 2, 3), (2, 0, 3, 1), (1, 2, 0, 2))  # workers of each stage


@job("groups", "groups: killed at 50 points, resumed at every step and on 4 -> 2 -> 3 -> 1 ranks", limit=600)
def groups(run: Run) -> str:
    """Every pack is checked as it is recorded: groups are whole, and their fields are at their tokens."""
    kills = run.count(50, 2)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = Corpus.make(max(900, kills * 110), folder=folder, epochs=3, balance_window=64, grouped=True)
        killed = kill_and_resume(run, corpus, folder, kills=kills)
    with tempfile.TemporaryDirectory() as name, Ranks(2) as ranks:
        corpus = Corpus.make(run.count(900, 200), folder=Path(name), epochs=2, grouped=True)
        whole = ranks.run(partial(run_rank, workers=2, every_state=True), corpus)
        steps = global_steps(whole)
        check_coverage(steps, corpus, epochs=2)
        for rank, found in enumerate(ranks.run(resume_from_each, corpus, whole[0].states, 3, timeout=220)):
            for number, (rest, _) in enumerate(found):
                assert rest == whole[rank].steps[number : number + 3], (
                    f"rank {rank}: other packs after step {number}"
                )
    stages = 0
    with tempfile.TemporaryDirectory() as name, RankPools() as pools:
        corpus = Corpus.make(144 * 30, folder=Path(name), epochs=2, num_lanes=144, grouped=True)
        reference, _, end = run_stages(pools, corpus, [(1, 0, None)], per_step=12)
        check_coverage(reference, corpus, epochs=2)
        same = common_steps(corpus, 12)
        assert same > 10, f"only {same} steps before a lane ends"
        for workers in CHAINS[: run.count(3, 1)]:
            counts = [same // 4 + 1, same // 4, same // 3, None]
            chain = list(zip((4, 2, 3, 1), workers, counts, strict=True))
            elastic, _, state = run_stages(pools, corpus, chain, per_step=12)
            check_steps(elastic, reference, same=same)
            assert load_state(state) == load_state(end)
            stages += len(chain)
    return f"{killed}; restored after each of {len(steps)} steps; {stages} stages on other ranks"
