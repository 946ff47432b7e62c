"""Lanes, compared with the reference implementation in tests/support/oracle.py.

`rows` makes rows ``{"i": number, "n": length}``, and `Numbers` encodes one as the tokens 1000 i + 1 to 1000 i + n, so
that each token tells its row and place. `WAYS` are the strategies and, as "wrap", ``split_across_pack``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack import IGNORE_INDEX, Mix, Pack, Sample, TokensEncoder
from streampack.packing.settings import Packing
from streampack.sources import IterableSource, JSONLSource, MapSource
from streampack.streaming.lane import Lane
from streampack.streaming.lane_config import LaneConfig
from streampack.streaming.lane_state import LaneState
from tests.support import oracle
from tests.support.corpus import STRIDE, Numbers, make_source, rows, write
from tests.support.strategies import WAYS, settings_of

POLICIES = ("split", "drop", "truncate")


def config_of(source: Any, *, encode: Any = None, **changes: Any) -> LaneConfig:
    names = ("strategy", "split_across_pack", "buffer_size", "overlong", "truncate_side", "max_seq_len")
    packing = {"max_seq_len": 24, "buffer_size": 6} | {k: changes.pop(k) for k in names if k in changes}
    encode = Numbers() if encode is None else encode
    return LaneConfig(source=source, encode=encode, packing=Packing(**packing), **changes)


def make(source: Any, *, state: LaneState | None = None, **changes: Any) -> Lane:
    lane = Lane(config_of(source, **changes), state=state)
    lane.restore()
    return lane


def drain(lane: Lane, limit: int = 10_000) -> list[Pack]:
    packs: list[Pack] = []
    while len(packs) < limit and (pack := lane.next_pack()) is not None:
        packs.append(pack)
    return packs


def content(pack: Pack) -> tuple[Any, ...]:
    rest = pack.seq_lens, pack.fragments, pack.epoch, pack.number, pack.lane
    return pack.tokens.tolist(), pack.labels.tolist(), rest


def spans(pack: Pack) -> list[tuple[int, int, int]]:
    return [(f.row_id[0], f.start, f.stop) for f in pack.fragments]


# What a lane makes.


@pytest.mark.parametrize("strategy", WAYS)
@pytest.mark.parametrize("overlong", POLICIES)
@pytest.mark.parametrize("side", ["right", "left"])
def test_packs_match_the_reference_implementation(strategy: str, overlong: str, side: str) -> None:
    """Plan, arrays, provenance and ledger equal those of the reference, after every pack."""
    data = rows(150, overlong=70)
    lengths = [row["n"] for row in data]
    lane = make(
        MapSource(data), truncate_side=side, padding_idx=7, overlong=overlong, **settings_of(strategy)
    )
    expected = oracle.plan(lengths, 24, strategy=strategy, buffer_size=6, overlong=overlong, side=side)
    encode = Numbers()
    packs: list[Pack] = []
    while (pack := lane.next_pack()) is not None:
        packs.append(pack)
        assert spans(pack) == expected[len(packs) - 1]
        sequences = []
        for i, start, stop in spans(pack):
            sample = encode(data[i])
            sequences.append((sample.tokens[start:stop].tolist(), sample.labels[start:stop].tolist()))
        arrays = (pack.tokens.tolist(), pack.labels.tolist())
        assert arrays == oracle.assemble(sequences, 24, padding_idx=7)[:2]
        assert pack.seq_lens == tuple(stop - start for _, start, stop in spans(pack))
        assert (pack.number, pack.epoch, pack.lane) == (len(packs) - 1, 0, 0)

        ledger = lane.ledger
        wanted = oracle.ledger(
            lengths[: ledger.samples],
            24,
            expected[: len(packs)],
            overlong=overlong,
            side=side,
            wraps=strategy == "wrap",
        )
        assert (ledger.tokens_in, ledger.buffered) == (wanted["tokens_in"], wanted["buffered"])
        assert {**ledger.dropped} == {
            "overlong": wanted["overlong"],
            "truncated": wanted["truncated"],
            "empty": 0,
            "bad": 0,
            "untrained": 0,
            "removed": 0,
        }
        assert [ledger.packs, ledger.capacity, ledger.packed] == [
            wanted[k] for k in ("packs", "capacity", "packed")
        ]
        assert lane.state().ledger == ledger
    assert len(packs) == len(expected)
    check_trained(packs)
    assert (lane.ledger.samples, lane.ledger.tokens_in, lane.ledger.buffered) == (150, sum(lengths), 0)


def check_trained(packs: list[Pack]) -> None:
    """A fragment of a split sample says how many tokens all of that sample's fragments train."""
    trained: dict[int, list[int]] = {}
    for pack in packs:
        begin = 0
        for fragment, length in zip(pack.fragments, pack.seq_lens, strict=True):
            labels = pack.labels[begin : begin + length]
            trained.setdefault(fragment.row_id[0], []).append(int((labels != IGNORE_INDEX).sum()))
            begin += length
    for fragment in (fragment for pack in packs for fragment in pack.fragments):
        counts = trained[fragment.row_id[0]]
        assert fragment.trained == (sum(counts) if len(counts) > 1 else None)


