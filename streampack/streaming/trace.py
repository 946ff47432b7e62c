"""Find the row that a fragment of a pack was made from."""

from __future__ import annotations

from typing import Any

from streampack.lanes.lane_config import LaneConfig
from streampack.packing.samples import sample_from_row
from streampack.types import Fragment


def trace(config: LaneConfig, fragment: Fragment) -> dict[str, Any]:
    """See `IterablePackedDataset.trace`."""
    row_id = tuple(fragment.row_id)  # of a fragment that was JSON, it is a list
    [row], encode = config.source.fetch_many([row_id]), config.encoder(row_id)
    # The fragment is in the last piece that begins at or before it.
    start, piece = [p for p in config.cut(sample_from_row(encode(row))) if p[0] <= fragment.start][-1]
    tokens = piece.tokens[fragment.start - start : fragment.stop - start].tolist()
    found = {"place": config.source.locate(row_id), "row": row, "tokens": tokens}
    if config.mix is not None:
        found["source"] = config.mix.names[config.mix.source_index(row_id)]
    if hasattr(encode, "decode"):
        found["text"] = encode.decode(tokens)
    return found
