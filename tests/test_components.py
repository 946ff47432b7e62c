import pytest

from streampack import JSONLSource, Ledger, TokensEncoder
from streampack.components import build, resolve


def test_builds_the_whole_tree(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    node = {"inner": [{"_component_": "streampack.JSONLSource", "paths": str(tmp_path / "*.jsonl")}], "n": 3}
    built = build(node)
    assert built["n"] == 3
    assert isinstance(built["inner"][0], JSONLSource)


def test_a_nested_node_is_an_argument():
    built = build(
        {
            "_component_": "streampack.TokensEncoder",
            "tokens": {"_component_": "streampack.Ledger", "packs": 3},
        }
    )
    assert isinstance(built, TokensEncoder)
    assert built.tokens == Ledger(packs=3)


def test_injects_only_what_is_asked_for_and_not_given():
    class Tokenizer:
        def encode(self, text, add_bos, add_eos):
            raise AssertionError("nobody asked")

    tokenizer, other = Tokenizer(), Tokenizer()
    inject = {"tokenizer": tokenizer, "optimizer": None}
    assert build({"_component_": "streampack.TextEncoder"}, inject=inject).tokenizer is tokenizer
    given = {"_component_": "streampack.TextEncoder", "tokenizer": other}
    assert build(given, inject=inject).tokenizer is other
    assert build({"_component_": "streampack.TokensEncoder"}, inject=inject).tokens == "tokens"


@pytest.mark.parametrize(
    "path",
    [
        "os.system",
        "builtins.eval",
        "subprocess.Popen",
        "streampackx.Thing",
        "streampack.sources.files.os.system",  # trusted module, foreign function
        "streampack.cli.sys.exit",
        "system",
        "",
    ],
)
def test_refuses_what_is_outside_the_trusted_packages(path):
    with pytest.raises(ValueError, match="outside the trusted packages"):
        resolve(path)


def test_a_package_can_be_trusted_by_name():
    assert resolve("json.loads", trusted=("json",))
    with pytest.raises(ValueError, match="outside the trusted"):
        build({"a": {"_component_": "json.loads"}})


@pytest.mark.parametrize("path", ["streampack.Nothing", "streampack.nowhere.Thing", "torch.optim", "torch"])
def test_a_path_that_leads_nowhere(path):
    with pytest.raises(ValueError, match="leads to nothing that can be called"):
        resolve(path)


def test_a_missing_dependency_is_named_and_not_called_a_misspelling(tmp_path, monkeypatch):
    (tmp_path / "needy.py").write_text("import surely_not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="needs surely_not_installed, which is not installed"):
        resolve("needy.Thing", trusted=("needy",))


def test_arguments_that_do_not_fit_name_the_component():
    with pytest.raises(ValueError, match=r"streampack.TokensEncoder: .*'column'"):
        build({"_component_": "streampack.TokensEncoder", "column": "x"})


def test_torchtune_partials_are_trusted():
    assert callable(resolve("torchtune.datasets.alpaca_cleaned_dataset"))
