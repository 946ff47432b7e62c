"""`RankSync`: collectives over CPU tensors that keep ranks in step, and notice at once when a rank dies.

Ranks hold different numbers of packs. A rank that made one optimizer step more than another would wait in its gradient
all-reduce for ever. So ranks agree ahead on how many of the next batches exist: a batch exists if any rank has packs
for it, and the other ranks hand out null packs.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from streampack.distributed.data_groups import Place, first_of_its_group

T = TypeVar("T")
StateT = TypeVar("StateT")


class OtherRankFailed(RuntimeError):
    """Another rank raised; this error holds its message, the other's traceback says where."""


class Agreement:
    """The result of `RankSync.agree`, once every rank has sent its number."""

    def __init__(self, received: torch.Tensor, work: Any) -> None:
        self.received = received
        self.work = work

    def wait(self) -> tuple[int, bool]:
        """Return how many batches exist over all ranks, and whether a rank failed after them."""
        self.work.wait()
        return verdict(self.received.tolist())


class RankSync:
    """Collectives over the ranks of a process group; without one, a single rank that exchanges nothing.

    Messages go over gloo whatever the gradients use, so they neither wait for the GPU nor make it wait. They are
    all-to-all: a rank that dies breaks its connections, and the collective raises at once on every other rank. In a
    ring all-reduce only its neighbours would notice.

    Args:
        timeout: how long a collective waits for the slowest rank.
        group: the gloo group to use; default: a new one of all ranks.
        place: this rank's data rank, and their number; default: every rank is one.

    Raises:
        ValueError: for several data ranks without a process group.
    """

    def __init__(
        self, *, timeout: timedelta, group: dist.ProcessGroup | None = None, place: Place | None = None
    ) -> None:
        self.timeout = timeout
        initialized = dist.is_available() and dist.is_initialized()
        self.alone = not initialized or dist.get_world_size(group) == 1
        self.rank = 0 if self.alone else dist.get_rank(group)
        self.world_size = 1 if self.alone else dist.get_world_size(group)
        self.grouped = place is not None
        self.data_rank, self.data_world_size = place or (self.rank, self.world_size)
        if self.data_world_size > self.world_size:
            raise ValueError(
                f"data_world_size={self.data_world_size} needs as many ranks, and there are {self.world_size}; make "
                "the loader after torch.distributed.init_process_group"
            )
        self.group = None if self.alone else group or dist.new_group(backend="gloo", timeout=timeout)
        self.gathering = False

    def agree(self, count: int, *, failed: bool = False) -> Agreement:
        """Collective, of several ranks: start an asynchronous all-to-all of (batches ready, failed after them)."""
        number = ~count if failed else count
        return Agreement(*self._all_to_all(torch.tensor([number], device="cpu")))

    def gather(self, value: T) -> list[T]:
        """Collective: return every rank's value, by rank; for small values that can be pickled.

        Raises:
            RuntimeError: if an exception interrupted the last call: the others may wait for another part of it.
        """
        if self.alone:
            return [value]
        if self.gathering:
            raise RuntimeError(
                f"rank {self.rank} was interrupted while it agreed with the other ranks, and may be out of step with "
                "them; end this process, which they will notice, and resume from the last checkpoint"
            )
        self.gathering = True
        try:
            mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
            received, work = self._all_to_all(torch.tensor([mine.numel()], device="cpu"))
            work.wait()
            sizes: list[int] = received.tolist()
            received, work = self._all_to_all(mine, sizes)
            work.wait()
            values = [pickle.loads(theirs.numpy().tobytes()) for theirs in torch.split(received, sizes)]
        except Exception:  # a rank is gone, and every later collective raises
            self.gathering = False
            raise
        self.gathering = False
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
        """Collective: raise on all ranks if one failed while ``doing`` its part.

        Raises:
            Exception: this rank's own error, unchanged.
            OtherRankFailed: another rank's, with its rank and message.
        """
        message = None
        if error is not None:
            notes = [note for note in getattr(error, "__notes__", ()) if "\n" not in note]  # no tracebacks
            message = " ".join([f"{type(error).__name__}: {error}", *notes])
        messages = self.gather(message)
        try:
            if error is not None:
                raise error
        finally:
            del error  # the traceback holds this frame: a cycle would keep the workers alive
        for rank, failed in enumerate(messages):
            if failed is not None:
                raise OtherRankFailed(f"rank {rank} failed{doing and f' while {doing}'}: {failed}")

    def merge(self, lanes: Mapping[int, StateT]) -> dict[int, StateT]:
        """Collective: return the states of all lanes, each from the ranks that read it.

        Raises:
            ValueError: if ranks that are given the same batches read a lane differently.
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

    def reads_first(self) -> bool:
        """Collective: return whether this rank is the first with its data rank, the one that lists bad records.

        Raises:
            ValueError: if the data ranks do not make up a whole.
        """
        return not self.grouped or first_of_its_group(
            self.gather((self.data_rank, self.data_world_size)), self.rank
        )

    def _all_to_all(self, sent: torch.Tensor, sizes: list[int] | None = None) -> tuple[torch.Tensor, Any]:
        """Collective: start sending a tensor to every rank; return where theirs arrive, by rank, and the work.

        Args:
            sent: this rank's tensor.
            sizes: of every rank's tensor, if they differ.
        """
        received = sent.new_empty(self.world_size * sent.numel() if sizes is None else sum(sizes))
        own = None if sizes is None else [sent.numel()] * self.world_size
        return received, dist.all_to_all_single(
            received, sent.repeat(self.world_size), sizes, own, group=self.group, async_op=True
        )


def verdict(numbers: Sequence[int]) -> tuple[int, bool]:
    """Return (batches that exist, whether a rank fails after them) for ``count``, or ``~count`` if failed, by rank.

    >>> verdict([3, 5, 0]), verdict([3, ~2, 5])
    ((5, False), (2, True))
    """
    failed = [~number for number in numbers if number < 0]
    return (min(failed), True) if failed else (max(numbers), False)
