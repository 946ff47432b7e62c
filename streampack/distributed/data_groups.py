"""Data-parallel groups: which ranks get the same batches, and which get different ones."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from math import prod

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from streampack.validation import require_positive

DataPlace = tuple[int, int]
"""(data rank, number of data ranks) of a process. Processes with the same data rank get the same batches."""


def data_place(
    *,
    mesh: DeviceMesh | None = None,
    data_dims: str | Sequence[str] | None = None,
    data_rank: int | None = None,
    data_world_size: int | None = None,
) -> DataPlace | None:
    """Return this process's data rank and the number of data ranks; None without arguments.

    None means that every rank is a data rank of its own.

    >>> data_place(data_rank=1, data_world_size=4)
    (1, 4)

    Args:
        mesh: the mesh that the model is parallelized over.
        data_dims: names of the mesh's dimensions along which batches differ; along all others they are equal.
        data_rank: this process's data rank, instead of a mesh.
        data_world_size: the number of data ranks, instead of a mesh.

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
    for name, size, index in zip(names, mesh.mesh.shape, coordinate, strict=True):
        if name in wanted:
            rank = rank * size + index
    return rank, prod(mesh.size(names.index(name)) for name in set(wanted))


def is_first_of_data_rank(places: Sequence[DataPlace], rank: int) -> bool:
    """Return whether ``rank`` is the lowest rank with its data rank, given the place of every rank.

    >>> is_first_of_data_rank([(0, 2), (0, 2), (1, 2), (1, 2)], 2)
    True

    Raises:
        ValueError: if the numbers of data ranks differ or a data rank is missing: part of the data would not be read.
    """
    sizes = {size for _, size in places}
    missing = sorted(set(range(places[0][1])) - {data_rank for data_rank, _ in places})
    if len(sizes) > 1 or missing:
        listed = ", ".join(f"rank {number}: {at} of {size}" for number, (at, size) in enumerate(places))
        why = "they count differently" if len(sizes) > 1 else f"nobody has data rank {missing[0]}"
        raise ValueError(
            f"the data ranks do not make up a whole, {why} ({listed}); every data rank must be held by at least "
            "one rank, or its part of the data would never be read"
        )
    return [data_rank for data_rank, _ in places].index(places[rank][0]) == rank


def gloo_group(process_group: dist.ProcessGroup | None, *, timeout: timedelta) -> dist.ProcessGroup | None:
    """Make a gloo group of the same ranks as ``process_group``; a collective of these ranks.

    Returns None for None, which stands for all ranks.
    """
    if process_group is None:
        return None
    group: dist.ProcessGroup = dist.new_group(
        dist.get_process_group_ranks(process_group),
        backend="gloo",
        timeout=timeout,
        use_local_synchronization=True,
    )
    return group
