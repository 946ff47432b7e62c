"""Whole training runs: on other numbers of ranks, killed and resumed, killed while they save, elastic."""

from __future__ import annotations

import io
import logging
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from stress.job import Run, job
from stress.ranks import Ranks, free_port

ROOT = Path(__file__).resolve().parent.parent
SETTINGS: dict[str, Any] = {"data.num_lanes": 4, "num_workers": 2, "batch_size": 1, "validation": None}


def config_of(folder: Path, **changes: Any) -> Any:
    """A toy of a model on a corpus that has something to learn, as the tests use them; 4 packs a step."""
    from tests.support.tiny import tiny_config

    return tiny_config(folder, **{**SETTINGS, **changes})


def losses_of(folder: Path) -> dict[int, float]:
    """By step, from the log; later lines for the same step count."""
    text = (folder / "out" / "logs" / "log.txt").read_text()
    return {int(m[1]): float(m[2]) for m in re.finditer(r"Step (\d+) \| (?:\S+ )*?loss:(\S+)", text)}


def train(config: Any) -> int:
    """In a rank: the whole run; its last step."""
    from streampack_recipes import full_finetune

    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        return int(full_finetune.train(config)["step"])


def warm_up() -> None:
    """Import what takes seconds before ranks are forked, and let it say nothing."""
    logging.disable(logging.WARNING)
    import streampack_recipes.full_finetune  # noqa: F401


def furthest(left: dict[int, float], right: dict[int, float]) -> float:
    """The largest relative difference; both must have the same steps."""
    assert left.keys() == right.keys(), f"steps {sorted(left.keys() ^ right.keys())} are on one side only"
    return max(abs(left[step] / right[step] - 1) for step in left)


@job(
    "same-losses",
    "2 ranks against 1 rank with the same global batch, 20 steps: the same losses to 1e-5",
    limit=180,
)
def same_losses(run: Run) -> str:
    """full_finetune, FSDP2 over gloo, 2 workers each; 4 ranks too."""
    warm_up()
    worst = 0.0
    with tempfile.TemporaryDirectory() as name:
        found = {}
        for size in (1, 2, 4)[: run.count(3, 2)]:
            folder = Path(name) / str(size)
            with Ranks(size, join=False) as ranks:
                workers = 2 if size < 4 else 1
                steps = ranks.run(
                    train, config_of(folder, max_steps=20, num_workers=workers, checkpoint_every=None)
                )
                assert steps == [20] * size
            found[size] = losses_of(folder)
            assert len(found[size]) == 20
            worst = max(worst, furthest(found[1], found[size]))
        assert worst < 1e-5, f"{worst:.1e}"
        first, last = found[1][1], found[1][20]
    sizes = ", ".join(map(str, found))
    return f"{sizes} ranks, loss {first:.3f} to {last:.3f}; largest relative difference {worst:.1e}"


@job(
    "kill-training", "SIGKILL of a training run at random points: it goes on with the same losses", limit=420
)
def kill_training(run: Run) -> str:
    """full_finetune, 2 ranks x 2 workers, a checkpoint every 2 steps, in the background every other time."""
    warm_up()
    kills = run.count(20, 1)
    rng = random.Random(6)
    steps = kills * 6 + 10
    with tempfile.TemporaryDirectory() as name:
        whole, broken = Path(name) / "whole", Path(name) / "broken"
        settings = {"max_steps": steps, "checkpoint_every": 2, "lr_scheduler": None}
        with Ranks(2, join=False) as ranks:
            ranks.run(train, config_of(whole, **settings))
        wanted = losses_of(whole)
        again = done = 0
        while done < kills:
            run.progress(done, kills, "kills")
            before = newest(broken)
            assert before < steps - 4, "the run is too short for so many kills"
            config = config_of(broken, resume=True, async_checkpoint=bool(done % 2), **settings)
            with Ranks(2, join=False) as ranks:
                ranks.start(train, config)
                target = before + rng.randint(2, 6)
                deadline = time.monotonic() + 60
                while last_step(broken) < target and time.monotonic() < deadline:
                    time.sleep(0.002)
                time.sleep(rng.random() * 0.05)
                ranks.kill()
            assert newest(broken) >= before
            done += newest(broken) > before
            again += last_step(broken) - newest(broken)
        with Ranks(2, join=False) as ranks:
            assert ranks.run(train, config_of(broken, resume=True, **settings)) == [steps, steps]
        worst = furthest(wanted, losses_of(broken))
        # Lines that were logged before a kill, and again after it, must agree too.
        text = (broken / "out" / "logs" / "log.txt").read_text()
        for step, loss in re.findall(r"Step (\d+) \| (?:\S+ )*?loss:(\S+)", text):
            assert abs(float(loss) / wanted[int(step)] - 1) < 1e-6, (
                f"step {step}: {loss}, not {wanted[int(step)]}"
            )
        assert worst < 1e-6
    return (
        f"{kills} kills in {steps} steps, {again} steps made again; largest relative difference {worst:.1e}"
    )


