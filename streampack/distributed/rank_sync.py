"""Agreement among ranks: one number of each on every few batches, sent ahead, so that nobody waits for it.

Ranks hold different numbers of packs. A rank that made one optimizer step more than another would wait in
its gradient all-reduce for ever. So each says how many of the next batches it has a share of, and whether it
failed then; a batch exists if any rank has, and the others hand out null packs.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

Result = TypeVar("Result")


class Answer(Protocol):
    """To one question, once all ranks have spoken."""

    def wait(self) -> tuple[int, bool]:
        """How many batches there are, over all ranks, and whether a rank failed after them."""


class RankSync:
    """What the ranks of a process group say to each other. Without a process group, a rank alone.

    Control messages go over gloo whatever the gradients use, so they neither wait for the GPU nor make it
    wait. Every rank tells every other one directly: a rank that dies breaks its connections, so whatever the
    others have asked or ask then raises at once, on all of them. In a reduction, which goes round in a ring, only a
    neighbour would notice; the others would wait for the neighbour, and it, at its end, for them.
    """

    def __init__(self, *, timeout: timedelta) -> None:
        self.timeout = timeout
        self.alone = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
        self.rank = 0 if self.alone else dist.get_rank()
        self.world_size = 1 if self.alone else dist.get_world_size()
        self.group = None if self.alone else dist.new_group(backend="gloo", timeout=timeout)
        self.gathering = False

    def say(self, count: int, *, failed: bool = False) -> Answer:
        """Of the next batches, so many are ours too, and then we failed; every rank asks as often as the others."""
        word = ~count if failed else count
        if self.alone:
            return _Alone(word)
        return _Pending(*self._tell(torch.tensor([word], device="cpu")))

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank. All ranks must call it, and it waits for all.

        Raises:
            RuntimeError: if an interrupt struck the last one: the others may wait for another part of it.
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
            heard, work = self._tell(torch.tensor([mine.numel()], device="cpu"))
            work.wait()
            sizes: list[int] = heard.tolist()
            heard, work = self._tell(mine, sizes)
            work.wait()
            values = [pickle.loads(theirs.numpy().tobytes()) for theirs in torch.split(heard, sizes)]
        except Exception:  # a rank is gone, and whatever is asked from now on raises
            self.gathering = False
            raise
        self.gathering = False
        return values

    def share(self, work: Callable[[], Result], *, doing: str) -> list[Result]:
        """What ``work`` gives on every rank, by rank; if it fails on one, all raise. A collective, as `gather`."""
        try:
            result = work()
        except Exception as error:
            self.raise_any(error, doing=doing)
            raise
        self.raise_any(None, doing=doing)
        return self.gather(result)

    def raise_any(self, error: Exception | None, *, doing: str) -> None:
        """Raise on all ranks what failed on one while it was ``doing`` its part. A collective, as `gather`.

        Raises:
            Exception: our own error, as it is.
            RuntimeError: another rank's; it says which one's, and what it said.
        """
        try:
            said = self.gather(error and _told(error))
            if error is not None:
                raise error
        finally:
            del error  # the traceback holds this frame: a cycle would keep the workers alive
        for rank, message in enumerate(said):
            if message:
                raise RuntimeError(f"rank {rank} failed while {doing}: {message}")

    def merge(self, receipts: Mapping[int, bytes]) -> dict[int, bytes]:
        """The receipts of all lanes, each from the rank that owns it. A collective, as `gather`."""
        mine = {lane: receipt for lane, receipt in receipts.items() if lane % self.world_size == self.rank}
        return {lane: receipt for theirs in self.gather(mine) for lane, receipt in sorted(theirs.items())}

    def _tell(self, said: torch.Tensor, sizes: list[int] | None = None) -> tuple[torch.Tensor, Any]:
        """What every rank said, by rank, once the work is done; ``sizes`` of it, if they differ."""
        heard = said.new_empty(self.world_size * said.numel() if sizes is None else sum(sizes))
        own = None if sizes is None else [said.numel()] * self.world_size
        return heard, dist.all_to_all_single(
            heard, said.repeat(self.world_size), sizes, own, group=self.group, async_op=True
        )


class _Alone:
    def __init__(self, word: int) -> None:
        self.word = word

    def wait(self) -> tuple[int, bool]:
        return verdict([self.word])


class _Pending:
    def __init__(self, heard: torch.Tensor, work: Any) -> None:
        self.heard = heard
        self.work = work

    def wait(self) -> tuple[int, bool]:
        self.work.wait()
        return verdict(self.heard.tolist())


def _told(error: Exception) -> str:
    """What other ranks hear of an error: its kind, its message, and where it happened; no tracebacks."""
    notes = [note for note in getattr(error, "__notes__", ()) if "\n" not in note]
    return " ".join([f"{type(error).__name__}: {error}", *notes])


def verdict(words: Sequence[int]) -> tuple[int, bool]:
    """What follows from what all ranks said: ``count``, or ``~count`` of one that failed after so many.

    >>> verdict([3, 5, 0]), verdict([3, ~2, 5])
    ((5, False), (2, True))
    """
    failed = [~word for word in words if word < 0]
    return (min(failed), True) if failed else (max(words), False)
