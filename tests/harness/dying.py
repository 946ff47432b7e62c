"""A process that ends at one of its writes, syncs, renames and removals, as a kill at that moment would end it."""

from __future__ import annotations

import io
import os
from pathlib import Path


class DyingFile(io.FileIO):
    """Writes half of the data before a kill point: at every 40th write, because torch.save makes hundreds."""

    point = None
    writes = 0

    def write(self, data):
        data = bytes(data)
        super().write(data[: len(data) // 2])
        if self.writes % 40 == 0:
            DyingFile.point("write")
        self.writes += 1
        super().write(data[len(data) // 2 :])
        return len(data)


def die_at(number, journal):
    """Let this process end at the ``number``-th write, sync, rename or removal from now on."""
    passed = 0

    def point(kind):
        nonlocal passed
        passed += 1
        os.write(journal, f"{kind}\n".encode())
        if passed == number:
            os._exit(9)

    def watched(kind, function):
        def call(*args, **kwargs):
            point(kind)
            return function(*args, **kwargs)

        return call

    def open_file(path, mode="r", *args, **kwargs):
        return DyingFile(path, "w") if "w" in mode else opened(path, mode, *args, **kwargs)

    opened = Path.open
    DyingFile.point = staticmethod(point)
    Path.open = open_file
    os.fsync = watched("fsync", os.fsync)
    for name in ("rename", "mkdir", "unlink", "rmdir"):
        setattr(os, name, watched(name, getattr(os, name)))
    Path.rename = lambda path, target: os.rename(path, target)  # noqa: PTH104
