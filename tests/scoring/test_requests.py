"""Requests: what is read and asked for, in every form that users have, and what is too long for a pack."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from streampack import Group, Sample
from streampack.scoring.requests import Request, fit, read_request


def shown(request: Request) -> tuple[list[int], list[int], list[int]]:
    return request.tokens.tolist(), request.predictors.tolist(), request.targets.tolist()


@pytest.mark.parametrize(
    "given",
    [
        ([5, 6], [7, 8]),
        [[5, 6], [7, 8]],
        (torch.tensor([5, 6]), np.array([7, 8])),
        {"context": [5, 6], "continuation": [7, 8]},
        {"tokens": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]},
        {"input_ids": [5, 6, 7, 8], "completion_mask": [0, 0, 1, 1]},
        Sample(np.array([5, 6, 7, 8]), np.array([5, -100, 7, 8])),  # nothing predicts the first
    ],
)
def test_every_form_of_a_continuation(given: Any) -> None:
    assert shown(read_request(given)) == ([5, 6, 7], [1, 2], [7, 8])


def test_ids_alone_are_scored_but_the_first() -> None:
    for given in ([5, 6, 7], {"input_ids": [5, 6, 7]}, torch.tensor([5, 6, 7])):
        assert shown(read_request(given)) == ([5, 6], [0, 1], [6, 7])
    assert shown(read_request([5, 6])) == ([5], [0], [6])  # two ids are no pair


def test_what_nothing_is_asked_of_is_not_read() -> None:
    assert shown(read_request(([5, 6], []))) == ([], [], [])
    assert shown(read_request({"tokens": [5, 6, 7, 8], "labels": [-100, 6, -100, -100]})) == ([5], [0], [6])
    assert fit(read_request(([5, 6], [])), 4, overlong="error") == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ([], [7]),
            "an empty context, and nothing predicts the first token of its continuation; begin the context",
        ),
        (([5], [16]), "token id 16 is outside the vocabulary of 16 ids"),
        (([-1], [7]), "token id -1 is outside"),
        (([5], ["a"]), "column 'the continuation' has shape"),
        ("text", "Texts need an encoder"),
        ({"text": "a"}, "column 'tokens' is missing"),
        (Group([5, 6, 7], [5, 6, 7], lengths=[1, 1, 1], parents=[-1, 0, 0]), r"samples of group.answers\(\)"),
    ],
)
def test_what_is_no_request(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_request(given, vocab_size=16)


def naive_windows(tokens: list[int], limit: int) -> list[tuple[list[int], list[int]]]:
    """Return context and scored tokens of windows: disjoint ones, of which the last takes all the context it can."""
    windows = []
    done = 1
    while done < len(tokens):
        stop = min(done + limit, len(tokens))
        start = max(0, stop - 1 - limit)
        windows.append((tokens[start:done], tokens[done:stop]))
        done = stop
    return windows


@pytest.mark.parametrize("length", [2, 5, 6, 7, 11, 12, 23])
def test_windows_score_each_token_once(length: int) -> None:
    tokens = list(range(100, 100 + length))
    expected = [
        ([*before, *after][:-1], [len(before) - 1 + i for i in range(len(after))], after)
        for before, after in naive_windows(tokens, 5)
    ]
    assert [shown(part) for part in fit(read_request(tokens), 5, overlong="windows")] == expected


def test_too_long() -> None:
    request = read_request(([1, 2, 3, 4, 5, 6], [7, 8]))
    with pytest.raises(ValueError, match="has 7 tokens before its last one, and max_seq_len=6; raise"):
        fit(request, 6, overlong="error")
    [cut] = fit(request, 6, overlong="truncate")
    assert shown(cut) == ([2, 3, 4, 5, 6, 7], [4, 5], [7, 8])
    # Of a continuation that is too long itself, the end is left.
    [end] = fit(read_request(([1], [2, 3, 4, 5])), 2, overlong="truncate")
    assert shown(end) == ([3, 4], [0, 1], [4, 5])
    # A window in which nothing is asked for is not computed.
    assert [shown(part) for part in fit(request, 4, overlong="windows")] == [([4, 5, 6, 7], [2, 3], [7, 8])]