def newest(folder: Path) -> int:
    """The last step of which there is a checkpoint; 0 without one."""
    found = [
        re.fullmatch(r"step_(\d+)", path.name) for path in (folder / "out" / "checkpoints").glob("step_*")
    ]
    return max((int(match[1]) for match in found if match), default=0)


def last_step(folder: Path) -> int:
    """The last that was logged."""
    try:
        return max(losses_of(folder), default=0)
    except (FileNotFoundError, ValueError):  # half a line
        return 0


@job(
    "kill-saves",
    "killed at each write, fsync and rename of a checkpoint: the previous or the new, never a mix",
    limit=420,
)
def kill_saves(run: Run) -> str:
    """2 ranks, sharded; either of them dies at each point in turn, and what is left is loaded by 1 and 2 ranks."""
    warm_up()
    from tests.training import test_checkpoint  # noqa: F401 - before ranks are forked

    kinds: Counter[str] = Counter()
    left: Counter[int] = Counter()
    with tempfile.TemporaryDirectory() as name:
        with Ranks(2, join=False) as ranks:
            whole = ranks.run(save_and_die, Path(name) / "whole", 0, 0)[0]
        for victim in (0, 1):
            for number in range(1, 1000):
                run.progress(number, 1000, f"points of rank {victim}, at most")
                folder = Path(name) / f"{victim}-{number}"
                with Ranks(2, join=False) as ranks:
                    ranks.start(save_and_die, folder, victim, number)
                    ended = wait_for(ranks, victim)
                journal = (folder / f"journal-{victim}").read_text().split()
                with Ranks(1 + number % 2, join=False) as ranks:
                    step, weights = ranks.run(load_newest, folder)[0]
                assert weights == whole[step], f"killed at {journal[-1]} {number} of rank {victim}: a mix"
                left[step] += 1
                if ended or (run.quick and number == 3):
                    break
                kinds[journal[-1]] += 1
    if not run.quick:
        assert kinds["write"] >= 5, kinds
        assert kinds["fsync"] >= 5, kinds
        assert kinds["rename"] >= 3, kinds
        assert set(left) == {5, 10}
    counts = ", ".join(f"{count} {kind}s" for kind, count in kinds.most_common())
    return f"{counts}, of 2 ranks; then the previous {left[5]} times, the new one {left[10]} times, whole each time"


