"""Log-likelihoods of continuations: packed by `streampack.score`, and in padded batches, as they come or sorted.

Run ``python -m benchmarks.scoring``; README.md in this folder explains the table.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks import report
from benchmarks.lengths import lengths
from streampack import prepare_model_for_packing, score
from tests.harness.hf_models import build

VOCAB = 8192
BATCH = 16
LONGEST = 1024
HEADER = "requests | way | tokens forwarded | s | score is faster | rounds | largest difference"
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}
Request = tuple[list[int], list[int]]


def mixed(count: int) -> list[Request]:
    """Return texts of skewed lengths; the last fifth, at most 64 tokens, is scored. None begin alike."""
    rng = np.random.default_rng(0)
    found = []
    for length in lengths("flan", count=count, longest=LONGEST).tolist():
        tokens = rng.integers(3, VOCAB, max(2, length)).tolist()
        scored = min(64, max(1, len(tokens) // 5))
        found.append((tokens[:-scored], tokens[-scored:]))
    return found


def choices(count: int) -> list[Request]:
    """Return questions with four answers each; the question is four fifths of a request's tokens."""
    rng = np.random.default_rng(0)
    found = []
    for length in lengths("orca", count=count, longest=LONGEST).tolist():
        question = rng.integers(3, VOCAB, max(4, 4 * length // 5)).tolist()
        found += [(question, rng.integers(3, VOCAB, max(1, len(question) // 4)).tolist()) for _ in range(4)]
    return found


@torch.no_grad()
def padded(model: Any, requests: Sequence[Request], *, by_length: bool) -> tuple[list[float], int]:
    """Score in padded batches of 16, as evaluation harnesses do; return the sums and the tokens forwarded.

    Sequences are padded on the right, with an attention mask, and logits are made of all tokens.
    """
    order = list(range(len(requests)))
    if by_length:
        order.sort(key=lambda number: -len(requests[number][0]) - len(requests[number][1]))
    found, forwarded = [0.0] * len(requests), 0
    for start in range(0, len(requests), BATCH):
        numbers = order[start : start + BATCH]
        sequences = [torch.tensor((requests[n][0] + requests[n][1])[:-1]) for n in numbers]
        tokens = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
        mask = torch.arange(tokens.shape[1]) < torch.tensor([len(each) for each in sequences])[:, None]
        logps = model(input_ids=tokens, attention_mask=mask.long(), use_cache=False).logits.log_softmax(-1)
        forwarded += tokens.numel()
        for row, number in enumerate(numbers):
            context, continuation = requests[number]
            begin = len(context) - 1
            each = logps[row, begin : begin + len(continuation)].gather(
                1, torch.tensor(continuation)[:, None]
            )
            found[number] = float(each.double().sum())
    return found, forwarded


def packed(model: Any, inputs: Any, requests: Sequence[Request], *, share: bool) -> tuple[list[float], int]:
    """Score with `streampack.score`; return the sums and the tokens forwarded."""
    forwarded = 0

    def count(module: Any, args: Any, kwargs: Any) -> None:
        nonlocal forwarded
        forwarded += kwargs["input_ids"].numel()

    with model.register_forward_pre_hook(count, with_kwargs=True):
        found = score(model, requests, max_seq_len=4096, inputs=inputs, share_prefix=share, progress=False)
        return [each.logp for each in found], forwarded


def measure(name: str, requests: Sequence[Request], *, rounds: int) -> list[list[str]]:
    """Return a row for each way, from passes over the same requests that take turns."""
    plain, model = (build("llama", **SIZES).eval() for _ in range(2))
    inputs = prepare_model_for_packing(model)
    as_they_come = f"padded, {BATCH} as they come"
    ways: dict[str, Callable[[], tuple[list[float], int]]] = {
        "score": lambda: packed(model, inputs, requests, share=True),
        "score, nothing shared": lambda: packed(model, inputs, requests, share=False),
        as_they_come: lambda: padded(plain, requests, by_length=False),
        f"padded, {BATCH} sorted by length": lambda: padded(plain, requests, by_length=True),
    }
    seconds, results = report.take_turns(ways, rounds=rounds)
    rows = []
    for way, (sums, forwarded) in results.items():
        pairs = zip(sums, results[as_they_come][0], strict=True)
        worst = max(abs(ours - theirs) / max(1.0, abs(theirs)) for ours, theirs in pairs)
        rows.append(
            [
                f"{len(requests):,} {name}",
                way,
                f"{forwarded:,}",
                f"{statistics.median(seconds[way]):.2f}",
                *report.median_and_range(report.quotients(seconds[way], seconds["score"])),
                f"{worst:.0e}",
            ]
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    options = report.parser(__doc__, smoke="few requests, one round").parse_args(arguments)
    rounds, texts, questions = (1, 24, 4) if options.smoke else (3, 192, 40)
    rows = measure("texts", mixed(texts), rounds=rounds)
    rows += measure("answers, 4 to a question", choices(questions), rounds=rounds)
    report.publish(
        options,
        "scoring",
        "Log-likelihoods: packed and padded",
        f"A llama of 4 layers with a vocabulary of {VOCAB:,}, {torch.get_num_threads()} thread(s), fp32; the ways take "
        "turns. Differences are relative, from the batches as they come. Explained in ../README.md.",
        report.table(HEADER, rows),
        packages=["transformers"],
    )


if __name__ == "__main__":
    main()
