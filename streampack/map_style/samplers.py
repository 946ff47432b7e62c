"""Samplers that plan a whole epoch, share its batches among the ranks, and resume at any batch."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist
from torch.utils.data import Sampler

from streampack.map_style.multipack import checked_lengths, plan_steps, resolve_packs_per_step
from streampack.sources.reading import permutation
from streampack.streaming.consumers import require_data_parallel, require_not_sharded
from streampack.validation import require_multiple, require_positive

T = TypeVar("T")


class PlannedSampler(Sampler[T]):
    """Yields this rank's batches of a planned epoch: batch i goes to rank ``i % num_replicas``.

    ``plan(epoch)`` returns the batches of all ranks, and must return the same on every rank. An epoch is planned when
    it is first used. A state is refused if it was made with other ``settings``.

    >>> sampler = PlannedSampler(lambda epoch: [[0], [1], [2], [3]], settings={}, num_replicas=2, rank=1)
    >>> list(sampler), len(sampler)
    ([[1], [3]], 2)

    Args:
        plan: function from the number of an epoch to its batches, whose number is a multiple of ``num_replicas``.
        settings: all that the plan depends on, as plain values by name.
        num_replicas: number of ranks. Default: the process group's size, 1 without one.
        rank: this rank. Default: its rank in the process group.
    """

    def __init__(
        self,
        plan: Callable[[int], Sequence[T]],
        *,
        settings: Mapping[str, Any],
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        self.num_replicas, self.rank = resolve_rank(num_replicas, rank)
        self.settings = dict(settings)
        self.epoch = 0
        self._plan = plan
        # The batches of this epoch for all ranks; None until they are planned.
        self._batches: Sequence[T] | None = None
        # Two numbers in that list: where the next iteration begins, and the first batch that was not handed out yet.
        self._start = 0
        self._dealt = 0
        # Whether an iteration over this epoch has begun, so that the next iteration is over the next epoch.
        self._iterated = False

    @property
    def batches(self) -> Sequence[T]:
        """The batches of this epoch for all ranks, planned when they are first asked for."""
        if self._batches is None:
            self._batches = self._plan(self.epoch)
            assert len(self._batches) % self.num_replicas == 0, (
                "ranks would differ in their number of batches"
            )
        return self._batches

    def __len__(self) -> int:
        """Return the number of batches of this epoch on this rank, which is the same on every rank."""
        return len(self.batches) // self.num_replicas

    def __iter__(self) -> Iterator[T]:
        """Iterate over this rank's batches, beginning where a loaded state says; iterating again is the next epoch."""
        if self._iterated:
            self.set_epoch(self.epoch + 1)
        self._iterated = True
        self._dealt, self._start = self._start, 0
        for first in range(self._dealt, len(self.batches), self.num_replicas):
            self._dealt = first + self.num_replicas
            yield self.batches[first + self.rank]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. A loaded state is kept if it is of the same epoch."""
        self._iterated = False
        if epoch != self.epoch:
            self.epoch = epoch
            self._batches = None
            self._start = self._dealt = 0

    def state_dict(self, *, consumed: int | None = None) -> dict[str, Any]:
        """Return the state, from which any number of ranks can resume: plain values, the same on every rank.

        ``consumed`` is how many batches of this epoch each rank has trained on, by default the number that this sampler
        has handed out. Give it under a DataLoader with workers, which fetches batches ahead.
        """
        dealt = self._dealt if consumed is None else consumed * self.num_replicas
        return {"epoch": self.epoch, "dealt": dealt, **self.settings}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set where the next iteration begins: after the batch at which ``state`` was taken.

        Raises:
            ValueError: for a state made with other settings, or a number of batches that the ranks cannot share.
        """
        if set(state) != {"epoch", "dealt", *self.settings}:
            raise ValueError(
                f"the state holds {sorted(state)}; this sampler's holds {sorted(self.state_dict())}"
            )
        for name, value in self.settings.items():
            if state[name] != value:
                raise ValueError(
                    f"the state was made with {name}={state[name]!r}, this sampler has {name}={value!r}; "
                    "go on with what the run began with, or start anew without the state"
                )
        dealt = state["dealt"]
        if dealt % self.num_replicas:
            raise ValueError(
                f"the state stands after {dealt} batches of all ranks, which {self.num_replicas} ranks cannot share; "
                "save at the end of a step, or go on with a number of ranks that divides it"
            )
        self.set_epoch(state["epoch"])
        self._start = self._dealt = dealt


