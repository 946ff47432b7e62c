"""What is checked before a run: `streampack validate`, the weights' fit, and the isolation of samples."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from streampack_recipes.full_finetune import train
from streampack_recipes.lora_finetune import train as train_lora
from torch import nn
from torchtune.training import FullModelTorchTuneCheckpointer

from streampack.attention.prepare import prepare_model_for_packing
from streampack.cli import main
from streampack.distributed.world import join_world
from streampack.training import model as models
from streampack.training.isolation import probe_config, verify_isolation
from streampack.training.weights import random_weights
from tests.harness import tiny_torchtune
from tests.harness.groups import MAX_SEQ_LEN
from tests.harness.processes import RankError, run_ranks
from tests.harness.tiny import ADAPTERS, BASE, lora_config, losses, tiny_config


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A config that trains, with its files, and files with mistakes."""
    folder = tmp_path_factory.mktemp("validate")
    config = OmegaConf.to_container(tiny_config(folder), resolve=True)
    rows = {
        "long.jsonl": {"text": " ".join(["red"] * 99)},
        "columns.jsonl": {"txt": "red"},
        "masked.jsonl": {"tokens": [1, 2, 3], "labels": [-100] * 3},
        "ids.jsonl": {"tokens": [1, 2, 99], "labels": [1, 2, 99]},
    }
    for name, row in rows.items():
        (folder / name).write_text(f"{json.dumps(row)}\n" * 3)
    (folder / "no.jsonl").write_text("{not json\n")
    config["folder"] = str(folder)
    return config


def changed(sound, changes):
    """Return a copy with dotted keys set; ... removes one, and {folder} becomes the folder of the files."""
    config = copy.deepcopy(sound)
    folder = config.pop("folder")
    for key, value in changes.items():
        *above, last = key.split(".")
        node = config
        for part in above:
            node = node[part]
        if value is ...:
            del node[last]
        else:
            node[last] = json.loads(json.dumps(value).replace("{folder}", folder))
    return config


def validate(config: Any, *words: str) -> list[str]:
    """Return what `streampack validate` says of a config: its problems, or, if it has none, its notes."""
    path = Path(config["output_dir"] if "$" not in config["output_dir"] else ".").parent / "validated.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["validate", *words, str(path)])
    path.unlink()
    problems = err.getvalue().splitlines()
    assert status == bool(problems)
    return problems or out.getvalue().splitlines()[1:]


TOKENS = {"_component_": "streampack.TokensEncoder"}
RANDOM = {"_component_": f"{random_weights.__module__}.random_weights", "model": "${model}"}
COLUMNS = {"_component_": "streampack.JSONLSource", "paths": "{folder}/columns.jsonl"}


def of_file(name: str, **changes: Any) -> dict[str, Any]:
    return {"data.source.paths": f"{{folder}}/{name}.jsonl", "validation": None, **changes}


