"""Checks that the ranks which iterate a dataset may read different data, and that none reads all of it."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.utils.data import get_worker_info

from streampack.validation import warn_user

MODEL_PARALLEL_DIMS = {
    *("tp", "cp", "sp", "pp", "mp", "etp", "tensor", "context", "sequence", "pipeline", "model"),
    *(f"{kind}_parallel" for kind in ("tensor", "context", "sequence", "pipeline", "model", "tensor_model")),
}
"""Names of mesh dimensions along which all ranks must get the same batch."""


def ranks_here() -> int | None:
    """Return the number of ranks of the default process group; None without a group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else None


def refuse_several_ranks(of_parent: int) -> None:
    """Raise if several ranks would iterate a dataset without a `PackedDataLoader`.

    A spawned worker process has no process group: ``of_parent`` is the number of ranks of whoever pickled the dataset.
    """
    here, in_worker = ranks_here(), get_worker_info() is not None
    size = here or (of_parent if in_worker else 1)
    if size > 1:
        raise ValueError(
            f"each of {size} ranks would read all the data, or accelerate would share the packs out once more; iterate "
            "a PackedDataLoader, or under Hugging Face's Trainer call prepare_trainer_for_packing(trainer)"
        )
    if here is None and not in_worker:
        warn_of_missing_group()


def require_data_parallel(what: str) -> None:
    """Raise if ranks of one tensor-, context- or pipeline-parallel group would get different data.

    They are known by the names of the process groups that a `DeviceMesh` makes for its dimensions. A mesh of one
    dimension over all ranks makes none (see `model_parallel_warning`). ``what`` says who gives each rank its own data.
    """
    for group in dist.distributed_c10d._world.pg_map:
        prefix, _, name = group.group_desc.partition("_")
        if prefix == "mesh" and name in MODEL_PARALLEL_DIMS and group.size() > 1:
            raise ValueError(_message_of_same_batches(name, group.size(), what))


def model_parallel_warning(model: nn.Module) -> str | None:
    """Return a warning if the mesh of a model's parameters has ranks that must get the same batches, else None."""
    for parameter in model.parameters():
        mesh: Any = getattr(parameter, "device_mesh", None)  # a DTensor has one
        for dimension, name in enumerate(getattr(mesh, "mesh_dim_names", None) or ()):
            if name in MODEL_PARALLEL_DIMS and (size := mesh.size(dimension)) > 1:
                return _message_of_same_batches(name, size, "a PackedDataLoader gives each rank its own")
    return None


def _message_of_same_batches(name: str, size: int, what: str) -> str:
    return (
        f"the device mesh has a dimension {name!r} of {size} ranks, which must be given the same batches, and {what}; "
        "iterate a PackedDataLoader that is told so: PackedDataLoader(..., data_ranks=mesh['dp']), with the dimensions "
        "along which batches differ"
    )


def require_loader_made_after_group(*, made_for_one_rank: bool) -> None:
    """Raise if a loader was made before the process group; it would read all the data on every rank.

    Warns if there should be a group and still is none. ``made_for_one_rank`` says whether the loader found a single
    rank when it was made.
    """
    ranks = ranks_here()
    if ranks is None:
        warn_of_missing_group()
    elif ranks > 1:
        if made_for_one_rank:
            raise ValueError(
                f"this loader was made before the process group of {ranks} ranks, and each would read all "
                "the data; make it after torch.distributed.init_process_group (in Lightning: in train_dataloader())"
            )
        require_data_parallel("a PackedDataLoader gives each rank its own")


def warn_of_missing_group() -> None:
    """Warn if this process was launched as one of several and there is no process group."""
    size = os.environ.get("WORLD_SIZE", "1")
    if size.isdecimal() and int(size) > 1:
        warn_user(
            f"WORLD_SIZE={size} and there is no process group, so each of these processes reads all the data; call "
            "torch.distributed.init_process_group first, or ignore this if they are runs of their own",
        )
