"""Groups through streams and loaders: none split, none lost, and each number at its segment or token."""

from __future__ import annotations

import itertools
import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack import (
    IGNORE_INDEX,
    Batch,
    FlatteningCollator,
    Group,
    IterablePackedDataset,
    JSONLSource,
    MapSource,
    Mix,
    Pack,
    PackedDataLoader,
    PackedDataset,
    Sample,
)
from streampack.loader.wire import fold, unfold
from streampack.packing.attention_cost import AttentionCost
from streampack.packing.batch import stack_packs
from streampack.packing.groups import path_starts
from streampack.streaming.balance import hand_out_order
from streampack.streaming.lane_state import LaneEvent
from tests.support.corpus import Numbers, rows
from tests.support.mixtures import APART, shifted
from tests.support.segments import Pairs
from tests.support.thread_ranks import Topology, run

LIMIT = 24
ROWS = rows(60)
LONG = shifted(rows(40, longest=12, overlong=30, seed=1), 500)


def dataset(data: Any = ROWS, **changes: Any) -> IterablePackedDataset:
    return IterablePackedDataset(
        data,
        **{"max_seq_len": LIMIT, "buffer_size": 6, "encoder": Pairs(), "num_lanes": 2, "shuffle": True}
        | changes,
    )


Found = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def groups_in(batch: Batch) -> list[Found]:
    """The groups and plain samples of a batch: tokens, lengths, parents. Every number is checked on the way."""
    found: list[Found] = []
    assert batch.groups is None or all(
        len(p) == len(f) for p, f in zip(batch.groups.parents, batch.fragments, strict=True)
    )
    for row, fragments in enumerate(batch.fragments):
        at = begin = 0
        parts: list[tuple[list[int], int]] = []
        ends: list[int] = []
        for number, fragment in enumerate(fragments):
            if fragment.start == 0:
                found += [_joined(parts)] if parts else []
                parts, begin, ends = [], number, []
            length = int(batch.seq_lens[row, number])
            assert fragment.stop - fragment.start == length
            tokens = batch.tokens[row, at : at + length].tolist()
            parent = -1 if batch.groups is None else batch.groups.parents[row][number]
            start = 0 if parent == -1 else ends[parent - begin]
            assert batch.input_pos[row, at : at + length].tolist() == list(range(start, start + length))
            ends.append(start + length)
            _check_numbers(batch, row, number, at, tokens)
            parts.append((tokens, parent if parent == -1 else parent - begin))
            at += length
        found += [_joined(parts)] if parts else []
    return found


def _joined(parts: list[tuple[list[int], int]]) -> Found:
    return (
        tuple(token for tokens, _ in parts for token in tokens),
        tuple(len(tokens) for tokens, _ in parts),
        tuple(parent for _, parent in parts),
    )


