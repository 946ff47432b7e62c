"""full_finetune, pretrain and the quickstart on a toy model: losses, masks, resume, schedules, secrets."""

from __future__ import annotations

import re
import shutil
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from streampack_recipes import quickstart
from streampack_recipes.full_finetune import train
from torchtune.models.llama3 import llama3
from torchtune.training.metric_logging import StdoutLogger

from streampack import IterablePackedDataset, JSONLSource, TextEncoder, cli
from streampack.training.weights import random_weights
from tests.harness.processes import run_ranks, start_process
from tests.harness.runs import Run, run_once
from tests.harness.tiny import (
    WordTokenizer,
    losses,
    mixed_config,
    numbers,
    tiny_config,
    write_rows,
)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(next((folder / "out" / "epoch_0").glob("*.bin")), weights_only=True)


def after(step: int, values: dict[int, str]) -> dict[int, str]:
    return {each: value for each, value in values.items() if each > step}


def test_a_run_learns_and_accounts_for_every_token(whole: Run) -> None:
    (first, before), (last, after) = whole.result["held_out"][0], whole.result["held_out"][-1]
    assert (first, last) == (0, 12)
    assert after < before - 0.3
    ledger = whole.result["ledger"]
    assert ledger.tokens_in == ledger.packed + ledger.buffered + sum(ledger.dropped.values())
    assert ledger.packed == whole.result["tokens"]
    assert ledger.packs == 12 * 4
    for words in ("packs ", "in = ", "tokens/s", "held-out", "weights"):
        assert words in whole.said
    weights, start = weights_of(whole.folder), torch.load(whole.folder / "init" / "model.bin")
    assert weights.keys() == start.keys()
    assert any(not torch.equal(weights[key], start[key]) for key in start)
    assert list(losses(whole.folder)) == [*range(1, 13)]
    assert "nan" not in (whole.folder / "out" / "logs" / "log.txt").read_text()


SAME_LOSSES = {
    "num_workers": 2, "enable_activation_checkpointing": True, "batch_size": 1, "gradient_accumulation_steps": 4,
    "log_every_n_steps": 3, "attention": "dense"
}  # fmt: skip


