"""Groups: samples of several segments that share prefixes, such as a prompt and its answers, and never part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from streampack.packing.columns import ids_from_column
from streampack.types import IGNORE_INDEX, INT32, INT64, FloatArray, IntArray, PackGroups, Sample

ROOT = -1
"""The parent of a segment that continues no other."""


class Group(Sample):
    """A sample whose tokens are several segments, each of which may continue another: a tree, laid end to end.

    A pair of answers to one prompt is three segments, of which the second and the third continue the first. In a pack,
    the tokens of a segment attend to their own segment and to those that it continues, and their positions go on from
    there, so the model computes what it would for each answer behind its own copy of the prompt.

    >>> pair = Group([5, 6, 7, 8, 9, 4], [-100, -100, 7, 8, 9, 4], lengths=[2, 2, 2], parents=[-1, 0, 0])
    >>> pair.paths()
    [[0], [0, 1], [0, 2]]
    >>> pair.unshared().tokens.tolist()
    [5, 6, 7, 8, 5, 6, 9, 4]

    Args:
        tokens: ``[tokens]``, the segments end to end.
        labels: ``[tokens]``, unshifted. The label of a segment's first token is what the last token of the segment
            before it on its path predicts. That of a segment without a parent is not trained.
        lengths: of the segments, in tokens, each at least 1. Their sum is the number of tokens.
        parents: for each segment the number of the one that it continues, which comes before it, or -1. None: no
            segment continues another.
        fields: numbers by name, one for each segment, such as an advantage; in a batch they are tensors.
        token_fields: numbers by name, one for each token, such as log-probabilities of an older policy.

    Raises:
        ValueError: for lengths, parents or fields that do not fit.
    """

    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    fields: dict[str, FloatArray]
    token_fields: dict[str, FloatArray]

    def __new__(
        cls,
        tokens: Any,
        labels: Any,
        *,
        lengths: Sequence[int],
        parents: Sequence[int] | None = None,
        fields: Mapping[str, Any] | None = None,
        token_fields: Mapping[str, Any] | None = None,
    ) -> Group:
        """Check the arguments, which the class describes."""
        tokens, labels = (
            values if type(values) is np.ndarray and values.ndim == 1 and values.dtype in (INT32, INT64)
            else ids_from_column(values, f"{name} of a group")
            for name, values in (("tokens", tokens), ("labels", labels))
        )  # fmt: skip
        lengths = tuple(map(int, lengths))
        parents = (ROOT,) * len(lengths) if parents is None else tuple(map(int, parents))
        if sum(lengths) != tokens.size or labels.size != tokens.size or min(lengths, default=0) < 1:
            raise ValueError(
                f"a group has {tokens.size} tokens, {labels.size} labels and segments of {list(lengths)} tokens; "
                "segments must have 1 or more, and all of them together the tokens"
            )
        if len(parents) != len(lengths) or any(
            not ROOT <= parent < number for number, parent in enumerate(parents)
        ):
            raise ValueError(
                f"a group has {len(lengths)} segments and the parents {list(parents)}; give each segment the number of "
                "one before it, or -1"
            )
        roots = [start for start, parent in zip(_starts(lengths), parents, strict=True) if parent == ROOT]
        if (labels[roots] != IGNORE_INDEX).any():
            labels = labels.copy()
            labels[roots] = IGNORE_INDEX
        self = super().__new__(cls, tokens, labels)
        self.lengths, self.parents = lengths, parents
        self.fields = _fields(fields, len(lengths), "segment")
        self.token_fields = _fields(token_fields, tokens.size, "token")
        if both := sorted(self.fields.keys() & self.token_fields.keys()):
            raise ValueError(
                f"a group has the field {both[0]!r} for segments and for tokens; give it two names"
            )
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _remake, (*self, self.lengths, self.parents, self.fields, self.token_fields)

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """The tokens ``[start, stop)`` of each segment."""
        return list(pairwise(accumulate(self.lengths, initial=0)))

    @property
    def leaves(self) -> list[int]:
        """The segments that no other continues: one for each answer."""
        return sorted(set(range(len(self.lengths))) - set(self.parents))

    def paths(self) -> list[list[int]]:
        """Return for each segment the segments from the root to itself."""
        return paths_of(self.parents)

    def answers(self) -> list[Sample]:
        """Return each answer with all that it continues, as a plain sample: one for each of `leaves`.

        >>> pair = Group([5, 6, 7, 8, 9], [-100, -100, 7, 8, 9], lengths=[2, 2, 1], parents=[-1, 0, 0])
        >>> [sample.tokens.tolist() for sample in pair.answers()]
        [[5, 6, 7, 8], [5, 6, 9]]
        """
        paths, bounds = self.paths(), self.bounds
        return [
            Sample(*(np.concatenate([ids[slice(*bounds[i])] for i in paths[leaf]]) for ids in self))
            for leaf in self.leaves
        ]

    def cut(self, start: int, stop: int) -> Sample:
        """Return the group itself; it has no parts."""
        assert (start, stop) == (0, self.tokens.size), "a group is never split"
        return self

    def copied(self) -> Group:
        """Return a copy with ids in memory of its own."""
        return _remake(
            self.tokens.copy(), self.labels.copy(), self.lengths, self.parents, self.fields, self.token_fields
        )

    def unshared(self) -> Group:
        """Return a group with a sequence for each answer, from the root on, so that nothing is shared.

        Trained tokens of a shared segment are trained in its first copy only. A field of segments is that of the
        answer's.
        """
        paths, taken = self.paths(), set[int]()
        index: list[int] = []
        trained: list[bool] = []
        for leaf in self.leaves:
            for segment in paths[leaf]:
                start, stop = self.bounds[segment]
                index += range(start, stop)
                trained += [segment not in taken] * (stop - start)
                taken.add(segment)
        chosen = np.array(index, INT64)
        return Group(
            self.tokens[chosen],
            np.where(trained, self.labels[chosen], IGNORE_INDEX),
            lengths=[sum(self.lengths[segment] for segment in paths[leaf]) for leaf in self.leaves],
            fields={name: values[self.leaves] for name, values in self.fields.items()},
            token_fields={name: values[chosen] for name, values in self.token_fields.items()},
        )

    def truncated(self, limit: int, *, side: str) -> Group | None:
        """Return the group with at most ``limit`` tokens; None if no token of a segment that is cut would be left.

        Args:
            limit: tokens to keep.
            side: ``"right"`` cuts off the ends of answers, the longest ones first; ``"left"`` the beginnings of
                prompts.
        """
        cut = (
            self.leaves if side == "right" else [i for i, parent in enumerate(self.parents) if parent == ROOT]
        )
        room = limit - sum(length for number, length in enumerate(self.lengths) if number not in cut)
        if room < len(cut):
            return None
        kept = dict(zip(cut, _capped([self.lengths[number] for number in cut], room), strict=True))
        index = np.concatenate(
            [
                np.arange(start, start + kept.get(number, stop - start))
                if side == "right"
                else np.arange(stop - kept.get(number, stop - start), stop)
                for number, (start, stop) in enumerate(self.bounds)
            ]
        )
        return Group(
            self.tokens[index],
            self.labels[index],
            lengths=[kept.get(number, length) for number, length in enumerate(self.lengths)],
            parents=self.parents,
            fields=self.fields,
            token_fields={name: values[index] for name, values in self.token_fields.items()},
        )


def pack_groups(sequences: Sequence[Sample], labels: IntArray, *, max_seq_len: int) -> PackGroups:
    """Return what a pack says of its groups, and take the labels that a parent predicts out of ``labels``.

    What remains in ``labels`` may be compared with the logits of the token before, as everywhere else.

    Args:
        sequences: groups and plain samples, in the pack's order.
        labels: of the pack.
        max_seq_len: the pack's tokens.
    """
    parents: list[int] = []
    first_labels: list[int] = []
    names: dict[str, None] = {}
    token_names: dict[str, None] = {}
    for sample in sequences:
        if isinstance(sample, Group):
            names |= dict.fromkeys(sample.fields)
            token_names |= dict.fromkeys(sample.token_fields)
    fields: dict[str, list[FloatArray]] = {name: [] for name in names}
    token_fields = {name: np.full(max_seq_len, np.nan, np.float32) for name in token_names}
    position = 0
    for sample in sequences:
        before, lengths = len(parents), _lengths(sample)
        if isinstance(sample, Group):
            parents += [parent + before if parent != ROOT else ROOT for parent in sample.parents]
        else:
            parents.append(ROOT)
        for start in _starts(lengths):
            first_labels.append(int(labels[position + start]))
            labels[position + start] = IGNORE_INDEX
        of_segments = sample.fields if isinstance(sample, Group) else {}
        of_tokens = sample.token_fields if isinstance(sample, Group) else {}
        for name, values in fields.items():
            values.append(of_segments.get(name, np.full(len(lengths), np.nan, np.float32)))
        for name, numbers in of_tokens.items():
            token_fields[name][position : position + numbers.size] = numbers
        position += sample.tokens.size
    return PackGroups(
        tuple(parents),
        tuple(first_labels),
        {name: np.concatenate(values) for name, values in fields.items()},
        token_fields,
    )


def _lengths(sample: Sample) -> tuple[int, ...]:
    return sample.lengths if isinstance(sample, Group) else (sample.tokens.size,)


def _starts(lengths: Sequence[int]) -> list[int]:
    return list(accumulate(lengths, initial=0))[:-1]


def paths_of(parents: Sequence[int]) -> list[list[int]]:
    """Return for each segment those from the root to itself.

    >>> paths_of([-1, 0, 0, 2])
    [[0], [0, 1], [0, 2], [0, 2, 3]]
    """
    found: list[list[int]] = []
    for number, parent in enumerate(parents):
        found.append([*(found[parent] if parent != ROOT else ()), number])
    return found


def path_starts(seq_lens: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Return the position of each sequence's first token: behind the sequence that it continues.

    >>> path_starts([4, 2, 3, 1], [-1, 0, 0, 2])
    [0, 4, 4, 7]
    """
    starts: list[int] = []
    for parent in parents:
        starts.append(0 if parent == ROOT else starts[parent] + seq_lens[parent])
    return starts


