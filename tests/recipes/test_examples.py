"""The scripts under examples/, cut short: each trains, and resumes when it is started again."""

from __future__ import annotations

import inspect
import json
import re
import runpy
from dataclasses import fields
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import HfArgumentParser

from streampack import IterablePackedDataset, cli
from streampack.packing.encoders.shaped import SHAPE_KEYS
from tests.harness import hf_trainers
from tests.harness.hf_tokenizers import byte_level
from tests.harness.preferences import dpo_config
from tests.packing.test_shapes import PUBLISHED

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def run(name: str, folder: Path, *options: str) -> Any:
    main = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
    common = ["--output_dir", str(folder), "--save_steps", "2", "--logging_steps", "1"]
    common += ["--lr_scheduler_type", "constant"]
    return main([*common, "--use_cpu", "True", "--disable_tqdm", "True", *options])


@pytest.fixture
def one_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use 300 rows, and train the tokenizer once for all runs."""
    text = import_module("streampack_examples.stdlib_text")
    rows = list(islice(text.docstring_pairs(), 300))
    monkeypatch.setattr(text, "docstring_pairs", lambda: rows)
    tokenizer = text.train_tokenizer(text.pairs())
    monkeypatch.setattr(text, "train_tokenizer", lambda _: tokenizer)


@pytest.mark.parametrize(
    ("name", "needs"), [("hf_trainer", "accelerate"), pytest.param("trl_sft", "trl", marks=pytest.mark.slow)]
)
@pytest.mark.usefixtures("one_tokenizer")
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")  # TRL's own setting
def test_an_example_trains_and_resumes(name: str, needs: str, tmp_path: Path) -> None:
    pytest.importorskip(needs)
    small = ["--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "1"]
    whole = run(name, tmp_path / "whole", "--max_steps", "4", *small).state.log_history
    run(name, tmp_path / "cut", "--max_steps", "2", *small)
    resumed = run(name, tmp_path / "cut", "--max_steps", "4", *small).state.log_history
    curves = [[entry["loss"] for entry in history if "loss" in entry] for history in (whole, resumed)]
    assert len(curves[0]) == 4
    assert curves[0] == curves[1]
    assert curves[0][-1] < curves[0][0]

    # A run that was killed in its first save begins again, and one can be told where to resume.
    (tmp_path / "cut/checkpoint-4").rename(tmp_path / "kept")
    (tmp_path / "cut/checkpoint-2/trainer_state.json").unlink()
    again = run(name, tmp_path / "cut", "--max_steps", "2", *small).state.log_history
    assert [entry["loss"] for entry in again if "loss" in entry] == curves[0][:2]
    named = ["--resume_from_checkpoint", str(tmp_path / "kept"), "--max_steps", "4"]
    assert run(name, tmp_path / "other", *named, *small).state.log_history[-1]["step"] == 4
    assert not list((tmp_path / "other").glob("checkpoint-*"))


def test_chats_longer_than_a_pack_are_told_before_the_first_step_as_by_inspect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("rich")
    monkeypatch.chdir(tmp_path)
    byte_level(pad_token="</s>").save_pretrained("my_model")
    hf_trainers.model().save_pretrained("my_model")
    chats = [
        [{"role": "user", "content": "what is this"}, {"role": "assistant", "content": "a test " * length}]
        for length in (1, 1, 1, 80, 1, 1, 80, 1)
    ]
    Path("rows.jsonl").write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in chats))
    common = ["rows.jsonl", "--tokenizer", "my_model", "--max-seq-len", "128", "--all", "--json"]
    command = ["--model", "my_model", "--data", "rows.jsonl", "--max_seq_len", "128", "--use_cpu", "True"]
    main = runpy.run_module("streampack_examples.chat_sft")["main"]

    def told(*options: str) -> tuple[str, bool]:
        assert cli.main(["inspect", *common, "told.json", *options]) == 0
        report = json.loads(Path("told.json").read_text())
        [loss] = [each for each in report["losses"] if each["reason"] in ("overlong", "truncated")]
        assert loss["rows"] == 2
        return f"{loss['fraction']:.1%}", loss["stops"]

    tokens, stops = told()
    message = (
        rf"2 of 8 samples looked at are too long for max_seq_len=128, {tokens} of the tokens, and the run would stop "
        r"at the first of them: \S*rows.jsonl:\d has \d+ tokens; set overlong to 'truncate', 'drop' or 'split'"
    )
    with pytest.raises(ValueError, match=message):
        main([*command, "--disable_tqdm", "True"])
    assert stops
    assert not list(Path("outputs").rglob("checkpoint-*"))
    for choice in ("truncate", "drop"):
        tokens, stops = told("--overlong", choice)
        caplog.clear()
        options = ["--disable_tqdm", "True", "--overlong", choice, "--output_dir", choice]
        assert main([*command, *options]).state.global_step
        line = f"2 of 8 samples looked at are too long for max_seq_len=128: overlong={choice} loses {tokens} of the tok"
        assert line in caplog.text
        assert not stops


@pytest.mark.parametrize("name", ["chat_sft", "vision_sft", "hf_trainer", "trl_sft"])
@pytest.mark.parametrize("available", [False, True])
@pytest.mark.parametrize("supported", [False, True])
def test_an_example_computes_in_bf16_if_the_device_has_it(
    name: str, available: bool, supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "trl_sft":
        pytest.importorskip("trl")
    main = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
    chosen: list[Any] = []

    class Stop(Exception):
        """Ends the example after its defaults are set."""

    def parse(parser: Any, words: list[str], **_: Any) -> None:
        chosen.extend(map(parser.get_default, ("use_cpu", "bf16")))
        raise Stop

    monkeypatch.setattr(HfArgumentParser, "parse_args_into_dataclasses", parse)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: supported)
    with pytest.raises(Stop):
        main([])
    assert chosen == [not available, available and supported]


def test_a_mistake_of_the_user_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of chat_sft: a chat too long for a pack, a broken row, an unknown option, and a folder of another run."""
    monkeypatch.chdir(tmp_path)
    byte_level(pad_token="</s>").save_pretrained("my_model")
    hf_trainers.model().save_pretrained("my_model")
    row = json.dumps(PUBLISHED["5 OpenAI"][0])
    files = {"good": [row] * 8, "other": [row] * 9, "broken": [row, row, row, '{"messages": [']}
    for name, rows in files.items():
        Path(f"{name}.jsonl").write_text("".join(f"{each}\n" for each in rows))

    def start(data: str, *options: str) -> Any:
        words = ["--model", "my_model", "--data", data, "--use_cpu", "True", "--disable_tqdm", "True"]
        monkeypatch.setattr("sys.argv", ["chat_sft", *words, "--max_seq_len", "256", *options])
        try:
            runpy.run_module("streampack_examples.chat_sft", run_name="__main__")
        except SystemExit as end:
            return end.code
        return 0

    assert start("good.jsonl", "--save_steps", "1") == 0
    assert re.fullmatch(r"error: the state was made with corpus\.files=.*", start("other.jsonl"))
    new = ["--output_dir", "new"]
    assert re.fullmatch(
        r"error: 8 of 8 samples .* too long for max_seq_len=16,.*",
        start("good.jsonl", *new, "--max_seq_len", "16"),
    )
    assert re.fullmatch(
        r"error: \S*broken\.jsonl:4: not a line of JSON \([^;]*\)", start("broken.jsonl", *new)
    )
    capsys.readouterr()
    assert start("good.jsonl", *new, "--max_len", "16") == 2
    assert capsys.readouterr().err.endswith("error: unrecognized arguments: --max_len 16\n")


