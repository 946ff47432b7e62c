"""Worker processes that read, encode and pack; one that dies is restarted from its last lane states."""

from __future__ import annotations

import gc
import logging
import multiprocessing as mp
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pickle import PickleBuffer
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from streampack.distributed.parent import end_with_parent
from streampack.packing.columns import narrowed
from streampack.streaming.lane_state import LaneEvent, LaneState
from streampack.types import Fragment, Pack, PackGroups
from streampack.validation import raised_here

log = logging.getLogger(__name__)

OpenStream = Callable[..., Generator[LaneEvent]]
"""Opens some lanes at ``lane_states``: `IterablePackedDataset.events`, with all other arguments given."""

Folded = tuple[Any, ...]
"""An event as plain values: pickled as objects, events took a tenth of a worker's time."""
EVENTS, END, ERROR, DIED = "events", "end", "error", "died"
MAX_RESTARTS = 3
"""Deaths of a worker in a row, without a pack between them, that are survived."""
MESSAGES = 2
"""Messages of a worker that wait in the trainer's process. One more is being returned and one is being made."""
MAX_EVENTS = 4
"""The most events in one message. Packs that are ready wait until the message has so many, ..."""
MAX_DELAY = 0.1
"""... but after so many seconds no further pack is begun for it."""
POLL_SECONDS = 0.5
"""Seconds between two looks whether a worker that is waited for has died."""
CLOSE_TIMEOUT = 10.0
"""Seconds that `Worker.close` waits for a killed process, and for its receiver thread."""


class Worker:
    """Iterator over the events of some lanes, which runs in a process of its own.

    Packs come through a pipe of its own, so that a process that dies in the middle of writing harms no other, and
    several at a time where they are made quickly, because each arrival takes a core of the trainer's process. Where the
    process has died, the next call starts a new one after the last pack that arrived. An error in the stream is raised
    here; one that cannot be pickled as a RuntimeError with its message. After an exception, make a new worker.
    """

    def __init__(self, stream: OpenStream, lane_states: Mapping[int, LaneState], name: str) -> None:
        self.stream = stream
        self.lane_states = dict(lane_states)  # after the last event that `__next__` returned
        self.name = name
        self.restarts = 0
        self.in_vain = 0  # the newest of them, without an event since
        self.ended = False
        self.arrived: deque[LaneEvent] = deque()  # events that `__next__` has not returned yet
        self._start()

    def _start(self) -> None:
        # An interrupt may strike between these lines; `close` ends whatever exists by then.
        self.home = os.getpid()
        self.process: mp.Process | None = None
        self.receiver: threading.Thread | None = None
        # Both are implemented in C and hold no lock of Python's: an interrupted wait leaves nothing locked, as it may
        # with `queue.Queue`, whose other side would wait without end.
        self.inbox: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        # Holds a True for each message that the receiver may read, and a False when it shall end.
        self.room: SimpleQueue[bool] = SimpleQueue()
        for _ in range(MESSAGES):
            self.room.put(True)
        self.pipe, self.theirs = mp.Pipe()
        self.process = mp.Process(
            target=_serve, args=(self.theirs, self.stream, self.lane_states, self.name), daemon=True
        )
        self.process.start()
        self.theirs.close()  # an open copy here would keep the pipe open when the process has died
        self.receiver = threading.Thread(
            target=_receive, args=(self.pipe, self.inbox, self.room), daemon=True
        )
        self.receiver.start()

    def __iter__(self) -> Iterator[LaneEvent]:
        return self

    def __next__(self) -> LaneEvent:
        if self.ended:
            raise StopIteration
        self._require_open()
        while not self.arrived:
            kind, value = self._message()
            if kind == EVENTS:
                self.arrived.extend(map(unfold, value))
                self.in_vain = 0
            elif kind == END:
                self.ended = True
                self.close()
                raise StopIteration
            elif kind == ERROR:
                self.close()
                error, error.__notes__, error.raised_here = value
                try:
                    raise error
                finally:
                    del error, value  # the traceback holds this frame: a cycle would keep the process alive
            else:
                self._require_open()
                self._restart()
        event = self.arrived.popleft()
        self.lane_states[event.lane] = event.state
        return event

    def _message(self) -> tuple[str, Any]:
        while True:
            with suppress(Empty):
                message = self.inbox.get(timeout=POLL_SECONDS)
                self.room.put(True)
                return message
            # A child of the process may hold the pipe, and then its end does not arrive.
            if _has_ended(self.process) and not self.pipe.closed:
                _shut(self.pipe)

    def _require_open(self) -> None:
        if self.pipe.closed:
            raise RuntimeError(f"{self.name} was closed; iterate the loader anew")

    def _restart(self) -> None:
        assert self.process is not None
        _end(self.process)  # it may have closed its pipe only
        code = self.process.exitcode or 0
        how = f"of signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        what = f"{self.name} (pid {self.process.pid}) died {how}"
        if self.in_vain >= MAX_RESTARTS:
            self.close()
            raise RuntimeError(
                f"{what}, as after each of {self.in_vain} restarts before it, without a pack; if the system killed it, "
                "it may lack memory: use fewer workers or a smaller buffer_size"
            )
        self.restarts, self.in_vain = self.restarts + 1, self.in_vain + 1
        log.warning("%s; it is started again from its last state", what)
        self.close()
        self._start()

    def close(self) -> None:
        """End the process and its receiver thread. After an interrupt it can be called again."""
        if self.pipe.closed:
            return
        _end(self.process)
        _shut(self.pipe)  # ends the receiver even if the process hangs, or another holds its end of the pipe
        self.room.put(False)
        receiver = self.receiver
        # The garbage collector may call this in the receiver's own thread, which cannot join itself. Neither can a
        # thread be joined that was not started.
        if receiver is not None and receiver.is_alive() and receiver is not threading.current_thread():
            receiver.join(CLOSE_TIMEOUT)
        if self.process is not None:
            with suppress(ValueError):  # raised if the process still runs, or is closed already
                self.process.close()
        self.theirs.close()
        self.pipe.close()

    def __del__(self) -> None:
        # When the interpreter ends, the modules that `close` needs are gone, and daemon processes are ended anyway. In
        # a forked process, this is a copy, which must not end the original's worker.
        if hasattr(self, "pipe") and not sys.is_finalizing() and self.home == os.getpid():
            self.close()