@pytest.mark.parametrize("labels", [[5, 6, 7, 8], [5, 6, 7, -100]])
def test_a_truncated_sample_may_end_in_eos(labels: list[int]) -> None:
    ready = [
        {"tokens": [5, 6, 7, 8, 9], "labels": [*labels, 9]},
        {"tokens": [1, 2, 3, 4], "labels": [1, 2, 3, 4]},
    ]
    lane = make(MapSource(ready), encode=TokensEncoder(), max_seq_len=4, overlong="truncate", truncate_eos=2)
    cut, whole = drain(lane)
    assert cut.tokens.tolist() == [5, 6, 7, 2]
    assert cut.labels.tolist() == [-100, 6, 7, 2 if labels[-1] == 8 else -100]
    assert whole.tokens.tolist() == [1, 2, 3, 4], "what was not cut keeps its end"
    assert lane.ledger.dropped["truncated"] == 1


@pytest.mark.parametrize("mixed", [False, True])
def test_a_truncated_sample_keeps_the_eos_of_its_tokenizer(mixed: bool) -> None:
    """Unless it had none."""

    class WithTokenizer:
        tokenizer = SimpleNamespace(eos_id=2)

        def __call__(self, row: Any) -> Any:
            return row

    ready = [{"tokens": [5, 6, 7, 8, 9, end], "labels": [5, 6, 7, 8, 9, end]} for end in (2, 3)]
    cut: dict[str, Any] = {"max_seq_len": 4, "overlong": "truncate"}
    if mixed:
        mix = Mix([{"name": "a", "source": MapSource(ready), "weight": 1, "encoder": WithTokenizer()}])
        lane = make(mix, encode=TokensEncoder(), **cut)
    else:
        lane = make(MapSource(ready), encode=WithTokenizer(), **cut)
    assert [pack.tokens.tolist() for pack in drain(lane)] == [[5, 6, 7, 2], [5, 6, 7, 8]]


def test_splitting_adds_no_eos() -> None:
    lane = make(MapSource([{"i": 1, "n": 60}]), overlong="split", truncate_eos=2)
    assert [t for pack in drain(lane) for t in pack.tokens.tolist() if t] == [
        STRIDE + j for j in range(1, 61)
    ]


def test_empty_samples_are_an_error_or_dropped_by_name() -> None:
    data = [{"i": i, "n": n} for i, n in enumerate([3, 0, 4, 0, 0])]
    lane = make(MapSource(data))
    for _ in range(2):
        with pytest.raises(ValueError) as error:
            lane.next_pack()
        message = "sample 1 has 0 tokens; mend the row, or set empty='drop', which counts and leaves out such samples"
        assert str(error.value) == message
    for overlong in ("error", *POLICIES):
        lane = make(MapSource(data), empty="drop", overlong=overlong)
        assert [spans(pack) for pack in drain(lane)] == [[(0, 0, 3), (2, 0, 4)]]
        assert (lane.ledger.samples, lane.ledger.dropped_samples["empty"]) == (5, 3)
        assert lane.ledger.buffered == 0


def test_a_sample_that_is_too_long_is_named() -> None:
    lane = make(MapSource([{"i": 0, "n": 3}, {"i": 1, "n": 25}]), overlong="error")
    for _ in range(2):
        with pytest.raises(ValueError) as error:
            lane.next_pack()
        assert str(error.value) == (
            "sample 1 has 25 tokens, max_seq_len is 24; set overlong to 'split', 'truncate' or 'drop', "
            "or raise max_seq_len"
        )


