"""Several ranks train as one: the same gradients, losses and runs, whatever their number."""

from __future__ import annotations

import io
from collections import defaultdict
from contextlib import contextmanager, nullcontext, redirect_stdout

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from streampack_recipes.full_finetune import train
from torchtune import training
from torchtune.models.llama3 import llama3

from streampack import IterablePackedDataset, collate_packed
from streampack.attention.prepare import make_mask
from streampack.losses import label_weights, summed_cross_entropy
from streampack.packing.assemble import null_pack
from streampack.packing.batch import to_torchtune
from streampack.training.config import RunConfig
from streampack.training.meters import CountMeter
from streampack.training.model import build_model
from streampack.training.optimizer import clip_gradients
from streampack.training.world import join_world
from tests.harness.processes import run_ranks
from tests.harness.tiny import losses, tiny_config

CPU = torch.device("cpu")

# Gradients, against models that know neither packs nor ranks.

MODEL = {
    "vocab_size": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "embed_dim": 16, "max_seq_len": 12,
    "intermediate_dim": 32,
}  # fmt: skip


def corpus():
    """Return packs of 12 from eleven samples of 1 to 30 tokens, prompts not trained; some samples are split."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for length in (5, 30, 2, 12, 7, 1, 9, 17, 3, 4, 11):
        tokens = torch.randint(1, 16, (length,), generator=generator)
        prompt = torch.arange(length) < length // 4
        rows.append({"tokens": tokens, "labels": tokens.masked_fill(prompt, -100)})
    return list(IterablePackedDataset(rows, max_seq_len=12, split_across_pack=True, num_lanes=1).stream())


def rank_batches(packs, world, *, batches, batch_size, only_main):
    """Return this rank's batches; with ``only_main`` the others get null packs only."""
    mine = packs if only_main and world.is_main else [] if only_main else packs[world.rank :: world.size]
    mine = mine + [null_pack(12)] * (batches * batch_size - len(mine))
    return [
        collate_packed([to_torchtune(pack) for pack in mine[i : i + batch_size]])
        for i in range(0, len(mine), batch_size)
    ]


def initial_weights():
    torch.manual_seed(0)
    return llama3(**MODEL).double().state_dict()


@contextmanager
def no_single_precision():
    """Keep fp64: torchtune's norms, positions and logits go through fp32 whatever the model's type."""
    single, torch.Tensor.float = torch.Tensor.float, torch.Tensor.double
    yield
    torch.Tensor.float = single


def packed_gradients(dtype, loss_norm, only_main, empty=False):
    """Return gradients by name, sharded, packed and accumulated as in a recipe, and the logged metrics."""
    with join_world(CPU) as world, no_single_precision() if dtype == "fp64" else nullcontext():
        node = {"_component_": "torchtune.models.llama3.llama3", **MODEL}
        others = {
            name: {"_component_": "any"}
            for name in ("tokenizer", "checkpointer", "optimizer", "metric_logger")
        }
        config = RunConfig(
            output_dir="",
            model=node,
            dtype=dtype,
            data={"source": [], "max_seq_len": 12},
            max_steps=1,
            **others,
        )
        model = build_model(config, weights=initial_weights(), device=CPU, world=world)
        meter = CountMeter(world, CPU)
        packs = [] if empty else corpus()
        for batch in rank_batches(packs, world, batches=5, batch_size=2, only_main=only_main):
            weights = label_weights(batch, loss_norm=loss_norm)
            logits = model(batch.tokens, mask=make_mask(batch), input_pos=batch.input_pos)
            loss = summed_cross_entropy(logits, batch.labels, weights=weights)
            loss.backward()
            meter.add(batch, loss, weights)
        training.scale_grads(model, meter.reduce())
        meter.stop()
        logged = meter.metrics() | {"grad_norm": float(clip_gradients(model, 1e9))}
        gradients = {
            name: (value.grad.full_tensor() if world.size > 1 else value.grad)
            for name, value in model.named_parameters()
        }
        return gradients, logged


@no_single_precision()
def naive_gradients(loss_norm):
    """Return gradients by name with every sequence alone in fp64, torch's cross-entropy, samples joined by row id."""
    model = llama3(**MODEL).double()
    model.load_state_dict(initial_weights())
    sums, counts = defaultdict(float), defaultdict(int)
    for pack in corpus():
        start = 0
        for fragment, length in zip(pack.fragments, pack.seq_lens, strict=True):
            tokens = torch.from_numpy(pack.tokens[start : start + length])[None]
            labels = torch.from_numpy(pack.labels[start : start + length]).long()
            if length > 1:
                logits = model(tokens)[0, :-1]
                sums[fragment.row_id] += F.cross_entropy(logits, labels[1:], reduction="sum")
                counts[fragment.row_id] += int((labels[1:] != -100).sum())
            start += length
    trained = [row_id for row_id in counts if counts[row_id]]
    if loss_norm == "token":
        loss = sum(sums[row_id] for row_id in trained) / sum(counts.values())
    else:
        loss = sum(sums[row_id] / counts[row_id] for row_id in trained) / len(trained)
    loss.backward()
    return {name: value.grad for name, value in model.named_parameters()}, loss.item()


