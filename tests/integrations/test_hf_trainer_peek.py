"""What somebody looked at before a training, the training reads too, and a resume of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.hf_trainers import losses, packed, samples, stream


@pytest.mark.parametrize("peek", ["packs", "loader"])
def test_a_peek_before_a_training_or_a_resume_changes_no_step(peek: str, tmp_path: Path) -> None:
    def trainer(name: str, *, peeked: bool) -> Any:
        packs = stream(samples(120), epochs=1)
        if peeked and peek == "packs":
            next(iter(packs))
        made = packed(
            tmp_path / name, packs, max_steps=-1, num_train_epochs=2, save_strategy="steps", save_steps=7
        )
        if peeked and peek == "loader":
            next(iter(made.get_train_dataloader()))
        return made

    plain, peeked, resumed = (
        trainer("plain", peeked=False),
        trainer("a", peeked=True),
        trainer("b", peeked=True),
    )
    plain.train()
    peeked.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-7"))
    expected = losses(plain)
    assert losses(peeked) == losses(resumed) == expected
    assert len(expected) > 7, "the resume made steps"