class MultipackBatchSampler(Sampler[list[int]]):
    """Yields batches of at most ``max_tokens``, nearly full, that cost every rank of a step nearly the same.

    It is a ``batch_sampler`` for a DataLoader over map-style data of known lengths; `FlatteningCollator` makes one row
    of each batch. A global step has ``packs_per_step`` batches with the same budget of tokens and nearly the same sum
    of squared lengths, and each rank gets an equal number of them. Every sample comes exactly once an epoch. Planning
    takes 0.2 s for 100,000 samples.

    >>> sampler = MultipackBatchSampler([5, 4, 2, 3, 4, 6], max_tokens=12, num_replicas=2, rank=0)
    >>> list(sampler)
    [[5, 1, 2]]

    The steps depend on ``packs_per_step``, not on the number of ranks: 8 ranks with one batch each and 2 ranks with
    four (gradient accumulation) train on the same steps, and either can resume from the other's state. Iterating again
    is the next epoch; ``set_epoch`` sets another one. The number of batches may differ by a step between epochs.

    If a framework shards batches itself, as accelerate does with ``even_batches=False``, set ``num_replicas=1`` and
    ``packs_per_step``; each rank then gets the same batches as here. If it calls ``dataloader.sampler.set_epoch``, as
    torchtune's recipes do, make this the ``sampler``, with ``batch_size=None`` and a dataset that takes a list of
    numbers.

    The method is multipack's (github.com/imoneoi/multipack_sampler); see `streampack.map_style.multipack`.

    Args:
        lengths: tokens of each sample.
        max_tokens: the budget of a batch. A sample may not be longer.
        pad_seqs_to: round every length up to a multiple of this many tokens, as a collator with the same
            ``pad_seqs_to`` pads. ``max_tokens`` must be a multiple, too.
        packs_per_step: batches of a global step, over all ranks and accumulated gradients; a multiple of
            ``num_replicas``, which is the default.
        objective: ``"quadratic"`` evens out the sum of squared lengths; ``"linear"`` only fills batches, for models
            whose cost depends on the number of tokens alone, and for batches of a few samples.
        shuffle: shuffle the samples in each epoch.
        seed: seed of the shuffling, with the epoch.
        drop_last: leave out the samples of the last, part-empty step; ``dropped`` is their number.
        num_replicas: number of ranks. Default: the process group's size, 1 without one.
        rank: this rank. Default: its rank in the process group.

    Raises:
        ValueError: for a bad setting, a sample longer than ``max_tokens``, or fewer samples than a step has packs.
    """

    def __init__(
        self,
        lengths: Iterable[int],
        *,
        max_tokens: int,
        packs_per_step: int | None = None,
        objective: str = "quadratic",
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        pad_seqs_to: int = 1,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        num_replicas, rank = resolve_rank(num_replicas, rank)
        self.packs_per_step = resolve_packs_per_step(packs_per_step, num_replicas)
        self.max_tokens = max_tokens
        self.objective = objective
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        max_tokens = require_positive(max_tokens, "max_tokens")
        require_multiple(
            max_tokens, "max_tokens", require_positive(pad_seqs_to, "pad_seqs_to"), "pad_seqs_to"
        )
        self._lengths = np.array(checked_lengths(lengths, max_tokens))
        self._lengths += -self._lengths % pad_seqs_to
        settings = {
            "lengths": digest_lengths(self._lengths),
            "max_tokens": max_tokens,
            "packs_per_step": self.packs_per_step,
            "objective": objective,
            "shuffle": shuffle,
            "seed": seed,
            "drop_last": drop_last,
        }
        # It is called `sampler` as in torch's BatchSampler: accelerate, when it shards batches, calls its set_epoch.
        self.sampler = PlannedSampler(self._plan, settings=settings, num_replicas=num_replicas, rank=rank)

    def _plan(self, epoch: int) -> list[list[int]]:
        count = len(self._lengths)
        order = permutation(count, self.seed, epoch) if self.shuffle else np.arange(count)
        steps = plan_steps(
            self._lengths[order].tolist(),
            max_tokens=self.max_tokens,
            packs_per_step=self.packs_per_step,
            objective=self.objective,
            drop_last=self.drop_last,
        )
        return [order[pack].tolist() for step in steps for pack in step]

    def __len__(self) -> int:
        """Return the number of batches of this epoch on this rank, which is the same on every rank."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[int]]:
        """Iterate as `PlannedSampler.__iter__` does.

        Raises:
            ValueError: if accelerate would shard them among the ranks once more.
        """
        if self.sampler.num_replicas > 1:
            require_not_sharded(sys._getframe(1).f_locals.get("self"), num_replicas=self.sampler.num_replicas)
        return iter(self.sampler)

    @property
    def dropped(self) -> int:
        """Number of samples that ``drop_last`` leaves out of this epoch."""
        return len(self._lengths) - sum(map(len, self.sampler.batches))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. A loaded state is kept if it is of the same epoch."""
        self.sampler.set_epoch(epoch)

    def state_dict(self, *, consumed: int | None = None) -> dict[str, Any]:
        """See `PlannedSampler.state_dict`."""
        return self.sampler.state_dict(consumed=consumed)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `PlannedSampler.load_state_dict`."""
        self.sampler.load_state_dict(state)


def resolve_rank(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Return the number of ranks and this rank, as given or as in the process group.

    Raises:
        ValueError: for a rank outside the range, and in a model-parallel group if ``rank`` is left out.
    """
    grouped = dist.is_available() and dist.is_initialized()
    if grouped and rank is None and (num_replicas is None or num_replicas > 1):
        require_data_parallel("without rank= each rank gets its own")
    if num_replicas is None:
        num_replicas = dist.get_world_size() if grouped else 1
    if rank is None:
        rank = dist.get_rank() if grouped else 0
    require_positive(num_replicas, "num_replicas")
    if not 0 <= rank < num_replicas:
        raise ValueError(f"rank={rank} is not among the num_replicas={num_replicas}, which count from 0")
    return num_replicas, rank


def digest_lengths(lengths: np.ndarray[Any, np.dtype[Any]]) -> str:
    """Return a digest of lengths: 16 hex digits."""
    return hashlib.blake2b(lengths.astype("<i8").tobytes(), digest_size=8).hexdigest()


def range_with_progress(count: int) -> Iterable[int]:
    """Return ``range(count)``, with tqdm's progress bar on rank 0 if it takes more than a second."""
    try:
        from tqdm import tqdm
    except ImportError:
        return range(count)
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    bar: Iterable[int] = tqdm(
        range(count), desc="Planning packs", unit=" samples", dynamic_ncols=True, delay=1, disable=rank != 0
    )
    return bar