def test_inspect_and_chat_sft_take_the_same_words_as_a_config(capsys: pytest.CaptureFixture[str]) -> None:
    module = runpy.run_module("streampack_examples.chat_sft")
    words = {each.name for each in fields(module["ChatArguments"])} - {"model", "data", "chat_template"}
    assert cli.main(["inspect", "--help"]) == 0
    options = set(re.findall(r"--([a-z-]+)", capsys.readouterr().out))
    assert {word.replace("_", "-") for word in (*words, "chat_template")} <= options
    of_data = {*inspect.signature(IterablePackedDataset).parameters, *SHAPE_KEYS}
    assert words <= of_data


def test_rows_that_cannot_be_read_are_skipped_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    byte_level(pad_token="</s>").save_pretrained("my_model")
    hf_trainers.model().save_pretrained("my_model")
    row, _, _, _ = PUBLISHED["5 OpenAI"]
    for name, rows in (("good", [row] * 4), ("odd", [row, {"text": "of another shape"}])):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    main = runpy.run_module("streampack_examples.chat_sft")["main"]
    command = ["--model", "my_model", "--data", "good.jsonl", "odd.jsonl", "--max_steps", "1"]
    command += ["--max_seq_len", "256", "--use_cpu", "True", "--disable_tqdm", "True"]
    with pytest.raises(ValueError, match=r"odd\.jsonl:2 is text \(text\)"):
        main(command)
    assert main([*command, "--skip-bad"]).state.global_step == 1
    [listed] = Path("outputs/chat/bad_records").iterdir()
    assert "odd.jsonl:2" in listed.read_text()


