"""How many packs an epoch makes, from a sample of the rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from streampack.assemble import check_sample, trained_tokens
from streampack.lane_config import LaneConfig
from streampack.rows import encode_row
from streampack.sources.base import Source
from streampack.types import Sample


def estimate_packs(config: LaneConfig, *, rows: int) -> int:
    """About how many packs one epoch makes, from ``rows`` rows of each source.

    Padding is left out, and so are rows that the run will pass by.

    Raises:
        ValueError: if a source cannot tell its size, or an epoch has no end. What the encoder raises for a row is
            raised, unless ``on_bad_record="skip"``.
    """

    def tokens_of(
        source: Source, encoder: Callable[[Mapping[str, Any]], Sample] | None
    ) -> tuple[float, float]:
        """Tokens of a source read once, and how many of them are trained."""
        encode = config.encode if encoder is None else encoder
        sampled, scale = source.probe(rows)
        tokens = trained = 0
        for row in sampled:
            try:
                sample = encode_row(encode, row)
                check_sample(sample, config.vocab_size)
            except Exception:
                if config.quarantine is None:
                    raise
                continue
            length = sample.tokens.size
            if not length or (length > config.packing.max_seq_len and config.packing.overlong == "error"):
                continue
            for start, stop in config.packing.pieces_of(length):
                tokens += stop - start
                trained += trained_tokens(sample.cut(start, stop))
        return tokens * scale, trained * scale

    if config.mix is not None:
        tokens, _ = config.mix.epoch_tokens(tokens_of)
    else:
        tokens, _ = tokens_of(config.source, None)
    return max(1, round(tokens / config.packing.max_seq_len))
