"""What a stream makes of rows, compared with the reference in tests/oracle/packing.py, and what it refuses.

`rows` makes rows ``{"i": number, "n": length}``, and `Numbers` encodes one as the tokens 1000 i + 1 to 1000 i + n, so
that each token tells its row and place. `WAYS` are the strategies and, as "wrap", ``split_across_pack``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from streampack import (
    IGNORE_INDEX,
    IterablePackedDataset,
    IterableSource,
    JSONLSource,
    MapSource,
    Mix,
    Sample,
    collate_packed,
)
from tests.harness import threads
from tests.harness.conformance import content
from tests.harness.corpus import Numbers, make_source, rows, samples_in, write
from tests.harness.mixtures import make
from tests.oracle import packing as oracle
from tests.oracle.packing import WAYS, settings_of


class Ended(Numbers):
    """Every text ends with the same token."""

    eos_id = 2

    def __call__(self, row: Any, /) -> Sample:
        found = super().__call__(row)
        found.tokens[-1] = found.labels[-1] = self.eos_id
        return found


POLICIES = ("split", "drop", "truncate", "truncate_left")


def spans(pack: Mapping[str, Any]) -> list[tuple[int, int, int]]:
    return [(f.row_id[0], f.start, f.stop) for f in pack["fragments"]]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("overlong", POLICIES)
def test_packs_match_the_reference_implementation(way: str, overlong: str) -> None:
    """Plan, arrays, provenance and ledger equal those of the reference, after every pack."""
    data = rows(150, overlong=70)
    lengths = [row["n"] for row in data]
    dataset = make(
        MapSource(data), padding_idx=7, overlong=overlong, buffer_size=6, num_lanes=1,
        **settings_of(way),
    )  # fmt: skip
    expected = oracle.plan(lengths, 24, strategy=way, buffer_size=6, overlong=overlong)
    encode, packs = Numbers(), []
    for pack in dataset:
        assert spans(pack) == expected[len(packs)]
        packs.append(pack)
        sequences = []
        for i, start, stop in spans(pack):
            sample = encode(data[i])
            sequences.append((sample.tokens[start:stop].tolist(), sample.labels[start:stop].tolist()))
        tokens, labels, positions = oracle.assemble(sequences, 24, padding_idx=7)
        assert (pack["tokens"].tolist(), pack["labels"].tolist()) == (tokens, labels)
        assert pack["input_pos"].tolist() == positions
        ledger = dataset.ledger()
        wanted = oracle.ledger(
            lengths[: ledger.samples],
            24,
            expected[: len(packs)],
            overlong=overlong,
            wraps=way == "wrap",
        )
        dropped = {"overlong": wanted.pop("overlong"), "truncated": wanted.pop("truncated")}
        assert {name: getattr(ledger, name) for name in wanted} == wanted
        assert {
            name: tokens for name, tokens in ledger.dropped.items() if tokens or name in dropped
        } == dropped
    assert len(packs) == len(expected)
    check_trained(packs)
    ledger = dataset.ledger()
    assert (ledger.samples, ledger.tokens_in, ledger.buffered) == (150, sum(lengths), 0)


def check_trained(packs: list[dict[str, Any]]) -> None:
    """A fragment of a split sample says how many tokens all of that sample's fragments train."""
    trained: dict[int, list[int]] = {}
    for pack in packs:
        ends = pack["seq_lens"].cumsum(0).tolist()
        for fragment, length, end in zip(pack["fragments"], pack["seq_lens"].tolist(), ends, strict=False):
            labels = pack["labels"][end - length : end]
            trained.setdefault(fragment.row_id[0], []).append(int((labels != IGNORE_INDEX).sum()))
    for fragment in (fragment for pack in packs for fragment in pack["fragments"]):
        counts = trained[fragment.row_id[0]]
        assert fragment.trained == (sum(counts) if len(counts) > 1 else None)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_truncated_sample_keeps_the_eos_of_its_tokenizer(mixed: bool) -> None:
    """Unless it had none."""

    class WithTokenizer:
        tokenizer = SimpleNamespace(eos_id=2)

        def __call__(self, row: Any) -> Any:
            return row

    ready = [{"tokens": [5, 6, 7, 8, 9, end], "labels": [5, 6, 7, 8, 9, end]} for end in (2, 3)]
    source: Any = MapSource(ready)
    if mixed:
        source = Mix([{"name": "a", "source": source, "weight": 1, "encoder": WithTokenizer()}])
    encoder = None if mixed else WithTokenizer()
    cut = make(source, encoder=encoder, max_seq_len=4, overlong="truncate", num_lanes=1)
    assert [pack["tokens"].tolist() for pack in cut] == [[5, 6, 7, 2], [5, 6, 7, 8]]


