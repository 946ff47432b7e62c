"""Manifests: text files that list the files of a corpus.

A manifest is not trusted, as it may come from the network: the files must lie below its folder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

from streampack.storage.base import redact
from streampack.storage.json_depth import shallow_json
from streampack.storage.remote import Listed
from streampack.storage.responses import opaque


def named_in(manifest: str, text: str) -> list[Listed]:
    r"""Return the files that a manifest lists.

    A line holds a name, relative to the manifest's folder, or ``{"name": ..., "size": ..., "tag": ...}``. If the size
    (in bytes) and the tag (the ETag) are given, the file need not be looked up. The query of the manifest's URL, which
    may be a signature, is added to the URL of each file.

    >>> named_in("https://host/corpus/shards.txt?key=1", "a.jsonl\n")[0].path
    'https://host/corpus/a.jsonl?key=1'

    Raises:
        ValueError: for a name that leads out of the folder, and for a line that is no entry. It names the line.
    """
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                found.append(_entry(manifest, line.strip()))
            except ValueError as error:
                raise ValueError(f"{redact(manifest)}:{number}: {error}") from None
    if not found:
        raise ValueError(f"{redact(manifest)} names no file")
    return found


def _entry(manifest: str, line: str) -> Listed:
    entry: Mapping[str, Any] = shallow_json(line.encode()) if line.startswith("{") else {"name": line}
    name, size, tag = entry.get("name"), entry.get("size"), entry.get("tag")
    if (
        not isinstance(name, str)
        or not (size is None or type(size) is int)
        or not isinstance(tag, str | None)
    ):
        raise ValueError("an entry has a name (text), and may have a size (bytes) and a tag (text)")
    return placed(manifest, name, size, tag)


def placed(index: str, name: str, size: int | None = None, tag: str | None = None) -> Listed:
    """Return the file with this name in the folder of a manifest or an index.

    Raises:
        ValueError: for a name that leads out of the folder, and for a file that is missing on this machine.
    """
    leads_out = name.startswith(("/", "~")) or ".." in name.split("/") or re.match(r"[\w+.-]+:", name)
    if leads_out or "\\" in name or "::" in name or not name.isprintable():
        raise ValueError(
            f"the name {name!r} is refused: it must be relative and stay below the manifest's folder"
        )
    if "://" not in index:
        folder = Path(index).parent.resolve()
        path = folder / name
        if not path.resolve().is_relative_to(folder):
            raise ValueError(
                f"the name {name!r} is refused: it is a link that leads out of the manifest's folder"
            )
        if not path.is_file():
            raise ValueError(f"there is no file {name!r}")
        return Listed(str(path))
    parts = urlsplit(index)
    if parts.scheme in ("http", "https"):
        name = quote(name)
    folder_path = parts.path.rpartition("/")[0]
    return Listed(urlunsplit(parts._replace(path=f"{folder_path}/{name}", fragment="")), size, opaque(tag))
