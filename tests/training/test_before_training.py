"""What is checked before a run: `streampack validate`, the weights' fit, and the isolation of samples."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from streampack_recipes.dpo import train as train_dpo
from streampack_recipes.full_finetune import train
from torch import nn

from streampack.cli import main
from streampack.training import validate as checks
from tests.harness.preferences import dpo_config
from tests.harness.processes import RankError, run_ranks
from tests.harness.tiny import ADAPTERS, BASE, losses, tiny_config


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A config that trains, with its files, and files with mistakes."""
    folder = tmp_path_factory.mktemp("validate")
    config = OmegaConf.to_container(tiny_config(folder), resolve=True)
    rows = {
        "long.jsonl": {"text": " ".join(["red"] * 99)},
        "columns.jsonl": {"txt": "red"},
        "ids.jsonl": {"tokens": [1, 2, 99], "labels": [1, 2, 99]},
        "masked.jsonl": {"tokens": [3, 4], "labels": [-100, -100]},
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
    """Return the problems of a config that `streampack validate` finds."""
    path = Path(config["output_dir"]).parent / "validated.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["validate", *words, str(path)])
    path.unlink()
    problems = err.getvalue().splitlines()
    assert status == bool(problems)
    return problems


TOKENS = {"_component_": "streampack.TokensEncoder"}
COLUMNS = {"_component_": "streampack.JSONLSource", "paths": "{folder}/columns.jsonl"}


def of_file(name: str, **changes: Any) -> dict[str, Any]:
    no_rows = {"validation": None, "run_val_every_n_steps": None}
    return {"data.source.paths": f"{{folder}}/{name}.jsonl", **no_rows, **changes}


# Changes to a sound config, and the beginning of the only problem they make.
BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"validation.fraction": 1e-9}, "validation.fraction=1e-09 holds out none of the rows: there are too few, and"),
    ({"validation.fraction": {"web": 0.1, "code": 1}}, "validation.fraction=1 is no fraction of the rows; give a"),
    ({"validation": {"source": COLUMNS}}, "validation rows: {folder}/columns.jsonl:1: column 'text' is missing"),
    ({"data.shufle": True}, "data: got an unexpected keyword argument 'shufle'; did you mean 'shuffle'?"),
    ({"data.strategy": "bestfit"}, "data: strategy='bestfit' is unknown; choose one of 'next_fit', "),
    ({"data.source.paths": "{folder}/gone.jsonl"}, "no file matches '{folder}/gone.jsonl'"),
    (of_file("long"), "{folder}/long.jsonl:1 has 101 tokens, max_seq_len is 32; set overlong to"),
    (of_file("no"), "{folder}/no.jsonl:1: not a line of JSON"),
    (of_file("columns"), "{folder}/columns.jsonl:1: column 'text' is missing; the row's columns are 'txt'"),
    (
        of_file("ids", **{"data.encoder": TOKENS}),
        "{folder}/ids.jsonl:1: token id 99 is outside the vocabulary of 16 ids (0 to 15)",
    ),
    (of_file("masked", **{"data.encoder": TOKENS}), "data: the first batch trains nothing: every label is masked"),
    ({"device": "opengl"}, "device='opengl' is unknown; choose one of "),
    ({"checkpointer.checkpoint_dir": "llama"}, "checkpointer.checkpoint_dir='llama' is no folder; download"),
    ({"optimizer.lr": "abc"}, "optimizer: torch.optim.AdamW: lr='abc' is text; give a number"),
    ({"optimizer.lr": -1.0}, "optimizer: torch.optim.AdamW: Invalid learning rate: -1.0"),
    (
        {"tokenizer": {"_component_": "torchtune.models.llama2.llama2_tokenizer", "path": "{folder}/no"}},
        "tokenizer: RuntimeError: NOT_FOUND: ",
    ),
    (
        {"checkpointer.checkpoint_files": ["model.safetensors"]},
        "checkpointer.checkpoint_files: there is no 'model.safetensors' in ",
    ),
    # It says nothing of the recipe, so the check is still that of full_finetune.
    ({"loss": {"num_output_chunks": 3}, "z_loss": 1e-4}, "loss names no _component_"),
    ({"checkpointer.model_type": "LAMA3"}, "checkpointer.model_type='LAMA3' is unknown; choose one of 'GEMMA', "),
]  # fmt: skip


