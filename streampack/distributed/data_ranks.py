"""Data ranks: which ranks get the same batches, and which get different ones."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh

from streampack.streaming.consumers import MODEL_PARALLEL_DIMS

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
            f"the mesh in data_ranks has a dimension {min(wrong)!r}, along which ranks must be given the same batches; "
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
    """Raise ValueError if a data rank is missing among the places of all ranks, so that its data would not be read.

    >>> require_whole([(0, 2), (0, 2), (1, 2), (1, 2)])
    """
    if {*places} != {(rank, places[0][1]) for rank in range(places[0][1])}:
        listed = ", ".join(f"rank {number}: {at} of {size}" for number, (at, size) in enumerate(places))
        raise ValueError(
            f"the data ranks do not make up a whole ({listed}); each of them must be held by at least one rank, and "
            "counted alike, or its part of the data would never be read"
        )
