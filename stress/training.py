"""Training runs on several numbers of ranks, killed and resumed, killed while they save, and under torchrun."""

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from stress.corpus import run_apart
from stress.job import Run, job
from stress.kills import wait_until
from tests.harness.processes import Ranks, free_port, kill_tree

Process = subprocess.Popen[bytes]
ROOT = Path(__file__).resolve().parent.parent
SETTINGS: dict[str, Any] = {"data.num_lanes": 4, "num_workers": 2, "batch_size": 1, "validation": None}


def config_of(folder: Path, **changes: Any) -> Any:
    """Return the tests' config of a tiny model on a corpus that it can learn; 4 packs a step."""
    from tests.harness.tiny import tiny_config

    return tiny_config(folder, **{**SETTINGS, **changes})


def logged_losses(folder: Path) -> list[tuple[int, float]]:
    """Return (step, loss) of every line of the log."""
    text = (folder / "out" / "logs" / "log.txt").read_text()
    return [(int(m[1]), float(m[2])) for m in re.finditer(r"Step (\d+) \| (?:\S+ )*?loss:(\S+)", text)]


def train(config: Any) -> int:
    """Train to the end; return the last step. Called in a rank."""
    from streampack_recipes import full_finetune

    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        return int(full_finetune.train(config)["step"])


def import_recipe() -> None:
    """Import the recipe before ranks are forked, which takes seconds; switch off its log."""
    os.environ["STREAMPACK_TRUST"] = "tests"  # lets the config name the tests' tokenizer
    logging.disable(logging.WARNING)
    import streampack_recipes.full_finetune  # noqa: F401


def train_whole(folder: Path, ranks: int, **settings: Any) -> dict[int, float]:
    """Train without a disturbance; return the losses."""
    run_apart(train, config_of(folder, **settings), size=ranks, timeout=200)
    return dict(logged_losses(folder))


def write_config(folder: Path, **settings: Any) -> None:
    """Write the config of a run for `start`."""
    from omegaconf import OmegaConf

    OmegaConf.save(config_of(folder, resume_from_checkpoint=True, **settings), folder / "run.yaml")


def compare_losses(expected: dict[int, float], folder: Path, most: float = 1e-6) -> float:
    """Check the losses of a run, those of steps that were repeated too; return the largest relative difference."""
    found = logged_losses(folder)
    assert expected.keys() == dict(found).keys(), "some steps are on one side only"
    worst = max(abs(loss / expected[step] - 1) for step, loss in found)
    assert worst < most, f"a relative difference of {worst:.1e}"
    return worst


@job(
    "kill-training",
    "SIGKILL of a training run at random points: it continues with the same losses",
    limit=420,
)
def kill_training(run: Run) -> str:
    """Kill full_finetune on 2 ranks x 2 workers; it saves every 2 steps, in every other run asynchronously."""
    import_recipe()
    kills = run.count(20, 1)
    rng = random.Random(6)
    steps = kills * 6 + 10
    with tempfile.TemporaryDirectory() as name:
        whole, broken = Path(name) / "whole", Path(name) / "broken"
        settings = {"max_steps": steps, "save_every_n_steps": 2, "lr_scheduler": None}
        expected = train_whole(whole, 2, **settings)
        repeated = done = 0
        while done < kills:
            before = newest_checkpoint(broken)
            assert before < steps - 4, "the run is too short for this number of kills"
            config = config_of(
                broken, resume_from_checkpoint=True, enable_async_checkpointing=bool(done % 2), **settings
            )
            with Ranks(2, join=False) as ranks:
                ranks.start(train, config)
                target = before + rng.randint(2, 6)
                wait_until(lambda step=target: last_logged_step(broken) >= step, 60)
                time.sleep(rng.random() * 0.05)
                ranks.kill()
            assert newest_checkpoint(broken) >= before
            done += newest_checkpoint(broken) > before
            repeated += last_logged_step(broken) - newest_checkpoint(broken)
        assert run_apart(train, config_of(broken, resume_from_checkpoint=True, **settings), size=2) == [
            steps,
            steps,
        ]
        worst = compare_losses(expected, broken)
    return (
        f"{kills} kills in {steps} steps, {repeated} steps repeated; largest relative difference {worst:.1e}"
    )


