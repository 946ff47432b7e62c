"""Bytes: files on this machine and behind URLs are listed, read by range, retried and decompressed."""

from streampack.storage.base import File, Storage
from streampack.storage.listing import Corpus, find_files

__all__ = ["Corpus", "File", "Storage", "find_files"]
