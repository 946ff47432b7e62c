"""Other trainers' scripts: torchtune's own recipe and config with our dataset, and those under examples/, cut short."""

from __future__ import annotations

import io
import json
import math
import re
import runpy
import shlex
import tomllib
from collections.abc import Iterator
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from streampack import PackedDataset, cli, packed_dataset
from tests.harness import hf_trainers
from tests.harness.hf_tokenizers import byte_level

MAX_SEQ_LEN, BATCH_SIZE, EPOCHS, STEPS = 128, 2, 2, 6
MODEL = {
    "vocab_size": 320, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "embed_dim": 32,
    "max_seq_len": MAX_SEQ_LEN, "intermediate_dim": 64,
}  # fmt: skip
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def rows() -> Iterator[dict[str, str]]:
    """Yield questions and answers of several lengths."""
    for a in range(11):
        for b in range(11 - a):
            steps = " ".join(NUMBERS[a : a + b + 1])
            yield {"question": f"{NUMBERS[a]} and {NUMBERS[b]}?", "answer": f"{NUMBERS[a + b]}: {steps}"}


def write_inputs(folder: Path) -> None:
    """Write rows, a tokenizer, and weights to start from."""
    import sentencepiece
    from torchtune.models.llama2 import llama2

    (folder / "init").mkdir()
    (folder / "rows.json").write_text("\n".join(json.dumps(row) for row in rows()))
    tokenizer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(text for row in rows() for text in row.values()), model_writer=tokenizer,
        model_type="bpe", vocab_size=MODEL["vocab_size"], hard_vocab_limit=False, byte_fallback=True,
        num_threads=1, minloglevel=2,
    )  # fmt: skip
    (folder / "tokenizer.model").write_bytes(tokenizer.getvalue())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        torch.save(llama2(**MODEL).state_dict(), folder / "init/weights.pt")


def config_for(folder: Path) -> dict[str, Any]:
    """Return torchtune's config for Llama 2 7B with a toy model and our dataset."""
    import torchtune
    from omegaconf import OmegaConf

    stock = Path(torchtune.__file__).parent.parent / "recipes/configs/llama2/7B_full_low_memory.yaml"
    config: Any = OmegaConf.to_container(OmegaConf.load(stock))
    toy = {
        "output_dir": str(folder / "out"),
        "model": {"_component_": "torchtune.models.llama2.llama2", **MODEL},
        "checkpointer": {
            "_component_": "torchtune.training.FullModelTorchTuneCheckpointer",
            "checkpoint_dir": str(folder / "init"), "checkpoint_files": ["weights.pt"], "model_type": "LLAMA2",
            "output_dir": str(folder / "out"),
        },
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 0.01},
        "optimizer_in_bwd": False, "lr_scheduler": None, "enable_activation_checkpointing": False,
        "enable_activation_offloading": False, "device": "cpu", "dtype": "fp32", "shuffle": False, "seed": 0,
        "batch_size": BATCH_SIZE, "epochs": EPOCHS, "max_steps_per_epoch": STEPS,
    }  # fmt: skip
    config |= toy
    config["tokenizer"] |= {"path": str(folder / "tokenizer.model"), "max_seq_len": MAX_SEQ_LEN}
    config["metric_logger"]["filename"] = "log.txt"
    config["dataset"] = {
        "_component_": "streampack.packed_dataset",
        "packed": True,
        "dataset": {
            "_component_": "torchtune.datasets.instruct_dataset",
            "source": "json",
            "data_files": str(folder / "rows.json"),
            "column_map": {"input": "question", "output": "answer"},
            "split": "train",
        },
    }
    return config


def loss_of_the_samples_alone(packs: PackedDataset, weights: Path) -> tuple[float, int]:
    """Return the mean loss of the first batch, computed sample by sample, and the number of samples."""
    from torchtune.models.llama2 import llama2

    model = llama2(**MODEL)
    model.load_state_dict(torch.load(weights, weights_only=True))
    losses = []
    with torch.no_grad():
        for fragment in (each for i in range(BATCH_SIZE) for each in packs[i]["fragments"]):
            row = packs.ds[fragment.row_id[0]]
            logits, labels = model(torch.tensor([row["tokens"]]))[0], torch.tensor(row["labels"])
            each = F.cross_entropy(logits[:-1], labels[1:], reduction="none")
            losses.append(each[labels[1:] != -100])
    return torch.cat(losses).mean().item(), len(losses)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for package in ("torchtune", "sentencepiece", "datasets", "omegaconf"):
        pytest.importorskip(package)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    write_inputs(tmp_path)
    return tmp_path


@pytest.mark.filterwarnings("ignore")  # torchtune's own
def test_the_stock_recipe_trains_on_our_packs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from omegaconf import OmegaConf
    from torchtune._cli.tune import main
    from torchtune.models.llama2 import llama2_tokenizer

    config = config_for(folder)
    OmegaConf.save(OmegaConf.create(config), folder / "run.yaml")
    # torchtune's collate makes its masks on CUDA wherever there is one
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["tune", "run", "full_finetune_single_device", "--config", "run.yaml"])
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as end, torch.random.fork_rng(devices=[]):
        main()
    assert not end.value.code
    log = (folder / "out/logs/log.txt").read_text()
    losses = [float(loss) for loss in re.findall(r"^Step \d+ \| loss:(\S+)", log, re.MULTILINE)]
    assert len(losses) == EPOCHS * STEPS
    assert all(map(math.isfinite, losses))
    assert losses[-1] < 0.7 * losses[0], losses
    assert list((folder / "out").rglob("*.pt")) or list((folder / "out").rglob("*.bin"))

    # The first loss is that of the samples one by one; without isolation it is off by 7e-4.
    tokenizer = llama2_tokenizer(str(folder / "tokenizer.model"), max_seq_len=MAX_SEQ_LEN)
    packs = packed_dataset(tokenizer, **{k: v for k, v in config["dataset"].items() if k != "_component_"})
    alone, samples = loss_of_the_samples_alone(packs, folder / "init/weights.pt")
    assert samples > 2 * BATCH_SIZE, "the packs hold too few samples to prove anything"
    assert losses[0] == pytest.approx(alone, rel=1e-5)


# The scripts under examples/: each trains, and resumes when it is started again.

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


def test_the_three_commands_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a folder with a model and chats to trained weights and a page, as they are written there."""
    pytest.importorskip("rich")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [block] = re.findall(
        r"^## Your chats, in three commands\n.*?^```\n(.*?)^```", readme, re.MULTILINE | re.DOTALL
    )
    install, train, inspect = map(shlex.split, block.splitlines())

    assert install[:2] == ["pip", "install"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"\w+", install[2])) <= {"streampack", *extras}

    monkeypatch.chdir(tmp_path)
    tokenizer = byte_level(pad_token="</s>")
    tokenizer.save_pretrained("my_model")
    hf_trainers.model().save_pretrained("my_model")
    Path("chats").mkdir()
    turns = [{"role": "user", "content": "what is this"}, {"role": "assistant", "content": "a test"}]
    Path("chats/rows.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 400)

    assert train[:2] == ["python", "-m"]
    main = runpy.run_module(train[2])["main"]
    trainer = main([*train[3:], "--use_cpu", "True", "--disable_tqdm", "True", "--strategy", "best_fit"])
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
