"""What a run says of its rows: that none makes a pack, that some train nothing, that one is a giant."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from streampack import (
    IGNORE_INDEX,
    IterablePackedDataset,
    IterableSource,
    JSONLSource,
    Mix,
    PackedDataLoader,
    PackedDataset,
)
from tests.harness.corpus import Numbers, all_of, rows, samples_in, write
from tests.harness.threads import ThreadSync, on_ranks

# No packs.

LONG = [{"i": i, "n": 30} for i in range(40)]
EMPTY = [{"i": i, "n": 0} for i in range(40)]
CASES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "long": (LONG, {"overlong": "drop"}, "all 40 that were read are dropped (40 longer than a pack)"),
    "empty": (EMPTY, {"empty": "drop"}, "all 40 that were read are dropped (40 without a token)"),
    "bad": (
        ["no", "rows", "at all"],
        {"on_bad_record": "skip"},
        "all 3 that were read are dropped (3 broken, and skipped)",
    ),
    "none": (IterableSource([]), {}, "the source has no rows at all"),
}


def make(case: str, **more: Any) -> IterablePackedDataset:
    source, settings, _ = CASES[case]
    return IterablePackedDataset(source, encoder=Numbers(), max_seq_len=24, num_lanes=4, **settings, **more)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("epochs", [1, 3, None])
def test_a_run_without_packs_is_an_error(case: str, epochs: int | None) -> None:
    """Also where it would read the same rows for ever."""
    for door in (make(case, epochs=epochs), PackedDataLoader(make(case, epochs=epochs))):
        with pytest.raises(ValueError) as error:
            list(door)
        assert CASES[case][2] in str(error.value)


def test_a_run_without_packs_is_an_error_on_all_ranks_and_in_workers() -> None:
    def act(rank_sync: ThreadSync) -> None:
        loader = PackedDataLoader(make("long"))
        loader.rank_sync = rank_sync
        list(loader)

    with pytest.raises(ValueError) as in_worker:
        list(PackedDataLoader(make("long"), num_workers=2))
    for error in [*on_ranks(2, act), in_worker.value]:
        assert isinstance(error, ValueError)
        assert CASES["long"][2] in str(error), "of all ranks' lanes"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_consumer_without_packs_is_no_error_where_others_have_some(workers: int) -> None:
    """The first one's lanes hold what is dropped alone. Nor is a run that is resumed at its end."""
    data = [row for pair in zip(LONG, rows(40), strict=True) for row in pair]

    def dataset() -> IterablePackedDataset:
        return IterablePackedDataset(
            data, max_seq_len=24, num_lanes=2, overlong="drop", encoder=Numbers(), untrained="keep"
        )

    packs = DataLoader(dataset(), batch_size=None, num_workers=workers)
    assert samples_in(packs) == all_of(rows(40))
    loader, after = (PackedDataLoader(dataset(), num_workers=workers) for _ in range(2))
    assert sum(int(batch.num_seqs) for batch in loader) == len(rows(40))
    after.load_state_dict(loader.state_dict())
    assert list(after) == []


def test_a_lane_whose_first_rows_are_all_dropped_says_so(caplog: pytest.LogCaptureFixture) -> None:
    data = [{"i": i, "n": 30} for i in range(1000)] + rows(500)
    settings: dict[str, Any] = {"max_seq_len": 24, "num_lanes": 1, "overlong": "drop"}
    for first, said in ((0, 1), (1, 0)):
        caplog.clear()
        assert len(list(IterablePackedDataset(data[first:], encoder=Numbers(), **settings))) > 10
        assert (
            caplog.text.count("the first 1,000 rows of lane 0 are all dropped (1,000 longer than a pack")
            == said
        )


