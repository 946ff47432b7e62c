"""Time to the first batches of many lanes in one process, over HTTP with a delay, and the memory that it takes.

Run ``python -m benchmarks.lanes``; README.md in this folder explains the table.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import numpy as np

from benchmarks import lengths as corpora
from benchmarks import report
from benchmarks.start import WORDS, WordTokenizer, megabytes

MAX_SEQ_LEN = 4096
BATCH_SIZE = 8
FIRST = 60  # packs
GROUPS = 4  # row groups of a Parquet file
KINDS = ("parquet", "jsonl")
HEADER = (
    "files",
    "lanes",
    "first batch, s",
    "60 packs, s",
    "a pack of each lane, s",
    "MB/s until then",
    "of the network's",
    "resumed, first batch, s",
    "read-ahead, most, MB",
    "windows, most, MB",
    "growth of the process, MB",
)


def content(kind: str, rows: int) -> bytes:
    """Return a file of ``rows`` texts with FLAN-like lengths."""
    rng = np.random.default_rng(0)
    counts = corpora.lengths("flan", count=rows, longest=MAX_SEQ_LEN - 2).tolist()
    words = np.array(WORDS)
    texts = [" ".join(rng.choice(words, count)) for count in counts]
    if kind == "jsonl":
        return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)
    import pyarrow
    from pyarrow import parquet

    stream = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": texts}), stream, row_group_size=-(-rows // GROUPS))
    return stream.getvalue()


class Handler(socketserver.StreamRequestHandler):
    """Answers a request for a range of the one content, whatever its name, after a delay."""

    data: bytes
    delay: float

    def handle(self) -> None:
        """Answer the requests of a connection."""
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while self.rfile.readline():
            start = stop = 0
            while (line := self.rfile.readline().strip()) not in (b"", b"\r\n"):
                if line.lower().startswith(b"range: bytes="):
                    start, stop = map(int, line.split(b"=")[1].split(b"-"))
            time.sleep(self.delay)
            found = self.data[start : stop + 1]
            size = len(self.data)
            head = (
                f'HTTP/1.1 206 Partial Content\r\nContent-Length: {len(found)}\r\nETag: "one"\r\n'
                f"Content-Range: bytes {start}-{start + len(found) - 1}/{size}\r\n\r\n"
            )
            self.wfile.write(head.encode() + found)


class Server(socketserver.ThreadingTCPServer):
    """A web server of many threads."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 1024


def serve(kind: str, rows: int, delay: float, ready: Any) -> None:
    """Serve in a process of its own, so that it takes no time of the reading one."""
    Handler.data, Handler.delay = content(kind, rows), delay
    with Server(("127.0.0.1", 0), Handler) as server:
        ready.put((server.server_address[1], len(Handler.data)))
        server.serve_forever()


class Watch:
    """Watches, in a thread, what the readers of a stream hold."""

    def __init__(self) -> None:
        from streampack.storage.ranges import Fetcher

        self.fetchers: list[Any] = []
        self.ahead = self.windows = 0
        self.taken = 0
        begin, take, watch = Fetcher.__init__, Fetcher.take, self

        def __init__(fetcher: Any, *given: Any, **named: Any) -> None:
            begin(fetcher, *given, **named)
            if fetcher.read_ahead.turn:  # one that reads ahead
                watch.fetchers.append(fetcher)

        def counted(fetcher: Any, block: Any) -> bytes:
            watch.taken += block[2] - block[1]
            return take(fetcher, block)

        Fetcher.__init__, Fetcher.take = __init__, counted  # type: ignore[method-assign]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            fetchers = list(self.fetchers)
            ahead = sum(stop - start for each in fetchers for _, start, stop in list(each.in_flight))
            self.ahead = max(self.ahead, ahead)
            self.windows = max(self.windows, sum(each.window for each in fetchers))
            time.sleep(0.02)


def network_rate(source: Any, *, blocks: int, size: int) -> float:
    """Return the MB/s of fetching blocks in 64 threads, and nothing else."""
    storage, files = source.corpus.storage, source.files
    begun = time.perf_counter()
    with ThreadPoolExecutor(64) as pool:
        found = pool.map(lambda i: len(storage.fetch(files[i % len(files)], 0, size)), range(blocks))
        total = sum(found)
    return total / (time.perf_counter() - begun) / 1e6


