"""Groups against plain lists of segments: alone, in packs and batches, through streams and loaders."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack import (
    IGNORE_INDEX,
    AnswersEncoder,
    Batch,
    FlatteningCollator,
    Group,
    IterablePackedDataset,
    IterableSource,
    MessagesEncoder,
    Mix,
    Pack,
    PackedDataLoader,
    PackedDataset,
    Sample,
    collate_packed,
)
from streampack.losses import pair_of, sequence_logps
from streampack.packing.assemble import null_pack
from streampack.packing.batch import stack_packs, to_torchtune
from streampack.tokenize import tokenize
from tests.harness.corpus import rows
from tests.harness.groups import Pairs, without_sharing
from tests.harness.hf_tokenizers import Letters, byte_level
from tests.harness.mixtures import shifted

LIMIT = 24
ROWS = rows(60)
# Every twelfth is a group that is too long, and the last a plain sample that is.
LONG = [*shifted(rows(40, longest=12, overlong=30, seed=1), 501), {"i": 600, "n": 20}]
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


def segments_of(sample: Sample) -> list[Segment]:
    """A sample taken apart, token by token: one segment without numbers, or a group's."""
    if not isinstance(sample, Group):
        sample = Group(*sample, lengths=[sample.tokens.size])
    numbers = sample.fields.get("number", np.full(len(sample.lengths), NAN)).tolist()
    logps = sample.token_fields.get("logps", np.full(sample.tokens.size, NAN)).tolist()
    return [
        Segment(parent, sample.tokens[a:b].tolist(), sample.labels[a:b].tolist(), number, logps[a:b])
        for parent, (a, b), number in zip(sample.parents, sample.bounds, numbers, strict=True)
    ]


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


def same(found: Any, expected: Any) -> bool:
    return repr(found) == repr(expected)  # NaN is not equal to itself


@st.composite
def drawn_segments(draw: st.DrawFn, *, most: int = 5, longest: int = 4) -> list[Segment]:
    """A tree, or several, whose tokens and numbers all differ."""
    segments: list[Segment] = []
    for number in range(draw(st.integers(1, most))):
        length = draw(st.integers(1, longest))
        tokens = [100 * (number + 1) + at for at in range(length)]
        trained = draw(st.lists(st.booleans(), min_size=length, max_size=length))
        labels = [token if flag else IGNORE_INDEX for token, flag in zip(tokens, trained, strict=True)]
        parent = draw(st.integers(-1, number - 1))
        segments.append(Segment(parent, tokens, labels, number + 0.5, [-float(token) for token in tokens]))
    return segments


@st.composite
def drawn_samples(draw: st.DrawFn) -> Sample:
    """A group, with fields or without, or a plain sample."""
    kind, segments = draw(st.sampled_from(["group", "bare", "plain"])), draw(drawn_segments(most=4))
    if kind == "plain":
        group = make_group([replace(segments[0], parent=-1)])
        return Sample(group.tokens, group.labels)
    return make_group(segments, fields=kind == "group")


# Groups alone.


@given(drawn_segments())
def test_a_group_is_its_segments(segments: list[Segment]) -> None:
    group = make_group(segments)
    assert same(segments_of(group), untrained_roots(segments))
    assert group.paths() == [path(segments, i) for i in range(len(segments))]
    assert group.leaves == leaves(segments)
    assert group.bounds[0][0] == 0
    for again in (pickle.loads(pickle.dumps(group)), copy.deepcopy(group)):
        assert type(again) is Group
        assert same(segments_of(again), segments_of(group))
        assert again.parents == group.parents
        assert not np.shares_memory(again.tokens, group.tokens)
    assert group.cut(0, group.tokens.size) is group
    with pytest.raises(AssertionError, match="never split"):
        group.cut(0, group.tokens.size - 1 or 2)


def test_arrays_that_a_group_was_made_of_may_be_overwritten() -> None:
    tokens, number = np.array([5, 6, 7], np.int32), np.array([1, 2], np.float32)
    group = Group(tokens, tokens, lengths=[2, 1], fields={"number": number})
    tokens[:], number[:] = 0, 0
    assert (group.tokens.tolist(), group.labels.tolist()) == ([5, 6, 7], [-100, 6, -100])
    assert group.fields["number"].tolist() == [1, 2]


@given(drawn_segments())
def test_unshared_sequences_are_the_paths(segments: list[Segment]) -> None:
    """Each trained token is trained once."""
    group, ends = without_sharing(make_group(segments)), leaves(segments)
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
    part = slice(0, -1) if side == "right" else slice(1, None)
    while sum(len(each.tokens) for each in kept) > limit:
        i = max(cut, key=lambda i: (len(kept[i].tokens), -sizes[i], -i))
        each = kept[i]
        kept[i] = replace(each, tokens=each.tokens[part], labels=each.labels[part], logps=each.logps[part])
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