def test_an_id_outside_the_vocabulary_is_an_error_with_its_place(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"i": 0, "n": 3}, {"i": 1, "n": 3}])
    lane = make(JSONLSource(path), vocab_size=1000)
    with pytest.raises(ValueError) as error:
        drain(lane)
    assert str(error.value) == (
        f"{path}:2: token id 1001 is outside the vocabulary of 1000 ids (0 to 999); use the model's own tokenizer, or "
        "resize the model's embeddings"
    )
    assert len(drain(make(JSONLSource(path), vocab_size=1004))) == 1


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


@pytest.mark.parametrize("strategy", WAYS)
@settings(max_examples=20)
@given(
    overlong=st.sampled_from(POLICIES),
    window=st.sampled_from([0, 5]),
    where=st.sampled_from(["row", "sample"]),
    fails=st.sets(st.integers(0, 60), min_size=1, max_size=12),
    kind=st.sampled_from([OSError, ValueError, KeyError]),
)
def test_a_lane_makes_the_same_packs_after_any_error(
    strategy: str, overlong: str, window: int, where: str, fails: set[int], kind: type[Exception]
) -> None:
    """Whatever fails, whenever: asked again, the lane makes the packs of a run without errors."""
    data = rows(40, overlong=70)
    options = {"overlong": overlong, "shuffle_window": window, **settings_of(strategy)}
    whole = [content(pack) for pack in drain(make(MapSource(data), **options))]
    dataset = Flaky(data, fails if where == "row" else set(), lambda: kind("no luck"))
    encode = Flaky(Numbers(), fails if where == "sample" else set(), lambda: kind("no luck"))
    lane = make(MapSource(dataset), encode=encode, **options)
    packs: list[Any] = []
    errors = 0
    while True:
        try:
            pack = lane.next_pack()
        except kind as error:
            assert "no luck" in str(error)
            errors += 1
            continue
        if pack is None:
            break
        packs.append(content(pack))
    assert packs == whole
    if min(fails) < 40:
        assert errors


@pytest.mark.parametrize("endless", [False, True])
@pytest.mark.parametrize("overlong", POLICIES)
def test_a_bad_sample_raises_again_until_it_is_repaired(endless: bool, overlong: str) -> None:
    data = rows(60, overlong=70)
    whole = [content(pack) for pack in drain(make(MapSource(data), endless=endless, overlong=overlong), 60)]
    encode = Numbers()
    encode.bad = 30
    lane = make(MapSource(data), encode=encode, endless=endless, overlong=overlong)
    packs: list[Pack] = []
    for _ in range(4):
        with pytest.raises(ValueError, match=r"^sample 30: cannot be encoded$"):
            while True:
                event = lane.next_event()
                assert event.pack is not None
                packs.append(event.pack)
                state = event.state
    # Elsewhere too, from the last state.
    other = make(MapSource(data), encode=encode, endless=endless, overlong=overlong, state=state)
    with pytest.raises(ValueError, match=r"^sample 30: cannot be encoded$"):
        drain(other)
    encode.bad = None
    for resumed in (lane, other):
        rest = drain(resumed, 60 - len(packs))
        assert [content(pack) for pack in [*packs, *rest]] == whole


def test_a_bad_row_is_named_by_its_place_whatever_the_error() -> None:
    for kind in (ValueError, KeyError, TypeError, RuntimeError):
        encode = Numbers()
        encode.bad, encode.error = 3, kind("no luck")
        with pytest.raises(kind) as error:
            drain(make(MapSource(rows(5)), encode=encode))
        assert "sample 3" in said(error.value)
        assert "no luck" in said(error.value)
        # torchtune's datasets encode in __getitem__, so a missing column shows there.
        dataset = Flaky(rows(5), {3}, lambda kind=kind: kind("no luck"))
        with pytest.raises(kind) as error:
            drain(make(MapSource(dataset)))
        assert "sample 3" in said(error.value)
        assert "no luck" in said(error.value)


@pytest.mark.parametrize("where", ["row", "sample"])
def test_a_stop_iteration_of_the_encoder_does_not_end_the_lane(where: str) -> None:
    """``next(...)`` on something exhausted, in a user's code: the stream must not just be shorter."""
    dataset = Flaky(rows(20), {10} if where == "row" else set(), StopIteration)
    encode = Flaky(Numbers(), {10} if where == "sample" else set(), StopIteration)
    with pytest.raises(RuntimeError):
        drain(make(MapSource(dataset), encode=encode))


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
    made = Numbers()
    bad = [True]

    def encode(row: Mapping[str, Any]) -> Any:
        sample = made(row)
        return broken(sample) if row["i"] == 5 and bad[0] else sample

    data = [{"i": i, "n": 5} for i in range(12)]
    lane = make(MapSource(data), encode=encode)
    packs: list[Pack] = []
    for _ in range(2):
        with pytest.raises((ValueError, TypeError, AttributeError)) as error:
            packs.extend(drain_until_error(lane))
        assert "sample 5" in said(error.value)
    bad[0] = False
    packs += drain(lane)
    assert [content(p) for p in packs] == [content(p) for p in drain(make(MapSource(data)))]


