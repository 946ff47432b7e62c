"""500 damaged, huge, foreign and lying images: each is an image or a bad record, in bounded memory and time."""

from __future__ import annotations

import base64
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
COUNT, EVERY = 500, 10  # hostile images, and one good image among so many
MOST_PIXELS, MOST_BYTES = 1 << 22, 1 << 22
FORMATS = {"JPEG": {}, "PNG": {}, "GIF": {}, "WEBP": {}, "BMP": {}, "progressive": {"progressive": True}}


def saved(made: Any, kind: str = "PNG", **settings: Any) -> bytes:
    body = io.BytesIO()
    settings |= FORMATS.get(kind, {})
    made.save(body, "JPEG" if kind == "progressive" else kind, **settings)
    return body.getvalue()


def good(number: int, kind: str = "PNG", **settings: Any) -> bytes:
    return saved(Image.fromarray(picture(number, width=90, height=60)), kind, **settings)


def png(*chunks: tuple[bytes, bytes], size: tuple[int, int] = (9, 9)) -> bytes:
    """A PNG with more chunks behind its header; only its header says how large it is."""
    head = struct.pack(">IIBBBBB", *size, 8, 2, 0, 0, 0)
    every = [(b"IHDR", head), *chunks, (b"IDAT", zlib.compress(bytes(10_000))), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in every
    )  # fmt: skip


def bomb(kind: str, side: int) -> bytes:
    """A small file whose header says that it has side x side pixels."""
    if kind == "PNG":
        return png(size=(side, side))
    data = bytearray(good(1, kind))
    if kind == "GIF":
        data[6:10] = struct.pack("<HH", side, side)
    elif kind == "BMP":
        data[18:26] = struct.pack("<ii", side, side)
    elif kind == "WEBP":
        size = struct.pack("<I", side)[:3]
        data[12:12] = b"VP8X" + struct.pack("<IB", 10, 0) + bytes(3) + size + size
        data[4:8] = struct.pack("<I", len(data) - 8)
    else:
        at = data.index(b"\xff\xc2" if kind == "progressive" else b"\xff\xc0")
        data[at + 5 : at + 9] = struct.pack(">HH", side, side)
    return bytes(data)


def scans() -> bytes:
    """A progressive JPEG whose last scan, of 53 bytes, comes 20,000 times: it would be decoded for minutes."""
    data = saved(Image.new("RGB", (2000, 2000), (1, 2, 3)), "progressive")
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


def noise(_: Path, number: int) -> bytes:
    return np.random.default_rng(number).bytes(1 + 7 * number)


DEEP: Any = "a.png"
for _ in range(50):
    DEEP = {"image": DEEP}
