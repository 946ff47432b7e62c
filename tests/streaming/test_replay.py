"""Runs that read on behind what a run with other settings has packed."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from streampack import IterablePackedDataset, JSONLSource, Mix, PackedDataLoader, Sample
from streampack.streaming.lane_state import LaneState
from tests.support.corpus import STRIDE, Numbers, all_of, make_source, rows, samples_in, write
from tests.support.strategies import WAYS, settings_of

LANES = 3
SHORT: dict[str, Any] = {"max_seq_len": 16, "buffer_size": 6, "overlong": "split", "num_lanes": LANES}
LONG: dict[str, Any] = {"max_seq_len": 40, "buffer_size": 64, "overlong": "split"}


def packs_of(data: IterablePackedDataset, count: int | None = None) -> list[Mapping[str, Any]]:
    """Return the next packs; those that are handed out later are not made."""
    found: list[Mapping[str, Any]] = []
    if count != 0:
        for pack in data:
            found.append(pack)
            if len(found) == count:
                break
    return found


def behind(data: IterablePackedDataset, state: Mapping[str, Any]) -> IterablePackedDataset:
    data.continue_from(pickle.loads(pickle.dumps(state)))
    return data


def resumed(data: IterablePackedDataset, state: Mapping[str, Any]) -> IterablePackedDataset:
    data.load_state_dict(pickle.loads(pickle.dumps(state)))
    return data


def content(packs: Iterable[Mapping[str, Any]]) -> list[Any]:
    return [(p["tokens"].tolist(), p["labels"].tolist(), p["fragments"], p["lane"]) for p in packs]


def check_once(
    lengths: Iterable[Mapping[str, int]],
    first: Iterable[Mapping[str, Any]],
    *later: Iterable[Mapping[str, Any]],
) -> None:
    """Every row comes in one phase: in the last whole, in the others perhaps without its end."""
    phases = [samples_in(packs) for packs in (first, *later)]
    times = Counter(i for phase in phases for i in phase)
    assert times == Counter(all_of(lengths).keys()), "a row came in two phases, or in none"
    whole = all_of(lengths)
    for phase in phases:
        for i, places in phase.items():
            assert len(places) == len(set(places)), f"tokens of row {i} came twice"
    assert all(places == whole[i] for i, places in phases[-1].items())


@pytest.mark.parametrize("after", WAYS)
@pytest.mark.parametrize("before", WAYS)
def test_every_row_comes_in_one_of_two_phases(before: str, after: str, tmp_path: Path) -> None:
    lengths = rows(90, overlong=40, empty=True)
    for shuffle, at in ((False, 1), (False, 7), (True, 2), (True, 9), (True, 13)):
        common = {"shuffle": shuffle, "shuffle_window": 8, "seed": at, "empty": "drop", "encoder": Numbers()}
        source = make_source("jsonl", tmp_path, lengths)
        data = IterablePackedDataset(source, **common, **SHORT, **settings_of(before))
        first = packs_of(data, at)
        now = behind(IterablePackedDataset(source, **common, **LONG, **settings_of(after)), data.state_dict())
        second = packs_of(now)
        check_once(lengths, first, second)
        assert now.num_lanes == LANES
        ledger = now.ledger()
        tokens = sum(map(len, samples_in(second).values()))
        left_out = sum(row["n"] for row in lengths) - tokens - sum(map(len, samples_in(first).values()))
        assert (ledger.packs, ledger.packed, ledger.tokens_in) == (len(second), tokens, tokens + left_out)
        assert ledger.dropped["removed"] == left_out
        partly = samples_in(first).keys()
        assert ledger.samples <= len(lengths) - len(partly)


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("way", ["exact_fit", "wrap"])
def test_the_rest_of_a_giant_row_is_counted(way: str, window: int) -> None:
    lengths = [{"i": i, "n": n} for i, n in enumerate([5, 300, 3, 7, 200, 6])]
    settings = {"encoder": Numbers(), "balance_window": window, "num_lanes": 1, **settings_of(way)}
    for at in range(1, 33):
        first = PackedDataLoader(IterablePackedDataset(lengths, **{**settings, **SHORT, "num_lanes": 1}))
        packed = sum(int(batch.num_tokens) for batch in islice(first, at))
        state = first.state_dict()
        read = first.ledger()
        assert read.tokens_in == sum(row["n"] for row in lengths[: read.samples]), "a read row counts whole"
        then = PackedDataLoader(IterablePackedDataset(lengths, **{**settings, **LONG}))
        then.continue_from(state)
        assert then.ledger().buffered == read.buffered
        packed += sum(int(batch.num_tokens) for batch in then)
        ledger = then.ledger()
        assert (packed + ledger.dropped["removed"], ledger.buffered) == (521, 0), at


@pytest.mark.parametrize("way", WAYS)
def test_a_resume_in_the_second_phase_is_exact_from_its_first_pack_on(way: str, tmp_path: Path) -> None:
    lengths = rows(120, overlong=40)
    common = {"shuffle": True, "shuffle_window": 8, "encoder": Numbers(), "balance_window": 3}
    source = make_source("jsonl", tmp_path, lengths)

    def new() -> IterablePackedDataset:
        return IterablePackedDataset(source, **common, **LONG, **settings_of(way))

    data = IterablePackedDataset(source, **common, **SHORT, **settings_of(way))
    packs_of(data, 11)
    now = behind(new(), data.state_dict())
    states, packs = [now.state_dict()], []
    for pack in now:
        packs.append(pack)
        states.append(now.state_dict())
    assert sum("anew" in lane for lane in states[1]["lanes"].values()) == LANES - 1
    ends = now.ledger()
    for number, state in enumerate(states):
        again = resumed(new(), state)
        assert content(packs_of(again)) == content(packs[number:])
        assert again.ledger() == ends


def new_long(lengths: Any) -> IterablePackedDataset:
    return IterablePackedDataset(lengths, encoder=Numbers(), shuffle=True, **LONG)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_packs_are_the_same_on_other_numbers_of_consumers(workers: int) -> None:
    lengths = rows(150, overlong=40)
    data = IterablePackedDataset(lengths, encoder=Numbers(), shuffle=True, **SHORT)
    loader = PackedDataLoader(data, batch_size=1, num_workers=workers)
    first = list(islice(loader, 10))
    state = loader.state_dict()
    expected = packs_of(behind(new_long(lengths), state))
    check_once(lengths, [_pack(batch) for batch in first], expected)
    for size in (1, 2, 3, 5):
        streams = []
        for consumer in range(size):
            now = behind(new_long(lengths), state)
            streams += [(pack.lane, pack.tokens.tolist()) for pack in now.stream(consumer, size)]
        assert sorted(streams) == sorted((pack["lane"], pack["tokens"].tolist()) for pack in expected)
    later = PackedDataLoader(new_long(lengths), batch_size=1, num_workers=workers)
    later.continue_from(state)
    assert later.slot == 0
    assert later.ledger().packs == 0
    batches = list(islice(later, 2))
    again = PackedDataLoader(new_long(lengths), batch_size=1, num_workers=workers)
    again.load_state_dict(later.state_dict())
    batches += list(again)
    assert [batch.tokens[0].tolist() for batch in batches] == [pack["tokens"].tolist() for pack in expected]


def _pack(batch: Any) -> dict[str, Any]:
    lens = batch.seq_lens[0]
    return {"tokens": batch.tokens[0], "seq_lens": lens, "num_seqs": len(batch.fragments[0])}


def mixture(folder: Path, weights: Mapping[str, float], lengths: Mapping[str, Any], stop: str) -> Mix:
    entries = []
    for name, of_source in lengths.items():
        path = folder / f"{name}.jsonl"
        if not path.exists():
            write(path, of_source)
        entries.append({"name": name, "source": JSONLSource(path), "weight": weights[name]})
    return Mix(entries, stop=stop)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("at", [1, 6, 15])
def test_a_mixture_goes_on_with_other_weights(at: int, shuffle: bool, tmp_path: Path) -> None:
    lengths = {
        "a": rows(100, overlong=40),
        "b": [{**row, "i": row["i"] + 500} for row in rows(60, seed=1, overlong=40)],
    }
    common = {"encoder": Numbers(), "shuffle": shuffle, "shuffle_window": 8}
    first_mix = mixture(tmp_path, {"a": 1, "b": 1}, lengths, "first_exhausted")
    data = IterablePackedDataset(first_mix, **common, **SHORT)
    first = packs_of(data, at)
    now = IterablePackedDataset(
        mixture(tmp_path, {"a": 3, "b": 1}, lengths, "first_exhausted"), **common, **LONG
    )
    state = data.state_dict()
    second = packs_of(behind(now, state))
    one, two = samples_in(first), samples_in(second)
    assert one
    assert two
    assert not one.keys() & two.keys(), "no row comes twice in an epoch"
    stats = now.source_stats()
    assert sum(each.packed for each in stats.values()) == sum(map(len, two.values()))
    if not shuffle:
        # What either phase has read of a lane's rows has no gap: rows that waited were not lost.
        for source in (0, 1):
            for lane in range(LANES):
                mine = {
                    fragment.row_id[1:]
                    for pack in (*first, *second)
                    if pack["lane"] == lane
                    for fragment in pack["fragments"]
                    if fragment.row_id[0] == source
                }
                order = list(rows_of(first_mix.entries[source].source, lane))
                assert mine == set(order[: len(mine)])
    again = IterablePackedDataset(
        mixture(tmp_path, {"a": 3, "b": 1}, lengths, "first_exhausted"), **common, **LONG
    )
    behind(again, state)
    packs = packs_of(again, 2)
    last = resumed(
        IterablePackedDataset(
            mixture(tmp_path, {"a": 3, "b": 1}, lengths, "first_exhausted"), **common, **LONG
        ),
        again.state_dict(),
    )
    assert content([*packs, *packs_of(last)]) == content(second)
    assert last.source_stats() == stats


def rows_of(source: Any, lane: int) -> Iterator[tuple[int, ...]]:
    from streampack.sources import Reading

    return (row.row_id for row in source.read(Reading(lane, num_lanes=LANES)))


@pytest.mark.parametrize("way", WAYS)
def test_a_stream_without_an_end_goes_on(way: str) -> None:
    lengths = rows(25)  # no longer than a pack, so that each row is one piece
    common = {"encoder": Numbers(), "epochs": None}
    data = IterablePackedDataset(lengths, **common, **{**SHORT, "num_lanes": 1}, **settings_of(way))
    first = packs_of(data, 20)
    now = behind(IterablePackedDataset(lengths, **common, **LONG, **settings_of(way)), data.state_dict())
    second = packs_of(now, 12)
    stream = now._stream
    assert stream is not None
    planner = stream.lanes[0].planner
    touched = Counter(dict.fromkeys(all_of(lengths), 0))
    for packs in (first, second):
        for fragment in (fragment for pack in packs for fragment in pack["fragments"]):
            touched[fragment.row_id[-1]] += fragment.start == 0
    waits = Counter(piece.row_id[-1] for piece in planner.waiting if piece.start == 0)
    if planner.offset and planner.waiting[0].start == 0:
        waits[planner.waiting[0].row_id[-1]] -= 1
    passes = [touched[i] + waits[i] for i in sorted(touched)]
    assert passes == sorted(passes, reverse=True)
    assert passes[0] - passes[-1] <= 1


def test_a_third_phase_goes_on_behind_lanes_that_gave_nothing_in_the_second(tmp_path: Path) -> None:
    lengths = rows(150, overlong=40)
    source = make_source("jsonl", tmp_path, lengths)
    common = {"encoder": Numbers(), "shuffle": True, "shuffle_window": 8}
    data = IterablePackedDataset(source, **common, **SHORT)
    first = packs_of(data, 9)
    for count in (0, 1, 2, 5):
        now = behind(IterablePackedDataset(source, **common, **LONG), data.state_dict())
        second = packs_of(now, count)
        state = now.state_dict()
        assert sum("anew" in lane for lane in state["lanes"].values()) == max(0, LANES - count)
        last = IterablePackedDataset(
            source, **common, max_seq_len=25, overlong="split", buffer_size=90, strategy="next_fit"
        )
        check_once(lengths, first, second, packs_of(behind(last, state)))


class Twice:
    """Encodes each token of `Numbers` twice."""

    def __call__(self, row: Mapping[str, Any], /) -> Sample:
        tokens, labels = Numbers()(row)
        return Sample(tokens.repeat(2), labels.repeat(2))


def test_another_encoder_encodes_what_waited() -> None:
    lengths = rows(60)
    data = IterablePackedDataset(lengths, encoder=Numbers(), **SHORT)
    first = packs_of(data, 4)
    now = behind(IterablePackedDataset(lengths, encoder=Twice(), **LONG), data.state_dict())
    found, whole = samples_in(packs_of(now)), all_of(lengths, times=2)
    assert found == {i: places for i, places in whole.items() if i not in samples_in(first)}


def test_files_may_change_at_the_same_time(tmp_path: Path) -> None:
    lengths = rows(120)
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(4):
        write(folder / f"{number}.jsonl", lengths[number * 30 : number * 30 + 30])
    settings = {
        "encoder": Numbers(), "corpus_lists": tmp_path / "lists", "shuffle": True, "shuffle_window": 8, "epochs": 2
    }  # fmt: skip
    data = IterablePackedDataset(JSONLSource(str(folder / "*.jsonl")), **settings, **SHORT)
    first = packs_of(data, 14)
    state = data.state_dict()
    (folder / "1.jsonl").unlink()
    added = [{**row, "i": row["i"] + 500} for row in rows(20, seed=3)]
    write(folder / "9.jsonl", added)

    def new(**changes: Any) -> IterablePackedDataset:
        return IterablePackedDataset(
            JSONLSource(str(folder / "*.jsonl")), **{**settings, **LONG, "corpus_changes": "allow", **changes}
        )

    with pytest.raises(ValueError, match="the corpus is not the one that the state was made with"):
        new(corpus_changes="error").continue_from(state)
    with pytest.warns(UserWarning, match="1 added .* 1 removed"):
        now = behind(new(), state)
    packs, states = [], [now.state_dict()]
    for pack in now:
        packs.append(pack)
        states.append(now.state_dict())
    kept = [row for number, row in enumerate(lengths) if number // 30 != 1]
    one = samples_in(first)
    epochs = [samples_in(pack for pack in packs if pack["fragments"] and _epoch(pack) == n) for n in (0, 1)]
    assert epochs[0] == {i: places for i, places in all_of(kept).items() if i not in one}
    assert epochs[1] == all_of([*kept, *added])
    for number in (0, 1, 2, 5):
        assert content(packs_of(resumed(new(), states[number]))) == content(packs[number:])


def _epoch(pack: Mapping[str, Any]) -> int:
    return int(pack["epoch"])


def test_what_cannot_go_on_is_refused_with_the_way_out(tmp_path: Path) -> None:
    lengths = rows(60)
    data = IterablePackedDataset(lengths, encoder=Numbers(), seed=1, shuffle=True, **SHORT)
    packs_of(data, 5)
    state = data.state_dict()

    def new(source: Any = lengths, **changes: Any) -> IterablePackedDataset:
        settings = {"encoder": Numbers(), "seed": 1, "shuffle": True, **LONG}
        return IterablePackedDataset(source, **{**settings, **changes})

    with pytest.raises(ValueError, match="with corpus.rows=60 and this dataset has corpus.rows=61"):
        new(rows(61)).continue_from(state)
    with pytest.raises(ValueError, match="seed=1 and this dataset has seed=2"):
        new(seed=2).continue_from(state)
    with pytest.raises(ValueError, match="shuffle_window"):
        new(shuffle=False).continue_from(state)
    with pytest.raises(ValueError, match="with max_seq_len=16"):
        new().load_state_dict(state)
    with pytest.warns(UserWarning, match=r"^num_lanes=5 is not heeded"):
        new(num_lanes=5).continue_from(state)
    few = behind(new(max_seq_len=4, buffer_size=2), state)
    with pytest.raises(
        ValueError, match=r"lane \d: \d+ pieces of the rows .* wait, and buffer_size=2 .*set buffer_size"
    ):
        packs_of(few)
    packs_of(data)
    with pytest.raises(
        ValueError, match=r"the earlier run has read the data 1 times, and epochs=1 .*; set epochs to 2"
    ):
        new().continue_from(data.state_dict())
    assert samples_in(packs_of(behind(new(epochs=2), data.state_dict()))) == all_of(lengths)


def test_a_lane_state_behind_another_holds_nothing_of_its_counts() -> None:
    data = IterablePackedDataset(rows(60), encoder=Numbers(), **SHORT)
    packs_of(data, 5)
    for found in data.state_dict()["lanes"].values():
        state = LaneState.from_dict(found).behind()
        assert (state.packs, state.ledger.packed, state.ledger.samples, state.anew) == (0, 0, 0, True)
        assert LaneState.from_dict(state.as_dict()) == state == state.behind()
        assert STRIDE * state.next_piece  # it still says what was read


def test_a_row_that_was_packed_before_does_not_come_again_in_pieces() -> None:
    """It was the last one read, is several pieces now, and had one number: a resume took the others to be left."""
    resumes = several = 0
    for seed in range(40):
        draw = random.Random(seed)
        lengths = [draw.randint(1, 14) for _ in range(14)]
        texts = [{"tokens": [*range(100 * i + 1, 100 * i + n + 1)]} for i, n in enumerate(lengths, 1)]
        settings: dict[str, Any] = {"num_lanes": 1, "overlong": "split", "untrained": "keep"}
        source = [text | {"labels": text["tokens"]} for text in texts]
        data = IterablePackedDataset(source, max_seq_len=16, buffer_size=4, **settings)
        first = packs_of(data, draw.randint(1, 4))
        packed = {int(token) // 100 for pack in first for token in pack["tokens"]}

        def new() -> IterablePackedDataset:
            return IterablePackedDataset(source, max_seq_len=5, buffer_size=64, **settings)  # noqa: B023

        now = behind(new(), data.state_dict())
        expected, states = [], []
        for pack in now:
            expected.append(pack)
            states.append(now.state_dict())
        for number, state in enumerate(states, 1):
            assert content(packs_of(resumed(new(), state))) == content(expected[number:])
            resumes += 1
        several += any(lengths[i - 1] > 5 for i in packed if i)
    assert resumes > 400
    assert several > 30


class Mended(Numbers):
    """Cannot encode one row until it is mended."""

    broken: int | None = None

    def __call__(self, row: Any, /) -> Sample:
        if row["i"] == self.broken:
            raise ValueError("not yet")
        return super().__call__(row)


def test_a_bad_record_that_is_mended_before_a_resume_does_not_come_in_part() -> None:
    """Its number is consumed, and the pieces behind its first one were taken to be left."""
    lengths = [{"i": i, "n": n} for i, n in enumerate([4, 6, 9, 4, 9, 4, 6, 9])]
    encode = Mended()

    def new() -> IterablePackedDataset:
        return IterablePackedDataset(
            lengths, encoder=encode, max_seq_len=5, overlong="split", num_lanes=1, on_bad_record="skip"
        )

    for broken in range(len(lengths)):
        encode.broken = broken
        data, states, packs = new(), [], []
        for pack in data:
            packs.append(pack)
            states.append(data.state_dict())
        encode.broken = None
        for number, state in enumerate(states, 1):
            again = samples_in([*packs[:number], *packs_of(resumed(new(), state))])
            assert broken not in again or again[broken] == all_of(lengths)[broken], "in part"
