from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
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
    TokensEncoder,
    collate_packed,
)
from streampack.iterable import ledger_of
from streampack.receipt import Receipt
from tests.conformance import check_resume_everywhere, content
from tests.corpus import Numbers, all_of, make_source, rows, samples_in, write

STRATEGIES = ("next_fit", "first_fit", "best_fit", "exact_fit", "wrap")


def make(source: Any, **settings: Any) -> IterablePackedDataset:
    return IterablePackedDataset(source, **{"max_seq_len": 24, "buffer_size": 8, "encoder": Numbers(), **settings})


# Resume, everywhere.

ONCE, THRICE, ENDLESS = {"epochs": 1}, {"epochs": 3}, {"epochs": None}
SHUFFLED = {"shuffle": True, "shuffle_window": 7, "seed": 3}
FOUR = {"num_lanes": 4}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    *((f"{s}-once", "map", {"strategy": s, **ONCE, "num_lanes": 1}) for s in STRATEGIES),
    *((f"{s}-thrice", "jsonl", {"strategy": s, **THRICE, **SHUFFLED, **FOUR}) for s in STRATEGIES),
    *((f"{s}-endless", "iterable", {"strategy": s, **ENDLESS, **SHUFFLED}) for s in STRATEGIES),
    *((f"{s}-split", "map", {"strategy": s, "overlong": "split", **THRICE, **SHUFFLED, **FOUR}) for s in STRATEGIES),
    *((f"{s}-drop", "jsonl", {"strategy": s, "overlong": "drop", **ENDLESS, "num_lanes": 1}) for s in STRATEGIES),
    *((f"{s}-truncate", "stride", {"strategy": s, "overlong": "truncate", **ONCE, **FOUR}) for s in STRATEGIES),
    ("split-endless", "jsonl", {"overlong": "split", **ENDLESS, **SHUFFLED, **FOUR}),
    ("wrap-endless", "map", {"split_across_pack": True, **ENDLESS, **SHUFFLED, **FOUR}),
    ("left", "map", {"overlong": "truncate", "truncate_side": "left", **THRICE, **SHUFFLED}),
    ("eos", "iterable", {"overlong": "truncate", "truncate_eos": 2, **THRICE, **SHUFFLED}),
    ("buffer-of-one", "map", {"buffer_size": 1, **THRICE, **FOUR}),
    ("buffer-of-many", "jsonl", {"buffer_size": 1000, **THRICE, **SHUFFLED, "num_lanes": 1}),
    ("window-of-all", "jsonl", {**THRICE, "shuffle": True, "shuffle_window": 10_000, "num_lanes": 2}),
    ("gz", "gz", {**THRICE, **SHUFFLED, "num_lanes": 2}),
    ("zst", "zst", {**THRICE, **SHUFFLED, "num_lanes": 2}),
    ("more-lanes-than-files", "gz", {**ONCE, **SHUFFLED, "num_lanes": 5}),
    ("one-token-packs", "map", {"max_seq_len": 1, "overlong": "split", **THRICE, **FOUR}),
]


@pytest.mark.parametrize(("kind", "settings"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_resume_at_every_step(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    """300 packs; stopped after every one; and stopped once more after the resume."""
    too_long = "overlong" in settings or "split_across_pack" in settings or settings.get("strategy") == "wrap"
    epochs = settings["epochs"] or 3
    per_epoch = 5.4 if too_long else 4.3  # samples in a pack, about: 300 packs should take all epochs
    count = {"one-token-packs": 20}.get("", int(310 * per_epoch / epochs))
    if settings.get("max_seq_len") == 1:
        count = 25
    data = rows(count, overlong=70 if too_long else 0)
    packs = check_resume_everywhere(lambda: make(make_source(kind, tmp_path, data), **settings), packs=300)
    assert len(packs) >= 200
    if settings["epochs"] and settings.get("overlong", "split") == "split":
        assert samples_in(packs) == all_of(data, epochs)
    if settings["epochs"]:
        assert {pack["epoch"] for pack in packs} == set(range(epochs))
