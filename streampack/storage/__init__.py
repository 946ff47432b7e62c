"""Bytes: files of this machine and behind URLs, listed, read by range, retried and decompressed."""

from streampack.storage.base import File, Storage
from streampack.storage.listing import Corpus, find_files

__all__ = ["Corpus", "File", "Storage", "find_files"]