def measure(kind: str, url: str, size: int, options: argparse.Namespace, results: Any) -> None:
    """Measure in a process of its own."""
    from streampack import IterablePackedDataset, JSONLSource, TextEncoder
    from streampack.sources import ParquetSource

    make: Callable[..., Any] = ParquetSource if kind == "parquet" else JSONLSource
    source = make([f"{url}/{number:05}.{kind}" for number in range(options.files)])

    def dataset() -> IterablePackedDataset:
        return IterablePackedDataset(
            source,
            encoder=TextEncoder(WordTokenizer()),
            max_seq_len=MAX_SEQ_LEN,
            num_lanes=options.lanes,
            shuffle=options.window > 0,
            shuffle_window=max(1, options.window),
            read_ahead=options.read_ahead << 20,
        )

    rate = network_rate(source, blocks=options.files, size=min(size, 400_000))
    watch = Watch()
    before = megabytes("VmRSS")
    begun = time.perf_counter()
    data = dataset()
    stream = data.stream()
    seconds = []
    for number, _ in enumerate(islice(stream, options.lanes), 1):
        if number in (BATCH_SIZE, FIRST, options.lanes):
            seconds.append(time.perf_counter() - begun)
    read = watch.taken / seconds[-1] / 1e6
    states = stream.lane_states()
    measured = {
        "ahead": watch.ahead / 1e6,
        "windows": watch.windows / 1e6,
        "growth": megabytes("VmHWM") - before,
    }
    del stream
    watch.fetchers.clear()
    begun = time.perf_counter()
    for _ in islice(dataset().stream(lane_states=states), BATCH_SIZE):
        pass
    results.put(
        {**measured, "seconds": seconds, "rate": rate, "read": read, "resumed": time.perf_counter() - begun}
    )


def in_processes(kind: str, options: argparse.Namespace) -> Mapping[str, Any]:
    """Start a server and a reader, and return what was measured."""
    context = multiprocessing.get_context("spawn")
    ready, results = context.SimpleQueue(), context.SimpleQueue()
    server = context.Process(target=serve, args=(kind, options.rows, options.delay, ready), daemon=True)
    server.start()
    port, size = ready.get()
    reader = context.Process(target=measure, args=(kind, f"http://127.0.0.1:{port}", size, options, results))
    reader.start()
    try:
        found: Mapping[str, Any] = results.get()
    finally:
        reader.join()
        server.terminate()
    return found


def row(kind: str, options: argparse.Namespace) -> list[str]:
    """Return a row of the table."""
    found = in_processes(kind, options)
    return [
        kind,
        f"{options.lanes}",
        *(f"{value:.2f}" for value in found["seconds"]),
        f"{found['read']:.0f}",
        f"{found['read'] / found['rate']:.0%}",
        f"{found['resumed']:.2f}",
        *(f"{found[key]:.0f}" for key in ("ahead", "windows", "growth")),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the table."""
    parser = report.parser(__doc__, smoke="64 lanes of small files")
    add = parser.add_argument
    add("--lanes", type=int, default=240, help="lanes of the process (%(default)s)")
    add("--files", type=int, default=480, help="files of the corpus (%(default)s)")
    add("--rows", type=int, default=2048, help="rows of a file (%(default)s)")
    add("--window", type=int, default=512, help="rows of a shuffle window; 0 keeps the order (%(default)s)")
    add("--delay", type=float, default=0.05, help="seconds before each answer (%(default)s)")
    add("--read-ahead", type=int, default=256, help="MiB for read-ahead and windows together (%(default)s)")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.lanes, options.files, options.rows, options.window = 64, 64, 200, 50
    report.publish(
        "lanes",
        options,
        "# Many lanes over a slow network",
        report.machine_line("streampack", "torch", "aiohttp", "pyarrow"),
        f"{options.files} files of {options.rows:,} rows behind HTTP on loopback, {options.delay * 1000:.0f} ms a "
        f"request; one process, windows of {options.window} rows, read_ahead={options.read_ahead} MiB. Explained in "
        "../README.md.",
        report.table(HEADER, [row(kind, options) for kind in KINDS]),
    )


if __name__ == "__main__":
    main()
