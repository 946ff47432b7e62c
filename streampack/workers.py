"""Worker processes that read, encode and pack; one that dies is made again from its last receipts."""

from __future__ import annotations

import logging
import multiprocessing as mp
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from streampack.iterable import IterablePackedDataset
from streampack.stream import Event

log = logging.getLogger(__name__)

EVENT, END, ERROR, DIED = "event", "end", "error", "died"


class Worker:
    """One process that runs `IterablePackedDataset.stream` for one consumer; iterating gives its events.

    Packs come through a pipe as plain bytes: no shared memory that a SIGKILL could leave behind, and a
    pipe of its own, so that a process that dies in the middle of writing is seen as dead at once and
    harms no other. torch's DataLoader raises a worker's death wherever the trainer happens to be; here it is
    noticed when its next pack is asked for, and mended there: a new process goes on after the last pack
    that arrived. An error in the stream is raised here, and asking again tries again.

    Args:
        dataset: as it stands in this process; forked, or pickled where processes are spawned.
        consumer: which share of the lanes, of ``consumers``.
        receipts: where to begin.
        first_epoch: see `IterablePackedDataset.stream`.
        prefetch: packs that may lie ready in this process.
        max_restarts: deaths to mend before giving up.
    """

    def __init__(
        self,
        dataset: IterablePackedDataset,
        *,
        consumer: int,
        consumers: int,
        receipts: Mapping[int, bytes],
        first_epoch: int | None = None,
        prefetch: int = 8,
        max_restarts: int = 3,
    ) -> None:
        self.dataset = dataset
        self.consumer = consumer
        self.consumers = consumers
        self.receipts = dict(receipts)  # as of the last event that was handed on
        self.first_epoch = first_epoch
        self.prefetch = prefetch
        self.max_restarts = max_restarts
        self.restarts = 0
        self.ended = False
        self._start()

    def _start(self) -> None:
        self.pipe, theirs = mp.Pipe()
        arguments = (theirs, self.dataset, self.consumer, self.consumers, self.receipts, self.first_epoch)
        self.process = mp.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()  # or the pipe would not end with the process
        self.inbox: queue.Queue[tuple[str, Any]] = queue.Queue(self.prefetch)
        self.receiver = threading.Thread(target=_receive, args=(self.pipe, self.inbox), daemon=True)
        self.receiver.start()

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        if self.ended:
            raise StopIteration
        while True:
            kind, value = self.inbox.get()
            if kind == EVENT:
                self.receipts[value.lane] = value.receipt
                event: Event = value
                return event
            if kind == END:
                self.ended = True
                self.close()
                raise StopIteration
            if kind == ERROR:
                self.pipe.send(None)  # it waits for this before it tries again
                raise value
            self._mend()

    def _mend(self) -> None:
        self.process.kill()  # if it only closed its pipe
        self.process.join()
        what = f"worker {self.consumer} of {self.consumers} (pid {self.process.pid}) died"
        if self.process.exitcode is not None and self.process.exitcode < 0:
            what += f" of signal {signal.Signals(-self.process.exitcode).name}"
        if self.restarts >= self.max_restarts:
            raise RuntimeError(
                f"{what}, after {self.restarts} restart(s); if the system killed it, it may lack memory: use "
                "fewer workers or a smaller buffer_size"
            )
        self.restarts += 1
        log.warning("%s; restart %d of %d from its last receipts", what, self.restarts, self.max_restarts)
        self.close()
        self._start()

    def close(self) -> None:
        """End the process, and the thread that listens to it."""
        self.process.kill()
        self.process.join()
        while self.receiver.is_alive():
            with suppress(queue.Empty):  # it may wait for room to say that the process died
                self.inbox.get(timeout=0.01)
        self.pipe.close()
        self.process.close()

    def __del__(self) -> None:
        # At the interpreter's end the modules that `close` needs are gone, and daemons are ended anyway.
        if hasattr(self, "receiver") and not self.pipe.closed and not sys.is_finalizing():
            self.close()


def _receive(pipe: Connection, inbox: queue.Queue[tuple[str, Any]]) -> None:
    """In a thread of the trainer's process: keep the inbox filled."""
    try:
        while True:
            message = pipe.recv()
            inbox.put(message)
            if message[0] == END:
                return
    except (EOFError, OSError):
        inbox.put((DIED, None))


def _serve(
    pipe: Connection,
    dataset: IterablePackedDataset,
    consumer: int,
    consumers: int,
    receipts: Mapping[int, bytes],
    first_epoch: int | None,
) -> None:
    """In the worker's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    threading.Thread(target=_die_with_parent, daemon=True).start()
    stream = None
    while True:
        message: tuple[str, Any]
        try:
            if stream is None:
                stream = dataset.stream(consumer, consumers, receipts=receipts, first_epoch=first_epoch)
            message = (EVENT, stream.next_event())
        except StopIteration:
            message = (END, None)
        except Exception as error:
            error.add_note(f"in worker {consumer} of {consumers}:\n{traceback.format_exc()}")
            message = (ERROR, error)
        try:
            pipe.send(message)
        except (BrokenPipeError, ConnectionError):
            return
        except Exception:  # an error that does not pickle
            pipe.send((ERROR, RuntimeError(f"{type(message[1]).__name__}: {message[1]}")))
        if message[0] == END:
            return
        if message[0] == ERROR:
            try:
                pipe.recv()
            except (EOFError, OSError):
                return


def _die_with_parent() -> None:
    parent = mp.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
