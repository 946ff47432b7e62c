"""Groups: samples of several segments that share prefixes, such as a prompt and its answers, and never part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from streampack.accounting import trains_nothing
from streampack.packing.columns import ids_from_column
from streampack.packing.settings import Packing
from streampack.types import IGNORE_INDEX, FloatArray, IntArray, PackGroups, Sample

ROOT = -1
"""The parent of a segment that continues no other."""


class Group(Sample):
    """A sample of several segments; each may continue another, as in a tree. They are laid end to end.

    A pair of answers to one prompt is three segments: the second and the third continue the first. In a pack,
    the tokens of a segment attend to their own segment and to those that it continues, and their positions continue
    from there, so the model computes what it would for each answer after its own copy of the prompt.

    >>> pair = Group([5, 6, 7, 8, 9, 4], [-100, -100, 7, 8, 9, 4], lengths=[2, 2, 2], parents=[-1, 0, 0])
    >>> pair.paths()
    [[0], [0, 1], [0, 2]]
    >>> [answer.tokens.tolist() for answer in pair.answers()]
    [[5, 6, 7, 8], [5, 6, 9, 4]]

    Args:
        tokens: ``[tokens]``, the segments end to end; they are copied, and so are all other arrays.
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
        tokens = ids_from_column(tokens, "tokens of a group")
        labels = np.array(ids_from_column(labels, "labels of a group"))  # of a list, it is read-only
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
        self = super().__new__(cls, tokens, labels)
        self.lengths, self.parents = lengths, parents
        self.fields = _fields(fields, len(lengths), "segment")
        self.token_fields = _fields(token_fields, tokens.size, "token")
        if both := sorted(self.fields.keys() & self.token_fields.keys()):
            raise ValueError(
                f"a group has the field {both[0]!r} for segments and for tokens; give it two names"
            )
        for (start, _), parent in zip(self.bounds, parents, strict=True):
            if parent == ROOT:
                labels[start] = IGNORE_INDEX
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        numbers = {"fields": self.fields, "token_fields": self.token_fields}
        return partial(Group, lengths=self.lengths, parents=self.parents, **numbers), (*self,)

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """Tokens ``[start, stop)`` of each segment."""
        return list(pairwise(accumulate(self.lengths, initial=0)))

    @property
    def leaves(self) -> list[int]:
        """The segments that no other continues: one for each answer."""
        return sorted(set(range(len(self.lengths))) - set(self.parents))

    def paths(self) -> list[list[int]]:
        """Return for each segment the segments from the root to itself."""
        return paths_of(self.parents)

    def answers(self) -> list[Sample]:
        """Return each answer with all that it continues, as a plain sample: one for each of `leaves`."""
        paths = self.paths()
        indices = [
            np.concatenate([np.arange(*self.bounds[segment]) for segment in paths[leaf]])
            for leaf in self.leaves
        ]
        return [Sample(self.tokens[index], self.labels[index]) for index in indices]

    def cut(self, start: int, stop: int) -> Sample:
        """Return the group itself; it has no parts."""
        assert (start, stop) == (0, self.tokens.size), "a group is never split"
        return self

    def truncated(self, limit: int, *, side: str) -> Group | None:
        """Return the group with at most ``limit`` tokens; None if no token of a segment that is cut would be left.

        ``side="right"`` cuts off the ends of answers, the longest ones first; ``"left"`` the beginnings of prompts.
        """
        roots = [number for number, parent in enumerate(self.parents) if parent == ROOT]
        cut, lengths = self.leaves if side == "right" else roots, list(self.lengths)
        room = limit - sum(lengths) + sum(lengths[number] for number in cut)
        if room < len(cut):
            return None
        for number, kept in zip(cut, _capped([lengths[number] for number in cut], room), strict=True):
            lengths[number] = kept
        kept_bounds = [
            (start, start + length) if side == "right" else (stop - length, stop)
            for (start, stop), length in zip(self.bounds, lengths, strict=True)
        ]
        index = np.concatenate([np.arange(*bounds) for bounds in kept_bounds])
        return Group(
            self.tokens[index],
            self.labels[index],
            lengths=lengths,
            parents=self.parents,
            fields=self.fields,
            token_fields={name: values[index] for name, values in self.token_fields.items()},
        )


def require_whole_groups(packing: Packing, *, what: str, overlong: str | None = "split") -> None:
    """Raise for settings that would part groups, or for this ``overlong``; the message begins with ``what``."""
    for name, wrong in (
        ("split_across_pack", packing.split_across_pack),
        ("max_seqs_per_pack", packing.max_seqs_per_pack is not None),
        ("pad_seqs_to", packing.pad_seqs_to > 1),
        ("overlong", packing.overlong == overlong),
    ):
        if wrong:
            raise ValueError(
                f"{what} of segments, which are never split, counted or padded one by one; leave "
                f"{name}={getattr(packing, name)!r} out"
            )


