"""The scripts under examples/, cut short: each trains, and resumes when it is started again."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from streampack import cli
from tests.harness import hf_trainers
from tests.harness.hf_tokenizers import byte_level

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")  # TRL's own setting


def run(name: str, folder: Path, *options: str) -> Any:
    main = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
    common = ["--output_dir", str(folder), "--save_steps", "2", "--logging_steps", "1"]
    common += ["--lr_scheduler_type", "constant"]
    return main([*common, "--use_cpu", "True", "--disable_tqdm", "True", *options])


@pytest.fixture(autouse=True)
def one_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use 300 rows, and train the tokenizer once for all runs."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    text = import_module("stdlib_text")
    rows = text.pairs()[:300]
    tokenizer = text.train_tokenizer(rows)
    monkeypatch.setattr(text, "pairs", lambda: rows)
    monkeypatch.setattr(text, "train_tokenizer", lambda _: tokenizer)


@pytest.mark.parametrize(
    ("name", "needs"), [("hf_trainer", "accelerate"), pytest.param("trl_sft", "trl", marks=pytest.mark.slow)]
)
def test_an_example_trains_and_resumes(name: str, needs: str, tmp_path: Path) -> None:
    pytest.importorskip(needs)
    whole = run(name, tmp_path / "whole", "--max_steps", "4").state.log_history
    run(name, tmp_path / "cut", "--max_steps", "2")
    resumed = run(name, tmp_path / "cut", "--max_steps", "4").state.log_history
    curves = [[entry["loss"] for entry in history if "loss" in entry] for history in (whole, resumed)]
    assert len(curves[0]) == 4
    assert curves[0] == curves[1]
    assert curves[0][-1] < curves[0][0]


def test_the_three_commands_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a folder with a model and chats to trained weights and a page, as they are written there."""
    pytest.importorskip("rich")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [block] = re.findall(
        r"^## Your chats, in three commands\n.*?^```\n(.*?)^```", readme, re.MULTILINE | re.DOTALL
    )
    install, train, inspect = map(shlex.split, block.splitlines())

    assert install[:3] == ["pip", "install", "-e"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"\w+", install[3])) <= extras.keys()

    monkeypatch.chdir(tmp_path)
    tokenizer = byte_level(pad_token="</s>")
    tokenizer.save_pretrained("my_model")
    hf_trainers.model().save_pretrained("my_model")
    Path("chats").mkdir()
    turns = [{"role": "user", "content": "what is this"}, {"role": "assistant", "content": "a test"}]
    Path("chats/rows.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 400)

    assert train[:2] == ["python", "examples/chat_sft.py"]
    main = runpy.run_path(str(EXAMPLES / "chat_sft.py"))["main"]
    trainer = main([*train[2:], "--use_cpu", "True", "--disable_tqdm", "True", "--strategy", "best_fit"])
    assert "best_fit" in (Path(trainer.args.output_dir) / "report.html").read_text(), (
        "as inspect may recommend"
    )
    assert json.loads((Path(trainer.args.output_dir) / "config.json").read_text())["use_cache"]
    assert trainer.state.global_step > 1
    assert (Path(trainer.args.output_dir) / "model.safetensors").is_file()
    assert "chats/rows.jsonl" in (Path(trainer.args.output_dir) / "report.html").read_text()

    assert inspect[0] == "streampack"
    assert cli.main(inspect[1:]) == 0
    assert "chats/rows.jsonl" in Path(inspect[inspect.index("--html") + 1]).read_text()
