"""The keys of a config, its overrides on the command line, and what is refused before anything is built."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import streampack_configs
import torch
from omegaconf import OmegaConf
from streampack_recipes.full_finetune import train

from streampack.cli import main
from streampack.training.checks import read_config
from streampack.training.entry import parse, with_overrides
from streampack.training.world import pick_device, pick_dtype
from tests.harness.tiny import tiny_config

QUICKSTART = Path(streampack_configs.__path__[0]) / "quickstart.yaml"


def written(changes: dict[str, Any]) -> dict[str, Any]:
    """Return the quickstart's config with dotted keys changed; ... removes one."""
    config = OmegaConf.load(QUICKSTART)
    for key, value in changes.items():
        above, _, last = key.rpartition(".")
        if value is ...:
            del (OmegaConf.select(config, above) if above else config)[last]
        else:
            OmegaConf.update(config, key, value, force_add=True, merge=True)
    plain: dict[str, Any] = OmegaConf.to_container(config, resolve=False)  # type: ignore[assignment]
    return plain


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"zzz": 4}, "zzz: Key 'zzz' not in 'RunConfig'"),
    ({"dataset": 4}, "dataset and data are two answers to what is trained; give one"),
    ({"epoch": 4}, "epoch: Key 'epoch' not in 'RunConfig'. Did you mean: 'epochs'"),
    ({"validation": {"fracton": 0.1}}, "validation.fracton: Key 'fracton' not in 'Validation'. Did you mean: 'frac"),
    ({"data.dtype": "bf16"}, "data: got an unexpected keyword argument 'dtype'; it takes source, max_seq_len, "),
    ({"optimizer": ...}, "missing: optimizer; the keys without"),
    ({"optimizer._component_": ...}, "optimizer names no _component_, so there is nothing to build"),
    ({"batch_size": 0}, "batch_size=0 is below 1"),
    ({"epochs": 1.5}, "epochs: Value '1.5' of type 'float' could not be converted to Integer"),
    ({"optimizer": 3}, "optimizer: Cannot assign int to Dict"),
    ({"compile": "maybe"}, "compile: Value 'maybe' is not a valid bool"),
    ({"output_dir": "${nowhere}"}, "output_dir: Interpolation key 'nowhere' not found"),
    ({"output_dir": "${oc.env:SURELY_NOT_SET}"}, "KeyError raised .*: \"Environment variable 'SURELY_NOT"),
    ({"dtype": "half"}, "dtype='half' is unknown; choose one of 'auto', 'bf16', 'fp32', 'fp64'"),
    ({"loss_norm": "pack"}, "loss_norm='pack' is unknown; choose one of 'token', 'sample'"),
    ({"collective_timeout": 0}, r"collective_timeout=0\.0 is no time to wait"),
    ({"validation.fraction": ...}, "validation needs a fraction of the rows, or a source of its own; give one"),
    ({"data.source": ...}, "data.source is missing"),
    ({"data.encoder": "streampack.TextEncoder"}, "data.encoder='streampack.TextEncoder' is text; write it as"),
    ({"data.max_seq_len": 4096}, "data.max_seq_len=4096 is above model.max_seq_len=512, .*; lower data.max_seq"),
    ({"data.prefetch": -1}, "data: prefetch=-1"),
    ({"optimizer.lr": "3e-3x"}, r"optimizer: torch\.optim\.AdamW: lr='3e-3x' is text; give a number$"),
    ({"model.num_layers": "four"}, r"model: torchtune\.models\.llama3\.llama3: num_layers='four' is text; give a numb"),
    ({"data.encoder.message_transform.train_on_input": "no"}, "train_on_input='no' is text; give true or false$"),
    ({"data.split_across_pack": "maybe"}, "data: split_across_pack='maybe' is text; give true or false$"),
    ({"data.shuffle": "yes please"}, "data: shuffle='yes please' is text; give True, False, 'auto' or a number"),
    ({"device": "gpu"}, "^device='gpu' is unknown; choose one of .*'xpu'; a GPU is 'cuda', and mps [^;]*$"),
    (
        {"data.pad_seqs_to": 8, "document_masking": False},
        "data.pad_seqs_to=8 pads every document, and document_masking=False lets",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=lambda each: str(each)[:60])
