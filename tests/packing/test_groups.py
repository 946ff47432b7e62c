"""Groups, and what packs and batches say of them, compared with plain lists of segments."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streampack import IGNORE_INDEX, Fragment, Group, Pack, Sample, collate_packed
from streampack.packing.assemble import assemble
from streampack.packing.attention_cost import AttentionCost
from streampack.packing.batch import null_pack, stack_packs, to_torchtune
from streampack.packing.groups import pack_groups, path_starts
from streampack.packing.samples import check_sample, sample_from_encoded
from tests.support.segments import (
    Segment,
    drawn_segments,
    leaves,
    make_group,
    path,
    segments_of,
    untrained_roots,
)

LIMIT = 64
PAIR = Group([5, 6, 7, 8, 9], [5, 6, 7, 8, 9], lengths=[2, 2, 1], parents=[-1, 0, 0])


def same(found: list[Segment], expected: list[Segment]) -> bool:
    return repr(found) == repr(expected)  # NaN is not equal to itself


@given(drawn_segments())
def test_a_group_is_its_segments(segments: list[Segment]) -> None:
    group = make_group(segments)
    assert same(segments_of(group), untrained_roots(segments))
    assert group.paths() == [path(segments, i) for i in range(len(segments))]
    assert group.leaves == leaves(segments)
    assert [stop - start for start, stop in group.bounds] == list(group.lengths)
    assert group.bounds[0][0] == 0
    for again in (
        pickle.loads(pickle.dumps(group)),
        copy.deepcopy(group),
        group.copied(),
        sample_from_encoded(group),
    ):
        assert type(again) is Group
        assert same(segments_of(again), segments_of(group))
        assert again.parents == group.parents
        assert not np.shares_memory(again.tokens, group.tokens)
    assert group.cut(0, group.tokens.size) is group
    with pytest.raises(AssertionError, match="never split"):
        group.cut(0, group.tokens.size - 1 or 2)
    check_sample(group, vocab_size=1000)


def test_arrays_are_as_they_were_given() -> None:
    tokens = np.array([5, 6, 7], np.int32)
    group = Group(tokens, tokens, lengths=[3])
    assert tokens.tolist() == [5, 6, 7], "only the group's labels lose the first"
    assert group.labels.tolist() == [IGNORE_INDEX, 6, 7]
    assert (group.tokens.dtype, group.labels.dtype, group.parents) == (np.int32, np.int32, (-1,))
    assert Group(torch.tensor([5, 6]), [5, 6], lengths=[2]).tokens.tolist() == [5, 6]


@given(drawn_segments())
def test_unshared_sequences_are_the_paths(segments: list[Segment]) -> None:
    """Each trained token is trained once."""
    group, ends = make_group(segments).unshared(), leaves(segments)
    assert group.parents == (-1,) * len(ends)
    taken: set[int] = set()
    expected = []
    for leaf in ends:
        made = Segment(-1, [], [], segments[leaf].number, [])
        for i in path(segments, leaf):
            each = untrained_roots(segments)[i]
            labels = [IGNORE_INDEX] * len(each.labels) if i in taken else each.labels
            made = replace(
                made,
                tokens=made.tokens + each.tokens,
                labels=made.labels + labels,
                logps=made.logps + each.logps,
            )
            taken.add(i)
        expected.append(made)
    assert same(segments_of(group), untrained_roots(expected))


@given(drawn_segments(longest=9), st.integers(1, 30), st.sampled_from(["right", "left"]))
def test_truncated_takes_single_tokens_from_the_longest(
    segments: list[Segment], limit: int, side: str
) -> None:
    """Of equally long ones, from the one that was shorter before; what is kept keeps its numbers."""
    kept = list(untrained_roots(segments))
    cut = leaves(segments) if side == "right" else [i for i, each in enumerate(segments) if each.parent == -1]
    sizes = [len(each.tokens) for each in segments]
    while sum(len(each.tokens) for each in kept) > limit:
        i = max(cut, key=lambda i: (len(kept[i].tokens), -sizes[i], -i))
        part = slice(0, -1) if side == "right" else slice(1, None)
        kept[i] = replace(
            kept[i], tokens=kept[i].tokens[part], labels=kept[i].labels[part], logps=kept[i].logps[part]
        )
        if not kept[i].tokens:
            assert make_group(segments).truncated(limit, side=side) is None
            return
    found = make_group(segments).truncated(limit, side=side)
    assert found is not None
    assert same(segments_of(found), untrained_roots(kept))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lengths": [2, 2]}, r"a group has 5 tokens, 5 labels and segments of \[2, 2\] tokens"),
        ({"lengths": [5, 0]}, "segments must have 1 or more"),
        ({"lengths": []}, "segments must have 1 or more"),
        ({"labels": [5]}, "a group has 5 tokens, 1 labels"),
        ({"lengths": [2, 3], "parents": [-1]}, r"2 segments and the parents \[-1\]; give each segment"),
        ({"lengths": [2, 3], "parents": [-1, 1]}, "the number of one before it, or -1"),
        ({"lengths": [2, 3], "parents": [-2, 0]}, "the number of one before it"),
        ({"tokens": [0.5] * 5}, r"'tokens of a group' has shape \[5\] and type float64"),
        ({"tokens": [[5], [6]]}, r"'tokens of a group' has shape \[2, 1\]"),
        ({"fields": {"reward": [1]}}, r"field 'reward' of a group has shape \[1\]; give one number for each"),
        ({"fields": {"reward": ["a", "b"]}}, "field 'reward' of a group holds .*; give numbers"),
        ({"token_fields": {"logps": [1, 2]}}, "give one number for each of its 5 tokens"),
        ({"fields": {"x": [1, 2]}, "token_fields": {"x": [1] * 5}}, "field 'x' for segments and for tokens"),
    ],
)  # fmt: skip
def test_groups_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    given = {"tokens": [5, 6, 7, 8, 9], "labels": [5, 6, 7, 8, 9], "lengths": [2, 3]} | settings
    with pytest.raises(ValueError, match=message):
        Group(given.pop("tokens"), given.pop("labels"), **given)


# Packs and batches.


@st.composite
def drawn_samples(draw: st.DrawFn) -> list[list[Segment]]:
    """The samples of a pack: groups, some without fields, and plain samples, which are one segment without numbers."""
    samples = draw(st.lists(drawn_segments(most=4), min_size=1, max_size=3))
    kinds = draw(st.lists(st.sampled_from(["group", "bare", "plain"]), min_size=3, max_size=3))
    made = []
    for kind, segments in zip(kinds, samples, strict=False):
        if kind == "plain":
            segments = [replace(segments[0], parent=-1)]
        if kind != "group":
            segments = [
                replace(each, number=math.nan, logps=[math.nan] * len(each.tokens)) for each in segments
            ]
        made.append((kind, untrained_roots(segments)))
    return made  # type: ignore[return-value]


def make_pack(samples: Any) -> Pack:
    sequences, fragments, seq_lens = [], [], []
    for number, (kind, segments) in enumerate(samples):
        group = make_group(segments, fields=kind == "group")
        sequences.append(Sample(group.tokens, group.labels) if kind == "plain" else group)
        seq_lens += group.lengths
        fragments += [Fragment((number,), *bounds) for bounds in group.bounds]
    tokens, labels = assemble(sequences, max_seq_len=LIMIT)
    groups = None
    if any(kind != "plain" for kind, _ in samples):
        groups = pack_groups(sequences, labels, max_seq_len=LIMIT)
    return Pack(tokens, labels, tuple(seq_lens), tuple(fragments), 0, 0, 0, groups)


@given(st.lists(drawn_samples(), min_size=1, max_size=3), st.booleans())
def test_a_batch_says_of_each_token_what_its_segment_does(packs: list[Any], with_null: bool) -> None:
    """Token by token, for packs of groups with and without fields and of plain samples, and a null pack."""
    made = [make_pack(samples) for samples in packs] + [null_pack(LIMIT)] * with_null
    batch = stack_packs(made)
    if all(kind == "plain" for samples in packs for kind, _ in samples):
        assert batch.groups is None
        return
    assert batch.groups is not None
    named = {"number"} if any(kind == "group" for samples in packs for kind, _ in samples) else set()
    assert (set(batch.groups.fields), bool(batch.groups.token_fields)) == (named, bool(named))
    assert batch.groups.first_labels.shape == batch.seq_lens.shape
    trained = 0
    for row, samples in enumerate(packs):
        number = at = 0
        for _, segments in samples:
            begin, starts = number, []
            for each in segments:
                whole = sum(len(segments[i].tokens) for i in path(segments, number - begin))
                starts.append(whole - len(each.tokens))
                parent = batch.groups.parents[row][number]
                assert parent == (-1 if each.parent == -1 else begin + each.parent)
                assert batch.seq_lens[row, number] == len(each.tokens)
                assert batch.groups.first_labels[row, number] == each.labels[0]
                trained += each.labels[0] != IGNORE_INDEX
                if named:
                    assert_number(batch.groups.fields["number"][row, number], each.number)
                for offset, (token, label, logp) in enumerate(
                    zip(each.tokens, each.labels, each.logps, strict=True)
                ):
                    assert batch.tokens[row, at] == token
                    assert batch.labels[row, at] == (label if offset else IGNORE_INDEX)
                    assert batch.input_pos[row, at] == starts[-1] + offset
                    trained += bool(offset) and label != IGNORE_INDEX
                    if named:
                        assert_number(batch.groups.token_fields["logps"][row, at], logp)
                    at += 1
                number += 1
        assert len(batch.groups.parents[row]) == number
        assert (batch.groups.first_labels[row, number:] == IGNORE_INDEX).all()
        assert (batch.labels[row, at:] == IGNORE_INDEX).all()
        for values in batch.groups.fields.values():
            assert values[row, number:].isnan().all()
        for values in batch.groups.token_fields.values():
            assert values[row, at:].isnan().all()
    assert batch.num_trained == trained
    assert not with_null or batch.groups.parents[-1] == ()


def assert_number(found: torch.Tensor, expected: float) -> None:
    assert found.isnan() if math.isnan(expected) else found == expected


@given(st.lists(drawn_samples(), min_size=1, max_size=3), st.sampled_from([None, 40]))
def test_packs_and_their_dicts_make_the_same_batch(packs: list[Any], segments: int | None) -> None:
    made = [make_pack(samples) for samples in packs] + [null_pack(LIMIT)]
    ours = stack_packs(made, segments=segments)
    theirs = collate_packed([to_torchtune(pack) for pack in made], segments=segments)
    for name in ("tokens", "labels", "input_pos", "seq_lens"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name))
    assert repr(ours.groups) == repr(theirs.groups)


def test_all_tensors_of_a_batch_move_together() -> None:
    segments = [Segment(-1, [5, 6], [5, 6], 1, [0, 0]), Segment(0, [7], [7], 2, [-1])]
    moved = stack_packs([make_pack([("group", segments)])]).to("meta").groups
    assert moved is not None
    tensors = [moved.first_labels, *moved.fields.values(), *moved.token_fields.values()]
    assert [tensor.device.type for tensor in tensors] == ["meta"] * 3
    assert moved.parents == ((-1, 0),)


# The cost of attention.


@given(drawn_segments(longest=9), st.sampled_from([None, "sliding_window", "chunk_size"]), st.integers(1, 12))
def test_cost_counts_what_tokens_of_a_group_attend_to(
    segments: list[Segment], kind: str | None, limit: int
) -> None:
    cost = AttentionCost.from_setting({kind: limit} if kind else None)
    pairs = 0
    for number, each in enumerate(segments):
        before = sum(len(segments[i].tokens) for i in path(segments, number)) - len(each.tokens)
        for query in range(before, before + len(each.tokens)):
            for key in range(query + 1):
                near = kind != "sliding_window" or query - key < limit
                pairs += near and (kind != "chunk_size" or query // limit == key // limit)
    lengths, parents = [len(each.tokens) for each in segments], [each.parent for each in segments]
    assert cost.of_pack(lengths, path_starts(lengths, parents)) == pairs
    assert cost.of_pack(lengths, None) == cost.of(lengths)
