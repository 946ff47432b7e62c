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
import torch

from benchmarks import groups, model
from benchmarks.gpu.batches import samples_of, steps_of
from benchmarks.gpu.settings import CPU_PARTS
from benchmarks.journal import Journal
from benchmarks.paper import data, tables
from benchmarks.paper.settings import SMOKE

ROOT = Path(__file__).resolve().parents[2]

COMMANDS = {  # options, and a pattern of the rows that must be there, with their number
    "density": ("--smoke --distributions flan", r"exact_fit +\| +32 \| +0 \|", 1),
    "inputs": ("--smoke", r"streampack +\|", 4),
    "text": ("--smoke", r"BPE, `tokenizers` \| +(?:exact_fit|split_across_pack) ", 2),
    "straggling": ("--smoke", r"8,192 +\| +2 \| +64 \|", 1),
    "even_steps": ("--smoke", r"16 +\| +[\d.]+ \|", 1),
    "groups": ("--smoke", r"\d prompts x (?:2|8) answers ", 6),
    "scoring": (
        "--smoke",
        r"\d+ (?:texts|answers).* (?:0e\+00|\de-(?:0[5-9]|\d\d)) \|$",
        8,
    ),  # small differences
    "mixers": ("--smoke", r"(?:falcon_h1|lfm2) ", 2),
    "prefill": ("--smoke", r"(?:flan|orca|stack) ", 3),
    "balance_loss": ("--smoke", r"(?:docstrings|sources) ", 8),
    "scale": ("--smoke", r".* [-+]\d+% \|", 17),
    "gpu": ("--device cpu --fresh --only flan-256", r".* \d+\.\d% \| +\d+ \|", 7),
    "paper": ("--smoke --seeds 1 --fresh", r".* ± 0\.000 \|$", 16),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_runs(name: str, tmp_path: Path) -> None:
    options, row, count = COMMANDS[name]
    command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.{name}", *options.split()]
    command += ["--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(rf"^\| {row}", done.stdout, re.MULTILINE)) >= count, done.stdout
    assert "changed the tokens" not in done.stdout
    assert "failed" not in done.stdout
    assert list(tmp_path.iterdir())


def test_padded_groups_hold_every_answer_behind_its_prompt() -> None:
    made = groups.make_groups(5, answers=2, prompt=20, answer=10)
    rows = [row[row > 0].tolist() for tokens, _ in groups.padded(made, rows=4) for row in tokens]
    assert rows == [
        each.unshared().tokens[start:stop].tolist() for each in made for start, stop in each.unshared().bounds
    ]


# `make gpu`: all rows train on the same samples, and what they count is what is there.


@pytest.mark.parametrize("kind", ["padded", "grouped", "flattened", "packed", "wrapped", "stock"])
def test_every_sample_is_batched_once_and_counted(kind: str) -> None:
    settings = replace(
        CPU_PARTS["flan-256"], lengths="stack", max_seq_len=512, most_places=700
    )  # steps in parts
    samples = [sample["tokens"].tolist() for sample in samples_of(settings)]
    steps = steps_of(kind, samples_of(settings), settings)
    found = []
    for step in steps:
        packs: Any = chain(*step.passes) if kind == "stock" else None
        rows = packs or [
            {"tokens": batch.tokens[i], "labels": batch.labels[i], "seq_lens": batch.seq_lens[i]}
            for batch in step.passes
            for i in range(len(batch.tokens))
        ]
        tokens = places = pairs = trained = 0
        for row in rows:
            lengths = [n for n in row["seq_lens"].tolist() if n]
            found += [part.tolist() for part in row["tokens"].split(lengths) if part[0] != 0]
            real = row["tokens"] != 0  # no sample holds a 0, and all padding is 0
            segments = torch.tensor([len(real)] if kind == "wrapped" else lengths)
            number = torch.arange(len(segments)).repeat_interleave(segments)
            sees = (number[:, None] == number[None, :]).tril()
            tokens += int(real.sum())
            places += len(real)
            pairs += int((sees & real[:, None] & real[None, :]).sum())
            trained += int((row["labels"][1:] != -100).sum())
        assert (step.tokens, step.places, step.pairs, step.trained) == (tokens, places, pairs, trained)
    if kind == "wrapped":  # cut anywhere, but nothing lost and nothing moved
        assert [*chain(*found)] == [*chain(*samples)]
    else:
        assert sorted(found) == sorted(samples)


def test_flops_equal_torchs_count() -> None:
    pytest.importorskip("torchtune")
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    sizes = {"num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 32, "intermediate_dim": 48}
    shape = model.Shape(vocab_size=50, **sizes)
    with torch.random.fork_rng():
        built = shape.build(device="cpu", dtype="fp32", seed=0)
    counter = FlopCounterMode(display=False)
    # MATH multiplies whole squares: 16 x 16 pairs in each of two rows.
    with counter, sdpa_kernel(SDPBackend.MATH):
        torch.cat(built(torch.ones(2, 16, dtype=torch.int64)), 1).sum().backward()
    flops = counter.get_total_flops()
    assert flops == shape.train_flops(tokens=32, pairs=2 * 16 * 16)
    given = {"tokens": 32, "pairs": 2 * 16 * 16, "seconds": 2.0}
    assert model.utilization(shape, **given, device="NVIDIA H200") == flops / 2 / 989e12
    assert model.utilization(shape, **given, device="a toaster") is None


def test_the_journal_keeps_the_last_row_of_a_key(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "new" / "gpu.jsonl")
    key = {"device": "GPU", "torch": "2", "part": "flan-256", "settings": "abc"}
    for row, value in (("padding", 1), ("varlen", 2), ("padding", 3)):
        journal.add({**key, "row": row, "value": value})
    assert [row["value"] for row in Journal(journal.path).rows.values()] == [3, 2]


# `make paper`: the lowest possible loss, the findings, and the figures of docs/guides/methods.md.


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


LOSSES = {
    "samples/random_padding": 3.0, "samples/minibatch_packing": 3.05, "wide/fixed_length": 3.7,
    "wide/fixed_length_posid": 3.4, "narrow/fixed_length_posid": 3.2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "not_shown"),
    [
        ({}, []),
        ({"samples/minibatch_packing": 3.11}, [0]),
        ({"wide/fixed_length": 3.39}, [1]),
        ({"narrow/fixed_length_posid": 3.41}, [2]),
    ],
    ids=str,
)
def test_the_findings_are_shown_by_figures_that_show_them(changes: Any, not_shown: list[int]) -> None:
    done = [
        {
            "part": "flan", "row": name, "seed": seed, "outcome": "measured", "samples": 48, "rows": 48, "steps": 6,
            "batch_size": 8, "accumulate": 1, "lr": 0.003, "tokens": 976, "padding": 0.5, "peak_bytes": 3 << 20,
            "seconds": 1.0 if "minibatch" in name else 2.0, "train_loss": 4.0, "validation_loss": loss + seed / 10,
            "floor": 2.25, "load": 1.5, "call": "2026-01-02T03:04:05", "device": "a CPU", "about": "Linux",
        }
        for seed in range(3)
        for name, loss in (LOSSES | changes).items()
    ]  # fmt: skip
    text = tables.draw({"flan": SMOKE}, done)
    assert f"{2.9 + 0.2:.3f} ± 0.100" in text  # mean and deviation of three seeds
    verdicts = re.findall(r"^- \*\*(.+?)\*\*", text, re.MULTILINE)
    assert [i for i, verdict in enumerate(verdicts) if verdict == "Not shown"] == not_shown
    assert len(verdicts) == 3


def test_the_pages_show_the_kept_figures() -> None:
    """A row of docs/guides/methods.md that is in no result was made up, or has been measured again."""

    def rows_of(*pages: Path) -> set[str]:
        lines = [line for page in pages for line in page.read_text().splitlines() if "±" in line]
        return {re.sub(" +", " ", line) for line in lines if line.startswith("|")}

    copied = rows_of(ROOT / "docs" / "guides" / "methods.md")
    assert len(copied) >= 16
    assert copied <= rows_of(*(ROOT / "benchmarks" / "results").glob("paper-*.md"))
