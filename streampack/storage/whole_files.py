"""Writing files that are complete or absent, also after a failure of the machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from uuid import uuid4


def write_whole(path: Path, content: bytes) -> None:
    """Write a file beside ``path`` and rename it, so that ``path`` never holds a part of ``content``.

    Several processes may do so at once. If writing fails, nothing is left behind.
    """
    unfinished = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            settle(file, unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def settle(file: Any, unfinished: Path, path: Path) -> None:
    """Flush a written file to the disk, rename it to ``path``, and flush the folder."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
    unfinished.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
