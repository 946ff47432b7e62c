"""The quickstart: it resumes by itself, and counts what padding would cost."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from streampack_recipes import quickstart

from streampack.training.run_folder import Interrupted
from tests.harness.runs import Run
from tests.harness.tiny import interrupt_step, tiny_config


def test_the_quickstart_resumes_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(tmp_path, validation=None, output_dir=str(tmp_path / "runs"))
    monkeypatch.setattr(quickstart.stdlib_corpus, "prepare", lambda: None)
    monkeypatch.setattr(OmegaConf, "load", lambda _: config.copy())
    with monkeypatch.context() as interrupted:
        interrupt_step(6, interrupted)
        with pytest.raises(SystemExit):
            quickstart.main([])
    assert "run-001: interrupted; the same command goes on from step 4\n" in capsys.readouterr().err
    # A run that was killed while it wrote its weights leaves this.
    (tmp_path / "runs" / "run-001" / "epoch_0").mkdir()
    assert quickstart.main([]) == 0
    said = capsys.readouterr().out
    assert re.search(r"going on with \S+/run-001.*\n(.*\n)*going on from step 4 of 12", said)
    advice = said.partition("What to try next")[2]
    assert "make " not in advice, "a wheel has no Makefile"
    advised = re.findall(r"python -m streampack_recipes.quickstart ([^\s,]+)", advice)
    assert len(advised) == 2
    config.max_steps = 1
    for overrides in advised:
        assert quickstart.main([overrides]) == 0
    assert sorted(path.name for path in (tmp_path / "runs").glob("run-*")) == [
        "run-001",
        "run-002",
        "run-003",
    ]
    with pytest.raises(ValueError, match="missing|is no|unknown"):
        quickstart.main(["--traceback", "maxsteps=1"])
    shutil.rmtree(tmp_path / "runs" / "run-001")
    (tmp_path / "runs" / "run-of-mine" / "checkpoints").mkdir(parents=True)
    assert quickstart.main([]) == 0
    assert (tmp_path / "runs" / "run-004" / "epoch_0").is_dir()


def test_a_signal_decides_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(config: Any) -> None:
        raise Interrupted("interrupted", step=4, number=signal.SIGTERM)

    monkeypatch.setattr(quickstart.stdlib_corpus, "prepare", lambda: None)
    monkeypatch.setattr("streampack_recipes.full_finetune.train", interrupted)
    with pytest.raises(SystemExit) as raised:
        quickstart.main([])
    assert raised.value.code == 143


def test_packed_tokens_are_those_of_the_run(whole: Run) -> None:
    ledger = whole.result["ledger"]
    lines = quickstart.packed_and_padded(tiny_config(whole.folder), steps=12).splitlines()
    assert f"{ledger.packed:,} of them real" in lines[1]
    assert lines[2].split() == ["packed", f"{ledger.capacity:,}"]
    padded = [int(line.split()[4].replace(",", "")) for line in lines[3:5]]
    drawn = lines[-4:]
    assert [len(line) for line in drawn] == [96] * 4
    assert "█" in drawn[0]
    assert ledger.packed < padded[0] < padded[1]


def test_padded_tokens_fill_up_to_the_longest() -> None:
    assert quickstart.padded_tokens([5, 2, 3, 1, 4], batch_size=2) == 2 * 5 + 2 * 3 + 4
