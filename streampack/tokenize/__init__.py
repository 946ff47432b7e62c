"""Any source becomes token shards, once, in several processes, resumable."""

from streampack.tokenize.tokenize import tokenize

__all__ = ["tokenize"]
