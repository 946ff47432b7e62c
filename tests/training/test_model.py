"""The device a recipe trains on, and weights that do not fit."""

from __future__ import annotations

import re

import pytest
import torch
from streampack_recipes.full_finetune import train

from streampack.training.isolation import probe_config
from streampack.training.model import pick_device
from tests.support.ranks import RankError, run_ranks
from tests.support.tiny import tiny_config

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def test_auto_and_cpu():
    assert pick_device("cpu").type == "cpu"
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@NO_GPU
@pytest.mark.parametrize("name", ["cuda", "cuda:1", "xpu", "mps"])
def test_a_device_that_is_not_there_is_refused(name):
    kind = name.partition(":")[0]
    expected = (
        rf"^device='{name}': torch \S+ finds no {kind} device on this machine; check .* or set device=cpu or"
    )
    with pytest.raises(ValueError, match=expected):
        pick_device(name)


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "meta", ""])
def test_what_is_no_device_is_refused(name):
    with pytest.raises(
        ValueError, match=rf"^device={name!r} is none that torch \S+ can train on; set auto, cpu or"
    ):
        pick_device(name)


@NO_GPU
def test_no_recipe_and_no_probe_takes_the_cpu_in_its_place(tmp_path):
    config = tiny_config(tmp_path, device="cuda")
    for door in train, probe_config:
        with pytest.raises(ValueError, match="finds no cuda device on this machine"):
            door(config)
    assert not (tmp_path / "out").exists()


def test_weights_of_another_model_are_refused_in_few_words(tmp_path):
    with pytest.raises(ValueError, match="size mismatch") as caught:
        train(tiny_config(tmp_path, **{"model.vocab_size": 24, "model.num_layers": 2}))
    assert re.fullmatch(
        r"the checkpointer's weights do not fit the model: size mismatch for tok_embeddings.weight, \(16, 16\) in the "
        r"checkpoint and \(24, 16\) in the model; .*; and \d+ more; name the model that the checkpoint is of",
        str(caught.value),
    )


def test_sharded_too(tmp_path):
    config = tiny_config(tmp_path)
    path = tmp_path / "init" / "model.bin"
    torch.save(torch.load(path) | {"layers.7.other": torch.ones(2)}, path)
    expected = "ValueError: the checkpointer's weights do not fit the model: layers.7.other is not in the model; name"
    with pytest.raises(RankError, match=expected):
        run_ranks(train, 2, config)
