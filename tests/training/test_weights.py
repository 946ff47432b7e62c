"""Random weights as files: complete or absent, one folder for each content."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from streampack.training.weights import random_weights


def linear(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Linear(3, 2)


def test_equal_weights_are_written_once(tmp_path: Path) -> None:
    one, again, other = (random_weights(linear(seed), folder=str(tmp_path / "out")) for seed in (0, 0, 1))
    assert one == again != other
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        Path(path).name for path in (one, other)
    )
    loaded = torch.load(Path(one) / "model.bin", weights_only=True)
    assert all(torch.equal(loaded[name], value) for name, value in linear(0).state_dict().items())


def test_files_are_copied_beside_the_weights(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"words")
    folder = random_weights(
        linear(0), folder=str(tmp_path / "out"), beside=[str(tmp_path / "tokenizer.model")]
    )
    assert (Path(folder) / "tokenizer.model").read_bytes() == b"words"


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        random_weights(linear(0), folder=str(tmp_path / "out"), beside=[str(tmp_path / "missing")])
    assert list((tmp_path / "out").iterdir()) == []
