"""Run packs through a model, and each of their sequences alone, and compare loss, logits and gradients."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from streampack import (
    IGNORE_INDEX,
    Batch,
    Fragment,
    IterablePackedDataset,
    collate_packed,
    make_mask,
    summed_cross_entropy,
)
from tests.harness.groups import MAX_SEQ_LEN, VOCAB, label, segments

LENGTHS = (5, 32, 1, 17, 9, 2, 23, 12, 3, 8, 20)
STREAMS: dict[str, dict[str, Any]] = {
    "exact_fit": {"strategy": "exact_fit"},
    "overlong": {"overlong": "split"},
    "wrap": {"split_across_pack": True},
    "padded": {"pad_seqs_to": 8},
    "padded wrap": {"split_across_pack": True, "pad_seqs_to": 8},
}


def rows_of(lengths: tuple[int, ...]) -> list[dict[str, list[int]]]:
    """Make rows of random tokens; the first third of every other row is a prompt, and one row trains nothing."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for number, length in enumerate(lengths):
        tokens = torch.randint(1, VOCAB, (length,), generator=generator).tolist()
        prompt = length if number == 4 else length // 3 if number % 2 else 0
        rows.append({"tokens": tokens, "labels": [IGNORE_INDEX] * prompt + tokens[prompt:]})
    return rows


def stream_and_batch(stream: str) -> tuple[IterablePackedDataset, Batch]:
    """Return a stream and the batch of all its packs."""
    lengths = (*LENGTHS, 75) if "split" in str(STREAMS[stream]) else LENGTHS
    data = IterablePackedDataset(rows_of(lengths), max_seq_len=MAX_SEQ_LEN, num_lanes=1, **STREAMS[stream])
    return data, collate_packed(list(data))


@dataclass
class Run:
    """The results of one forward and backward pass."""

    loss: torch.Tensor  # [], the mean over trained tokens
    gradient: torch.Tensor  # [trainable parameters]
    logits: torch.Tensor  # [real tokens, vocab], in the order of the packs


def run_of(model: nn.Module, loss: torch.Tensor, logits: list[torch.Tensor]) -> Run:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # What is only compared to choose keys or experts has no gradient.
    gradients = torch.autograd.grad(loss, trainable, allow_unused=True, materialize_grads=True)
    return Run(loss.detach(), torch.cat([g.flatten() for g in gradients]), torch.cat(logits).detach())


def whole(output: Any) -> torch.Tensor:
    """Return the logits of any model's output; torchtune's may come in chunks."""
    output = getattr(output, "logits", output)
    return output if isinstance(output, torch.Tensor) else torch.cat(output, 1)


def masked(batch: Batch) -> dict[str, Any]:
    """Return the inputs of a torchtune model that was not prepared."""
    return {"tokens": batch.tokens, "mask": make_mask(batch), "input_pos": batch.input_pos}


def run_packed(model: nn.Module, batch: Batch, inputs: Callable[[Batch], dict[str, Any]]) -> Run:
    """Run a batch as recipes do, with nothing but what ``inputs`` returns."""
    output = model(**inputs(batch))
    logits = whole(output)
    if batch.groups is None:
        total = summed_cross_entropy(getattr(output, "logits", output), batch.labels, chunk_size=50)
        loss = total / batch.num_trained.clamp(min=1)
    else:
        loss = loss_of_groups(logits, batch)
    real = [logits[pack, slice(*path[-1])] for pack, _, path in segments(batch)]
    return run_of(model, loss, [logits[0, :0], *real])


def loss_of_groups(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the mean loss of all labels, each compared with the logits of the token before it on its path."""
    predicted, targets = [], []
    for pack, number, path in segments(batch):
        start, stop = path[-1]
        before = path[-2][1] - 1 if len(path) > 1 else start  # a first token without a prefix has no label
        predicted.append(logits[pack, [before, *range(start, stop - 1)]])
        targets += [label(batch, pack, number, token, start) for token in range(start, stop)]
    return F.cross_entropy(torch.cat(predicted), torch.tensor(targets, device=logits.device))


def run_alone(model: nn.Module, batch: Batch, data: IterablePackedDataset | None = None) -> Run:
    """Run each segment behind its own prefix, unpadded, without masks or positions; the loss is the mean over tokens.

    With ``data``, tokens and labels are read from the rows; without, from the batch.
    """
    logits, predicted, targets = [], [], []
    for pack, number, path in segments(batch):
        start, stop = path[-1]
        if data is None:
            own = batch.tokens[pack, start:stop]
            labels = [label(batch, pack, number, token, start) for token in range(start, stop)]
        else:
            fragment = batch.fragments[pack][number]
            own = own_of(data, fragment, "tokens").to(batch.tokens.device)
            labels = [IGNORE_INDEX, *own_of(data, fragment, "labels")[1:].tolist()]
        prefix = [batch.tokens[pack, slice(*part)] for part in path[:-1]]
        tokens = torch.cat([*prefix, own])[None]
        of_transformers = hasattr(model, "config")
        output = whole(model(input_ids=tokens, use_cache=False) if of_transformers else model(tokens))
        logits.append(output[0, -len(own) :])
        first = output.shape[1] - len(own) - 1  # -1 without a prefix, where the first token has no label
        predicted.append(output[0, [first, *range(first + 1, output.shape[1] - 1)]])
        targets += labels
    loss = F.cross_entropy(torch.cat(predicted), torch.tensor(targets, device=batch.tokens.device))
    return run_of(model, loss, logits)


def worst(model: nn.Module, inputs: Any, alone: nn.Module, stream: str = "overlong") -> float:
    """Return how far samples in packs are from samples alone: loss, logits or gradients, the worst of the three."""
    data, batch = stream_and_batch(stream)
    return max(differences(run_packed(model, batch, inputs), run_alone(alone, batch, data)).values())


def placed(batch: Batch) -> Iterator[tuple[int, int, Fragment]]:
    """Yield (pack, its start there, fragment) of all sequences."""
    for number, pack in enumerate(batch.fragments):
        start = 0
        for fragment in pack:
            yield number, start, fragment
            start += fragment.length


def own_of(data: IterablePackedDataset, fragment: Fragment, column: str) -> torch.Tensor:
    """Return a column of the fragment's row, cut to the fragment."""
    return torch.tensor(data.trace(fragment)["row"][column][fragment.start : fragment.stop])


def differences(ours: Run, theirs: Run) -> dict[str, float]:
    """Return the relative differences by norm; infinity instead of NaN, which ``max`` may pass over."""
    found = {
        name: float((getattr(ours, name) - value).norm() / value.norm())
        for name, value in vars(theirs).items()
    }
    return {name: math.inf if math.isnan(value) else value for name, value in found.items()}


class Operations(TorchDispatchMode):
    """Counts the operations of the passes within its block, also those of backward passes, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))
