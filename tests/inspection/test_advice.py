"""Each recommendation appears where its reason is, says the figures, and is YAML that a config takes."""

from __future__ import annotations

from typing import Any

import pytest

from streampack import IterablePackedDataset, TokensEncoder
from streampack.inspection.report import Advice
from streampack.inspection.shape import RunShape
from streampack.inspection.survey import inspect_dataset
from streampack.training.config import RunConfig
from tests.harness.inspection import log_normal, token_rows
from tests.harness.segments import Pairs

FITTING = token_rows(log_normal(3000, 60, 0.6))


def advice(rows: Any = FITTING, shape: RunShape | None = None, **settings: Any) -> dict[str, Advice]:
    own = {"max_seq_len": 512, "num_lanes": 1, "shuffle": True, "overlong": "truncate", **settings}
    report = inspect_dataset(IterablePackedDataset(rows, **own), shape=shape, rows=None)
    return {each.title: each for each in report.advice}


def test_nothing_is_recommended_where_nothing_is_to_gain() -> None:
    assert advice() == {}


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "Pack by exact_fit": ({"strategy": "next_fit"}, "strategy: exact_fit"),
    "Use fewer lanes": ({"num_lanes": 40}, "num_lanes: 1"),
    "Give every consumer a lane": ({"shape": RunShape(ranks=(2,), workers=2)}, "num_lanes: 4"),
    "Say what to do with samples longer than max_seq_len": (
        {"rows": [*FITTING, *token_rows([900])], "overlong": "error"},
        "# or keep them whole: max_seq_len: 1024",
    ),
    "Raise max_seq_len": ({"rows": [*FITTING, *token_rows([1900] * 9)]}, "max_seq_len: 2048"),
    "Keep long samples in pieces": ({"rows": [*FITTING, *token_rows([90_000] * 9)]}, "overlong: split"),
    "Leave out samples that train nothing": (
        {"rows": [*FITTING, *token_rows([60] * 90, prompt=1)]},
        "untrained: drop",
    ),
    "Mend or skip the rows that cannot be read or encoded": (
        {"rows": [*FITTING, {"tokens": "none"}]},
        "on_bad_record: skip",
    ),
    "Let ranks and batches divide the packs of a step": (
        {"shape": RunShape(ranks=(1,), batch_size=4, packs_per_step=6)},
        "packs_per_step: 8",
    ),
    "Hand packs out by attention cost": (
        {"rows": token_rows(log_normal(4000, 60, 1.3)), "num_lanes": 4, "shape": RunShape(ranks=(4,))},
        "balance_window: 64",
    ),
    "Mind the number of optimizer steps": (
        {"rows": FITTING[:300], "shape": RunShape(ranks=(1,), batch_size=2)},
        "packs_per_step: 1",
    ),
}


@pytest.mark.parametrize("title", list(CASES))
def test_a_recommendation(title: str) -> None:
    yaml = pytest.importorskip("yaml")
    settings, line = CASES[title]
    found = advice(**settings)
    assert title in found, list(found)
    assert line in found[title].yaml
    assert any(letter.isdigit() for letter in found[title].why)
    lines = yaml.safe_load(found[title].yaml)
    data = lines.pop("data", {})
    IterablePackedDataset(FITTING, **{"max_seq_len": 512, **data})
    assert set(lines) <= set(RunConfig.__dataclass_fields__)


def test_what_is_recommended_is_worth_it() -> None:
    rows = token_rows(log_normal(3000, 120, 0.8))
    before = inspect_dataset(
        IterablePackedDataset(rows, max_seq_len=512, overlong="truncate", strategy="next_fit")
    )
    after = inspect_dataset(
        IterablePackedDataset(rows, max_seq_len=512, overlong="truncate", strategy="exact_fit")
    )
    assert before.advice[0].title == "Pack by exact_fit" or "Raise" in before.advice[0].title
    assert after.chosen.tokens < 0.95 * before.chosen.tokens


def test_groups_are_not_advised_to_be_split() -> None:
    pairs = [{"i": i, "n": 20} for i in range(1, 300)]
    long = [{"i": 301 + i, "n": 3000} for i in range(9)]
    settings = {"rows": [*pairs, *long], "encoder": Pairs(), "max_seq_len": 64}
    titles = ["Say what to do with samples longer than max_seq_len", "Keep long samples in pieces"]
    assert advice(**settings, overlong="error")[titles[0]].yaml == "data:\n  overlong: truncate  # or drop"
    assert titles[1] not in advice(**settings, overlong="drop")
    assert titles[1] in advice(
        [{"tokens": [1] * (2000 if i % 30 == 0 else 20)} for i in range(300)],
        max_seq_len=64,
        encoder=TokensEncoder(labels=None),
        overlong="drop",
    )
