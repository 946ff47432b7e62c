"""Token shards that are made on the spot: a corpus, encoders that log or die, and the files that come of it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import numpy as np

from streampack import JSONLSource, TextEncoder
from streampack.tokenize import tokenize
from streampack.types import Sample
from tests.harness.stores import Store


class Letters:
    """A tokenizer: a token for every byte."""

    vocab_size = 258

    def encode(self, text: str, *, add_bos: bool, add_eos: bool) -> list[int]:
        return [256] * add_bos + list(text.encode()) + [257] * add_eos


class Logged(TextEncoder):
    """An encoder that logs the process of every row, and sleeps."""

    def __init__(self, log: Path, *, seconds: float = 0) -> None:
        super().__init__(Letters())
        self.log = log
        self.seconds = seconds

    def __call__(self, row: Mapping[str, Any], /) -> Sample:
        time.sleep(self.seconds)
        with self.log.open("a") as log:
            log.write(f"{os.getpid()}\n")
        return super().__call__(row)


def corpus(folder: Path, count: int = 300) -> JSONLSource:
    rng = np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    for part in range(2):
        lines = [json.dumps({"text": f"{part}:{i} " * int(rng.integers(1, 20))}) for i in range(count // 2)]
        (folder / f"{part}.jsonl").write_text("\n".join(lines))
    return JSONLSource(str(folder / "*.jsonl"))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("[!.]*")) if path.is_file()}


PROBED = 24  # rows encoded beforehand, for the fingerprint of the encoder


def run(
    source: Any, out: Path, *, workers: int = 1, lanes: int | None = 5, encoder: Any = None, **options: Any
) -> Path:
    encoder = encoder or TextEncoder(Letters())
    settings = {"shard_tokens": 1500, "progress": False, **options}
    return tokenize(source, out=out, encoder=encoder, workers=workers, lanes=lanes, **settings)


class Killed(BaseException):
    """Caught by no handler, like a SIGKILL."""


def wait_for(condition: Callable[[], bool], *, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.02)


class Dies(TextEncoder):
    """An encoder that is killed after so many rows, those that are encoded for its fingerprint not counted."""

    def __init__(self, after: int) -> None:
        super().__init__(Letters())
        self.left = after + PROBED

    def __call__(self, row: Mapping[str, Any], /) -> Sample:
        self.left -= 1
        if self.left < 0:
            raise Killed
        return super().__call__(row)


def stored(store: Store, place: str) -> dict[str, bytes]:
    """Return the files of a folder of a store. moto lists an object shortly before it can be read: look again then."""
    scheme, _, path = place.partition("://")
    files = fsspec.filesystem(scheme, **store.options, skip_instance_cache=True)
    for _ in range(100):
        files.invalidate_cache()
        with suppress(FileNotFoundError):
            return {found.rpartition("/")[2]: files.cat_file(found) for found in sorted(files.find(path))}
        time.sleep(0.05)
    raise AssertionError(f"{place} lists a file that cannot be read")


def into(store: Store, source: Any, place: str, **options: Any) -> dict[str, bytes]:
    run(source, place, storage={"options": store.options}, **options)  # type: ignore[arg-type]
    return stored(store, place)
