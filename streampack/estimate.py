"""How many packs an epoch makes, from a sample of the rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from streampack.assemble import trained_tokens
from streampack.lane_config import LaneConfig
from streampack.sources.base import Source
from streampack.types import Sample


def estimate_packs(config: LaneConfig, *, rows: int) -> int:
    """About how many packs one epoch makes, from ``rows`` rows of each source. Padding is left out.

    Raises:
        ValueError: if a source cannot tell its size, or an epoch has no end.
    """

    def tokens_of(
        source: Source, encoder: Callable[[Mapping[str, Any]], Sample] | None
    ) -> tuple[float, float]:
        """Tokens of a source read once, and how many of them are trained."""
        encode = config.encode if encoder is None else encoder
        sampled, scale = source.probe(rows)
        tokens = trained = 0
        for row in sampled:
            sample = encode(row)
            length = sample.tokens.size
            if not length or (length > config.packing.max_seq_len and config.packing.overlong == "error"):
                continue
            for start, stop in config.packing.pieces_of(length):
                tokens += stop - start
                trained += trained_tokens(sample.labels[start:stop])
        return tokens * scale, trained * scale

    if config.mix is not None:
        tokens, _ = config.mix.epoch_tokens(tokens_of)
    else:
        tokens, _ = tokens_of(config.source, None)
    return max(1, round(tokens / config.packing.max_seq_len))
