from pathlib import Path

import pytest
import streampack_configs
from omegaconf import OmegaConf

from streampack.training.config import read_config, validate

QUICKSTART = Path(streampack_configs.__path__[0]) / "quickstart.yaml"


def written(**changes):
    config = OmegaConf.to_container(OmegaConf.load(QUICKSTART), resolve=False)
    return {key: value for key, value in (config | changes).items() if value is not ...}


def test_reads_a_config_and_resolves_interpolations():
    config = read_config(written(batch_size=4, packs_per_step=12))
    assert (config.batch_size, config.packs_per_step) == (4, 12)
    assert config.checkpointer["output_dir"] == config.output_dir


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batchsize": 4}, "unknown key 'batchsize': did you mean 'batch_size'"),
        ({"zzz": 4}, "unknown key 'zzz': the keys are"),
        ({"optimizer": ...}, "missing key 'optimizer'"),
        ({"batch_size": 0}, "batch_size=0 is below 1"),
        ({"max_steps": -3}, "max_steps=-3 is below 1"),
        ({"epochs": 1.5}, "epochs=1.5 is not a whole number"),
        ({"max_steps": None, "epochs": None}, "neither epochs nor max_steps is set"),
        ({"loss_norm": "pack"}, "loss_norm='pack' is unknown; choose one of 'token', 'sample'"),
        (
            {"attention": "sdpa"},
            "attention='sdpa' is unknown; choose one of 'auto', 'dense', 'flex', 'varlen', 'flash'",
        ),
        ({"collective_timeout": 0}, "collective_timeout=0 is no time to wait"),
        ({"packs_per_step": 0}, "packs_per_step=0 is below 1"),
    ],
)
def test_a_bad_config_says_what_is_wrong(changes, message):
    with pytest.raises(ValueError, match=message):
        read_config(written(**changes))
    assert any(message.split("=")[0].split(" is")[0] in problem for problem in validate(written(**changes)))


def test_validate_finds_nothing_in_ours():
    assert validate(OmegaConf.load(QUICKSTART)) == []


def test_validate_names_the_node_of_every_problem():
    config = written()
    config["optimizer"]["rate"] = 4
    config["data"]["source"]["_component_"] = "os.system"
    config["data"]["encoder"]["message_transform"]["_component_"] = "torchtune.data.Nothing"
    problems = validate(config)
    assert len(problems) == 3
    for place, what in (
        ("optimizer", "'rate'"),
        ("data.source", "not among the components"),
        ("data.encoder.message_transform", "--trust torchtune.data"),
    ):
        assert any(problem.startswith(f"{place}: ") and what in problem for problem in problems)


def test_validate_reports_an_interpolation_that_fails():
    [problem] = validate(written(output_dir="${oc.env:SURELY_NOT_SET}"))
    assert "SURELY_NOT_SET" in problem


def test_only_the_environment_adds_to_what_a_config_may_name(monkeypatch):
    node = {"_component_": "json.loads"}
    assert "not among the components" in validate(written(profiler=node))[0]
    assert len(validate(written(profiler=node, trusted_packages=["json"]))) == 2
    monkeypatch.setenv("STREAMPACK_TRUST", "json")
    assert validate(written(profiler=node)) == []
