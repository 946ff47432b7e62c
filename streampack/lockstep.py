"""Agreement among ranks: on every step one small MAX-reduce, sent steps ahead, so that nobody waits for it.

Ranks hold different numbers of packs. A rank that made one optimizer step more than another would wait in
its gradient all-reduce for ever. So each says, for every batch it is going to hand out, whether it has one;
the batch exists if any rank has, and the others hand out null packs.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

NOTHING, DATA, FAILED = 0, 1, 2
"""What a rank says of its next batch. The greatest word wins."""


class Answer(Protocol):
    """To one question, once all ranks have spoken."""

    def wait(self) -> int:
        """The greatest word that any rank said."""


class Lockstep:
    """What the ranks of a process group say to each other. Without a process group, a rank alone.

    Control messages go over gloo whatever the gradients use, so they neither wait for the GPU nor make it
    wait. A rank that dies breaks its connections, and the others' `Answer.wait` raises at once.
    """

    def __init__(self, *, timeout: timedelta) -> None:
        self.timeout = timeout
        self.alone = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
        self.rank = 0 if self.alone else dist.get_rank()
        self.world_size = 1 if self.alone else dist.get_world_size()
        self.group = None if self.alone else dist.new_group(backend="gloo", timeout=timeout)

    def say(self, word: int) -> Answer:
        """Tell the others; every rank asks the same questions in the same order."""
        if self.alone:
            return _Alone(word)
        said = torch.tensor(word)
        return _Pending(said, dist.all_reduce(said, op=dist.ReduceOp.MAX, group=self.group, async_op=True))

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank. All ranks must call it, and it waits for all."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def merge(self, receipts: Mapping[int, bytes]) -> dict[int, bytes]:
        """The receipts of all lanes, each from the rank that owns it. A collective, as `gather`."""
        mine = {lane: receipt for lane, receipt in receipts.items() if lane % self.world_size == self.rank}
        return {lane: receipt for theirs in self.gather(mine) for lane, receipt in sorted(theirs.items())}


class _Alone:
    def __init__(self, word: int) -> None:
        self.word = word

    def wait(self) -> int:
        return self.word


class _Pending:
    def __init__(self, said: torch.Tensor, work: Any) -> None:
        self.said = said
        self.work = work

    def wait(self) -> int:
        self.work.wait()
        return int(self.said)
