"""The commands under benchmarks/ run, and compare like with like."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu.batches import samples_of, steps_of
from benchmarks.gpu.settings import CPU_PARTS
from benchmarks.paper import data

pytest.importorskip("torchtune")  # of the peers and the models
ROOT = Path(__file__).resolve().parents[2]

# A pattern of the rows that a command's smallest run must have, and their number.
COMMANDS = {
    "density --smoke --distributions flan": (r"exact_fit +\| +32 \| +0 \|", 1),
    "lanes --smoke": (r"100 +\| +1 \|", 3),
    "images --smoke": (r"exact_fit ", 9),
    "inputs --smoke": (r"streampack +\|", 4),
    "text --smoke": (r"BPE, `tokenizers` \| +(?:exact_fit|split_across_pack) ", 2),
    "straggling --smoke": (r"8,192 +\| +2 \| +64 \|", 1),
    "even_steps --smoke": (r"16 +\| +[\d.]+ \|", 1),
    "groups --smoke": (r"\d prompts x (?:2|8) answers ", 6),
    "scoring --smoke": (r"\d+ (?:texts|answers).* (?:0e\+00|\de-(?:0[5-9]|\d\d)) \|$", 8),
    "mixers --smoke": (r"(?:falcon_h1|lfm2) ", 2),
    "prefill --smoke": (r"(?:flan|orca|stack) ", 3),
    "scale --smoke": (r".* [-+]\d+% \|", 17),
    "gpu --device cpu --only flan probe": (r"(?:flan .* measured .*\d\.\d% |probe .* isolated)", 9),
    "paper --smoke --seeds 1": (r".* ± 0\.000 \|$", 16),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_runs(name: str, tmp_path: Path) -> None:
    row, count = COMMANDS[name]
    command = [sys.executable, "-W", "ignore", "-m", *f"benchmarks.{name} --out".split(), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(rf"^\| {row}", done.stdout, re.MULTILINE)) >= count, done.stdout
    assert not re.search("failed|changed the tokens", done.stdout), done.stdout
    assert list(tmp_path.iterdir()), "a result"


STACK = replace(CPU_PARTS["flan"], lengths="stack", max_seq_len=512, most_places=700)  # steps in parts


def rows_of(batch: Any) -> Any:
    """The tokens, labels and lengths of each row of a batch, or of torchtune's packs."""
    if isinstance(batch, list):
        return [(pack["tokens"], pack["labels"], pack["seq_lens"]) for pack in batch]
    return zip(batch.tokens, batch.labels, batch.seq_lens, strict=True)


@pytest.mark.parametrize("kind", ["padded", "grouped", "flattened", "packed", "wrapped", "stock"])
def test_every_row_of_make_gpu_trains_on_every_sample_and_counts_what_is_there(kind: str) -> None:
    samples = [sample["tokens"].tolist() for sample in samples_of(STACK)]
    found = []
    for step in steps_of(kind, samples_of(STACK), STACK):
        counted = np.zeros(3, int)
        for tokens, labels, seq_lens in chain(*map(rows_of, step.passes)):
            lengths = [n for n in seq_lens.tolist() if n]
            found += [part.tolist() for part in tokens.split(lengths) if part[0] != 0]
            real = tokens != 0  # no sample holds a 0, and all padding is 0
            counted += [real.sum(), len(tokens), (labels[1:] != -100).sum()]
        assert (step.tokens, step.places, step.trained) == tuple(counted)
    if kind == "wrapped":  # cut anywhere, but nothing lost and nothing moved
        assert [*chain(*found)] == [*chain(*samples)]
    else:
        assert sorted(found) == sorted(samples)


def test_the_floor_is_what_the_best_possible_model_needs() -> None:
    samples, nats = data.urns(np.array([5, 2, 40, 17, 40, 9]), seed=3)
    total = 0.0
    for sample in samples:  # what the docstring of `urns` says, one word at a time
        words = [token - data.START - 1 for token in sample["tokens"].tolist()[1:]]
        for i, word in enumerate(words):
            before = words[i - 1] + 1 if i else 0
            chance = data.MEMORY * data.language()[before, word] + words[:i].count(word)
            total -= math.log(chance / (data.MEMORY + i))
    assert nats == pytest.approx(total)