GRAY = np.linspace(0, 65535, 600).reshape(20, 30).astype(np.uint16)
FILM = [Image.new("P", (300, 200), i) for i in range(250)]
Z = zlib.compress(bytes(60 << 20), 9)
MANY = [(b"zTXt", b"a\0\0" + Z[:9000])] * 99
# What they make of an image: the image, or a function of (folder, number).
BAD: dict[str, Any] = {
    **{f"{kind} cut": lambda _, n, kind=kind: cut(good(n, kind), n) for kind in FORMATS},
    **{f"{kind} bomb": bomb(kind, 12_000) for kind in FORMATS}, "larger bomb": bomb("PNG", 60_000),
    "text bomb": png((b"zTXt", b"a\0\0" + Z)), "other text bomb": png((b"iTXt", b"a\0\1\0\0\0" + Z)),
    "profile bomb": png((b"iCCP", b"a\0\0" + Z)), "many texts": png(*MANY), "many scans": scans(),
    "nothing": b"", "zeros": bytes(1 << 20), "noise": noise, "too long": good(1) + bytes(MOST_BYTES),
    "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(x) run\n",
    "SVG": b"<svg xmlns='http://www.w3.org/2000/svg'/>", "PDF": b"%PDF-1.4\n1 0 obj\n",
    **{kind: good(1, kind) for kind in ("TIFF", "ICO", "PPM", "TGA", "ICNS")},
    "endless data": "data:image/png;base64," + "A" * (2 * MOST_BYTES), "data cut": lambda _, n: url(good(n))[:-n],
    "broken data": "data:image/png;base64,%%%", "data of text": "data:,hello",
    "null": None, "number": 3.5, "list": [1, 2], "empty dict": {"bytes": None, "path": None}, "text": "hello\nworld",
    "mode F": Image.fromarray(np.zeros((9, 9), np.float32)), "floats": np.zeros((9, 9, 3), np.float32),
    "no pixels": np.zeros((0, 4, 3), np.uint8), "channels first": np.zeros((3, 40, 30), np.uint8),
    "thin": np.zeros((1, 4000, 3), np.uint8), "large array": np.broadcast_to(np.uint8(1), (9000, 9000, 3)),
    "missing": "missing.png", "NUL": "a\0b.png", "percent": "%2e%2e/a%20b%00.png", "surrogate": "\udcff.png",
    "long": "a" * 5000, "nobody": "~nobody-at-all/a.png", "root": "/", "text file": "file:///etc/passwd",
    "zero": "/dev/zero", "terminal": "/dev/tty", "memory": "/proc/self/mem", "without size": "/proc/self/environ",
    "bad host": "http://[::1", "bad port": "http://localhost:99999999/a.png", "scheme": "ftp://localhost/a.png",
    "chain": "zip::https://localhost/a.zip", "odd": "://", "folder": at("folder.png", Path.mkdir),
    "FIFO": at("fifo.png", os.mkfifo), "loop": at("loop.png", lambda path: path.symlink_to(path)),
    "link to zero": at("zero.png", link_to("/dev/zero")), "below a file": at("x.png", link_to("a.png/b.png")),
    "sparse": at("sparse.png", sparse),
}  # fmt: skip
GOOD: dict[str, Any] = {
    **{kind: lambda _, n, kind=kind: good(n, kind) for kind in FORMATS},
    "wrong ending": at("a.jpg", lambda path: path.write_bytes(good(1))), "link": at("a.png", link_to("a.png")),
    "CMYK": saved(Image.new("CMYK", (90, 60)), "JPEG"), "16 bits": saved(Image.fromarray(GRAY)), "deep": DEEP,
    "palette": saved(Image.new("P", (90, 60)), transparency=bytes(range(200))),
    "gray and clear": saved(Image.new("LA", (90, 60))), "black and white": saved(Image.new("1", (90, 60))),
    "film": saved(FILM[0], "GIF", save_all=True, append_images=FILM[1:]),
    "EXIF": good(1, "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08" + bytes(65000)),
}  # fmt: skip
EITHER: dict[str, Any] = {
    f"{kind} spoilt": lambda _, n, kind=kind: spoilt(good(n, kind), n) for kind in FORMATS
}


def cut(data: bytes, number: int) -> bytes:
    places = [1, 4, 11, 20, 60, len(data) // 2, len(data) - 300]
    return data[: places[number // len(BAD) % len(places)]]


def spoilt(data: bytes, number: int) -> bytes:
    changed = np.frombuffer(data, np.uint8).copy()
    changed[np.random.default_rng(number).integers(0, len(data), 30)] ^= 0x5A
    return changed.tobytes()


def url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def rows(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    (folder / "a.png").write_bytes(good(1))
    kinds = [*BAD.items(), *EITHER.items(), *GOOD.items()]
    for number in range(COUNT):
        name, made = kinds[number % len(kinds)]
        given = made(folder, number) if callable(made) else made
        if number % EVERY == 0:
            yield "plain", row(good(number))
        yield name, row(given)


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
    assert {*found["kept"]} - EITHER.keys() == {"plain", *GOOD}
    assert found["bad"].keys() - EITHER.keys() == BAD.keys()
    assert max(map(len, found["bad"].values())) < 600
    del found["bad"]["thin"], found["bad"]["null"]  # errors of the processor, and of the row
    assert all("image 0: " in why for why in found["bad"].values()), found["bad"]
    # Decoded, any of the bombs would take 400 MiB.
    assert found["grown"] < 60, found["grown"]
