"""Worker processes that read, encode and pack; one that dies is started again from its last lane states."""

from __future__ import annotations

import gc
import logging
import math
import multiprocessing as mp
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Mapping
from multiprocessing.connection import Connection
from pickle import PickleBuffer
from queue import Queue
from typing import Any, NamedTuple

import numpy as np

from streampack.distributed.parent import end_with_parent
from streampack.lanes.lane_state import LaneEvent, Snapshot
from streampack.packing.columns import narrowed
from streampack.types import Fragment, Pack, PackGroups
from streampack.validation import raised_here

log = logging.getLogger(__name__)

OpenStream = Callable[..., Generator[LaneEvent]]
"""Opens some lanes at ``lane_states``: `IterablePackedDataset.events`, with all other arguments given."""

Folded = tuple[Any, ...]
"""An event as plain values: pickled as objects, events took a tenth of a worker's time."""
MAX_RESTARTS = 3
"""Deaths of a worker in a row, without a pack between them, that are survived."""
QUEUED = 8
"""Events that wait in a worker to be sent, and the most in one message."""
PAUSE_SECONDS = 0.001
"""Between two messages. What is made meanwhile arrives together: each arrival takes a core of the trainer's process."""
HEAD = 8
"""Bytes before a message, which say how many it has."""
POLL_SECONDS = 0.5
"""Between two looks whether a worker that is waited for has died."""
START_SECONDS = 60.0
"""A forked worker that has not said for so long that it runs never will. Python 3.11 may wait for ever in a fork: for a
lock that a thread of gloo held at that moment."""
CLOSE_TIMEOUT = 10.0
"""Seconds that are waited for a killed process."""


class End(NamedTuple):
    """The end of a worker's stream, or the error that ended it."""

    error: Exception | None = None
    notes: tuple[str, ...] = ()
    raised_here: bool = False


def start_worker(
    open_stream: OpenStream, lane_states: Mapping[int, Snapshot], name: str
) -> Generator[LaneEvent]:
    """Start a process that reads some lanes, and return their events; closing the generator ends the process.

    Events come through a pipe of its own, so that a process that dies in the middle of writing harms no other. If it
    dies, a new one continues after the last event that arrived. An error in the stream is raised here; one that
    cannot be pickled as a RuntimeError with its message.
    """
    events: Generator[Any] = _events(open_stream, dict(lane_states), name)
    next(events)  # several workers start before the first of them is waited for
    return events


def _events(
    open_stream: OpenStream, lane_states: dict[int, Snapshot], name: str
) -> Generator[LaneEvent | None]:
    """Yield None once the process is started, then its events."""
    home, started, in_vain = os.getpid(), False, 0
    while True:
        pipe, theirs = mp.Pipe()
        process = mp.Process(
            target=_serve, args=(theirs, open_stream, lane_states, name), name=name, daemon=True
        )
        try:
            process.start()
            theirs.close()  # an open copy here would keep the pipe open when the process has died
            if not started:
                started = True
                yield None
            limit = START_SECONDS if mp.get_start_method() == "fork" else math.inf
            while True:
                if home != os.getpid():
                    raise RuntimeError(
                        "this process is a fork of the one that iterates the loader; iterate it again here"
                    )
                try:
                    size = int.from_bytes(_receive(pipe, process, HEAD, limit))
                    if not size:
                        limit = math.inf  # it runs
                        continue
                    events, end = pickle.loads(_receive(pipe, process, size))
                except (EOFError, ConnectionError):
                    break
                for event in map(unfold, events):
                    lane_states[event.lane], in_vain = event.state, 0
                    yield event
                if end is not None:
                    if (error := end.error) is None:
                        return
                    error.__notes__, error.raised_here = [*end.notes], end.raised_here
                    try:
                        raise error
                    finally:
                        del error, end  # the traceback holds this frame: a cycle would keep the process alive
            _kill(process)  # it may have closed its pipe only
            code = process.exitcode or 0
            how = f"of signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            what = f"{name} (pid {process.pid}) died {how}{', before it ran' * (limit < math.inf)}"
        finally:
            # A forked process has a copy, which must not end the original's worker.
            if home == os.getpid() and not sys.is_finalizing():
                _kill(process)
                theirs.close()
                pipe.close()
        if in_vain >= MAX_RESTARTS:
            raise RuntimeError(
                f"{what}, as after each of {in_vain} restarts before it, without a pack; if the system killed it, "
                "it may lack memory: use fewer workers or a smaller buffer_size"
            )
        in_vain += 1
        log.warning("%s; it is started again from its last state", what)


