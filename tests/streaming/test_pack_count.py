"""Counting packs by their samples' lengths gives what the stream makes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from streampack import Holdout, IterablePackedDataset, MapSource, Sample
from streampack.streaming.estimate import count_packs, packed_lengths
from tests.support.hf_trainers import samples

ROWS = [*samples(150), {"tokens": [3] * 70, "labels": [3] * 70}, *samples(50, seed=1)]
HALF = Holdout(Holdout(MapSource(ROWS), fraction=0.5, part="train"), fraction=0.2, part="train")


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
        {
            "source": [
                {**row, "labels": ([-100] * 9 + row["labels"][9:])[: len(row["labels"])]} for row in ROWS
            ],
            "untrained": "drop",
        },
        {"num_lanes": 3, "source": [*ROWS, {"tokens": [], "labels": []}], "empty": "drop"},
    ],
)
def test_as_many_as_are_made(changes: dict[str, Any]) -> None:
    given = {"source": ROWS, "max_seq_len": 64, "overlong": "truncate", "num_lanes": 2, "epochs": 3} | changes
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


def test_what_would_fail_in_training_fails_before() -> None:
    config = IterablePackedDataset(ROWS, max_seq_len=64, encoder=broken).lane_config
    with pytest.raises(ValueError, match="^sample 4: this one cannot be encoded"):
        packed_lengths(config, range(9))
    config = IterablePackedDataset(ROWS, max_seq_len=64).lane_config
    with pytest.raises(ValueError, match="^sample 150 has 70 tokens"):
        count_packs(config, packed_lengths(config, range(len(ROWS))), epoch=0, lane=0, num_lanes=1)
