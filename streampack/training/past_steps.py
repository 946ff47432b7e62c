"""The packs of a step of a past run, made again from its checkpoints."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from streampack.loader.data_loader import PackedDataLoader
from streampack.packing.batch import unstack_packs
from streampack.streaming.dataset import IterablePackedDataset
from streampack.streaming.run_state import state_of
from streampack.training.checkpoint import Checkpoints, read_run
from streampack.types import Pack


def packs_of_step(dataset: IterablePackedDataset, checkpoints: Path, step: int) -> list[Pack]:
    """Make the packs of a step again, those of all ranks, without null packs.

    They are read from the newest checkpoint before the step on, or from the beginning of the data.

    Args:
        dataset: the run's, from which nothing was read yet.
        checkpoints: the run's folder of checkpoints.
        step: from 1, as metrics count it.

    Raises:
        ValueError: if the run was a second phase or has no checkpoint; if the data
            are others than the run's, or end before the step.
    """
    kept = Checkpoints(checkpoints)
    if not (steps := kept.steps()):
        raise ValueError(
            f"{checkpoints} holds no checkpoint of a run, by which its steps could be made again; set "
            "checkpoint_every, or look at the first packs of the config (without a step)"
        )
    if step < 1:
        raise ValueError(f"step {step} cannot be: steps are counted from 1")
    # A checkpoint says how many packs the steps before it had; a resume may have changed that.
    after = read_run(kept.path(min((each for each in steps if each >= step), default=steps[-1])))
    packs_per_step, state = after["packs_per_step"], after["stream"]
    begun = max((each for each in steps if each < step), default=0)
    if begun:
        state = read_run(kept.path(begun))["stream"]
    elif after["begun"]:
        raise ValueError(
            f"the run began at step {after['begun']} behind another run, and {checkpoints} has no checkpoint before "
            f"step {step}; its first one is of step {steps[0]}"
        )
    if not begun:
        head = {name: value for name, value in state.items() if name not in ("lanes", "checksum")}
        state = state_of({**head, "slot": 0, "epoch": 0}, {})
    dataset.load_state_dict(state)
    loader = PackedDataLoader(dataset, batch_size=packs_per_step, packs_per_step=packs_per_step)
    if (batch := next(islice(loader, step - begun - 1, None), None)) is None:
        raise ValueError(f"the data end before step {step}, which was never trained")
    return unstack_packs(batch)
