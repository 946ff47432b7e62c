"""`streampack validate` on broken and on sound configs."""

import copy
import json
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from streampack.cli import main
from streampack.training import model as models
from streampack.training.validate import notes, validate
from tests.harness.tiny import ADAPTERS, BASE, tiny_config


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


TOKENS = {"_component_": "streampack.TokensEncoder"}

# Changes to a sound config, and the beginning of the only problem they make.
BROKEN = [
    (
        {"validation.fraction": 1e-9},
        "validation.fraction=1e-09 holds out none of the rows, of which there are too few",
    ),
    ({"data.shufle": True}, "data: unknown key 'shufle'; did you mean 'shuffle'?"),
    ({"data.strategy": "bestfit"}, "data: strategy='bestfit' is unknown; choose one of 'next_fit', "),
    ({"data.max_seq_len": "abc"}, "data.max_seq_len: 'abc' is a str; packing takes int"),
    ({"data.source": ...}, "data.source is missing"),
    ({"data.source.paths": "{folder}/gone.jsonl"}, "data: no file matches '{folder}/gone.jsonl' (looked in "),
    (
        {"data.source.paths": "{folder}/long.jsonl", "validation": None},
        "data: {folder}/long.jsonl:1 has 101 tokens, max_seq_len is 32; set overlong to",
    ),
    (
        {"data.source.paths": "{folder}/no.jsonl", "validation": None},
        "data: {folder}/no.jsonl:1: not a line of JSON",
    ),
    (
        {"data.source.paths": "{folder}/columns.jsonl", "validation": None},
        "data: {folder}/columns.jsonl:1: column 'text' is missing; the row's columns are 'txt'",
    ),
    (
        {"data.source.paths": "{folder}/masked.jsonl", "data.encoder": TOKENS, "validation": None},
        "data: the first pack trains nothing: every label of its 3 sample(s)",
    ),
    (
        {"data.source.paths": "{folder}/ids.jsonl", "data.encoder": TOKENS, "validation": None},
        "data: {folder}/ids.jsonl:1: token id 99 is outside the vocabulary of 16 ids (0 to 15)",
    ),
    (
        {"data.encoder._component_": "torch.utils.collect_env.run"},
        "data.encoder: _component_ 'torch.utils.collect_env.run' is not among the components",
    ),
    (
        {"validation.fraction": 3},
        "validation.fraction=3 is no fraction of the rows; give a number between 0 and 1",
    ),
    (
        {"validation.fraction": {"web": 0.1, "code": 1}},
        "validation.fraction=1 is no fraction of the rows; give a number between 0 and 1",
    ),
    (
        {"validation.shares": 0.1},
        "validation has no 'shares'; its keys are fraction, source, max_packs, every",
    ),
    (
        {
            "validation": {
                "source": {"_component_": "streampack.JSONLSource", "paths": "{folder}/columns.jsonl"}
            }
        },
        "validation rows: {folder}/columns.jsonl:1: column 'text' is missing",
    ),
    ({"dtype": "fp16"}, "dtype='fp16' is unknown; choose one of 'bf16', 'fp32', 'fp64'"),
    ({"device": "opengl"}, "device='opengl' is none that torch "),
    (
        {"optimizer.lrr": 1e-4},
        "optimizer: torch.optim.AdamW: got an unexpected keyword argument 'lrr'; did you mean 'lr'?",
    ),
    (
        {
            "model.num_layer": 4,
            "checkpointer.checkpoint_dir": {
                "_component_": "streampack.training.weights.random_weights",
                "model": "${model}",
            },
        },
        "model: torchtune.models.llama3.llama3: got an unexpected keyword argument 'num_layer'; did you mean 'num_l",
    ),
    ({"optimizer.lr": "abc"}, "optimizer.lr: 'abc' is a str; AdamW takes "),
    ({"optimizer.lr": -1.0}, "optimizer: torch.optim.AdamW: Invalid learning rate: -1.0"),
    ({"lr_scheduler": {"_component_": "torch.optim.lr_scheduler.StepLR"}}, "lr_scheduler: "),
    (
        {
            "tokenizer": {
                "_component_": "torchtune.models.llama2.llama2_tokenizer",
                "path": "{folder}/tokenizer.model",
            }
        },
        "tokenizer: ",
    ),
    ({"checkpointer.checkpoint_dir": "{folder}/gone"}, "checkpointer.checkpoint_dir="),
    (
        {"checkpointer.checkpoint_files": ["model.safetensors"]},
        "checkpointer.checkpoint_files: there is no 'model.safetensors' in ",
    ),
    (
        {"checkpointer.model_type": "LAMA3"},
        "checkpointer.model_type='LAMA3' is unknown; did you mean 'LLAMA3'?",
    ),
    ({"clip_grad_norm": "one"}, "clip_grad_norm: 'one' is a str; a run takes float | None"),
    ({"seed": None}, "seed=None is not a whole number"),
    (
        {"output_dir": "${oc.env:SURELY_NOT_SET}"},
        "KeyError raised while resolving interpolation: \"Environment variable 'SURELY_NOT_SET'",
    ),
]


