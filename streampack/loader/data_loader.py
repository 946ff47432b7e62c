"""`PackedDataLoader`: batches of packs from worker processes, in step on all ranks, with one state for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from streampack.accounting import Ledger, SourceStats
from streampack.distributed.rank_sync import RankSync
from streampack.distributed.ranks import DataPlace, data_place
from streampack.fingerprint import digest, plain
from streampack.loader.batching import Batching
from streampack.loader.iteration import Iteration
from streampack.loader.one_run import identify_across_ranks, require_same_run
from streampack.loader.step_meter import StepMeter
from streampack.streaming.dataset import IterablePackedDataset
from streampack.streaming.position import Progress
from streampack.streaming.run_state import RunState, as_dicts, epoch_of
from streampack.validation import require_duration, require_positive


class PackedDataLoader:
    """Batches of packs from an `IterablePackedDataset`, on any number of ranks and worker processes.

    >>> rows = [{"tokens": [i] * 5, "labels": [i] * 5} for i in range(5)]
    >>> loader = PackedDataLoader(IterablePackedDataset(rows, max_seq_len=10), batch_size=2)
    >>> [tuple(batch.tokens.shape) for batch in loader]
    [(2, 10), (2, 10)]

    Every rank yields the same number of batches, all of the same size, each of packs of one epoch. A rank whose data
    ends before the others' fills up with null packs, which train nothing; an error on one rank is raised on all.

    An optimizer step takes ``packs_per_step`` packs over all ranks, the next ones of the stream: the same ones on every
    number of ranks that divides the lanes, whatever ``num_workers`` is, with the same ``balance_window``. A worker
    that dies is started again and nothing is lost; if it dies four times without a pack between, that is an error.

    If an iteration stopped early or raised, the next one continues after it. Otherwise it starts the next epoch; after
    a resume, ``for epoch in range(loader.epoch, epochs)`` continues. ``dataset.set_epoch`` chooses an epoch. A state
    is that of the batches yielded, and can be loaded on any number of ranks and workers. It is the dataset's: loaders
    that should not continue one another need a dataset each.

    With a process group, construct the loader and iterate it on all ranks. It keeps connections between all ranks until
    the process group is destroyed: make one for each dataset, and iterate it again for each evaluation.

    Args:
        dataset: where packs come from; its settings decide all but the batching.
        batch_size: the most packs in a batch. A rank's part of a step is cut into equal batches, which may be smaller.
        num_workers: processes that read, encode and pack, for each rank: at most one for each lane of the rank. 0
            does it in this one. The one with the most of the rank's lanes sets the pace.
        packs_per_step: packs in an optimizer step, over all ranks; default: that of the run whose state was loaded, or
            one batch of each rank. A step is `batches_per_step` batches on every rank, and none mixes two epochs.
        pin_memory: put batches into page-locked memory, for faster copies to a GPU.
        timeout: seconds that ranks wait for one another before they give up.
        data_ranks: for a model that is parallel in other ways than data parallelism, the mesh of the dimensions along
            which batches differ, such as ``mesh["dp_replicate", "dp_shard"]``; or the number of
            this rank's batches and how many there are, ``(rank, size)``. "Ranks" above means these. Default: every rank
            has batches of its own.
        process_group: the ranks that iterate this loader. Default: all.
    """

    def __init__(
        self,
        dataset: IterablePackedDataset,
        *,
        batch_size: int = 1,
        num_workers: int = 0,
        packs_per_step: int | None = None,
        pin_memory: bool = False,
        timeout: float = 1800.0,
        data_ranks: DeviceMesh | DataPlace | None = None,
        process_group: ProcessGroup | RankSync | None = None,
    ) -> None:
        if not isinstance(dataset, IterablePackedDataset):
            raise ValueError(
                f"a {type(dataset).__name__} is no stream of packs; give PackedDataLoader an "
                "IterablePackedDataset(rows, max_seq_len=...), or packs of a PackedDataset to torch's DataLoader with "
                "collate_fn=streampack.collate_packed"
            )
        require_positive(batch_size, "batch_size")
        if packs_per_step is not None:
            require_positive(packs_per_step, "packs_per_step")
        require_positive(num_workers, "num_workers", least=0)
        self.dataset = dataset
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        limit = timedelta(seconds=require_duration(timeout, "timeout", "seconds"))
        if not isinstance(process_group, RankSync):  # else several loaders share it
            process_group = RankSync(timeout=limit, group=process_group, place=data_place(data_ranks))
        self.rank_sync = process_group
        self._packs_per_step = packs_per_step
        self._progress: Progress | None = None  # of the newest iteration
        self._meter = StepMeter(dataset.lane_config.untrained, warns=self.rank_sync.rank == 0)
        self._identified = False  # whether the ranks have read the corpus's fingerprint

    def __iter__(self) -> Iteration:
        """Collective: iterate from the dataset's state on, or its next epoch if the newest iteration has ended."""
        self._meter.step = ()  # an iteration that was left in the middle of a step gives no more of it
        self._progress = self.dataset.position.start()
        return Iteration(
            self.dataset,
            self.rank_sync,
            self._batching,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            meter=self._meter,
            progress=self._progress,
        )

    def state_dict(self) -> dict[str, Any]:
        """Collective, after the same batch on all ranks: return the state after it, of all ranks, as plain values."""
        newest = self.dataset.position.newest
        if self._progress is not None and newest.process and self._progress is not newest:
            raise ValueError(
                "the newest iteration of this loader's dataset was begun by another: make a dataset for each loader"
            )
        return self.state_of(self.position())

    def state_of(self, position: RunState) -> dict[str, Any]:
        """Collective: return the state at an earlier `position`, the same one on all ranks."""
        position = replace(position, packs_per_step=self.packs_per_step, partial=False)
        self._identify("save", lambda: {"slot": position.slot, "epoch": position.epoch})
        return self.dataset._state_of(position, self.rank_sync.merge_lanes(as_dicts(position.lane_states)))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Collective: continue as `IterablePackedDataset.load_state_dict` says, on any topology."""
        self._load(state, self.dataset.load_state_dict)

    def continue_from(self, state: Mapping[str, Any]) -> None:
        """Collective: read on as `IterablePackedDataset.continue_from` says, on any topology."""
        self._load(state, self.dataset.continue_from)

    def _load(self, state: Mapping[str, Any], load: Callable[[Mapping[str, Any]], None]) -> None:
        self._identify("load", lambda: {"state": _digest_of(state)})
        load(state)

    def _identify(self, doing: str, settings: Callable[[], dict[str, Any]]) -> None:
        require_same_run(self.dataset, self.rank_sync, doing=f"{doing} a state", settings=settings)
        if not self._identified:
            identify_across_ranks(self.dataset.lane_config.source, self.rank_sync)
            self._identified = True

    def position(self) -> RunState:
        """Return how far the newest iteration is, in the lanes of this rank, or where it was told to begin since."""
        return self.dataset.position.state

    @property
    def epoch(self) -> int:
        """Epoch, from 0, that this rank's slowest lane is in, as of the last batch yielded."""
        position = self.position()
        return min(map(epoch_of, position.lane_states.values()), default=position.epoch)

    def ledger(self) -> Ledger:
        """Count where every token of this rank's lanes went, as of the last batch yielded."""
        return self.position().ledger

    def source_stats(self) -> dict[str, SourceStats]:
        """Count what each source of a mixture gave in this rank's lanes, as of the last batch yielded."""
        return self.dataset._source_stats_of(self.position().lane_states)

    def require_trained(self) -> None:
        """Raise ValueError, on all ranks alike, if a yielded step trains nothing, which is a warning otherwise.

        A step that is more than half padding may, if an earlier one trained something; and all may with
        ``untrained="keep"``.
        """
        self._meter.require_trained()

    def metrics(self) -> dict[str, float]:
        """Return how long this rank waited for batches, and how evenly the ranks shared the work, for a metric logger.

        >>> rows = [{"tokens": [i] * 5, "labels": [i] * 5} for i in range(40)]
        >>> loader = PackedDataLoader(IterablePackedDataset(rows, max_seq_len=10, num_lanes=1))
        >>> for batch in loader:
        ...     pass
        >>> sorted(loader.metrics())
        ['data_wait', 'data_wait_mean']

        Each is a mean over the steps since the call before, and as ``*_mean`` over those since this loader was made:

        - ``data_wait``: seconds that a step waited for batches.
        - ``cost_imbalance``, of several ranks: the attention cost of the most expensive rank's part of a step over the
          mean of the ranks.
        """
        return self._meter.metrics()

    @property
    def packs_per_step(self) -> int:
        """Packs in an optimizer step, over all ranks."""
        if self._packs_per_step is not None:
            return self._packs_per_step
        return self.position().packs_per_step or self.rank_sync.data_world_size * self.batch_size

    @property
    def batches_per_step(self) -> int:
        """Batches that every rank contributes to an optimizer step: what gradients accumulate over."""
        lanes = self.dataset.lanes_for(self.rank_sync.data_world_size)
        return replace(self._batching, num_lanes=lanes).batches_per_step

    @property
    def _batching(self) -> Batching:
        ranks = self.rank_sync.data_world_size
        return Batching(self.batch_size, self.packs_per_step, ranks, num_lanes=ranks)  # until the ranks agree


def _digest_of(state: Mapping[str, Any]) -> str:
    try:
        return digest(plain(state))
    except RecursionError:  # a damaged file may make it so
        raise ValueError("the state is damaged: it contains itself; resume from another checkpoint") from None
