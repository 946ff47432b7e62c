"""Data-parallel groups: which ranks are given the same batches, and which different ones."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from math import prod

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from streampack.validation import require_positive

Place = tuple[int, int]
"""(data rank, number of data ranks) of a process. Processes with the same data rank are given the same batches."""


def data_place(
    *,
    mesh: DeviceMesh | None = None,
    data_dims: str | Sequence[str] | None = None,
    data_rank: int | None = None,
    data_world_size: int | None = None,
) -> Place | None:
    """Return this process's place among the data ranks; None if nothing was said, so that every rank is one.

    >>> data_place(data_rank=1, data_world_size=4)
    (1, 4)

    Args:
        mesh: the mesh that the model is parallelized over.
        data_dims: names of its dimensions along which batches differ; along all others they are equal.
        data_rank: this process's place, in place of a mesh.
        data_world_size: the number of places, in place of a mesh.

    Raises:
        ValueError: for arguments that do not fit together, or a process outside the mesh.
    """
    if mesh is None and data_dims is None:
        if data_rank is None and data_world_size is None:
            return None
        if data_rank is None or data_world_size is None:
            raise ValueError(
                f"data_rank={data_rank} and data_world_size={data_world_size}: give both, such as "
                "data_rank=dp_mesh.get_local_rank(), data_world_size=dp_mesh.size()"
            )
        require_positive(data_world_size, "data_world_size")
        if not 0 <= data_rank < data_world_size:
            raise ValueError(
                f"data_rank={data_rank} of data_world_size={data_world_size} cannot be; count from 0"
            )
        return data_rank, data_world_size
    if data_rank is not None or data_world_size is not None:
        raise ValueError("give either mesh and data_dims, or data_rank and data_world_size")
    names = () if mesh is None else mesh.mesh_dim_names or ()
    wanted = (data_dims,) if isinstance(data_dims, str) else tuple(data_dims or ())
    if mesh is None or not wanted or not set(wanted) <= set(names):
        raise ValueError(
            f"mesh with dimensions {list(names)} and data_dims={list(wanted)}: name the dimensions of the mesh along "
            "which batches differ, such as data_dims=('dp_replicate', 'dp_shard')"
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(
            f"this process is not in the mesh {mesh}; make the loader on the ranks of the mesh only"
        )
    rank = 0
    for name, size, at in zip(names, mesh.mesh.shape, coordinate, strict=True):
        if name in wanted:
            rank = rank * size + at
    return rank, prod(mesh.size(names.index(name)) for name in set(wanted))


def first_of_its_group(places: Sequence[Place], rank: int) -> bool:
    """Return whether ``rank`` is the first with its data rank, given the place of every rank.

    >>> first_of_its_group([(0, 2), (0, 2), (1, 2), (1, 2)], 2)
    True

    Raises:
        ValueError: if the places do not make up a whole: a part of the data would never be read.
    """
    sizes = {size for _, size in places}
    missing = sorted(set(range(places[0][1])) - {data_rank for data_rank, _ in places})
    if len(sizes) > 1 or missing:
        said = ", ".join(f"rank {number}: {at} of {size}" for number, (at, size) in enumerate(places))
        why = "they count differently" if len(sizes) > 1 else f"nobody has data rank {missing[0]}"
        raise ValueError(
            f"the data ranks do not make up a whole, {why} ({said}); every data rank must be held by at least "
            "one rank, or its part of the data would never be read"
        )
    return [data_rank for data_rank, _ in places].index(places[rank][0]) == rank


def gloo_group(process_group: dist.ProcessGroup | None, *, timeout: timedelta) -> dist.ProcessGroup | None:
    """Return a gloo group of the same ranks as ``process_group``, for messages beside its own; None for all ranks."""
    if process_group is None:
        return None
    group: dist.ProcessGroup = dist.new_group(
        dist.get_process_group_ranks(process_group),
        backend="gloo",
        timeout=timeout,
        use_local_synchronization=True,
    )
    return group
