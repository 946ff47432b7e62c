"""Files in columns, as there may be a million of them; and the paths that checked names have in a folder."""

from __future__ import annotations

import os
import posixpath
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from urllib.parse import quote

from streampack.storage.base import UNKNOWN_SIZE, File, with_path
from streampack.storage.compression import PACKED


class Texts:
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

    def __iter__(self) -> Iterator[str]:
        return (self.data[start:end].decode() for start, end in pairwise(self.ends))

    def __getitem__(self, number: int) -> str:
        return self.data[self.ends[number] : self.ends[number + 1]].decode()


LARGEST = 1 << 62
"""Bytes that the column of sizes has for larger files, which are refused."""
PLAIN = re.compile(r"(?:[\w-][\w.-]*/)*[\w-][\w.-]*", re.ASCII)
"""Most names, which need no further look."""


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
        self.before, self.after = f"{os.path.realpath(Path(index).parent).rstrip('/')}/", ""
        if self.url:
            mark = "\0"
            found = with_path(index, lambda path: f"{path.rpartition('/')[0]}/{mark}")
            self.before, _, self.after = found.partition(mark)
        self._sound = {
            self.before.rstrip("/"): True
        }  # whether folders within it are no links that lead out of it

    def __call__(self, name: str) -> str:
        """Return the path of the file with this name, which has no ``.`` or ``//`` on this machine."""
        return f"{self.before}{quote(name) if self.quoted else name}{self.after}"

    def require_below(self, name: str) -> str:
        """Return a name without ``.`` and ``//``; raise ValueError if it or a link leads out of the folder."""
        if PLAIN.fullmatch(name):
            short = name
        else:
            leads_out = name.startswith(("/", "~")) or ".." in name.split("/") or re.match(r"[\w+.-]+:", name)
            if leads_out or "\\" in name or "::" in name or not name.isprintable():
                raise ValueError(
                    f"the name {name!r} is refused: it must be relative and stay below the manifest's folder"
                )
            short = posixpath.normpath(name)
        if not self.url and not self._is_below(self(short)):
            raise ValueError(
                f"the name {name!r} is refused: it is a link that leads out of the manifest's folder"
            )
        return short

    def file(self, name: str, size: int = UNKNOWN_SIZE) -> File:
        """Return the file with this name, see `require_below`."""
        short = self.require_below(name)
        return File(self(name if self.url else short), short, size)

    def _is_below(self, path: str) -> bool:
        folder = path.rpartition("/")[0]
        if (sound := self._sound.get(folder)) is None:
            sound = self._sound[folder] = f"{os.path.realpath(folder)}/".startswith(self.before)
        # `Path(path).is_symlink()` takes five times as long.
        return sound and (not os.path.islink(path) or os.path.realpath(path).startswith(self.before))  # noqa: PTH114


class Files:
    """The files of a corpus. A `File` is made when it is asked for; a million in columns take 80 MB, as objects 400.

    Attributes:
        names, sizes, tags: of all files; an empty tag if there is none.
        special: by number, the files that have more than a name, a size and a tag in the folder ``place``.
    """

    def __init__(
        self,
        names: Texts | list[str],
        sizes: array[int],
        tags: Texts | list[str],
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
        sizes = array("q", (min(file.size, LARGEST) for file in found))
        return cls(names, sizes, tags, special=dict(enumerate(found)))

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[File]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, number: int) -> File:
        if (file := self.special.get(number)) is not None:
            return file
        if number >= len(self):  # of a row that was read before files were removed
            raise IndexError(number)
        return File(self.path(number), self.names[number], self.sizes[number], self.tags[number] or None)

    def path(self, number: int) -> str:
        """Return the path of a file."""
        if (file := self.special.get(number)) is not None:
            return file.path
        assert self.place is not None, "files without a place are special"
        return self.place(self.names[number])

    @property
    def packed(self) -> set[int]:
        """The numbers of the compressed files, which cannot be read from the middle."""
        return {number for number, name in enumerate(self.names) if name.endswith(PACKED)}

    @property
    def problems(self) -> dict[int, str]:
        """For the numbers of the files that cannot be read, why."""
        return {
            number: file.problem for number, file in sorted(self.special.items()) if file.problem is not None
        }

    def replaced(self, changed: Mapping[int, File]) -> Files:
        """Return the files with other ones at some numbers."""
        sizes = self.sizes[:]
        for number, file in changed.items():
            sizes[number] = min(file.size, LARGEST)
        return Files(self.names, sizes, self.tags, special={**self.special, **changed}, place=self.place)

    def in_order(self) -> Files:
        """Return the files sorted by their paths."""
        plain = None if self.special else self.place
        paths = map(self.path, range(len(self))) if plain is None else map(plain, self.names)
        if all(before <= after for before, after in pairwise(paths)):
            return self
        order = sorted(range(len(self)), key=self.path)
        return Files(
            Texts(self.names[number] for number in order),
            array("q", (self.sizes[number] for number in order)),
            Texts(self.tags[number] for number in order),
            special={new: self.special[old] for new, old in enumerate(order) if old in self.special},
            place=self.place,
        )