def test_a_stream_takes_one_pack_of_each_lane_in_turn() -> None:
    """In the lanes' order, until one runs dry; a lane's packs do not depend on who reads the others."""
    packs = list(make(MapSource(rows(200)), num_lanes=4))
    assert [pack["lane"] for pack in packs[:32]] == [0, 1, 2, 3] * 8
    for lane in range(4):
        alone = make(MapSource(rows(200)), num_lanes=4).stream(lane, 4)
        assert [p.tokens.tolist() for p in alone] == [
            p["tokens"].tolist() for p in packs if p["lane"] == lane
        ]


def test_packs_share_no_memory_with_what_waits() -> None:
    """What a trainer does to a pack in place must reach neither the rest of a sample nor the dataset's rows."""
    ready = [{"tokens": np.arange(1, 11) + 100 * i, "labels": np.arange(1, 11) + 100 * i} for i in range(6)]
    before = [row["tokens"].tolist() for row in ready]
    seen: list[int] = []
    for pack in IterablePackedDataset(ready, split_across_pack=True, max_seq_len=7, num_lanes=1):
        seen += pack["tokens"][: int(pack["seq_lens"][: pack["num_seqs"]].sum())].tolist()
        pack["tokens"][:] = -5
        pack["labels"][:] = -5
    assert seen == [token for tokens in before for token in tokens]
    assert [row["tokens"].tolist() for row in ready] == before


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("map", {"overlong": "split"}),
        ("jsonl", {"overlong": "truncate_left"}),
        ("gz", {"split_across_pack": True}),
        ("zst", {"overlong": "truncate"}),
        ("iterable", {"overlong": "truncate", "encoder": Ended()}),
    ],
)
def test_trace_finds_the_text_of_every_sequence(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    data = rows(90, overlong=70)
    source = make_source(kind, tmp_path, data)
    dataset = make(source, shuffle=8, num_lanes=1, **changes)
    traced = 0
    for pack in dataset:
        begin = 0
        for length, fragment in zip(pack["seq_lens"].tolist(), pack["fragments"], strict=False):
            trace = dataset.trace(fragment)
            assert kind != "iterable" or trace["tokens"][-1] == 2
            assert trace["tokens"] == pack["tokens"][begin : begin + length].tolist()
            i = trace["row"]["i"]
            assert trace["row"] == data[i]
            if kind in ("map", "iterable"):
                assert trace["place"] == f"{'sample' if kind == 'map' else 'row'} {i}"
            else:
                assert trace["place"] == f"{source.files[i // 30].path}:{i % 30 + 1}"
            begin += length
            traced += 1
    assert traced >= 80


# Doors.


def test_the_first_batch_reads_little_of_a_large_file(tmp_path: Path) -> None:
    line = b'{"tokens": [%s], "labels": [%s]}\n' % (b", ".join([b"1234"] * 30), b", ".join([b"1234"] * 30))
    path = tmp_path / "large.jsonl"
    path.write_bytes(line * (20_000_000 // len(line)))
    for shuffle, rows_at_most in ((False, 8 * (128 + 70)), (True, 8 * (2048 + 128 + 70))):
        source = JSONLSource(path)
        dataset = IterablePackedDataset(source, max_seq_len=2048, shuffle=shuffle, num_lanes=8)
        batch = next(iter(DataLoader(dataset, batch_size=8, collate_fn=collate_packed)))
        assert batch.tokens.shape == (8, 2048)
        dataset.state_dict()
        assert source.bytes_read <= rows_at_most * len(line)


# Refusals.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(
            ({name: 0}, f"{name}=0 is below 1; give at least 1")
            for name in ("max_seq_len", "num_lanes", "epochs")
        ),
        *(({name: 1.5}, f"{name}=1.5 is not a whole number") for name in ("vocab_size", "shuffle")),
        ({"shuffle": -1}, "shuffle=-1 is below 0; give at least 0"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": None}, "seed=None"),
        ({"strategy": "worst_fit"}, "strategy='worst_fit' is unknown; choose one of 'next_fit'"),
        ({"untrained": "skip"}, "untrained='skip' is unknown; choose one of 'keep', 'drop', 'error'"),
        ({"balance_window": -1}, "balance_window=-1"),
        ({"balance_window": 5000}, "balance_window=5000"),
        ({"balance_window": 1.5}, "balance_window=1.5"),
        ({"max_document_tokens": 9}, "max_document_tokens=9 is below 24"),
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        make(MapSource(rows(3)), **changes)
    assert message in str(error.value)


# Errors consume nothing.


def said(error: BaseException) -> str:
    """All an error shows: its message and the notes below it."""
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


class Flaky:
    """A map-style dataset or an encoder that raises at the calls it is told to, once each."""

    def __init__(self, inner: Any, fails: set[int], error: Callable[[], Exception]) -> None:
        self.inner, self.fails, self.error, self.calls = inner, fails, error, 0

    def _maybe(self) -> None:
        self.calls += 1
        if self.calls - 1 in self.fails:
            raise self.error()

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        self._maybe()
        return self.inner[index]

    def __call__(self, row: Mapping[str, Any], /) -> Sample:
        self._maybe()
        return self.inner(row)


def flaky(
    data: list[dict[str, int]], where: str, fails: set[int], error: Callable[[], Exception]
) -> tuple[Any, Any]:
    """A source and an encoder of which one fails."""
    source = Flaky(data, fails if where == "row" else set(), error)
    return MapSource(source), Flaky(Numbers(), fails if where == "sample" else set(), error)


@pytest.mark.filterwarnings("ignore:the encoder .*Flaky makes other tokens of the same row")
@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=15)
@given(
    changes=st.fixed_dictionaries(
        {
            "overlong": st.sampled_from(POLICIES),
            "shuffle": st.sampled_from([1, 5]),
            "balance_window": st.sampled_from([0, 4]),
            "num_lanes": st.sampled_from([1, 3]),
        }
    ),
    where=st.sampled_from(["row", "sample"]),
    fails=st.sets(st.integers(0, 60), min_size=1, max_size=12),
    kind=st.sampled_from([OSError, ValueError, KeyError]),
)
def test_a_stream_makes_the_same_packs_after_any_error(
    way: str, changes: dict[str, Any], where: str, fails: set[int], kind: type[Exception]
) -> None:
    """Whatever fails, whenever: iterated again, it makes the packs of a run without errors."""
    data = rows(40, overlong=70)
    changes = {**changes, **settings_of(way)}
    whole = [content(pack) for pack in make(MapSource(data), **changes)]
    source, encoder = flaky(data, where, fails, lambda: kind("no luck"))
    dataset = make(source, encoder=encoder, **changes)
    packs: list[Any] = []
    errors = 0
    while True:
        try:
            packs += (content(pack) for pack in dataset)
        except (kind, ValueError) as error:  # a row that waited cannot be read again
            assert "no luck" in said(error) or isinstance(error.__cause__, kind)
            errors += 1
            continue
        break
    assert packs == whole
    assert errors or min(fails) >= 40


@pytest.mark.parametrize("where", ["row", "sample"])
@pytest.mark.parametrize("kind", [ValueError, KeyError, TypeError, RuntimeError, StopIteration])
def test_a_bad_row_is_named_by_its_place_whatever_the_error(where: str, kind: type[Exception]) -> None:
    """torchtune's datasets encode in ``__getitem__``. A StopIteration must not just make the stream shorter."""
    source, encoder = flaky(rows(5), where, {3}, lambda: kind("no luck"))
    with pytest.raises(RuntimeError if kind is StopIteration else kind) as error:
        list(make(source, encoder=encoder, num_lanes=1))
    if kind is not StopIteration:
        assert "sample 3" in said(error.value)
        assert "no luck" in said(error.value)


@pytest.mark.parametrize(
    "broken",
    [
        lambda s: Sample(s.tokens, s.labels[1:]),
        lambda s: Sample(s.tokens.astype(float), s.labels.astype(float)),
        lambda s: Sample(s.tokens[None], s.labels[None]),
        lambda s: None,
    ],
    ids=["labels", "float", "2-d", "none"],
)
def test_an_encoder_result_that_is_no_sample_is_an_error_with_its_place(
    broken: Callable[[Sample], Any],
) -> None:
    """An encoder is the user's code: what it gives is checked before anything is taken."""
    bad = [True]

    def encode(row: Mapping[str, Any]) -> Any:
        sample = Numbers()(row)
        return broken(sample) if row["i"] == 5 and bad[0] else sample

    data = MapSource([{"i": i, "n": 5} for i in range(12)])
    dataset, packs = make(data, encoder=encode, num_lanes=1), []
    for _ in range(2):
        with pytest.raises((ValueError, TypeError, AttributeError)) as error:
            for pack in dataset:
                packs.append(content(pack))
        assert "sample 5" in said(error.value)
    bad[0] = False
    packs += map(content, dataset)
    assert packs == [content(pack) for pack in make(data, num_lanes=1)]


# Data that changed where the identity, which reads a few rows, could not see it.


@pytest.mark.parametrize("window", [0, 6])
def test_a_resume_refuses_rows_that_changed(window: int) -> None:
    data = rows(100)
    settings: dict[str, Any] = {"num_lanes": 1, "balance_window": window}
    before = make(IterableSource(data), **settings)
    list(islice(before, 10))
    state = before.state_dict()

    def refusal(changed: list[dict[str, int]]) -> str:
        after = make(IterableSource(changed), **settings)
        try:
            after.load_state_dict(state)
            next(iter(after))
        except ValueError as error:
            return str(error)
        return ""

    read = before.ledger().samples
    longer = [refusal([*data[:i], {**data[i], "n": data[i]["n"] + 1}, *data[i + 1 :]]) for i in range(read)]
    assert any("the data or the encoder changed" in words for words in longer), "each row that waited"
    # Rows are gone: those that waited are missed, and with a window those of which packs were planned.
    last = state["lanes"][0]["reader"][2][-1][1]
    assert re.search("the data( or the encoder)? changed", refusal(data[:last]))
    assert refusal(data) == refusal(data[:read] + rows(20, seed=1)) == ""


# The order of rows.


def order_of(seed: int, *, lanes: int = 1) -> list[list[list[int]]]:
    """Return ``[epoch][lane]``: the places in their window that the rows of a file take, one number a row."""
    dataset = make(
        MapSource([{"i": i, "n": 24} for i in range(96)]), num_lanes=lanes, shuffle=True, seed=seed, epochs=2
    )
    found = [[[] for _ in range(lanes)] for _ in range(2)]
    for pack in dataset:
        found[pack["epoch"]][pack["lane"]].append(pack["fragments"][0].row_id[0] // lanes)
    return found


def windows_of(seed: int, path: Path) -> list[list[int]]:
    """Return the orders of the rows within windows of 8 rows of a file, over two epochs."""
    data = [{"i": i, "n": 24} for i in range(64)]
    if not path.exists():
        write(path, data)
    packs = make(path, num_lanes=1, shuffle=8, seed=seed, epochs=2, strategy="next_fit")
    numbers = [int(pack["tokens"][0]) // 1000 for pack in packs]
    return [numbers[at : at + 8] for at in range(0, 128, 8)]


def test_rows_are_shuffled_anew_in_every_epoch_lane_and_window(tmp_path: Path) -> None:
    """By the seed alone, so that the same seed gives the same order."""
    first = order_of(1, lanes=2)
    assert first == order_of(1, lanes=2)
    orders = [str(lane) for epoch in (*first, *order_of(2, lanes=2)) for lane in epoch]
    assert len({*orders}) == 8
    windows = windows_of(1, tmp_path / "a.jsonl")
    for epoch in (windows[:8], windows[8:]):
        assert sorted(number for window in epoch for number in window) == [*range(64)]
    relative = {str([sorted(window).index(number) for number in window]) for window in windows}
    assert len(relative) > 12, "each window has a permutation of its own"
    assert windows == windows_of(1, tmp_path / "a.jsonl") != windows_of(2, tmp_path / "a.jsonl")


# Windows of packs: the same packs, handed out by cost in an order that all lanes share.


def cost_of(pack: Mapping[str, Any]) -> int:
    return sum(n * (n + 1) // 2 for n in pack["seq_lens"][: pack["num_seqs"]].tolist())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("window", "shuffle"), [(1, True), (5, False), (8, True)])
def test_a_window_hands_out_the_planned_packs_by_cost(way: str, window: int, shuffle: bool) -> None:
    """Each window has the packs that are planned without one; in each slot, the lanes' packs have one rank by cost."""
    changes: dict[str, Any] = {
        **settings_of(way), "num_lanes": 3, "overlong": "split", "shuffle": shuffle, "epochs": 2
    }  # fmt: skip
    source = MapSource(rows(400, overlong=60))
    planned, handed = (list(make(source, balance_window=n, **changes)) for n in (0, window))
    ranks: dict[tuple[int, int], set[str]] = {}
    for epoch in range(2):
        for lane in range(3):
            ours, theirs = (
                [pack for pack in packs if (pack["epoch"], pack["lane"]) == (epoch, lane)]
                for packs in (handed, planned)
            )
            assert len(ours) == len(theirs) > 16
            for at in range(0, len(ours), window):
                before = [content(pack) for pack in theirs[at : at + window]]
                after = [content(pack) for pack in ours[at : at + window]]
                assert sorted(before) == sorted(after)
                if len(after) == window:
                    costs = [(cost_of(pack), i) for i, pack in enumerate(theirs[at : at + window])]
                    order = [sorted(costs).index(costs[before.index(pack)]) for pack in after]
                    ranks.setdefault((epoch, at), set()).add(str(order))
    assert all(len(found) == 1 for found in ranks.values()), "lanes have packs of different ranks in a slot"
    if window == 8:
        assert len({*map(str, ranks.values())}) > 2, "every window and epoch has its own permutation"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("window", [1, 7])
def test_a_piece_waits_for_a_bounded_number_of_packs(way: str, window: int) -> None:
    """From when it is read, at most ``buffer_size + 2 * balance_window`` packs are handed out before its own."""
    encode, handed = Numbers(), 0
    read: dict[int, int] = {}  # by sample, the packs that were handed out when it was read

    def encoded(row: Mapping[str, Any]) -> Any:
        read.setdefault(row["i"], handed)
        return encode(row)

    changes = {"balance_window": window, "num_lanes": 1, "encoder": encoded, **settings_of(way)}
    for pack in make(MapSource(rows(150)), **changes):
        for i in samples_in([pack]):
            assert handed - read[i] <= 8 + 2 * window
        handed += 1
    assert handed > 20


def test_the_default_window_depends_on_ranks_and_length() -> None:
    data = [{"i": i, "n": 5} for i in range(40)]
    for length, ranks, expected in ((24, 4, 0), (8_191, 4, 0), (8_192, 1, 0), (8_192, 2, 64)):
        settings = {"max_seq_len": length, "balance_window": None, "epochs": 1}
        made = threads.run(threads.make(data, **settings), threads.Topology(ranks))
        assert {state["balance_window"] for state in made.states} == {expected}


@pytest.mark.parametrize(("ranks", "workers", "batch_size"), [(1, 0, 4), (2, 2, 2), (2, 0, 1)])
def test_the_packs_of_a_step_cost_alike(ranks: int, workers: int, batch_size: int) -> None:
    """On every topology, with gradient accumulation and without, if steps are whole rows of the lanes' packs."""
    topology = threads.Topology(ranks, workers, batch_size, 4 // (ranks * batch_size))

    def steps(window: int) -> list[list[int]]:
        built = threads.make(rows(1500), balance_window=window, num_lanes=4, max_seq_len=24, epochs=1)
        return [
            [sum(n * (n + 1) // 2 for n in (stop - start for _, start, stop, *_ in pack)) for _, pack in step]
            for step in threads.steps_of_run(threads.run(built, topology), topology)
        ]

    def excess(steps: list[list[int]]) -> float:
        """Mean over the whole steps of the dearest pack above their mean."""
        return fmean(max(costs) / fmean(costs) - 1 for costs in steps if len(costs) == 4)

    with_window, without = steps(32), steps(0)
    assert excess(with_window) < 0.4 * excess(without)
    assert sorted(cost for step in with_window for cost in step) == sorted(
        cost for step in without for cost in step
    )
