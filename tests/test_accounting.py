from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack import Ledger, Sample
from streampack.accounting import DROP_REASONS, SourceStats, trained_tokens

counts = st.integers(0, 10**9)


@st.composite
def ledgers(draw: st.DrawFn) -> Ledger:
    return Ledger(
        *(draw(counts) for _ in range(7)),
        {reason: draw(counts) for reason in DROP_REASONS},
        {reason: draw(counts) for reason in DROP_REASONS},
    )


@given(ledgers())
def test_numbers_round_trip(ledger: Ledger) -> None:
    assert Ledger.from_numbers(ledger.numbers()) == ledger
    assert len(ledger.numbers()) == 7 + 2 * len(DROP_REASONS)


@given(st.lists(ledgers(), max_size=4))
def test_total_adds_every_count(parts: list[Ledger]) -> None:
    total = Ledger.total(parts)
    for name in (
        "samples",
        "tokens_in",
        "packs",
        "capacity",
        "packed",
        "untrained",
        "bad_shards",
        "buffered",
    ):
        assert getattr(total, name) == sum(getattr(part, name) for part in parts)
    for reason in DROP_REASONS:
        assert total.dropped[reason] == sum(part.dropped[reason] for part in parts)
        assert total.dropped_samples[reason] == sum(part.dropped_samples[reason] for part in parts)


def test_source_stats_add_up() -> None:
    assert SourceStats.total([SourceStats(1, 2, 3, 4, 5), SourceStats(10, 20, 30, 40, 50)]) == SourceStats(
        11, 22, 33, 44, 55
    )
    assert SourceStats(1, 2, 3, 4, 5).numbers() == [1, 2, 3, 4, 5]


def test_ledgers_share_nothing() -> None:
    a, b = Ledger(), Ledger()
    a.drop("overlong", 5)
    assert sum(b.dropped.values()) == 0
    total = Ledger.total([a])
    total.drop("overlong", 1)
    assert (a.dropped["overlong"], a.dropped_samples["overlong"]) == (5, 1)


def test_drops_are_booked_by_name() -> None:
    ledger = Ledger(samples=3, tokens_in=20)
    ledger.drop("truncated", 4)
    ledger.drop("truncated", 2)
    ledger.drop("empty", 0)
    assert ledger.dropped == {
        "overlong": 0,
        "truncated": 6,
        "empty": 0,
        "bad": 0,
        "untrained": 0,
        "removed": 0,
    }
    assert ledger.dropped_samples == {
        "overlong": 0,
        "truncated": 2,
        "empty": 1,
        "bad": 0,
        "untrained": 0,
        "removed": 0,
    }
    assert ledger.buffered == 14
    with pytest.raises(KeyError):
        ledger.drop("bad luck", 1)


def test_as_dict_is_flat_numbers() -> None:
    ledger = Ledger(samples=2, tokens_in=12, packs=1, capacity=10, packed=9)
    ledger.drop("overlong", 1)
    assert ledger.as_dict() == {
        "samples": 2,
        "tokens_in": 12,
        "packs": 1,
        "capacity": 10,
        "packed": 9,
        "untrained": 0,
        "bad_shards": 0,
        "dropped_overlong": 1,
        "dropped_truncated": 0,
        "dropped_empty": 0,
        "dropped_untrained": 0,
        "dropped_removed": 0,
        "bad_records": 0,
        "buffered": 2,
        "padding": pytest.approx(0.1),
    }


@given(st.integers(1, 12), st.data())
def test_trained_tokens_are_the_same_with_shared_and_separate_labels(
    length: int, data: st.DataObject
) -> None:
    tokens = np.arange(length)
    cuts = sorted(data.draw(st.sets(st.integers(1, length - 1)))) if length > 1 else []
    assert trained_tokens(Sample(tokens, tokens), cuts) == trained_tokens(Sample(tokens, tokens.copy()), cuts)
