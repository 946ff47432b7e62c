"""Several ranks train as one: the same losses, gradients and runs, whatever their number."""

from __future__ import annotations

import io
import os
import resource
import signal
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from omegaconf import OmegaConf
from streampack_recipes.full_finetune import train
from torchtune import training
from torchtune.models.llama3 import llama3

from benchmarks.scale.ranks import connections
from streampack import IterablePackedDataset, PackedDataLoader, collate_packed
from streampack.attention.prepare import make_mask
from streampack.distributed.world import (
    GROUPS,
    OTHER_FILES,
    OtherRankFailed,
    World,
    allow_connections,
    join_world,
)
from streampack.losses import LOSS_NORMS, label_weights, summed_cross_entropy
from streampack.packing.batch import null_pack, to_torchtune
from streampack.training.meters import StepMeter
from streampack.training.model import build_model, clip_gradients
from tests.support.ranks import RankError, open_store, run_ranks
from tests.support.tiny import losses, tiny_config

CPU = torch.device("cpu")


# What ranks say to each other.


def test_alone_there_is_nobody_to_talk_to():
    with join_world(CPU) as world:
        assert world == World()
        assert not dist.is_initialized()
        with world.together(), world.main_first():
            assert world.add_up(torch.ones(2)).tolist() == [1, 1]
            assert world.once(lambda: 3, of="numbers") == 3


