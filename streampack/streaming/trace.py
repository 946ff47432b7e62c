"""From a sequence in a pack back to its row."""

from __future__ import annotations

from typing import Any

from streampack.packing.samples import sample_from_row
from streampack.streaming.lane_config import LaneConfig
from streampack.types import Fragment


def trace(config: LaneConfig, fragment: Fragment) -> dict[str, Any]:
    """Return the row of a fragment, its place, the fragment's tokens, and what they say if the encoder can decode."""
    [row], encode = config.source.fetch_many([fragment.row_id]), config.encoder(fragment.row_id)
    # The fragment lies in the last piece that begins at or before it.
    start, piece = [p for p in config.cut(sample_from_row(encode(row))) if p[0] <= fragment.start][-1]
    tokens = piece.tokens[fragment.start - start : fragment.stop - start]
    found = {"place": config.source.locate(fragment.row_id), "row": row, "tokens": tokens.tolist()}
    if (mix := config.mix) is not None:
        found["source"] = mix.names[mix.source_index(fragment.row_id)]
    if hasattr(encode, "decode"):
        found["text"] = encode.decode(found["tokens"])
    return found
