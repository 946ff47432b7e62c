"""Filling the caches of a language model with prompts: packed, and in padded batches as transformers fills them.

Run ``python -m benchmarks.prefill``; README.md in this folder explains the table.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks import report
from benchmarks.lengths import DISTRIBUTIONS, lengths
from examples.prepacked_prefill import prefill
from tests.harness.hf_models import build

BATCH = 16
HEADER = (
    "prompts like | batches | tokens | padding of the batches | padded, s | packed, s | "
    "packed is faster | rounds"
)
SIZES = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}

Prompts = list[list[int]]


def draw_prompts(name: str, *, batches: int, longest: int) -> list[Prompts]:
    """Return batches of prompts in the order of arrival."""
    rng = np.random.default_rng(0)
    drawn = lengths(name, count=batches * BATCH, longest=longest)
    found = [rng.integers(3, 61, length).tolist() for length in drawn]
    return [found[start : start + BATCH] for start in range(0, len(found), BATCH)]


def fill_padded(model: Any, prompts: Prompts) -> Any:
    """Fill a cache as ``generate`` does: one forward pass over left-padded prompts, without their last tokens."""
    from transformers import DynamicCache

    width = max(map(len, prompts)) - 1
    ids, mask = torch.zeros(2, len(prompts), width, dtype=torch.int64)
    for number, prompt in enumerate(prompts):
        ids[number, width - len(prompt) + 1 :] = torch.tensor(prompt[:-1])
        mask[number, width - len(prompt) + 1 :] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
    return cache


def measure(name: str, *, batches: int, longest: int, rounds: int) -> list[str]:
    """Return the row of a distribution of lengths."""
    model, stock = (build("llama", **SIZES, max_position_embeddings=longest) for _ in range(2))
    drawn = draw_prompts(name, batches=batches, longest=longest)

    def padded() -> list[Any]:
        return [fill_padded(stock, prompts) for prompts in drawn]

    def packed() -> list[Any]:
        return [prefill(model, prompts, max_seq_len=longest)["past_key_values"] for prompts in drawn]

    ours, theirs = (run()[0].layers[-1].keys[:, :, -1] for run in (packed, padded))
    several = [number for number, prompt in enumerate(drawn[0]) if len(prompt) > 1]
    torch.testing.assert_close(ours[several], theirs[several], rtol=1e-3, atol=1e-4)
    seconds, _ = report.take_turns({"padded": padded, "packed": packed}, rounds=rounds)
    real = sum(len(prompt) - 1 for prompts in drawn for prompt in prompts)
    forwarded = sum(len(prompts) * (max(map(len, prompts)) - 1) for prompts in drawn)
    return [
        name,
        f"{batches} of {BATCH}",
        f"{real:,}",
        f"{forwarded - real:,} ({1 - real / forwarded:.0%})",
        *(f"{statistics.median(each):.2f}" for each in seconds.values()),
        *report.median_and_range(report.quotients(seconds["padded"], seconds["packed"])),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    options = report.parser(__doc__, smoke="few short prompts").parse_args(arguments)
    sizes = {"batches": 2, "longest": 128} if options.smoke else {"batches": 4, "longest": 2048}
    rounds = 1 if options.smoke else 3
    report.publish(
        options,
        "prefill",
        "Prefill in packs",
        f"The caches of a llama (4 layers of 256 channels, fp32), {torch.get_num_threads()} thread(s), for the same "
        f"prompts in the order of arrival: one forward pass over each padded batch of {BATCH}, and `prefill` of the "
        f"same {BATCH} prompts with max_seq_len={sizes['longest']}; both take turns. Explained in ../README.md.",
        report.table(HEADER, [measure(name, **sizes, rounds=rounds) for name in DISTRIBUTIONS]),
        packages=["transformers"],
    )


if __name__ == "__main__":
    main()
