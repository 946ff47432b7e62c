"""`FileMarks`: digests of a corpus's files, at most 2 KiB in all, from which a changed file can be named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any
from zlib import crc32

from streampack.fingerprint import digest
from streampack.storage.base import File

MAX_GROUPS = 128  # a power of two, like all numbers of groups
PRIME = (1 << 61) - 1  # sums are taken modulo this
SUM_BYTES = 8


@dataclass(frozen=True)
class FileMarks:
    """The files of a corpus, each with the tag of its content, compared with those of a state.

    Files are divided into groups by a hash of their names. A state keeps two sums for each group, modulo a prime::

        plain = sum of h(file)      weighted = sum of w(file) * h(file)

    h is a hash of a file's name, size and tag, and w a hash of its name. If a single file of a group changed, its h
    changed by some d, so the sums changed by d and w * d: the quotient w tells which file it is. If several files of a
    group changed, only the group is known. The sums of a hundred thousand files take no more bytes than those of a
    hundred.
    """

    files: Sequence[File]
    tags: Sequence[str]

    @cached_property
    def content(self) -> str:
        """Digest of names, sizes and tags, in the files' order."""
        named = ((file.name, file.size, tag) for file, tag in zip(self.files, self.tags, strict=True))
        return digest(*named)

    def state(self) -> dict[str, Any]:
        """See `Compared`."""
        return dict(self._state)

    def listed(self) -> str:
        """See `Compared`: before a run, files are compared by `require_same_run`."""
        return "listed"

    @cached_property
    def _state(self) -> dict[str, Any]:
        groups = min(MAX_GROUPS, 4 << (len(self.files) - 1).bit_length())
        sums = [number.to_bytes(SUM_BYTES, "little") for pair in self._sums(groups) for number in pair]
        return {
            "files": len(self.files),
            "bytes": sum(file.size for file in self.files),
            "content": self.content,
            "sums": b"".join(sums),
        }

    def difference(self, theirs: Any) -> str | None:
        """See `Compared`."""
        ours = self.state()
        known = isinstance(theirs, Mapping) and all(type(theirs.get(key)) is type(ours[key]) for key in ours)
        if not known:
            return "nothing is known of the files it was made with"
        if theirs["content"] == ours["content"]:
            return None
        what, new_names = self._changed(theirs["sums"])
        words = [what]
        if (theirs["files"], theirs["bytes"]) != (ours["files"], ours["bytes"]):
            words.append(
                f"it had {theirs['files']:,} file(s) of {theirs['bytes']:,} bytes, and now there are "
                f"{ours['files']:,} of {ours['bytes']:,}"
            )
        elif new_names:
            words.append(
                "there are as many files of as many bytes, so they may be the same by other names: a name is relative "
                "to the folder that is given, or to the part of a pattern before its first wildcard"
            )
        return "; ".join(word for word in words if word)

    def _changed(self, sums: bytes) -> tuple[str, bool]:
        """Describe what changed, and return whether files may have other names."""
        groups, rest = divmod(len(sums), 2 * SUM_BYTES)
        if rest or not groups or groups & (groups - 1) or groups > MAX_GROUPS:
            return "", True
        numbers = [int.from_bytes(sums[i : i + SUM_BYTES], "little") for i in range(0, len(sums), SUM_BYTES)]
        differing: dict[int, tuple[int, int]] = {}
        for group, (plain, weighted) in enumerate(self._sums(groups)):
            change = (plain - numbers[2 * group]) % PRIME, (weighted - numbers[2 * group + 1]) % PRIME
            if change != (0, 0):
                differing[group] = change
        if not differing:
            return "its files are the same, in another order", False
        found = []
        for file, tag in zip(self.files, self.tags, strict=True):
            weight = _weight(file)
            change = differing.get(weight % groups, (0, 0))
            if change[0] and weight * change[0] % PRIME == change[1]:
                found.append((file, "is new" if change[0] == _hash(file, tag) else "is another file"))
        if not found:
            return f"files in {len(differing)} of {groups} groups of them differ", True
        file, what = found[0]
        others = (
            f", and so are others in {len(differing) - 1} of {groups} groups" if len(differing) > 1 else ""
        )
        return f"{file.shown} {what}{others}", what == "is new"

    def _sums(self, groups: int) -> list[tuple[int, int]]:
        plain, weighted = [0] * groups, [0] * groups
        for file, tag in zip(self.files, self.tags, strict=True):
            weight, number = _weight(file), _hash(file, tag)
            plain[weight % groups] += number
            weighted[weight % groups] += weight * number
        return [(a % PRIME, b % PRIME) for a, b in zip(plain, weighted, strict=True)]


def _weight(file: File) -> int:
    return crc32(file.name.encode("utf-8", "surrogateescape")) + 1


def _hash(file: File, tag: str) -> int:
    data = f"{file.name}\n{file.size}\n{tag}".encode("utf-8", "surrogateescape")
    return int.from_bytes(blake2b(data, digest_size=SUM_BYTES).digest(), "little") % PRIME