def talk(folder):
    with join_world(CPU) as world:
        heard = [world.gather(f"rank {world.rank}"), world.from_main(world.rank)]
        heard.append(world.add_up(torch.tensor([1.0, world.rank])).tolist())
        with world.main_first():
            heard.append(sorted(path.name for path in Path(folder).iterdir()))
            (Path(folder) / f"{world.rank}").touch()
        try:
            with world.together():
                if world.rank == 1:
                    raise OSError("disk full")
        except (OSError, OtherRankFailed) as error:
            heard.append((type(error), str(error)))
        heard.append(world.once(lambda: f"by rank {world.rank}", of="the same"))
        for of in ("the same", f"rank {world.rank}'s"):
            try:
                world.once(lambda: 1 // world.rank, of=of)
            except (ZeroDivisionError, ValueError, OtherRankFailed) as error:
                heard.append((type(error), str(error)))
    assert not dist.is_initialized()
    return heard


def test_two_ranks_talk(tmp_path):
    first, second = run_ranks(talk, 2, tmp_path)
    assert first[:3] == second[:3] == [["rank 0", "rank 1"], 0, [2.0, 1.0]]
    assert (first[3], second[3]) == ([], ["0"])
    assert first[4] == (OtherRankFailed, "rank 1 failed: OSError: disk full")
    assert second[4] == (OSError, "disk full")
    assert first[5] == second[5] == "by rank 0"
    assert first[6][0] is ZeroDivisionError
    assert second[6] == (OtherRankFailed, f"rank 0 failed: ZeroDivisionError: {first[6][1]}")
    refused = "rank 1 reads rank 1's, and rank 0 rank 0's; all ranks must read the same corpus"
    assert first[7] == second[7] == (ValueError, refused)


def fail_in_training(config):
    from streampack_recipes import full_finetune

    step = torch.optim.AdamW.step
    steps = []

    def breaks(optimizer, *args):
        steps.append(1)
        if os.environ["RANK"] == "1" and len(steps) == 3:
            raise ValueError("broken on purpose")
        return step(optimizer, *args)

    torch.optim.AdamW.step = breaks
    try:
        full_finetune.train(config)
    except Exception as error:
        return type(error).__name__, time.time(), dist.is_initialized()


def test_when_a_rank_fails_the_others_do_not_wait(tmp_path):
    (_, there, joined), (name, here, joined_too) = run_ranks(
        fail_in_training, 2, tiny_config(tmp_path, checkpoint_every=None)
    )
    assert name == "ValueError"
    assert there - here < 10, "the timeout is 600 s"
    assert not joined
    assert not joined_too


def die_after_joining(attempt):
    with join_world(CPU, timeout=20) as world:
        if attempt < 2:
            os._exit(9)
        return world.gather(world.rank)


def test_ranks_that_are_restarted_do_not_call_the_dead():
    """As under torchrun with --max-restarts, which keeps the store; also with fewer ranks than before."""
    store = open_store()
    for attempt, ranks in (0, 3), (1, 2):
        with pytest.raises(RankError, match="exit code 9"):
            run_ranks(die_after_joining, ranks, attempt, store=store)
    assert run_ranks(die_after_joining, 3, 2, store=store) == [[0, 1, 2]] * 3


def join_with_few_files():
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
    with join_world(CPU) as world:
        return world.gather(resource.getrlimit(resource.RLIMIT_NOFILE))


def test_ranks_may_open_as_many_files_as_their_connections_need():
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert run_ranks(join_with_few_files, 2) == [[(3 + OTHER_FILES, hard)] * 2] * 2


def connect_as_a_recipe_does():
    with join_world(CPU) as world:
        loader = PackedDataLoader(IterablePackedDataset([{"tokens": [1], "labels": [1]}] * 40, max_seq_len=2))
        batches = list(loader)
        world.gather(len(batches))  # nobody leaves before all have counted
        found = len(connections())
        return world.gather(found)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts connections through /proc")
@pytest.mark.parametrize("size", [2, 5])
def test_a_recipe_connects_each_rank_to_every_other_once_a_group(size):
    """And to the store where they met."""
    assert run_ranks(connect_as_a_recipe_does, size) == [[GROUPS * (size - 1) + 1] * size] * size


@pytest.mark.parametrize(
    ("soft", "hard", "size", "raised", "warned"),
    [
        (1024, 4096, 256, None, False),
        (1024, 4096, 257, 1024, False),
        (1024, 4096, 1024, 3 * 1023 + 256, False),
        (1024, resource.RLIM_INFINITY, 1024, 3 * 1023 + 256, False),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 1024, None, False),
        (1024, 2048, 1024, 2048, True),
    ],
)
def test_the_limit_of_open_files(monkeypatch, soft, hard, size, raised, warned):
    limits = {resource.RLIMIT_NOFILE: (soft, hard)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    monkeypatch.setattr(resource, "setrlimit", limits.__setitem__)
    expected = (
        r"1,024 ranks need about 3,325 open files each and the system allows 2,048: ranks will fail to connect "
        r'\("Too many open files"\); raise the hard limit on every machine'
    )
    with pytest.warns(UserWarning, match=expected) if warned else nullcontext():
        allow_connections(size)
    assert limits == {resource.RLIMIT_NOFILE: (soft if raised is None else raised, hard)}


def join_without_the_last(size):
    if int(os.environ["RANK"]) < size - 1:
        with join_world(CPU, timeout=1):
            pass


def test_a_rank_that_does_not_come_is_named():
    with pytest.raises(RankError, match=r"TimeoutError: ranks \[2\] of 3 did not join within 1 s"):
        run_ranks(join_without_the_last, 3, 3)


def test_a_rank_that_is_killed_is_seen_by_this_harness():
    with pytest.raises(RankError, match="rank 0: ended with exit code 9"):
        run_ranks(os._exit, 1, 9)


# Gradients, against models that know neither packs nor ranks.

MODEL = {
    "vocab_size": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "embed_dim": 16, "max_seq_len": 12,
    "intermediate_dim": 32,
}  # fmt: skip


def corpus():
    """Eleven samples of 1 to 30 tokens, prompts not trained, in packs of 12: some are split, over packs too."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for length in (5, 30, 2, 12, 7, 1, 9, 17, 3, 4, 11):
        tokens = torch.randint(1, 16, (length,), generator=generator)
        prompt = torch.arange(length) < length // 4
        rows.append({"tokens": tokens, "labels": tokens.masked_fill(prompt, -100)})
    return list(IterablePackedDataset(rows, max_seq_len=12, split_across_pack=True, num_lanes=1).stream())


def share(packs, world, *, batches, batch_size, only_main):
    """This rank's batches; ``only_main`` leaves the others nothing but null packs."""
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
    """torchtune's norms, positions and logits go through fp32 whatever the model's type."""
    single, torch.Tensor.float = torch.Tensor.float, torch.Tensor.double
    yield
    torch.Tensor.float = single


def packed_gradients(dtype, loss_norm, only_main, empty=False):
    """As a recipe makes them: sharded, packed, accumulated. Names to gradients, and what is logged."""
    with join_world(CPU) as world, no_single_precision() if dtype == "fp64" else nullcontext():
        model = build_model(
            {"_component_": "torchtune.models.llama3.llama3", **MODEL},
            weights=initial_weights(),
            device=CPU,
            dtype=dtype,
            world=world,
        )
        meter = StepMeter(world, CPU)
        packs = [] if empty else corpus()
        for batch in share(packs, world, batches=5, batch_size=2, only_main=only_main):
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
    """Every sequence alone in fp64, torch's cross-entropy, samples put together again by where they came from."""
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


def test_the_corpus_has_what_these_tests_are_about():
    packs = corpus()
    split = [f for pack in packs for f in pack.fragments if f.trained is not None]
    assert len({f.row_id for f in split}) >= 3
    assert len(packs) == 9


@pytest.mark.parametrize("loss_norm", LOSS_NORMS)
@pytest.mark.parametrize(("dtype", "limit"), [("fp32", 1e-5), ("fp64", 1e-8)])
def test_gradients_equal_those_of_samples_alone(dtype, limit, loss_norm):
    naive, loss = naive_gradients(loss_norm)
    for only_main in False, True:
        ours, logged = packed_gradients(dtype, loss_norm, only_main)
        assert distance(ours, naive) < limit
        assert logged["loss"] == pytest.approx(loss, limit)


@pytest.mark.parametrize("loss_norm", LOSS_NORMS)
def test_gradients_of_two_ranks_equal_those_of_samples_alone(loss_norm):
    naive, loss = naive_gradients(loss_norm)
    for dtype, limit, only_main in ("fp32", 1e-5, False), ("fp64", 1e-8, True):
        both = run_ranks(packed_gradients, 2, dtype, loss_norm, only_main)
        for ours, logged in both:
            assert distance(ours, naive) < limit
            assert logged["loss"] == pytest.approx(loss, limit)
            assert logged["grad_norm"] == pytest.approx(float(naive_norm(naive)), limit)
            assert logged.keys() == both[0][1].keys()


def naive_norm(gradients):
    return torch.cat([value.flatten() for value in gradients.values()]).norm()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_of_null_packs_is_no_step(ranks):
    for gradients, logged in run_ranks(packed_gradients, ranks, "fp32", "token", False, True):
        assert all(torch.equal(value, torch.zeros_like(value)) for value in gradients.values())
        assert logged["loss"] == logged["grad_norm"] == logged["trained_tokens"] == 0
        assert all(value == value for value in logged.values()), "NaN"


# Whole runs.

RUN = {"data.num_lanes": 4, "max_steps": 20, "clip_grad_norm": 1.0}


def run(config):
    with redirect_stdout(io.StringIO()) as out:
        result = train(config)
    return result | {"out": out.getvalue()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    result = train(tiny_config(folder, **RUN))
    return {name: numbers(folder, name) for name in ("loss", "validation_loss", "grad_norm")}, result


def numbers(folder, name="loss"):
    return {step: float(value) for step, value in losses(folder, name).items()}


def test_two_ranks_train_as_one(tmp_path, alone):
    expected, result = alone
    results = run_ranks(run, 2, tiny_config(tmp_path, num_workers=1, **RUN))
    for name, values in expected.items():
        assert len(values) == (5 if name == "validation_loss" else 20)
        assert numbers(tmp_path, name) == pytest.approx(values, rel=1e-5)
    for other in results:
        assert other["ledger"] == result["ledger"]
        assert other["tokens"] == result["tokens"]
        assert other["held_out"] == results[0]["held_out"]
    assert "held-out" in results[0]["out"]
    assert results[1]["out"] == ""
    weights = torch.load(next((tmp_path / "out" / "epoch_0").glob("*.bin")), weights_only=True)
    assert not any(isinstance(value, torch.distributed.tensor.DTensor) for value in weights.values())


@pytest.mark.parametrize(
    "changes",
    [
        {"activation_checkpointing": True, "custom_sharded_layers": ["tok_embeddings", "output"]},
        {"fsdp_reshard_after_forward": False, "batch_size": 1, "log_every": 4},
        pytest.param({"compile": True}, marks=pytest.mark.slow),
    ],
)
def test_what_must_not_change_the_losses(tmp_path, alone, changes):
    run_ranks(run, 2, tiny_config(tmp_path, **RUN, **changes))
    ours = numbers(tmp_path)
    assert len(ours) == 20 // changes.get("log_every", 1)
    assert ours == pytest.approx({step: alone[0]["loss"][step] for step in ours}, rel=1e-4)


def test_by_epochs_with_more_workers_than_rows_for_them(tmp_path):
    """Ends, on all ranks, with every sample seen, though packs and steps do not come out even."""
    config = tiny_config(
        tmp_path, rows=45, epochs=2, max_steps=None, validation=None, packs_per_step=4,
        loss_norm="sample", **{"data.num_lanes": 5},
    )  # fmt: skip
    config.num_workers = 2
    results = run_ranks(run, 2, config)
    assert [result["ledger"].samples for result in results] == [90, 90]
    assert results[0]["step"] == results[1]["step"]
    assert "nan" not in (tmp_path / "out" / "logs" / "log.txt").read_text()


def test_resumed_on_another_number_of_ranks(tmp_path, alone):
    """2 -> 1 -> 2, checkpoints written in the background."""
    config = tiny_config(tmp_path, **RUN, checkpoint_every=3, async_checkpoint=True, resume=True)
    stop = OmegaConf.create(config)
    stop.max_steps = 6
    run_ranks(run, 2, constant(stop))
    stop.max_steps = 13
    train(constant(stop))
    run_ranks(run, 2, constant(config))
    reference = tmp_path / "reference"
    train(constant(tiny_config(reference, **RUN)))
    assert numbers(tmp_path) == pytest.approx(numbers(reference), rel=1e-5)
    assert sorted(path.name for path in (tmp_path / "out" / "checkpoints").iterdir()) == [
        "step_00000018",
        "step_00000020",
    ]


@pytest.mark.parametrize("method", ["minibatch_packing", "multipack"])
def test_a_method_trains_the_same_steps_on_any_number_of_ranks(tmp_path, method):
    changes = RUN | {"data.method": method, "batch_size": 1, "packs_per_step": 4, "max_steps": 8, "rows": 40}
    train(constant(tiny_config(tmp_path / "one", **changes)))
    config = tiny_config(tmp_path / "two", **changes, resume=True, checkpoint_every=None)
    stop = OmegaConf.create(config)
    stop.max_steps, stop.checkpoint_every = 5, 5
    run_ranks(run, 2, constant(stop))
    result = train(constant(config))
    assert numbers(tmp_path / "two") == pytest.approx(numbers(tmp_path / "one"), rel=1e-5)
    assert result["ledger"].packed == result["tokens"]


def constant(config):
    config.lr_scheduler = None  # or its end would move with max_steps
    return config


def test_under_tune_run(tmp_path, alone):
    config = tiny_config(tmp_path, **RUN)
    OmegaConf.save(config, tmp_path / "run.yaml")
    command = [Path(sys.executable).parent / "tune", "run", "--nproc_per_node", "2"]
    ended = subprocess.run(
        [*command, "streampack_recipes/full_finetune", "--config", tmp_path / "run.yaml", "max_steps=3"],
        env=os.environ | {"PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("held-out") == 1
    assert len(numbers(tmp_path)) == 3


@pytest.mark.slow
def test_a_rank_is_killed_and_torchrun_restarts_all(tmp_path):
    config = tiny_config(
        tmp_path, **RUN | {"max_steps": 400}, resume=True, checkpoint_every=10, validation=None
    )
    OmegaConf.save(config, tmp_path / "run.yaml")
    command = [
        "tune",
        "run",
        "--nproc_per_node",
        "2",
        "--max-restarts",
        "1",
        "streampack_recipes/full_finetune",
    ]
    command[0] = str(Path(sys.executable).parent / "tune")
    process = subprocess.Popen(
        [*command, "--config", str(tmp_path / "run.yaml")],
        env=os.environ | {"PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    log = tmp_path / "out" / "logs" / "log.txt"
    for _ in range(1800):
        if log.exists() and "Step 50 |" in log.read_text():
            break
        time.sleep(0.1)
    ranks = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    os.kill(int(ranks[-1]), signal.SIGKILL)
    assert process.wait(300) == 0
    assert max(numbers(tmp_path)) == 400
    assert log.read_text().count("Step 400 |") == 1
    assert log.read_text().count("Step 20 |") == 1, "it began anew"


def test_a_step_that_cannot_be_shared_out_evenly(tmp_path):
    """5 packs over 2 ranks in batches of 2: null packs fill up, and the losses are those of one rank."""
    settings = RUN | {"packs_per_step": 5, "max_steps": 8}
    for ranks in (1, 2):
        run_ranks(run, ranks, constant(tiny_config(tmp_path / str(ranks), **settings)))
    losses = numbers(tmp_path / "1")
    assert len(losses) == 8
    assert numbers(tmp_path / "2") == pytest.approx(losses, rel=1e-5)
