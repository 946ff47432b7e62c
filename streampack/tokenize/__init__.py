"""Write any source as token shards."""

from streampack.tokenize.tokenize import tokenize

__all__ = ["tokenize"]
