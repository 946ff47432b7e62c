"""Comparing pairs: packed with a shared prompt, packed without, and one sequence at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchtune.models.llama3 import lora_llama3

from streampack import (
    Batch,
    IterablePackedDataset,
    collate_packed,
    prepare_model_for_packing,
)
from streampack.losses import PreferenceLoss, pair_of
from streampack.training.config import RunConfig
from streampack.training.preferences import (
    Compared,
    Comparison,
    Reference,
)
from streampack.training.world import World
from tests.harness.preferences import PairEncoder, pair_rows, whole_pairs
from tests.harness.tiny import ADAPTERS, BASE

DEVICE = torch.device("cpu")


def config(**changes: Any) -> RunConfig:
    nodes = ("tokenizer", "model", "checkpointer", "optimizer", "metric_logger")
    model = {"_component_": "torchtune.models.llama3.lora_llama3", **BASE, **ADAPTERS}
    given: dict[str, Any] = {name: {"_component_": "any"} for name in nodes}
    given |= {"model": model, "data": {"source": [], "max_seq_len": 32}}
    return RunConfig(output_dir="", max_steps=1, **given | changes)


def adapted() -> nn.Module:
    """A model whose adapters are not zero."""
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    model = lora_llama3(**BASE, **ADAPTERS)
    for value in model.parameters():
        value.data = 0.3 * torch.randn(value.shape, generator=generator)
    model.set_num_output_chunks(4)
    return model


def batch_of(*, share_prefix: bool, count: int = 40) -> Batch:
    data = IterablePackedDataset(
        pair_rows(count), max_seq_len=32, num_lanes=1, encoder=PairEncoder(share_prefix=share_prefix)
    )
    return collate_packed(list(data))


def by_row(batch: Batch, compared: Compared) -> dict[Any, list[float]]:
    chosen, _ = pair_of(batch)
    width = batch.seq_lens.shape[1]
    rows = [batch.fragments[i // width][i % width].row_id for i in chosen.tolist()]
    columns = [values.detach().tolist() for values in compared]
    return {row: list(values) for row, *values in zip(rows, *columns, strict=True)}


LOSS = PreferenceLoss(beta=0.5, length_normalized=True)


def compare(
    model: nn.Module, batch: Batch, *, attention: str = "auto"
) -> tuple[Compared, list[torch.Tensor]]:
    inputs = prepare_model_for_packing(model, attention=attention)
    reference = Reference(
        config(), LOSS, model=model, inputs=inputs, weights={}, device=DEVICE, world=World()
    )
    model.zero_grad()
    compared = Comparison(LOSS, model=model, inputs=inputs, reference=reference)(batch, pair_of(batch))
    compared.losses.sum().backward()
    return compared, [value.grad.clone() for value in model.parameters() if value.grad is not None]


def one_by_one(model: nn.Module, batch: Batch) -> tuple[list[list[float]], list[torch.Tensor]]:
    """The loss and log-probabilities of each pair of a batch with shared prompts, without packing."""
    from torchtune.modules.peft import disable_adapter

    def logp(sequence: list[int], begin: int) -> torch.Tensor:
        tokens = torch.tensor(sequence)
        output = model(tokens[None])
        logits = torch.cat(output, 1) if isinstance(output, list) else output
        return logits[0, :-1].log_softmax(1).gather(1, tokens[1:, None])[begin - 1 :].mean()

    model.zero_grad()
    found = []
    for pair in whole_pairs(batch):
        begin = next(i for i, (a, b) in enumerate(zip(*pair, strict=False)) if a != b)
        with torch.no_grad(), disable_adapter(model):
            before = [logp(sequence, begin)[None] for sequence in pair]
        now = [logp(sequence, begin)[None] for sequence in pair]
        losses, *rewards = LOSS(*now, *before)
        losses.sum().backward()
        found.append([float(each.detach()) for each in (losses, *rewards, *now)])
    return found, [value.grad.clone() for value in model.parameters() if value.grad is not None]


@pytest.mark.parametrize("attention", ["dense", "varlen"])
def test_packed_pairs_are_those_one_by_one(attention: str) -> None:
    limit = 5e-6
    model = adapted()
    shared, unshared = batch_of(share_prefix=True), batch_of(share_prefix=False)
    assert shared.num_tokens < 0.8 * unshared.num_tokens
    expected, gradients = one_by_one(adapted(), shared)
    ours = compare(model, shared, attention=attention)
    theirs = compare(model, unshared, attention=attention)
    for compared, found in (ours, theirs):
        assert len(found) == len(gradients) > 0
        for a, b in zip(found, gradients, strict=True):
            assert torch.allclose(a, b, rtol=limit * 10, atol=limit * float(b.abs().max()))
        assert len(compared.losses) == 40
    for row, values in by_row(shared, ours[0]).items():
        assert values == pytest.approx(by_row(unshared, theirs[0])[row], rel=limit, abs=limit)
    in_order = torch.stack([each.detach() for each in ours[0]], dim=1)
    for mine, alone in zip(in_order.tolist(), expected, strict=True):
        assert mine == pytest.approx(alone, rel=limit, abs=limit)