def _check_numbers(batch: Batch, row: int, number: int, at: int, tokens: list[int]) -> None:
    """Compare what the batch says of a segment with what its tokens say, those of `Pairs` and of `Numbers`."""
    i, n = tokens[0] // 1000, WIDTHS.get(tokens[0] // 1000)
    plain = n is None or i % 4 == 0
    assert all(token // 1000 == i for token in tokens)
    for offset, token in enumerate(tokens):
        place = token % 1000
        trained = place > 2 if n is not None else place > NUMBERS[i] // 3 or i % 3 == 0
        label = batch.labels[row, at + offset]
        assert label == (token if trained and offset else IGNORE_INDEX)
        if batch.groups is not None and "logps" in batch.groups.token_fields:
            logp = batch.groups.token_fields["logps"][row, at + offset]
            assert logp.isnan() if plain or not trained else logp == -token
    if batch.groups is not None:
        root = batch.groups.parents[row][number] == -1
        first = batch.groups.first_labels[row, number]
        assert first == (IGNORE_INDEX if root else tokens[0])
        if "number" in batch.groups.fields:
            value = batch.groups.fields["number"][row, number]
            place = tokens[-1] % 1000
            if plain or place <= 2:
                assert value.isnan()
            else:
                assert value == 10 * i + (1 if place <= 2 + n else 2)


WIDTHS = {row["i"]: row["n"] for row in [*ROWS, *LONG]}
NUMBERS = {row["i"]: row["n"] for row in shifted(ROWS, APART)}


def expected(data: list[dict[str, int]], *, side: str | None = None, shared: bool = True) -> list[Found]:
    """What `Pairs` makes of rows, cut as `Group.truncated` cuts."""
    found: list[Found] = []
    for row in data:
        sample = Pairs(shared=shared)(row)
        if sample.tokens.size > LIMIT:
            if side is None:
                continue
            if isinstance(sample, Group):
                cut = sample.truncated(LIMIT, side=side)
                if cut is None:
                    continue
                sample = cut
            else:
                sample = sample.cut(*((0, LIMIT) if side == "right" else (sample.tokens.size - LIMIT, None)))
        group = isinstance(sample, Group)
        found.append(
            (
                tuple(sample.tokens.tolist()),
                sample.lengths if group else (sample.tokens.size,),
                sample.parents if group else (-1,),
            )
        )
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
    data = dataset(
        ROWS if side is None else LONG, strategy=strategy, balance_window=window, seed=seed,
        overlong="drop" if side is None else "truncate", truncate_side=side or "right", encoder=Pairs(shared=shared),
    )  # fmt: skip
    loader = PackedDataLoader(data, batch_size=batch_size)
    batches = list(loader)
    found = [group for batch in batches for group in groups_in(batch)]
    wanted = expected(ROWS if side is None else LONG, side=side, shared=shared)
    assert Counter(found) == Counter(wanted)
    assert loader.ledger().packed == sum(len(tokens) for tokens, *_ in found)
    assert any(len(lengths) > 1 for _, lengths, _ in found)


def test_groups_lie_beside_plain_samples_of_a_mixture() -> None:
    mix = Mix(
        [
            {"name": "pairs", "source": MapSource(ROWS), "weight": 1, "encoder": Pairs()},
            {"name": "text", "source": MapSource(shifted(ROWS, APART)), "weight": 1, "encoder": Numbers()},
        ],
        stop="all_exhausted",
    )
    data = dataset(mix, encoder=None, overlong="drop")
    found = [group for batch in PackedDataLoader(data, batch_size=2) for group in groups_in(batch)]
    pairs = {group for group in found if group[0][0] // 1000 < APART}
    assert pairs == set(expected(ROWS))
    assert len({group[0][0] // 1000 for group in found} - set(WIDTHS)) == len(ROWS)


@pytest.mark.parametrize("balance_window", [0, 3])
def test_a_resume_at_every_step_gives_the_same_batches(tmp_path: Path, balance_window: int) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in LONG))

    def loader(**more: Any) -> PackedDataLoader:
        data = dataset(
            JSONLSource(path), overlong="truncate", balance_window=balance_window, shuffle_window=7, epochs=2
        )
        return PackedDataLoader(data, batch_size=2, **more)

    begun = loader()
    whole, states = [], []
    for batch in begun:
        whole.append(plain(batch))
        states.append(pickle.loads(pickle.dumps(begun.state_dict())))
    assert len(whole) > 15
    for number, state in enumerate(states):
        resumed = loader()
        resumed.load_state_dict(state)
        assert [plain(batch) for batch in itertools.islice(resumed, 4)] == whole[number + 1 : number + 5]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_worker_processes_hand_out_the_same_batches(num_workers: int) -> None:
    data = {"overlong": "truncate", "epochs": 2}
    whole = [plain(batch) for batch in PackedDataLoader(dataset(LONG, **data), batch_size=2)]
    first = PackedDataLoader(dataset(LONG, **data), batch_size=2, num_workers=num_workers)
    begun = [plain(batch) for batch in itertools.islice(first, 5)]
    second = PackedDataLoader(dataset(LONG, **data), batch_size=2, num_workers=num_workers)
    second.load_state_dict(first.state_dict())
    assert begun + [plain(batch) for batch in second] == whole


@pytest.mark.parametrize("balance_window", [0, 4])
def test_a_run_goes_on_with_other_numbers_of_ranks(balance_window: int) -> None:
    """4, 2, 3, 1 ranks: together they read each group once an epoch."""
    steps = {"overlong": "truncate", "num_lanes": 12, "epochs": 1, "balance_window": balance_window}
    state, found = None, []
    for ranks in (4, 2, 3, 1):
        topology = Topology(ranks, batch_size=12 // ranks)
        part = run(
            lambda: dataset(LONG, **steps),
            topology,
            state=state,
            packs_per_step=12,
            limit=1 if ranks > 1 else None,
        )
        state = part.states[0]
        found += [group for batches in part.batches for batch in batches for group in groups_in(batch)]
    assert Counter(found) == Counter(expected(LONG, side="right"))


def test_the_packs_of_a_window_are_handed_out_by_what_groups_cost() -> None:
    window = 6
    common = {"num_lanes": 1, "shuffle": False, "overlong": "drop"}

    def packs_of(**more: Any) -> list[Pack]:
        stream = dataset(rows(80), **common, **more).stream(0, 1)
        return _all(stream)

    unbalanced, balanced = packs_of(), packs_of(balance_window=window)
    assert len(unbalanced) > 2 * window
    wanted: list[Pack] = []
    for first in range(0, len(unbalanced), window):
        packs = unbalanced[first : first + window]
        costs = [
            AttentionCost().of_pack(
                pack.seq_lens, path_starts(pack.seq_lens, pack.groups.parents) if pack.groups else None
            )
            for pack in packs
        ]
        order = hand_out_order(costs, slot=0, window=window, key=(0, 0, first // window))
        wanted += [packs[i] for i in order]
    assert [pack.tokens.tolist() for pack in balanced] == [pack.tokens.tolist() for pack in wanted]


def _all(stream: Any) -> list[Pack]:
    packs: list[Pack] = []
    while True:
        try:
            event = stream.next_event()
        except StopIteration:
            return packs
        if event.pack is not None:
            packs.append(event.pack)


def test_groups_cross_a_pipe() -> None:
    for pack in _all(dataset(LONG, overlong="truncate").stream(0, 1)):
        arrived = unfold(fold(LaneEvent(0, 0, pack, None))).pack  # type: ignore[arg-type]
        assert arrived is not None
        assert plain(stack_packs([arrived])) == plain(stack_packs([pack]))
        assert (arrived.groups is None) == (pack.groups is None)


# What is refused, and what else reads samples.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split_across_pack": True}, "is a group of segments, which is never split; leave split_across_pack out"),
        ({"max_seqs_per_pack": 9}, "of which max_seqs_per_pack cannot count each; leave it out"),
        ({"truncate_eos": 2, "overlong": "truncate"}, "whose numbers truncate_eos would not fit; leave it"),
        ({"overlong": "split"}, "is a group of 64 tokens, max_seq_len is 24, and a group is never split; set overlong "
                                "to 'truncate' or 'drop', or raise max_seq_len"),
        ({}, "is a group of 64 tokens, max_seq_len is 24, and a group is never split"),
    ],
)  # fmt: skip
def test_settings_that_would_part_a_group_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"sample 0 .*{message}"):
        list(dataset([{"i": 1, "n": 41}], **changes))


def test_a_group_too_long_to_be_cut_is_dropped() -> None:
    data = dataset([{"i": 1, "n": 41}, {"i": 2, "n": 3}], overlong="truncate", truncate_side="left")
    [pack] = data
    assert pack["num_seqs"] == 3
    assert data.ledger().dropped["overlong"] == 64


def test_map_style_datasets_and_token_shards_refuse_groups(tmp_path: Path) -> None:
    from streampack.tokenize import tokenize

    class Groups:
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> Sample:
            return Pairs()({"i": 1, "n": 3})

    with pytest.raises(ValueError, match="is a group of segments; only IterablePackedDataset packs those"):
        PackedDataset(Groups(), max_seq_len=LIMIT)
    path = tmp_path / "rows.jsonl"
    path.write_text('{"i": 1, "n": 3}\n')
    with pytest.raises(
        ValueError, match="it is a group of segments, which a shard has no place for; stream the rows"
    ):
        tokenize(path, out=tmp_path / "shards", encoder=Pairs(), progress=False)


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
    with pytest.raises(ValueError, match="Regrouped makes other tokens of sample"):
        other.load_state_dict(loader.state_dict())


@pytest.mark.parametrize("side", ["right", "left"])
def test_groups_are_estimated_as_they_are_packed(side: str) -> None:
    data = [{"i": i, "n": 3 + i % 25} for i in range(300)]
    settings: dict[str, Any] = {"overlong": "truncate", "truncate_side": side, "num_lanes": 1}
    known = dataset(data, **settings).estimate(rows=150, num_lanes=1)
    made = len(list(dataset(data, **settings)))
    assert known.packs == pytest.approx(made, rel=0.1)


def test_a_fragment_is_traced_to_its_segment() -> None:
    data = dataset(LONG, overlong="truncate")
    for pack in itertools.islice(data, 5):
        at = 0
        lengths = pack["segment_lens" if "segment_lens" in pack else "seq_lens"]
        for fragment, length in zip(pack["fragments"], lengths.tolist(), strict=False):
            assert data.trace(fragment)["tokens"] == pack["tokens"][at : at + length].tolist()
            at += length


def test_collators_that_know_no_groups_do_not_get_their_lengths() -> None:
    """A mask of ``seq_lens`` would hide the prompts from their answers, and leave no trace."""
    packs = [pack for pack in dataset(LONG, overlong="truncate") if "segment_lens" in pack][:2]
    assert len(packs) == 2
    assert all("seq_lens" not in pack for pack in packs)
    with pytest.raises(ValueError, match="pack 0 of the batch holds groups, .* use a PackedDataLoader"):
        FlatteningCollator()(packs)
    data = pytest.importorskip("torchtune.data")
    with pytest.raises(KeyError, match="seq_lens"):
        data.padded_collate_packed(packs)


def test_plain_samples_alone_make_no_groups() -> None:
    plain_rows = [row for row in ROWS if row["i"] % 4 == 0]
    for batch in PackedDataLoader(dataset(plain_rows, overlong="drop")):
        assert batch.groups is None
