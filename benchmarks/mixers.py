"""Passes of models whose layers carry a state: over a pack of many sequences, and over one sequence of its length.

Run ``python -m benchmarks.mixers``; README.md in this folder explains the table.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks import report
from benchmarks.lengths import lengths
from streampack import Batch, IterablePackedDataset, collate_packed, prepare_model_for_packing
from tests.harness.hf_models import build
from tests.harness.hybrid_models import HYBRIDS, OTHERWISE

LARGER: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_chunk_size": 64, "mamba_d_head": 64},
    "falcon_h1": {"mamba_chunk_size": 64, "mamba_d_ssm": 256, "mamba_d_head": 32},
    "granitemoehybrid": {"mamba_chunk_size": 64, "mamba_d_head": 64},
    "mamba2": {"head_dim": 64, "chunk_size": 64},
    "mpt": {"d_model": 256, "max_seq_len": 2048},
    "nemotron_h": {"chunk_size": 64},
    "recurrent_gemma": {"lru_width": 256},
    "xlstm": {"embedding_dim": 256, "chunk_size": 64},
    "zamba2": {"mamba_headdim": 64, "chunk_size": 64},
}
"""Sizes of the test's models that grow with their width; chunks as long as those of real models would hide the cost."""

TOKEN_BY_TOKEN = {"falcon_mamba", "jamba", "mamba", "rwkv", "zamba"}
"""Without kernels these take a minute for 2,048 tokens, so their packs are shorter."""

HEADER = "family | attention | sequences | tokens | pack, s | one sequence, s | pack / one sequence | rounds"
WIDTH = {"hidden_size": 256, "intermediate_size": 512}


def pack(max_seq_len: int) -> Batch:
    """Return one full pack of sequences with lengths like FLAN's."""
    rows = [{"input_ids": [1 + i % 59 for i in range(n)]} for n in lengths("flan", count=400)]
    packs = IterablePackedDataset(rows, max_seq_len=max_seq_len, overlong="drop", num_lanes=1)
    return collate_packed([next(iter(packs))])


def measure(family: str, batch: Batch, *, rounds: int) -> list[str]:
    """Return the row of a family."""
    size = batch.tokens.shape[1]
    sizes = HYBRIDS[family] | LARGER.get(family, {}) | WIDTH | {"max_position_embeddings": size}
    model = build(family.partition(",")[0], **sizes)
    attention = "dense" if (family, "varlen") in OTHERWISE else "varlen"
    inputs = prepare_model_for_packing(model, attention=attention)
    positions = torch.arange(size)[None]
    whole = torch.tensor([[size]], dtype=torch.int32)
    alone = replace(batch, input_pos=positions, seq_lens=whole, longest=size)

    def run(given: Batch) -> None:
        model(**inputs(given)).logits.sum().backward()

    seconds, _ = report.take_turns({"pack": lambda: run(batch), "alone": lambda: run(alone)}, rounds=rounds)
    return [
        family,
        attention,
        str(sum(map(len, batch.fragments))),
        f"{batch.num_tokens:,}",
        *(f"{statistics.median(each):.2f}" for each in seconds.values()),
        *report.median_and_range(report.quotients(seconds["pack"], seconds["alone"])),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    options = report.parser(__doc__, smoke="two families, a short pack").parse_args(arguments)
    short, long = pack(512), pack(512 if options.smoke else 2048)
    families = ("falcon_h1", "lfm2") if options.smoke else sorted(HYBRIDS)
    rounds = 1 if options.smoke else 3
    rows = [measure(each, short if each in TOKEN_BY_TOKEN else long, rounds=rounds) for each in families]
    report.publish(
        options,
        "mixers",
        "Layers that carry a state, run one sequence at a time",
        f"Forward and backward pass of tiny models (256 channels, 2 to 4 layers), {torch.get_num_threads()} thread(s), "
        "transformers' own code without kernels; a pack of sequences with lengths like FLAN's, and the same tokens as "
        "one sequence; both take turns. Explained in ../README.md.",
        report.table(HEADER, rows),
        packages=["transformers"],
    )


if __name__ == "__main__":
    main()
