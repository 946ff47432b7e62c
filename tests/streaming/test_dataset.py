"""`IterablePackedDataset`: epochs, consumers, loaders, packs, the ledger and settings."""

from __future__ import annotations

import pickle
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from streampack import (
    IGNORE_INDEX,
    IterablePackedDataset,
    IterableSource,
    JSONLSource,
    MapSource,
    Mix,
    TokensEncoder,
    collate_packed,
)
from streampack.streaming.lane_state import as_dicts
from tests.support.conformance import content
from tests.support.corpus import Numbers, all_of, make_source, rows, samples_in, write
from tests.support.streams import make

# Epochs.


@pytest.mark.parametrize("kind", ["map", "jsonl"])
def test_epochs_are_shuffled_anew_and_known_by_number(tmp_path: Path, kind: str) -> None:
    data = rows(120)
    settings = {"shuffle": True, "shuffle_window": 30, "num_lanes": 2}
    long = [content(pack) for pack in make(make_source(kind, tmp_path, data), epochs=3, **settings)]
    single = make(make_source(kind, tmp_path, data), **settings)
    parts = []
    for epoch in range(3):
        single.set_epoch(epoch)
        packs = list(single)
        assert samples_in(packs) == all_of(data)
        parts.append([content(pack) for pack in packs])
    assert [pack for part in parts for pack in part] == long
    assert len({tuple(tuple(f.row_id for f in pack[5]) for pack in part) for part in parts}) == 3
    unshuffled = make(make_source(kind, tmp_path, data), epochs=2, num_lanes=2)
    packs = [[f.row_id for f in pack["fragments"]] for pack in unshuffled]
    assert packs[: len(packs) // 2] == packs[len(packs) // 2 :]


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("stop", [1, 5, 30])
def test_an_epoch_that_was_set_is_in_the_state(stop: int, told: bool) -> None:
    """Stopped when not every lane has yielded, and resumed by someone who may not know the epoch."""
    settings = {"shuffle": True, "num_lanes": 4}
    before = make(MapSource(rows(200)), **settings)
    before.set_epoch(2)
    iterator = iter(before)
    list(islice(iterator, stop))
    after = make(MapSource(rows(200)), **settings)
    after.load_state_dict(before.state_dict())
    if told:
        after.set_epoch(2)
    assert [content(pack) for pack in after] == [content(pack) for pack in iterator]


def _same(pack: Any) -> Any:
    return pack


def test_an_endless_stream_continues_with_the_next_epoch() -> None:
    data = rows(40)
    dataset = make(MapSource(data), epochs=None, num_lanes=2, shuffle=True)
    packs = list(islice(dataset, 200))
    assert {pack["epoch"] for pack in packs} == {0}
    padded = sum(24 - int(pack["seq_lens"][: pack["num_seqs"]].sum()) for pack in packs)
    assert padded < 24, "no part-empty pack at an epoch's end"
    times = {i: len(places) / data[i]["n"] for i, places in samples_in(packs).items()}
    assert len(times) == 40
    assert max(times.values()) - min(times.values()) <= 2
    assert min(times.values()) > 15


@pytest.mark.parametrize("first", [1, 2])
def test_an_ended_run_resumes_when_it_is_given_more_epochs(first: int) -> None:
    data = rows(60)
    settings = {"num_lanes": 3, "shuffle": True}
    before = make(MapSource(data), epochs=first, **settings)
    packs = list(before)
    longer = [content(pack) for pack in make(MapSource(data), epochs=first + 1, **settings)]
    after = make(MapSource(data), epochs=first + 1, **settings)
    after.load_state_dict(before.state_dict())
    assert [content(pack) for pack in after] == longer[len(packs) :]
    endless = make(MapSource(data), epochs=None, **settings)
    endless.load_state_dict(before.state_dict())
    more = list(islice(endless, 100))
    assert len(more) == 100
    assert samples_in(more).keys() == all_of(data).keys()


def test_an_endless_stream_of_dropped_samples_is_an_error() -> None:
    class Impatient(Numbers):
        def __call__(self, row: Any, /) -> Any:
            if self.calls > 1000:
                pytest.fail("it reads the same rows again and again")
            return super().__call__(row)

    encoder = Impatient()
    data = [{"i": i, "n": 30} for i in range(10)]
    dataset = make(MapSource(data), epochs=None, overlong="drop", encoder=encoder, num_lanes=1)
    with pytest.raises(ValueError, match="drop"):
        next(iter(dataset))


def test_an_endless_stream_may_have_empty_lanes(tmp_path: Path) -> None:
    dataset = make(MapSource(rows(3)), epochs=None, num_lanes=4)
    assert [pack["lane"] for pack in islice(dataset, 9)] == [0, 1, 2] * 3
    # The default number of lanes is never one that fails: a compressed file is one lane's, however large.
    noise = np.random.default_rng(0).integers(0, 2**62, 60_000).tolist()
    path = write(tmp_path / "a.jsonl.gz", [{"i": i, "n": 3, "noise": x} for i, x in enumerate(noise)])
    assert path.stat().st_size > 1 << 19
    assert len(list(islice(make(JSONLSource(path), epochs=None), 20))) == 20


# Consumers.


@pytest.mark.parametrize("kind", ["map", "jsonl", "iterable"])
@pytest.mark.parametrize("num_lanes", [5, None])
@pytest.mark.parametrize("consumers", [1, 3, 5])
def test_each_sample_goes_to_one_consumer(
    tmp_path: Path, kind: str, num_lanes: int | None, consumers: int
) -> None:
    data = rows(150)
    packs = []
    for consumer in range(consumers):
        dataset = make(make_source(kind, tmp_path, data), num_lanes=num_lanes, shuffle=True, epochs=2)
        stream = dataset.stream(consumer, consumers)
        assert {lane.lane % consumers for lane in stream.lanes} == {consumer}
        packs += [
            {
                "tokens": torch.from_numpy(p.tokens),
                "seq_lens": torch.tensor(p.seq_lens),
                "num_seqs": len(p.seq_lens),
            }
            for p in stream
        ]
    assert samples_in(packs) == all_of(data, 2)


def test_a_state_resumes_on_another_number_of_consumers() -> None:
    """Two stop in the middle, their states are merged, three go on: every sample once."""
    data = rows(300)
    settings = {"num_lanes": 6, "shuffle": True}
    packs, lanes, state = [], {}, {}
    for consumer in range(2):
        dataset = make(MapSource(data), **settings)
        stream = dataset.stream(consumer, 2)
        packs += list(islice(stream, 9 + consumer))
        lanes |= stream.lane_states()
        state = dataset._state_with(as_dicts(lanes))
    for consumer in range(3):
        dataset = make(MapSource(data), **settings)
        dataset.load_state_dict(state)
        packs += list(dataset.stream(consumer, 3))
    found = [token for pack in packs for token in pack.tokens[: sum(pack.seq_lens)].tolist()]
    assert sorted(found) == sorted(1000 * row["i"] + 1 + j for row in data for j in range(row["n"]))


def test_a_stream_takes_one_pack_of_each_lane_in_turn() -> None:
    """One pack of each lane, in the lanes' order, until one runs dry; a lane's packs do not depend on the others."""
    dataset = make(MapSource(rows(200)), num_lanes=4)
    packs = list(dataset)
    assert [pack["lane"] for pack in packs[:32]] == [0, 1, 2, 3] * 8
    for lane in range(4):
        alone = make(MapSource(rows(200)), num_lanes=4).stream(lane, 4)
        assert [p.tokens.tolist() for p in alone] == [
            p["tokens"].tolist() for p in packs if p["lane"] == lane
        ]


def test_the_default_number_of_lanes() -> None:
    many, few = MapSource([{"i": 0, "n": 1}] * 10_000), MapSource(rows(100))
    assert [make(many).lanes_for(n) for n in (1, 2, 3, 5, 8, 12)] == [8, 8, 9, 10, 8, 12]
    assert [make(few).lanes_for(n) for n in (1, 2, 3)] == [1, 2, 3]
    assert make(many, num_lanes=5).lanes_for(2) == 5
    with pytest.raises(ValueError) as error:
        make(many, num_lanes=2).lanes_for(3)
    assert str(error.value) == (
        "2 lanes cannot feed 3 consumers (ranks x workers): some would get nothing; "
        "use fewer workers, or start a new run with more num_lanes"
    )
    some = MapSource(rows(4 * 512))
    assert [make(some).lanes_for(n) for n in (1, 2, 3, 4, 5)] == [4, 4, 3, 4, 5]
    iterable = IterableSource(rows(10))
    assert [make(iterable).lanes_for(n) for n in (1, 2)] == [1, 2]


@pytest.mark.parametrize(("consumer", "consumers"), [(2, 2), (-1, 2), (0, 0)])
def test_an_impossible_consumer_number_is_refused(consumer: int, consumers: int) -> None:
    with pytest.raises(ValueError, match="consumer"):
        make(MapSource(rows(100)), num_lanes=4).stream(consumer, consumers)


# DataLoaders.


@pytest.mark.parametrize("kind", ["map", "jsonl"])
@pytest.mark.parametrize("workers", [0, 2])
def test_torchs_dataloader_gives_every_sample_once(tmp_path: Path, kind: str, workers: int) -> None:
    data = rows(200)
    dataset = make(make_source(kind, tmp_path, data), shuffle=True)
    loader = DataLoader(dataset, batch_size=3, num_workers=workers, collate_fn=collate_packed)
    packs = []
    for batch in loader:
        for tokens, lens, fragments in zip(batch.tokens, batch.seq_lens, batch.fragments, strict=True):
            packs.append({"tokens": tokens, "seq_lens": lens, "num_seqs": len(fragments)})
    assert samples_in(packs) == all_of(data)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize(("workers", "every"), [(0, 1), (2, 7)])
def test_stateful_dataloader_of_torchdata_resumes(workers: int, every: int) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    data = rows(200)

    def loader() -> Any:
        dataset = make(MapSource(data), num_lanes=4, shuffle=True)
        return torchdata.StatefulDataLoader(
            dataset, batch_size=2, num_workers=workers, collate_fn=collate_packed
        )

    def said(batch: Any) -> tuple[Any, ...]:
        return batch.tokens.tolist(), batch.labels.tolist(), batch.seq_lens.tolist(), batch.fragments

    whole = [said(batch) for batch in loader()]
    assert len(whole) > 20
    for step in range(0, len(whole) + 1, every):
        first = loader()
        iterator = iter(first)
        got = [said(batch) for batch in islice(iterator, step)]
        state = first.state_dict()
        del iterator
        second = loader()
        second.load_state_dict(state)
        assert got + [said(batch) for batch in second] == whole, f"after {step} batches"


def test_a_dataset_can_be_pickled_after_iteration(tmp_path: Path) -> None:
    """A DataLoader that spawns its workers pickles the dataset; an open file in it cannot be."""
    dataset = make(write(tmp_path / "a.jsonl", rows(100)), num_lanes=2)
    packs = [content(pack) for pack in dataset]
    next(iter(dataset))
    again = pickle.loads(pickle.dumps(dataset))
    again.set_epoch(0)
    assert [content(pack) for pack in again] == packs


# The start of a run.


def test_the_first_batch_reads_little_of_a_large_file(tmp_path: Path) -> None:
    line = b'{"tokens": [%s], "labels": [%s]}\n' % (b", ".join([b"1234"] * 30), b", ".join([b"1234"] * 30))
    path = tmp_path / "large.jsonl"
    with path.open("wb") as file:
        for _ in range(20):
            file.write(line * (1_000_000 // len(line)))
    assert path.stat().st_size > 19_000_000
    for settings, rows_at_most in (
        ({}, 8 * (128 + 70)),
        ({"shuffle": True}, 8 * (2048 + 128 + 70)),
    ):
        source = JSONLSource(path)
        dataset = IterablePackedDataset(source, max_seq_len=2048, **settings)
        batch = next(iter(DataLoader(dataset, batch_size=8, collate_fn=collate_packed)))
        assert batch.tokens.shape == (8, 2048)
        assert dataset.num_lanes == 8
        assert source.bytes_read <= rows_at_most * len(line)
        dataset.state_dict()
        assert source.bytes_read <= rows_at_most * len(line)


def test_samples_are_encoded_as_late_as_possible() -> None:
    encoder = Numbers()
    iterator = iter(make(MapSource([{"i": i, "n": 12} for i in range(100)]), encoder=encoder, num_lanes=1))
    assert encoder.calls == 0
    for packs in range(1, 10):
        next(iterator)
        assert encoder.calls == 2 * packs


# Packs, and the way back.


@pytest.mark.parametrize("kind", ["map", "jsonl", "gz", "zst", "iterable"])
@pytest.mark.parametrize(
    "settings",
    [
        {"overlong": "split"},
        {"overlong": "truncate"},
        {"overlong": "truncate", "truncate_side": "left"},
        {"split_across_pack": True},
        {"overlong": "truncate", "truncate_eos": 2},
    ],
    ids=["split", "right", "left", "wrap", "eos"],
)
def test_trace_finds_the_text_of_every_sequence(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    data = rows(90, overlong=70)
    source = make_source(kind, tmp_path, data)
    dataset = make(source, shuffle=True, shuffle_window=8, num_lanes=1, **settings)
    traced = 0
    for pack in dataset:
        begin = 0
        for length, fragment in zip(pack["seq_lens"].tolist(), pack["fragments"], strict=False):
            tokens = pack["tokens"][begin : begin + length].tolist()
            labels = pack["labels"][begin : begin + length].tolist()
            trace = dataset.trace(fragment)
            assert trace["tokens"] == tokens
            i = trace["row"]["i"]
            assert trace["row"] == data[i]
            if kind in ("map", "iterable"):
                assert trace["place"] == f"{'sample' if kind == 'map' else 'row'} {i}"
            else:
                assert trace["place"] == f"{source.files[i // 30].path}:{i % 30 + 1}"
            assert labels[0] == IGNORE_INDEX
            expected = Numbers()(data[i]).labels[fragment.start : fragment.stop].tolist()
            assert labels[1:-1] == expected[1:-1]
            assert fragment.stop - fragment.start == length
            begin += length
            traced += 1
    assert traced >= 80


def test_sources_may_be_paths_datasets_and_iterables(tmp_path: Path) -> None:
    ready = [{"tokens": [i, i + 1], "labels": [-100, i + 1]} for i in range(1, 40)]
    path = write(tmp_path / "a.jsonl", ready)
    for source in (ready, MapSource(ready), str(path), path, str(tmp_path / "*.jsonl"), lambda: iter(ready)):
        dataset = IterablePackedDataset(source, max_seq_len=8, num_lanes=1)
        packs = list(dataset)
        assert sorted(t for p in packs for t in p["tokens"].tolist() if t) == sorted(
            t for r in ready for t in r["tokens"]
        )
    ids = IterablePackedDataset(
        [{"ids": [1, 2]}], max_seq_len=2, encoder=TokensEncoder(tokens="ids", labels=None)
    )
    assert [pack["labels"].tolist() for pack in ids] == [[-100, 2]]


# Settings.


@pytest.mark.parametrize("name", ["max_seq_len", "num_lanes", "epochs", "vocab_size", "shuffle_window"])
@pytest.mark.parametrize("value", [0, 1.5])
def test_settings_out_of_range_are_refused(name: str, value: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"{name}={value!r} is (below 1; give at least 1|not a whole number)"
    ):
        make(MapSource(rows(3)), **{name: value})


@pytest.mark.parametrize("seed", [-1, None])
def test_a_seed_must_be_a_whole_number(seed: Any) -> None:
    with pytest.raises(ValueError, match=f"seed={seed!r}"):
        make(MapSource(rows(3)), seed=seed)
    make(MapSource(rows(3)), seed=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "worst_fit"}, "strategy='worst_fit' is unknown; choose one of 'next_fit'"),
        ({"empty": "keep"}, "empty='keep' is unknown; choose one of 'error', 'drop'"),
    ],
)
def test_unknown_policies_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        make(MapSource(rows(3)), **settings)
    assert str(error.value).startswith(message)


def test_repr_names_source_strategy_and_order():
    rows = [{"tokens": [1], "labels": [1]}]
    data = IterablePackedDataset(rows, max_seq_len=8)
    assert repr(data) == (
        "<IterablePackedDataset: packs of 8 tokens from MapSource, exact_fit, in order, 1 epoch(s)>"
    )
    mix = Mix([{"name": name, "source": rows, "weight": 1} for name in ("web", "code")])
    data = IterablePackedDataset(mix, max_seq_len=8, strategy="best_fit", shuffle=True, seed=3, epochs=None)
    assert repr(data) == (
        "<IterablePackedDataset: packs of 8 tokens from Mix of web, code, best_fit, shuffled by seed 3, for ever>"
    )
