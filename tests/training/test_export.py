"""Weights of a checkpoint, written while the run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from streampack_recipes import full_finetune, lora_finetune

from streampack import cli
from streampack.training.export import export
from tests.harness.tiny import lora_config, tiny_config


def files(folder):
    """Return the weights in every file below a folder."""
    paths = [path for path in Path(folder).rglob("*") if path.suffix in (".bin", ".pt")]
    found = {str(path.relative_to(folder)): torch.load(path, weights_only=True) for path in paths}
    assert found
    return found


def require_equal(left, right):
    assert left.keys() == right.keys()
    for name, weights in left.items():
        assert weights.keys() == right[name].keys()
        for key, value in weights.items():
            assert torch.equal(value, right[name][key]), f"{name}: {key}"


@pytest.mark.parametrize(("train", "config_of"), [
    (full_finetune.train, tiny_config), (lora_finetune.train, lora_config),
])  # fmt: skip
def test_an_export_is_what_a_run_of_so_many_steps_writes(tmp_path, train, config_of):
    settings = {"validation": None, "lr_scheduler": None, "checkpoint_every": 4}
    train(config_of(tmp_path / "short", max_steps=4, **settings))
    config = config_of(tmp_path / "long", max_steps=8, **settings)
    train(config)
    checkpoints = tmp_path / "long" / "out" / "checkpoints"
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "long").rglob("*")}
    saved = export(checkpoints / "step_00000004", config=config, out=tmp_path / "exported")
    assert set(saved) == {"weights"} | ({"adapters"} if train is lora_finetune.train else set())
    folders = {Path(folder).name for folder in saved.values()}
    assert {path.name for path in (tmp_path / "exported").iterdir()} == folders
    for folder in folders:
        require_equal(files(tmp_path / "exported" / folder), files(tmp_path / "short" / "out" / folder))
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "long").rglob("*")}

    with pytest.raises(ValueError, match="exported/epoch_0.* holds weights; choose another folder"):
        export(checkpoints / "step_00000004", config=config, out=tmp_path / "exported")
    with pytest.raises(ValueError, match="long/out is where the run itself writes its weights"):
        export(checkpoints / "step_00000004", config=config, out=tmp_path / "long" / "out")


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("STREAMPACK_TRUST", "tests")
    config = tiny_config(tmp_path, max_steps=4, validation=None)
    full_finetune.train(config)
    OmegaConf.save(config, tmp_path / "my.yaml")
    checkpoints = tmp_path / "out" / "checkpoints"
    rest = ["--config", str(tmp_path / "my.yaml"), "--out", str(tmp_path / "exported")]
    capsys.readouterr()
    assert cli.main(["export", str(checkpoints / "step_00000004"), *rest]) == 0
    assert f"weights      {tmp_path}/exported/epoch_0" in capsys.readouterr().out.splitlines()
    require_equal(files(tmp_path / "exported" / "epoch_0"), files(tmp_path / "out" / "epoch_0"))

    assert cli.main(["export", str(tmp_path / "out"), *rest]) == 1
    said = capsys.readouterr().err
    assert "/out is no checkpoint; name a directory such as OUTPUT_DIR/checkpoints/step_00000100" in said
    assert "(below it: step_00000004)" in said
    rest[-1] = str(tmp_path / "other")
    words = ["model.intermediate_dim=48", "checkpointer.checkpoint_dir=" + str(tmp_path / "base")]
    other = tiny_config(tmp_path / "other_run", **{"model.intermediate_dim": 48})
    (tmp_path / "base").mkdir()
    torch.save(_weights_of(other), tmp_path / "base" / "model.bin")
    assert cli.main(["export", str(checkpoints / "step_00000004"), *rest, *words]) == 1
    assert "step_00000004 could not be read: " in capsys.readouterr().err
    assert not (tmp_path / "other" / "epoch_0").exists()


def _weights_of(config):
    from streampack.instantiate import build

    return build(OmegaConf.to_container(config.model)).state_dict()