def drain_until_error(lane: Lane) -> Any:
    while True:
        pack = lane.next_pack()
        assert pack is not None
        yield pack


# States.


@pytest.mark.parametrize("kind", ["map", "jsonl", "iterable"])
@pytest.mark.parametrize("strategy", WAYS)
def test_a_lane_made_from_a_state_has_the_same_state(tmp_path: Path, kind: str, strategy: str) -> None:
    """A lane made from a state gives the same state, and the same ledger, before it does anything."""
    data = rows(120, overlong=70)
    for overlong in POLICIES:
        options = {"overlong": overlong, "shuffle_window": 5, **settings_of(strategy)}
        lane = make(make_source(kind, tmp_path, data), **options)
        while (event := lane.next_event()).pack is not None:
            again = make(make_source(kind, tmp_path, data), state=event.state, **options)
            assert again.state() == event.state == lane.state()
            assert again.ledger == lane.ledger
            assert (again.packs, again.epoch, again.done) == (lane.packs, lane.epoch, False)
        done = lane.state()
        again = make(make_source(kind, tmp_path, data), state=done, **options)
        assert again.done
        assert again.next_pack() is None
        assert again.state() == done
        again.start_epoch(1)
        lane.start_epoch(1)
        assert [content(p) for p in drain(again)] == [content(p) for p in drain(lane)]


def middle(source: Any, **options: Any) -> LaneState:
    """A state with several pieces in flight."""
    lane = make(source, **options)
    while (event := lane.next_event()).pack is not None:
        if event.state.packs > 5 and event.state.ledger.buffered > 10:
            return event.state
    raise AssertionError("no such state")


def test_a_state_refuses_data_that_changed() -> None:
    """Where the fingerprint could not see it."""
    data = rows(100)
    state = middle(IterableSource(data))
    first = state.cursor[1]  # the row of the oldest waiting piece

    with pytest.raises(ValueError) as error:
        make(IterableSource(data[:first]), state=state)
    assert str(error.value) == (
        f"lane 0: the state says {state.next_piece} pieces were read and the corpus ends after {state.first}; "
        "the data or the encoder changed"
    )
    longer = [dict(row) for row in data]
    longer[first]["n"] += 1
    with pytest.raises(ValueError) as error:
        make(IterableSource(longer), state=state)
    assert str(error.value) == (
        f"lane 0: {state.ledger.buffered + 1} tokens wait after reading again, the state says "
        f"{state.ledger.buffered}; the data or the encoder changed since it was written"
    )
    too_long = [dict(row) for row in data]
    too_long[first]["n"] = 30
    with pytest.raises(
        ValueError,
        match=r"^lane 0: row \d+ makes 0 pieces, and the state says 1; the data or",
    ):
        make(IterableSource(too_long), state=state, overlong="drop")


def test_lost_tokens_are_detected_when_a_state_is_taken() -> None:
    lane = make(MapSource(rows(50)))
    lane.next_pack()
    lane.ledger.tokens_in += 1
    with pytest.raises(RuntimeError, match=r"lane 0 lost tokens: .* this is a bug in streampack"):
        lane.next_event()


def test_packs_share_no_memory_with_the_lane() -> None:
    """What a trainer does to a pack in place must not reach the pieces that still wait, nor the dataset's rows."""
    ready = [{"tokens": np.arange(1, 11) + 100 * i, "labels": np.arange(1, 11) + 100 * i} for i in range(6)]
    before = [row["tokens"].tolist() for row in ready]
    lane = make(MapSource(ready), encode=TokensEncoder(), split_across_pack=True, max_seq_len=7)
    seen: list[int] = []
    for pack in iter(lane.next_pack, None):
        seen += pack.tokens[: sum(pack.seq_lens)].tolist()
        pack.tokens[:] = -5
        pack.labels[:] = -5
    assert seen == [token for tokens in before for token in tokens]
    assert [row["tokens"].tolist() for row in ready] == before
