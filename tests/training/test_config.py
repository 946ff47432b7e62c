from pathlib import Path

import pytest
import streampack_configs
from omegaconf import OmegaConf

from streampack.training.config import RunConfig, read_config
from streampack.training.hints import TORCHTUNE_KEYS
from streampack.training.validate import validate

QUICKSTART = Path(streampack_configs.__path__[0]) / "quickstart.yaml"


def written(**changes):
    config = OmegaConf.to_container(OmegaConf.load(QUICKSTART), resolve=False)
    return {key: value for key, value in (config | changes).items() if value is not ...}


def test_interpolations_are_resolved():
    config = read_config(written(batch_size=4, packs_per_step=12))
    assert (config.batch_size, config.packs_per_step) == (4, 12)
    assert config.checkpointer["output_dir"] == config.output_dir


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"zzz": 4}, "unknown key 'zzz'; the keys are"),
        ({"dataset": 4}, "unknown key 'dataset'; write data.source"),
        ({"num_lanes": 4}, "unknown key 'num_lanes'; did you mean 'data.num_lanes'"),
        ({"strategy": 4}, "unknown key 'strategy'; did you mean 'data.strategy'"),
        ({"epoch": 4}, "unknown key 'epoch'; did you mean 'epochs'"),
        ({"data": {"dtype": "bf16"}}, "data: unknown key 'dtype'; write dtype at the top of the config"),
        ({"optimizer": ...}, "missing key 'optimizer'"),
        ({"batch_size": 0}, "batch_size=0 is below 1"),
        ({"epochs": 1.5}, "epochs: 1.5 is a float; a run takes int"),
        ({"max_steps": None, "epochs": None}, "neither epochs nor max_steps is set"),
        ({"loss_norm": "pack"}, "loss_norm='pack' is unknown; choose one of 'token', 'sample'"),
        ({"collective_timeout": 0}, "collective_timeout=0 is no time to wait"),
    ],
)
def test_bad_configs_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        read_config(written(**changes))
    assert any(
        message.split("=")[0].split(" is")[0] in problem
        for problem in validate(written(**changes), files=False)
    )


def test_a_method_of_all_samples_refuses_changing_files():
    config = written()
    config["data"] |= {"method": "multipack", "corpus_changes": "allow"}
    with pytest.raises(
        ValueError, match="data.method=multipack makes the batches of an epoch from all samples"
    ):
        read_config(config)


def test_padded_documents_are_not_joined():
    config = written(document_masking=False)
    config["data"] |= {"pad_seqs_to": 8}
    with pytest.raises(
        ValueError, match="data.pad_seqs_to=8 pads every document, and document_masking=False lets"
    ):
        read_config(config)


def test_validate_names_the_node_of_every_problem():
    config = written()
    config["optimizer"]["rate"] = 4
    config["data"]["source"]["_component_"] = "os.system"
    config["data"]["encoder"]["message_transform"]["_component_"] = "torchtune.data.Nothing"
    problems = validate(config, files=False)
    assert len(problems) == 3
    for place, what in (
        ("optimizer", "'rate'"),
        ("data.source", "not among the components"),
        ("data.encoder.message_transform", "--trust torchtune.data"),
    ):
        assert any(problem.startswith(f"{place}: ") and what in problem for problem in problems)


def test_only_the_environment_adds_to_what_a_config_may_name(monkeypatch):
    node = {"_component_": "json.loads"}
    assert "not among the components" in validate(written(profiler=node), files=False)[0]
    assert len(validate(written(profiler=node, trusted_packages=["json"]), files=False)) == 2
    monkeypatch.setenv("STREAMPACK_TRUST", "json")
    assert validate(written(profiler=node), files=False) == []


def test_every_key_of_torchtunes_configs_is_known_or_has_a_hint():
    from torchtune import _recipe_registry as registry

    folder = Path(registry.__file__).parent.parent / "recipes" / "configs"
    kinds = [
        f"{kind}_{where}"
        for kind in ("full_finetune", "lora_finetune", "lora_dpo", "full_dpo")
        for where in ("single_device", "distributed")
    ]
    keys = set()
    for recipe in registry.get_all_recipes():
        if recipe.name in kinds:
            for config in recipe.configs:
                keys |= set(OmegaConf.load(folder / config.file_path))
    assert len(keys) > 25
    assert keys - set(RunConfig.__dataclass_fields__) - set(TORCHTUNE_KEYS) == set()
    assert not set(RunConfig.__dataclass_fields__) & set(TORCHTUNE_KEYS)


def test_packs_longer_than_the_models_rows_are_refused():
    config = written()
    config["data"]["max_seq_len"] = 4096
    with pytest.raises(
        ValueError, match=r"data.max_seq_len=4096 is above model.max_seq_len=512, .*; lower data.max_seq"
    ):
        read_config(config)