def _receive(pipe: Connection, process: mp.Process, size: int, limit: float = math.inf) -> memoryview:
    """Return the next bytes of a worker; raise EOFError if it died before, or if none came in ``limit`` seconds.

    Neither the pipe's end nor `Process.sentinel` tells of each death: a child of the worker may hold both, and so may a
    process that another thread of the trainer forked meanwhile.
    """
    whole = left = memoryview(bytearray(size))
    give_up = time.monotonic() + limit
    while left:
        alive = process.is_alive()  # before the pipe is looked at: what was sent before its death arrives
        if pipe.poll(POLL_SECONDS if alive else 0):
            if not (count := os.readv(pipe.fileno(), [left])):
                raise EOFError
            left = left[count:]
        elif not alive or time.monotonic() > give_up:
            raise EOFError
    return whole


def _kill(process: mp.Process) -> None:
    """Kill a process, if it was started, and wait until it is gone."""
    if process.pid is not None:
        process.kill()
        # Not `process.join`: with a limit, it waits for a pipe that the process's own children may hold.
        give_up, pause = time.monotonic() + CLOSE_TIMEOUT, 0.0005
        while process.is_alive() and time.monotonic() < give_up:
            time.sleep(pause)
            pause = min(0.05, 2 * pause)


def _serve(pipe: Connection, open_stream: OpenStream, lane_states: Mapping[int, Snapshot], name: str) -> None:
    """Run the stream, in the worker's process."""
    os.write(pipe.fileno(), bytes(HEAD))  # a message of no bytes: it runs
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # instead of a handler that was forked from the trainer
    end_with_parent()
    # Garbage of the trainer's process may hold readers of other libraries (pyarrow), whose end waits for threads that a
    # fork does not copy: collected here, it crashed the worker.
    gc.freeze()
    gc.enable()  # a trainer may have switched it off, to collect at steps of its choice, as torchtitan does
    made: Queue[Folded | End] = Queue(QUEUED)
    sender = threading.Thread(target=_send, args=(pipe, made), daemon=True)
    sender.start()
    try:
        for event in open_stream(lane_states=lane_states):
            if event.pack is not None and event.pack.media is not None:
                made.join()  # eight packs of pixels may be a gigabyte: one waits while the next is made
            made.put(fold(event))
        made.put(End())
    except Exception as error:
        where = f"in {name}:\n{traceback.format_exc()}"
        # The notes are sent beside the error, because not every class of errors pickles them.
        notes = (*getattr(error, "__notes__", ()), where)
        made.put(End(_portable(error), notes, raised_here(error)))
    sender.join()


def _send(pipe: Connection, made: Queue[Folded | End]) -> None:
    """Send what is made, as soon as the trainer takes it, in a thread of the worker's process."""
    end: End | None = None
    while end is None:
        events: list[Folded] = []
        while end is None and (not events or (len(events) < QUEUED and not made.empty())):
            each = made.get()
            if isinstance(each, End):
                end = each
            else:
                events.append(each)
        try:
            message = pickle.dumps((events, end), 5)
            left = memoryview(len(message).to_bytes(HEAD) + message)
            while left:
                left = left[os.write(pipe.fileno(), left) :]
        except Exception as error:
            if not isinstance(error, OSError):  # which means that the trainer takes no more
                traceback.print_exc()
            os._exit(1)  # or the stream would wait for this thread for ever
        for _ in events:
            made.task_done()
        time.sleep(PAUSE_SECONDS)


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
    pack, head = event.pack, (event.lane, event.epoch, event.state, event.example)
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
    return (*head, *arrays, pack.seq_lens, tuple(map(tuple, pack.fragments)), pack.number, groups, pack.media)


def unfold(folded: Folded) -> LaneEvent:
    """Invert `fold`. The arrays use the memory of the bytes that arrived, and are writable."""
    lane, epoch, state, example, *rest = folded
    if not rest:
        return LaneEvent(lane, epoch, None, state, example)
    first, tokens, second, labels, seq_lens, fragments, number, groups, media = rest
    tokens, labels = np.frombuffer(tokens, np.dtype(first)), np.frombuffer(labels, np.dtype(second))
    pack = Pack(tokens, labels, seq_lens, tuple(map(Fragment._make, fragments)), epoch, number, lane)
    if groups is not None:
        pack.groups = PackGroups(*groups)
    pack.media = media
    return LaneEvent(lane, epoch, pack, state, example)
