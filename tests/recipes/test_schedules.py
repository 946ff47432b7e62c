"""The steps and the learning rate of a run that goes on in another way than it began: neither rises again."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from streampack_recipes.full_finetune import train

from tests.support.ranks import run_ranks
from tests.support.tiny import numbers, tiny_config

# torchtune's cosine, which rises again behind its last step.
PEAK = 0.02
SMALL: dict[str, Any] = {"rows": 120, "validation": None, "epochs": 1, "max_steps": None, "packs_per_step": 2}


def config(folder: Path, **changes: Any) -> Any:
    return tiny_config(folder, **{**SMALL, "data.num_lanes": 1, **changes})


def rates(folder: Path) -> list[float]:
    """The rate of every step."""
    found = numbers(folder, "lr")
    assert [*found] == [*range(1, len(found) + 1)]
    return [*found.values()]


def assert_falls(found: list[float]) -> None:
    peak = found.index(max(found))
    assert found[peak:] == sorted(found[peak:], reverse=True), f"the rate rises again: {found}"
    assert found[-1] < PEAK / 10


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("whole")
    train(config(folder))
    found = rates(folder)
    assert len(found) > 15
    assert_falls(found)
    return found


def test_a_run_that_had_max_steps_goes_on_to_the_end_of_its_epochs(
    tmp_path: Path, whole: list[float]
) -> None:
    """The smoke test's few steps stayed those of the schedule, which rose to its peak again."""
    train(config(tmp_path, max_steps=8))
    assert len(rates(tmp_path)) == 8
    train(config(tmp_path, resume=True))
    found = rates(tmp_path)
    assert found[9:] == pytest.approx(whole[9:]), "as if it had never had them"
    assert len(found) == len(whole)


def test_a_run_that_is_given_max_steps_keeps_its_schedule(tmp_path: Path, whole: list[float]) -> None:
    train(config(tmp_path, checkpoint_every=8))
    for step in (tmp_path / "out" / "checkpoints").iterdir():
        if step.name > "step_00000008":
            shutil.rmtree(step)
    train(config(tmp_path, resume=True, max_steps=10))
    assert rates(tmp_path)[:10] == pytest.approx(whole[:10])


def test_more_epochs_than_before_have_a_schedule_of_their_own(tmp_path: Path, whole: list[float]) -> None:
    train(config(tmp_path))
    train(config(tmp_path, resume=True, epochs=2))
    found = rates(tmp_path)
    assert len(found) == pytest.approx(2 * len(whole), abs=2)
    assert_falls(found[len(whole) + 1 :])
    assert found[len(whole) + 1] > PEAK / 3, "the second half of the new one"


@pytest.mark.filterwarnings("ignore:.*evenly:UserWarning")
@pytest.mark.parametrize("packs_per_step", [2, None])
def test_a_resume_on_more_ranks_than_lanes_keeps_the_steps(
    packs_per_step: int | None, tmp_path: Path, whole: list[float]
) -> None:
    """Each rank took its share of a step, those without lanes too: there were twice as many steps."""
    settings: dict[str, Any] = {
        "packs_per_step": packs_per_step,
        "batch_size": 2 if packs_per_step is None else 1,
    }
    train(config(tmp_path, max_steps=8, **settings))
    later = config(tmp_path, resume=True, **settings)
    run_ranks(train, 2, later)
    found = rates(tmp_path)
    assert len(found) == len(whole)
    assert found[9:] == pytest.approx(whole[9:])
    assert_falls(found[9:])
