"""Samples of which no token is trained: counted, told once, dropped or refused."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from streampack import IGNORE_INDEX, IterablePackedDataset, PackedDataLoader, PackedDataset, Sample
from streampack.accounting import trains_nothing
from streampack.sources.mixture import Mix
from tests.support.conformance import check_resume_everywhere
from tests.support.strategies import settings_of

ANSWER = 3


def chat(i: int, prompt: int) -> dict[str, Any]:
    """A masked prompt of so many tokens, and an answer."""
    return {
        "tokens": [i + 1] * (prompt + ANSWER),
        "labels": [IGNORE_INDEX] * prompt + [i + 1] * ANSWER,
    }


ROWS = [
    chat(i, prompt=(4, 30, 11)[i % 3]) for i in range(60)
]  # truncated to 16, every third has no answer left
CUT_OFF = [i for i in range(60) if i % 3 == 1]


def dataset(rows: Any = ROWS, **settings: Any) -> IterablePackedDataset:
    return IterablePackedDataset(rows, **{"max_seq_len": 16, "overlong": "truncate", **settings})


def ids(packs: Any) -> set[int]:
    return {int(token) - 1 for pack in packs for token in pack["tokens"] if token}


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("untrained", [None, "keep"])
def test_kept_samples_that_train_nothing_are_counted(side: str, untrained: str | None) -> None:
    data = dataset(truncate_side=side, untrained=untrained)
    assert ids(data) == set(range(60))
    ledger = data.ledger()
    assert ledger.untrained == (len(CUT_OFF) if side == "right" else 0)
    assert ledger.dropped_samples["untrained"] == 0
    assert ledger.as_dict()["untrained"] == ledger.untrained


def test_dropped_samples_that_train_nothing_are_in_the_ledger() -> None:
    data = dataset(untrained="drop")
    assert ids(data) == set(range(60)) - set(CUT_OFF)
    ledger = data.ledger()
    assert (ledger.untrained, ledger.dropped_samples["untrained"]) == (len(CUT_OFF), len(CUT_OFF))
    assert ledger.dropped["untrained"] == len(CUT_OFF) * (30 + ANSWER)
    assert ledger.dropped_samples["truncated"] == 0, "each loss has one reason"
    assert ledger.buffered == 0
    assert ledger.as_dict()["dropped_untrained"] == ledger.dropped["untrained"]


def test_a_sample_that_trains_nothing_is_named_and_not_consumed() -> None:
    stream = dataset(untrained="error", num_lanes=1).stream()
    for _ in range(2):
        with pytest.raises(ValueError) as error:
            next(stream)
        assert str(error.value) == (
            "sample 1 trains nothing: of the 16 tokens that overlong='truncate' leaves of its 33, none has a label to "
            "train; raise max_seq_len, choose another overlong, or set untrained to 'drop' or 'keep'"
        )
    masked = IterablePackedDataset(
        [{"tokens": [5, 6], "labels": [-100, -100]}], max_seq_len=8, untrained="error"
    )
    with pytest.raises(
        ValueError, match=r"sample 0 trains nothing: none of its 2 tokens has a label .*; look at its labels"
    ):
        list(masked)


def test_an_unknown_untrained_policy_is_refused() -> None:
    with pytest.raises(
        ValueError, match="untrained='skip' is unknown; choose one of 'keep', 'drop', 'error'"
    ):
        dataset(untrained="skip")


def test_a_split_sample_that_trains_nothing_counts_once() -> None:
    data = dataset(overlong="split")
    list(data)
    assert data.ledger().untrained == 0, "the answer is in the second piece"
    masked = [{"tokens": [7] * 40, "labels": [IGNORE_INDEX] * 40}, chat(1, 4)]
    for settings, packed in (({}, 47), ({"split_across_pack": True}, 47), ({"untrained": "drop"}, 7)):
        data = dataset(masked, overlong="split", **settings)
        list(data)
        assert (data.ledger().untrained, data.ledger().packed) == (1, packed)


@pytest.mark.parametrize(
    ("tokens", "labels", "nothing"),
    [
        ([5], [5], True),  # the first label of a sequence is never trained
        ([5, 6], [5, 6], False),
        ([5, 6], [5, -100], True),
        ([5, 6, 7], [-100, 6, -100], False),
        ([5, 6, 7], [-100, -100, -100], True),
    ],
)
def test_a_sample_is_untrained_if_only_its_first_label_is_trained(
    tokens: list[int], labels: list[int], nothing: bool
) -> None:
    assert trains_nothing(Sample(np.array(tokens), np.array(labels))) == nothing
    if tokens == labels:
        both = np.array(tokens)
        assert trains_nothing(Sample(both, both)) == nothing


@pytest.mark.parametrize("untrained", ["keep", "drop"])
@pytest.mark.parametrize("strategy", ["exact_fit", "wrap"])
def test_a_stream_with_samples_that_train_nothing_resumes_exactly(untrained: str, strategy: str) -> None:
    check_resume_everywhere(
        lambda: dataset(
            untrained=untrained, buffer_size=4, num_lanes=2, shuffle=True, **settings_of(strategy)
        ),
        packs=40,
    )


def test_a_state_that_dropped_untrained_samples_is_refused_where_they_are_kept() -> None:
    state = dataset(untrained="drop").state_dict()
    with pytest.raises(ValueError, match="untrained"):
        dataset().load_state_dict(state)
    # An error drops nothing, and may be lifted.
    dataset(untrained="error").load_state_dict(dataset().state_dict())


def test_a_mixture_drops_samples_that_train_nothing() -> None:
    mix = Mix([{"name": name, "source": ROWS, "weight": 1} for name in ("a", "b")])
    data = dataset(mix, untrained="drop")
    list(data)
    source_stats = data.source_stats()
    assert all(stats.trained and stats.samples for stats in source_stats.values())
    assert sum(stats.packed for stats in source_stats.values()) == data.ledger().packed
    assert data.ledger().dropped_samples["untrained"] == data.ledger().untrained > 0


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_warns_of_untrained_samples_once(workers: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        loader = PackedDataLoader(dataset(num_lanes=2), num_workers=workers)
        for _ in range(2):
            assert len(list(loader)) > 5
    [record] = [record for record in caplog.records if "train nothing" in record.message]
    assert "max_seq_len=16" in record.message
    assert "untrained='drop'" in record.message


def test_a_stream_warns_of_untrained_samples_once_unless_they_are_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        data = dataset()
        list(data), list(data)
        for untrained in ("keep", "drop"):
            list(dataset(untrained=untrained))
        list(dataset(truncate_side="left"))
    assert sum("train nothing" in record.message for record in caplog.records) == 1


def test_map_style_packs_count_and_drop_samples_that_train_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        packs = PackedDataset(ROWS, max_seq_len=16, overlong="truncate")
        assert packs.ledger().untrained == len(CUT_OFF)
        assert ids(packs[i] for i in range(len(packs))) == set(range(60))
        dropped = PackedDataset(ROWS, max_seq_len=16, overlong="truncate", untrained="drop")
        assert ids(dropped[i] for i in range(len(dropped))) == set(range(60)) - set(CUT_OFF)
        assert dropped.ledger().dropped["untrained"] == len(CUT_OFF) * (30 + ANSWER)
    assert sum("train nothing" in record.message for record in caplog.records) == 1
    with pytest.raises(ValueError, match="sample 1 trains nothing"):
        PackedDataset(ROWS, max_seq_len=16, overlong="truncate", untrained="error")
