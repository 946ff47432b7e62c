"""The nine methods of batching: which samples lie where, against the rule of each, and what a batch of theirs holds."""

from __future__ import annotations

import warnings
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack import IGNORE_INDEX, Batch, MultipackBatchSampler, method_loader, plan_packs

LIMIT = 16
LENGTHS = [int(length) for length in np.random.default_rng(0).integers(1, LIMIT + 1, 60)]
CUT = ("fixed_length", "fixed_length_posid")  # their samples continue in the next row
UNPACKED = ("random_padding", "group_by_length_padding", "minibatch_packing")  # as long as the longest row
NAMES = (*UNPACKED, "sorted_packing", "random_packing", "multipack", "exact_fit", *CUT)
names = pytest.mark.parametrize("name", NAMES)

Row = list[tuple[int, int, int]]  # of samples: (number, start, stop)


def samples_of(lengths: list[int] = LENGTHS) -> list[dict[str, Any]]:
    """Samples of distinct tokens; the first third of each is a prompt."""
    made, at = [], 1
    for length in lengths:
        tokens = list(range(at, at + length))
        prompt = length // 3
        made.append({"tokens": tokens, "labels": [IGNORE_INDEX] * prompt + tokens[prompt:]})
        at += length
    return made


def loader_of(name: str, data: Any = None, *, epoch: int = 0, **options: Any) -> Any:
    data = samples_of() if data is None else data
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what `fixed_length` says has a test of its own
        made = method_loader(data, method=name, **{"max_seq_len": LIMIT, "batch_size": 2, **options})
    made.sampler.set_epoch(epoch)
    return made


def plan(name: str, lengths: list[int] = LENGTHS, *, ranks: int = 1, **options: Any) -> list[list[Row]]:
    """The rows of each batch; of several ranks, their batches in turn."""
    data = samples_of(lengths)
    shares = [loader_of(name, data, num_replicas=ranks, rank=rank, **options) for rank in range(ranks)]
    return [
        [[(*f.row_id, f.start, f.stop) for f in row] for row in batch.fragments]
        for at_once in zip(*shares, strict=True)
        for batch in at_once
    ]


def numbers(batches: list[list[Row]]) -> list[list[list[int]]]:
    return [[[index for index, _, _ in row] for row in batch] for batch in batches]


def spans_of(batches: list[list[Row]]) -> Row:
    return sorted(chain.from_iterable(chain.from_iterable(batches)))


def order_of(lengths: list[int], *, epoch: int = 0) -> list[int]:
    """The order of an epoch, which is that of the method that does nothing with it."""
    batches = plan("random_padding", lengths, max_seq_len=999, batch_size=1, epoch=epoch)
    return [i for [[(i, _, _)]] in batches]


def in_pairs(rows: list[Any]) -> list[list[Any]]:
    """Batches of two rows, the last one filled up."""
    rows = rows + [[]] * (len(rows) % 2)
    return [rows[i : i + 2] for i in range(0, len(rows), 2)]


def greedily(order: list[int]) -> list[list[int]]:
    """Begin a new row when the next sample does not fit."""
    rows: list[list[int]] = [[]]
    for i in order:
        if sum(LENGTHS[j] for j in rows[-1]) + LENGTHS[i] > LIMIT:
            rows.append([])
        rows[-1].append(i)
    return rows


@names
@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(1, LIMIT), min_size=8, max_size=50),
    batch_size=st.integers(1, 4), ranks=st.integers(1, 2), epoch=st.integers(0, 2),
)  # fmt: skip
def test_every_token_exactly_once(
    name: str, lengths: list[int], batch_size: int, ranks: int, epoch: int
) -> None:
    batches = plan(name, lengths, batch_size=batch_size, ranks=ranks, epoch=epoch)
    spans = spans_of(batches)
    tokens = [(index, at) for index, start, stop in spans for at in range(start, stop)]
    assert tokens == [(index, at) for index, length in enumerate(lengths) for at in range(length)]
    if name not in CUT:
        assert [stop for _, _, stop in spans] == lengths, "no sample is cut"
    for batch in batches:
        if name not in UNPACKED:
            assert len(batch) == batch_size
            assert all(sum(stop - start for _, start, stop in row) <= LIMIT for row in batch)
        else:
            assert sum(map(len, batch)) <= batch_size