def distance(ours, naive):
    flat = [torch.cat([grads[name].double().flatten() for name in sorted(naive)]) for grads in (ours, naive)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


@pytest.mark.parametrize(("loss_norm", "dtype", "limit"), [("token", "fp32", 1e-5), ("sample", "fp64", 1e-8)])
def test_gradients_equal_those_of_samples_alone(dtype, limit, loss_norm):
    assert len({f.row_id for pack in corpus() for f in pack.fragments if f.trained is not None}) >= 3, (
        "split samples"
    )
    naive, loss = naive_gradients(loss_norm)
    for only_main in False, True:
        ours, logged = packed_gradients(dtype, loss_norm, only_main)
        assert distance(ours, naive) < limit
        assert logged["loss"] == pytest.approx(loss, limit)


@pytest.mark.parametrize(
    ("loss_norm", "dtype", "limit", "only_main"),
    [("token", "fp32", 1e-5, False), ("sample", "fp64", 1e-8, True)],
)
def test_gradients_of_two_ranks_equal_those_of_samples_alone(loss_norm, dtype, limit, only_main):
    naive, loss = naive_gradients(loss_norm)
    norm = torch.cat([value.flatten() for value in naive.values()]).norm()
    both = run_ranks(packed_gradients, 2, dtype, loss_norm, only_main)
    for ours, logged in both:
        assert distance(ours, naive) < limit
        assert logged["loss"] == pytest.approx(loss, limit)
        assert logged["grad_norm"] == pytest.approx(float(norm), limit)
        assert logged.keys() == both[0][1].keys()


def test_a_step_of_null_packs_is_no_step():
    for gradients, logged in run_ranks(packed_gradients, 2, "fp32", "token", False, True):
        assert all(torch.equal(value, torch.zeros_like(value)) for value in gradients.values())
        assert logged["loss"] == logged["grad_norm"] == logged["trained_tokens"] == 0
        assert all(value == value for value in logged.values()), "NaN"


# Whole runs.

# Without a scheduler, whose end would move with max_steps.
RUN = {
    "data.num_lanes": 4, "max_steps": 10, "clip_grad_norm": 1.0, "lr_scheduler": None, "z_loss": 0.01,
    "gradient_accumulation_steps": 1,
}  # fmt: skip
"""Of two ranks; one accumulates two batches for the same step."""


def run(config):
    with redirect_stdout(io.StringIO()) as out:
        result = train(config)
    return result | {"out": out.getvalue()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    result = train(tiny_config(folder, **RUN | {"gradient_accumulation_steps": 2}))
    return {
        name: numbers(folder, name) for name in ("loss", "z_loss", "validation_loss", "grad_norm")
    }, result


def numbers(folder, name="loss"):
    return {step: float(value) for step, value in losses(folder, name).items()}


def test_two_ranks_have_the_losses_of_one(tmp_path, alone):
    expected, result = alone
    results = run_ranks(run, 2, tiny_config(tmp_path, num_workers=1, **RUN))
    for name, values in expected.items():
        assert len(values) == (3 if name == "validation_loss" else 10)
        assert numbers(tmp_path, name) == pytest.approx(values, rel=1e-5)
    for other in results:
        assert other["ledger"] == result["ledger"]
        assert other["tokens"] == result["tokens"]
        assert other["held_out"] == results[0]["held_out"]
    assert "held-out" in results[0]["out"]
    assert results[1]["out"] == ""
    weights = torch.load(next((tmp_path / "out" / "epoch_0").glob("*.bin")), weights_only=True)
    assert not any(isinstance(value, torch.distributed.tensor.DTensor) for value in weights.values())


SHARDED = {
    "enable_activation_checkpointing": True,
    "custom_sharded_layers": ["tok_embeddings", "output"],
    "fsdp_reshard_after_forward": False,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {**SHARDED, "batch_size": 1, "gradient_accumulation_steps": 2, "log_every_n_steps": 2},
        {"compile": True},
    ],
)
def test_settings_that_must_not_change_the_losses(tmp_path, alone, changes):
    run_ranks(
        run, 2, tiny_config(tmp_path, **RUN | changes), timeout=400
    )  # compiling takes minutes on a busy machine
    ours = numbers(tmp_path)
    assert len(ours) == 10 // changes.get("log_every_n_steps", 1)
    assert ours == pytest.approx({step: alone[0]["loss"][step] for step in ours}, rel=1e-4)


def test_by_epochs_with_more_workers_than_rows_for_them(tmp_path):
    """Ends, on all ranks, with every sample seen, though packs and steps do not come out even."""
    config = tiny_config(
        tmp_path, rows=45, epochs=2, max_steps=None, validation=None, gradient_accumulation_steps=1,
        loss_norm="sample", **{"data.num_lanes": 5},
    )  # fmt: skip
    config.num_workers = 2
    results = run_ranks(run, 2, config)
    assert [result["ledger"].samples for result in results] == [90, 90]
    assert results[0]["step"] == results[1]["step"]
    assert "nan" not in (tmp_path / "out" / "logs" / "log.txt").read_text()


def test_resumed_on_another_number_of_ranks(tmp_path, alone):
    """2 -> 1 -> 2, checkpoints written in the background, and settings that must not change the losses."""
    config = tiny_config(
        tmp_path,
        **RUN,
        **SHARDED,
        save_every_n_steps=3,
        enable_async_checkpointing=True,
        resume_from_checkpoint=True,
    )
    stop = OmegaConf.create(config)
    stop.max_steps = 3
    run_ranks(run, 2, stop)
    stop.max_steps = 7
    train(stop)
    run_ranks(run, 2, config)
    assert numbers(tmp_path) == pytest.approx(alone[0]["loss"], rel=1e-5)
    assert sorted(path.name for path in (tmp_path / "out" / "checkpoints").iterdir()) == [
        "step_00000009",
        "step_00000010",
    ]
