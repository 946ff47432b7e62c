"""torchtitan's trainer on packs, with its debug model, on a CPU; `make test-torchtitan` runs this.

`tests.harness.torchtitan_cpu` says what is replaced for a CPU.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.hf_tokenizers import byte_level
from tests.harness.torchtitan_runs import ROOT, train

pytest.importorskip("torchtitan", reason="needs torchtitan: make test-torchtitan")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

STEPS = 6
RANKS = ("--parallelism.spmd_backend=partial_dtensor",)
"""torchtitan's default backend needs a later torch than 2.13 for several ranks."""


def losses(run: list[dict[str, Any]]) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in run}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer and a checkpoint of the model's first weights."""
    folder = tmp_path_factory.mktemp("torchtitan")
    byte_level().save_pretrained(folder)
    train(folder, STEPS, "--checkpoint.create_seed_checkpoint")
    return folder


@pytest.fixture(scope="module")
def whole(begun: Path) -> dict[int, float]:
    """The losses of a run from these weights to its end, on one rank."""
    return losses(train(copy(begun), STEPS))


def copy(folder: Path) -> Path:
    target = folder.parent / f"{folder.name}-{len(list(folder.parent.iterdir()))}"
    shutil.copytree(folder, target)
    return target


def test_losses_equal_those_of_a_plain_loop_over_single_sequences(
    begun: Path, whole: dict[int, float]
) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.harness.torchtitan_runs", str(begun), str(STEPS)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    printed = subprocess.run(command, env=env, cwd=begun, check=True, capture_output=True, text=True).stdout
    plain = json.loads(printed.splitlines()[-1])
    assert list(whole) == list(range(1, STEPS + 1))
    assert list(whole.values()) == pytest.approx(plain, rel=1e-5)
    assert whole[STEPS] != pytest.approx(whole[1], rel=1e-3), "the model has learned"


def test_a_killed_run_resumes_from_torchtitans_checkpoint(begun: Path, whole: dict[int, float]) -> None:
    folder = copy(begun)
    killed = losses(train(folder, STEPS, kill_at=5))
    assert killed == {step: whole[step] for step in range(1, 6)}
    two = copy(folder)
    assert losses(train(folder, STEPS)) == {step: whole[step] for step in range(5, STEPS + 1)}

    flags = (*RANKS, "--training.local_batch_size=1", "--dataloader.num_workers=1")
    resumed = losses(train(two, STEPS, *flags, ranks=2))
    assert list(resumed) == list(range(5, STEPS + 1))
    assert list(resumed.values()) == pytest.approx([whole[step] for step in resumed], rel=1e-5)


def test_two_ranks_killed_resume_as_one(begun: Path, whole: dict[int, float]) -> None:
    folder = copy(begun)
    flags = (*RANKS, "--training.local_batch_size=2")
    killed = losses(train(folder, STEPS, *flags, ranks=2, kill_at=5))
    assert list(killed.values()) == pytest.approx([whole[step] for step in killed], rel=1e-5)
    resumed = losses(train(folder, STEPS, *RANKS))
    assert list(resumed.values()) == pytest.approx([whole[step] for step in range(5, STEPS + 1)], rel=1e-5)


@pytest.mark.parametrize(
    "flags",
    [
        ("--parallelism.tensor_parallel_degree=2",),
        ("--parallelism.context_parallel_degree=2", "--parallelism.context_parallel_load_balancer=None"),
    ],
)
def test_ranks_of_one_dp_rank_train_as_one(
    flags: tuple[str, ...], begun: Path, whole: dict[int, float]
) -> None:
    found = losses(train(copy(begun), 2, *RANKS, *flags, ranks=2))
    assert list(found.values()) == pytest.approx([whole[1], whole[2]], rel=1e-4)


def test_the_example_trains_and_validates(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}"}
    example = ROOT / "examples" / "torchtitan_packs.py"
    subprocess.run([sys.executable, str(example)], cwd=tmp_path, env=env, check=True, capture_output=True)
    flags = ("--training.seq_len=128", "--validator.freq=2", "--checkpoint.no-enable")
    found = losses(train(tmp_path, 4, *flags, module="torchtitan_packs"))
    assert found[4] < found[1]
    [failed] = train(tmp_path, 2, "--dataloader.dataset=c4", module="torchtitan_packs", to_fail=True)
    assert "dataloader.dataset='c4' names data" in failed["error"]
