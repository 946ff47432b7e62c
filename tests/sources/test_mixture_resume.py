"""Mixtures resume at every pack, skip broken records, and keep their states small."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from streampack import (
    IterablePackedDataset,
    Mix,
    PackedDataLoader,
    Sample,
)
from streampack.accounting import Ledger, SourceStats
from streampack.sources import Reading
from streampack.sources.base import Reader
from streampack.sources.mixture import TOTAL_WEIGHT
from streampack.sources.mixture_scheduler import FRONT, SourceState
from streampack.streaming.lane_state import LaneState
from streampack.streaming.row_log import digit_bits
from tests.support.conformance import check_cursors, check_resume_everywhere, content
from tests.support.corpus import Numbers, rows, samples_in, write
from tests.support.mixtures import (
    APART,
    ENDLESS,
    ONCE,
    SHUFFLED,
    TWICE,
    entry,
    make,
    shifted,
    three,
    training,
)

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("all-twice", "all_exhausted", {**TWICE, **SHUFFLED, "num_lanes": 2}),
    ("first-twice", "first_exhausted", {**TWICE, **SHUFFLED, "num_lanes": 3}),
    ("first-endless", "first_exhausted", {**ENDLESS, **SHUFFLED, "num_lanes": 2}),
    ("all-endless-wrap", "all_exhausted", {**ENDLESS, **SHUFFLED, "num_lanes": 2, "split_across_pack": True}),
    ("never-split", "never", {**ENDLESS, **SHUFFLED, "num_lanes": 2, "overlong": "split", "max_seq_len": 9}),
    ("never-drop", "never", {**ENDLESS, "num_lanes": 1, "overlong": "drop", "max_seq_len": 14}),
    ("all-truncate", "all_exhausted", {**ONCE, "overlong": "truncate", "max_seq_len": 14, "strategy": "best_fit"}),
]  # fmt: skip


FEW = {"short": 24, "middling": 16, "long": 10}  # so that epochs end within the packs that are looked at


@pytest.mark.parametrize(("kind", "settings"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_resume_at_every_pack(kind: str, settings: dict[str, Any]) -> None:
    packs = check_resume_everywhere(lambda: make(three(kind, **FEW), **settings), packs=30)
    assert len(packs) > 8


def test_source_stats_after_a_resume_are_those_of_an_unbroken_run() -> None:
    settings = {**ENDLESS, **SHUFFLED, "num_lanes": 2}
    whole = make(three("never"), **settings)
    for _ in islice(whole, 45):
        pass
    state = None
    for _ in range(15):
        part = make(three("never"), **settings)
        if state is not None:
            part.load_state_dict(state)
        for _ in islice(part, 3):
            pass
        state = part.state_dict()
    assert state == whole.state_dict()
    assert part.source_stats() == whole.source_stats()
    source_stats, ledger = whole.source_stats(), whole.ledger()
    assert list(source_stats) == ["short", "middling", "long"]
    for name in ("samples", "tokens_in", "packed"):
        assert sum(getattr(stats, name) for stats in source_stats.values()) == getattr(ledger, name)


def test_workers_make_the_batches_of_one_process_and_their_state_can_be_saved(tmp_path: Path) -> None:
    """Two worker processes make the same batches and counts as one process; their state is plain."""
    settings = {**ENDLESS, **SHUFFLED, "num_lanes": 4}
    batches, loaders = [], []
    for workers in (0, 2):
        loader = PackedDataLoader(make(three("never"), **settings), batch_size=3, num_workers=workers)
        batches.append([batch.tokens.tolist() for batch in islice(loader, 20)])
        loaders.append(loader)
    assert batches[0] == batches[1]
    assert loaders[0].source_stats() == loaders[1].source_stats()
    assert sum(stats.packed for stats in loaders[0].source_stats().values()) == loaders[0].ledger().packed
    state = loaders[0].state_dict()
    torch.save(state, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == state
    assert state["weights"] == {"short": 0.7, "middling": 0.2, "long": 0.1}


@pytest.mark.parametrize("seed", [0, 1, 4, 5])
def test_reading_resumes_at_every_cursor(seed: int) -> None:
    class Charged(Reader):
        """A reader that charges each row at once, as a lane does, and whose cursor holds the front."""

        def __init__(self, mix: Mix, start: Any) -> None:
            front = 3 * FRONT
            self.reader = mix.read(Reading(seed=seed, shuffle_window=1, start=start and start[front:]))
            if start is not None:
                self.reader.restore_front(start[:front])

        @property
        def cursor(self) -> Any:
            return *self.reader.front, *self.reader.cursor

        def __next__(self) -> Any:
            row = next(self.reader)
            front = self.reader.front
            self.reader.charge(training(row.data["n"]))
            return row._replace(cursor=(*front, *row.cursor))

        def skip(self) -> None: ...

    mix = three(("all_exhausted", "first_exhausted")[seed % 2], short=6, middling=5, long=3)
    found = check_cursors(lambda start: Charged(mix, start), announced=False)
    assert len(found) >= 5


def test_a_lane_state_with_the_largest_numbers_stays_small() -> None:
    """Shards of 1 TB, a billion rows, 2^40 tokens of each source, deficits of 2^18 tokens."""
    sources, pieces = 6, 300
    place = SourceState(restarts=9, cursor=(10_000, 2**40, 2047)).place()
    front = SourceState(-TOTAL_WEIGHT * 2**18, restarts=9, untrained=900, begun=0).front()
    state = LaneState(
        packs=2**31,
        done=False,
        epoch=0,
        cursor=(*place * sources,),
        first=2**33,
        offset=0,
        next_piece=2**33 + pieces,
        consumed=2**pieces - 1,
        ledger=Ledger(samples=2**33, tokens_in=2**43, packs=2**31, capacity=2**43, packed=2**43),
        rows=2 ** (digit_bits(sources) * pieces) - 1,
        windows=((3, 0, (2**22, 10_000, 2**40, 1000, 1000, 48)),) * sources,
        front=front * sources,
        source_stats=(SourceStats(epochs=9, samples=2**30, tokens_in=2**40, packed=2**40, trained=2**40),)
        * sources,
    )
    assert (
        len(pickle.dumps(state.as_dict())) <= 350 + pieces / 4 + 100 * sources + pieces * 3 / 4 + 32 * sources
    )
    assert LaneState.from_dict(state.as_dict()) == state


def test_errors_consume_nothing() -> None:
    expected = [content(pack) for pack in islice(make(three(), **ENDLESS, num_lanes=1), 40)]
    mix, encoder = three(), Numbers()
    encoder.bad = APART + 7
    data = make(mix, **ENDLESS, num_lanes=1, encoder=encoder)
    iterator, found = iter(data), []
    with pytest.raises(ValueError, match="^middling: sample 7: cannot be encoded$"):
        while True:
            found.append(content(next(iterator)))
    with pytest.raises(ValueError, match="middling: sample 7"):
        next(iterator)
    encoder.bad = None
    assert found + [content(pack) for pack in islice(iterator, 40 - len(found))] == expected
    assert len(found) < 40


def test_broken_records_are_skipped(tmp_path: Path) -> None:
    """Every seventh row of each source cannot be encoded, and every ninth line of two of them is no JSON."""
    for i, path in enumerate(paths := [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]):
        lines = write(path, shifted(rows(60, longest=14, seed=i), APART * i)).read_text().splitlines()
        path.write_text("".join("{\n" if k % 9 == 0 else f"{line}\n" for k, line in enumerate(lines)))

    class Sevenths(Numbers):
        def __call__(self, row: Mapping[str, Any], /) -> Sample:
            if row["i"] % 7 == 0:
                raise ValueError("is a seventh")
            return super().__call__(row)

    def make_it() -> IterablePackedDataset:
        mix = Mix([entry("a", paths[0], 2), entry("b", paths[1]), entry("c", shifted(rows(60), 2 * APART))])
        settings = {**TWICE, **SHUFFLED, "num_lanes": 2, "on_bad_record": "skip", "max_bad_records": 1000}
        return make(mix, encoder=Sevenths(), quarantine=tmp_path / "bad", **settings)

    check_resume_everywhere(make_it, packs=30)
    for path in (tmp_path / "bad").iterdir():
        path.unlink()
    data = make_it()
    came = samples_in(data)
    whole = [row for i in range(3) for row in shifted(rows(60, longest=14, seed=i), APART * i)]
    good = {r["i"] for r in whole if r["i"] % 7 and (r["i"] >= 2 * APART or r["i"] % APART % 9)}
    assert set(came) == good
    by_lane = [path.read_text().splitlines() for path in (tmp_path / "bad").iterdir()]
    assert all(len(set(lines)) == len(lines) for lines in by_lane), "each once in a lane"
    listed = {line for lines in by_lane for line in lines}
    assert len(listed) == 60 * 3 - len(good)
    assert {json.loads(line)["shard"] for line in listed} == {"a/a.jsonl", "b/b.jsonl", "c/list"}
    quarantine = data.lane_config.quarantine
    assert quarantine is not None
    assert quarantine.report().startswith(f"{len(listed)} listed"), (
        "a report counts once what several lanes list"
    )
    assert all(stats.epochs >= 4 for stats in data.source_stats().values()), "two lanes, two epochs"
