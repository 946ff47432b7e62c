"""Requests: which tokens a model reads, and which ids it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from streampack.packing.groups import Group
from streampack.packing.media import MediaSample
from streampack.packing.samples import check_ids, sample_from_pair, sample_from_row
from streampack.types import IGNORE_INDEX, IntArray, Sample

OVERLONG = ("error", "truncate", "windows")
"""What is done with a request that a pack cannot hold."""


@dataclass(slots=True)
class Request:
    """Tokens that a model reads, and ids whose probabilities are asked for.

    The last token of a sequence is not read, because nothing is asked after it. So the continuations of a question
    that are one token long need no more than the question.
    """

    tokens: IntArray  # [read]
    predictors: IntArray  # [scored], ascending: indices of the tokens after which an id is asked for
    targets: IntArray  # [scored]: the ids


def read_request(given: Any, *, vocab_size: int | None = None) -> Request:
    """Make a request of what a user gives.

    That is what `streampack.packing.samples.sample_from_row` takes, a mapping with ``context`` and
    ``continuation``, or a pair ``(context, continuation)`` of ids.

    >>> request = read_request(([5, 6], [7, 8]))
    >>> request.tokens.tolist(), request.predictors.tolist(), request.targets.tolist()
    ([5, 6, 7], [1, 2], [7, 8])

    Raises:
        ValueError: for anything else, for ids outside the vocabulary, and for a continuation without a context.
    """
    if isinstance(given, Group):
        raise ValueError(
            "is a group of several sequences, and a request is one; give the samples of group.answers() one by one"
        )
    if isinstance(given, MediaSample):
        raise ValueError("has images, and only text is scored; leave it out")
    if isinstance(given, Mapping) and "continuation" in given:
        given = (given.get("context", ()), given["continuation"])
    if isinstance(given, tuple | list) and not isinstance(given, Sample) and _is_pair(given):
        sample = _from_pair(*given)
    else:
        sample = sample_from_row(given)
    check_ids([sample], vocab_size)
    predictors = np.flatnonzero(sample.labels[1:] != IGNORE_INDEX)
    end = int(predictors[-1]) + 1 if predictors.size else 0
    return Request(sample.tokens[:end], predictors, sample.labels[1:][predictors])


def fit(request: Request, limit: int, *, overlong: str) -> list[Request]:
    """Return the requests of at most ``limit`` tokens that together answer one; none if nothing is asked for.

    Args:
        request: of any length.
        limit: of tokens.
        overlong: ``"error"``; ``"truncate"`` drops tokens at the beginning, and what was to be scored there;
            ``"windows"`` scores all, in windows of ``limit`` tokens that follow each other. The last window, where
            fewer tokens are left to score, begins earlier, so that all of them have as much context as there can be.

    Raises:
        ValueError: for a longer request with ``"error"``.
    """
    length = request.tokens.size
    if not request.predictors.size:
        return []
    if length <= limit:
        return [request]
    if overlong == "error":
        raise ValueError(
            f"has {length} tokens before its last one, and max_seq_len={limit}; raise max_seq_len, or set "
            "overlong='truncate' (its beginning is dropped) or 'windows' (it is scored in parts)"
        )
    stops = [length] if overlong == "truncate" else [*range(limit, length, limit), length]
    parts, begin = [], length - limit if overlong == "truncate" else 0
    for stop in stops:
        start = max(0, stop - limit)
        chosen = (request.predictors >= begin) & (request.predictors < stop)
        if chosen.any():
            part = request.tokens[start:stop]
            parts.append(Request(part, request.predictors[chosen] - start, request.targets[chosen]))
        begin = stop
    return parts


def _is_pair(given: tuple[Any, ...] | list[Any]) -> bool:
    """Return whether a sequence is a context and a continuation; otherwise it is a sequence of ids."""
    return len(given) == 2 and all(np.ndim(part) == 1 for part in given)


def _from_pair(context: Any, continuation: Any) -> Sample:
    before, after = (
        sample_from_pair(ids, ids, tokens=name, labels=name).tokens
        for ids, name in ((context, "the context"), (continuation, "the continuation"))
    )
    if not before.size and after.size:
        raise ValueError(
            "has an empty context, and nothing predicts the first token of its continuation; begin the context with "
            "a token that begins texts, such as the tokenizer's BOS or EOS"
        )
    tokens = np.concatenate([before, after])
    return Sample(tokens, np.where(np.arange(tokens.size) < before.size, IGNORE_INDEX, tokens))
