"""Prefetching of one process: the bytes that each lane may hold, and the threads that read for all lanes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Any, TypeVar

PREFETCH_BYTES = 256 << 20  # bytes for all lanes of a process, unless the user says otherwise
REQUESTS = 64
"""Most requests of a process at a time: 320 MB/s with blocks of 256 KiB and 50 ms a request. On a slow line the last of
more would time out."""
PARTS = 64  # the most parts that threads of a process read records of at a time
DECODERS = 4
"""The threads of a process in which pyarrow decodes: its allocator keeps freed memory for each that ever did."""
SOON = 16
"""Lanes for which a process prepares. The first rows of a lane may take three requests, one after another."""
LONGEST_SHARE = 8 << 20  # bytes; with 50 ms a request, a lane that is read alone gets 160 MB/s
SMALLEST_BLOCK = 1 << 18  # bytes
IDLE = 1.0  # seconds after which a thread ends

Result = TypeVar("Result")


class Threads:
    """Threads that call functions, at most ``at_once`` at a time, in the order of `submit`.

    A thread ends after a second without work, so there is no pool to shut down. A call that has not begun can be
    cancelled and made by the caller who needs it (`result_of`).
    """

    def __init__(self, at_once: int) -> None:
        self.at_once = at_once
        self.queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self.lock = threading.Lock()
        self.running = self.idle = 0
        # Calls; one that an idle thread is just taking counts until the thread is no longer idle.
        self.waiting = 0
        self.process = os.getpid()

    def submit(self, call: Callable[[], Result]) -> Future[Result]:
        """Call a function in a thread. Until it has begun, the returned future can be cancelled."""
        if self.process != os.getpid():  # a fork copied this object, but none of its threads
            vars(self).update(vars(Threads(self.at_once)))
        future: Future[Result] = Future()
        with self.lock:
            self.queue.put((future, call))
            self.waiting += 1
            if self.idle < self.waiting and self.running < self.at_once:
                with suppress(RuntimeError):  # the system has no thread left
                    threading.Thread(target=self._call, daemon=True, name="prefetch").start()
                    self.running += 1
        return future

    def _call(self) -> None:
        while True:
            with self.lock:
                self.idle += 1
            try:
                future, call = self.queue.get(timeout=IDLE)
            except Empty:
                future = None
            with self.lock:
                self.idle -= 1
                if future is None and self.waiting:
                    continue  # one came at the last moment, for which no thread was begun
                if future is None:
                    self.running -= 1
                    return
                self.waiting -= 1
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # without a result, the reader would wait for ever
                    future.set_exception(error)
            del future, call  # else their bytes would be held until the next call


def result_of(future: Future[Result], call: Callable[[], Result]) -> Result:
    """Return the result of a call that was submitted to `Threads`; if none has begun it, it is called here."""
    return call() if future.cancel() else future.result()


class FirstCall:
    """Calls by key, of functions that keep what they find. Threads that come during the first wait until it is over.

    Then they make their own, which finds it, or, after an error, all try side by side.
    """

    def __init__(self) -> None:
        self._first: dict[tuple[int, Any], Lock] = {}  # which the first call holds while it runs

    def __getstate__(self) -> dict[str, Any]:
        return {"_first": {}}

    def __call__(self, key: Any, call: Callable[[], Result]) -> Result:
        """Call a function, after the first call for this key."""
        # No event, which an interrupt in its own methods would leave unset: a lock's are in C.
        own = Lock()
        own.acquire()
        try:
            # A process that is forked meanwhile does not have the thread of the first call.
            first = self._first.setdefault((os.getpid(), key), own)
            if first is not own:
                with first:
                    pass
            return call()
        finally:
            own.release()


@dataclass(frozen=True, slots=True)
class Prefetch:
    """How much each lane of a process may prefetch, and the threads that do.

    A lane holds at most ``room`` bytes of blocks and as many of records (of two shuffle windows if that is more),
    besides the block that it reads from.

    >>> [Prefetch.for_lanes(256 << 20, lanes).room >> 10 for lanes in (8, 240)]  # KiB
    [8192, 546]
    """

    room: int
    requests: Threads = field(default_factory=lambda: Threads(REQUESTS), compare=False)
    parts: Threads = field(default_factory=lambda: Threads(PARTS), compare=False)
    decoders: Threads = field(default_factory=lambda: Threads(DECODERS), compare=False)

    @classmethod
    def for_lanes(cls, budget: int, lanes: int) -> Prefetch:
        """Divide ``budget`` bytes among the lanes of a process."""
        return cls(min(LONGEST_SHARE, budget // max(1, 2 * lanes)))

    def part(self, fraction: float) -> Prefetch:
        """Return what one source of a mixture may prefetch, if the lane reads this fraction of its rows from it."""
        return replace(self, room=int(fraction * self.room))

    def decode(self, call: Callable[[], Result]) -> Result:
        """Call a function that decodes: if anything is prefetched, in one of few threads."""
        if not self.room:
            return call()
        future = self.decoders.submit(call)
        return future.result() if self.decoders.running else result_of(future, call)

    def block(self, most: int) -> int:
        """Return the number of bytes for one request: two are within the room, if that is possible."""
        return min(most, max(SMALLEST_BLOCK, self.room // 2)) if self.room else most


NO_PREFETCH = Prefetch(0)