# Changes to a sound config, and the beginning of the only problem they make.
BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"validation.fraction": 1e-9}, "validation.fraction=1e-09 holds out none of the rows, of which there are too few"),
    ({"validation.fraction": 3}, "validation.fraction=3 is no fraction of the rows; give a number between 0 and 1"),
    ({"validation.fraction": {"web": 0.1, "code": 1}}, "validation.fraction=1 is no fraction of the rows; give a"),
    ({"validation.shares": 0.1}, "validation has no 'shares'; its keys are fraction, source, max_packs, every"),
    ({"validation": {"source": COLUMNS}}, "validation rows: {folder}/columns.jsonl:1: column 'text' is missing"),
    ({"data.shufle": True}, "data: unknown key 'shufle'; did you mean 'shuffle'?"),
    ({"data.strategy": "bestfit"}, "data: strategy='bestfit' is unknown; choose one of 'next_fit', "),
    ({"data.max_seq_len": "abc"}, "data.max_seq_len: 'abc' is a str; packing takes int"),
    ({"data.source": ...}, "data.source is missing"),
    ({"data.source.paths": "{folder}/gone.jsonl"}, "data: no file matches '{folder}/gone.jsonl' (looked in "),
    (of_file("long"), "data: {folder}/long.jsonl:1 has 101 tokens, max_seq_len is 32; set overlong to"),
    (of_file("no"), "data: {folder}/no.jsonl:1: not a line of JSON"),
    (of_file("columns"), "data: {folder}/columns.jsonl:1: column 'text' is missing; the row's columns are 'txt'"),
    (
        of_file("masked", **{"data.encoder": TOKENS}),
        "data: the first pack trains nothing: every label of its 3 sample(s)",
    ),
    (
        of_file("ids", **{"data.encoder": TOKENS}),
        "data: {folder}/ids.jsonl:1: token id 99 is outside the vocabulary of 16 ids (0 to 15)",
    ),
    (
        {"data.encoder._component_": "torch.utils.collect_env.run"},
        "data.encoder: _component_ 'torch.utils.collect_env.run' is not among the components",
    ),
    ({"dtype": "fp16"}, "dtype='fp16' is unknown; choose one of 'bf16', 'fp32', 'fp64'"),
    ({"device": "opengl"}, "device='opengl' is none that torch "),
    (
        {"optimizer.lrr": 1e-4},
        "optimizer: torch.optim.AdamW: got an unexpected keyword argument 'lrr'; did you mean 'lr'?",
    ),
    (
        {"model.num_layer": 4, "checkpointer.checkpoint_dir": RANDOM},
        "model: torchtune.models.llama3.llama3: got an unexpected keyword argument 'num_layer'; did you mean 'num_l",
    ),
    ({"optimizer.lr": "abc"}, "optimizer.lr: 'abc' is a str; AdamW takes "),
    ({"optimizer.lr": -1.0}, "optimizer: torch.optim.AdamW: Invalid learning rate: -1.0"),
    ({"lr_scheduler": {"_component_": "torch.optim.lr_scheduler.StepLR"}}, "lr_scheduler: "),
    ({"tokenizer": {"_component_": "torchtune.models.llama2.llama2_tokenizer", "path": "{folder}/no"}}, "tokenizer: "),
    ({"checkpointer.checkpoint_dir": "{folder}/gone"}, "checkpointer.checkpoint_dir="),
    (
        {"checkpointer.checkpoint_files": ["model.safetensors"]},
        "checkpointer.checkpoint_files: there is no 'model.safetensors' in ",
    ),
    ({"checkpointer.model_type": "LAMA3"}, "checkpointer.model_type='LAMA3' is unknown; did you mean 'LLAMA3'?"),
    ({"clip_grad_norm": "one"}, "clip_grad_norm: 'one' is a str; a run takes float | None"),
    ({"seed": None}, "seed=None is not a whole number"),
    (
        {"output_dir": "${oc.env:SURELY_NOT_SET}"},
        "KeyError raised while resolving interpolation: \"Environment variable 'SURELY_NOT_SET'",
    ),
]  # fmt: skip


def test_a_sound_config_has_no_problems(sound: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "build_model", None)  # no model is built
    folder = Path(sound["folder"])
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert validate(changed(sound, {})) == []
    skipped = {
        "data.source.paths": ["{folder}/rows.jsonl", "{folder}/no.jsonl"],
        "data.on_bad_record": "skip",
    }
    for quarantine in (None, "{folder}/bad"):
        assert validate(changed(sound, skipped | {"data.quarantine": quarantine})) == []
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


@pytest.mark.parametrize(("changes", "message"), BROKEN, ids=lambda each: str(each)[:60])
def test_a_broken_config_has_one_problem(sound: Any, changes: dict[str, Any], message: str) -> None:
    [problem] = validate(changed(sound, changes))
    assert problem.startswith(message.replace("{folder}", sound["folder"])), problem


LORA = {"_component_": "torchtune.models.llama3.lora_llama3", **BASE, **ADAPTERS}
LOSS = {"_component_": "torchtune.rlhf.loss.DPOLoss", "beta": 0.1}
UNFIT = "the checkpointer's weights do not fit the model: "

