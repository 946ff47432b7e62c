"""Read-ahead of one process: memory that its lanes share, and threads that fetch for all of them."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

log = logging.getLogger(__name__)

READ_AHEAD = 256 << 20  # bytes for all lanes of a process, unless the user says otherwise
AT_ONCE = 64
"""The most requests of a process at a time. With blocks of 256 KiB and 50 ms a request that is 320 MB/s; more threads
would wait for one another, and a slow line would answer the last of them too late."""
SOON = 16
"""A process prepares for the turns of so many lanes. A lane's first rows may take three requests, one after another."""
LONGEST_SHARE = 8 << 20  # bytes; with 50 ms a request, a lane that is read alone gets 160 MB/s
LONGEST_BURST = 4 << 20  # bytes
SMALLEST_BLOCK = 1 << 18  # bytes


class Waiting(Protocol):
    """Something that can ask for more blocks when blocks that it asked for have arrived."""

    def top_up(self) -> None:
        """Ask for more blocks."""


class FetchThreads:
    """Threads that fetch, at most `AT_ONCE` at a time; further requests wait in the order in which they were made.

    A thread ends when nothing waits. So there is no pool to shut down, and no lock that a fork could copy.
    """

    def __init__(self) -> None:
        self.queue: deque[tuple[Future[bytes], Callable[[], bytes]]] = deque()
        self.threads: list[threading.Thread] = []
        self.waiting: dict[tuple[int, int], weakref.ref[Waiting]] = {}  # by thread and id
        self.warned = False  # whether a shuffle window was found too large
        # Of all readers of the process, see `Account`: bytes, and how many of them hold some that they need.
        self.ahead = self.needed = self.reading = 0

    def submit(self, fetch: Callable[[], bytes]) -> Future[bytes]:
        """Call ``fetch`` in a thread. Until a thread has begun it, the returned future can be cancelled."""
        future: Future[bytes] = Future()
        self.queue.append((future, fetch))
        self.threads = [thread for thread in self.threads if thread.is_alive()]
        if len(self.threads) < AT_ONCE:
            thread = threading.Thread(target=_fetch_all, args=(self.queue,), daemon=True, name="read ahead")
            self.threads.append(thread)
            with suppress(RuntimeError):  # the system has no thread left: who needs the block fetches it
                thread.start()
        return future

    def call_later(self, waiting: Waiting) -> None:
        """Call ``waiting.top_up`` at the next `wake` in this thread, if it is still there."""
        self.waiting[threading.get_ident(), id(waiting)] = weakref.ref(waiting)

    def wake(self) -> None:
        """Let all that wait for blocks in this thread look whether those have arrived.

        Other threads may read for other lanes, such as those of a second loader: a reader is used by one thread only.
        """
        here = threading.get_ident()
        for key in [key for key in list(self.waiting) if key[0] == here]:
            reference = self.waiting.pop(key)
            if (found := reference()) is not None:
                found.top_up()


class Account:
    """Counts the bytes that one reader holds among those of all readers of the process."""

    def __init__(self, threads: FetchThreads) -> None:
        self.threads = threads
        self.ahead = self.needed = 0

    def set(self, *, ahead: int, needed: int) -> None:
        """Set how many bytes the reader has fetched ahead, and how many it reads from and has in its window."""
        self.threads.ahead += ahead - self.ahead
        self.threads.needed += needed - self.needed
        self.threads.reading += (needed > 0) - (self.needed > 0)
        self.ahead, self.needed = ahead, needed

    def __del__(self) -> None:
        self.set(ahead=0, needed=0)


def _fetch_all(queue: deque[tuple[Future[bytes], Callable[[], bytes]]]) -> None:
    while True:
        try:
            future, fetch = queue.popleft()
        except IndexError:
            return
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(fetch())
        except BaseException as error:  # whatever it is: without a result, the reader would wait for ever
            future.set_exception(error)
        del future, fetch  # else their bytes would be held until the next request


@dataclass(frozen=True, slots=True)
class ReadAhead:
    """How much a reader may fetch before it is needed, and the threads that it shares with the other readers.

    >>> [ReadAhead.for_lanes(256 << 20, lanes).share >> 10 for lanes in (8, 240)]  # KiB
    [8192, 802]

    Attributes:
        share: the most bytes that the reader holds: those fetched ahead, the block that it reads, and its shuffle
            window. If the last two alone are more, nothing is fetched ahead.
        burst: how many bytes it may fetch ahead, whatever it holds, if its turn is one of the next `SOON`.
        turn: the same in its turn. At any time, one reader of a process has its turn.
        window: the bytes of a shuffle window from which on the windows alone exceed the budget.
        budget: the bytes of all readers of the process together, beyond which none fetches ahead.
        lanes: how many lanes the process has.
        threads: fetch for all readers of the process.
    """

    share: int
    burst: int
    turn: int
    window: int
    budget: int
    lanes: int = 1
    threads: FetchThreads = field(default_factory=FetchThreads, compare=False)

    @classmethod
    def for_lanes(cls, budget: int, lanes: int) -> ReadAhead:
        """Divide ``budget`` bytes among the lanes of a process; three eighths at most are for bursts."""
        burst, turn = min(LONGEST_BURST, budget // 4 // SOON), min(LONGEST_BURST, budget // 8)
        lanes = max(1, lanes)
        left = budget - min(SOON, lanes) * burst - turn
        return cls(min(LONGEST_SHARE, left // lanes), burst, turn, budget // lanes, budget, lanes)

    def part(self, fraction: float) -> ReadAhead:
        """Return what one source of a mixture may fetch ahead, if the lane reads this fraction of its rows from it."""
        share, burst, window = (int(fraction * each) for each in (self.share, self.burst, self.window))
        return replace(self, share=share, burst=max(burst, min(self.burst, SMALLEST_BLOCK)), window=window)

    def room(self, *, now: bool) -> int:
        """Return how many more bytes all readers together may fetch ahead, for one whose turn is ``now`` or another.

        Lanes that have not begun will need as much as the others do on average.
        """
        threads = self.threads
        needed = threads.needed * max(1.0, self.lanes / max(1, threads.reading))
        return self.budget - threads.ahead - int(needed) - (0 if now else self.turn)

    def check(self, window: int) -> None:
        """Warn, once in a process, if a shuffle window of so many bytes is too large."""
        if window > self.window and self.turn and not self.threads.warned:
            self.threads.warned = True
            log.warning(
                "a shuffle window holds %.1f MB, and windows of %.1f MB in each lane of this process already fill "
                "read_ahead: nothing is fetched ahead but for the lanes whose turn comes next; set shuffle to fewer "
                "rows, raise read_ahead, or use more processes",
                window / 1e6, self.window / 1e6,
            )  # fmt: skip

    def block(self, most: int) -> int:
        """Return the number of bytes for one request: two are within the share, if that is possible."""
        return min(most, max(SMALLEST_BLOCK, self.share // 2)) if self.turn else most


NO_READ_AHEAD = ReadAhead(0, 0, 0, 0, 0)