SHAPES = {name: (row, how) for name, (row, _, parts, how) in PUBLISHED.items() if parts is not None}
QUICK = "16 question, as turns"


@pytest.mark.parametrize(
    "name", [QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SHAPES if name != QUICK)]
)
def test_a_published_shape_is_trained_from_its_file_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two steps of chat_sft, or of dpo if the rows are pairs; both show the first sample before the first step."""
    row, how = SHAPES[name]
    monkeypatch.chdir(tmp_path)
    byte_level(pad_token="</s>").save_pretrained("my_model")
    Path("rows.jsonl").write_text((json.dumps(row) + "\n") * 8)
    if "pair" in name:
        main = runpy.run_module("streampack_examples.chat_sft")["main"]
        with pytest.raises(ValueError, match="train their bad answers like good ones; run dpo"):
            main(["--model", "my_model", "--data", "rows.jsonl", "--use_cpu", "True"])
        train = import_module("streampack_recipes.dpo").train
        Path("rows.jsonl").rename("of_pairs.jsonl")  # the harness writes rows of its own
        assert train(of_pairs(tmp_path))["step"] == 2
    else:
        hf_trainers.model().save_pretrained("my_model")
        main = runpy.run_module("streampack_examples.chat_sft")["main"]
        command = ["--model", "my_model", "--data", "rows.jsonl", "--max_steps", "2", "--max_seq_len", "256"]
        for option, value in how.items():
            text = (
                value
                if isinstance(value, str)
                else ",".join(f"{theirs}={ours}" for theirs, ours in value.items())
            )
            command += [f"--{option}", text]
        trainer = main([*command, "--use_cpu", "True", "--disable_tqdm", "True"])
        assert trainer.state.global_step == 2
    printed = capsys.readouterr().out
    assert f"rows are {PUBLISHED[name][1]}" in printed
    assert ("⟦" in printed) == ("the first sample" in printed)


def of_pairs(folder: Path) -> Any:
    from torchtune.models.llama3 import llama3

    config = dpo_config(folder)
    del config.data.encoder
    config.tokenizer = {"_component_": "streampack.HFTokenizer", "path": "my_model"}
    config.data.source = {"_component_": "streampack.JSONLSource", "paths": "of_pairs.jsonl"}
    model = {key: value for key, value in config.model.items() if key != "_component_"}
    model |= {"vocab_size": 400, "max_seq_len": 256}
    torch.save(llama3(**model).state_dict(), Path(config.checkpointer.checkpoint_dir) / "model.bin")
    config.model.update(model)
    config.data.max_seq_len, config.data.num_lanes = 256, 1
    config.max_steps, config.validation, config.run_val_every_n_steps = 2, None, None
    return config
