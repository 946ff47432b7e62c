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
from tests.support.tiny import tiny_config


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
