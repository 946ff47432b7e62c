"""The same samples in our recipes, packed and padded, and in torchtune's own: three steps are equal."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.harness.stock import configs_folder, shrunk, shrunk_config
from tests.harness.stock_files import write_rows

STEPS = 3
ROWS = 12
"""Of a step."""

pytestmark = [
    pytest.mark.usefixtures(shrunk.__name__),
    pytest.mark.filterwarnings("ignore"),
]  # torchtune's own


def torchtunes(name: str) -> Any:
    """Load the class of one of torchtune's recipes, which are scripts."""
    path = configs_folder().parent / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"torchtunes_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (recipe,) = (
        value
        for key, value in vars(module).items()
        if re.match(r"\w+Recipe\w+$", key) and key != "FTRecipeInterface"
    )
    return recipe


@pytest.fixture
def same_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let adapters begin as their shape says, whatever was drawn before."""

    @torch.no_grad()
    def fill(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(tensor.numel())
        return tensor.copy_(torch.empty(tensor.shape).uniform_(-0.1, 0.1, generator=generator))

    monkeypatch.setattr(torch.nn.init, "kaiming_uniform_", fill)


def weights(folder: Path) -> dict[tuple[bool, str], torch.Tensor]:
    """All saved weights, by whether they are adapters and by name."""
    found = {}
    for path in sorted(folder.rglob("*.safetensors")):
        found |= {(path.name.startswith("adapter"), key): value for key, value in load_file(path).items()}
    return found


def losses(folder: Path) -> list[float]:
    """The losses that torchtune's logger wrote."""
    (log,) = folder.rglob("log_*.txt")
    return [float(value) for value in re.findall(r"^Step \d+ \| loss:(\S+)", log.read_text(), re.M)]


CASES = {
    "llama3_2/1B_full_single_device": ("full_finetune", "full_finetune_single_device"),
    "llama3_2/1B_lora_single_device": ("lora_finetune", "lora_finetune_single_device"),
    "llama3_1/8B_lora_dpo_single_device": ("dpo", "lora_dpo_single_device"),
}


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("name", CASES)
def test_three_steps_are_those_of_torchtunes_recipe(
    name: str, packed: bool, tmp_path: Path, same_adapters: None
) -> None:
    """Packs of all rows, three times over; and padded, as the config says, the steps of one epoch."""
    ours, theirs = CASES[name]
    epochs = STEPS if packed else 1
    kind = "pairs" if ours == "dpo" else "alpaca"
    rows = write_rows(tmp_path / "rows.json", kind, ROWS * STEPS // epochs)
    settings: dict[str, Any] = {
        "dtype": "fp32", "optimizer._component_": "torch.optim.AdamW", "optimizer.lr": 1e-3, "optimizer_in_bwd": False,
        "epochs": epochs, "max_steps_per_epoch": None, "dataset.data_files": str(rows), "shuffle": False,
        "batch_size": 4, "gradient_accumulation_steps": ROWS // 4,
        "optimizer.eps": 1e-5,  # or Adam would scale a gradient of 1e-8, which is rounding, to a whole step
    }  # fmt: skip
    if ours != "full_finetune":
        # torchtune would merge adapters into the weights that train, at the end of each epoch on a CPU.
        settings |= {"lr_scheduler.num_warmup_steps": 0, "save_adapter_weights_only": True}
    if ours == "dpo":
        del settings["optimizer_in_bwd"]
    config = shrunk_config(name, tmp_path / "theirs", **settings)
    recipe = torchtunes(theirs)(cfg=config)
    recipe.setup(cfg=config)
    recipe.train()
    recipe.cleanup()
    expected = weights(Path(config.output_dir, f"epoch_{epochs - 1}"))

    if packed:
        # All rows are in a step: in two packs, and the pairs in one. Three such epochs are three steps of the schedule.
        length = 1024 if ours == "dpo" else 600
        settings |= {"tokenizer.max_seq_len": length, "batch_size": 1, "gradient_accumulation_steps": 2}
    config = shrunk_config(name, tmp_path / "ours", packed=packed, **settings)
    importlib.import_module(f"streampack_recipes.{ours}").train(config)
    steps = losses(tmp_path / "theirs")
    assert losses(tmp_path / "ours") == pytest.approx(steps, rel=1e-5)
    assert steps[0] - steps[-1] > 0.01, "nothing was learned"
    found = weights(Path(config.output_dir))
    assert found.keys() == expected.keys()
    apart = max(float((found[key] - value).abs().max()) for key, value in expected.items())
    assert apart < 1e-5
