"""`Ledger`: where the tokens of a run are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack import Ledger

REASONS = Ledger().dropped.keys()
counts = st.integers(0, 10**9)


@st.composite
def ledgers(draw: st.DrawFn) -> Ledger:
    dropped, dropped_samples = ({reason: draw(counts) for reason in REASONS} for _ in range(2))
    return Ledger(*(draw(counts) for _ in range(6)), dropped, dropped_samples)


@given(st.lists(ledgers(), max_size=4))
def test_total_adds_every_count(parts: list[Ledger]) -> None:
    total = Ledger.total(parts)
    for name in total.as_dict().keys() - {"padding"}:
        assert total.as_dict()[name] == sum(part.as_dict()[name] for part in parts), name
    for reason in REASONS:
        assert total.dropped[reason] == sum(part.dropped[reason] for part in parts)
        assert total.dropped_samples[reason] == sum(part.dropped_samples[reason] for part in parts)
    total.drop("overlong", 1)
    assert not parts or total.dropped["overlong"] > sum(part.dropped["overlong"] for part in parts), "shared"


def test_drops_are_booked_by_name() -> None:
    ledger = Ledger(samples=3, tokens_in=20)
    ledger.drop("truncated", 4)
    ledger.drop("truncated", 2)
    ledger.drop("bad", 0)
    assert ledger.dropped == dict.fromkeys(REASONS, 0) | {"truncated": 6}
    assert ledger.dropped_samples == dict.fromkeys(REASONS, 0) | {"truncated": 2, "bad": 1}
    assert ledger.buffered == 14
    with pytest.raises(KeyError):
        ledger.drop("bad luck", 1)
