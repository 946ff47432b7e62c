"""The quickstart: it resumes by itself, and counts what padding would cost."""

from __future__ import annotations

import re
import shutil
import signal

import pytest
from omegaconf import OmegaConf
from streampack_recipes import quickstart
from streampack_recipes.full_finetune import train

from streampack.training.run_folder import Interrupted
from tests.support.tiny import interrupt_step, tiny_config


def test_the_quickstart_resumes_by_itself(tmp_path, monkeypatch, capsys):
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
    assert re.search(
        r"going on with \S+/run-001.*\n(.*\n)*going on from step 4 of 12", capsys.readouterr().out
    )
    assert quickstart.main(["max_steps=1"]) == 0
    assert sorted(path.name for path in (tmp_path / "runs").glob("run-*")) == ["run-001", "run-002"]
    with pytest.raises(ValueError, match="missing|is no|unknown"):
        quickstart.main(["--traceback", "maxsteps=1"])
    shutil.rmtree(tmp_path / "runs" / "run-001")
    (tmp_path / "runs" / "run-of-mine" / "checkpoints").mkdir(parents=True)
    assert quickstart.main(["max_steps=1"]) == 0
    assert (tmp_path / "runs" / "run-003" / "epoch_0").is_dir()


def test_a_signal_decides_the_exit_status(tmp_path, monkeypatch, capsys):
    def interrupted(config):
        raise Interrupted("interrupted", step=4, number=signal.SIGTERM)

    monkeypatch.setattr(quickstart.stdlib_corpus, "prepare", lambda: None)
    monkeypatch.setattr("streampack_recipes.full_finetune.train", interrupted)
    with pytest.raises(SystemExit) as raised:
        quickstart.main([])
    assert raised.value.code == 143


def test_what_it_advises_runs_without_a_clone(tmp_path, monkeypatch, capsys):
    config = tiny_config(tmp_path, validation=None, max_steps=1, output_dir=str(tmp_path / "runs"))
    monkeypatch.setattr(quickstart.stdlib_corpus, "prepare", lambda: None)
    monkeypatch.setattr(OmegaConf, "load", lambda _: config.copy())
    assert quickstart.main([]) == 0
    said = capsys.readouterr().out.partition("What to try next")[2]
    assert "make " not in said, "a wheel has no Makefile"
    advised = re.findall(r"python -m streampack_recipes.quickstart ([^\s,]+)", said)
    assert len(advised) == 2
    for overrides in advised:
        assert quickstart.main([overrides]) == 0


def test_packed_tokens_are_those_of_the_run(tmp_path):
    config = tiny_config(tmp_path, max_steps=5, validation=None)
    ledger = train(config)["ledger"]
    lines = quickstart.packed_and_padded(config, steps=5).splitlines()
    assert f"{ledger.packed:,} of them real" in lines[1]
    assert lines[2].split() == ["packed", f"{ledger.capacity:,}"]
    padded = [int(line.split()[4].replace(",", "")) for line in lines[3:5]]
    drawn = lines[-4:]
    assert [len(line) for line in drawn] == [96] * 4
    assert "█" in drawn[0]
    assert ledger.packed < padded[0] < padded[1]


def test_padded_tokens_fill_up_to_the_longest():
    assert quickstart.padded_tokens([5, 2, 3, 1, 4], batch_size=2) == 2 * 5 + 2 * 3 + 4
