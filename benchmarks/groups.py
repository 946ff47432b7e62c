"""Forward and backward passes over groups with a shared prompt: packed and shared, packed unshared, and padded.

Run ``python -m benchmarks.groups``; README.md in this folder explains the table.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks import report
from benchmarks.model import Shape
from streampack import (
    IGNORE_INDEX,
    Group,
    IterablePackedDataset,
    PackedDataLoader,
    prepare_model_for_packing,
    summed_cross_entropy,
)

VOCAB = 512
HEADER = "groups | way | tokens forwarded | of them unique | padding | s | shared is faster | rounds"


def make_groups(count: int, *, answers: int, prompt: int, answer: int, seed: int = 0) -> list[Group]:
    """Return groups of random tokens; ``prompt`` and ``answer`` are the means of log-normal lengths."""
    rng = np.random.default_rng(seed)

    def drawn(mean: int, size: int) -> np.ndarray:
        return np.clip(rng.lognormal(np.log(mean) - 0.125, 0.5, size), 4, 4 * mean).astype(int)

    found = []
    for head, *tails in zip(
        drawn(prompt, count), *(drawn(answer, count) for _ in range(answers)), strict=True
    ):
        tokens = rng.integers(1, VOCAB, head + sum(tails))
        labels = tokens.copy()
        labels[:head] = IGNORE_INDEX
        found.append(Group(tokens, labels, lengths=[head, *tails], parents=[-1] + [0] * answers))
    return found


def unshare(group: Group) -> Group:
    """Return the group with the prompt, which is not trained, before each answer."""
    alone = group.answers()
    ids = {name: np.concatenate([getattr(each, name) for each in alone]) for name in ("tokens", "labels")}
    return Group(**ids, lengths=[each.tokens.size for each in alone])


def packed(groups: Sequence[Group], *, max_seq_len: int) -> list[Any]:
    """Return the batches of a stream of the groups, in packs of ``max_seq_len``."""
    rows = [{"group": group} for group in groups]
    data = IterablePackedDataset(rows, max_seq_len=max_seq_len, encoder=lambda row: row["group"], num_lanes=1)
    return list(PackedDataLoader(data))


def padded(groups: Sequence[Group], *, rows: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield tokens and labels of mini-batches of about ``rows`` answers, each with its prompt, padded to the longest.

    All answers to a prompt are in one mini-batch, as torchtune's and TRL's collators of preference pairs have them.
    """
    answers = len(groups[0].leaves)
    size = max(1, rows // answers)
    for few in (groups[start : start + size] for start in range(0, len(groups), size)):
        alone = [answer for group in few for answer in group.answers()]
        yield _pad([each.tokens for each in alone], 0), _pad([each.labels for each in alone], IGNORE_INDEX)


def _pad(arrays: Sequence[Any], value: int) -> torch.Tensor:
    tensors = [torch.from_numpy(each.astype(np.int64)) for each in arrays]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)


def measure(groups: Sequence[Group], *, rounds: int, max_seq_len: int, rows: int) -> list[list[str]]:
    """Return a row for each way, from passes over the same groups that take turns."""
    shape = Shape(
        vocab_size=VOCAB, num_layers=2, num_heads=8, num_kv_heads=4, embed_dim=256, intermediate_dim=768
    )
    model = shape.build(device="cpu", dtype="fp32", seed=0)
    inputs = prepare_model_for_packing(model, attention="varlen")
    shared = packed(groups, max_seq_len=max_seq_len)
    unshared = packed([*map(unshare, groups)], max_seq_len=max_seq_len)
    pads = list(padded(groups, rows=rows))

    def run_packed(batches: Sequence[Any]) -> None:
        for batch in batches:
            summed_cross_entropy(model(**inputs(batch)), batch.labels).backward()
        model.zero_grad()

    def run_padded() -> None:
        for tokens, labels in pads:
            summed_cross_entropy(model(tokens), labels).backward()
        model.zero_grad()

    unique = sum(group.tokens.size for group in groups)
    alone = sum(answer.tokens.size for group in groups for answer in group.answers())
    ways = {
        "packed, shared": (lambda: run_packed(shared), unique, [batch.tokens for batch in shared]),
        "packed, unshared": (lambda: run_packed(unshared), alone, [batch.tokens for batch in unshared]),
        "padded": (run_padded, alone, [tokens for tokens, _ in pads]),
    }
    seconds, _ = report.take_turns({way: run for way, (run, *_) in ways.items()}, rounds=rounds)
    found = []
    for way, (_, real, forwarded) in ways.items():
        size = sum(tokens.numel() for tokens in forwarded)
        found.append(
            [
                f"{len(groups)} prompts x {len(groups[0].leaves)} answers",
                way,
                f"{size:,}",
                f"{unique / size:.1%}",
                f"{1 - real / size:.1%}",
                f"{statistics.median(seconds[way]):.2f}",
                *report.median_and_range(report.quotients(seconds[way], seconds["packed, shared"])),
            ]
        )
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    options = report.parser(__doc__, smoke="few groups, one round").parse_args(arguments)
    rounds, pairs, rollouts = (1, 8, 2) if options.smoke else (3, 48, 12)
    rows = []
    for count, answers, prompt, answer in ((pairs, 2, 180, 120), (rollouts, 8, 128, 128)):
        groups = make_groups(count, answers=answers, prompt=prompt, answer=answer)
        rows += measure(groups, rounds=rounds, max_seq_len=4096, rows=16)
    report.publish(
        options,
        "groups",
        "Groups with a shared prompt: packed and padded",
        f"Forward and backward passes of a model of two layers, {torch.get_num_threads()} thread(s); packs of 4,096; "
        "mini-batches of 16 answers are padded to the longest; the ways take turns. Prompts are 60 % of an answer's "
        "row in pairs, and half of it in groups of 8. Explained in ../README.md.",
        report.table(HEADER, rows),
        packages=["torchtune"],
    )


if __name__ == "__main__":
    main()
