"""Overrides of a config from the command line."""

import sys

import pytest
from omegaconf import OmegaConf

from streampack.training.overrides import parse, with_overrides

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


def test_values_are_yaml():
    config = overridden(
        "lr=1e-3", "name=b", "extra.deep=[1, x]", "encoder.column=a=b", "none=None", "off=null"
    )
    assert (config["lr"], config["name"], config["extra"]) == (1e-3, "b", {"deep": [1, "x"]})
    assert config["checkpointer"]["folder"] == "b/x"
    assert config["encoder"]["column"] == "a=b"
    assert overridden("lr=${name}", "name=c")["lr"] == "c"
    assert (config["none"], config["off"]) == (None, None)
    assert overridden("a.b={c: 1}", "a.b.d=2")["a"] == {"b": {"c": 1, "d": 2}}


def test_a_plain_value_of_a_node_sets_its_component():
    """As under torchtune's own parser."""
    encoder = overridden("encoder=streampack.TokensEncoder", "encoder.column=x")["encoder"]
    assert encoder == {"_component_": "streampack.TokensEncoder", "column": "x"}
    assert overridden("encoder=null")["encoder"] is None
    assert overridden("encoder={_component_: streampack.TokensEncoder}")["encoder"]["_component_"].endswith(
        "sEncoder"
    )


def test_a_file_number_stays_text():
    assert overridden("checkpointer.checkpoint_files.max_filename=00010")["checkpointer"][
        "checkpoint_files"
    ] == {"max_filename": "00010"}


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
            "data.source.sources.2.weight: list index out of range; an entry of a list is named by its number, from 0",
        ),
        (
            "data.source.sources.web.weight=3",
            "data.source.sources.web.weight: Index 'web' (str) is not an int; an",
        ),
        ("~data.source.sources.2", "~data.source.sources.2: there is no such key to remove"),
        ("lr", "'lr' is no override; write KEY=VALUE, or ~KEY to remove one"),
        ("--lr=3", "'--lr=3' is no override; write KEY=VALUE, or ~KEY to remove one"),
        ("~nam", "~nam: there is no such key to remove; did you mean 'name'?"),
        ("lr=[1", "lr: '[1' is not YAML"),
    ],
)
def test_bad_overrides_are_refused(word, message):
    with pytest.raises(ValueError) as error:
        overridden(word)
    assert str(error.value).startswith(message)


def test_parse_reads_the_file_and_the_overrides(tmp_path, monkeypatch):
    (tmp_path / "a.yaml").write_text(MIXTURE)
    seen = []

    @parse
    def recipe_main(config):
        """What the recipe does."""
        seen.append(config)

    words = ["--config", str(tmp_path / "a.yaml"), "data.source.sources.0.weight=5", "lr=3"]
    monkeypatch.setattr(sys, "argv", ["recipe.py", *words])
    with pytest.raises(SystemExit) as end:
        recipe_main()
    assert not end.value.code
    assert (seen[0].lr, seen[0].data.source.sources[0].weight) == (3, 5)
    assert recipe_main.__doc__ == "What the recipe does."


def test_parse_without_a_config(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["recipe.py", "lr=3"])
    with pytest.raises(SystemExit) as end:
        parse(lambda config: None)()
    assert end.value.code == 2
    assert "--config" in capsys.readouterr().err