def test_map_style_data_without_packs_warn(caplog: pytest.LogCaptureFixture) -> None:
    data = [{"tokens": [1] * 30, "labels": [1] * 30}] * 4
    assert len(PackedDataset(data, max_seq_len=24, overlong="drop")) == 0
    assert "no row makes a pack: all 4 that were read are dropped (4 longer than a pack)" in caplog.text
    caplog.clear()
    assert len(PackedDataset(data, max_seq_len=24, overlong="drop", max_packs=0)) == 0
    assert "no row" not in caplog.text


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(("most", "warnings", "dropped"), [(None, 1, 0), (700, 1, 0), (699, 0, 3)])
def test_a_giant_sample_is_named_once_a_lane_or_left_out(
    whole: bool,
    most: int | None,
    warnings: int,
    dropped: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    lengths = [{"i": i, "n": 700 if i in (9, 12, 15) else 5} for i in range(30)]
    sources = [
        {"name": name, "source": JSONLSource(write(tmp_path / f"{name}.jsonl", some)), "weight": 1}
        for name, some in (("a", lengths), ("b", [{"i": i, "n": 5} for i in range(100, 130)]))
    ]
    data = IterablePackedDataset(
        Mix(sources), encoder=Numbers(), max_seq_len=10, overlong="split", split_across_pack=whole, num_lanes=1,
        max_document_tokens=most,
    )  # fmt: skip
    list(data)
    assert (data.ledger().dropped["overlong"], data.ledger().dropped_samples["overlong"]) == (
        700 * dropped,
        dropped,
    )
    said = [each.getMessage() for each in caplog.records if "tokens: lane" in each.getMessage()]
    assert len(said) == warnings
    for message in said:
        assert "a.jsonl" in message
        assert "has 700 tokens: lane 0 gives nothing else for about 70 packs, and until" in message


# Samples that train nothing.

ANSWER = 3


def chat(i: int, prompt: int) -> dict[str, Any]:
    """A masked prompt of so many tokens, and an answer."""
    return {"tokens": [i + 1] * (prompt + ANSWER), "labels": [IGNORE_INDEX] * prompt + [i + 1] * ANSWER}


# Truncated to 16, every third has no answer left.
CHATS = [chat(i, prompt=(4, 30, 11)[i % 3]) for i in range(60)]
CUT_OFF = [i for i in range(60) if i % 3 == 1]
Door = Callable[..., Any]


def dataset(rows: Any = CHATS, **settings: Any) -> IterablePackedDataset:
    return IterablePackedDataset(rows, **{"max_seq_len": 16, "overlong": "truncate", **settings})


def map_style(**settings: Any) -> PackedDataset:
    return PackedDataset(CHATS, **{"max_seq_len": 16, "overlong": "truncate", **settings})


def ids(packs: Any) -> set[int]:
    found = (packs[i] for i in range(len(packs))) if isinstance(packs, PackedDataset) else packs
    return {int(token) - 1 for pack in found for token in pack["tokens"] if token}


@pytest.mark.parametrize("door", [dataset, map_style])
@pytest.mark.parametrize("untrained", [None, "keep", "drop"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_samples_that_train_nothing_are_counted_and_dropped(
    door: Door, untrained: str | None, side: str
) -> None:
    data = door(truncate_side=side, untrained=untrained)
    lost = CUT_OFF if side == "right" else []
    gone = lost if untrained == "drop" else []
    assert ids(data) == set(range(60)) - set(gone)
    ledger = data.ledger()
    assert (ledger.untrained, ledger.dropped_samples["untrained"]) == (len(lost), len(gone))
    assert ledger.dropped["untrained"] == len(gone) * (30 + ANSWER)
    if gone:
        assert ledger.dropped_samples["truncated"] == 0, "each loss has one reason"
    assert ledger.buffered == 0
    told = ledger.as_dict()
    assert (told["untrained"], told["dropped_untrained"]) == (len(lost), ledger.dropped["untrained"])


def test_a_sample_that_trains_nothing_is_named_and_not_consumed() -> None:
    data = dataset(untrained="error", num_lanes=1)
    for _ in range(2):
        with pytest.raises(ValueError) as error:
            list(data)
        assert str(error.value) == (
            "sample 1 trains nothing: of the 16 tokens that overlong='truncate' leaves of its 33, none has a label to "
            "train; raise max_seq_len, choose another overlong, or set untrained to 'drop' or 'keep'"
        )
    with pytest.raises(ValueError, match="sample 1 trains nothing"):
        map_style(untrained="error")


@pytest.mark.parametrize(
    ("tokens", "labels", "nothing"),
    [
        ([5], [5], True),  # the first label of a sequence is never trained
        ([5, 6], [5, 6], False),
        ([5, 6], [5, -100], True),
        ([5, 6, 7], [-100, 6, -100], False),
        ([5, 6, 7], [-100, -100, -100], True),
    ],
)
def test_a_sample_is_untrained_if_only_its_first_label_is_trained(
    tokens: list[int], labels: list[int], nothing: bool
) -> None:
    data = dataset([{"tokens": tokens, "labels": labels}], untrained="keep")
    list(data)
    assert data.ledger().untrained == nothing


@pytest.mark.parametrize(
    ("settings", "untrained", "packed"),
    [({}, 1, 47), ({"split_across_pack": True}, 1, 47), ({"untrained": "drop"}, 1, 7)],
)
def test_a_split_sample_that_trains_nothing_counts_once(settings: Any, untrained: int, packed: int) -> None:
    masked = [{"tokens": [7] * 40, "labels": [IGNORE_INDEX] * 40}, chat(1, 4)]
    answered = [chat(1, 30)]  # in its second piece
    for given, counted in ((masked, untrained), (answered, 0)):
        data = dataset(given, overlong="split", **settings)
        list(data)
        assert data.ledger().untrained == counted
        assert given is not masked or data.ledger().packed == packed


def test_a_mixture_drops_samples_that_train_nothing() -> None:
    mix = Mix([{"name": name, "source": CHATS, "weight": 1} for name in ("a", "b")])
    data = dataset(mix, untrained="drop")
    list(data)
    source_stats = data.source_stats()
    assert all(stats.trained and stats.samples for stats in source_stats.values())
    assert sum(stats.packed for stats in source_stats.values()) == data.ledger().packed
    assert data.ledger().dropped_samples["untrained"] == data.ledger().untrained > 0


@pytest.mark.parametrize("door", ["stream", "loader", "workers", "map-style"])
def test_untrained_samples_are_said_once_unless_they_are_asked_for(
    door: str, caplog: pytest.LogCaptureFixture
) -> None:
    def read(**settings: Any) -> None:
        if door == "map-style":
            map_style(**settings)
            return
        data = dataset(num_lanes=2, **settings)
        loader = (
            PackedDataLoader(data, num_workers=2 if door == "workers" else 0) if door != "stream" else data
        )
        for _ in range(2):
            assert len(list(loader)) > 5

    with caplog.at_level(logging.WARNING):
        for settings in ({"untrained": "keep"}, {"untrained": "drop"}, {"truncate_side": "left"}, {}):
            read(**settings)
    [record] = [record for record in caplog.records if "train nothing" in record.message]
    assert "max_seq_len=16" in record.message
    assert "untrained='drop'" in record.message
