"""Groups for tests, and what they are by plain lists: segments with tokens, labels and numbers of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from streampack import IGNORE_INDEX, Group, Sample

NAN = float("nan")


@dataclass(frozen=True)
class Segment:
    parent: int
    tokens: list[int]
    labels: list[int]
    number: float = NAN  # its value of the field "number"
    logps: list[float] = field(default_factory=list)  # its values of the field "logps", one a token


def make_group(segments: list[Segment], *, fields: bool = True) -> Group:
    return Group(
        np.array([token for each in segments for token in each.tokens]),
        np.array([label for each in segments for label in each.labels]),
        lengths=[len(each.tokens) for each in segments],
        parents=[each.parent for each in segments],
        fields={"number": [each.number for each in segments]} if fields else None,
        token_fields={"logps": [logp for each in segments for logp in each.logps]} if fields else None,
    )


def segments_of(group: Group) -> list[Segment]:
    """A group taken apart, token by token."""
    found, at = [], 0
    for parent, length in zip(group.parents, group.lengths, strict=True):
        found.append(
            Segment(
                parent,
                group.tokens[at : at + length].tolist(),
                group.labels[at : at + length].tolist(),
                group.fields["number"].tolist()[len(found)],
                group.token_fields["logps"][at : at + length].tolist(),
            )
        )
        at += length
    assert at == group.tokens.size == group.labels.size
    return found


def untrained_roots(segments: list[Segment]) -> list[Segment]:
    """With the first labels of roots not trained, as in every group."""
    return [
        replace(each, labels=[IGNORE_INDEX, *each.labels[1:]]) if each.parent == -1 else each
        for each in segments
    ]


def path(segments: list[Segment], number: int) -> list[int]:
    """The segments from the root to one of them."""
    found = [number]
    while segments[found[0]].parent != -1:
        found.insert(0, segments[found[0]].parent)
    return found


def leaves(segments: list[Segment]) -> list[int]:
    return [i for i in range(len(segments)) if all(each.parent != i for each in segments)]


@st.composite
def drawn_segments(draw: st.DrawFn, *, most: int = 5, longest: int = 4) -> list[Segment]:
    """A tree, or several, whose tokens and numbers all differ."""
    segments: list[Segment] = []
    for number in range(draw(st.integers(1, most))):
        length = draw(st.integers(1, longest))
        tokens = [100 * (number + 1) + at for at in range(length)]
        trained = draw(st.lists(st.booleans(), min_size=length, max_size=length))
        segments.append(
            Segment(
                draw(st.integers(-1, number - 1)),
                tokens,
                [token if flag else IGNORE_INDEX for token, flag in zip(tokens, trained, strict=True)],
                number + 0.5,
                [-float(token) for token in tokens],
            )
        )
    return segments


class Pairs:
    """Encodes ``{"i": 3, "n": 4}`` as a group of the tokens 3001, 3002, ...: 2 of the prompt, 4 and 2 of two answers.

    Rows whose number 4 divides are plain samples of as many tokens. Field and token field say which token it is.
    """

    name = "pairs"

    def __init__(self, *, shared: bool = True) -> None:
        self.shared = shared

    def __call__(self, row: Mapping[str, Any], /) -> Sample:
        i, n = row["i"], row["n"]
        lengths = [2, n, n // 2 + 1]
        tokens = 1000 * i + 1 + np.arange(sum(lengths))
        labels = tokens.copy()
        labels[:2] = IGNORE_INDEX
        if i % 4 == 0:
            return Sample(tokens, labels)
        group = Group(
            tokens, labels, lengths=lengths, parents=[-1, 0, 0],
            fields={"number": [np.nan, 10 * i + 1, 10 * i + 2]},
            token_fields={"logps": np.where(labels == IGNORE_INDEX, np.nan, -tokens)},
        )  # fmt: skip
        return group if self.shared else group.unshared()

    def fingerprint(self) -> str:
        return f"{self.name} {self.shared}"
