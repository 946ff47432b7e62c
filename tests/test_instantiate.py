"""What a config may name, and what it may not."""

import importlib
import json
import os
import sys
from types import ModuleType

import pytest

from streampack import TokensEncoder
from streampack.instantiate import COMPONENTS, TRUST, build, resolve, trust
from tests.harness.tiny import WordTokenizer

# Callables, public and private, of packages that hold components. Each can run code, read or write files, or open
# connections.
ATTACKS = [
    "torch.utils.collect_env.run",
    "torch.hub.load",
    "torch.load",
    "torch.ops.load_library",
    "torch.utils.cpp_extension.load",
    "torch.distributed.TCPStore",
    "torch.optim.Optimizer.load_state_dict",
    "torch.optim.lr_scheduler.warnings.warn",
    "transformers.pipeline",
    "transformers.AutoModel.from_pretrained",
    "transformers.dynamic_module_utils.get_class_from_dynamic_module",
    "torchtune.config.instantiate",
    "torchtune.data.load_image",
    "torchtune.training.metric_logging.os.system",
    "torchtune._cli.run.Run",
    "streampack.cli.main",
    "streampack.instantiate.trust",
    "streampack.training.weights.shutil.copy",
    "streampack_recipes.full_finetune.train",
    "os.system",
    "builtins.eval",
    "subprocess.Popen",
]


def test_every_attack_exists() -> None:
    for path in ATTACKS:
        parts = path.split(".")
        found = None
        for depth in range(len(parts) - 1, 0, -1):
            try:
                found = importlib.import_module(".".join(parts[:depth]))
            except ModuleNotFoundError:
                continue
            for name in parts[depth:]:
                found = getattr(found, name)
            break
        assert callable(found), path


@pytest.mark.parametrize("path", ATTACKS)
def test_no_attack_is_reachable(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TRUST)
    with pytest.raises(
        ValueError, match="is no public dotted name|not among the components that a config may name"
    ):
        resolve(path)
    node = {"_component_": path, "trusted_packages": [path.split(".")[0]]}
    with pytest.raises(ValueError, match=r"_component_ '"):
        build({"trusted_packages": [path.split(".")[0]], "a": [{"b": node}]})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"trust_remote_code": True}, "would run code of the repository's authors"),
        ({"load_dataset_kwargs": {"trust_remote_code": True}}, "would run code of the repository's authors"),
        ({"source": "pandas", "data_files": "https://host/x.pkl"}, "builder 'pandas' of datasets can run code"),
        # torchtune calls what this names.
        ({"_component_": "torchtune.models.llama3.llama3_tokenizer", "path": "tokenizer.model",
          "prompt_template": "torch.utils.collect_env.main"}, "not among the components that a config may name"),
    ],
)  # fmt: skip
def test_arguments_that_run_code_are_refused(arguments, message, monkeypatch) -> None:
    monkeypatch.delenv(TRUST)
    with pytest.raises(ValueError, match=message):
        build({"_component_": "torchtune.datasets.chat_dataset"} | arguments)


def test_every_row_of_the_table_names_public_components() -> None:
    families = ["llama2", "llama3", "qwen2_5", "gemma2", "mistral", "phi3"]
    for modules, names in COMPONENTS.items():
        if modules.startswith("bitsandbytes"):
            continue  # needs a GPU, and is not installed here
        for module in (
            [f"torchtune.models.{f}" for f in families] if r"\w+" in modules else [modules.replace("\\", "")]
        ):
            there = importlib.import_module(module)
            exported = getattr(there, "__all__", None) or [name for name in dir(there) if name[0] != "_"]
            found = []
            for name in exported:
                try:
                    found.append(resolve(f"{module}.{name}"))
                except (ValueError, ImportError):
                    continue
            assert found, f"{module}: {names}"
            assert not any(isinstance(each, ModuleType) for each in found)


