"""Trees of requests: whatever lies in a pack, each request finds its own tokens before each of its predictors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack.scoring import prefixes
from streampack.scoring.pack import RequestPack, lay_out, plan_requests
from streampack.scoring.requests import Request

LIMIT = 48


def tokens_before(pack: RequestPack, place: int) -> list[int]:
    """Return what the token at a place attends to, by the batch's lengths and parents alone."""
    batch = pack.batch
    lengths = batch.seq_lens[0].tolist()
    parents = [-1] * len(lengths) if batch.groups is None else list(batch.groups.parents[0])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    segment = int(np.searchsorted(starts, place, side="right")) - 1
    tokens = batch.tokens[0].tolist()
    found = tokens[starts[segment] : place + 1]
    while (segment := parents[segment]) >= 0:
        found = tokens[starts[segment] : starts[segment + 1]] + found
    return list(found)


def request(tokens: list[int], wanted: list[bool]) -> Request:
    predictors = np.flatnonzero(wanted[: len(tokens)])
    return Request(np.array(tokens, np.int32), predictors, predictors + 100)


lists = st.lists(st.integers(0, 1), min_size=1, max_size=12)
asked = st.lists(
    st.tuples(st.integers(0, 3), lists, st.lists(st.booleans(), min_size=40, max_size=40)),
    min_size=1,
    max_size=30,
)


@pytest.mark.parametrize("share", [True, False])
@settings(max_examples=150, deadline=None)
@given(beginnings=st.lists(st.lists(st.integers(0, 1), max_size=28), min_size=4, max_size=4), asked=asked)
def test_each_request_finds_its_tokens(
    beginnings: list[list[int]], asked: list[tuple[int, list[int], list[bool]]], share: bool
) -> None:
    requests = [request([*beginnings[which], *rest], wanted) for which, rest, wanted in asked]
    packs = [lay_out(pack, requests) for pack in plan_requests(requests, max_seq_len=LIMIT, share=share)]
    answered = []
    for pack in packs:
        batch = pack.batch
        assert batch.tokens.shape[1] <= LIMIT
        assert batch.tokens.shape == batch.input_pos.shape == (1, int(batch.seq_lens.sum()))
        assert share or batch.groups is None
        for each in pack.asked:
            one = requests[each.number]
            answered.append(each.number)
            assert each.targets.tolist() == one.targets.tolist()
            for place, predictor in zip(each.places, one.predictors, strict=True):
                assert tokens_before(pack, place) == one.tokens[: predictor + 1].tolist()
                assert batch.input_pos[0, place] == predictor
    assert sorted(answered) == list(range(len(requests)))


def sizes(requests: list[list[int]], *, share: bool = True, limit: int = 1000) -> list[int]:
    made = [request(tokens, [True] * len(tokens)) for tokens in requests]
    return [tree.size for tree in prefixes.share_prefixes(made, limit=limit, branch=share)]


def test_what_requests_begin_with_is_there_once() -> None:
    question, other = list(range(20)), list(range(20, 60))
    answers = [[*question, 7, 8], [*question, 9], [*question, 7, 8], question, [*question, 9, 9, 9]]
    assert sizes(answers) == [20 + 2 + 3]
    assert sizes([*answers, other]) == [25, 40]
    # Without sharing, only those that another begins with are left out.
    assert sizes(answers, share=False) == [22, 23]
    # Two levels: examples before questions, and two answers to each.
    deep = [[*question, *([number] * 10), answer] for number in range(3) for answer in (50, 51)]
    assert sizes(deep) == [20 + 3 * (10 + 2)]


def test_little_is_not_shared() -> None:
    few = list(range(prefixes.LEAST_SHARED - 1))
    assert sizes([[*few, 50], [*few, 51]]) == [16, 16]
    long = [99] * 100  # a fifth of the whole would make large trees, which are hard to pack
    assert sizes([[*range(25), *long, 1], [*range(25), 5, *long]]) == [126, 126]


def test_a_short_branch_gets_no_segment_of_its_own() -> None:
    question = list(range(20))
    requests = [request([*question, *end], [True] * 30) for end in ([29], [30, 31], [30, 32])]
    [tree] = prefixes.share_prefixes(requests, limit=100, branch=True)
    # The third answer begins like the second one with a single token, which is repeated.
    assert sorted((node.start, node.stop) for node in tree.segments()) == [
        (0, 20),
        (20, 21),
        (20, 22),
        (20, 22),
    ]


def test_a_tree_does_not_outgrow_a_pack() -> None:
    question = list(range(30))
    answers = [[*question, number, number] for number in range(40, 70)]
    found = sizes(answers, limit=50)
    assert found == [50, 50, 50]
    assert sum(sizes(answers, limit=10**6)) == 30 + 2 * 30
