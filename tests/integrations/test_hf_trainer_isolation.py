"""A prepared Trainer checks before its first step that samples of a pack do not see one another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from streampack import prepare_trainer_for_packing
from tests.harness.hf_trainers import losses, model, stream, trainer_of
from tests.harness.processes import RankError, run_ranks

transformers = pytest.importorskip("transformers")


@contextmanager
def leaking_in_training() -> Iterator[None]:
    """Let llamas ignore positions in training mode; they are a proven family, so preparing does not try them."""
    kind = transformers.LlamaForCausalLM
    own = kind.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.training:
            for name in ("position_ids", "attention_mask"):
                kwargs.pop(name, None)
        return own(self, *args, **kwargs)

    with patch.object(kind, "forward", forward):
        yield


def prepared(folder: Path, **changes: Any) -> Any:
    settings = {name: changes.pop(name) for name in ("verify_isolation",) if name in changes}
    trainer = trainer_of(folder, **{"max_steps": 2, **changes})
    prepare_trainer_for_packing(trainer, train_dataset=stream(), **settings)
    return trainer


def test_a_leak_in_training_mode_stops_the_training(tmp_path: Path) -> None:
    with leaking_in_training():
        trainer = prepared(tmp_path)
        with pytest.raises(ValueError) as caught:
            trainer.train()
        message = str(caught.value)
        assert "changing sample 0 moved sample 1 by " in message
        assert " in training mode\n" in message
        assert message.endswith(
            "the training was stopped before its first step; "
            "prepare_trainer_for_packing(..., verify_isolation=False) lets it train like this"
        )
        assert trainer.state.global_step == 0
        prepared(tmp_path, verify_isolation=False).train()


def test_the_check_changes_no_step(tmp_path: Path) -> None:
    """Weights and dropout are the same with the check and without."""
    curves = []
    for verified in (True, False):
        trainer = prepared(
            tmp_path / str(verified),
            of=model("gpt2", resid_pdrop=0.2),
            verify_isolation=verified,
            max_steps=4,
        )
        trainer.train()
        curves.append((losses(trainer), trainer.model.state_dict()))
    (ours, weights), (theirs, plain) = curves
    assert ours == theirs
    assert all(torch.equal(weights[name], plain[name]) for name in plain)


def train_on_two_ranks(folder: Path) -> None:
    with leaking_in_training():
        prepared(folder, ddp_backend="gloo", use_cpu=True).train()


@pytest.mark.slow  # 5 s; the recipes' check has the same in the quick suite
def test_a_leak_on_one_rank_stops_all_ranks(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="the training was stopped before its first step"):
        run_ranks(train_on_two_ranks, 2, tmp_path)
