"""Files in columns, as there may be a million of them; and the paths that checked names have in a folder."""

from __future__ import annotations

import os
import posixpath
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import overload
from urllib.parse import quote

from streampack.storage.base import File, with_path


class Texts(Sequence[str]):
    """Texts end to end in one block of memory: a name of 30 letters takes 38 bytes, and as a `str` 88.

    >>> texts = Texts(["a.jsonl", "é"])
    >>> len(texts), texts[1], list(texts)
    (2, 'é', ['a.jsonl', 'é'])
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self.data = bytearray()
        self.ends = array("q", [0])
        for text in texts:
            self.append(text)

    def append(self, text: str) -> None:
        """Add a text."""
        self.data += text.encode()
        self.ends.append(len(self.data))

    def __len__(self) -> int:
        return len(self.ends) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        numbers = range(len(self))[index]
        if isinstance(numbers, range):
            return [self[number] for number in numbers]
        return self.data[self.ends[numbers] : self.ends[numbers + 1]].decode()


class Place:
    """The folder of a manifest or an index. Names in it come from the network, so they must stay below it.

    >>> Place("https://host/corpus/shards.txt?key=1")("a b.jsonl")
    'https://host/corpus/a%20b.jsonl?key=1'

    Args:
        index: the path or URL of the manifest or index.
    """

    def __init__(self, index: str) -> None:
        self.url = "://" in index
        self.quoted = index.startswith(("http:", "https:"))
        self.before, self.after = f"{os.path.realpath(Path(index).parent)}/", ""
        if self.url:
            mark = "\0"
            found = with_path(index, lambda path: f"{path.rpartition('/')[0]}/{mark}")
            self.before, _, self.after = found.partition(mark)
        self._sound = {
            self.before.rstrip("/"): True
        }  # whether folders within it are no links that lead out of it

    def __call__(self, name: str) -> str:
        """Return the path of the file with this name."""
        path = f"{self.before}{quote(name) if self.quoted else name}{self.after}"
        return path if self.url else os.path.normpath(path)

    def require_below(self, name: str) -> None:
        """Raise ValueError for a name or a link that leads out of the folder."""
        leads_out = name.startswith(("/", "~")) or ".." in name.split("/") or re.match(r"[\w+.-]+:", name)
        if leads_out or "\\" in name or "::" in name or not name.isprintable():
            raise ValueError(
                f"the name {name!r} is refused: it must be relative and stay below the manifest's folder"
            )
        if not self.url and not self._is_below(self(name)):
            raise ValueError(
                f"the name {name!r} is refused: it is a link that leads out of the manifest's folder"
            )

    def _is_below(self, path: str) -> bool:
        folder = path.rpartition("/")[0]
        if (sound := self._sound.get(folder)) is None:
            sound = self._sound[folder] = f"{os.path.realpath(folder)}/".startswith(self.before)
        return sound and (not os.path.islink(path) or os.path.realpath(path).startswith(self.before))


class Files(Sequence[File]):
    """The files of a corpus. A `File` is made when it is asked for; a million in columns take 80 MB, as objects 400.

    Attributes:
        names, sizes, tags: of all files; an empty tag if there is none.
        special: by number, the files that have more than a name, a size and a tag in the folder ``place``.
    """

    def __init__(
        self,
        names: Sequence[str],
        sizes: array[int],
        tags: Sequence[str],
        *,
        special: Mapping[int, File],
        place: Place | None = None,
    ) -> None:
        self.names = names
        self.sizes = sizes
        self.tags = tags
        self.special = dict(special)
        self.place = place

    @classmethod
    def of(cls, files: Iterable[File]) -> Files:
        """Return files that are objects already."""
        found = [*files]
        names, tags = [file.name for file in found], [file.tag or "" for file in found]
        return cls(names, array("q", (file.size for file in found)), tags, special=dict(enumerate(found)))
