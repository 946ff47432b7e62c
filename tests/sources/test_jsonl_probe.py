"""Samples of a corpus from all over its files, and how many lanes it fills."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streampack import IterableSource, JSONLSource, MapSource
from streampack.storage.base import LocalStorage
from tests.support.corpus import numbered, write


def texts_of(count: int) -> list[dict[str, Any]]:
    """Return rows sorted by length, so that the first ones do not represent the rest."""
    rng = np.random.default_rng(0)
    return [{"text": "x" * n} for n in sorted(rng.lognormal(4, 1, count).astype(int).tolist())]


@pytest.mark.parametrize("files", [1, 3])
def test_probe_of_plain_files(tmp_path: Path, files: int) -> None:
    rows = texts_of(20_000)
    step = len(rows) // files
    source = JSONLSource(
        [write(tmp_path / f"{i}.jsonl", rows[i * step : (i + 1) * step]) for i in range(files)]
    )
    probed, scale = source.probe(256)
    assert 200 <= len(probed) <= 260
    true = sum(len(row["text"]) for row in rows)
    assert sum(len(row.data["text"]) for row in probed) * scale == pytest.approx(true, rel=0.15)
    assert source.bytes_read < 300 * 1000, "not the whole corpus"


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_probe_of_compressed_files(tmp_path: Path, suffix: str) -> None:
    rows = texts_of(20_000)
    rng = random.Random(0)
    rng.shuffle(rows)  # only its beginning is looked at
    rows = [{"text": "".join(rng.choices("etaoin shrdlu", k=len(row["text"])))} for row in rows]
    source = JSONLSource(write(tmp_path / f"a.jsonl{suffix}", rows))
    probed, scale = source.probe(512)
    true = sum(len(row["text"]) for row in rows)
    assert sum(len(row.data["text"]) for row in probed) * scale == pytest.approx(true, rel=0.35)
    small = JSONLSource(write(tmp_path / f"small.jsonl{suffix}", rows[:40]))
    probed, scale = small.probe(512)
    assert (len(probed), scale) == (40, pytest.approx(1))


@pytest.mark.parametrize(("suffix", "opened"), [("", 64), (".gz", 16)])
def test_probe_of_more_files_than_rows_are_wanted(
    tmp_path: Path, suffix: str, opened: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = texts_of(6000)
    random.Random(0).shuffle(rows)
    names = [write(tmp_path / f"{i:03}.jsonl{suffix}", rows[i * 12 : i * 12 + 12]) for i in range(500)]
    source, looked = JSONLSource(names), set()
    fetch = LocalStorage.fetch

    def watched(storage: LocalStorage, file: Any, start: int, stop: int) -> bytes:
        looked.add(file.name)
        return fetch(storage, file, start, stop)

    monkeypatch.setattr(LocalStorage, "fetch", watched)
    probed, scale = source.probe(64)
    assert 0.8 * opened <= len(looked) <= opened
    assert 60 <= len(probed) <= 70
    true = sum(len(row["text"]) for row in rows)
    assert sum(len(row.data["text"]) for row in probed) * scale == pytest.approx(true, rel=0.3)
    assert len({number // 50 for number in map(int, (name[:3] for name in looked))}) >= 8, "from all over"


def test_probe_of_small_and_of_map_style_data(tmp_path: Path) -> None:
    source = JSONLSource(write(tmp_path / "a.jsonl", numbered(5)))
    probed, scale = source.probe(256)
    assert (sorted(row.data["i"] for row in probed), scale) == ([0, 1, 2, 3, 4], pytest.approx(1))
    probed, scale = MapSource(texts_of(5000)).probe(100)
    assert len(probed) in (100, 101)
    assert sum(len(row.data["text"]) for row in probed) * scale == pytest.approx(
        sum(len(row["text"]) for row in texts_of(5000)), rel=0.15
    )
    probed, scale = MapSource(numbered(3)).probe(100)
    assert ([row.data for row in probed], scale) == (numbered(3), 1.0)
    with pytest.raises(ValueError, match="the length of IterableSource is unknown; set max_steps"):
        IterableSource(numbered(3)).probe(10)


def test_natural_lanes(tmp_path: Path) -> None:
    assert MapSource(numbered(100)).natural_lanes() == 1
    assert MapSource([{}] * 5000).natural_lanes() == 9
    assert IterableSource(numbered(10)).natural_lanes() == 1
    assert JSONLSource(write(tmp_path / "a.jsonl", numbered(10))).natural_lanes() == 1
    big = tmp_path / "big.jsonl"
    big.write_bytes(b'{"i": 1}\n' * (1 << 17))
    assert JSONLSource(big).natural_lanes() == 4
