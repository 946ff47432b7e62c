"""Every config that torchtune ships for training on samples runs in our recipes as it is, its model made small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from streampack_recipes import full_finetune

from streampack.training.checks import read_config
from streampack.training.conditions import recipe_problems
from tests.harness.stock import read_stock, recipe_of, shrunk, shrunk_config, stock_names
from tests.harness.stock_files import alpaca_rows
from tests.harness.stock_table import read_rows, row
from tests.harness.torchvision_stub import import_vision_models

KINDS = (
    "llama3/8B_qat_full", "llama3/8B_qdora_single_device", "llama3_1/8B_full_dpo", "llama3_2/1B_full_single_device",
    "llama3_2_vision/11B_lora_single_device",
)  # fmt: skip
"""Of the configs, what `make test` runs."""

pytestmark = [
    pytest.mark.usefixtures(shrunk.__name__),
    pytest.mark.filterwarnings("ignore"),
]  # torchtune's own


def test_all_of_them_are_read_as_they_are() -> None:
    import_vision_models()
    names, lacking = stock_names(), []
    for name in names:
        try:
            cfg = read_config(read_stock(name))
        except ValueError as error:
            assert "\n" not in str(error), name
            assert "needs bitsandbytes, which is not installed" in str(error), name
            lacking.append(name)
        else:
            assert list(recipe_problems(cfg, pairs=recipe_of(name) == "dpo")) == [], name
    assert len(names) == 134
    assert len(lacking) == 15


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights, tokenizers and data that all runs share."""
    return tmp_path_factory.mktemp("stock")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in KINDS else pytest.mark.slow) for name in stock_names()]
)
def test_two_steps_are_trained_padded_and_packed_as_the_docs_say(name: str, folder: Path) -> None:
    assert row(name, folder) == read_rows()[name], "`make stock-configs` writes the page again"


def test_the_page_has_each_config_and_none_is_refused_but_for_the_hardware() -> None:
    rows = read_rows()
    assert sorted(rows) == stock_names()
    assert {cells[2] for cells in rows.values()} == {"trained 2 steps"}
    assert {cells[3] for cells in rows.values()} == {"trained 2 steps", "images: padded only"}


def test_one_word_packs_the_same_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All rows are in a step, so the loss per token is the same; packs compute less padding."""
    rows = [
        row | {"output": row["output"] + " red" * 90 * (i % 3 == 0)} for i, row in enumerate(alpaca_rows(12))
    ]
    (tmp_path / "rows.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings: dict[str, Any] = {
        "dtype": "fp32", "max_steps": 1, "dataset.data_files": str(tmp_path / "rows.json"),
        "tokenizer.max_seq_len": 400, "gradient_accumulation_steps": 4,
    }  # fmt: skip
    losses, tokens, computed = {}, {}, {}
    for packed in (False, True):
        changes = settings | {"batch_size": 1 if packed else 3}
        config = shrunk_config("llama3_2/1B_full", tmp_path, packed=packed, **changes)
        result = full_finetune.train(config)
        first = json.loads(Path(config.output_dir, "metrics.jsonl").read_text().splitlines()[0])
        losses[packed], tokens[packed], computed[packed] = first["loss"], result["tokens"], result["computed"]
        said = capsys.readouterr().out
        assert f"{result['computed']:,} tokens computed" in said
        assert (
            ("an epoch is 12 samples" in said)
            == ("\nsamples      12, from 12 samples" in said)
            == (not packed)
        )
    assert losses[True] == pytest.approx(losses[False], rel=1e-5)
    assert tokens[True] == tokens[False]
    assert tokens[True] < computed[True] < computed[False]  # 1,462 of 1,600 and of 1,716
