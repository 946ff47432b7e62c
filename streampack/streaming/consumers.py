"""Which rank of how many this process is, and whether each rank may read other data."""

from __future__ import annotations

import os
import sys
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.utils.data import get_worker_info

from streampack.validation import warn_user

MODEL_PARALLEL = {
    *("tp", "cp", "sp", "pp", "mp", "etp", "tensor", "context", "sequence", "pipeline", "model"),
    *(f"{kind}_parallel" for kind in ("tensor", "context", "sequence", "pipeline", "model", "tensor_model")),
}
"""Names of mesh dimensions whose ranks work on the same batch."""
DATA_PARALLEL = ("dp", "data", "replicate", "shard", "fsdp", "batch", "ep", "expert")
"""Parts of names of mesh dimensions along which batches differ."""


class Ranks(NamedTuple):
    """Rank and world size of this process."""

    rank: int = 0
    world_size: int = 1
    accelerated: bool = False  # accelerate has set them up

    @classmethod
    def here(cls) -> Ranks | None:
        """Ask the process group; None without one."""
        if not (dist.is_available() and dist.is_initialized()):
            return None
        state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
        return cls(dist.get_rank(), dist.get_world_size(), bool(state is not None and state._shared_state))


def ranks_to_read(pickled: Ranks | None, *, epochs: int | None) -> Ranks:
    """Find the rank that a plain iteration of a packed stream reads for, and refuse what would go wrong in silence.

    ``pickled`` is what the process that started this worker process knew: one that is spawned has no process group.

    Raises:
        ValueError: if ranks would end at different steps, accelerate would share the packs out once more, or ranks
            of one model-parallel group would read different data.
    """
    ranks = Ranks.here()
    if ranks is None and get_worker_info() is not None:
        ranks = pickled
    if ranks is None:
        warn_of_missing_group()
        return Ranks()
    if ranks.world_size == 1:
        return ranks
    if ranks.accelerated:
        raise ValueError(
            f"accelerate runs {ranks.world_size} processes, and a loader that it prepares shares the packs out once "
            "more, so that at least half of the data would never be read; under Hugging Face's Trainer call "
            "prepare_trainer_for_packing(trainer), elsewhere iterate a PackedDataLoader, which accelerate leaves alone"
        )
    if epochs is not None:
        raise ValueError(
            f"{ranks.world_size} ranks reading {epochs} epoch(s) each end at a different step and would hang; iterate "
            "a PackedDataLoader, or under Hugging Face's Trainer call prepare_trainer_for_packing(trainer)"
        )
    require_data_parallel("every rank reads packs of its own")
    return ranks


def require_data_parallel(what: str) -> None:
    """Refuse to give ranks of one tensor-, context- or pipeline-parallel group different data.

    What shows them is the process group that a `DeviceMesh` makes for each named dimension. A mesh of one dimension
    over all ranks makes none (see `model_parallel_warning`). Of a dimension without a name, or with one that says
    neither, a warning asks for a choice.

    Raises:
        ValueError: if there is such a group.
    """
    sizes = {
        group.group_desc.removeprefix("mesh_"): group.size()
        for group in dist.distributed_c10d._world.pg_map
        if group.group_desc.startswith("mesh_") and group.size() > 1
    }
    for name, size in sizes.items():
        if name in MODEL_PARALLEL:
            raise ValueError(_same_batches(name, size, what))
    for name, size in sizes.items():
        if not any(part in name for part in DATA_PARALLEL):
            warn_user(
                f"there is a device mesh with a dimension {name!r} of {size} ranks, and {what}: if they must be given "
                "the same batches, say so with PackedDataLoader(..., mesh=mesh, data_dims=...); if not, name it in "
                "data_dims, too"
            )


def model_parallel_warning(model: nn.Module) -> str | None:
    """Say which ranks must be given the same batches, by the mesh of a model's parameters; None if there are none."""
    for parameter in model.parameters():
        mesh: Any = getattr(parameter, "device_mesh", None)  # of a DTensor
        for dimension, name in enumerate(getattr(mesh, "mesh_dim_names", None) or ()):
            if name in MODEL_PARALLEL and (size := mesh.size(dimension)) > 1:
                return _same_batches(name, size, "a PackedDataLoader gives each rank its own")
    return None


def _same_batches(name: str, size: int, what: str) -> str:
    return (
        f"the device mesh has a dimension {name!r} of {size} ranks, which must be given the same batches, and {what}; "
        "iterate a PackedDataLoader that is told so: PackedDataLoader(..., mesh=mesh, data_dims=('dp',)), with the "
        "dimensions along which batches differ"
    )


def require_group_of_now(*, alone: bool) -> None:
    """Refuse a loader that was made before the process group, and so reads everything on every rank.

    Raises:
        ValueError: if there is a group by now.
    """
    ranks = Ranks.here()
    if ranks is None:
        warn_of_missing_group()
    elif ranks.world_size > 1:
        if alone:
            raise ValueError(
                f"this loader was made before the process group of {ranks.world_size} ranks, and each would read all "
                "the data; make it after torch.distributed.init_process_group (in Lightning: in train_dataloader())"
            )
        require_data_parallel("a PackedDataLoader gives each rank its own")


def require_not_sharded(caller: object, *, num_replicas: int) -> None:
    """Refuse to hand one rank's batches to accelerate's `BatchSamplerShard`, which takes them for those of all ranks.

    Raises:
        ValueError: if it is the ``caller``.
    """
    if type(caller).__name__ == "BatchSamplerShard" and getattr(caller, "num_processes", 1) > 1:
        raise ValueError(
            f"accelerate shares out batches that num_replicas={num_replicas} has shared out already, so that most of "
            "the data would never be read; set num_replicas=1 (and packs_per_step), or do not prepare this loader"
        )


def warn_of_missing_group() -> None:
    """Warn if this process was launched as one of several that have not joined."""
    size = os.environ.get("WORLD_SIZE", "1")
    if size.isdecimal() and int(size) > 1:
        warn_user(
            f"WORLD_SIZE={size} and there is no process group, so each of these processes reads all the data; call "
            "torch.distributed.init_process_group first, or ignore this if they are runs of their own",
        )