def test_optimizers_and_quantizers_that_stock_configs_name() -> None:
    said = "needs bitsandbytes, which is not installed"
    for name in ("PagedAdamW", "PagedAdamW8bit"):
        with pytest.raises(ImportError, match=said):
            resolve(f"bitsandbytes.optim.{name}")
    assert resolve("torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer")
    with pytest.raises(ValueError, match="not among the components"):
        resolve("torchtune.training.quantization.quantize_")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("my_rows.build", "check the spelling, or if you trust my_rows, run with --trust my_rows"),
        ("streampack.TextEncodr", "not among the components that a config may name; check the spelling"),
        ("torch.optim.AdamV", "'torch.optim.AdamV' leads to nothing that can be called; did you mean 'Adam"),
        ("torch.optim.Zzz", "leads to nothing that can be called; check the spelling"),
        ("tests.nowhere.Thing", "leads to nothing that can be called; check the spelling"),
        ("tests.harness.tiny.WORDS", "leads to nothing that can be called; check the spelling"),
        *((path, "no public dotted name")
          for path in ("", "my_rows..build", "a.__import__", "_private.thing", 3, "system", "a b.c")),
    ],
)  # fmt: skip
def test_paths_that_lead_to_no_component_are_refused(path, said) -> None:
    with pytest.raises(ValueError) as error:
        resolve(path)
    assert said in str(error.value)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with a module `rows_of_mine`, which is not importable from elsewhere."""
    (tmp_path / "rows_of_mine.py").write_text(
        "from os import system\ndef build(n):\n    return list(range(n))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.setenv(TRUST, "")
    yield
    sys.modules.pop("rows_of_mine", None)


def test_a_trusted_module_of_the_working_directory_is_found(here) -> None:
    node = {"_component_": "rows_of_mine.build", "n": 3}
    with pytest.raises(ValueError, match="--trust rows_of_mine"):
        build(node)
    trust(["rows_of_mine"])
    assert build(node) == [0, 1, 2]
    with pytest.raises(ValueError, match="it comes from posix"):
        resolve("rows_of_mine.system")


def test_a_single_module_can_be_trusted(monkeypatch) -> None:
    monkeypatch.setenv(TRUST, "json.decoder, tests")
    assert resolve("json.decoder.JSONDecoder") is json.JSONDecoder
    with pytest.raises(ValueError, match="not among"):
        resolve("json.loads")
    assert resolve("tests.harness.tiny.WordTokenizer") is WordTokenizer
    with pytest.raises(ValueError, match="not among"):
        resolve("testsuite.tiny")


def test_trust_adds_names(monkeypatch) -> None:
    monkeypatch.setenv(TRUST, "a")
    trust(["b.c,d", "a"])
    assert os.environ[TRUST] == "a,b.c,d"
    with pytest.raises(ValueError, match=r"--trust ../x: this is no name of a package"):
        trust(["../x"])


def test_a_nested_node_is_an_argument():
    built = build(
        {
            "_component_": "streampack.TokensEncoder",
            "tokens": {"_component_": "tests.harness.tiny.WordTokenizer"},
        }
    )
    assert isinstance(built, TokensEncoder)
    assert isinstance(built.tokens, WordTokenizer)


def test_arguments_are_injected_where_they_are_missing():
    tokenizer, other = WordTokenizer(), WordTokenizer()
    inject = {"tokenizer": tokenizer, "optimizer": None}
    assert build({"_component_": "streampack.TextEncoder"}, inject=inject).tokenizer is tokenizer
    given = {"_component_": "streampack.TextEncoder", "tokenizer": other}
    assert build(given, inject=inject).tokenizer is other
    assert build({"_component_": "streampack.TokensEncoder"}, inject=inject).tokens is None


def test_a_missing_dependency_is_named(tmp_path, monkeypatch):
    (tmp_path / "needy.py").write_text("import surely_not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(TRUST, "needy")
    with pytest.raises(ImportError, match="needs surely_not_installed, which is not installed"):
        resolve("needy.Thing")


def test_arguments_that_do_not_fit_name_the_component():
    with pytest.raises(ValueError, match=r"streampack.TokensEncoder: .*'column'"):
        build({"_component_": "streampack.TokensEncoder", "column": "x"})
