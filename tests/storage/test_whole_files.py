"""Files that are complete or absent."""

from __future__ import annotations

from pathlib import Path

import pytest

from streampack.storage import whole_files
from streampack.storage.whole_files import write_whole


def test_a_file_is_written_and_replaced_as_a_whole(tmp_path: Path) -> None:
    for content in (b"one", b"", b"another"):
        write_whole(tmp_path / "file", content)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": content}


def test_a_failed_write_keeps_the_old_content_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_whole(tmp_path / "file", b"old")

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(whole_files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "file", b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"old"}
