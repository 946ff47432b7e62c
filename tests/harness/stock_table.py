"""The table of docs/guides/stock_configs.md: what torchtune's stock configs did in our recipes, made small.

`make stock-configs` runs all of them and writes it; with ARGS those whose names hold one of its words.
tests/stock/test_stock_configs.py compares it.
"""

from __future__ import annotations

import gc
import json
import math
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.harness.stock import configs_folder, read_stock, recipe_of, shrink, shrunk_config, stock_names

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "stock_configs.md"
MARKS = "<!-- stock configs -->", "<!-- end -->"
STEPS = 2
HARDWARE = {
    "optimizer": ("bitsandbytes", {"optimizer._component_": "torch.optim.AdamW"}),
    "offloading": ("enable_activation_offloading=True", {"enable_activation_offloading": False}),
}
"""What a CPU refuses: a word of the message, and what to change."""


def run(name: str, folder: Path, *, packed: bool) -> tuple[str, str]:
    """Train two steps of a stock config. Return the refusals of a CPU, and what happened without these keys."""
    train = import_module(f"streampack_recipes.{recipe_of(name)}").train
    changes: dict[str, Any] = {"max_steps": STEPS}
    if not read_stock(name).get("optimizer_in_bwd"):
        changes["clip_grad_norm"] = math.inf  # only logs it
    refused = []
    while True:
        config = shrunk_config(name, folder, packed=packed, **changes)
        try:
            train(config)
        except ValueError as error:
            for why, (word, change) in HARDWARE.items():
                if word in str(error) and why not in refused:
                    refused.append(why)
                    changes |= change
                    break
            else:
                return " ".join(refused), f"refused: {str(error).splitlines()[0]}"
        else:
            return " ".join(refused), _trained(Path(config.output_dir))
        finally:
            shutil.rmtree(config.output_dir, ignore_errors=True)


def _trained(folder: Path) -> str:
    """What the metrics of a run say."""
    lines = [*map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())]
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert all(map(math.isfinite, losses.values())), losses
    assert all(line["grad_norm"] > 0 for line in lines if "grad_norm" in line), "nothing was trained"
    return f"trained {len(losses)} steps"


def can_pack(name: str) -> bool:
    """Whether a config trains on text."""
    config = OmegaConf.load(configs_folder() / f"{name}.yaml")
    return "collate_fn" not in config and "datasets" not in config


def row(name: str, folder: Path) -> list[str]:
    """The row of a config: name, recipe, padded, packed, what a CPU refuses."""
    refused, padded = run(name, folder, packed=False)
    packed = run(name, folder, packed=True)[1] if can_pack(name) else "images: padded only"
    return [f"`{name}`", f"`{recipe_of(name)}`", padded, packed, refused]


HEAD = ["configs", "recipe", "`packed: False`", "`packed: True`", "replaced on a CPU"]


def read_rows() -> dict[str, list[str]]:
    """The rows of the page, by config."""
    lines = re.findall(r"^\| (`\S+/\S+`.*) \|$", PAGE.read_text(), re.M)
    grouped = [[cell.strip() for cell in line.split("|")] for line in lines]
    return {name.strip("`"): [name, *cells] for names, *cells in grouped for name in names.split(" · ")}


def write_rows(rows: dict[str, list[str]]) -> None:
    """Write the table, with configs of the same outcome in one row."""
    text = PAGE.read_text()
    before, _, rest = text.partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in sorted(rows):
        groups.setdefault(tuple(rows[name][1:]), []).append(rows[name][0])
    lines = [HEAD, ["---"] * len(HEAD), *([" · ".join(names), *cells] for cells, names in groups.items())]
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    PAGE.write_text(f"{before}{MARKS[0]}\n{table}\n{MARKS[1]}{after}")


def main(words: Iterable[str]) -> None:
    words = list(words)
    rows = read_rows() if words else {}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        gc.freeze()  # torchtune collects garbage after each file of weights
        for name in stock_names():
            if not words or any(word in name for word in words):
                rows[name] = row(name, Path(folder))
                print(" | ".join(rows[name]), flush=True)
                write_rows(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
