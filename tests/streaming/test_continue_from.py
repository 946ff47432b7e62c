"""Runs that read on behind what a run with other settings has packed."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from streampack import IterablePackedDataset, JSONLSource, Mix, PackedDataLoader, Sample
from tests.harness.corpus import Numbers, all_of, make_source, rows, samples_in, write
from tests.oracle.packing import WAYS, settings_of

LANES = 3
SHORT: dict[str, Any] = {"max_seq_len": 16, "buffer_size": 6, "overlong": "split", "num_lanes": LANES}
LONG: dict[str, Any] = {"max_seq_len": 40, "buffer_size": 64, "overlong": "split"}
SHUFFLED: dict[str, Any] = {"shuffle": 8}


def dataset(source: Any, *several: dict[str, Any], **changes: Any) -> IterablePackedDataset:
    given: dict[str, Any] = {"encoder": Numbers(), "untrained": "keep"}
    for settings in several:
        given |= settings
    return IterablePackedDataset(source, **{**given, **changes})


def behind(data: IterablePackedDataset, state: Mapping[str, Any]) -> IterablePackedDataset:
    data.continue_from(pickle.loads(pickle.dumps(state)))
    return data


def resumed(data: IterablePackedDataset, state: Mapping[str, Any]) -> IterablePackedDataset:
    data.load_state_dict(pickle.loads(pickle.dumps(state)))
    return data


def content(packs: Iterable[Mapping[str, Any]]) -> list[Any]:
    return [(p["tokens"].tolist(), p["labels"].tolist(), p["fragments"], p["lane"]) for p in packs]


def check_once(lengths: Iterable[Mapping[str, int]], *runs: Iterable[Mapping[str, Any]]) -> None:
    """Every row comes in one phase: in the last whole, in the others perhaps without its end."""
    phases, whole = [samples_in(packs) for packs in runs], all_of(lengths)
    times = Counter(i for phase in phases for i in phase)
    assert times == Counter(whole.keys()), "a row came in two phases, or in none"
    for phase in phases:
        for i, places in phase.items():
            assert len(places) == len(set(places)), f"tokens of row {i} came twice"
    assert all(places == whole[i] for i, places in phases[-1].items())


@pytest.mark.parametrize(("before", "after"), [*zip(WAYS, reversed(WAYS), strict=True), ("wrap", "wrap")])
def test_every_row_comes_in_one_of_two_phases(before: str, after: str, tmp_path: Path) -> None:
    lengths = rows(90, overlong=40, empty=True)
    source = make_source("jsonl", tmp_path, lengths)
    for shuffle, at in ((False, 1), (False, 7), (True, 2), (True, 9), (True, 13)):
        common = {"shuffle": shuffle and 8, "seed": at, "skip_bad": True}
        data = dataset(source, common, SHORT, settings_of(before))
        first = list(islice(data, at))
        now = behind(dataset(source, common, LONG, settings_of(after)), data.state_dict())
        second = list(now)
        check_once(lengths, first, second)
        assert now.num_lanes == LANES
        ledger = now.ledger()
        tokens = sum(map(len, samples_in(second).values()))
        left_out = sum(row["n"] for row in lengths) - tokens - sum(map(len, samples_in(first).values()))
        assert (ledger.packs, ledger.packed, ledger.tokens_in) == (len(second), tokens, tokens + left_out)
        assert ledger.dropped["removed"] == left_out


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("way", ["exact_fit", "wrap"])
def test_the_rest_of_a_giant_row_is_counted(way: str, window: int) -> None:
    lengths = [{"i": i, "n": n} for i, n in enumerate([5, 300, 3, 7, 200, 6])]
    common = {"balance_window": window, **settings_of(way)}
    for at in range(1, 33):
        first = PackedDataLoader(dataset(lengths, common, SHORT, num_lanes=1))
        packed = sum(int(batch.num_tokens) for batch in islice(first, at))
        read = first.ledger()
        assert read.tokens_in == sum(row["n"] for row in lengths[: read.samples]), "a read row counts whole"
        then = PackedDataLoader(dataset(lengths, common, LONG, num_lanes=1))
        then.continue_from(first.state_dict())
        assert then.ledger().tokens_in == read.buffered
        packed += sum(int(batch.num_tokens) for batch in then)
        ledger = then.ledger()
        assert (packed + ledger.dropped["removed"], ledger.buffered) == (521, 0), at


def test_what_waits_is_no_loss_when_a_run_goes_on_twice() -> None:
    first = dataset(rows(60), SHORT, {"strategy": "best_fit", "buffer_size": 8})
    list(islice(first, 2 * LANES))
    second = behind(dataset(rows(60), SHORT), first.state_dict())
    list(islice(second, 1))  # of the other lane's rows that waited, none is encoded again yet
    third = behind(dataset(rows(60), LONG), second.state_dict())
    waited = third.ledger()
    assert waited.tokens_in == waited.buffered == second.ledger().buffered
    tokens = sum(map(len, samples_in(third).values()))
    ledger = third.ledger()
    assert (ledger.tokens_in, ledger.packed, ledger.dropped["removed"]) == (tokens, tokens, 0)


@pytest.mark.parametrize("way", ["exact_fit", "next_fit", "wrap"])
def test_a_resume_in_the_second_phase_is_exact_from_its_first_pack_on(way: str, tmp_path: Path) -> None:
    common = {**SHUFFLED, "balance_window": 3, **settings_of(way)}
    source = make_source("jsonl", tmp_path, rows(120, overlong=40))
    data = dataset(source, common, SHORT)
    list(islice(data, 11))
    now = behind(dataset(source, common, LONG), data.state_dict())
    states, packs = [now.state_dict()], []
    for pack in now:
        packs.append(pack)
        states.append(now.state_dict())
    ends = now.ledger()
    for number, state in enumerate(states):
        again = resumed(dataset(source, common, LONG), state)
        assert content(again) == content(packs[number:])
        assert again.ledger() == ends


@pytest.mark.parametrize("workers", [0, 2])
def test_the_packs_are_the_same_on_other_numbers_of_consumers(workers: int) -> None:
    lengths = rows(150, overlong=40)
    loader = PackedDataLoader(dataset(lengths, SHORT, shuffle=True), num_workers=workers)
    first = [
        {"tokens": batch.tokens[0], "seq_lens": batch.seq_lens[0], "num_seqs": len(batch.fragments[0])}
        for batch in islice(loader, 10)
    ]
    state = loader.state_dict()
    expected = list(behind(dataset(lengths, LONG, shuffle=True), state))
    check_once(lengths, first, expected)
    for size in (1, 2, 3, 5):
        streams = []
        for consumer in range(size):
            now = behind(dataset(lengths, LONG, shuffle=True), state)
            streams += [(pack.lane, pack.tokens.tolist()) for pack in now.stream(consumer, size)]
        assert sorted(streams) == sorted((pack["lane"], pack["tokens"].tolist()) for pack in expected)
    later, again = (
        PackedDataLoader(dataset(lengths, LONG, shuffle=True), num_workers=workers) for _ in range(2)
    )
    later.continue_from(state)
    assert later.ledger().packs == 0
    batches = list(islice(later, 2))
    again.load_state_dict(later.state_dict())
    batches += list(again)
    assert [batch.tokens[0].tolist() for batch in batches] == [pack["tokens"].tolist() for pack in expected]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("at", [1, 6, 15])
def test_a_mixture_goes_on_with_other_weights(at: int, shuffle: bool, tmp_path: Path) -> None:
    lengths = {
        "a": rows(100, overlong=40),
        "b": [{**row, "i": row["i"] + 500} for row in rows(60, seed=1, overlong=40)],
    }
    paths = {name: write(tmp_path / f"{name}.jsonl", of_source) for name, of_source in lengths.items()}

    def new(weight: float, settings: dict[str, Any]) -> IterablePackedDataset:
        entries = [
            {"name": name, "source": JSONLSource(path), "weight": weight if name == "a" else 1}
            for name, path in paths.items()
        ]
        return dataset(Mix(entries, stop="first_exhausted"), settings, shuffle=shuffle and 8)

    data, now, again, last = new(1, SHORT), new(3, LONG), new(3, LONG), new(3, LONG)
    first = list(islice(data, at))
    second = list(behind(now, data.state_dict()))
    one, two = samples_in(first), samples_in(second)
    assert one
    assert two
    assert not one.keys() & two.keys(), "no row comes twice in an epoch"
    stats = now.source_stats()
    assert sum(each.packed for each in stats.values()) == sum(map(len, two.values()))
    packs = list(islice(behind(again, data.state_dict()), 2))
    packs += resumed(last, again.state_dict())
    assert content(packs) == content(second)
    assert last.source_stats() == stats


@pytest.mark.parametrize("way", WAYS)
def test_a_stream_without_an_end_goes_on(way: str) -> None:
    lengths = rows(25)  # no longer than a pack, so that each row is one piece
    data = dataset(lengths, SHORT, settings_of(way), epochs=None, num_lanes=1)
    now = dataset(lengths, LONG, settings_of(way), epochs=None)
    first = list(islice(data, 20))
    second = list(islice(behind(now, data.state_dict()), 40))
    begun = Counter(f.row_id for pack in (*first, *second) for f in pack["fragments"] if f.start == 0)
    assert len(begun) == 25
    behind_most = sum(max(begun.values()) - count for count in begun.values())
    assert behind_most <= 64 + 25, "what waits, and what the newest pass has not reached"


class Twice:
    """Encodes each token of `Numbers` twice."""

    def __call__(self, row: Mapping[str, Any], /) -> Sample:
        tokens, labels = Numbers()(row)
        return Sample(tokens.repeat(2), labels.repeat(2))


def test_another_encoder_encodes_what_waited() -> None:
    lengths = rows(60)
    data = dataset(lengths, SHORT)
    first = list(islice(data, 4))
    found = samples_in(behind(dataset(lengths, LONG, encoder=Twice()), data.state_dict()))
    assert found == {
        i: places for i, places in all_of(lengths, times=2).items() if i not in samples_in(first)
    }


def test_files_may_change_at_the_same_time(tmp_path: Path) -> None:
    lengths, folder = rows(120), tmp_path / "data"
    folder.mkdir()
    for number in range(4):
        write(folder / f"{number}.jsonl", lengths[number * 30 : number * 30 + 30])
    common = {**SHUFFLED, "corpus_lists": tmp_path / "lists", "epochs": 2}
    data = dataset(JSONLSource(folder), common, SHORT)
    first = list(islice(data, 14))
    state = data.state_dict()
    added = [{**row, "i": row["i"] + 500} for row in rows(30, seed=5)]
    write(folder / "x.jsonl", added)
    (folder / "1.jsonl").unlink()

    def new() -> IterablePackedDataset:
        return dataset(JSONLSource(folder), common, LONG)

    with pytest.warns(UserWarning, match="1 added .* 1 removed"):
        now = behind(new(), state)
    packs, states = [], [now.state_dict()]
    for pack in now:
        packs.append(pack)
        states.append(now.state_dict())
    kept = [row for number, row in enumerate(lengths) if number // 30 != 1]
    one = samples_in(first)
    epochs = [samples_in(pack for pack in packs if pack["epoch"] == n) for n in (0, 1)]
    assert epochs[0] == {i: places for i, places in all_of(kept).items() if i not in one}
    assert epochs[1] == all_of([*kept, *added])
    for number in (0, 1, 2, 5):
        assert content(resumed(new(), states[number])) == content(packs[number:])


def test_what_cannot_go_on_is_refused_with_the_way_out() -> None:
    lengths = rows(60)
    data = dataset(lengths, SHORT, seed=1, shuffle=True)
    first = list(islice(data, 5))
    state = data.state_dict()

    def new(source: Any = lengths, **changes: Any) -> IterablePackedDataset:
        return dataset(source, LONG, **{"seed": 1, "shuffle": True, **changes})

    for now, words in (
        (new(rows(61)), "with corpus.rows=60 and this dataset has corpus.rows=61"),
        (new(seed=2), "seed=1 and this dataset has seed=2"),
        (new(shuffle=False), "shuffle=2048 and this dataset has shuffle=False"),
    ):
        with pytest.raises(ValueError, match=words):
            now.continue_from(state)
    with pytest.raises(ValueError, match="with max_seq_len=16"):
        new().load_state_dict(state)
    with pytest.warns(UserWarning, match=r"^num_lanes=5 is not used"):
        new(num_lanes=5).continue_from(state)
    # More waits than the new buffer holds; it is packed all the same.
    check_once(lengths, first, list(behind(new(max_seq_len=4, buffer_size=2), state)))
    list(data)
    with pytest.raises(
        ValueError, match=r"the earlier run has read the data 1 times, and epochs=1 .*; set epochs to 2"
    ):
        new().continue_from(data.state_dict())
    assert samples_in(behind(new(epochs=2), data.state_dict())) == all_of(lengths)