# Changes to a sound config, the recipe it is for, and the beginning of the only problem they make.
OF_RECIPES: list[tuple[dict[str, Any], str | None, str]] = [
    ({"model": LORA}, "full_finetune", "model: torchtune.models.llama3.lora_llama3 has adapters"),
    ({"model": LORA}, "pretrain", "model: torchtune.models.llama3.lora_llama3 has adapters, and this"),
    ({}, "lora_finetune", "model: torchtune.models.llama3.llama3 has no adapters to train; name"),
    ({}, "dpo", "loss is missing; name one that compares pairs, such as loss: "),
    ({"loss": LOSS}, "full_finetune", "loss: this recipe's is cross-entropy"),
    (
        {"model.embed_dim": 32},
        None,
        f"model: {UNFIT}size mismatch for tok_embeddings.weight, (16, 16) in the checkpoint and (16, 32) in the model",
    ),
    ({"model.num_layers": 3}, "full_finetune", f"{UNFIT}1 layer(s) in the checkpoint and 3 in "),
]


@pytest.mark.parametrize(("changes", "recipe", "message"), OF_RECIPES, ids=lambda each: str(each)[:60])
def test_what_does_not_fit_the_recipe_is_one_problem(
    sound: Any, changes: dict[str, Any], recipe: str | None, message: str
) -> None:
    words = [] if recipe is None else ["--recipe", recipe]
    for files in ([], ["--no-files"]):
        [problem] = validate(changed(sound, changes), *words, *files)
        assert problem.removeprefix(f"recipe {recipe}: ").startswith(message)


def test_a_config_of_ours_is_checked_for_its_recipe() -> None:
    assert main(["validate", "--no-files", "dpo_quickstart"]) == 0
    assert main(["validate", "--no-files", "dpo_quickstart", "loss=null"]) == 1