# In batches.


def samples_in(batch: Batch) -> list[list[Segment]]:
    """The samples of a batch, as segments with labels and numbers; positions and padding are checked on the way."""
    found: list[list[Segment]] = []
    groups = batch.groups
    for row, fragments in enumerate(batch.fragments):
        assert groups is None or len(groups.parents[row]) == len(fragments)
        at = begin = 0
        ends: list[int] = []
        for number, fragment in enumerate(fragments):
            if number == 0 or fragment.start == 0 or fragment.row_id != fragments[number - 1].row_id:
                begin, ends = number, []
                found.append([])
            part = slice(at, at + fragment.stop - fragment.start)
            parent = -1 if groups is None else groups.parents[row][number]
            start = 0 if parent == -1 else ends[parent - begin]
            ends.append(start + part.stop - at)
            assert batch.seq_lens[row, number] == part.stop - at
            assert batch.input_pos[row, part].tolist() == list(range(start, ends[-1])), (
                "as alone behind its prefix"
            )
            labels = batch.labels[row, part].tolist()
            assert labels[0] == IGNORE_INDEX, "no token of the row predicts it"
            value, logps = NAN, [NAN] * (part.stop - at)
            if groups is not None:
                labels[0] = int(groups.first_labels[row, number])
                value = float(groups.fields["number"][row, number]) if "number" in groups.fields else NAN
                logps = groups.token_fields["logps"][row, part].tolist() if groups.token_fields else logps
            tokens = batch.tokens[row, part].tolist()
            found[-1].append(
                Segment(parent if parent == -1 else parent - begin, tokens, labels, value, logps)
            )
            at = part.stop
        assert (batch.labels[row, at:] == IGNORE_INDEX).all()
        if groups is not None:
            assert (groups.first_labels[row, len(fragments) :] == IGNORE_INDEX).all()
            assert all(values[row, len(fragments) :].isnan().all() for values in groups.fields.values())
            assert all(values[row, at:].isnan().all() for values in groups.token_fields.values())
    return found


@given(st.lists(drawn_samples(), min_size=1, max_size=9), st.booleans(), st.sampled_from([None, 40]))
def test_a_batch_says_of_each_token_what_its_segment_does(
    samples: list[Sample], with_null: bool, segments: int | None
) -> None:
    """Of groups with and without fields, of plain samples, and of a null pack."""
    data = IterablePackedDataset(
        range(len(samples)), encoder=samples.__getitem__, max_seq_len=32, strategy="next_fit", num_lanes=1
    )
    packs: list[Pack] = [*data.stream(), *[null_pack(32)] * with_null]
    batch = stack_packs(packs, segments=segments)
    expected = [segments_of(sample) for sample in samples]
    assert same(samples_in(batch), expected)
    assert batch.num_trained == sum(
        label != IGNORE_INDEX for each in expected for segment in each for label in segment.labels
    )
    assert (batch.groups is None) == (not any(isinstance(sample, Group) for sample in samples))
    assert batch.groups is None or not with_null or batch.groups.parents[-1] == ()
    again = collate_packed([to_torchtune(pack) for pack in packs], segments=segments)
    assert same(plain(again), plain(batch))


# Through streams and loaders: none split, none lost, and each number at its segment or token.


def dataset(data: Any = ROWS, **changes: Any) -> IterablePackedDataset:
    common = {"max_seq_len": LIMIT, "buffer_size": 6, "encoder": Pairs(), "num_lanes": 2, "shuffle": True}
    return IterablePackedDataset(data, **common | changes)


def expected_of(data: list[dict[str, int]], *, side: str | None = None, shared: bool = True) -> Counter[str]:
    """What `Pairs` makes of rows, cut as `Group.truncated` cuts, or dropped where it is too long."""
    found: Counter[str] = Counter()
    for row in data:
        sample: Any = Pairs(shared=shared)(row)
        if sample.tokens.size > LIMIT:
            if isinstance(sample, Group):
                sample = sample.truncated(LIMIT, side=side) if side else None
            else:
                part = slice(0, LIMIT) if side == "right" else slice(-LIMIT, None)
                sample = Sample(sample.tokens[part], sample.labels[part]) if side else None
        if sample is not None:
            found[repr(segments_of(sample))] += 1
    return found


