"""Rows that are held out for validation: the same ones whatever reads them, of a source or of those of a mixture."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streampack import IterablePackedDataset, MapSource, Mix
from streampack.sources import Holdout, Reading
from streampack.sources.holdout import hold_out  # private: behind ``data.validation.fraction`` of a config
from tests.harness.corpus import all_of, samples_in
from tests.harness.corpus import rows as numbers
from tests.harness.mixtures import APART, make, shifted, three

PARTS = ("train", "validation")


def rows(count):
    return [{"tokens": [i, i], "labels": [i, i]} for i in range(count)]


def both(source, fraction=0.2):
    return [Holdout(source, fraction=fraction, part=part) for part in PARTS]


def read(source, num_lanes=1, **kwargs):
    return [
        row.data["tokens"][0]
        for lane in range(num_lanes)
        for row in source.read(Reading(lane, num_lanes=num_lanes, **kwargs))
    ]


@given(st.integers(1, 200), st.floats(0.01, 0.99), st.integers(1, 5))
def test_parts_are_disjoint_and_complete_on_any_lanes(count, fraction, lanes):
    train, held_out = both(MapSource(rows(count)), fraction)
    assert sorted(read(train, lanes) + read(held_out, lanes)) == list(range(count))
    assert set(read(train, lanes)) == set(read(train))


def test_the_fraction_is_about_right():
    _, held_out = both(MapSource(rows(5000)), 0.1)
    assert 420 < len(read(held_out)) < 580


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-100, 100), max_size=8), st.integers(0, 7))
def test_equal_rows_are_in_the_same_part_whatever_holds_their_ids(ids, number):
    """As lists, tuples, tensors, and arrays of every type that holds the ids."""
    forms = [ids, tuple(ids), torch.tensor(ids, dtype=torch.int64), np.array(ids, np.int64)]
    forms += [
        np.array(ids, kind)
        for kind in (np.int8, np.int16, np.int32, np.uint8, np.uint16, np.uint32, np.uint64)
        if all(np.iinfo(kind).min <= i <= np.iinfo(kind).max for i in ids)
    ]
    part = Holdout(MapSource(rows(1)), fraction=0.5, part="train")
    assert len({part.keeps({"n": number, "tokens": form, "labels": form}) for form in forms}) == 1
    assert len({part.keeps({"n": number, "tokens": form, "labels": list(ids)}) for form in forms}) == 1


@pytest.mark.parametrize(("kwargs", "message"), [
    ({"fraction": 0, "part": "train"}, "fraction=0 of the rows cannot be held out"),
    ({"fraction": 1.0, "part": "train"}, "give a number between 0 and 1"),
    ({"fraction": 0.1, "part": "test"}, "part='test' is unknown"),
])  # fmt: skip
def test_settings_are_checked(kwargs, message):
    with pytest.raises(ValueError, match=message):
        Holdout(MapSource(rows(3)), **kwargs)


class Unhashable:
    """A value that is no plain value and cannot be pickled."""

    def __reduce_ex__(self, _):
        raise TypeError("cannot be pickled")


def test_a_row_whose_content_cannot_be_hashed_is_a_bad_record() -> None:
    bad = (7, 40, 41, 99)
    corpus = [{**row, "image": Unhashable() if i in bad else None} for i, row in enumerate(rows(100))]
    kept = []
    for part in both(MapSource(corpus)):
        dataset = IterablePackedDataset(part, max_seq_len=20, skip_bad=True, shuffle=True, epochs=1)
        kept += [token for pack in dataset for token in pack["tokens"].tolist()]
        assert dataset.ledger().dropped_samples["bad"] == len(bad)
        with pytest.raises(TypeError, match=r"cannot be pickled\nwhile reading sample 7"):
            list(IterablePackedDataset(part, max_seq_len=20, num_lanes=1, shuffle=False))
    assert set(kept) == set(range(100)) - set(bad)


class Late(dict[str, Any]):
    """A row whose values are read when they are looked at, from a storage that fails once."""

    errors = [OSError("gone")]  # noqa: RUF012

    def get(self, name: str, default: Any = None) -> Any:
        if self.errors:
            raise self.errors.pop()
        return super().get(name, default)


def test_a_row_that_an_error_of_the_storage_strikes_is_read_again() -> None:
    corpus: list[dict[str, Any]] = rows(9)
    part = max(both(MapSource(corpus), 0.5), key=lambda each: each.keeps(corpus[3]))
    expected = read(part)
    corpus[3] = Late(corpus[3])
    reader = part.read(Reading())
    found = [next(reader).data["tokens"][0] for _ in range(expected.index(3))]
    with pytest.raises(OSError, match="gone"):
        next(reader)
    assert found + read(part, start=reader.cursor) == expected


def test_a_mixture_behind_a_holdout_is_refused() -> None:
    data = make(Holdout(three(), fraction=0.5, part="train"))
    with pytest.raises(RuntimeError, match="hold rows out of its sources, not of the whole"):
        list(data)


def test_a_fraction_is_held_out_of_every_source() -> None:
    train, held_out = hold_out(three("all_exhausted", (1, 1, 1)), fraction=0.3)
    assert isinstance(held_out, Mix)
    assert (train.stop, held_out.stop) == ("all_exhausted", "first_exhausted")  # type: ignore[attr-defined]
    assert held_out.names == ["short", "middling", "long"]
    found = [samples_in(make(part, num_lanes=1)) for part in (train, held_out)]
    assert not set(found[0]) & set(found[1])
    everything = all_of(row for i in range(3) for row in shifted(numbers(60), APART * i))
    assert set(found[0]) < set(everything)
    assert {i // APART for i in found[1]} == {0, 1, 2}
    alone = hold_out(MapSource(numbers(30)), fraction=0.3)
    assert all(isinstance(part, Holdout) for part in alone)


def test_a_fraction_is_held_out_of_the_sources_that_are_named() -> None:
    small = three("all_exhausted", (1, 1, 1), short=1)
    train, held_out = hold_out(small, fraction={"middling": 0.3, "long": 0.6, "short": 0})
    assert held_out.names == ["middling", "long"]
    found = [samples_in(make(part, num_lanes=1)) for part in (train, held_out)]
    assert not set(found[0]) & set(found[1])
    assert 0 in found[0], "the one row of the small source"
    assert {i // APART for i in found[1]} == {1, 2}
    assert [entry.source.fraction for entry in held_out.entries] == [0.3, 0.6]  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="out of 'other', and the sources are short, middling, long"):
        hold_out(small, fraction={"other": 0.1})
    with pytest.raises(ValueError, match="out of 'short', and the sources are no mixture"):
        hold_out(MapSource(numbers(30)), fraction={"short": 0.1})
    with pytest.raises(ValueError, match="nothing is held out of any source"):
        hold_out(small, fraction={"long": 0})
