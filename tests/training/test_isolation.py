"""A model that leaks between samples stops a run before its first step, and fails `streampack verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from streampack_recipes.full_finetune import train
from streampack_recipes.lora_finetune import train as train_lora
from torch import nn

from streampack.attention.prepare import prepare_model_for_packing
from streampack.cli import main
from streampack.distributed.world import join_world
from streampack.training.isolation import probe_config, verify_isolation
from tests.harness.isolation import MAX_SEQ_LEN, build
from tests.harness.processes import RankError, run_ranks
from tests.harness.tiny import lora_config, losses, tiny_config


def without_mask(model: nn.Module) -> nn.Module:
    """Drop the mask in a model's attention, as a user's own attention may do."""
    for layer in model.layers:
        stock = layer.attn._attention_call
        layer.attn._attention_call = lambda q, k, v, stock=stock, **_: stock(
            q, k, v, mask=None, dropout_p=0.0, is_causal=True
        )
    return model


def leaky_llama3(**sizes: Any) -> nn.Module:
    from torchtune.models.llama3 import llama3

    return without_mask(llama3(**sizes))


def leaky_lora_llama3(**sizes: Any) -> nn.Module:
    from torchtune.models.llama3 import lora_llama3

    return without_mask(lora_llama3(**sizes))


LEAKY = {"model._component_": f"{__name__}.leaky_llama3", "attention": "dense"}


def leaky_lora_config(folder: Path) -> Any:
    config = lora_config(folder, attention="dense")
    config.model["_component_"] = f"{__name__}.leaky_lora_llama3"
    return config


@pytest.mark.parametrize("lora", [False, True])
def test_a_leak_stops_the_run(tmp_path: Path, lora: bool) -> None:
    with pytest.raises(ValueError) as error:
        train_lora(leaky_lora_config(tmp_path)) if lora else train(tiny_config(tmp_path, **LEAKY))
    message = str(error.value)
    assert "changing sample 0 moved sample 1 by" in message
    assert message.endswith("stopped before its first step; verify_isolation=False lets it train like this")
    assert not (tmp_path / "out" / "logs").exists()


def test_the_check_can_be_switched_off(tmp_path: Path) -> None:
    assert train(tiny_config(tmp_path, **LEAKY, verify_isolation=False, max_steps=1))["step"] == 1


def test_the_check_changes_no_losses(tmp_path: Path) -> None:
    """It restores modes and random generators: a model with dropout has the same losses."""
    seen = []
    for verified in (True, False):
        folder = tmp_path / str(verified)
        train(tiny_config(folder, verify_isolation=verified, max_steps=3, **{"model.attn_dropout": 0.3}))
        seen.append(losses(folder))
    assert seen[0] == seen[1]


def leak_on_rank_0() -> None:
    """Leak on one rank, as with another version of a kernel there."""
    with join_world(torch.device("cpu")) as world:
        model = build("llama3")
        inputs = prepare_model_for_packing(model)
        wrong = lambda batch: inputs(batch) | {"mask": None}  # noqa: E731
        verify_isolation(model, inputs if world.rank else wrong, max_seq_len=MAX_SEQ_LEN, world=world)  # type: ignore[arg-type]


def test_a_leak_on_one_rank_stops_all() -> None:
    with pytest.raises(RankError) as error:
        run_ranks(leak_on_rank_0, 2)
    assert "OtherRankFailed: rank 0 failed: ValueError: " in str(error.value)


def write(config: Any, path: Path) -> str:
    from omegaconf import OmegaConf

    OmegaConf.save(config, path)
    return str(path)


def test_the_verify_command_reports_the_isolation_of_a_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = write(tiny_config(tmp_path), tmp_path / "good.yaml")
    state = torch.get_rng_state()
    assert main(["verify", "--config", good]) == 0
    assert capsys.readouterr().out.startswith(f"{good}: no leak in a pack of 4 samples (9, 1, 12, 6 tokens)")
    assert main(["verify", f"--config={good}", "attention=dense"]) == 0
    assert torch.equal(torch.get_rng_state(), state)
    capsys.readouterr()

    bad = write(tiny_config(tmp_path, **LEAKY), tmp_path / "bad.yaml")
    assert main(["verify", "--config", bad]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "changing sample 0 moved sample 1 by" in shown.err
    assert "likely cause: attention runs over the ends of samples" in shown.err

    assert main(["verify", "--config", good, "attention=flash"]) == 1
    assert "attention='flash' " in capsys.readouterr().err
    assert main(["verify", "--config", good, "atention=flex"]) == 1
    assert "unknown key 'atention'; did you mean 'attention'?" in capsys.readouterr().err


def test_verify_needs_no_weights_and_no_data(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    config.checkpointer.checkpoint_dir = config.data.source.paths = "nowhere"
    assert probe_config(config).ok