def cut_group(group: Group, packing: Packing) -> list[tuple[int, Sample]]:
    """Return a group whole, or shortened so that it fits, and 0, where it starts; none if it is dropped."""
    length = group.tokens.size
    require_whole_groups(packing, what="is a group", overlong=None)
    if length <= packing.max_seq_len:
        return [(0, group)]
    if packing.overlong in ("truncate", "truncate_left"):
        side = "right" if packing.overlong == "truncate" else "left"
        short = group.truncated(packing.max_seq_len, side=side)
        return [] if short is None else [(0, short)]
    if packing.overlong == "drop":
        return []
    raise ValueError(
        f"is a group of {length} tokens, max_seq_len is {packing.max_seq_len}, and a group is never split; set "
        "overlong to 'truncate' or 'drop', or raise max_seq_len"
    )


def lacks_training(sample: Sample) -> bool:
    """Return whether no label of a sample is trained; of a group, none of at least one answer."""
    return any(map(trains_nothing, sample.answers() if isinstance(sample, Group) else [sample]))


def why_untrained(sample: Sample, kept: int, packing: Packing) -> str:
    """Return why the ``kept`` tokens of a sample train nothing, and the way out, for a message with its place before.

    >>> why_untrained(Sample(np.array([7]), np.array([7])), 1, Packing(8))
    'trains nothing: nothing predicts its only token; remove it'
    """
    length = sample.tokens.size
    left = f"its {length} tokens"
    way_out = "look at its labels (the first never counts, of messages only the assistant's are trained)"
    if kept < length:
        left = f"the {kept} tokens that overlong={packing.overlong!r} leaves of its {length}"
        way_out = "raise max_seq_len, choose another overlong"
    what = f"trains nothing: none of {left}"
    if isinstance(sample, Group):
        what = f"has an answer that trains nothing: of {left}, none of that answer's"
    elif length == 1:
        return "trains nothing: nothing predicts its only token; remove it"
    return f"{what} has a label to train; {way_out}"


def pack_groups(sequences: Sequence[Sample], labels: IntArray, *, max_seq_len: int) -> PackGroups:
    """Return what a pack of groups and plain samples says of them, and take what a parent predicts out of ``labels``.

    What remains in ``labels`` may be compared with the logits of the token before, as everywhere else.
    """
    groups = [
        each if isinstance(each, Group) else Group(*each, lengths=[each.tokens.size]) for each in sequences
    ]
    parents: list[int] = []
    for group in groups:
        before = len(parents)
        parents += [ROOT if parent == ROOT else before + parent for parent in group.parents]
    lengths = [length for group in groups for length in group.lengths]
    starts = list(accumulate(lengths[:-1], initial=0))
    first_labels = labels[starts].tolist()
    labels[starts] = IGNORE_INDEX
    sizes = [group.tokens.size for group in groups]
    return PackGroups(
        tuple(parents),
        tuple(first_labels),
        _end_to_end([group.fields for group in groups], [len(group.lengths) for group in groups]),
        _end_to_end([*(group.token_fields for group in groups), {}], [*sizes, max_seq_len - sum(sizes)]),
    )


def _end_to_end(numbers: Sequence[Mapping[str, FloatArray]], sizes: Sequence[int]) -> dict[str, FloatArray]:
    """Lay numbers by name end to end; where a part lacks a name, it is NaN for the part's size."""
    names = dict.fromkeys(name for each in numbers for name in each)
    parts = [(each, np.full(size, np.nan, np.float32)) for each, size in zip(numbers, sizes, strict=True)]
    return {name: np.concatenate([each.get(name, nothing) for each, nothing in parts]) for name in names}


def paths_of(parents: Sequence[int]) -> list[list[int]]:
    """Return for each segment those from the root to itself."""
    found: list[list[int]] = []
    for number, parent in enumerate(parents):
        found.append([*(found[parent] if parent != ROOT else ()), number])
    return found


def path_starts(seq_lens: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Return the position of each sequence's first token: after the sequence that it continues."""
    starts: list[int] = []
    for parent in parents:
        starts.append(0 if parent == ROOT else starts[parent] + seq_lens[parent])
    return starts


def attention_cost(seq_lens: Sequence[int], parents: Sequence[int] | None = None) -> int:
    """Count the pairs of tokens of causal attention in a pack, by which packs of equal length differ.

    >>> attention_cost([3, 1])
    7
    >>> attention_cost([3, 2], [-1, 0]) == attention_cost([5])
    True
    """
    if parents is None:
        return sum([length * (length + 1) for length in seq_lens]) // 2
    starts = path_starts(seq_lens, parents)
    ends = [(start, start + length) for start, length in zip(starts, seq_lens, strict=True)]
    return sum([end * (end + 1) - start * (start + 1) for start, end in ends]) // 2


def _capped(lengths: Sequence[int], room: int) -> list[int]:
    """Return lengths with a sum of at most ``room``: only the longest are cut, to lengths as equal as possible."""
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