def plain(batch: Batch) -> str:
    """All of a batch, to be compared; NaN is not equal to itself."""
    tensors = (batch.tokens, batch.labels, batch.input_pos, batch.seq_lens)
    groups: Any = None
    if batch.groups is not None:
        each = (batch.groups.fields, batch.groups.token_fields)
        named = [{name: values.tolist() for name, values in fields.items()} for fields in each]
        groups = (batch.groups.parents, batch.groups.first_labels.tolist(), named)
    return repr(([tensor.tolist() for tensor in tensors], batch.fragments, groups))


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(["exact_fit", "best_fit", "first_fit", "next_fit"]),
    st.sampled_from([None, "right", "left"]),
    st.sampled_from([0, 3]),
    st.booleans(),
    st.integers(1, 3),
    st.integers(0, 9),
)
def test_every_group_arrives_whole_and_its_numbers_with_it(
    strategy: str, side: str | None, window: int, shared: bool, batch_size: int, seed: int
) -> None:
    rows_of = ROWS if side is None else LONG
    data = dataset(
        rows_of, strategy=strategy, balance_window=window, seed=seed, encoder=Pairs(shared=shared),
        overlong={None: "drop", "right": "truncate", "left": "truncate_left"}[side],
    )  # fmt: skip
    loader = PackedDataLoader(data, batch_size=batch_size)
    found = [sample for batch in loader for sample in samples_in(batch)]
    assert Counter(map(repr, found)) == expected_of(rows_of, side=side, shared=shared)
    assert loader.ledger().packed == sum(len(segment.tokens) for sample in found for segment in sample)
    assert any(len(sample) > 1 for sample in found)


def test_a_fragment_is_traced_to_its_segment() -> None:
    data = dataset(LONG, overlong="truncate")
    for pack in itertools.islice(data, 5):
        at = 0
        lengths = pack["segment_lens" if "segment_lens" in pack else "seq_lens"]
        for fragment, length in zip(pack["fragments"], lengths.tolist(), strict=False):
            assert data.trace(fragment)["tokens"] == pack["tokens"][at : at + length].tolist()
            at += length


# What is refused, and what else reads samples.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split_across_pack": True}, "is a group of segments, .*; leave split_across_pack=True out"),
        ({"max_seqs_per_pack": 9}, "is a group of segments, .*; leave max_seqs_per_pack=9 out"),
        ({"overlong": "split"}, "is a group of 64 tokens, max_seq_len is 24, and a group is never split; set overlong "
                                "to 'truncate' or 'drop', or raise max_seq_len"),
        ({}, "is a group of 64 tokens, max_seq_len is 24, and a group is never split"),
        ({"pad_seqs_to": 4}, "is a group of segments, .*; leave pad_seqs_to=4 out"),
    ],
)  # fmt: skip
def test_settings_that_would_part_a_group_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"sample 0 .*{message}"):
        list(dataset([{"i": 1, "n": 41}], **changes))


@pytest.mark.parametrize("door", ["encoder", "mixture", "torchtune's transform"])
@pytest.mark.parametrize(
    "changes", [{"split_across_pack": True}, {"max_seqs_per_pack": 9}, {"overlong": "split"}, {"pad_seqs_to": 4}]
)  # fmt: skip
def test_settings_that_would_part_a_group_are_refused_before_a_row_is_read(
    door: str, changes: dict[str, Any]
) -> None:
    encoder: Any = AnswersEncoder(Letters())
    if door == "torchtune's transform":
        transforms = pytest.importorskip("torchtune.data")
        encoder = MessagesEncoder(byte_level(), message_transform=transforms.ChosenRejectedToMessages())

    def unread() -> Any:
        raise AssertionError("a row was read")

    source: Any = IterableSource(unread)
    if door == "mixture":
        source = Mix([
            {"name": "pairs", "source": source, "weight": 1, "encoder": encoder},
            {"name": "ids", "source": IterableSource(unread), "weight": 1},
        ])  # fmt: skip
        encoder = None
    [(name, value)] = changes.items()
    with pytest.raises(ValueError) as error:
        dataset(source, encoder=encoder, **changes)
    assert str(error.value).startswith(
        "the encoder makes groups of segments, which are never split, counted or"
    )
    assert str(error.value).endswith(f"leave {name}={value!r} out")
    dataset(source, encoder=encoder, overlong="truncate")


def test_a_group_too_long_to_be_cut_is_dropped() -> None:
    data = dataset([{"i": 1, "n": 41}, {"i": 2, "n": 3}], overlong="truncate_left")
    [pack] = data
    assert pack["num_seqs"] == 3
    assert data.ledger().dropped["overlong"] == 64


# Answers that are trained in part, such as rollouts that called tools: a cut may take all that is trained of one.
PARTLY = [
    {"prompt": [*range(20)], "answers": [[i + 100] * 9, [i + 200] * 9], "mask": [[0] * cut + [1] * (9 - cut), [1] * 9]}
    for i, cut in enumerate([7, 0, 5, 8, 1, 6] * 4)
]  # fmt: skip