@pytest.mark.parametrize("changes", [SAME_LOSSES, pytest.param({"compile": True}, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")  # about what torch does when it compiles
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
def test_settings_that_do_not_change_the_losses(tmp_path: Path, whole: Run, changes: dict[str, Any]) -> None:
    train(tiny_config(tmp_path, **changes))
    for name in ("loss", "validation_loss"):
        found, expected = numbers(tmp_path, name), numbers(whole.folder, name)
        assert len(found) >= 4
        assert found == pytest.approx({step: expected[step] for step in found}, rel=1e-4)


def test_a_killed_run_resumes_with_the_same_losses(tmp_path: Path, whole: Run) -> None:
    config = tiny_config(tmp_path)
    process = start_process(train, config)
    log = tmp_path / "out" / "logs" / "log.txt"
    while not (log.exists() and "Step 6 |" in log.read_text()):
        assert process.is_alive()
        time.sleep(0.01)
    process.kill()
    process.join()
    killed_at = max(losses(tmp_path))
    assert killed_at < 12, "it was over before it was killed"

    with pytest.raises(ValueError, match="holds checkpoints up to step"):
        train(config)
    log.unlink()
    config.resume_from_checkpoint = True
    train(config)
    resumed = losses(tmp_path)
    assert min(resumed) in (5, 9)  # checkpoints are at 4 and 8
    assert resumed == after(min(resumed) - 1, losses(whole.folder))
    validation = losses(tmp_path, "validation_loss")
    assert validation == {step: losses(whole.folder, "validation_loss")[step] for step in validation}


def test_dropout_is_that_of_the_step_after_a_resume_and_after_a_validation(tmp_path: Path) -> None:
    changes = {"model.attn_dropout": 0.5, "lr_scheduler": None, "validation": None}
    train(tiny_config(tmp_path / "whole", max_steps=8, **changes))
    train(tiny_config(tmp_path / "parts", max_steps=4, **changes))
    source = {"_component_": "streampack.JSONLSource", "paths": str(tmp_path / "whole" / "rows.jsonl")}
    changes |= {"validation": {"source": source, "max_packs": 2}, "run_val_every_n_steps": 2}
    train(tiny_config(tmp_path / "parts", max_steps=8, resume_from_checkpoint=True, **changes))
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


# What a resume refuses, and what it cannot apply.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.max_seq_len": 24}, "max_seq_len=32 and this dataset has max_seq_len=24"),
        ({"data.encoder.add_eos": False}, r"made with encoder\."),
        ({}, r"made with corpus\..*files=.* only with corpus_lists"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    tmp_path: Path, whole: Run, changes: dict[str, Any], message: str
) -> None:
    whole.copy_to(tmp_path, newest=4)
    if not changes:
        with (tmp_path / "rows.jsonl").open("a") as file:
            file.write('{"text": "cat"}\n')
    with pytest.raises(ValueError, match=message):
        train(tiny_config(tmp_path, resume_from_checkpoint=True, **changes))
    if not changes:  # the lists of files were kept all the same
        lists = {"data.corpus_lists": str(tmp_path / "out" / "corpus_lists")}
        with pytest.warns(UserWarning, match=r"1 changed \(.*rows\.jsonl\)"):
            assert (
                train(tiny_config(tmp_path, resume_from_checkpoint=True, **lists, max_steps=6))["step"] == 6
            )


@pytest.mark.filterwarnings("always::UserWarning")
def test_settings_that_a_resume_cannot_apply_are_named(tmp_path: Path, whole: Run, recwarn: Any) -> None:
    whole.copy_to(tmp_path, newest=8)
    assert train(tiny_config(tmp_path, resume_from_checkpoint=True, max_steps=9))["step"] == 9
    assert not [warning for warning in recwarn if "not used" in str(warning.message)]
    changes = {"data.num_lanes": 4, "optimizer.lr": 0.5, "optimizer.eps": 1e-3, "max_steps": 11}
    changes["optimizer._component_"] = "torch.optim.Adam"
    train(tiny_config(tmp_path, resume_from_checkpoint=True, **changes))
    said = " ".join(str(warning.message) for warning in recwarn)
    assert "num_lanes=4 is not used: the state was made with num_lanes=2, which a run keeps" in said
    for changed in (
        "optimizer._component_=torch.optim.Adam (it was torch.optim.AdamW)",
        "optimizer.eps=0.001 (it was None)",
        "optimizer.lr=0.5 (it was ",
    ):
        assert changed in said
    assert "not used as far as the checkpoint has such a number" in said
    assert max(numbers(tmp_path, "lr").values()) <= 0.02


# What reaches files and screens.


class UploadingLogger(StdoutLogger):
    """Keeps what torchtune's loggers of W&B, Comet and MLflow would upload."""

    def __init__(self, log_dir: str, api_key: str) -> None:
        self.path = Path(log_dir, "uploaded.txt")

    def log_config(self, config: Any) -> None:
        super().log_config(config)
        self.path.write_text(str(OmegaConf.to_container(config, resolve=True)))


def test_secrets_reach_no_file_and_no_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("KEY", "key-of-the-environment"), ("OUT", f"{tmp_path}/out"), ("SEED", "31415926")):
        monkeypatch.setenv(name, value)
    config = tiny_config(tmp_path, rows=60, max_steps=2, validation=None, log_rows=True)
    config.output_dir, config.seed = "${oc.env:OUT}", "${oc.decode:${oc.env:SEED}}"
    config.data.source.storage = {"options": {"key": "${oc.env:KEY}", "client": {"token": "typed-token"}}}
    logger = f"{__name__}.UploadingLogger"
    config.metric_logger = {"_component_": logger, "log_dir": str(tmp_path), "api_key": "${oc.env:KEY}"}
    written = tmp_path / "mine.yaml"
    OmegaConf.save(config, written)
    train(config)
    train(OmegaConf.merge(config, {"resume_from_checkpoint": True}))
    page, figures, scores = (str(tmp_path / name) for name in ("page.html", "figures.json", "scores.jsonl"))
    for words in (
        ["validate"], ["inspect", "--html", page, "--json", figures], ["unpack"], ["trace"],
        ["score", "--out", scores],
    ):  # fmt: skip
        assert cli.main([*words, "--config", str(written)]) == 0
    found = {
        path: path.read_bytes().decode(errors="replace") for path in tmp_path.rglob("*") if path.is_file()
    }
    assert "typed-token" in found.pop(written)
    assert len(found) > 10
    for text in (*found.values(), *capfd.readouterr()):
        assert "key-of-the-environment" not in text
        assert "typed-token" not in text
    report = found[tmp_path / "out" / "report.html"]
    assert "api_key: ${oc.env:KEY}" in report
    assert "31415926" not in report
    assert "loss_norm: token" in report, "what the config does not say"
    assert "'api_key': '${oc.env:KEY}'" in found[tmp_path / "uploaded.txt"]
    with pytest.raises(ValueError, match=r"^storage is a str; give a Storage") as raised:
        train(
            OmegaConf.merge(
                config,
                {"output_dir": str(tmp_path / "other"), "data": {"source": {"storage": "${oc.env:KEY}"}}},
            )
        )
    assert "key-of-the-environment" not in str(raised.value)


# Pretraining.


def test_a_run_learns_a_mixture_from_random_weights(tmp_path: Path) -> None:
    config = mixed_config(tmp_path, max_steps=30, z_loss=1e-3, **{"data.split_across_pack": True})
    config.checkpointer.checkpoint_dir = {
        "_component_": f"{random_weights.__module__}.random_weights",
        "model": config.model,
        "folder": config.output_dir,
    }
    result = train(config)
    (first, before), (last, after) = result["held_out"][0], result["held_out"][-1]
    assert (first, last) == (0, 30)
    assert after < before - 0.5
    ledger = result["ledger"]
    assert ledger.padding == 0
    assert ledger.tokens_in == ledger.packed + ledger.buffered
    held_out = {name: numbers(tmp_path, f"validation_loss_{name}") for name in ("counting", "words")}
    for step, loss in numbers(tmp_path, "validation_loss").items():
        assert loss == pytest.approx(0.75 * held_out["counting"][step] + 0.25 * held_out["words"][step])
    assert held_out["counting"] != held_out["words"]
    assert all(value > 0 for value in numbers(tmp_path, "z_loss").values())
    [start] = (tmp_path / "out").glob("random-*/model.bin")
    assert weights_of(tmp_path).keys() == torch.load(start, weights_only=True).keys()

    # Every step's loss is the mean of the sources' losses, weighted by what each has trained in it.
    each = {name: numbers(tmp_path, f"source_{name}_loss") for name in ("counting", "words")}
    trained = {name: numbers(tmp_path, f"source_{name}_trained") for name in each}
    before_step = dict.fromkeys(each, 0.0)
    for step, loss in numbers(tmp_path).items():
        gained = {name: trained[name][step] - before_step[name] for name in each}
        total = sum(gained[name] * each[name].get(step, 0) for name in each)
        assert total / sum(gained.values()) == pytest.approx(loss, rel=1e-3)
        before_step = {name: trained[name][step] for name in each}
    assert numbers(tmp_path, "source_counting_fraction")[30] == pytest.approx(0.75, abs=0.05)
    for name in ("data_wait", "data_wait_mean", "ledger_samples"):
        assert numbers(tmp_path, name), f"{name} is logged"


def first_step(folder: Path) -> tuple[float, float, float]:
    """Compute loss, z-loss and gradient norm of the first step with a plain causal model on whole packs."""
    packs = IterablePackedDataset(
        JSONLSource(folder / "rows.jsonl"), encoder=TextEncoder(WordTokenizer()), max_seq_len=32,
        split_across_pack=True, buffer_size=16, shuffle=50, num_lanes=2, epochs=None,
    )  # fmt: skip
    rows = list(islice(packs, 4))
    config = OmegaConf.to_container(tiny_config(folder).model)
    model = llama3(**{key: value for key, value in config.items() if key != "_component_"})
    model.load_state_dict(torch.load(folder / "init" / "model.bin", weights_only=True))
    logits = model(torch.stack([row["tokens"] for row in rows]))[:, :-1]
    labels = torch.stack([row["labels"] for row in rows])[:, 1:]
    trained = (labels != -100).sum()
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / trained
    z_loss = 0.1 * logits.logsumexp(-1)[labels != -100].square().sum() / trained
    (loss + z_loss).backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    return loss.item(), z_loss.item(), norm.item()


def test_without_document_masking_a_pack_is_one_sequence(tmp_path: Path) -> None:
    held_out = write_rows(tmp_path / "held_out.jsonl", 60)
    validation = {"source": {"_component_": "streampack.JSONLSource", "paths": str(held_out)}, "max_packs": 4}
    options = {"z_loss": 0.1, "validation": validation, "max_steps": 1, "clip_grad_norm": 1e9}
    options |= {"data.split_across_pack": True, "lr_scheduler": None}
    first = []
    for masking in (False, True):
        result = train(tiny_config(tmp_path / str(masking), document_masking=masking, **options))
        first.append([numbers(tmp_path / str(masking))[1], result["held_out"][0][1]])
    loss, z_loss, norm = first_step(tmp_path / "False")
    assert first[0][0] == pytest.approx(loss, rel=1e-5)
    assert numbers(tmp_path / "False", "z_loss")[1] == pytest.approx(z_loss, rel=1e-5)
    assert numbers(tmp_path / "False", "grad_norm")[1] == pytest.approx(norm, rel=1e-4)
    for unmasked, masked in zip(*first, strict=True):  # of training, and of validation
        assert abs(unmasked - masked) > 1e-4  # of fp32 losses near 3, whose noise is 1e-6


# Epochs, steps and learning rates of runs that resume in another way than they began: no rate rises again.

PEAK = 0.02  # of torchtune's cosine, which rises again after its last step
SMALL: dict[str, Any] = {
    "rows": 120, "validation": None, "epochs": 1, "max_steps": None, "data.num_lanes": 1,
    "gradient_accumulation_steps": 1,     "save_every_n_steps": 8, "keep_last_n_checkpoints": 9,
}  # fmt: skip


def rates(folder: Path) -> list[float]:
    """The rate of every step."""
    found = numbers(folder, "lr")
    assert [*found] == [*range(min(found), max(found) + 1)]
    return [*found.values()]


def assert_falls(found: list[float]) -> None:
    peak = found.index(max(found))
    assert found[peak:] == sorted(found[peak:], reverse=True), f"the rate rises again: {found}"
    assert found[-1] < PEAK / 10


@pytest.fixture(scope="module")
def epoch(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of one epoch."""
    return run_once(tmp_path_factory, "epoch", train, lambda folder: tiny_config(folder, **SMALL))


def test_a_run_by_epochs_ends_with_the_data(
    epoch: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (epoch.result["ledger"].samples, epoch.result["ledger"].buffered) == (120, 0)
    assert epoch.result["held_out"] == []
    whole = rates(epoch.folder)
    assert len(whole) == epoch.result["step"] > 15
    assert_falls(whole)
    assert whole[0] == 0, "the rate of the step, not that of the next one"

    config = tiny_config(epoch.copy_to(tmp_path), **SMALL | {"epochs": 2}, resume_from_checkpoint=True)
    longer = train(config)
    assert longer["ledger"].samples == 240
    assert f"continuing from step {epoch.result['step']} of " in capsys.readouterr().out
    assert train(config) == {"step": longer["step"]}
    assert "is over" in capsys.readouterr().out
    found = rates(tmp_path)[-(longer["step"] - epoch.result["step"]) :]
    assert len(found) == pytest.approx(len(whole), abs=2)
    assert_falls(found[1:])
    assert found[1] > PEAK / 3, "the second half of the new one"


def test_a_run_that_had_max_steps_continues_to_the_end_of_its_epochs(tmp_path: Path, epoch: Run) -> None:
    """The smoke test's few steps stayed those of the schedule, which rose to its peak again."""
    train(tiny_config(tmp_path, **SMALL | {"max_steps": 8}))
    assert len(rates(tmp_path)) == 8
    train(tiny_config(tmp_path, **SMALL, resume_from_checkpoint=True))
    assert rates(tmp_path)[9:] == pytest.approx(rates(epoch.folder)[9:]), "as if it had never had them"


@pytest.mark.filterwarnings("ignore:.*evenly:UserWarning")
def test_a_resume_on_more_ranks_than_lanes_keeps_the_steps(tmp_path: Path, epoch: Run) -> None:
    """Each rank took its share of a step, those without lanes too: there were twice as many steps."""
    settings = SMALL | {"batch_size": 2}
    train(tiny_config(tmp_path, **settings | {"max_steps": 8}))
    run_ranks(train, 2, tiny_config(tmp_path, **settings, resume_from_checkpoint=True))
    found = rates(tmp_path)
    assert found[9:] == pytest.approx(rates(epoch.folder)[9:])
    assert_falls(found[9:])


# The quickstart.


def test_each_quickstart_has_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quickstart.stdlib_corpus, "prepare", lambda: None)
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "outputs" / "quickstart"
    small = [
        "tokenizer=tests.harness.tiny.WordTokenizer", "~tokenizer.path", "~tokenizer.prompt_template",
        "~data.source.paths", f"data.source.paths={write_rows(tmp_path / 'rows.jsonl', 400)}",
        "data.encoder._component_=streampack.TextEncoder", "~data.encoder.message_transform", "data.max_seq_len=32",
        "model.vocab_size=16", "model.num_layers=1", "model.num_heads=2", "model.num_kv_heads=1", "model.embed_dim=16",
        "model.intermediate_dim=32", "checkpointer.checkpoint_dir.beside=[]", "~validation",
        "~run_val_every_n_steps", "max_steps=12", "batch_size=2", "save_every_n_steps=4", "device=cpu",
    ]  # fmt: skip
    assert quickstart.main(small) == 0
    advice = capsys.readouterr().out.partition("What to try next")[2]
    assert "make " not in advice, "a wheel has no Makefile"
    advised = re.findall(r"python -m streampack_recipes.quickstart ([^\s,]+)", advice)
    assert len(advised) == 2
    for overrides in advised:
        assert quickstart.main([*small, "max_steps=1", overrides]) == 0
    assert sorted(path.name[-3:] for path in runs.glob("run-*")) == ["001", "002", "003"]
    with pytest.raises(ValueError, match="Did you mean: .max_steps.?"):
        quickstart.main([*small, "--traceback", "maxsteps=1"])
    shutil.rmtree(runs / "run-001")  # by their number, not by how many there are, runs are named
    (runs / "run-of-mine" / "checkpoints").mkdir(parents=True)
    assert quickstart.main([*small, "max_steps=1"]) == 0
    assert (runs / "run-004" / "epoch_0").is_dir()
