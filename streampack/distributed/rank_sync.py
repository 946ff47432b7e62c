"""`RankSync`: collectives over CPU tensors that keep ranks in step, and raise at once when a rank dies."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from streampack.distributed.ranks import DataPlace, require_whole
from streampack.storage.base import map_in_threads

T = TypeVar("T")
Item = TypeVar("Item")

Exchange = Callable[[], list[Any]]
"""A function that ends an exchange between ranks: it waits for all of them, and returns what each sent, by rank."""


class OtherRankFailed(RuntimeError):
    """Another rank raised an error. This one has its message; its traceback is in the output of that rank."""


class RankSync:
    """Collectives over the ranks of a process group; without a group, of a single rank that exchanges nothing.

    The constructor is one too, unless ``group`` itself is ``shared``: it makes a gloo group, so that messages neither
    wait for the GPU nor make it wait. They are all-to-all, so that a rank that dies is noticed at once by all others;
    in a ring only its neighbours would. ``place`` is that of `data_place`.
    """

    def __init__(
        self,
        *,
        timeout: timedelta,
        group: dist.ProcessGroup | None = None,
        place: DataPlace | None = None,
        shared: bool = False,
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
                f"data_ranks of {self.data_world_size} need as many ranks, and there are {self.world_size}; make the "
                "loader after torch.distributed.init_process_group"
            )
        if not shared and (group is not None or not self.alone):
            some = None if group is None else dist.get_process_group_ranks(group)
            group = dist.new_group(
                some, backend="gloo", timeout=timeout, use_local_synchronization=some is not None
            )
        self.group = group  # None: there was no other rank when this was made
        # Whether a collective runs, or an exception came between two of them on this rank only.
        self.broken = False

    def require_whole(self) -> None:
        """Raise if this rank and the others may wait for different collectives."""
        if self.broken and not self.alone:
            raise RuntimeError(
                f"rank {self.rank} was interrupted while it worked with the other ranks, and may be out of step with "
                "them; end this process, which they will notice, and resume from the last checkpoint"
            )

    def exchange(self, numbers: Sequence[Any]) -> Exchange:
        """Collective: begin to send integers, or lists of them, of the same shape on each rank, to all ranks."""
        if self.alone:
            return lambda: [numbers]
        sent = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        wait = self._all_to_all(sent.flatten())
        return lambda: wait().view(self.world_size, *sent.shape).tolist()

    def gather(self, value: T) -> list[T]:
        """Collective: return every rank's value, by rank; for small values that can be pickled."""
        if self.alone:
            return [value]
        self.require_whole()
        self.broken = True
        try:
            mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
            [longest] = max(self.exchange([mine.numel()])())
            padded = torch.nn.functional.pad(mine, (0, longest - mine.numel()))
            received = self._all_to_all(padded)()
        except Exception:  # another rank has died; later collectives will raise the error by themselves
            self.broken = False
            raise
        self.broken = False
        return [pickle.loads(theirs.numpy()) for theirs in received]  # what pads a pickle is not read

    def gather_results(self, work: Callable[[], T], *, doing: str) -> list[T]:
        """Collective: run ``work`` on every rank and return all results, by rank; if one fails, all raise."""
        result: Any = None
        try:
            result = work()
        except Exception as error:
            self.raise_on_all(error, doing=doing)
        return self._results(result, None, doing=doing)

    def raise_on_all(self, error: Exception | None, *, doing: str = "") -> None:
        """Collective: raise on all ranks if any rank passes an ``error``: that, or `OtherRankFailed` with its message.

        What is raised has an attribute ``raised_on_all_ranks``.
        """
        self._results(None, error, doing=doing)

    def _results(self, result: Any, error: Exception | None, *, doing: str) -> list[Any]:
        message = None
        if error is not None:
            notes = [note for note in getattr(error, "__notes__", ()) if "\n" not in note]  # no tracebacks
            message = " ".join([f"{type(error).__name__}: {error}", *notes])
        messages, results = zip(*self.gather((message, result)), strict=True)
        failed = next((rank for rank, each in enumerate(messages) if each is not None), None)
        if failed is None:
            return list(results)
        while_doing = f" while {doing}" if doing else ""
        raised = error or OtherRankFailed(f"rank {failed} failed{while_doing}: {messages[failed]}")
        raised.raised_on_all_ranks = True  # type: ignore[attr-defined]
        try:
            raise raised
        finally:
            # A traceback refers to this frame; the reference cycle would keep worker processes alive.
            del raised, error

    def map(self, call: Callable[[Item], T], items: Sequence[Item], *, doing: str) -> list[T]:
        """Collective: call a function on each item, on one of the ranks, in threads; return all results on every rank.

        For what every rank must know of files: 64 KiB of both ends of 100,000 shards, 13 GB, would be 13 TB on 1,024
        ranks. All ranks must pass the same items.
        """
        size, own = self.world_size, items[self.rank :: self.world_size]
        results = self.gather_results(lambda: map_in_threads(call, own), doing=doing)
        return [results[number % size][number // size] for number in range(len(items))]

    def merge_lanes(self, lanes: Mapping[int, T]) -> dict[int, T]:
        """Collective: return the states of all lanes, each as it is on the ranks that read it."""
        mine = {lane: state for lane, state in lanes.items() if lane % self.data_world_size == self.data_rank}
        merged: dict[int, T] = {}
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
        """Collective: return whether this rank lists bad records, as the lowest rank with its data rank does."""
        if not self.has_data_groups:
            return True
        places = self.gather((self.data_rank, self.data_world_size))
        require_whole(places)
        return places.index(places[self.rank]) == self.rank

    def _all_to_all(self, sent: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to send a tensor of one dimension to every rank; return what waits for theirs, a row each."""
        received = sent.new_empty(self.world_size, sent.numel())
        copies = sent.repeat(self.world_size)
        work: Any = dist.all_to_all_single(received.view(-1), copies, group=self.group, async_op=True)

        def wait() -> torch.Tensor:
            work.wait()
            return received

        return wait


_shared: WeakKeyDictionary[dist.ProcessGroup, dict[Any, RankSync]] = WeakKeyDictionary()


def shared_sync(*, timeout: timedelta, place: DataPlace | None = None) -> RankSync:
    """Return one `RankSync` of all ranks for all calls with these arguments; the first of them is a collective.

    For what is called often: each gloo group keeps connections between all ranks until the process group is destroyed.
    """
    world = dist.group.WORLD if dist.is_available() else None
    if world is None:
        return RankSync(timeout=timeout, place=place)
    made = _shared.setdefault(world, {})
    if (timeout, place) not in made:
        made[timeout, place] = RankSync(timeout=timeout, place=place)
    return made[timeout, place]
