"""The device that a recipe trains on."""

from __future__ import annotations

import pytest
import torch
from streampack_recipes.full_finetune import train

from streampack.training.devices import pick_device
from streampack.training.isolation import probe_config
from tests.harness.tiny import tiny_config

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def test_auto_and_cpu():
    assert pick_device("cpu").type == "cpu"
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@NO_GPU
@pytest.mark.parametrize("name", ["cuda:1", "mps"])
def test_a_missing_device_is_refused(name):
    kind = name.partition(":")[0]
    expected = (
        rf"^device='{name}': torch \S+ finds no {kind} device on this machine; check .* or set device=cpu or"
    )
    with pytest.raises(ValueError, match=expected):
        pick_device(name)


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "meta"])
def test_an_unknown_device_is_refused(name):
    with pytest.raises(
        ValueError, match=rf"^device={name!r} is none that torch \S+ can train on; set auto, cpu or"
    ):
        pick_device(name)


@NO_GPU
def test_no_command_replaces_a_missing_device_by_the_cpu(tmp_path):
    config = tiny_config(tmp_path, device="cuda")
    for door in train, probe_config:
        with pytest.raises(ValueError, match="finds no cuda device on this machine"):
            door(config)
    assert not (tmp_path / "out").exists()