def _capped(lengths: Sequence[int], room: int) -> list[int]:
    """Return lengths of at most ``room`` together, of which only the longest were cut, to as equal ones as can be.

    >>> _capped([2, 9, 7], 12)
    [2, 5, 5]
    """
    left, kept = room, list(lengths)
    order = sorted(range(len(lengths)), key=lambda number: lengths[number])
    for done, number in enumerate(order):
        kept[number] = min(lengths[number], left // (len(order) - done))
        left -= kept[number]
    return kept


def _fields(fields: Mapping[str, Any] | None, count: int, each: str) -> dict[str, FloatArray]:
    found = {}
    for name, values in (fields or {}).items():
        try:
            array = np.array(values, np.float32)
        except (TypeError, ValueError):
            raise ValueError(f"the field {name!r} of a group holds {values!r}; give numbers") from None
        if array.shape != (count,):
            raise ValueError(
                f"the field {name!r} of a group has shape {list(array.shape)}; give one number for each of its {count} "
                f"{each}s"
            )
        found[str(name)] = array
    return found


def _remake(
    tokens: IntArray,
    labels: IntArray,
    lengths: Iterable[int],
    parents: Iterable[int],
    fields: Mapping[str, Any],
    token_fields: Mapping[str, Any],
) -> Group:
    return Group(
        tokens,
        labels,
        lengths=tuple(lengths),
        parents=tuple(parents),
        fields=fields,
        token_fields=token_fields,
    )
