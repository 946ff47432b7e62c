"""How long an epoch is: counted where that is cheap, else estimated upward; and what truncation costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.lengths import lengths
from streampack import IGNORE_INDEX, Holdout, IterablePackedDataset, MapSource, Mix, Sample, TokensEncoder
from streampack.packing.planner import plan_packs
from streampack.streaming.estimate import count_packs, estimate, packed_lengths
from tests.support.hf_trainers import samples

FLAN = lengths("flan", count=12_000, longest=400)
MANY = [{"tokens": [1] * n, "labels": [1] * n} for n in FLAN.tolist()]


def dataset(rows: Any, **settings: Any) -> IterablePackedDataset:
    return IterablePackedDataset(rows, **{"max_seq_len": 256, "overlong": "truncate", **settings})


@pytest.mark.parametrize("num_lanes", [1, 8])
@pytest.mark.parametrize(
    "settings",
    [{}, {"strategy": "next_fit"}, {"split_across_pack": True, "overlong": "split"}, {"shuffle": True}],
)
def test_small_data_is_counted(settings: dict[str, Any], num_lanes: int) -> None:
    data = dataset(MANY[:500], num_lanes=num_lanes, **settings)
    known = data.estimate(num_lanes=num_lanes)
    assert (known.packs, known.error) == (len(list(data)), 0)
    assert known.at_most == known.packs


@pytest.mark.parametrize("kind", ["map", "jsonl"])
@pytest.mark.parametrize("strategy", ["exact_fit", "next_fit"])
def test_an_estimate_of_much_data_is_upward_and_close(tmp_path: Path, kind: str, strategy: str) -> None:
    """Skewed lengths, packs that the strategy leaves part-empty, and lanes that each end with such a one."""
    source: Any = MANY
    if kind == "jsonl":
        source = tmp_path / "rows.jsonl"
        source.write_text("".join(json.dumps({"tokens": row["tokens"]}) + "\n" for row in MANY))
    encoder = TokensEncoder(labels=None)
    known = dataset(source, strategy=strategy, encoder=encoder).estimate(rows=1024, num_lanes=8)
    actual = sum(
        sum(1 for _ in plan_packs(np.minimum(FLAN, 256)[lane::8].tolist(), 256, strategy=strategy))
        for lane in range(8)
    )
    assert 0 < known.error < 0.05 * actual
    assert actual <= known.at_most < 1.1 * actual
    assert known.packs == pytest.approx(actual, rel=0.05)


def test_a_mixture_is_estimated() -> None:
    mix = Mix(
        [
            {"name": "a", "source": MANY[:1500], "weight": 1},
            {"name": "b", "source": MANY[1500:3000], "weight": 2},
        ]
    )
    data = dataset(mix, num_lanes=2)
    known = data.estimate(rows=1024)
    assert known.packs == pytest.approx(len(list(data)), rel=0.1)
    assert known.error > 0


def test_an_estimate_counts_truncated_tokens() -> None:
    """Of 300 samples, a third is long; of half of these, the answer is cut off."""
    short = {"tokens": [1] * 10, "labels": [IGNORE_INDEX] * 5 + [1] * 5}
    answered = {"tokens": [1] * 40, "labels": [IGNORE_INDEX] * 10 + [1] * 30}
    lost = {"tokens": [1] * 40, "labels": [IGNORE_INDEX] * 30 + [1] * 10}
    rows = [short, short, short, short, answered, lost] * 50
    known = dataset(rows, max_seq_len=20).estimate(rows=300)
    assert (known.samples, known.longer, known.untrained) == (300, pytest.approx(1 / 3), pytest.approx(1 / 6))
    assert known.cut == pytest.approx(40 / 120)
    assert known.cut_trained == pytest.approx(30 / 60)
    dropped = dataset(rows, max_seq_len=20, overlong="drop").estimate(rows=300)
    assert (dropped.cut, dropped.cut_trained, dropped.untrained) == (
        pytest.approx(80 / 120), pytest.approx(40 / 60), 0,
    )  # fmt: skip
    split = dataset(rows, max_seq_len=20, overlong="split").estimate(rows=300)
    assert (split.cut, split.cut_trained, split.untrained) == (0, 0, 0)
    left = dataset(rows, max_seq_len=20, untrained="drop")
    assert left.estimate(rows=300).packs == len(list(left))


def test_an_estimate_encodes_a_few_long_documents() -> None:
    read = []

    class Counting(TokensEncoder):
        def __call__(self, row: Any, /) -> Any:
            read.append(1)
            return super().__call__(row)

    document = {"tokens": np.ones(1 << 17, np.int32), "labels": np.ones(1 << 17, np.int32)}
    data = dataset([document] * 500, encoder=Counting(), overlong="split", split_across_pack=True)
    known = data.estimate(rows=1024)
    assert known.packs == pytest.approx(500 * (1 << 17) / 256, rel=0.01)
    assert len(read) == 64


def test_an_estimate_leaves_bad_records_out(caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"tokens": [1] * 10} if i % 10 else {} for i in range(200)]
    data = dataset(rows, encoder=TokensEncoder(labels=None), on_bad_record="skip", num_lanes=1)
    known = estimate(data.lane_config, rows=50)
    assert not caplog.records
    assert known.packs == len(list(data))


def test_an_estimate_needs_a_length() -> None:
    with pytest.raises(ValueError, match="the length of IterableSource is unknown; set max_steps"):
        dataset(lambda: iter(MANY)).estimate()
    assert dataset(MANY[:1]).estimate().packs == 1


# Map-style data, counted by the lengths of its samples.

LABELLED = [*samples(150), {"tokens": [3] * 70, "labels": [3] * 70}, *samples(50, seed=1)]
HALF = Holdout(Holdout(MapSource(LABELLED), fraction=0.5, part="train"), fraction=0.2, part="train")


def broken(row: Any) -> Sample:
    if row["tokens"][0] % 5 == 0:
        raise ValueError("this one cannot be encoded")
    return Sample(np.array(row["tokens"]), np.array(row["labels"]))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"shuffle": True, "seed": 3},
        {"shuffle": True, "num_lanes": 5, "buffer_size": 3, "strategy": "best_fit"},
        {"split_across_pack": True, "num_lanes": 1},
        {"source": HALF, "shuffle": True, "overlong": "split"},
        {"overlong": "drop", "strategy": "next_fit", "max_seqs_per_pack": 4},
        {"encoder": broken, "on_bad_record": "skip", "truncate_eos": 7},
        {"encoder": lambda row: {"input_ids": row["tokens"]}},
        {
            "source": [
                {**row, "labels": ([-100] * 9 + row["labels"][9:])[: len(row["labels"])]} for row in LABELLED
            ],
            "untrained": "drop",
        },
        {"num_lanes": 3, "source": [*LABELLED, {"tokens": [], "labels": []}], "empty": "drop"},
    ],
)
def test_counted_packs_equal_the_packs_of_an_epoch(changes: dict[str, Any]) -> None:
    given = {
        "source": LABELLED,
        "max_seq_len": 64,
        "overlong": "truncate",
        "num_lanes": 2,
        "epochs": 3,
    } | changes
    if "split_across_pack" in given:
        del given["overlong"]
    packs = IterablePackedDataset(given.pop("source"), **given)
    expected = np.zeros((3, given["num_lanes"]), int)
    for pack in packs.stream():
        expected[pack.epoch, pack.lane] += 1
    source = packs.lane_config.source
    assert source.map_style
    lengths = packed_lengths(packs.lane_config, range(source.num_rows()))
    found = [
        [
            count_packs(packs.lane_config, lengths, epoch=epoch, lane=lane, num_lanes=given["num_lanes"])
            for lane in range(given["num_lanes"])
        ]
        for epoch in range(3)
    ]
    assert found == expected.tolist()


def test_counting_packs_raises_errors_of_rows() -> None:
    config = IterablePackedDataset(LABELLED, max_seq_len=64, encoder=broken).lane_config
    with pytest.raises(ValueError, match="^sample 4: this one cannot be encoded"):
        packed_lengths(config, range(9))
    config = IterablePackedDataset(LABELLED, max_seq_len=64).lane_config
    with pytest.raises(ValueError, match="^sample 150 has 70 tokens"):
        count_packs(config, packed_lengths(config, range(len(LABELLED))), epoch=0, lane=0, num_lanes=1)