@job(
    "sigterm",
    "SIGTERM in mid-step, 1 and 2 processes: a checkpoint of that step; then the same losses",
    limit=420,
)
def sigterm(run: Run) -> str:
    """Send SIGTERM to `streampack run`: to one process and its workers, and to torchrun with 2 ranks."""
    import_recipe()
    signals = run.count(6, 1)
    rng = random.Random(17)
    slowest, worst, stops = 0.0, 0.0, []
    for size in (1, 2):
        launched = ["--nproc_per_node", str(size)] * (size > 1)
        with tempfile.TemporaryDirectory() as name:
            whole, broken = Path(name) / "whole", Path(name) / "broken"
            steps = 60 * (signals + 1)
            settings = {"max_steps": steps, "save_every_n_steps": steps, "lr_scheduler": None}
            expected = train_whole(whole, size, **settings)
            write_config(broken, **settings)
            for number in range(signals + 1):
                before = newest_checkpoint(broken)
                process = start(broken, "streampack", "run", *launched, "full_finetune")
                try:
                    if number < signals:
                        step = before + rng.randint(1, 40)
                        wait_for_step(last_logged_step, broken, step, [process])
                        sent, at = time.monotonic(), last_logged_step(broken)
                        os.killpg(process.pid, signal.SIGTERM)  # ranks of torchrun are in groups of their own
                        assert process.wait(60) == 128 + signal.SIGTERM, log_end(broken)
                        slowest = max(slowest, time.monotonic() - sent)
                        assert newest_checkpoint(broken) == last_logged_step(broken), log_end(broken)
                        stops.append(last_logged_step(broken) - at)
                    else:
                        assert process.wait(120) == 0, log_end(broken)
                finally:
                    end_agent(process)
            worst = max(worst, compare_losses(expected, broken))
    return (
        f"{2 * signals} signals; the slowest run had ended {slowest:.1f} s later with exit code 143, and a checkpoint "
        f"of its last step, at most {max(stops)} after the one logged before; largest relative difference {worst:.1e}"
    )


def start(folder: Path, *words: str, number: int = 0) -> Process:
    """Start a module of Python in a process group of its own, whose log is in ``folder``."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *words, "--config", str(folder / "run.yaml")]
    with (folder / f"agent-{number}").open("wb") as log:
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log, process_group=0)


def wait_for_step(
    reached: Callable[[Path], int], folder: Path, step: int, running: list[Process], *, seconds: float = 120
) -> None:
    """Wait until a run has reached a step, and require that its processes keep running."""

    def there() -> bool:
        assert all(process.poll() is None for process in running), log_end(folder)
        return reached(folder) >= step

    wait_until(there, seconds, f"step {step}")


def newest_checkpoint(folder: Path) -> int:
    """Return the step of the newest checkpoint, 0 if there is none."""
    found = (path.name[5:] for path in (folder / "out" / "checkpoints").glob("step_*"))
    return max((int(step) for step in found if step.isdecimal()), default=0)


def last_logged_step(folder: Path) -> int:
    """Return the last step that was logged, 0 if there is none."""
    try:
        return max((step for step, _ in logged_losses(folder)), default=0)
    except (FileNotFoundError, ValueError):  # half a line
        return 0


@job(
    "kill-saves",
    "killed at each write, fsync and rename of a checkpoint: the previous or the new, never a mix",
    limit=420,
)
def kill_saves(run: Run) -> str:
    """Let either of 2 ranks die at each point of a save in turn; load the checkpoint that is left on 1 or 2 ranks."""
    import_recipe()
    import tests.harness.runs  # noqa: F401 - before ranks are forked

    kinds: Counter[str] = Counter()
    loaded: Counter[int] = Counter()
    with tempfile.TemporaryDirectory() as name:
        whole, _ = run_apart(save_and_exit, Path(name) / "whole", 0, 0, size=2)
        for victim in (0, 1):
            for number in range(1, 1000):
                folder = Path(name) / f"{victim}-{number}"
                with Ranks(2, join=False) as ranks:
                    ranks.start(save_and_exit, folder, victim, number)
                    completed = wait_for_victim(ranks, victim)
                journal = (folder / f"journal-{victim}").read_text().split()
                (step, weights), *_ = run_apart(load_newest_checkpoint, folder, size=1 + number % 2)
                assert weights == whole[step], f"killed at {journal[-1]} {number} of rank {victim}: a mix"
                loaded[step] += 1
                if completed or (run.quick and number == 3):
                    break
                kinds[journal[-1]] += 1
    if not run.quick:
        assert all(kinds[kind] >= least for kind, least in (("write", 5), ("fsync", 5), ("rename", 3))), kinds
        assert set(loaded) == {5, 10}
    counts = ", ".join(f"{count} {kind}s" for kind, count in kinds.most_common())
    return f"{counts}, of 2 ranks; then the previous {loaded[5]} times, the new one {loaded[10]} times, whole each time"


def wait_for_victim(ranks: Ranks, victim: int) -> bool:
    """Wait until all ranks have done their job (True) or the victim has died (False)."""
    assert ranks.pipes[victim].poll(60), "a save hangs without a kill"  # it has answered, or is closed
    ranks.processes[victim].join(1)
    if not ranks.processes[victim].is_alive():
        return False
    ranks.collect(60)
    return True


@contextmanager
def checkpointing(folder: Path) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Give a rank's world, a model, its optimizer, and their checkpoints. Called in a rank."""
    from streampack.training.checkpoint import Checkpoints
    from streampack.training.world import join_world

    with join_world(torch.device("cpu"), timeout=60) as world:
        folder.mkdir(exist_ok=True)
        yield world, *small_model(), Checkpoints(folder / "checkpoints", keep=1, world=world)