def test_methods_of_padding_and_of_packing_in_arrival_order() -> None:
    order = order_of(LENGTHS)
    by_length = sorted(order, key=lambda i: -LENGTHS[i])
    packs = plan_packs([LENGTHS[i] for i in order], LIMIT)
    assert sorted(order) == list(range(len(LENGTHS))) != order
    pairs = in_pairs([[i] for i in order])
    assert numbers(plan("random_padding")) == pairs
    assert numbers(plan("minibatch_packing")) == [[list(chain(*batch))] for batch in pairs]
    assert numbers(plan("random_packing")) == in_pairs(greedily(order))
    assert numbers(plan("sorted_packing")) == in_pairs(greedily(by_length))
    assert numbers(plan("exact_fit")) == in_pairs([[order[i] for i, _, _ in pack] for pack in packs])


def test_group_by_length_is_that_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = pytest.importorskip("transformers.trainer_pt_utils")
    for count, size in ((60, 2), (7, 4), (60, 1), (200, 2)):
        lengths = (np.random.default_rng(count).permutation(count) + 1).tolist()
        order = torch.tensor(order_of(lengths, epoch=1))
        monkeypatch.setattr(torch, "randperm", lambda count, generator=None, order=order: order)
        theirs = trainer.get_length_grouped_indices(lengths, size)
        ours = plan("group_by_length_padding", lengths, max_seq_len=count, batch_size=size, epoch=1)
        assert list(chain.from_iterable(chain.from_iterable(numbers(ours)))) == theirs


@pytest.mark.parametrize("name", ["fixed_length", "fixed_length_posid"])
def test_fixed_length_cuts_the_whole_corpus(name: str) -> None:
    corpus = [(i, at) for i in order_of(LENGTHS) for at in range(LENGTHS[i])]
    rows = [
        [(index, at) for index, start, stop in row for at in range(start, stop)]
        for batch in plan(name)
        for row in batch
    ]
    expected = [corpus[at : at + LIMIT] for at in range(0, len(corpus), LIMIT)]
    assert rows == expected + [[]] * (len(expected) % 2)


@pytest.mark.parametrize("ranks", [2, 3])
def test_multipack_gives_the_batches_of_a_step_even_costs(ranks: int) -> None:
    """Rows of a step are dealt out in turn from the costliest on, and every rank gets one of each turn."""
    order = order_of(LENGTHS)
    lengths, count = [LENGTHS[i] for i in order], 2 * ranks
    sizes: Any = {"max_tokens": LIMIT, "packs_per_step": count, "num_replicas": 1, "rank": 0}
    packs = list(MultipackBatchSampler(lengths, **sizes, shuffle=False))
    steps = [packs[i : i + count] for i in range(0, len(packs), count)]
    turns = [step[rank::ranks] for step in steps for rank in range(ranks)]
    expected = [[[order[i] for i in row] for row in batch] for batch in turns]
    assert numbers(plan("multipack", ranks=ranks)) == expected


