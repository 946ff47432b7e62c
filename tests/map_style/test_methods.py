from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.map_style.methods import METHODS, Row, plan_batches
from streampack.packing.planner import Span, plan_packs
from streampack.sources.base import permutation

LIMIT = 16
LENGTHS = [int(length) for length in np.random.default_rng(0).integers(1, LIMIT + 1, 60)]
lengths_of = st.lists(st.integers(1, LIMIT), min_size=8, max_size=50)
names = pytest.mark.parametrize("name", METHODS)


def plan(name: str, lengths: list[int] = LENGTHS, **settings: Any) -> list[list[Row]]:
    return plan_batches(name, lengths, **{"max_seq_len": LIMIT, "batch_size": 2, **settings})


def numbers(batches: list[list[Row]]) -> list[list[list[int]]]:
    return [[[span.index for span in row] for row in batch] for batch in batches]


def order_of(lengths: list[int], *, seed: int = 0, epoch: int = 0) -> list[int]:
    return permutation(len(lengths), seed, epoch).tolist()


def in_pairs(items: list[Any]) -> list[list[Any]]:
    return [items[i : i + 2] for i in range(0, len(items), 2)]


def greedily(order: list[int], lengths: list[int]) -> list[list[int]]:
    """Begin a new row when the next sample does not fit."""
    rows: list[list[int]] = [[]]
    for i in order:
        if sum(lengths[j] for j in rows[-1]) + lengths[i] > LIMIT:
            rows.append([])
        rows[-1].append(i)
    return rows


@names
@given(lengths=lengths_of, batch_size=st.integers(1, 4), ranks=st.integers(1, 2), epoch=st.integers(0, 2))
def test_every_token_exactly_once(
    name: str, lengths: list[int], batch_size: int, ranks: int, epoch: int
) -> None:
    batches = plan(name, lengths, batch_size=batch_size, num_replicas=ranks, epoch=epoch)
    assert len(batches) % ranks == 0, "every rank has as many batches"
    spans = sorted(chain.from_iterable(chain.from_iterable(batches)))
    tokens = [(index, at) for index, start, stop in spans for at in range(start, stop)]
    assert tokens == [(index, at) for index, length in enumerate(lengths) for at in range(length)]
    if not METHODS[name].cuts:
        assert [stop for _, _, stop in spans] == lengths, "no sample is cut"
    for batch in batches:
        if METHODS[name].packed:
            assert len(batch) == batch_size
            assert all(sum(stop - start for _, start, stop in row) <= LIMIT for row in batch)
        else:
            samples = sum(map(len, batch))
            assert samples <= batch_size


def test_random_padding() -> None:
    assert numbers(plan("random_padding")) == in_pairs([[i] for i in order_of(LENGTHS)])


def test_group_by_length_is_that_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = pytest.importorskip("transformers.trainer_pt_utils")
    import torch

    for count, size in ((60, 2), (7, 4), (60, 1), (500, 2)):
        lengths = (np.random.default_rng(count).permutation(count) + 1).tolist()
        order = torch.tensor(order_of(lengths, epoch=1))
        monkeypatch.setattr(torch, "randperm", lambda count, generator=None, order=order: order)
        theirs = trainer.get_length_grouped_indices(lengths, size)
        ours = plan("group_by_length_padding", lengths, max_seq_len=count, batch_size=size, epoch=1)
        assert list(chain.from_iterable(chain.from_iterable(numbers(ours)))) == theirs


def test_minibatch_packing_has_the_samples_of_random_padding() -> None:
    padded = numbers(plan("random_padding"))
    assert numbers(plan("minibatch_packing")) == [[list(chain.from_iterable(batch))] for batch in padded]


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


def test_random_packing() -> None:
    rows = greedily(order_of(LENGTHS), LENGTHS)
    assert numbers(plan("random_packing")) == in_pairs(rows + [[]] * (len(rows) % 2))


def test_sorted_packing() -> None:
    rows = greedily(sorted(order_of(LENGTHS), key=lambda i: -LENGTHS[i]), LENGTHS)
    assert numbers(plan("sorted_packing")) == in_pairs(rows + [[]] * (len(rows) % 2))


