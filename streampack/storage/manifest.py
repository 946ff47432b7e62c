"""Manifests: text files that list the files of a corpus.

A line is a name, or an object with ``name``, ``size`` (bytes, as they are stored) and ``tag`` (the ETag; of a file on
this machine a digest of its first and last 64 KiB): a file whose size is given need not be looked up. A manifest is not
trusted, as it may come from the network: the files must lie below its folder.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlunsplit

from streampack.storage.base import GONE, redact, split_url
from streampack.storage.remote import Listed, opaque


def named_in(manifest: str, text: str, *, folder: str | None = None) -> list[Listed]:
    r"""Return the files that a manifest lists, in ``folder``, or in the manifest's.

    The query of the folder's URL, or of the manifest's, which may be a signature, is added to the URL of each file.

    >>> named_in("https://host/corpus/shards.txt?key=1", "a.jsonl\n")[0].path
    'https://host/corpus/a.jsonl?key=1'

    Raises:
        ValueError: for a name that leads out of the folder, and for a line that is no entry. It names the line.
    """
    index = manifest if folder is None else _beside(folder)
    found: list[Listed] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                found.append(_listed(index, line.strip()))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{redact(manifest)}:{number}: {error}") from None
    if not found:
        raise ValueError(f"{redact(manifest)} names no file")
    return found


def _beside(folder: str) -> str:
    """Return the path or URL that a manifest in a folder has."""
    if "://" not in folder:
        return str(Path(folder) / "manifest")
    parts = split_url(folder)
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/manifest"))


def _listed(index: str, line: str) -> Listed:
    entry: dict[str, Any] = json.loads(line) if line.startswith("{") else {"name": line}
    name, size, tag = entry.get("name"), entry.get("size"), entry.get("tag")
    sound = size is None or (type(size) is int and 0 <= size < 1 << 62)
    if not isinstance(name, str) or not sound or not isinstance(tag, str | None):
        raise ValueError("an entry has a name (text), and may have a size (bytes) and a tag (text)")
    return placed(index, name, size, tag)._replace(name=posixpath.normpath(name))


def placed(index: str, name: str, size: int | None = None, tag: str | None = None) -> Listed:
    """Return the file with this name in the folder of a manifest or an index.

    On this machine, a file whose size is given is not looked at; `LocalStorage` does when it is read.

    Raises:
        ValueError: for a name that leads out of the folder.
    """
    leads_out = name.startswith(("/", "~")) or ".." in name.split("/") or re.match(r"[\w+.-]+:", name)
    if leads_out or "\\" in name or "::" in name or not name.isprintable():
        raise ValueError(
            f"the name {name!r} is refused: it must be relative and stay below the manifest's folder"
        )
    if "://" not in index:
        if size is not None:
            return Listed(os.path.normpath(Path(index).parent.absolute() / name), size, tag)
        folder = Path(index).parent.resolve()
        path = folder / name
        if not path.resolve().is_relative_to(folder):
            raise ValueError(
                f"the name {name!r} is refused: it is a link that leads out of the manifest's folder"
            )
        return Listed(str(path), problem=None if path.is_file() else GONE)
    parts = split_url(index)
    if parts.scheme in ("http", "https"):
        name = quote(name)
    folder_path = parts.path.rpartition("/")[0]
    return Listed(urlunsplit(parts._replace(path=f"{folder_path}/{name}", fragment="")), size, opaque(tag))
