"""`streampack inspect`: its words, its exit status, what it writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from streampack import cli
from streampack.inspection import command
from tests.harness.hf_tokenizers import byte_level
from tests.harness.inspection import chats


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with conversations and a tokenizer; the working directory."""
    chats(tmp_path / "a.jsonl", 60)
    chats(tmp_path / "b.jsonl", 40, seed=1)
    byte_level().save_pretrained(tmp_path / "tokenizer")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_files_to_a_terminal_and_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["a.jsonl", "--tokenizer", "tokenizer", "b.jsonl", "--max-seq-len", "512", "--json", "out.json"]
    assert cli.main(["inspect", *words, "--all", "--ranks", "2"]) == 0
    shown, report = capsys.readouterr().out, json.loads(Path("out.json").read_text())
    assert report["coverage"]["rows"] == 100
    assert (report["settings"]["ranks"], report["settings"]["max_seq_len"]) == (2, 512)
    assert report["title"] == "a.jsonl b.jsonl"
    assert any("a.jsonl" in row["place"] or "b.jsonl" in row["place"] for row in report["lengths"]["longest"])
    for words_of_report in ("exact_fit (yours)", "split_across_pack", "mini-batches", "bad: the run stops",
                            "Recommended", "on_bad_record: skip", "cu_seqlens", "slowest / mean"):  # fmt: skip
        assert words_of_report in shown


def test_json_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["*.jsonl", "--tokenizer", "tokenizer", "--max-seq-len", "512", "--json", "-", "--rows", "50"]
    assert cli.main(["inspect", *words]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["coverage"]["rows"] <= 60
    assert captured.err == ""


@pytest.mark.parametrize(
    ("row", "encoder"),
    [
        ({"messages": []}, "ChatEncoder"),
        ({"conversations": []}, "ChatEncoder"),
        ({"prompt": "a", "completion": "b"}, "PromptCompletionEncoder"),
        ({"messages": [], "prompt": "a", "chosen": [], "rejected": []}, "PreferenceEncoder"),
        ({"prompt": "a", "completions": []}, "RolloutEncoder"),
        ({"text": "a"}, "TextEncoder"),
        ({"content": "a", "id": 1}, "TextEncoder"),
        ({"input_ids": [1]}, "NoneType"),
    ],
)
def test_the_encoder_follows_from_the_columns(row: dict[str, Any], encoder: str) -> None:
    assert type(command._encoder(row, byte_level())).__name__ == encoder


def test_what_cannot_be_inspected(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("odd.jsonl").write_text('{"x": 1}\n')
    cases = {
        ("inspect",): (2, "name files, or a config"),
        ("inspect", "a.jsonl"): (2, "--max-seq-len is missing"),
        ("inspect", "a.jsonl", "--max-seq-len", "9"): (
            1,
            "name the tokenizer of the model, --tokenizer PATH",
        ),
        ("inspect", "none.jsonl", "--max-seq-len", "9"): (1, "none.jsonl"),
        ("inspect", "odd.jsonl", "--max-seq-len", "9"): (
            1,
            "the rows have the columns x, and none of messages",
        ),
        ("inspect", "a.jsonl", "--max-seq-len", "9", "--ranks", "two"): (
            2,
            "--ranks two is no list of numbers",
        ),
        ("inspect", "a.jsonl", "--max-seq-len", "9", "--rows", "0"): (2, "--rows 0 is below 1"),
        ("inspect", "a.jsonl", "--nonsense"): (2, "unrecognized arguments: --nonsense"),
        ("inspect", "a.jsonl", "--all", "--rows", "5"): (2, "not allowed with argument"),
    }
    for words, (status, message) in cases.items():
        assert cli.main(list(words)) == status, words
        assert message in capsys.readouterr().err, words


def test_without_rich(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    words = ["inspect", "a.jsonl", "--tokenizer", "tokenizer", "--max-seq-len", "512"]
    assert cli.main(words) == 2
    assert "pip install 'streampack[inspect]'; or write JSON: --json FILE" in capsys.readouterr().err
    assert cli.main([*words, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == 1


def test_an_interrupt_writes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any, **settings: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("streampack.inspection.survey.read_epoch", interrupted)
    words = ["a.jsonl", "--tokenizer", "tokenizer", "--max-seq-len", "512", "--json", "out.json"]
    assert cli.main(["inspect", *words]) == 130
    assert capsys.readouterr().err == "streampack: interrupted\n"
    assert not Path("out.json").exists()


def test_a_bar_on_a_terminal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with command._progress(100) as (progress, finished):
        progress(64)
        finished()


CONFIG = """
output_dir: {folder}/outputs
tokenizer: {{_component_: streampack.HFTokenizer, path: {folder}/tokenizer}}
model:
  _component_: torchtune.models.llama3.llama3
  vocab_size: 400
  num_layers: 2
  num_heads: 4
  num_kv_heads: 2
  embed_dim: 32
  intermediate_dim: 64
  max_seq_len: 512
checkpointer: {{_component_: torchtune.training.FullModelTorchTuneCheckpointer}}
optimizer: {{_component_: torch.optim.AdamW, lr: 1e-3}}
metric_logger: {{_component_: torchtune.training.metric_logging.DiskLogger, log_dir: {folder}/logs}}
validation: {{fraction: 0.1}}
max_steps: 10
batch_size: 2
packs_per_step: 4
data:
  source:
    _component_: streampack.Mix
    sources:
      - {{name: a, weight: 0.6, source: {{_component_: streampack.JSONLSource, paths: {folder}/a.jsonl}}}}
      - {{name: b, weight: 0.4, source: {{_component_: streampack.JSONLSource, paths: {folder}/b.jsonl}}}}
  encoder: {{_component_: streampack.ChatEncoder}}
  max_seq_len: 512
  overlong: truncate
  on_bad_record: skip
"""


@pytest.mark.parametrize("place", ["--config", "first", "method"])
def test_a_config(folder: Path, place: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With a mixture, a hold-out, a model; nothing is written beside the report."""
    pytest.importorskip("torchtune")
    Path("my.yaml").write_text(CONFIG.format(folder=folder))
    before = sorted(folder.rglob("*"))
    words = ["my.yaml"] if place == "first" else ["--config", "my.yaml"]
    words += ["data.buffer_size=32"]
    if place == "method":
        head, _, tail = CONFIG.format(folder=folder).partition("    _component_: streampack.Mix")
        one = f"    _component_: streampack.JSONLSource\n    paths: {folder}/a.jsonl\n"
        Path("my.yaml").write_text(f"{head}{one}  encoder:{tail.partition('  encoder:')[2]}")
        words += ["data.method=multipack"]
    assert cli.main(["inspect", *words, "--json", "-"]) == 0
    assert sorted(folder.rglob("*")) == before
    report = json.loads(capsys.readouterr().out)
    settings = report["settings"]
    assert (settings["packs_per_step"], settings["padded_batch"], settings["model"]) == (4, 2, "llama3")
    if place == "method":
        assert settings["filled_by"] == "multipack"
        return
    assert settings["buffer_size"] == 32
    assert [share["name"] for share in report["sources"]] == ["a", "b"]
    assert report["outcomes"][0]["flops_speedup"] > 0
    texts = [run["text"] for pack in report["packs"] for each in pack["sequences"] for run in each["runs"]]
    assert any("<|im_start|>assistant" in text for text in texts)
