"""Huge, endless, foreign and lying images: each is a bad record, in bounded memory and time."""

from __future__ import annotations

import io
import json
import os
import resource
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streampack import IterablePackedDataset, MapSource, VisionEncoder
from tests.vision.families import picture, processor_of

Image = pytest.importorskip("PIL.Image")
MOST_PIXELS, MOST_BYTES = 1 << 22, 1 << 22


def good(number: int) -> bytes:
    body = io.BytesIO()
    Image.fromarray(picture(number, width=90, height=60)).save(body, "PNG")
    return body.getvalue()


def png(*chunks: tuple[bytes, bytes], size: tuple[int, int] = (9, 9)) -> bytes:
    """A PNG with more chunks behind its header; only its header says how large it is."""
    head = struct.pack(">IIBBBBB", *size, 8, 2, 0, 0, 0)
    every = [(b"IHDR", head), *chunks, (b"IDAT", zlib.compress(bytes(10_000))), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in every
    )  # fmt: skip


def scans() -> bytes:
    """A progressive JPEG whose last scan, of 53 bytes, comes 20,000 times: it would be decoded for minutes."""
    body = io.BytesIO()
    Image.new("RGB", (2000, 2000), (1, 2, 3)).save(body, "JPEG", progressive=True)
    data = body.getvalue()
    return data[:-2] + data[data.rindex(b"\xff\xda") : -2] * 20_000 + data[-2:]


def at(name: str, make: Callable[[Path], Any]) -> Callable[[Path, int], Any]:
    def image(folder: Path, number: int) -> str:
        path = folder / f"{number}-{name}"
        make(path)
        return path.name if number % 2 else str(path)

    return image


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


Z = zlib.compress(bytes(60 << 20), 9)
MANY = [(b"zTXt", b"a\0\0" + Z[:9000])] * 99
# An image, or a function of (folder, number).
BAD: dict[str, Any] = {
    "bomb": png(size=(12_000, 12_000)), "larger bomb": png(size=(60_000, 60_000)),
    "text bomb": png((b"zTXt", b"a\0\0" + Z)), "other text bomb": png((b"iTXt", b"a\0\1\0\0\0" + Z)),
    "profile bomb": png((b"iCCP", b"a\0\0" + Z)), "many texts": png(*MANY), "many scans": scans(),
    "nothing": b"", "zeros": bytes(1 << 20), "too long": good(1) + bytes(MOST_BYTES),
    "endless data": "data:image/png;base64," + "A" * (2 * MOST_BYTES), "data of text": "data:,hello",
    "no pixels": np.zeros((0, 4, 3), np.uint8), "large array": np.broadcast_to(np.uint8(1), (9000, 9000, 3)),
    "missing": "missing.png", "NUL": "a\0b.png", "root": "/", "text file": "file:///etc/passwd",
    "zero": "/dev/zero", "terminal": "/dev/tty", "memory": "/proc/self/mem", "without size": "/proc/self/environ",
    "bad host": "http://[::1", "bad port": "http://localhost:99999999/a.png", "scheme": "ftp://localhost/a.png",
    "chain": "zip::https://localhost/a.zip", "odd": "://", "folder": at("folder.png", Path.mkdir),
    "FIFO": at("fifo.png", os.mkfifo), "loop": at("loop.png", lambda path: path.symlink_to(path)),
    "link to zero": at("zero.png", link_to("/dev/zero")),
    "sparse": at("sparse.png", sparse),
}  # fmt: skip


def rows(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    (folder / "a.png").write_bytes(good(1))
    for number, (name, made) in enumerate(BAD.items()):
        yield "good", row(good(number))
        yield name, row(made(folder, number) if callable(made) else made)


def row(given: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
        "images": [given],
    }


def run(folder: Path) -> dict[str, Any]:
    """Pack the images; return what became of them, and by how many MiB the peak of memory grew."""
    encoder = VisionEncoder(
        processor_of("qwen2_vl"), folder=folder, anywhere=True, max_pixels=MOST_PIXELS, max_bytes=MOST_BYTES
    )
    names, made = zip(*rows(folder), strict=True)
    encoder(row(good(1)))
    data = IterablePackedDataset(
        MapSource(made), max_seq_len=256, encoder=encoder, num_lanes=1,
        skip_bad={"folder": folder / "bad", "limit": 10**6},
    )  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    packs = list(data)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    listed = [
        json.loads(line)
        for path in (folder / "bad").glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    kept = {fragment.row_id[0] for pack in packs for fragment in pack["fragments"]}
    bad = {record["offset"]: record["reason"] for record in listed}
    ledger = data.ledger()
    return {
        "grown": grown, "counted": ledger.dropped_samples["bad"], "listed": len(listed), "rows": len(names),
        "kept": sorted({names[i] for i in kept}), "bad": {names[i]: why for i, why in bad.items()},
        "both": sorted(kept & bad.keys()), "lost": sorted({*range(len(names))} - kept - bad.keys()),
    }  # fmt: skip


@pytest.mark.slow
def test_hostile_images_are_bad_records_in_bounded_memory(tmp_path: Path) -> None:
    code = (
        "import json, sys, pathlib; from tests.vision.test_hostile import run; "
        "print(json.dumps(run(pathlib.Path(sys.argv[1]))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["lost"] == found["both"] == []
    assert found["counted"] == found["listed"]
    assert found["kept"] == ["good"]
    assert found["bad"].keys() == BAD.keys()
    assert max(map(len, found["bad"].values())) < 600
    assert all("image 0: " in why for why in found["bad"].values()), found["bad"]
    # Decoded, any of the bombs would take 400 MiB.
    assert found["grown"] < 60, found["grown"]
