"""Mutants of writing token shards."""

from __future__ import annotations

from typing import Any

from streampack.sources.as_source import as_source
from streampack.sources.formats.token_shards import ShardWriter
from streampack.tokenize.tokenize import tokenize
from tests.mutants.registry import replaces


@replaces(ShardWriter, "append")
def mask_decided_by_the_first_document(good, self, tokens, trained):
    """A shard has a mask only if its first document does: otherwise the prompts of all others are trained."""
    before, first = self.masked, self.tokens == 0
    good(self, tokens, trained)
    self.masked = self.masked if first else before


@replaces(tokenize)
def row_lost_where_a_lane_goes_on(good, source, *, out, **settings):
    """A call that goes on behind the shards of an earlier one leaves out the first row of each lane."""
    source = as_source(source)
    read = source.read

    def read_on(reading: Any) -> Any:
        reader = read(reading)
        if reading.start is not None:
            next(reader, None)
        return reader

    source.read = read_on
    try:
        return good(source, out=out, **settings)
    finally:
        vars(source).pop("read", None)  # calls may share a source