def test_a_sound_config_has_no_problems(sound: Any) -> None:
    folder = Path(sound["folder"])
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert validate(changed(sound, {})) == []
    skipped = {"data.source.paths": ["{folder}/rows.jsonl", "{folder}/no.jsonl"]}
    for skip_bad in (True, "{folder}/bad"):
        assert validate(changed(sound, skipped | {"data.skip_bad": skip_bad})) == []
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
    ({}, "lora_finetune", "model: torchtune.models.llama3.llama3 has no adapters to train; name"),
    ({}, "dpo", "loss is missing; name one that compares pairs, such as loss: "),
    (
        {"loss": LOSS, "save_adapter_weights_only": True},
        "dpo",
        "save_adapter_weights_only: the model has no adapters",
    ),
    (
        {"loss": LOSS},
        "full_finetune",
        "loss: torchtune.rlhf.loss.DPOLoss is not the cross-entropy of this recipe",
    ),
]


@pytest.mark.parametrize(("changes", "recipe", "message"), OF_RECIPES, ids=lambda each: str(each)[:60])
def test_what_does_not_fit_the_recipe_is_one_problem(
    sound: Any, changes: dict[str, Any], recipe: str | None, message: str
) -> None:
    words = [] if recipe is None else ["--recipe", recipe]
    for files in ([], ["--no-files"]):
        [problem] = validate(changed(sound, changes), *words, *files)
        assert problem.removeprefix(f"recipe {recipe}: ").startswith(message)


def test_a_run_names_a_mistake_in_its_checkpointer(sound: Any) -> None:
    with pytest.raises(
        ValueError, match="checkpointer.model_type='LAMA3' is unknown; .*; did you mean 'LLAMA3'?"
    ):
        train(changed(sound, {"checkpointer.model_type": "LAMA3"}))


def test_weights_of_another_model_are_refused_by_their_names(tmp_path: Path) -> None:
    said = f"{UNFIT}tok_embeddings.weight is (16, 16) in the checkpoint and (24, 16) in the model; "
    with pytest.raises(ValueError, match=re.escape(said)):
        train(tiny_config(tmp_path, **{"model.vocab_size": 24, "model.num_layers": 2}))
    config = tiny_config(tmp_path)
    path = tmp_path / "init" / "model.bin"
    torch.save(torch.load(path) | {"other": torch.ones(2)}, path)
    said = f"ValueError: {UNFIT}other is (2,) in the checkpoint and missing in the model; name"
    with pytest.raises(RankError, match=re.escape(said)):
        run_ranks(train, 2, config)


# Models that leak between samples.


def leaky_llama3(**sizes: Any) -> nn.Module:
    """Build a model without the mask in its attention, as a user's own attention may be."""
    from torchtune.models.llama3 import llama3

    model = llama3(**sizes)
    for layer in model.layers:
        stock = layer.attn._attention_call
        layer.attn._attention_call = lambda q, k, v, stock=stock, **_: stock(
            q, k, v, mask=None, dropout_p=0.0, is_causal=True
        )
    return model


LEAKY = {"model._component_": f"{__name__}.leaky_llama3", "attention": "dense"}


@pytest.mark.parametrize(("recipe", "config_of"), [(train, tiny_config), (train_dpo, dpo_config)])
def test_a_leak_stops_the_run(tmp_path: Path, recipe: Any, config_of: Any) -> None:
    with pytest.raises(ValueError) as error:
        recipe(config_of(tmp_path, **LEAKY))
    message = str(error.value)
    assert re.search(r"changing sample \d moved sample \d by", message)
    assert message.endswith("\nverify_isolation=False lets it train like this")
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


def test_validate_probes_the_model(sound: Any) -> None:
    assert validate(changed(sound, {"attention": "dense"})) == []
    said = " ".join(validate(changed(sound, LEAKY)))
    assert "changing sample 0 moved sample 1 by" in said
    assert "likely cause: attention runs over the ends of samples" in said
    assert validate(changed(sound, LEAKY | {"verify_isolation": False})) == []
    assert validate(changed(sound, LEAKY), "--no-files") == []


def test_validate_looks_for_no_checkpoint(sound: Any, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {"source": "json", "data_files": "{folder}/columns.jsonl", "split": "train"}
    dataset = {"_component_": "torchtune.datasets.text_completion_dataset", "column": "txt", **rows}
    changes = {"data": ..., "dataset": dataset, "validation": None, "resume_from_checkpoint": True}
    changes |= {"run_val_every_n_steps": None}
    assert checks.validate(changed(sound, changes), train_of=lambda _: train) == []
    assert "no checkpoint" not in capsys.readouterr().out


def test_validate_probes_how_answers_share_a_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        checks, "find_leaks", lambda *_, groups, **__: asked.append(groups) or SimpleNamespace(ok=True)
    )
    config = OmegaConf.to_container(dpo_config(tmp_path), resolve=True)
    assert validate(config, "--recipe", "dpo") == []
    assert asked == [True]
