"""Data ranks: which ranks get the same batches, and checks that no others do, and that none reads all data."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import get_worker_info

from streampack.validation import warn_user

MODEL_PARALLEL_DIMS = {
    *("tp", "cp", "sp", "pp", "mp", "etp", "tensor", "context", "sequence", "pipeline", "model"),
    *(f"{kind}_parallel" for kind in ("tensor", "context", "sequence", "pipeline", "model", "tensor_model")),
}
"""Names of mesh dimensions along which all ranks must get the same batch."""

DataPlace = tuple[int, int]
"""(data rank, number of data ranks) of a process. Processes with the same data rank get the same batches."""


def data_place(data_ranks: DeviceMesh | DataPlace | None) -> DataPlace | None:
    """Return this process's data rank and the number of data ranks; None means that every rank is a data rank.

    >>> data_place((1, 4))
    (1, 4)
    """
    if data_ranks is None:
        return None
    if not isinstance(data_ranks, DeviceMesh):
        match data_ranks:
            case (int(rank), int(size)) if 0 <= rank < size:
                return rank, size
        raise ValueError(
            f"data_ranks={data_ranks!r} must be (rank, size), counted from 0, such as (dp_mesh.get_local_rank(), "
            "dp_mesh.size()), or a DeviceMesh of the dimensions along which batches differ"
        )
    if wrong := MODEL_PARALLEL_DIMS & {*(data_ranks.mesh_dim_names or ())}:
        raise ValueError(
            f"the mesh in data_ranks has a dimension {min(wrong)!r}, along which ranks need the same batches; "
            "give the dimensions along which batches differ, such as data_ranks=mesh['dp_replicate', 'dp_shard']"
        )
    place = data_ranks.get_coordinate()
    if place is None:
        raise ValueError(
            f"this process is not in the mesh {data_ranks}; make the loader on the ranks of the mesh only"
        )
    rank = 0
    for size, index in zip(data_ranks.mesh.shape, place, strict=True):
        rank = rank * size + index
    return rank, data_ranks.size()


def require_whole(places: Sequence[DataPlace]) -> None:
    """Raise ValueError if no rank has some data rank, whose data would not be read."""
    if {*places} != {(rank, places[0][1]) for rank in range(places[0][1])}:
        listed = ", ".join(f"rank {number}: {at} of {size}" for number, (at, size) in enumerate(places))
        raise ValueError(
            f"the data ranks do not make up a whole ({listed}); each of them must be held by at least one rank, and "
            "counted alike, or its part of the data would never be read"
        )


def ranks_here() -> int | None:
    """Return the number of ranks of the default process group; None without a group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else None


def refuse_several_ranks(of_parent: int) -> None:
    """Raise if several ranks would iterate a dataset without a `PackedDataLoader`.

    A spawned worker process has no process group: ``of_parent`` is the number of ranks where the dataset was pickled.
    """
    here, in_worker = ranks_here(), get_worker_info() is not None
    size = here or (of_parent if in_worker else 1)
    if size > 1:
        raise ValueError(
            f"each of {size} ranks would read all the data, or accelerate would share the packs out once more; iterate "
            "a PackedDataLoader, or under Hugging Face's Trainer call prepare_trainer_for_packing(trainer)"
        )
    if here is None and not in_worker:
        _warn_of_missing_group()


def model_parallel_warning(model: nn.Module) -> str | None:
    """Return a warning if the mesh of a model's parameters has ranks that must get the same batches, else None."""
    for parameter in model.parameters():
        mesh: Any = getattr(parameter, "device_mesh", None)  # a DTensor has one
        for dimension, name in enumerate(getattr(mesh, "mesh_dim_names", None) or ()):
            if name in MODEL_PARALLEL_DIMS and (size := mesh.size(dimension)) > 1:
                return (
                    f"the device mesh has a dimension {name!r} of {size} ranks that need the same batches, "
                    "and a PackedDataLoader gives each rank its own; tell it so: PackedDataLoader(..., "
                    "data_ranks=mesh['dp']), with the dimensions along which batches differ"
                )
    return None


def require_loader_made_after_group(*, made_for_one_rank: bool) -> None:
    """Raise if a loader found a single rank when it was made, and would read all the data on each of several.

    Warns if there should be a process group and still is none.
    """
    ranks = ranks_here()
    if ranks is None:
        _warn_of_missing_group()
    elif ranks > 1 and made_for_one_rank:
        raise ValueError(
            f"this loader was made before the process group of {ranks} ranks, and each would read all "
            "the data; make it after torch.distributed.init_process_group (in Lightning: in train_dataloader())"
        )


def _warn_of_missing_group() -> None:
    size = os.environ.get("WORLD_SIZE", "1")
    if size.isdecimal() and int(size) > 1:
        warn_user(
            f"WORLD_SIZE={size} and there is no process group, so each of these processes reads all the data; call "
            "torch.distributed.init_process_group first, or ignore this if they are runs of their own",
        )
