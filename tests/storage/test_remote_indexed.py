"""Files with an index, and flat files, behind HTTP and S3, on loopback: ranges, read-ahead, retries, refusals."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streampack import DatatroveSource, FlatTokensSource, MDSSource, MegatronSource, TokenShardSource
from streampack.fingerprint import plain
from streampack.sources import Reading, flat_tokens, megatron
from streampack.storage.ranges import Fetcher
from streampack.storage.read_ahead import NO_READ_AHEAD, ReadAhead
from streampack.storage.remote import RemoteStorage
from streampack.storage.retries import Retries
from streampack.tokenize.tokenize import tokenize
from tests.support.foreign_tokens import write_datatrove, write_flat, write_megatron
from tests.support.mds import write_mds
from tests.support.web import Web, random_faults

ALONE = Reading(read_ahead=NO_READ_AHEAD)
KINDS = ("tokens", "masked tokens", "mds", "mds.gz", "megatron", "datatrove", "flat")


def written(kind: str, folder: Path, rows: int, *, longest: int = 250) -> Path:
    """Write ``rows`` documents to three shards or more."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, 60_000, rng.integers(1, longest)) for _ in range(rows)]
    total = sum(map(len, documents))
    if "tokens" in kind:
        labels = [d if kind == "tokens" else np.where(rng.random(d.size) < 0.5, d, -100) for d in documents]
        data = [{"tokens": d, "labels": own} for d, own in zip(documents, labels, strict=True)]
        return tokenize(data, out=folder, lanes=1, shard_tokens=total // 3, dtype="uint16", progress=False)
    if kind == "megatron":
        return write_megatron(folder, [d.tolist() for d in documents], per_file=-(-rows // 3), dtype="uint16")
    if kind == "flat":
        for number in range(3):
            own = documents[number * rows // 3 : (number + 1) * rows // 3]
            write_flat(folder / f"{number}.bin", [token for d in own for token in (*d.tolist(), 0)])
        return folder
    if kind == "datatrove":
        losses = [rng.integers(0, 2, d.size).tolist() for d in documents]
        return write_datatrove(folder, [d.tolist() for d in documents], losses=losses, per_file=-(-rows // 3))
    data = [{"tokens": d.astype(np.uint16)} for d in documents]
    compression = "gz" if kind == "mds.gz" else None
    return write_mds(
        folder, data, {"tokens": "ndarray:uint16"}, per_shard=-(-rows // 3), compression=compression
    )


def published(folder: Path) -> dict[str, bytes]:
    return {f"/bucket/a/{path.name}": path.read_bytes() for path in folder.iterdir()}


def source(kind: str, place: str, web: Web, **settings: Any) -> Any:
    """Make a source of that kind, with short waits between retries."""
    make = maker(kind)
    url, options = f"{web.url}/bucket/a", None
    if place == "s3":
        pytest.importorskip("s3fs")
        url, options = "s3://bucket/a", {"key": "key", "secret": "secret", "endpoint_url": web.url}
    paths: Any = url
    if ending := {"megatron": ".bin", "datatrove": ".ds", "flat": ".bin"}.get(kind):
        names = sorted(Path(path).name for path in web.files if path.endswith(ending))
        paths = [f"{url}/{name}" for name in names]
    made: Any = make(paths, storage_options=options, **{"retries": 9, **settings})
    made.corpus = replace(made.corpus, retries=Retries(attempts=9, first=0.01, longest=0.05))
    return made


def maker(kind: str) -> Any:
    flat = partial(FlatTokensSource, eos_token_id=0, dtype="uint16")
    others: dict[str, Any] = {"megatron": MegatronSource, "datatrove": DatatroveSource, "flat": flat}
    return others.get(kind, TokenShardSource if "tokens" in kind else MDSSource)


def local(kind: str, folder: Path) -> Any:
    return maker(kind)(folder)


def read_all(data: Any, num_lanes: int = 2, **reading: Any) -> list[Any]:
    lanes = [data.read(Reading(lane, num_lanes=num_lanes, **reading)) for lane in range(num_lanes)]
    return [plain(row.data) for lane in lanes for row in lane]


@pytest.mark.parametrize(("kind", "place"), [*((kind, "http") for kind in KINDS[1:-1]), ("tokens", "s3")])
def test_little_more_than_the_ranges_is_read_while_requests_fail(
    web: Web, tmp_path: Path, kind: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RemoteStorage, "block", 4096)
    monkeypatch.setattr(megatron, "HEAD_BYTES", 64)  # as small a part of an index as of long ones
    here = local(kind, written(kind, tmp_path, 300))
    expected = read_all(here, shuffle_window=16)
    web.files = published(tmp_path)
    data = source(kind, place, web)
    assert read_all(data, shuffle_window=16) == expected
    assert web.bytes <= 1.05 * sum(map(len, web.files.values()))
    assert all(ranged for _, ranged in web.requests)
    web.fault = random_faults(1, 0.03)
    assert read_all(source(kind, place, web, timeout=0.3), shuffle_window=16) == expected
    assert len(set(web.faults)) >= 3, web.faults


@pytest.mark.parametrize("kind", ["masked tokens", "mds", "megatron", "datatrove", "flat"])
def test_a_seek_reads_only_from_there(
    web: Web, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flat_tokens, "ONE_DOCUMENT", 512)
    web.files = published(written(kind, tmp_path, 900))
    data = source(kind, "http", web)
    found = list(data.read(ALONE))
    whole, web.bytes = web.bytes, 0
    [row] = [next(data.read(replace(ALONE, start=found[895].cursor)))]
    assert plain(row.data) == plain(found[895].data)
    assert web.bytes < 0.01 * whole, "the last five documents of the last part"
    web.bytes = 0
    assert plain(data.fetch(row.row_id)) == plain(row.data)
    assert web.bytes < 1000


@pytest.mark.parametrize("kind", ["masked tokens", "mds", "mds.gz", "megatron", "datatrove", "flat"])
def test_the_next_part_is_fetched_while_this_one_is_read(
    web: Web, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except in the first part, each block was requested before it is needed, in shuffled parts too."""
    monkeypatch.setattr(RemoteStorage, "block", 1000)
    monkeypatch.setattr(megatron, "HEAD_BYTES", 64)
    # Of flat files, some bytes behind each part are read, for the document that crosses its end.
    web.files = published(written(kind, tmp_path, 1000 if kind == "flat" else 400))
    data, late, asked, most = source(kind, "http", web), [], [], [0]
    take = Fetcher.take

    def watched(fetcher: Fetcher, block: Any) -> bytes:
        asked.append(block)
        most[0] = max(most[0], sum(stop - start for _, start, stop in fetcher.in_flight))
        if block not in fetcher.in_flight:
            late.append(block)
        return take(fetcher, block)

    monkeypatch.setattr(Fetcher, "take", watched)
    for _ in data.read(Reading(shuffle_window=4, read_ahead=ReadAhead(20_000, 0, 0, 20_000, 20_000))):
        time.sleep(0.002)  # an answer on loopback takes less
    assert len(asked) > 100
    if kind == "flat":  # what is read behind a part's end, for a long document, is not planned
        late = [block for block in late if block[2] - block[1] >= 1000]
    assert len(late) <= 4, "the first part's header, offsets, mask and first block"
    assert 10_000 < most[0] <= 20_000
    assert web.bytes <= 1.05 * sum(map(len, web.files.values())), "and nothing twice"


@pytest.mark.parametrize("kind", ["tokens", "mds"])
def test_a_shard_that_changes_during_a_run_is_refused(web: Web, tmp_path: Path, kind: str) -> None:
    """The shard has the same size, and no tag in the index: its ETag differs from the first one seen."""
    web.files = published(written(kind, tmp_path, 300))
    data = source(kind, "http", web)
    list(data.read(ALONE))
    last = max(path for path in web.files if "index" not in path)
    web.files[last] = web.files[last][:-1] + bytes([web.files[last][-1] ^ 1])
    with pytest.raises(
        ValueError, match=f"{last} is version .* when it was listed; a corpus must not change"
    ):
        list(data.read(ALONE))