@pytest.mark.parametrize("untrained", [None, "keep", "drop", "error"])
@pytest.mark.parametrize("shared", [True, False])
def test_a_group_is_judged_by_the_trained_tokens_that_a_cut_leaves_each_answer(
    untrained: str | None, shared: bool
) -> None:
    """A pair with an answer that trains nothing would compare a log-probability of 0."""
    limit, kept_of_each = (32, 6) if shared else (52, 6)
    encoder = AnswersEncoder(Letters(), answers="answers", mask="mask", share_prefix=shared)
    lost = [i for i, row in enumerate(PARTLY) if not any(row["mask"][0][:kept_of_each])]
    assert 0 < len(lost) < len(PARTLY)
    data = IterablePackedDataset(
        PARTLY, encoder=encoder, max_seq_len=limit, overlong="truncate", untrained=untrained, num_lanes=1
    )
    if untrained == "error":
        with pytest.raises(ValueError) as error:
            list(data)
        assert str(error.value) == (
            f"sample 0 has an answer that trains nothing: of the {limit} tokens that overlong='truncate' leaves of its "
            f"{limit + 6}, none of that answer's has a label to train; raise max_seq_len, choose another overlong, or "
            "set untrained to 'drop' or 'keep'"
        )
        return
    seen, counts = set(), []
    for batch in PackedDataLoader(data, batch_size=1):
        chosen, rejected = pair_of(batch)
        counts += sequence_logps(torch.zeros(1, limit, 300), batch)[1].flatten()[chosen].tolist()
        assert len(rejected) == 1
        seen.add(max(batch.tokens[0].tolist()) - 200)
    gone = [] if untrained == "keep" else lost
    assert seen == {*range(len(PARTLY))} - {*gone}
    assert counts.count(0) == len(lost) - len(gone)
    ledger = data.ledger()
    assert (ledger.untrained, ledger.dropped_samples["untrained"]) == (len(lost), len(gone))
    assert ledger.dropped["untrained"] == len(gone) * (limit + 6)
    known = data.estimate(rows=100)
    assert (known.packs, known.padding) == (ledger.packs, pytest.approx(ledger.padding))


def test_a_group_that_came_with_an_untrained_answer_is_counted_and_kept_unless_told_otherwise() -> None:
    half = Group([5, 6, 7, 8], [-100, -100, 7, -100], lengths=[2, 1, 1], parents=[-1, 0, 0])
    for untrained, sequences in ((None, 4), ("keep", 4), ("drop", 1)):
        data = IterablePackedDataset(
            [half, [5, 6]], encoder=lambda row: row, max_seq_len=6, untrained=untrained
        )
        [pack] = data
        assert pack["num_seqs"] == sequences
        assert data.ledger().untrained == 1


def test_what_knows_no_groups_refuses_them(tmp_path: Path) -> None:
    """Collators do not get the lengths: a mask of ``seq_lens`` would hide the prompts from their answers."""
    with pytest.raises(ValueError, match="is a group of segments, or has images; only"):
        PackedDataset([Pairs()({"i": 1, "n": 3})], max_seq_len=LIMIT)
    with pytest.raises(
        ValueError, match="it has segments or images, which a shard has no place for; stream the"
    ):
        tokenize([{"i": 1, "n": 3}], out=tmp_path / "shards", encoder=Pairs(), progress=False)
    packs = [pack for pack in dataset(LONG, overlong="truncate") if "segment_lens" in pack][:2]
    assert len(packs) == 2
    assert all("seq_lens" not in pack for pack in packs)
    with pytest.raises(
        ValueError, match="sample 0 of the batch: it is a pack of groups, .* use a PackedDataLoader"
    ):
        FlatteningCollator()(packs)
    data = pytest.importorskip("torchtune.data")
    with pytest.raises(KeyError, match="seq_lens"):
        data.padded_collate_packed(packs)


class Regrouped(Pairs):
    """The same tokens and labels, and by ``change`` other groups."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.change = change

    def __call__(self, row: Any, /) -> Sample:
        made = super().__call__(row)
        if not isinstance(made, Group):
            return made
        fields = made.fields if self.change != "fields" else {"number": -made.fields["number"]}
        logps = made.token_fields if self.change != "token fields" else {}
        parents = made.parents if self.change != "parents" else [-1, 0, 1]
        return Group(*made, lengths=made.lengths, parents=parents, fields=fields, token_fields=logps)


@pytest.mark.parametrize("change", ["fields", "token fields", "parents"])
def test_an_encoder_that_groups_otherwise_is_another_encoder(change: str) -> None:
    loader = PackedDataLoader(dataset(encoder=Regrouped("")))
    next(iter(loader))
    other = PackedDataLoader(dataset(encoder=Regrouped(change)))
    with pytest.raises(ValueError, match="made with encoder.samples"):
        other.load_state_dict(loader.state_dict())
