"""`FileMarks`: the files of a corpus, each with the tag of its content, and a digest of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from streampack.fingerprint import digest
from streampack.storage.base import File


@dataclass(frozen=True)
class FileMarks:
    """The files of a corpus, each with the tag of its content."""

    files: Sequence[File]
    tags: Sequence[str]

    @cached_property
    def content(self) -> str:
        """Digest of names, sizes and tags, in the files' order."""
        named = ((file.name, file.size, tag) for file, tag in zip(self.files, self.tags, strict=True))
        return digest(*named)

    @cached_property
    def described(self) -> str:
        """The number of files, their bytes, and the digest, as the identity of a run holds them."""
        size = sum(file.size for file in self.files)
        return f"{len(self.files):,} file(s) of {size:,} bytes, digest {self.content}"
