"""Comparing pairs: packed with a shared prompt, packed without, and one sequence at a time."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torchtune.models.llama3 import lora_llama3

from streampack import (
    Batch,
    IterablePackedDataset,
    Mix,
    PreferenceEncoder,
    collate_packed,
    prepare_model_for_packing,
)
from streampack.distributed.world import World
from streampack.losses import PreferenceLoss, pair_of
from streampack.training.config import RunConfig
from streampack.training.model import has_adapters
from streampack.training.preferences import (
    Compared,
    Comparison,
    PairMeter,
    Reference,
    at_first_token,
    shares_prefixes,
)
from tests.harness.preferences import PairEncoder, pair_rows, whole_pairs
from tests.harness.tiny import ADAPTERS, BASE, WordTokenizer

DEVICE = torch.device("cpu")


def config(**changes: Any) -> RunConfig:
    nodes = ("tokenizer", "model", "checkpointer", "optimizer", "metric_logger")
    model = {"_component_": "torchtune.models.llama3.lora_llama3", **BASE, **ADAPTERS}
    given: dict[str, Any] = {name: {} for name in nodes} | {"model": model, "data": {"max_seq_len": 32}}
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


def test_the_meter_has_means_over_pairs() -> None:
    meter = PairMeter(World(), DEVICE)
    assert meter.metrics() == {}
    for rows in ([[9.0, 1.0, 0.5, -3.0, -4.0], [9.0, 0.5, 0.5, -5.0, -6.0]], [[9.0, 3.0, 5.0, -1.0, -2.0]]):
        meter.add(Compared(*torch.tensor(rows).T))
    assert meter.metrics() == {
        "rewards/chosen": 1.5,
        "rewards/rejected": 2.0,
        "rewards/margins": -0.5,
        "rewards/accuracies": pytest.approx(1 / 3),
        "log_probs/chosen": -3.0,
        "log_probs/rejected": -4.0,
    }
    assert meter.metrics() == {}


def test_values_of_pairs_are_at_the_first_tokens_of_the_chosen_answers() -> None:
    batch = batch_of(share_prefix=True, count=9)
    chosen, _ = pair_of(batch)
    placed = at_first_token(torch.arange(1.0, 10.0), batch, chosen)
    assert placed.sum() == 45
    width = batch.seq_lens.shape[1]
    for number, index in enumerate(chosen.tolist(), start=1):
        pack, sequence = divmod(index, width)
        assert placed[pack, int(batch.seq_lens[pack, :sequence].sum())] == number


def test_adapters_are_found_without_memory_for_weights() -> None:
    assert has_adapters(config())
    plain = {"_component_": "torchtune.models.llama3.llama3", **BASE}
    assert not has_adapters(dataclasses.replace(config(), model=plain))


@pytest.mark.parametrize("share_prefix", [True, False])
def test_encoders_say_whether_prompts_are_shared(share_prefix: bool) -> None:
    encoder = PreferenceEncoder(WordTokenizer(), share_prefix=share_prefix)
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}]
    alone = IterablePackedDataset(rows, max_seq_len=8, encoder=encoder)
    assert shares_prefixes(alone.lane_config) is share_prefix
    mixed = Mix([{"name": "one", "source": rows, "weight": 1, "encoder": encoder}])
    assert shares_prefixes(IterablePackedDataset(mixed, max_seq_len=8).lane_config) is share_prefix
    own = IterablePackedDataset(rows, max_seq_len=8, encoder=lambda row: encoder(row))
    assert shares_prefixes(own.lane_config), "of an encoder of the user's own, nobody knows"