def test_configs_that_cannot_be_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        read_config(written(changes))
    OmegaConf.save(written(changes), tmp_path / "mine.yaml")
    assert main(["validate", "--no-files", str(tmp_path / "mine.yaml")]) == 1
    problem = capsys.readouterr().err.splitlines()[0]
    assert problem in str(raised.value), "`streampack validate` says the same"


def test_a_variable_of_ones_own_is_named_as_the_unknown_key_that_it_is() -> None:
    """Not as a key that is missing where it is used."""
    with pytest.raises(ValueError, match="^my_lr: Key 'my_lr' not in"):
        read_config(written({"my_lr": 1e-3, "optimizer.lr": "${my_lr}"}))


def test_all_that_a_config_must_not_have_is_named_at_once() -> None:
    changes = {
        "zzz": 1,
        "epoch": 3,
        "batch_size": "a",
        "validation": {"fracton": 0.1},
        "data.max_seq": 1,
        "data.packed": True,
        "data.source.pathz": 1,
        "optimizer.lrr": 3,
        "optimizer.lr": "3e-3x",
        "optimizer.fused": "yes",
        "optimizer.weight_decay": None,  # what the component says of that shows when it is built
        "lr_scheduler._component_": "torch.optim.lr_scheduler.CosinusLR",
        "profiler": {"_component_": "json.loads"},
    }
    with pytest.raises(ValueError) as raised:
        read_config(written(changes))
    said = str(raised.value).splitlines()
    begins = [
        "zzz: Key 'zzz' not in", "epoch: Key 'epoch' not in", "batch_size: Value 'a' of", "validation.fracton: Key",
        "data: got an unexpected keyword argument 'max_seq'", "data: got an unexpected keyword argument 'packed'",
        "data.source: streampack.JSONLSource: got an unexpected keyword argument 'pathz'",
        "optimizer: torch.optim.AdamW: got an unexpected keyword argument 'lrr'",
        "optimizer: torch.optim.AdamW: lr='3e-3x' is text", "optimizer: torch.optim.AdamW: fused='yes' is text",
        "lr_scheduler: _component_ 'torch.optim.lr_scheduler.CosinusLR' leads to nothing",
        "profiler: _component_ 'json.loads' is not among",
    ]  # fmt: skip
    found = [begin for line in said for begin in begins if line.startswith(begin)]
    assert sorted(found) == sorted(begins)
    assert len(said) == len(begins), "and nothing else is said"


def test_a_config_without_a_dtype_computes_in_bf16_where_the_device_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert read_config(written({})).dtype == "auto"
    assert pick_dtype(torch.device("cpu")) == "fp32"
    for can, dtype in ((True, "bf16"), (False, "fp32")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda can=can: can)
        assert pick_dtype(torch.device("cuda", 0)) == dtype


def test_offloading_by_the_nested_key_is_offloading() -> None:
    for wanted in (True, False):
        assert read_config(written({"fsdp": {"cpu_offload": wanted}})).fsdp_cpu_offload == wanted


def test_only_the_environment_adds_to_what_a_config_may_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    node = {"_component_": "json.loads"}

    def problems(**more: Any) -> list[str]:
        OmegaConf.save(written({"profiler": node, **more}), tmp_path / "mine.yaml")
        main(["validate", "--no-files", str(tmp_path / "mine.yaml")])
        return capsys.readouterr().err.splitlines()

    assert "not among the components" in problems()[0]
    assert "trusted_packages" in problems(trusted_packages=["json"])[0]
    monkeypatch.setenv("STREAMPACK_TRUST", "json")
    assert problems() == []


# Devices.

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def test_a_device_is_picked_or_refused() -> None:
    assert pick_device("cpu").type == "cpu"
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    for name in ("gpu", "meta", "mps", "cuda:x", "cuda:-1", "cpu:"):
        with pytest.raises(
            ValueError, match=rf"^device={name!r} is unknown; choose one of 'auto', 'cpu', 'cuda'"
        ):
            pick_device(name)


@NO_GPU
@pytest.mark.parametrize("name", ["cuda:1", "npu"])
def test_a_missing_device_is_refused_and_not_replaced_by_the_cpu(name: str, tmp_path: Path) -> None:
    kind = name.partition(":")[0]
    config = tiny_config(tmp_path, device=name)
    for door in (lambda config: pick_device(config.device), train):
        with pytest.raises(
            ValueError, match=rf"^device='{name}': torch \S+ finds no {kind} device on this machine; check"
        ):
            door(config)
    assert not (tmp_path / "out").exists()