def test_a_checkpoint_of_another_model_in_hugging_faces_format(sound: Any, tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    weights = {"model.embed_tokens.weight": torch.zeros(24, 16)}
    weights |= {f"model.layers.{layer}.self_attn.q_proj.weight": torch.zeros(16, 16) for layer in range(2)}
    save_file(weights, tmp_path / "model.safetensors")
    config = changed(sound, {})
    config["checkpointer"] |= {"checkpoint_dir": str(tmp_path), "checkpoint_files": ["model.safetensors"]}
    [problem] = validate(config)
    assert problem == (
        f"model: {UNFIT}size mismatch for tok_embeddings.weight, (24, 16) in the checkpoint and (16, 16) in the model; "
        "2 layer(s) in the checkpoint and 1 in the model; name the model that the checkpoint is of"
    )
    config["model"] |= {"vocab_size": 24, "num_layers": 2}
    assert validate(config) == []


def test_weights_of_another_model_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched, pytest.raises(ValueError, match=f"^{UNFIT}size mismatch .*24, 16"):
        patched.setattr(FullModelTorchTuneCheckpointer, "load_checkpoint", None)
        train(tiny_config(tmp_path, **{"model.vocab_size": 24, "model.num_layers": 2}))
    config = tiny_config(tmp_path)
    path = tmp_path / "init" / "model.bin"
    torch.save(torch.load(path) | {"other": torch.ones(2)}, path)
    with pytest.raises(RankError, match=re.escape(f"ValueError: {UNFIT}other is not in the model; name")):
        run_ranks(train, 2, config)


def test_a_device_of_another_machine_is_a_note(sound: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = changed(sound, {"device": "cuda"})
    [note] = validate(config)
    assert note.startswith("note: device='cuda': torch ")
    assert "finds no cuda device on this machine; here the run would be refused" in note
    assert validate(changed(sound, {"device": "auto"})) == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert validate(config) == []


# Models that leak between samples.


def without_mask(model: nn.Module) -> nn.Module:
    """Drop the mask in a model's attention, as a user's own attention may do."""
    for layer in model.layers:
        stock = layer.attn._attention_call
        layer.attn._attention_call = lambda q, k, v, stock=stock, **_: stock(
            q, k, v, mask=None, dropout_p=0.0, is_causal=True
        )
    return model


def leaky_llama3(**sizes: Any) -> nn.Module:
    from torchtune.models.llama3 import llama3

    return without_mask(llama3(**sizes))


def leaky_lora_llama3(**sizes: Any) -> nn.Module:
    from torchtune.models.llama3 import lora_llama3

    return without_mask(lora_llama3(**sizes))


LEAKY = {"model._component_": f"{__name__}.leaky_llama3", "attention": "dense"}


def leaky_lora_config(folder: Path) -> Any:
    config = lora_config(folder, attention="dense")
    config.model["_component_"] = f"{__name__}.leaky_lora_llama3"
    return config


@pytest.mark.parametrize("lora", [False, True])
def test_a_leak_stops_the_run(tmp_path: Path, lora: bool) -> None:
    with pytest.raises(ValueError) as error:
        train_lora(leaky_lora_config(tmp_path)) if lora else train(tiny_config(tmp_path, **LEAKY))
    message = str(error.value)
    assert "changing sample 0 moved sample 1 by" in message
    assert message.endswith("stopped before its first step; verify_isolation=False lets it train like this")
    assert not (tmp_path / "out" / "logs").exists()


def test_the_check_changes_no_losses_and_can_be_switched_off(tmp_path: Path) -> None:
    """It restores modes and random generators: a model with dropout has the same losses."""
    seen = []
    for verified in (True, False):
        folder = tmp_path / str(verified)
        train(tiny_config(folder, verify_isolation=verified, max_steps=3, **{"model.attn_dropout": 0.3}))
        seen.append(losses(folder))
    assert seen[0] == seen[1]
    assert train(tiny_config(tmp_path, **LEAKY, verify_isolation=False, max_steps=1))["step"] == 1


def leak_on_rank_0() -> None:
    """Leak on one rank, as with another version of a kernel there."""
    with join_world(torch.device("cpu")) as world:
        model = tiny_torchtune.build("llama3")
        inputs = prepare_model_for_packing(model)
        wrong = lambda batch: inputs(batch) | {"mask": None}  # noqa: E731
        verify_isolation(model, inputs if world.rank else wrong, max_seq_len=MAX_SEQ_LEN, world=world)  # type: ignore[arg-type]


def test_a_leak_on_one_rank_stops_all() -> None:
    with pytest.raises(RankError) as error:
        run_ranks(leak_on_rank_0, 2)
    assert "OtherRankFailed: rank 0 failed: ValueError: " in str(error.value)


def test_the_verify_command_reports_the_isolation_of_a_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It needs no weights and no data."""
    config = tiny_config(tmp_path)
    config.checkpointer.checkpoint_dir = config.data.source.paths = "nowhere"
    assert probe_config(config).ok
    good, bad = (str(tmp_path / f"{name}.yaml") for name in ("good", "bad"))
    OmegaConf.save(config, good)
    OmegaConf.save(tiny_config(tmp_path, **LEAKY), bad)
    state = torch.get_rng_state()
    said = {}
    for words in (
        [good],
        [good, "attention=dense"],
        [bad],
        [good, "attention=flash"],
        [good, "atention=flex"],
    ):
        status = main(["verify", "--config", *words])
        said[" ".join([Path(words[0]).stem, *words[1:]])] = (status, *capsys.readouterr())
    assert torch.equal(torch.get_rng_state(), state)
    assert said["good"][1].startswith(f"{good}: no leak in a pack of 4 samples (9, 1, 12, 6 tokens)")
    assert [status for status, *_ in said.values()] == [0, 0, 1, 1, 1]
    assert "changing sample 0 moved sample 1 by" in said["bad"][2]
    assert "likely cause: attention runs over the ends of samples" in said["bad"][2]
    assert "attention='flash' " in said["good attention=flash"][2]
    assert "unknown key 'atention'; did you mean 'attention'?" in said["good atention=flex"][2]
