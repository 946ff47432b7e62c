"""Bytes: files on this machine and behind URLs are listed, read by range, retried and decompressed."""

from streampack.storage.base import File
from streampack.storage.corpus import Corpus
from streampack.storage.listing import find_files
from streampack.storage.retries import Storage

__all__ = ["Corpus", "File", "Storage", "find_files"]