def test_a_sound_config_has_no_problems(sound, monkeypatch):
    monkeypatch.setattr(models, "build_model", None)  # no model is built
    before = {path: path.stat().st_mtime_ns for path in Path(sound["folder"]).rglob("*")}
    assert validate(changed(sound, {})) == []
    assert {path: path.stat().st_mtime_ns for path in Path(sound["folder"]).rglob("*")} == before


def test_a_skipped_record_is_no_problem(sound):
    before = sorted(Path(sound["folder"]).rglob("*"))
    paths = ["{folder}/rows.jsonl", "{folder}/no.jsonl"]
    for folder in (None, "{folder}/bad"):
        settings = {"data.source.paths": paths, "data.on_bad_record": "skip", "data.quarantine": folder}
        assert validate(changed(sound, settings)) == []
    assert sorted(Path(sound["folder"]).rglob("*")) == before


@pytest.mark.parametrize(("changes", "message"), BROKEN, ids=lambda each: str(each)[:60])
def test_a_broken_config_has_one_problem(sound, changes, message):
    problems = validate(changed(sound, changes))
    assert problems, "well-formed"
    assert len(problems) == 1, problems
    assert problems[0].startswith(message.replace("{folder}", sound["folder"])), problems[0]
    assert "\n" not in problems[0]


LORA = {"_component_": "torchtune.models.llama3.lora_llama3", **BASE, **ADAPTERS}
LOSS = {"_component_": "torchtune.rlhf.loss.DPOLoss", "beta": 0.1}

# Changes to a sound config, the recipe it is for, and the beginning of the only problem they make.
OF_RECIPES = [
    (
        {"model": LORA},
        "full_finetune",
        "recipe full_finetune: model: torchtune.models.llama3.lora_llama3 has adapters",
    ),
    (
        {"model": LORA},
        "pretrain",
        "recipe pretrain: model: torchtune.models.llama3.lora_llama3 has adapters, and this",
    ),
    (
        {},
        "lora_finetune",
        "recipe lora_finetune: model: torchtune.models.llama3.llama3 has no adapters to train; name",
    ),
    ({}, "dpo", "recipe dpo: loss is missing; name one that compares pairs, such as loss: "),
    ({"loss": LOSS}, "full_finetune", "recipe full_finetune: loss: this recipe's is cross-entropy"),
    (
        {"model.embed_dim": 32},
        None,
        "model: the checkpointer's weights do not fit the model: size mismatch for tok_embeddings.weight, (16, 16) in "
        "the checkpoint and (16, 32) in the model; ",
    ),
    (
        {"model.num_layers": 3},
        "full_finetune",
        "recipe full_finetune: the checkpointer's weights do not fit the model: 1 layer(s) in the checkpoint and 3 in ",
    ),
]


@pytest.mark.parametrize(("changes", "recipe", "message"), OF_RECIPES, ids=lambda each: str(each)[:60])
def test_what_does_not_fit_the_recipe_is_one_problem(sound, changes, recipe, message):
    for files in (True, False):
        [problem] = validate(changed(sound, changes), recipe=recipe, files=files)
        assert problem.startswith(message), problem
        assert "\n" not in problem


def test_a_checkpoint_of_another_model_in_hugging_faces_format(sound, tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    weights = {"model.embed_tokens.weight": torch.zeros(24, 16)}
    weights |= {f"model.layers.{layer}.self_attn.q_proj.weight": torch.zeros(16, 16) for layer in range(2)}
    save_file(weights, tmp_path / "model.safetensors")
    checkpointer = {"checkpoint_dir": str(tmp_path), "checkpoint_files": ["model.safetensors"]}
    config = changed(sound, {})
    config["checkpointer"] |= checkpointer
    [problem] = validate(config)
    assert problem == (
        "model: the checkpointer's weights do not fit the model: size mismatch for tok_embeddings.weight, (24, 16) in "
        "the checkpoint and (16, 16) in the model; 2 layer(s) in the checkpoint and 1 in the model; name the model "
        "that the checkpoint is of"
    )
    config["model"] |= {"vocab_size": 24, "num_layers": 2}
    assert validate(config) == []


def test_a_config_of_ours_is_checked_for_its_recipe(sound, tmp_path, capsys):
    (tmp_path / "my.yaml").write_text(json.dumps(changed(sound, {})))
    words = ["validate", "--no-files", str(tmp_path / "my.yaml"), "--recipe"]
    assert main([*words, "full_finetune"]) == 0
    assert main([*words, "dpo"]) == 1
    assert "recipe dpo: loss is missing" in capsys.readouterr().err
    dpo = ["validate", "--no-files", "dpo_quickstart"]
    assert main(dpo) == 0
    assert main([*dpo, "loss=null"]) == 1


def test_a_device_of_another_machine_is_a_note(sound, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = changed(sound, {"device": "cuda"})
    assert validate(config) == []
    (tmp_path / "my.yaml").write_text(json.dumps(config))
    assert main(["validate", "--no-files", str(tmp_path / "my.yaml")]) == 0
    line, note = capsys.readouterr().out.splitlines()
    assert "is well-formed" in line
    assert note.startswith("note: device='cuda': torch ")
    assert "finds no cuda device on this machine; here the run would be refused" in note
    for device in "cpu", "auto":
        assert notes(changed(sound, {"device": device})) == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert notes(config) == []