def wait_for(ranks: Ranks, victim: int) -> bool:
    """Until the job is done on all ranks (True), or the victim has died (False)."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if all(pipe.poll() for pipe in ranks.pipes):  # an end counts as something to read
            ranks.processes[victim].join(1)
        if not ranks.processes[victim].is_alive():
            return False
        if all(pipe.poll() for pipe in ranks.pipes):
            ranks.collect(1)
            return True
        time.sleep(0.005)
    raise AssertionError("a rank hangs in a save that nobody disturbed")


def save_and_die(folder: Path, victim: int, number: int) -> dict[int, list[Any]]:
    """In a rank: save step 5, train, save step 10; rank ``victim`` ends at the ``number``-th point of the latter."""
    from streampack.distributed.world import join_world
    from streampack.training.checkpoint import Checkpoints
    from tests.training.test_checkpoint import die_at

    weights = {}
    with join_world(_cpu(), timeout=60) as world:
        model, optimizer = small(world)
        folder.mkdir(exist_ok=True)
        checkpoints = Checkpoints(folder / "checkpoints", keep=1, world=world)
        for step in (5, 10):
            step_once(model, optimizer)
            weights[step] = full(model)
            if step == 10 and number and world.rank == victim:
                die_at(number, os.open(folder / f"journal-{victim}", os.O_WRONLY | os.O_CREAT))
            checkpoints.save(step, model=model, optimizer=optimizer, run={"step": step})
    return weights


def load_newest(folder: Path) -> tuple[int, list[Any]]:
    """In a rank: the step of the newest checkpoint, and its weights."""
    from streampack.distributed.world import join_world
    from streampack.training.checkpoint import Checkpoints

    with join_world(_cpu(), timeout=60) as world:
        model, optimizer = small(world)
        step_once(model, optimizer)  # so that the optimizer has something to overwrite
        checkpoints = Checkpoints(folder / "checkpoints", keep=1, world=world)
        step = checkpoints.newest()
        assert step is not None
        run = checkpoints.load(step, model=model, optimizer=optimizer)
        assert run == {"step": step}
        return step, full(model)


def _cpu() -> Any:
    import torch

    return torch.device("cpu")


def small(world: Any) -> tuple[Any, Any]:
    """A model of two layers, sharded over the ranks if there are several, and its optimizer."""
    import torch
    from torchtune.models.llama3 import llama3

    from streampack.training.config import RunConfig
    from streampack.training.model import build_model

    shape = {
        "vocab_size": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "embed_dim": 16, "max_seq_len": 12,
        "intermediate_dim": 32,
    }  # fmt: skip
    torch.manual_seed(0)
    config = RunConfig(
        model={"_component_": "torchtune.models.llama3.llama3", **shape}, dtype="fp32", data={"max_seq_len": 12},
        max_steps=1, output_dir="", tokenizer={}, checkpointer={}, optimizer={}, metric_logger={},
    )  # fmt: skip
    model = build_model(config, weights=llama3(**shape).state_dict(), device=_cpu(), world=world)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step_once(model: Any, optimizer: Any) -> None:
    """On tokens that are always the same."""
    import torch

    optimizer.zero_grad()
    logits = model(torch.arange(12)[None])
    logits = torch.cat(logits, 1) if isinstance(logits, list) else logits
    logits.float().square().mean().backward()
    optimizer.step()


def full(model: Any) -> list[Any]:
    """All weights, by name."""
    values = {name: value.detach() for name, value in model.named_parameters()}
    return [
        (getattr(values[name], "full_tensor", lambda name=name: values[name])()).tolist()
        for name in sorted(values)
    ]


@job(
    "elastic-training",
    "a lost agent under torchrun: the other goes on by itself, with the same packs a step",
    limit=420,
)
def elastic_training(run: Run) -> str:
    """``--nnodes=1:2``, two agents of one rank each; SIGKILL of the second agent and its rank."""
    warm_up()
    steps = run.count(400, 150)
    with tempfile.TemporaryDirectory() as name:
        whole, broken = Path(name) / "whole", Path(name) / "broken"
        settings = {
            "max_steps": steps,
            "checkpoint_every": 5,
            "lr_scheduler": None,
            "num_workers": 1,
            "resume": True,
        }
        with Ranks(1, join=False) as ranks:
            ranks.run(train, config_of(whole, **settings), timeout=200)
        from omegaconf import OmegaConf

        OmegaConf.save(config_of(broken, **settings), broken / "run.yaml")
        endpoint = f"localhost:{free_port()}"
        agents = [agent(endpoint, broken, number) for number in range(2)]
        try:
            deadline = time.monotonic() + 120
            while newest(broken) < steps // 10:
                assert time.monotonic() < deadline, (broken / "agent-0").read_text()[-2000:]
                assert all(one.poll() is None for one in agents), (broken / "agent-0").read_text()[-2000:]
                time.sleep(0.01)
            killed, at = time.monotonic(), last_step(broken)
            end(agents[1], signal.SIGKILL)
            while last_step(broken) <= at + 5:
                assert agents[0].poll() is None, (broken / "agent-0").read_text()[-2000:]
                assert time.monotonic() < killed + 240, "nobody went on"
                time.sleep(0.05)
            went_on = time.monotonic() - killed
            code = agents[0].wait(240)
            assert code == 0, (broken / "agent-0").read_text()[-2000:]
        finally:
            for one in agents:
                end(one, signal.SIGKILL)
        assert at < steps, "it was over before the agent was killed"
        worst = furthest(losses_of(whole), losses_of(broken))
        assert worst < 1e-4, f"{worst:.1e}"
    return (
        f"killed after step {at} of {steps}; the other agent went on {went_on:.0f} s later, alone; against one rank "
        f"undisturbed, largest relative difference of a loss {worst:.1e}"
    )


def agent(endpoint: str, folder: Path, number: int) -> subprocess.Popen[bytes]:
    """One torchrun, as on a node of its own; the first also keeps the rendezvous."""
    command = [
        *(
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes=1:2",
            "--nproc-per-node=1",
            "--max-restarts=3",
        ),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=stress", "--local-addr=localhost"),
        f"--rdzv-conf=is_host={int(number == 0)},last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3",
        *("-m", "streampack_recipes.full_finetune", "--config", str(folder / "run.yaml")),
    ]
    env = os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    with (folder / f"agent-{number}").open("wb") as log:
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log, process_group=0)


def end(process: subprocess.Popen[bytes], how: signal.Signals) -> None:
    """The agent and all below it: torchrun gives its ranks sessions of their own."""
    from stress.bugs import descendants

    for pid in [process.pid, *descendants(process.pid)]:
        with suppress(ProcessLookupError):
            os.kill(pid, how)
    with suppress(subprocess.TimeoutExpired):
        process.wait(5)