def _has_ended(process: mp.Process | None) -> bool:
    with suppress(ValueError):  # raised if it is closed
        return process is not None and not process.is_alive()
    return True


def _end(process: mp.Process | None) -> None:
    """Kill a process, if it was started, and wait until it is gone."""
    with suppress(ValueError, AttributeError):  # raised if it is closed, or was not started
        process.kill()  # type: ignore[union-attr]
        # Not `process.join`: with a limit, it waits for a pipe that the process's own children may hold.
        give_up, pause = time.monotonic() + CLOSE_TIMEOUT, 0.0005
        while not _has_ended(process) and time.monotonic() < give_up:
            time.sleep(pause)
            pause = min(0.05, 2 * pause)


def _shut(pipe: Connection) -> None:
    """Shut a pipe down for reading and writing, even if other processes hold its ends."""
    with suppress(OSError), socket.socket(fileno=os.dup(pipe.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


def _receive(pipe: Connection, inbox: SimpleQueue[tuple[str, Any]], room: SimpleQueue[bool]) -> None:
    """Keep the inbox filled, in a thread of the trainer's process."""
    ends = False
    # Mostly EOFError or OSError; whatever it is, the trainer must not wait for ever.
    with suppress(Exception):
        while not ends and room.get():
            message = pipe.recv()
            ends = message[0] in (END, ERROR)
            inbox.put(message)
            del message  # an error in it holds a traceback, and so all that the trainer's frames hold
    if not ends:
        inbox.put((DIED, None))


def _serve(
    pipe: Connection, open_stream: OpenStream, lane_states: Mapping[int, LaneState], name: str
) -> None:
    """Run the stream and send its events, in the worker's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # instead of a handler that was forked from the trainer
    end_with_parent()
    # Garbage of the trainer's process may hold readers of other libraries (pyarrow), whose end waits for threads that a
    # fork does not copy: collected here, it crashed the worker.
    gc.freeze()
    gc.enable()  # a trainer may have switched it off, to collect at steps of its choice, as torchtitan does
    stream, size = None, 1
    last: tuple[str, Any] | None = None
    while last is None:
        events: list[Folded] = []
        try:
            if stream is None:
                stream = open_stream(lane_states=lane_states)
            begun = time.monotonic()
            while not events or (len(events) < size and time.monotonic() < begun + MAX_DELAY):
                events.append(fold(next(stream)))
        except StopIteration:
            last = (END, None)
        except Exception as error:
            where = f"in {name}:\n{traceback.format_exc()}"
            # The notes are sent beside the error, because not every class of errors pickles them.
            notes = [*getattr(error, "__notes__", ()), where]
            last = (ERROR, (_portable(error), notes, raised_here(error)))
        try:
            if events:
                pipe.send_bytes(pickle.dumps((EVENTS, events), 5))
            if last is not None:
                pipe.send_bytes(pickle.dumps(last))
        except OSError:
            return
        # The first messages are short, so that the first batch comes at once.
        size = min(2 * size, MAX_EVENTS)


def _portable(error: Exception) -> Exception:
    """Return the error if it can be unpickled, as many of several arguments cannot, else one with its message."""
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:
        log.debug("%s cannot be sent between processes", type(error), exc_info=True)
    return RuntimeError(f"{type(error).__name__}: {error}")


def fold(event: LaneEvent) -> Folded:
    """Return an event as numbers, tuples and buffers; pickle copies the arrays' memory without calling their class."""
    pack, head = event.pack, (event.lane, event.epoch, event.state)
    if pack is None:
        return head
    arrays: list[Any] = []
    for ids in (pack.tokens, pack.labels):
        if ids.itemsize > 4:  # a pack is int64 if one of its samples was
            ids = narrowed(ids)
        arrays += [ids.dtype.char, PickleBuffer(ids.data)]
    groups = None
    if pack.groups is not None:
        groups = tuple(getattr(pack.groups, name) for name in PackGroups.__slots__)
    return (*head, *arrays, pack.seq_lens, tuple(map(tuple, pack.fragments)), pack.number, groups)


def unfold(folded: Folded) -> LaneEvent:
    """Invert `fold`. The arrays use the memory of the bytes that arrived, and are writable."""
    lane, epoch, state, *rest = folded
    if not rest:
        return LaneEvent(lane, epoch, None, state)
    first, tokens, second, labels, seq_lens, fragments, number, groups = rest
    tokens, labels = np.frombuffer(tokens, np.dtype(first)), np.frombuffer(labels, np.dtype(second))
    pack = Pack(tokens, labels, seq_lens, tuple(map(Fragment._make, fragments)), epoch, number, lane)
    if groups is not None:
        pack.groups = PackGroups(*groups)
    return LaneEvent(lane, epoch, pack, state)
