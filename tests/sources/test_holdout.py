import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack import IterablePackedDataset
from streampack.sources import Holdout, MapSource, Reading
from streampack.sources.holdout import PARTS


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


def test_added_rows_move_no_other_row():
    _, before = both(MapSource(rows(100)))
    _, after = both(MapSource(rows(200)))
    assert [i for i in read(after) if i < 100] == read(before)


def test_the_fingerprint_depends_on_the_fraction():
    source = MapSource(rows(100))
    prints = {Holdout(source, fraction=s, part=p).fingerprint() for s in (0.1, 0.2) for p in PARTS}
    assert len(prints) == 4


def test_the_estimate_counts_only_its_part():
    train, held_out = both(MapSource(rows(4000)), 0.25)
    packs = [IterablePackedDataset(part, max_seq_len=20).estimate().packs for part in (train, held_out)]
    assert 240 < packs[0] < 360
    assert 60 < packs[1] < 140


@pytest.mark.parametrize(("kwargs", "message"), [
    ({"fraction": 0, "part": "train"}, "fraction=0 of the rows cannot be held out"),
    ({"fraction": 1.0, "part": "train"}, "give a number between 0 and 1"),
    ({"fraction": 0.1, "part": "test"}, "part='test' is unknown"),
])  # fmt: skip
def test_settings_are_checked(kwargs, message):
    with pytest.raises(ValueError, match=message):
        Holdout(MapSource(rows(3)), **kwargs)
