"""What a loader hands out, and says: batches, steps, epochs, null packs, states, and steps that train nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader

from streampack import (
    IGNORE_INDEX,
    Batch,
    ChatEncoder,
    FlatteningCollator,
    IterablePackedDataset,
    IterableSource,
    JSONLSource,
    MapSource,
    Mix,
    PackedDataLoader,
    PackedDataset,
    ParquetSource,
    collate_packed,
)
from streampack.loader.batching import Batching
from streampack.map_style import collators  # private: its warning, said once in a process, is reset
from tests.harness.corpus import Numbers, write
from tests.harness.corpus import rows as numbers
from tests.harness.hf_tokenizers import byte_level
from tests.harness.mixtures import APART, entry, shifted
from tests.harness.threads import ThreadSync, Topology, make, on_ranks, run, steps_of_run


def rows(count=300, *, first=1):
    ids = range(first, first + count)
    return [{"tokens": [i] * (i * 7 % 13 + 1), "labels": [i] * (i * 7 % 13 + 1)} for i in ids]


def dataset(data=None, **kwargs):
    settings = {"max_seq_len": 16, "buffer_size": 8, "num_lanes": 12, "shuffle": True, "epochs": 2} | kwargs
    return IterablePackedDataset(data or rows(), **settings)


def same(left: Batch, right: Batch) -> bool:
    return (
        all(
            torch.equal(getattr(left, name), getattr(right, name))
            for name in ("tokens", "labels", "input_pos", "seq_lens")
        )
        and left.fragments == right.fragments
    )


def samples(batches):
    """Every whole sample that came, by its token."""
    return sorted(
        int(batch.tokens[i, 0 if j == 0 else int(batch.seq_lens[i, :j].sum())])
        for batch in batches
        for i, fragments in enumerate(batch.fragments)
        for j in range(len(fragments))
    )


@pytest.mark.parametrize(("num_lanes", "num_workers", "first"), [(12, 1, 2**31 - 150), (12, 3, 1), (5, 2, 1)])
def test_the_order_does_not_depend_on_the_number_of_workers(num_lanes, num_workers, first):
    """Nor does a number that does not divide the lanes warn. Ids may be too large for 32 bits."""
    data = dataset(rows(first=first), num_lanes=num_lanes)
    alone = list(PackedDataLoader(data, batch_size=3))
    data.set_epoch(0)
    together = list(PackedDataLoader(data, batch_size=3, num_workers=num_workers))
    assert len(alone) == len(together)
    assert all(map(same, alone, together))


def test_an_epoch_is_filled_with_null_packs_that_train_nothing():
    [last] = PackedDataLoader(IterablePackedDataset(rows(3), max_seq_len=64), batch_size=4)
    assert [len(f) for f in last.fragments] == [3, 0, 0, 0]
    assert (last.labels[1:] == -100).all()
    assert last.seq_lens[1:, 0].tolist() == [64, 64, 64]


@pytest.mark.parametrize(("before", "after"), [(0, 0), (2, 3)])
def test_resumes_at_batches_with_any_number_of_workers(before, after):
    uncut = PackedDataLoader(dataset(), batch_size=3)
    whole = list(uncut)
    stops = range(1, len(whole), 4 if before == after == 0 else 40)
    for stop in stops:
        first = PackedDataLoader(dataset(), batch_size=3, num_workers=before)
        iterator = iter(first)
        for _ in range(stop):
            next(iterator)
        second = PackedDataLoader(dataset(), batch_size=3, num_workers=after)
        second.load_state_dict(first.state_dict())
        rest = list(second)
        assert len(rest) == len(whole) - stop
        assert all(map(same, rest, whole[stop:]))
        assert second.ledger() == uncut.ledger(), "it counts the whole run"


def test_a_state_counts_the_batches_that_were_returned():
    loader = PackedDataLoader(dataset(), batch_size=2, num_workers=2)
    batch = next(iter(loader))
    assert loader.ledger().packs == 2
    assert loader.ledger().packed == batch.num_tokens


def test_a_bad_row_in_a_worker_names_its_place():
    data = [*rows(40), {"tokens": [1], "labels": [1, 2]}]
    loader = PackedDataLoader(IterablePackedDataset(data, max_seq_len=16, num_lanes=1), num_workers=1)
    with pytest.raises(ValueError, match="sample 40: 'tokens' has 1 entries and 'labels' has 2"):
        list(loader)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 is below 1"),
        ({"num_workers": -1}, "num_workers=-1 is below 0"),
        ({"packs_per_step": 0}, "packs_per_step=0"),
    ],
)
def test_settings_are_checked(setting, message):
    with pytest.raises(ValueError, match=message):
        PackedDataLoader(dataset(), **setting)


def test_workers_take_turns_with_an_iterable_and_one_log_line_says_so(caplog):
    from streampack import IterableSource

    for workers, said in ((0, []), (1, []), (2, [SHARED])):
        caplog.clear()
        data = IterablePackedDataset(IterableSource(rows), max_seq_len=16, num_lanes=max(1, workers))
        loader = PackedDataLoader(data, num_workers=workers)
        assert samples(loader) == list(range(1, 301))
        assert samples(loader) == list(range(1, 301)), "a second epoch"
        assert [r.getMessage() for r in caplog.records if r.name == "streampack.streaming.dataset"] == said


SHARED = "1 iterable is shared by 2 lanes: each is read by 2 of them, which take turns with its rows"


def test_null_packs_of_every_step_are_logged(caplog):
    loader = PackedDataLoader(dataset(), batch_size=4, packs_per_step=7)
    assert (loader.packs_per_step, loader.batches_per_step) == (7, 2)
    first = list(islice(loader, 2))
    assert [sum(map(bool, batch.fragments)) for batch in first] == [4, 3]
    assert [
        record.getMessage() for record in caplog.records if record.name == "streampack.loader.batching"
    ] == [
        "packs_per_step=7 cannot be shared out evenly over 1 rank(s) in batches of 4: every step holds 1 null packs, "
        "which cost time and train nothing; a multiple of 4 holds none"
    ]


def test_no_multiple_is_named_where_the_ranks_do_not_divide_the_lanes(caplog):
    """Whatever its number of packs, each step has null packs then."""
    batching = Batching(batch_size=2, packs_per_step=4, world_size=2, num_lanes=1)
    with pytest.warns(UserWarning, match="2 ranks do not divide 1 lane evenly"):
        batching.warn(num_workers=0, rank=0)
    assert not caplog.records


@pytest.mark.parametrize(("packs_per_step", "sizes"), [(3, [3]), (9, [3, 3, 3])])
def test_batches_are_smaller_where_that_needs_no_null_packs(caplog, packs_per_step, sizes):
    loader = PackedDataLoader(dataset(), batch_size=4, packs_per_step=packs_per_step)
    first = list(islice(loader, len(sizes)))
    assert [len(batch.tokens) for batch in first] == sizes
    assert all(all(batch.fragments) for batch in first)
    assert not [record for record in caplog.records if record.name == "streampack.loader.batching"]


def test_with_a_limit_of_sequences_all_batches_have_one_shape():
    loader = PackedDataLoader(dataset(max_seqs_per_pack=3), batch_size=4)
    batches = list(loader)
    assert {tuple(batch.seq_lens.shape) for batch in batches} == {(4, 4)}
    assert max(len(pack) for batch in batches for pack in batch.fragments) == 3
    half = len(batches) // 2
    assert samples(batches[:half]) == samples(batches[half:]) == list(range(1, 301))
    free = {tuple(batch.seq_lens.shape) for batch in PackedDataLoader(dataset(), batch_size=4)}
    assert len(free) > 1
    assert max(free)[1] > 4


# Mixtures: a small source beside a large one, on ranks with workers.


def two_compressed(folder: Path) -> JSONLSource:
    return JSONLSource([write(folder / f"{i}.jsonl.gz", numbers(100, longest=50, seed=i)) for i in range(2)])


def row_group(folder: Path) -> ParquetSource:
    pq.write_table(pa.Table.from_pylist(numbers(40, longest=50)), folder / "a.parquet")
    return ParquetSource(folder / "a.parquet")


SMALL: dict[str, Callable[[Path], Any]] = {
    "two compressed files": two_compressed,
    "a row group": row_group,
    "five rows": lambda folder: MapSource(numbers(5, longest=50)),
    "two lines": lambda folder: JSONLSource(write(folder / "a.jsonl", numbers(2, longest=50))),
    "an iterable": lambda folder: IterableSource(numbers(30, longest=50)),
}


def maker(small: Any, *, weight: float, num_lanes: int) -> Callable[[], IterablePackedDataset]:
    large = MapSource(shifted(numbers(20_000, longest=100, seed=9), APART))
    mix = Mix([entry("small", small, weight), entry("large", large, 1 - weight)], stop="never")
    return lambda: IterablePackedDataset(
        mix, encoder=Numbers(), max_seq_len=128, buffer_size=16, num_lanes=num_lanes, shuffle=50,
        epochs=None, seed=1,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "num_lanes"),
    [
        pytest.param(kind, 8, marks=() if kind == "two compressed files" else pytest.mark.slow)
        for kind in SMALL
    ]
    + [("two lines", 32)],
)
def test_the_weight_of_a_small_source_holds(tmp_path: Path, kind: str, num_lanes: int) -> None:
    make = maker(SMALL[kind](tmp_path), weight=0.002, num_lanes=num_lanes)
    made = run(make, Topology(ranks=4, workers=2, batch_size=4), limit=125)
    assert not any(made.ended)
    packs = [pack for step in steps_of_run(made, Topology(4, 2, 4)) for pack in step]
    assert len(packs) == 2000
    data = make()
    data.load_state_dict(made.states[0])
    small, large = data.source_stats().values()
    assert small.trained > 0
    assert abs(small.trained / (small.trained + large.trained) - 0.002) < 0.002


# How evenly ranks share the work of a step.


def ratio(costs: list[int]) -> float:
    return max(costs) / fmean(costs) if sum(costs) else 1.0


@pytest.mark.parametrize("per_step", [4, 8])
def test_a_loader_knows_the_costs_of_all_ranks(per_step: int) -> None:
    def act(sync: ThreadSync) -> tuple[list[int], dict[str, float]]:
        loader = PackedDataLoader(make(numbers(300))(), batch_size=2, packs_per_step=per_step)
        loader.rank_sync = sync
        costs = [
            sum(sum(k + 1 for k in range(f.stop - f.start)) for pack in batch.fragments for f in pack)
            for batch in loader
        ]
        return costs, loader.metrics()

    ranks = on_ranks(2, act)
    batches = per_step // 4
    steps = [
        [sum(costs[first : first + batches]) for costs, _ in ranks]
        for first in range(0, len(ranks[0][0]), batches)
    ]
    wanted = fmean(map(ratio, steps))
    assert wanted > 1.02
    for _, metrics in ranks:
        assert metrics["cost_imbalance"] == metrics["cost_imbalance_mean"] == pytest.approx(wanted)
        assert metrics["data_wait"] == metrics["data_wait_mean"] > 0


def test_a_single_rank_has_no_imbalance() -> None:
    loader: Any = PackedDataLoader(make(numbers(100))(), batch_size=2)
    assert "data_wait" not in loader.metrics()
    steps = len(list(loader))
    metrics = loader.metrics()
    assert metrics["data_wait"] > 0
    assert "cost_imbalance" not in metrics
    assert loader.metrics() == metrics, "no step since the last call"
    more = len([*loader, *loader])
    waited, later = metrics["data_wait"], loader.metrics()
    assert later["data_wait_mean"] * (steps + more) == pytest.approx(
        waited * steps + later["data_wait"] * more
    )


# Steps, batches and runs that train nothing.


def row(tokens: int, trained: bool) -> dict[str, list[int]]:
    return {"tokens": [1] * tokens, "labels": [1 if trained else IGNORE_INDEX] * tokens}


def loader_of(*steps: tuple[int, bool], workers: int = 0, **settings: Any) -> PackedDataLoader:
    """Return a loader of steps of one pack of 8, each of (tokens, whether they are trained)."""
    data = IterablePackedDataset(
        [row(*each) for each in steps], max_seq_len=8, strategy="next_fit", num_lanes=1, **settings
    )
    return PackedDataLoader(data, num_workers=workers)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "steps",
    [
        [(8, False)],
        [(2, False), (8, True)],  # little, but nothing was trained before
        [(8, True), (5, False), (8, True)],
    ],
)
def test_a_step_that_trains_nothing(
    steps: list[tuple[int, bool]], workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    loader = loader_of(*steps, workers=workers)
    for _ in range(2):
        assert len(list(loader)) == len(steps)
    [said] = [record.message for record in caplog.records if "step(s)" in record.message]
    assert " trained nothing: no label of their tokens is trained" in said
    with pytest.raises(
        ValueError, match=rf"^[12] of {2 * len(steps)} step\(s\) trained nothing: .*untrained='drop'"
    ):
        loader.require_trained()
    kept = loader_of(*steps, untrained="keep")
    caplog.clear()
    assert len(list(kept)) == len(steps)
    kept.require_trained()
    assert not caplog.records


def test_the_rest_of_an_epoch_may_train_nothing(caplog: pytest.LogCaptureFixture) -> None:
    loader = loader_of((8, True), (3, False))
    assert len(list(loader)) == 2
    loader.require_trained()
    assert not [record for record in caplog.records if "step(s)" in record.message]


def test_a_step_is_judged_without_the_part_of_one_that_was_left() -> None:
    data = IterablePackedDataset(
        [row(8, number == 0) for number in range(3)], max_seq_len=8, strategy="next_fit", num_lanes=1
    )
    loader = PackedDataLoader(data, packs_per_step=2)
    next(iter(loader))
    assert len(list(loader)) == 2
    with pytest.raises(ValueError, match=r"^1 of 1 step\(s\) trained nothing"):
        loader.require_trained()


@pytest.mark.parametrize("wrong", [1, 2])
def test_ranks_count_together(wrong: int) -> None:
    """Of two ranks, ``wrong`` have only rows that train nothing."""

    def act(sync: ThreadSync) -> tuple[int, str]:
        rows = [row(8, trained=number % 2 >= wrong) for number in range(40)]
        data = IterablePackedDataset(rows, max_seq_len=8, num_lanes=2, shuffle=False)
        loader = PackedDataLoader(data)
        loader.rank_sync = sync
        trained = sum(int(batch.num_trained) for batch in loader)
        try:
            loader.require_trained()
        except ValueError as error:
            return trained, str(error)
        return trained, ""

    (first, said), (second, also_said) = on_ranks(2, act)
    assert (first == 0) + (second == 0) == wrong
    assert said == also_said
    assert said.partition(":")[0] == ("20 of 20 step(s) trained nothing" if wrong == 2 else "")


def chats(role: str) -> list[dict[str, Any]]:
    return [{"messages": [{"role": "user", "content": "Hi"}, {"role": role, "content": "Yes."}]}] * 4


def encoded(role: str) -> list[dict[str, Any]]:
    return [ChatEncoder(byte_level())(each)._asdict() for each in chats(role)]


def stream(role: str) -> IterablePackedDataset:
    return IterablePackedDataset(chats(role), encoder=ChatEncoder(byte_level()), max_seq_len=64)


DOORS: dict[str, Callable[[str], Any]] = {
    "loader": lambda role: list(PackedDataLoader(stream(role))),
    "workers": lambda role: list(PackedDataLoader(stream(role), num_workers=1)),
    "stream": lambda role: list(stream(role)),
    "torch": lambda role: list(DataLoader(stream(role), batch_size=2, collate_fn=collate_packed)),
    "map-style": lambda role: PackedDataset(encoded(role), max_seq_len=64),
    "flattening": lambda role: FlatteningCollator()(encoded(role)),
}


@pytest.mark.parametrize("door", DOORS)
def test_conversations_of_an_unknown_role_are_said(door: str, caplog: pytest.LogCaptureFixture) -> None:
    collators._warn_of_untrained.cache_clear()
    with caplog.at_level(logging.WARNING):
        DOORS[door]("assistant")
        assert not caplog.records
        DOORS[door]("bot")
    assert "only the assistant's are" in caplog.text