def test_each_rank_of_a_machine_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", set_to.append)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert [str(pick_device(name)) for name in ("auto", "cuda", "cuda:1")] == ["cuda:0", "cuda:0", "cuda:1"]
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert [str(pick_device(name)) for name in ("auto", "cuda", "cuda:1", "cpu")] == ["cuda:1"] * 3 + ["cpu"]
    assert set_to == [0, 0, 1, 1, 1, 1]
    for rank, name in (("1", "cuda:0"), ("2", "auto"), ("2", "cuda"), ("0", "cuda:2")):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(ValueError, match=rf"^device='{name}', local rank {rank}: .* 2 cuda device"):
            pick_device(name)


# Overrides.

MIXTURE = """
lr: 0.1
name: a
encoder: {_component_: streampack.TextEncoder, column: text}
data:
  source:
    sources:
      - {name: web, weight: 1, source: {paths: web.jsonl}}
      - {name: code, weight: 2, source: {paths: code.jsonl}}
checkpointer: {folder: "${name}/x", checkpoint_files: {max_filename: "00002"}}
"""


def overridden(*words):
    return OmegaConf.to_container(with_overrides(OmegaConf.create(MIXTURE), words), resolve=True)


@pytest.mark.parametrize("key", ["data.source.sources.1.source.paths", "data.source.sources[1].source.paths"])
def test_list_entries_are_overridden_by_index(key):
    sources = overridden(f"{key}=s3://bucket/*.jsonl")["data"]["source"]["sources"]
    assert [source["source"]["paths"] for source in sources] == ["web.jsonl", "s3://bucket/*.jsonl"]
    assert [source["name"] for source in sources] == ["web", "code"]


def test_values_are_yaml() -> None:
    config = overridden(
        "lr=1e-3", "name=b", "extra.deep=[1, x]", "encoder.column=a=b", "none=None", "off=null",
        "checkpointer.checkpoint_files.max_filename=00010",
    )  # fmt: skip
    assert (config["lr"], config["name"], config["extra"]) == (1e-3, "b", {"deep": [1, "x"]})
    assert config["checkpointer"] == {"folder": "b/x", "checkpoint_files": {"max_filename": "00010"}}
    assert config["encoder"]["column"] == "a=b"
    assert (config["none"], config["off"]) == (None, None)
    assert overridden("lr=${name}", "name=c")["lr"] == "c"
    assert overridden("a.b={c: 1}", "a.b.d=2")["a"] == {"b": {"c": 1, "d": 2}}


def test_keys_can_be_removed():
    config = overridden("~lr", "~data.source.sources.0", "~encoder.column")
    assert "lr" not in config
    assert [source["name"] for source in config["data"]["source"]["sources"]] == ["code"]
    assert config["encoder"] == {"_component_": "streampack.TextEncoder"}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            "data.source.sources.2.weight=3",
            "list index out of range; an entry of a list is named by its number",
        ),
        ("data.source.sources.web.weight=3", "Index 'web' (str) is not an int; an"),
        ("~data.source.sources.2", "there is no such key to remove"),
        ("lr", "'lr' is no override; write KEY=VALUE, or ~KEY to remove one"),
        ("--lr=3", "'--lr=3' is no override; write KEY=VALUE, or ~KEY to remove one"),
        ("~nam", "there is no such key to remove; did you mean 'name'?"),
        ("lr=[1", "'[1' is not YAML"),
    ],
)
def test_bad_overrides_are_refused(word: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        overridden(word)
    assert str(error.value).removeprefix(word.partition("=")[0] + ": ").startswith(message)


def test_parse_reads_the_file_and_the_overrides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.yaml").write_text(MIXTURE)
    seen: list[Any] = []

    @parse
    def recipe_main(config: Any) -> None:
        """What the recipe does."""
        seen.append(config)

    words = ["--config", str(tmp_path / "a.yaml"), "data.source.sources.0.weight=5", "lr=3"]
    for given, status in ((words, (0, None)), (["lr=3"], (2,))):
        monkeypatch.setattr(sys, "argv", ["recipe.py", *given])
        with pytest.raises(SystemExit) as end:
            recipe_main()
        assert end.value.code in status
    assert "--config" in capsys.readouterr().err
    [config] = seen
    assert (config.lr, config.data.source.sources[0].weight) == (3, 5)
    assert recipe_main.__doc__ == "What the recipe does."