@names
def test_the_order_is_a_function_of_seed_and_epoch(name: str) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = plan(name)
    assert torch.equal(before, torch.get_rng_state()), "the global generators are left alone"
    assert plan(name) == first
    assert len({str(plan(name, seed=seed, epoch=epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


@names
def test_overlong(name: str) -> None:
    lengths = [3, 40, 16, 5]

    def kept(overlong: str | None) -> Row:
        return spans_of(plan(name, lengths, overlong=overlong))

    def tokens(spans: Row) -> list[int]:
        return [sum(stop - start for i, start, stop in spans if i == index) for index in range(4)]

    assert tokens(kept("truncate")) == [3, 16, 16, 5]
    assert tokens(kept("drop")) == [3, 0, 16, 5]
    assert tokens(kept("split")) == [3, 40, 16, 5]
    if name in CUT:
        assert kept(None) == kept("split")
    else:
        assert [span for span in kept("split") if span[0] == 1] == [(1, 0, 16), (1, 16, 32), (1, 32, 40)]
        said = "^sample 1 has 40 tokens, max_seq_len is 16; set overlong to 'split'"
        with pytest.raises(ValueError, match=said):
            kept(None)


# What a batch holds.


def segments(batch: Batch) -> list[list[tuple[list[int], ...]]]:
    """Per row, the (tokens, labels, positions) of every segment, the padding's too."""
    rows = []
    for *values, lens in zip(batch.tokens, batch.labels, batch.input_pos, batch.seq_lens, strict=True):
        parts = [part.split([length for length in lens.tolist() if length]) for part in values]
        rows.append([tuple(part.tolist() for part in segment) for segment in zip(*parts, strict=True)])
    return rows


@names
def test_a_batch_holds_what_its_fragments_say(name: str) -> None:
    data = samples_of()
    for batch in loader_of(name, data, batch_size=4, padding_idx=9):
        rows = [[(*f.row_id, f.start, f.stop) for f in row] for row in batch.fragments]
        width = LIMIT if name not in UNPACKED else max(sum(b - a for _, a, b in row) for row in rows)
        assert batch.tokens.shape == batch.labels.shape == batch.input_pos.shape == (len(rows), width)
        for found, row in zip(segments(batch), rows, strict=True):
            tokens = [data[index]["tokens"][start:stop] for index, start, stop in row]
            labels = [data[index]["labels"][start:stop] for index, start, stop in row]
            if name == "fixed_length" and row:
                tokens, labels = [list(chain(*tokens))], [list(chain(*labels))]
            expected = [
                (ids, [IGNORE_INDEX, *targets[1:]], list(range(len(ids))))
                for ids, targets in zip(tokens, labels, strict=True)
            ]
            if rest := width - sum(map(len, tokens)):
                expected.append(([9] * rest, [IGNORE_INDEX] * rest, list(range(rest))))
            assert found == expected


def test_ranks_of_fewer_batches_get_padding_that_trains_nothing() -> None:
    rows = [sum(map(len, batch)) for batch in plan("random_padding", [1, 2, 3], ranks=2, batch_size=1)]
    assert rows == [1, 1, 1, 0]
    batches = plan("exact_fit", [16, 16, 16], ranks=4)
    assert [[len(row) for row in batch] for batch in batches] == [[1, 1], [1, 0], [0, 0], [0, 0]]
    [last] = loader_of("minibatch_packing", samples_of([3, 4, 5]), batch_size=3, num_replicas=2, rank=1)
    assert (last.tokens.tolist(), last.num_trained.item(), last.num_tokens) == ([[0]], 0, 0)
    [packed] = loader_of("exact_fit", samples_of([3]), num_replicas=2, rank=1)
    assert packed.tokens.tolist() == [[0] * LIMIT] * 2


@pytest.mark.parametrize(("name", "workers"), [("random_padding", 0), ("exact_fit", 0), ("multipack", 1)])
def test_a_resume_goes_on_at_the_next_batch(name: str, workers: int) -> None:
    def tokens(batches: Any) -> list[Any]:
        return [batch.tokens.tolist() for batch in batches]

    whole = tokens(loader_of(name, epoch=1, num_workers=workers))
    resumed = loader_of(name, num_workers=workers)
    resumed.sampler.set_epoch(1, done=3)
    assert tokens(resumed) == whole[3:]
    count, later = len(resumed), tokens(resumed)
    assert len(later) == count
    assert later == tokens(loader_of(name, epoch=2)) != whole, "the next epoch, with an order of its own"


def test_fixed_length_warns() -> None:
    said = "lets the samples of a row see one another, which makes a worse"
    with pytest.warns(UserWarning, match=said) as warned:
        method_loader(samples_of(), method="fixed_length", max_seq_len=LIMIT, batch_size=4)
    assert warned[0].filename == __file__


@pytest.mark.parametrize(
    ("name", "data", "options", "message"),
    [
        ("multi_pack", samples_of([3]), {}, "method='multi_pack' is unknown; choose one of 'random_padding', 'group"),
        ("multi_pack", samples_of([3]), {}, "'random_packing', 'exact_fit'; did you mean 'multipack'?"),
        ("exact_fit", samples_of([3]), {"lengths": [1.5]}, "sample 0 has 1.5 tokens; give a whole number"),
        ("exact_fit", samples_of([99]), {"overlong": "drop"}, "there is no sample to make batches of"),
        ("multipack", iter(samples_of()), {}, "must know all lengths, and a list_iterator has no samples by number"),
        ("random_padding", samples_of([1]), {"lengths": [1, 2]}, "there are 2 lengths and 1 samples; give one for"),
        ("random_padding", samples_of([99]), {"max_seq_len": 99, "vocab_size": 50}, "sample 0: token id 50 is outside"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(name: str, data: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        loader_of(name, data, **options)
    assert message in str(error.value)