def test_exact_fit_packs_as_a_stream() -> None:
    order = order_of(LENGTHS)
    packs = plan_packs([LENGTHS[i] for i in order], LIMIT)
    rows = [[order[index] for index, _, _ in pack] for pack in packs]
    assert numbers(plan("exact_fit")) == in_pairs(rows + [[]] * (len(rows) % 2))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_multipack_gives_the_batches_of_a_step_even_costs(ranks: int) -> None:
    """Rows of a step are dealt out in turn from the costliest on, and every rank gets one of each turn."""
    from streampack.map_style.multipack import plan_steps

    order = order_of(LENGTHS)
    steps = plan_steps([LENGTHS[i] for i in order], max_tokens=LIMIT, packs_per_step=12)
    batches = numbers(plan("multipack", num_replicas=ranks, packs_per_step=12))
    at_once = 2 * ranks
    for step, made in zip(steps, [batches[i : i + 6] for i in range(0, len(batches), 6)], strict=True):
        for block in range(12 // at_once):
            rows = [[order[i] for i in row] for row in step[block * at_once : (block + 1) * at_once]]
            for rank in range(ranks):
                assert made[block * ranks + rank] == [rows[rank], rows[rank + ranks]]


def test_ranks_of_fewer_batches_get_padding() -> None:
    batches = plan("random_padding", [1, 2, 3], num_replicas=2, batch_size=1)
    assert [sum(map(len, batch)) for batch in batches] == [1, 1, 1, 0]
    assert batches[-1] == [[]]
    batches = plan("exact_fit", [16, 16, 16], num_replicas=4)
    assert [[len(row) for row in batch] for batch in batches] == [[1, 1], [1, 0], [0, 0], [0, 0]]


@names
def test_the_order_is_a_function_of_seed_and_epoch(name: str) -> None:
    first = plan(name)
    assert plan(name) == first
    assert plan(name, epoch=1) != first
    assert plan(name, seed=1) != first
    assert plan(name, seed=1, epoch=1) != plan(name, epoch=1)


@names
def test_overlong(name: str) -> None:
    lengths = [3, 40, 16, 5]
    cuts = METHODS[name].cuts

    def kept(overlong: str | None) -> list[Span]:
        return sorted(chain.from_iterable(chain.from_iterable(plan(name, lengths, overlong=overlong))))

    def tokens(spans: list[Span]) -> dict[int, int]:
        found = dict.fromkeys(range(4), 0)
        for index, start, stop in spans:
            found[index] += stop - start
        return found

    assert tokens(kept("truncate")) == {0: 3, 1: 16, 2: 16, 3: 5}
    assert tokens(kept("drop")) == {0: 3, 1: 0, 2: 16, 3: 5}
    assert tokens(kept("split")) == {0: 3, 1: 40, 2: 16, 3: 5}
    if cuts:
        assert kept(None) == kept("split")
    else:
        assert [span for span in kept("split") if span.index == 1] == [(1, 0, 16), (1, 16, 32), (1, 32, 40)]
        with pytest.raises(ValueError) as error:
            kept(None)
        assert str(error.value) == (
            "sample 1 has 40 tokens, max_seq_len is 16; set overlong to 'split', 'truncate' or 'drop', or raise "
            "max_seq_len"
        )


@pytest.mark.parametrize(
    ("lengths", "settings", "message"),
    [
        (
            [3],
            {"name": "multi_pack"},
            "method='multi_pack' is unknown; choose one of 'random_padding', 'group_by_length_padding', "
            "'minibatch_packing', 'fixed_length', 'fixed_length_posid', 'multipack', 'sorted_packing', "
            "'random_packing', 'exact_fit'; did you mean 'multipack'?",
        ),
        ([3, 0], {}, "sample 1 has 0 tokens; remove it, or drop empty samples before packing"),
        ([3, 1.5], {}, "sample 1: its length 1.5 is not a whole number"),
        ([], {}, "there is no sample to make batches of; give at least one that is not dropped"),
        (
            [99],
            {"overlong": "drop"},
            "there is no sample to make batches of; give at least one that is not dropped",
        ),
        ([3], {"batch_size": 0}, "batch_size=0 is below 1; give at least 1"),
        ([3], {"num_replicas": 0}, "num_replicas=0 is below 1; give at least 1"),
        (
            [3],
            {"name": "multipack", "packs_per_step": 3},
            "packs_per_step=3 is no multiple of 2, the packs that all ranks take at once; make it one, so that every "
            "rank gets as many",
        ),
    ],
)
def test_bad_input_is_refused(lengths: list[int], settings: dict[str, Any], message: str) -> None:
    settings = {"name": "exact_fit", **settings}
    with pytest.raises(ValueError) as error:
        plan(settings.pop("name"), lengths, **settings)
    assert str(error.value) == message