def save_and_exit(folder: Path, victim: int, number: int) -> dict[int, list[Any]]:
    """Save step 5, train, save step 10; rank ``victim`` exits at the ``number``-th point of that save."""
    from tests.harness.runs import die_at

    weights = {}
    with checkpointing(folder) as (world, model, optimizer, checkpoints):
        for step in (5, 10):
            train_step(model, optimizer)
            weights[step] = full_weights(model)
            if step == 10 and number and world.rank == victim:
                die_at(number, os.open(folder / f"journal-{victim}", os.O_WRONLY | os.O_CREAT))
            checkpoints.save(step, model=model, optimizer=optimizer, run={"step": step})
    return weights


def load_newest_checkpoint(folder: Path) -> tuple[int, list[Any]]:
    """Load the newest checkpoint; return its step and weights. Called in a rank."""
    with checkpointing(folder) as (_, model, optimizer, checkpoints):
        train_step(model, optimizer)  # so that the optimizer has a state, which loading overwrites
        step = max(checkpoints.steps())
        assert checkpoints.load(step, model=model, optimizer=optimizer) == {"step": step}
        return step, full_weights(model)


def small_model() -> tuple[Any, Any]:
    """Build a model of two layers, sharded over the ranks, and its optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(16, 16), torch.nn.Linear(16, 32), torch.nn.Linear(32, 16))
    if dist.is_initialized():  # not by a rank that is alone
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (*model, model):
            fully_shard(layer, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train_step(model: Any, optimizer: Any) -> None:
    """Make an optimizer step on fixed tokens."""
    optimizer.zero_grad()
    model(torch.arange(12)).square().mean().backward()
    optimizer.step()


def full_weights(model: Any) -> list[Any]:
    """Return all weights, unsharded, in the order of their names."""
    values = [value for _, value in sorted(model.state_dict().items())]
    return [(value.full_tensor() if isinstance(value, DTensor) else value).tolist() for value in values]


@job(
    "elastic-training",
    "a lost agent under torchrun: the other resumes without help, with the same packs a step",
    limit=420,
)
def elastic_training(run: Run) -> str:
    """Start two agents of one rank each with ``--nnodes=1:2``, and kill the second agent and its rank."""
    import_recipe()
    steps = run.count(400, 150)
    with tempfile.TemporaryDirectory() as name:
        whole, broken = Path(name) / "whole", Path(name) / "broken"
        settings = {"max_steps": steps, "save_every_n_steps": 5, "lr_scheduler": None, "num_workers": 1}
        expected = train_whole(whole, 1, **settings)
        write_config(broken, **settings)
        endpoint = f"localhost:{free_port()}"
        agents = [start_agent(endpoint, broken, number) for number in range(2)]
        try:
            wait_for_step(newest_checkpoint, broken, steps // 10, agents)
            killed, at = time.monotonic(), last_logged_step(broken)
            end_agent(agents[1])
            wait_for_step(last_logged_step, broken, at + 6, agents[:1], seconds=240)
            delay = time.monotonic() - killed
            assert agents[0].wait(240) == 0, log_end(broken)
        finally:
            for agent in agents:
                end_agent(agent)
        assert at < steps, "training ended before the agent was killed"
        worst = compare_losses(expected, broken, 1e-4)
    return (
        f"killed after step {at} of {steps}; the other agent continued {delay:.0f} s later, alone; against one rank "
        f"undisturbed, largest relative difference of a loss {worst:.1e}"
    )


def log_end(folder: Path) -> str:
    """Return the end of what the first agent wrote."""
    return (folder / "agent-0").read_text()[-2000:]


def start_agent(endpoint: str, folder: Path, number: int) -> Process:
    """Start torchrun as on a node of its own; number 0 also hosts the rendezvous."""
    words = f"""torch.distributed.run --nnodes=1:2 --nproc-per-node=1 --max-restarts=3 --rdzv-backend=c10d
        --rdzv-endpoint={endpoint} --rdzv-id=stress --local-addr=localhost
        --rdzv-conf=is_host={int(number == 0)},last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3
        -m streampack_recipes.full_finetune"""
    return start(folder, *words.split(), number=number)


def end_agent(process: Process) -> None:
    """Kill an agent and its ranks, which torchrun starts in sessions of their own."""
    kill_tree(process.pid)
    with suppress(subprocess.TimeoutExpired):
        process.wait(5)
