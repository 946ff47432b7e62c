"""`RankSync`: collectives over CPU tensors that keep ranks in step, and raise at once when a rank dies.

Ranks have different numbers of packs. A rank that made one optimizer step more than another would wait in its gradient
all-reduce for ever. So the ranks agree in advance on how many of the next batches exist: a batch exists if any rank has
packs for it, and the other ranks hand out null packs.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from streampack.distributed.data_groups import DataPlace, is_first_of_data_rank

T = TypeVar("T")
StateT = TypeVar("StateT")


class OtherRankFailed(RuntimeError):
    """Another rank raised an error. This one has its message; its traceback is in the output of that rank."""


class Agreement:
    """The pending result of `RankSync.agree`.

    Args:
        received: where the numbers of all ranks arrive, by rank: of each its count, and its notes.
        work: torch's handle of the exchange.
        ranks: how many there are.
    """

    def __init__(self, received: torch.Tensor, work: Any, *, ranks: int) -> None:
        self.received = received
        self.work = work
        self.ranks = ranks

    def wait(self) -> tuple[int, bool]:
        """Wait for all ranks; return how many batches exist, and whether a rank failed after them."""
        self.work.wait()
        return combine_counts(self.received.view(self.ranks, -1)[:, 0].tolist())

    def notes(self) -> list[list[int]]:
        """Return the notes of each rank, after `wait`."""
        noted: list[list[int]] = self.received.view(self.ranks, -1)[:, 1:].tolist()
        return noted


class RankSync:
    """Collectives over the ranks of a process group; without a group, of a single rank that exchanges nothing.

    The constructor is a collective too, unless ``group`` is given: it makes a gloo group of all ranks.

    Messages go over gloo, whatever backend the gradients use, so they neither wait for the GPU nor make it wait. They
    are all-to-all, because a rank that dies breaks its connections, and then the collective raises at once on every
    other rank. In a ring all-reduce only the neighbours of that rank would notice.

    Args:
        timeout: how long a collective waits for the slowest rank.
        group: the gloo group to use; None: a new one of all ranks.
        place: this rank's data rank and the number of data ranks; None: every rank is a data rank of its own.

    Raises:
        ValueError: for several data ranks without a process group.
    """

    def __init__(
        self, *, timeout: timedelta, group: dist.ProcessGroup | None = None, place: DataPlace | None = None
    ) -> None:
        self.timeout = timeout
        initialized = dist.is_available() and dist.is_initialized()
        self.alone = not initialized or dist.get_world_size(group) == 1
        self.rank = 0 if self.alone else dist.get_rank(group)
        self.world_size = 1 if self.alone else dist.get_world_size(group)
        self.has_data_groups = place is not None
        self.data_rank, self.data_world_size = place or (self.rank, self.world_size)
        if self.data_world_size > self.world_size:
            raise ValueError(
                f"data_world_size={self.data_world_size} needs as many ranks, and there are {self.world_size}; make "
                "the loader after torch.distributed.init_process_group"
            )
        if group is None and not self.alone:
            group = dist.new_group(backend="gloo", timeout=timeout)
        self.group = group  # None: there was no other rank when this was made
        # True while `gather` runs, and afterwards if an interrupt such as KeyboardInterrupt ended it.
        self.in_gather = False

    def agree(self, count: int, *, failed: bool = False, notes: Sequence[int] = ()) -> Agreement:
        """Collective: start to exchange with all ranks how many batches this one has ready, and whether it fails then.

        Only for several ranks. Returns without waiting for them. ``notes`` are further integers for all ranks, as many
        on each.
        """
        number = ~count if failed else count
        sent = torch.tensor([number, *notes], device="cpu")
        return Agreement(*self._all_to_all(sent), ranks=self.world_size)

    def gather(self, value: T) -> list[T]:
        """Collective: return every rank's value, by rank; for small values that can be pickled.

        Raises:
            RuntimeError: if the last call was interrupted: other ranks may still wait for a part of that call.
        """
        if self.alone:
            return [value]
        if self.in_gather:
            raise RuntimeError(
                f"rank {self.rank} was interrupted while it agreed with the other ranks, and may be out of step with "
                "them; end this process, which they will notice, and resume from the last checkpoint"
            )
        self.in_gather = True
        try:
            mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
            received, work = self._all_to_all(torch.tensor([mine.numel()], device="cpu"))
            work.wait()
            sizes: list[int] = received.tolist()
            received, work = self._all_to_all(mine, sizes)
            work.wait()
            values = [pickle.loads(theirs.numpy().tobytes()) for theirs in torch.split(received, sizes)]
        except Exception:  # another rank has died; later collectives will raise the error by themselves
            self.in_gather = False
            raise
        self.in_gather = False
        return values

    def gather_results(self, work: Callable[[], T], *, doing: str) -> list[T]:
        """Collective: run ``work`` on every rank and return all results, by rank; if one fails, all raise."""
        try:
            result = work()
        except Exception as error:
            self.raise_on_all(error, doing=doing)
            raise
        self.raise_on_all(None, doing=doing)
        return self.gather(result)

    def raise_on_all(self, error: Exception | None, *, doing: str = "") -> None:
        """Collective: raise on all ranks if any rank passes an ``error``; ``doing`` says what the ranks were doing.

        Raises:
            Exception: this rank's own error, unchanged.
            OtherRankFailed: if another rank has an error; with its rank and message.
        """
        message = None
        if error is not None:
            notes = [
                note for note in getattr(error, "__notes__", ()) if "\n" not in note
            ]  # leaves out tracebacks
            message = " ".join([f"{type(error).__name__}: {error}", *notes])
        messages = self.gather(message)
        try:
            if error is not None:
                raise error
        finally:
            # A traceback refers to this frame; the reference cycle would keep worker processes alive.
            del error
        for rank, failed in enumerate(messages):
            if failed is not None:
                raise OtherRankFailed(f"rank {rank} failed{doing and f' while {doing}'}: {failed}")

    def merge_lanes(self, lanes: Mapping[int, StateT]) -> dict[int, StateT]:
        """Collective: return the states of all lanes, each as it is on the ranks that read it.

        Raises:
            ValueError: if ranks with the same data rank have different states of a lane.
        """
        mine = {lane: state for lane, state in lanes.items() if lane % self.data_world_size == self.data_rank}
        merged: dict[int, StateT] = {}
        for rank, theirs in enumerate(self.gather(mine)):
            for lane, state in sorted(theirs.items()):
                if merged.setdefault(lane, state) != state:
                    raise ValueError(
                        f"rank {rank} has made other packs of lane {lane} than the ranks before it that have the same "
                        "data rank, so they have trained on different batches; ask for a state after the same number "
                        "of batches on all ranks, and look for an encoder or a source that is not deterministic"
                    )
        return merged

    def lists_bad_records(self) -> bool:
        """Collective: return whether this rank lists bad records, as the lowest rank with its data rank does.

        Without data ranks it is no collective, and every rank does.

        Raises:
            ValueError: if the numbers of data ranks differ, or a data rank is missing.
        """
        return not self.has_data_groups or is_first_of_data_rank(
            self.gather((self.data_rank, self.data_world_size)), self.rank
        )

    def _all_to_all(self, sent: torch.Tensor, sizes: list[int] | None = None) -> tuple[torch.Tensor, Any]:
        """Collective: start to send a tensor to every rank.

        Args:
            sent: this rank's tensor, of one dimension.
            sizes: lengths of all ranks' tensors; None if all have the length of this one.

        Returns:
            The tensor in which those of all ranks arrive, concatenated by rank, and torch's handle to wait for it.
        """
        received = sent.new_empty(self.world_size * sent.numel() if sizes is None else sum(sizes))
        own = None if sizes is None else [sent.numel()] * self.world_size
        return received, dist.all_to_all_single(
            received, sent.repeat(self.world_size), sizes, own, group=self.group, async_op=True
        )


_shared: dict[timedelta, tuple[weakref.ref[dist.ProcessGroup], RankSync]] = {}
"""By timeout: the process group of torch, and the `RankSync` of its ranks that `shared_sync` made."""


def shared_sync(*, timeout: timedelta) -> RankSync:
    """Return one `RankSync` of all ranks for all calls with a timeout; the first of them is a collective.

    For what is called often: each gloo group keeps connections between all ranks until torch's process group is
    destroyed. Those who share one must exchange in the same order on all ranks, as blocking calls of one thread do.

    Raises:
        ValueError: without a process group.
    """
    world = dist.group.WORLD
    if world is None:
        raise ValueError("there is no process group; call torch.distributed.init_process_group first")
    known = _shared.get(timeout)
    if known is None or known[0]() is not world:
        known = _shared[timeout] = weakref.ref(world), RankSync(timeout=timeout)
    return known[1]


def combine_counts(numbers: Sequence[int]) -> tuple[int, bool]:
    """Combine what the ranks sent in `RankSync.agree` to (batches that exist, whether a rank fails after them).

    A rank sends how many batches it has ready, as ``count``, or as ``~count`` (negative) if it fails after them.

    >>> combine_counts([3, 5, 0]), combine_counts([3, ~2, 5])
    ((5, False), (2, True))
    """
    failed = [~number for number in numbers if number < 0]
    return (min(failed), True) if failed else (max(numbers), False)
