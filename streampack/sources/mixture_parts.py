"""Functions over the sources of a mixture: hold rows out of each, and estimate the tokens of an epoch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from streampack.sources.holdout import PARTS, Holdout
from streampack.sources.mixture import Mix, mix_of
from streampack.sources.mixture_entry import Encode
from streampack.sources.source import Source


def hold_out(source: Source, *, fraction: float) -> tuple[Source, Source]:
    """Split off a fraction of a source's rows with `Holdout`; of a mixture, the same fraction of each source.

    The held-out part of a mixture has the same weights and ends when the first source does: no row counts twice.
    """
    if not isinstance(source, Mix):
        train, held_out = (Holdout(source, fraction=fraction, part=part) for part in PARTS)
        return train, held_out
    halves = [hold_out(entry.source, fraction=fraction) for entry in source.entries]
    parts = [
        [replace(entry, source=half[part]) for entry, half in zip(source.entries, halves, strict=True)]
        for part in (0, 1)
    ]
    return Mix(parts[0], stop=source.stop), Mix(parts[1], stop="first_exhausted")


def epoch_tokens(
    mix: Mix, tokens_of: Callable[[Source, Encode | None], tuple[float, float]], default: Encode | None = None
) -> tuple[float, float]:
    """Return the tokens of one epoch of a mixture, and how many are trained.

    Args:
        mix: the mixture.
        tokens_of: returns the same two numbers of one source that is read once.
        default: the encoder of sources without one.

    Raises:
        ValueError: if the mixture never ends, or a source trains nothing.
    """
    if mix.stop == "never":
        raise ValueError("a mixture with stop='never' has no end; set max_steps")
    parts = []
    for entry, weight in zip(mix.entries, mix.weights, strict=False):
        encoder = default if entry.encoder is None else entry.encoder
        if (inner := mix_of(entry)) is None:
            tokens, trained = tokens_of(entry.source, encoder)
        else:
            tokens, trained = epoch_tokens(inner, tokens_of, encoder)
        if not trained:
            raise ValueError(f"no token of source {entry.name!r} is trained, as far as a sample tells")
        parts.append((weight, tokens, trained))
    total = sum(weight for weight, _, _ in parts)
    ends = min if mix.stop == "first_exhausted" else max
    size = ends(trained * total / weight for weight, _, trained in parts)
    return sum(size * weight / total * tokens / trained for weight, tokens, trained in parts), size
